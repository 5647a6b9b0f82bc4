"""T5: encoder and decoder in one stack; the same losses and gradients on every layout."""

from pathlib import Path

import jax
import numpy as np
import pytest
import short_runs
from layouts import BATCH, LENGTH, in_model_order, mesh_of, tiny, tiny_state
from masked_corpus import SIZE, corpus, vocabulary

from maxmeg import evaluate, generate
from maxmeg.config.data import Objective
from maxmeg.config.mixers import Activation
from maxmeg.config.model import Position
from maxmeg.config.parallel import Schedule
from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.data.masked.t5 import T5Dataset
from maxmeg.objectives.table import OBJECTIVES
from maxmeg.ops.attention.call import choice
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import Device
from maxmeg.parallel.placement import local_rows, place_batch
from maxmeg.step import make_gradients

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
SLOW = pytest.mark.slow
SOURCE = 2 * LENGTH
LAYERS = "2(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
MODEL = {
    **{"layers": LAYERS, "num_layers": 5, "position": Position.relative, "vocab_size": SIZE},
    **{"relative.buckets": 8, "relative.distance": 12, "attention.scale": 1.0},
    **{"mlp.activation": Activation.geglu, "dropout_hidden": 0.1, "dropout_embedding": 0.1},
    "attention.dropout": 0.1,
}
LAYOUTS = [
    pytest.param({"pipe": 2, "tensor": 2, "fsdp": 2}, 4, marks=SLOW),
    pytest.param(
        {"pipe": 2, "context": 2, "tensor": 2, "fsdp": 1, "schedule": Schedule.zero_bubble},
        4,
        marks=SLOW,
    ),
]


def gradients(folder: Path, parallel: dict, micro_batch_size: int):
    """(sums, gradients by name in model order) of one batch of corrupted spans."""
    config = tiny(MODEL, {"micro_batch_size": micro_batch_size}, **parallel)
    config.data.objective, config.data.paths = Objective.span_corruption, ("sentences",)
    config.data.source_length = SOURCE
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    lengths = SOURCE, LENGTH
    data = T5Dataset(corpus(folder), "1,0,0", 0, lengths, vocabulary())
    rows = local_rows(mesh, micro_batch_size)
    batch = place_batch(data.batch(np.arange(BATCH)[rows(BATCH)]), rows, mesh, BATCH)
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    found, sums = function(state.model, batch, state.key)
    arrays = jax.tree_util.tree_leaves_with_path(in_model_order({"model": found}))
    named = {jax.tree_util.keystr(path): np.asarray(array) for path, array in arrays}
    return OBJECTIVES[Objective.span_corruption].metrics(sums), named


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return gradients(tmp_path_factory.mktemp("one"), {"fsdp": 1}, 0)


@pytest.mark.parametrize(("parallel", "micro"), LAYOUTS)
def test_layout_equals_one_device(one_device, tmp_path, parallel, micro):
    losses, found = gradients(tmp_path, parallel, micro)
    wanted_losses, wanted = one_device
    for name, value in wanted_losses.items():
        assert float(losses[name]) == pytest.approx(float(value), rel=TOLERANCE)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.abs(array).max() > 0, name
        part = found[name][: len(array)]  # the padding of the vocabulary depends on tensor
        assert np.abs(part - array[: len(part)]).max() <= TOLERANCE * np.abs(array).max() + FLOOR


def test_relative_biases_run_in_xla_alone():
    shapes = [jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")] * 3
    bias = jax.ShapeDtypeStruct((32, 4), "bfloat16")
    call = (*shapes, ScoreSpec(causal=False, distance=128), Operands(bias_NH=bias))
    hopper = Device("cuda", (9, 0))
    name, reason = choice(call, "auto", hopper)
    assert name == "xla" and "cudnn: relative position bias is not supported" in reason
    for named in ("cudnn", "mosaic", "triton"):
        with pytest.raises(ValueError, match=rf"{named} cannot run: .* use auto or"):
            choice(call, named, hopper)


def pairs(folder: Path) -> tuple[str, ...]:
    """Prefixes of corpora of words of bytes and of the same words in capitals."""
    rng, prefixes = np.random.default_rng(0), tuple(str(folder / name) for name in "st")
    with IndexedWriter(prefixes[0], 260) as source, IndexedWriter(prefixes[1], 260) as target:
        for _ in range(60):
            words = rng.integers(97, 103, rng.integers(4, 12))
            source.add_document(words, [len(words)])
            target.add_document(words - 32, [len(words)])
    return prefixes


@SLOW
def test_a_resumed_run_on_pairs_is_bitwise_the_uninterrupted(tmp_path, capsys):
    def run(folder: Path, steps: int) -> None:
        config = short_runs.config("", folder, steps, MODEL | {"vocab_size": 0}, {"fsdp": 8})
        config.data.objective, config.data.paths = Objective.seq2seq, pairs(tmp_path)
        config.data.tokenizer = "bytes?pad=<pad>&bos=<s>"
        config.data.sequence_length, config.data.source_length = 16, 32
        short_runs.main(config)

    whole, resumed, first, last = tmp_path / "whole", tmp_path / "again", 2, 4
    run(whole, last)
    short_runs.copy_run(whole, resumed, first)
    run(resumed, last)
    assert short_runs.digests(resumed, last) == short_runs.digests(whole, last)
    losses = [[row["loss"] for row in short_runs.curve(folder)] for folder in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == last
    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=str(whole), split="test"))
    assert "test loss" in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not generate from an encoder-decoder"):
        generate.main(generate.Options(prompt=("one",), run_dir=str(whole)))
