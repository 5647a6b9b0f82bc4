"""Matrices of compressed-tensors whose codes are packed here by hand, and folders that are refused.
tests/oracle compares every format with the package, test_quantize the formats of exports."""

import numpy as np
import pytest
from fp8_folders import E4M3
from test_fp8 import Held

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.formats.quantized import dequantized

OUT, IN, GROUP = 9, 22, 8
GROUPS = np.random.default_rng(0).permutation(np.arange(IN) // GROUP).astype("i4")
SCALES = np.arange(1, OUT * 3 + 1, dtype="f4").reshape(OUT, 3) / 7
WEIGHTS = {"num_bits": 3, "strategy": "group", "group_size": GROUP, "symmetric": False}


def packed(codes):
    """Integers from -4 to 3 as streams of 3 bits per row, in words of 32."""
    streams = [sum(int(c + 4) << 3 * at for at, c in enumerate(row)) for row in codes]
    count = -(-codes.shape[1] * 3 // 32) * 4
    return np.array([np.frombuffer(n.to_bytes(count, "little"), "<i4") for n in streams])


def config(**changes):
    group = {"targets": ["re:.*y$", "x"], "weights": WEIGHTS, "input_activations": {"num_bits": 8}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    said |= {"config_groups": {"group_0": group}, "kv_cache_scheme": {"num_bits": 8}}
    return {"hidden_size": 1, "quantization_config": said | changes}


def arrays(**changes):
    codes = np.random.default_rng(0).integers(-4, 4, (OUT, IN))
    zeros = np.random.default_rng(1).integers(-4, 4, (OUT, 3))
    parts = {"packed": packed(codes), "scale": SCALES, "shape": np.array([OUT, IN])}
    parts |= {"zero_point": packed(zeros.T).T, "g_idx": GROUPS} | changes
    held = {f"x.weight_{part}": array for part, array in parts.items() if array is not None}
    held |= {"norm.weight": SCALES, "x.input_scale": SCALES, "attn.k_scale": SCALES}
    return held, ((codes - zeros[:, GROUPS]).astype("f4") * SCALES[:, GROUPS])


def test_columns_have_zero_points_and_scales_of_their_groups():
    held, wanted = arrays()
    rest, weights, notes = dequantized(config(), Held(**held))
    assert rest == {"hidden_size": 1} and [*weights.tensors] == ["x.weight", "norm.weight"]
    assert weights.tensors["x.weight"] == TensorInfo(np.dtype("f4"), (OUT, IN))
    assert weights.read("x.weight").tobytes() == wanted.tobytes()
    assert notes == (
        "quantized weights (3-bit integers per group) are dequantized",
        "activations are not quantized: input_activations, kv_cache_scheme passed over",
    )


GROUP_0 = {"targets": ["x"], "weights": WEIGHTS}
REFUSED = {
    "sparse": (config(format="marlin-24"), {}, "format='marlin-24': read are int-quantized"),
    "bitmask": (
        config(sparsity_config={"format": "sparse-24-bitmask"}),
        {},
        "sparsity_config=.*sp",
    ),
    "rotated": (config(transform_config={"config_groups": {"R1": {}}}), {}, "transform_config="),
    "no groups": (config(config_groups=None), {}, "config_groups=None: groups with"),
    "preset": (config(config_groups={"W4A16": ["Linear"]}), {}, "W4A16=.*must have targets"),
    **{
        f"{value}": (
            config(config_groups={"g": {"targets": [target], "weights": WEIGHTS | value}}),
            {},
            text,
        )
        for target, value, text in (
            ("x", {"num_bits": 9}, "read are 1 to 8 bits"),
            ("x", {"type": "float"}, "4, 6 or 8 bits"),
            ("x", {"group_size": 0}, "strategy=group needs the sizes"),
            ("x", {"strategy": "block", "block_structure": [4]}, "strategy=block needs"),
            ("re:(", {"num_bits": 4}, "must be a regular expression"),
            ("re:z", {"num_bits": 3}, "no target .* matches it"),
        )
    },
    "other bits": (config(), {"packed": np.zeros((OUT, 4), "i4")}, r"int32\[9, 4\].*no matrix"),
    "no scale": (config(), {"scale": None}, "no matrix of 3-bit integers per group"),
    "scales": (config(), {"scale": SCALES[:, :2]}, r"scale float32\[9, 2\].*no matrix"),
    "fp8 scale": (config(), {"scale": SCALES.astype(E4M3)}, "no matrix"),
    "groups": (config(), {"g_idx": GROUPS + 1}, "g_idx has 3, of 3 groups"),
    "infinite": (config(), {"scale": SCALES * np.inf}, "not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_folders_are_refused(case):
    said, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        dequantized(said, Held(**arrays(**changes)[0]))[1].read("x.weight")
