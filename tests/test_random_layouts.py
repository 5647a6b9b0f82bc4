"""Random models on random meshes of eight devices give one device's loss and gradients."""

import itertools
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from layouts import BATCH, LENGTH, assert_equal_but_rounding, model_gradients, tiny

from maxmeg.config.layers import OVERLAPPED
from maxmeg.config.mixers import (
    Activation,
    ExpertBackend,
    ExpertExchange,
    QkNorm,
    RouterScore,
    TensorOverlap,
)
from maxmeg.config.model import ModelConfig, Norm, NormPlace, Position
from maxmeg.config.parallel import Schedule
from maxmeg.config.quantization import QuantizationConfig, QuantizationRecipe
from maxmeg.config.schema import LossBackend

POSITIONS = tuple(p for p in Position if p is not Position.relative)  # that is for encoder-decoders
TOLERANCE = 3e-5  # relative, float32: the order of sums differs; delta rules amplify rounding
FLIPPED = 0.2  # with 8-bit products: single numbers, or parts of a sum, round to other codes
SAME_LOSS = 1e-3  # relative, with 8-bit products
FLOOR = 1e-8  # for gradients that are zero in exact arithmetic
POOL = 100  # runs to choose from
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
SIZES = itertools.product((1, 2, 4), *[(1, 2, 4, 8)] * 2, (1, 2, 4), (1, 2, 4), (1, 2, 4))
MESHES = [dict(zip(AXES, sizes, strict=True)) for sizes in SIZES if math.prod(sizes) == 8]
# What settings are drawn from. Left out are those whose meaning depends on the layout: the balance
# loss over a microbatch, capacity, and means over microbatches.
BOTH = (False, True)
BACKENDS = (LossBackend.xla, LossBackend.tiled)
TRAIN = {"z_loss": (0.0, 1e-3), "label_smoothing": (0.0, 0.1), "loss_backend": BACKENDS}
NONE = QuantizationRecipe.none
GENERAL = {
    **{"norm": Norm, "norm_place": NormPlace, "norm_one_plus": BOTH},
    **{"position": POSITIONS, "embedding_scale": (1.0, 3.0), "dropout_embedding": (0.0, 0.1)},
    **{"tied": BOTH, "logit_softcap": (0.0, 5.0), "mtp.num_layers": (0, 0, 1)},
    "mup.base_hidden_size": (0, 16),
    "dropout_hidden": (0.0, 0.2),
    "recompute": ("minimal", "selective", "full", "query,mlp_up"),
}
SCORES = {
    **dict.fromkeys(("attention.bias_qkv", "attention.bias_out", "attention.sinks"), BOTH),
    **{"attention.softcap": (0.0, 5.0), "attention.dropout": (0.0, 0.1)},
}
HEADS = SCORES | {"attention.num_kv_heads": (0, 1, 2, 4), "attention.qk_norm": QkNorm}
MLA = SCORES | {"mla.kv_rank": (16,), "mla.query_rank": (0, 16), "mla.rotary_size": (2, 4)}
WINDOW = {"attention.window": (5, 9)}
MLP = {"mlp.ffn_size": (64,), "mlp.activation": Activation, "mlp.bias": BOTH}
MOE = MLP | {
    **{"moe.num_experts": (8,), "moe.top_k": (2, 3), "moe.score": RouterScore},
    **{"moe.ffn_size": (32,), "moe.shared_ffn_size": (0, 32), "moe.latent_size": (0, 16)},
    **{"moe.sequence_aux_loss": (0.0, 0.1), "moe.z_loss": (0.0, 0.01), "moe.jitter": (0.0, 0.1)},
    **{"moe.normalize_weights": BOTH, "moe.bias_balancing": BOTH, "moe.logit_bias": BOTH},
}
STRATEGIES = ("auto", "ring", "exchange", "gather", "hierarchy")
CONTEXTS = ("1", "2", "4")
CONV = {"conv.kernel_size": (1, 3, 4), "conv.bias": BOTH}
# Kernels no longer than a chunk of a sequence that is cut over four devices.
MAMBA = {
    **{"mamba.num_groups": (1, 4), "mamba.head_dim": (16,), "mamba.state_size": (6,)},
    **{"mamba.kernel_size": (2, 3), "mamba.chunk": (4,), "mamba.min_step": (0.0, 0.01)},
    **dict.fromkeys(("mamba.bias", "mamba.conv_bias", "mamba.norm"), BOTH),
}
DELTA = {
    **{"delta.num_heads": (8,), "delta.key_size": (6,), "delta.value_size": (0, 4)},
    **{"delta.kernel_size": (2, 3), "delta.chunk": (4,), "delta.num_key_heads": (0, 4)},
}
KDA = DELTA | {"delta.rank": (3,), "delta.value_size": (0,), "delta.num_key_heads": (0,)}
READ = {"mamba": MAMBA, "gated_delta": DELTA, "kda": KDA}
READ |= {"attention": HEADS, "local": HEADS | WINDOW, "mla": MLA, "local_mla": MLA | WINDOW}
READ |= {"conv": CONV, "mlp": MLP, "moe": MOE}
KINDS = (
    ("attention", "local", "conv", "mamba", "gated_delta"),
    ("mla", "local_mla", "conv", "mamba", "kda"),
)
WITHOUT_SCORES = {"conv", "mamba", "gated_delta", "kda"}


