"""Patterns of layers: what they describe, how they are grouped, and what cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxmeg.config.layers import (
    MIXERS,
    grouped,
    one_layer,
    parse,
    pattern_of,
    places,
)

ATTENTION, LOCAL = (("attention",), ("mlp",)), (("local",), ("mlp",))
SPARSE, BLOCK = (("attention",), ("moe",)), (("attention", "mlp"),)
MEANINGS = {  # pattern, num_layers -> layers
    ("*(attention,mlp)", 3): (ATTENTION,) * 3,
    (" *( attention,mlp )", 2): (ATTENTION,) * 2,
    ("*(2(local,mlp) attention,mlp)", 4): (LOCAL, LOCAL, ATTENTION, LOCAL),
    ("2(attention,mlp) *(attention,moe)", 5): (ATTENTION,) * 2 + (SPARSE,) * 3,
    ("attention,mlp attention,moe", 2): (ATTENTION, SPARSE),
    ("2(2(attention) mlp)", 6): ((("attention",),), (("attention",),), (("mlp",),)) * 2,
    ("*-|*E", 4): ((("attention",),), (("mlp",),), (("attention",),), (("moe",),)),
    ("MG+", 3): ((("mamba",),), (("gated_delta",),), (("mla",),)),
}


@pytest.mark.parametrize(("pattern", "num_layers"), MEANINGS)
def test_a_pattern_describes_layers(pattern, num_layers):
    assert parse(pattern, num_layers) == MEANINGS[pattern, num_layers]


@pytest.mark.parametrize(
    ("pattern", "num_layers", "message"),
    [
        ("*(attention,mlp", 4, r"at character 16, its end: expected ' ', ',', '\+' or '\)'"),
        ("attention mlp,", 4, "at character 15, its end: expected a mixer, one of attention"),
        ("*(attn,mlp)", 4, r"unknown mixer 'attn': did you mean attention, .*There are"),
        ("", 4, "at character 1, its end: expected a layer"),
        ("*(mlp) *(mlp)", 4, r"at character 8, '\*': expected only one \*\(...\)"),
        ("2(*(mlp))", 4, r"at character 3, '\*': expected a number: .* within parentheses"),
        ("mlp (mlp)", 4, r"at character 5, '\(': expected a number of repeats, or \*, before"),
        ("0(mlp)", 4, "at character 1, '0': expected a number of repeats"),
        ("99999(mlp)", 4, "expected a number of repeats from 1 to 10000"),
        ("mlp+mlp", 4, "mlp stands twice in a sublayer"),
        ("*(mlp))", 4, r"at character 7, '\)'"),
        ("M-DD", 4, "has the letters D, which no mixer has: use M \\(mamba\\), G "),
        ("M*E/*E/*E", 3, "'M.E', model.mtp.num_layers=2 and model.mtp.layers='.E'"),
        ("3(mlp)", 4, "describes 3 layers and model.num_layers is 4: set num_layers=3"),
        ("3(attention,mlp) *(mlp)", 3, "num_layers=3 must be at least 4"),
    ],
)
def test_invalid_patterns_are_refused_with_the_position(pattern, num_layers, message):
    with pytest.raises(ValueError, match=message):
        parse(pattern, num_layers)


@given(st.text(alphabet="*()+,- |0123MEattentionmlpmoelocal", max_size=30), st.integers(1, 9))
def test_a_pattern_is_read_or_refused(pattern, num_layers):
    try:
        layers = parse(pattern, num_layers)
    except ValueError as error:
        assert "model.layers=" in str(error)
    else:
        assert len(layers) == num_layers
        assert {name for layer in layers for one in layer for name in one} <= {*MIXERS}


@given(st.lists(st.sampled_from([ATTENTION, LOCAL, SPARSE, BLOCK]), min_size=1, max_size=16))
def test_grouped_layers_and_their_pattern_give_the_same_layers(layers):
    groups = grouped(tuple(layers))
    assert [layer for unit, repeats in groups for _ in range(repeats) for layer in unit] == layers
    assert list(parse(pattern_of(layers), len(layers))) == layers
    found = places(groups)
    assert len(set(found)) == len(layers)
    for layer, place in zip(layers, found, strict=True):
        unit, repeats = groups[place.group]
        sublayers = [one for each in unit for one in each]
        assert tuple(sublayers[place.sublayer :][: len(layer)]) == layer and place.repeat < repeats


@pytest.mark.parametrize(
    ("pattern", "num_layers", "sizes"),
    [
        ("*(local,mlp attention,mlp)", 3, [(2, 1), (1, 1)]),
        ("3(mla,mlp) *(mla,moe)", 61, [(1, 3), (1, 58)]),
        ("*(attention,moe 2(attention,mlp))", 2, [(2, 1)]),
        ("attention,mlp 2(attention,moe) attention,mlp attention,moe", 5, [(1, 1), (1, 2), (2, 1)]),
        ("*-*-*-*--*-*-*-*-", 17, [(2, 4), (1, 1), (2, 4)]),
    ],
)
def test_repeats_are_compiled_once(pattern, num_layers, sizes):
    found = [(len(unit), repeats) for unit, repeats in grouped(parse(pattern, num_layers))]
    assert found == sizes


@pytest.mark.parametrize("pattern", ["attention,moe", "*E"])
def test_an_mtp_layer_is_one_layer(pattern):
    assert one_layer(pattern) == (("attention",), ("moe",))


@pytest.mark.parametrize("pattern", ["2(mlp)", "mlp attention", "mlp;", "*D", "*|E", "attn"])
def test_other_patterns_are_refused_by_the_setting_of_mtp(pattern):
    with pytest.raises(ValueError, match=r"^model\.mtp\.layers='.*; .* describes one layer"):
        one_layer(pattern)
