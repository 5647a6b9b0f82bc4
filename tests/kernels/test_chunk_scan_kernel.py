"""The chunked scan's kernels by Mosaic-GPU's interpreter on the CPU, with its race detection.

What runs, through the op, is the kernel's own program: copies, rings, barriers, masks, stores.
Replaced is the instruction wgmma (interpreted_products). Warpgroups have 8 rows here instead of 64,
or 16 with the delta rule.
tests/absent/test_chunk_scan_memory.py compiles the kernels.
"""

import jax
import pytest
from interpreted_products import interpret, replace_products
from ops.chunk_scan_cases import TOLERANCE, Case, arrays_of, error, expected, run

import maxmeg.ops.backend as choice
from maxmeg.config.model import ModelConfig
from maxmeg.config.model_rules import delta_problems, mamba_problems
from maxmeg.config.recurrent import (
    DELTA_KERNEL_SIZES,
    SCAN_KERNEL_SIZES,
    DeltaConfig,
    MambaConfig,
    ScanBackend,
)
from maxmeg.kernels import chunk_scan as kernel
from maxmeg.kernels import chunk_scan_backward as backward_kernel
from maxmeg.kernels import delta_scan, delta_scan_backward
from maxmeg.ops import chunk_scan as module
from maxmeg.ops.backend import Device
from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan

ROWS = {"mamba": 8, "delta": 16}  # of a warpgroup; a chunk has 16 tokens
SIZES = {"rows": 1, "groups": 1, "heads": 2, "state": 16, "value": 16}
CASES = {
    "documents in three chunks, an initial state": Case(length=42, **SIZES, seed=3),
    "delta rule, documents, an odd number of chunks, two consumers": Case(
        "delta", length=40, **SIZES | {"value": 32}, decay=0.1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_recurrence_without_a_race(name: str, monkeypatch):
    """With one slot in each ring."""
    case = CASES[name]
    sizes = case.state, case.value
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    monkeypatch.setattr(
        module.chunk_mosaic, "kernel_sizes", lambda inputs: inputs.state_BHNP.shape[2:]
    )
    monkeypatch.setattr(kernel, "WARPGROUP_ROWS", ROWS[case.kind])
    monkeypatch.setattr(kernel, "STAGES", {sizes: 1})
    monkeypatch.setattr(backward_kernel, "STAGES", {sizes: 1})
    monkeypatch.setattr(backward_kernel, "PROGRAMS", 1)
    monkeypatch.setattr(delta_scan, "PROGRAMS", 2)
    monkeypatch.setattr(delta_scan, "SIZES", (sizes,))
    monkeypatch.setattr(delta_scan, "STAGES", {1: 1, 2: 1})
    replace_products(monkeypatch)
    arrays, segments = arrays_of(case, "bfloat16")
    actual, race = interpret(lambda: run(case, arrays, segments, "mosaic"), monkeypatch)
    assert not race
    wanted = expected(case, arrays, segments)
    errors = {name: error(actual[name], wanted[name]) for name in wanted}
    assert all(error <= TOLERANCE["bfloat16"] for error in errors.values()), errors


@pytest.mark.parametrize(
    ("kind", "sizes"), [("mamba", (100, 80)), ("mamba", (256, 128)), ("delta", (100, 80))]
)
def test_sizes_that_kernels_do_not_take_are_padded_and_heads_split(kind, sizes, monkeypatch):
    """Kernels are replaced by XLA's form of the sizes that reach them."""
    taken, supported = [], {"mamba": tuple(kernel.STAGES), "delta": delta_scan.SIZES}[kind]

    def scan(inputs, beta, docs):
        *arrays, state = inputs
        taken.append((arrays[1].shape[-1], arrays[2].shape[-1]))
        return chunk_scan(*arrays, beta, docs, state, ScanSpec(16, "xla"))

    def gradients(inputs, beta, docs, slopes):
        return jax.vjp(lambda *arrays: scan(*arrays, docs), inputs, beta)[1](slopes)

    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    for forward, backward in ((kernel, backward_kernel), (delta_scan, delta_scan_backward)):
        monkeypatch.setattr(forward, "scan_refuses", lambda *_: "")
        monkeypatch.setattr(forward, "scan", scan)
        monkeypatch.setattr(backward, "gradients", gradients)
    case = Case(kind, rows=1, length=20, groups=2, state=sizes[0], value=sizes[1], seed=4)
    arrays, segments = arrays_of(case, "float32")
    actual, wanted = run(case, arrays, segments, "mosaic"), expected(case, arrays, segments)
    errors = {name: error(actual[name], wanted[name]) for name in wanted}
    assert all(error <= TOLERANCE["float32"] for error in errors.values()), errors
    assert set(taken) <= set(supported)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": 300}, "state size 300 is more than 256 or head dim 64 is more than 128"),
        ({"value": 160}, "state size 128 is more than 256 or head dim 160 is more than 128"),
        ({"kind": "delta", "state": 130}, "state size 130 is more than 128 or head dim 64"),
        ({"kind": "delta", "value": 160}, "head dim 160 is more than 128"),
        ({"kind": "kda"}, r"decays of channels \(kda\) are not supported"),
        ({"kind": "channels"}, r"decays of channels \(kda\) are not supported"),
    ],
)
def test_what_the_kernel_cannot_scan_is_refused(change, words, monkeypatch):
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    case = Case(**{"state": 128, "value": 64, "length": 8} | change)
    for dtype, why in (("bfloat16", words), ("float32", "not all bfloat16|not supported")):
        with pytest.raises(ValueError, match=f"mosaic cannot run: .*({why}).*; use auto or xla"):
            run(case, *arrays_of(case, dtype), "mosaic")


def test_the_setting_is_checked_with_the_sizes():
    assert {max(sizes) for sizes in zip(*kernel.STAGES, strict=True)} == set(SCAN_KERNEL_SIZES)
    for change, wrong in (({}, 0), ({"state_size": 257}, 1), ({"head_dim": 256}, 1)):
        mamba = MambaConfig(backend=ScanBackend.mosaic, **change)
        model = ModelConfig(layers="*(mamba)", hidden_size=512, mamba=mamba)
        problems = [problem for problem in mamba_problems(model) if "backend" in problem]
        assert len(problems) == wrong and all("set backend=auto" in one for one in problems)
    assert {max(sizes) for sizes in zip(*delta_scan.SIZES, strict=True)} == set(DELTA_KERNEL_SIZES)
    for mixer, change, wrong in (
        ("gated_delta", {}, 0),
        ("gated_delta", {"key_size": 129, "value_size": 64}, 1),
        ("gated_delta", {"value_size": 129}, 1),
        ("kda", {}, 1),
    ):
        delta = DeltaConfig(backend=ScanBackend.mosaic, **change)
        model = ModelConfig(layers=f"*({mixer})", delta=delta)
        problems = list(delta_problems(model))
        assert len(problems) == wrong and all("set backend=auto" in one for one in problems)