@st.composite
def runs(draw, contexts: tuple[int, ...]) -> tuple[dict, dict, dict, bool]:
    """(model settings, train settings, mesh, whether rows hold two documents); all are valid."""

    def one_of(values):
        return draw(st.sampled_from(values))

    mesh = dict(one_of([mesh for mesh in MESHES if mesh["context"] in contexts]))
    replicas, context = mesh["data"] * mesh["fsdp"] * mesh["expert"], mesh["context"]
    if context > 1:
        mesh["fsdp_context"] = one_of(BOTH)
        mesh["context_strategy"] = one_of(STRATEGIES if context > 2 else STRATEGIES[:-1])
        if mesh["expert"] > 1 or one_of(BOTH):  # experts lie along context too
            mesh["expert"] *= context
    if mesh["expert"] > 1:
        mesh["expert_exchange"] = one_of(ExpertExchange)
        if mesh["expert_exchange"] is not ExpertExchange.gather:
            mesh["expert_buffer"] = one_of((1.0, 1.5, 3.0))
        if mesh["tensor"] > 1 and one_of(BOTH):  # experts lie along tensor too
            mesh["expert_tensor"] = mesh["tensor"] // 2
            mesh["expert"] *= 2
    mesh["zero1"] = one_of(BOTH)
    kinds = one_of(KINDS)
    unit = []
    for number in range(one_of((1, 2))):
        feed = one_of(("moe",) if mesh["expert"] > 1 and number == 0 else ("mlp", "moe"))
        unit.append(one_of(kinds) + ("," if feed == "moe" else one_of(",+")) + feed)
    sublayers = [set(names.split("+")) for layer in unit for names in layer.split(",")]
    if mesh["tensor"] > 1 and any(names <= OVERLAPPED for names in sublayers):
        mesh["tensor_overlap"] = one_of(TensorOverlap)
    gathers = mesh.get("context_strategy") in ("auto", "gather")
    if gathers and not any(names & WITHOUT_SCORES for names in sublayers):
        mesh["context_chunks"] = one_of((0, 4))
    repeats, first = one_of((1, 2, 3)), []
    rounds = 1  # what the number of microbatches must divide by
    if mesh["pipe"] > 1:
        mesh["schedule"] = one_of(Schedule)
        if mesh["schedule"] is Schedule.one_f_one_b and one_of(BOTH):
            mesh["chunks"], rounds = 2, mesh["pipe"]
        mesh["pad_layers"] = one_of(BOTH)
        repeats = mesh["pipe"] * mesh.get("chunks", 1) * 2 - mesh["pad_layers"]
        if not mesh["pad_layers"] and one_of(BOTH):  # stages balanced by cost
            first = ["mlp"]
    rows = BATCH // replicas
    sizes = [n for n in range(1, rows + 1) if rows % (n * rounds) == 0]
    train = {"micro_batch_size": one_of(sizes if mesh["pipe"] > 1 else [0, *sizes])}
    train |= {name: one_of(values) for name, values in TRAIN.items()}
    recipes = (NONE, NONE, QuantizationRecipe.tensorwise, QuantizationRecipe.delayed)
    if mesh["tensor"] == mesh["fsdp"] == mesh["context"] == 1 and "moe" not in str(unit):
        recipes = (NONE, QuantizationRecipe.blockwise, QuantizationRecipe.mxfp8)  # whole blocks
    # Over context devices make keys of the same latents, and each rounds its part of the gradient.
    parts = context > 1 and "mla" in str(unit)
    if mesh.get("tensor_overlap") is not TensorOverlap.on and not parts:
        train["quantization"] = QuantizationConfig(one_of(recipes))
    layers = [*first, f"*({' '.join(unit)})"]
    model = {"layers": " ".join(layers), "num_layers": len(first) + len(unit) * repeats}
    mixers = {mixer for layer in [*first, *unit] for mixer in layer.replace("+", ",").split(",")}
    choices = GENERAL.copy()
    for mixer in sorted(mixers):
        choices |= READ[mixer]
    model |= {name: one_of(values) for name, values in choices.items()}
    if "moe" in mixers and mesh.get("expert_exchange") is not ExpertExchange.ragged:
        exchanged = mesh["expert"] > 1 and mesh["expert_exchange"] is not ExpertExchange.gather
        model["moe.backend"] = one_of((ExpertBackend.xla, ExpertBackend.batched))
        if model["moe.backend"] is ExpertBackend.batched and not exchanged:
            mesh["expert_buffer"] = one_of((1.0, 1.5, 3.0))
    if mixers <= {*WITHOUT_SCORES, "mlp", "moe"}:
        model["attention.num_heads"] = ModelConfig().attention.num_heads  # nothing reads it
    if context > 2 and "conv" in mixers:
        model["conv.kernel_size"] = 3  # no longer than a chunk
    if "moe" in mixers and one_of(BOTH):
        model |= {"moe.num_groups": 4, "moe.topk_groups": 2}
    if model["position"] is Position.learned:
        model["max_position"] = LENGTH
    after = (NormPlace.post, NormPlace.post_residual)
    if "+" in model["layers"] and model["norm_place"] not in after:
        model["parallel_norms"] = one_of(BOTH)
    return model, train, mesh, one_of(BOTH)


def documents() -> dict[str, np.ndarray]:
    """Rows of two documents, the positions in each from 0 on."""
    cuts_B1 = np.random.default_rng(1).integers(1, LENGTH, (BATCH, 1))
    places_L = np.arange(LENGTH)
    positions_BL = np.where(places_L < cuts_B1, places_L, places_L - cuts_B1)
    segments_BL = 1 + (places_L >= cuts_B1)
    return {"positions": np.int32(positions_BL), "segment_ids": np.int32(segments_BL)}


def check_run(model: dict, train: dict, mesh: dict, is_packed: bool) -> None:
    extra = documents() if is_packed else {}
    whole = tiny(model, train | {"micro_batch_size": 0}, fsdp=1)
    (loss, found), (wanted_loss, wanted) = (
        model_gradients(config, **extra) for config in (tiny(model, train, **mesh), whole)
    )
    is_exact = train.get("quantization", QuantizationConfig()).recipe is NONE
    same_loss, same = (TOLERANCE, TOLERANCE) if is_exact else (SAME_LOSS, FLIPPED)
    assert_equal_but_rounding(({}, found), ({}, wanted), same, FLOOR)
    assert loss == pytest.approx(wanted_loss, rel=same_loss)


def facts(run: tuple[dict, dict, dict, bool]) -> set[tuple[str, str]]:
    """(setting, value) of a run; layers by the mixers they hold, axes by whether they are split."""
    model, train, mesh, is_packed = run
    words = {(word, "") for word in re.findall(r"\w+|[+]", model["layers"])}
    settings = {**model, **train, **mesh, "packed": is_packed}
    settings["quantization"] = train.get("quantization", QuantizationConfig()).recipe.value
    for name in ("layers", "num_layers", "micro_batch_size"):
        settings.pop(name, None)
    axes = {(name, str(settings.pop(name) > 1)) for name in AXES}
    return words | axes | {(name, str(value)) for name, value in settings.items()}


def covering_runs(count: int, contexts: tuple[int, ...]) -> list:
    """Of POOL random runs, `count` that greedily cover the most pairs of settings."""
    pool = []

    @settings(max_examples=POOL, derandomize=True, phases=[Phase.generate], database=None)
    @given(runs(contexts))
    def draw(run):
        pool.append((run, set(itertools.combinations(sorted(facts(run)), 2))))

    draw()
    chosen, covered = [], set()
    for _ in range(count):
        run, pairs = max(pool, key=lambda entry: len(entry[1] - covered))
        chosen.append(run)
        covered |= pairs
    return chosen


@pytest.mark.slow
def test_random_layouts_equal_one_device():
    """In a process of its own, which goes on with the next run: XLA's CPU runtime may deadlock in a
    program with many collectives, and then aborts (benchmarks/NOTES.md). No run may do so twice."""
    count, first, tries = 3, 0, 0
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=120"
    environ = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}"}
    command = [
        sys.executable,
        "-c",
        "import sys, test_random_layouts as t; t.check_from(*sys.argv)",
    ]
    while first < count:
        arguments = [*command, str(first), str(count), *CONTEXTS]
        ended = subprocess.run(
            arguments, env=environ, cwd=Path(__file__).parent, capture_output=True, text=True
        )
        done = ended.stdout.count("equal")
        tries = tries + 1 if done == 0 else 0
        first += done
        deadlock = ended.returncode == -signal.SIGABRT and "rendezvous" in ended.stderr
        assert ended.returncode == 0 or (deadlock and tries < 2), ended.stderr[-5000:]


def check_from(_: str, first: str, count: str, *contexts: str) -> None:
    """Check the runs from `first` on, and print a word for each. conftest.py is not loaded here."""
    settings.register_profile("busy machine", suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")
    for run in covering_runs(int(count), tuple(map(int, contexts)))[int(first) :]:
        check_run(*run)
        print("equal", flush=True)
