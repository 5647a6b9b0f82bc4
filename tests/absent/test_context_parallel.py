"""The train step with context parallelism, compiled for H100s that are not here, and its plan."""

import dataclasses
import re
import tempfile
from pathlib import Path

import pytest

from maxmeg.config.architectures import use_architecture
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.planning import hlo
from maxmeg.planning.analytic import analyze
from maxmeg.planning.compile import compile_report
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.report import Analytic, Compiled

CONTEXT, LAYERS, LENGTH, WINDOW = 8, 2, 2**17, 1024
PIECE = LENGTH // CONTEXT * 8 * 256 * 2  # bytes of keys and values: 8 heads of 2 x 128, bf16
NEAR = 0.06  # planned over compiled memory


def config_of(name: str, fields: dict, length: int = LENGTH, **parallel) -> Config:
    """One row of an architecture; all devices lie along context."""
    sizes = ParallelConfig(**{"context": CONTEXT} | parallel)
    train = TrainConfig(global_batch_size=1, micro_batch_size=1)
    config = use_architecture(Config(parallel=sizes, train=train), name)
    config.data.sequence_length = length
    config.data.reset_attention_mask = bool(sizes.context_chunks)
    config.model = dataclasses.replace(config.model, recompute="selective", max_position=length)
    config.model = with_fields(config.model, fields)
    return config


def compiled(config: Config) -> tuple[Compiled, Analytic, str]:
    """The report, the plan and the text."""
    gpus = config.parallel.context
    planned = analyze(config, parse_cluster(f"h100x{gpus}"))
    with tempfile.NamedTemporaryFile() as file:
        report = compile_report(config, "h100", gpus, file.name)
        text = Path(file.name).read_text()
    assert planned.fits and report.fits and not re.search(r" conditional\(", text)
    return report, planned, text


def sent(report: Compiled, planned: Analytic, kind: str, share: float = 1.0) -> list:
    """Return the compiled collectives of one kind, after comparing them with the plan.

    share: fraction of their bytes that a device sends to others."""
    rows = [row for row in report.collectives if row.kind == kind]
    assert {row.axes for row in rows} == {("context",)}
    expected = [row for row in planned.traffic if row.kind == kind]
    assert sum(row.runs for row in rows) == sum(row.runs for row in expected)
    assert sum(row.volume for row in rows) * share == sum(row.volume for row in expected)
    assert planned.total == pytest.approx(report.total, rel=NEAR)
    return rows


def attention_calls(report: Compiled) -> set[int]:
    return {n for name, n in report.kernels.items() if name.startswith("__cudnn")}


def test_a_ring_runs_beside_attention():
    """Per layer CONTEXT - 1 transfers of keys and values forward and backward, and of their float32
    gradients; one attention call a round. Exposed is one transfer of backward."""
    report, planned, text = compiled(config_of("llama3-8b", {"num_layers": LAYERS}))
    rows = sent(report, planned, "collective-permute")
    assert all(row.asynchronous for row in rows)
    assert sum(row.runs for row in rows) == 3 * (CONTEXT - 1) * LAYERS
    assert sum(row.volume for row in rows) == (1 + 1 + 2) * (CONTEXT - 1) * PIECE * LAYERS
    assert sum(row.exposed for row in rows) == LAYERS
    assert attention_calls(report) == {CONTEXT * LAYERS}
    beside = hlo.flops_beside(hlo.parse(text))
    attention = 2 * 2 * 2 * (LENGTH // 16) ** 2 * 32 * 128  # two pairs of halves, q k and p v
    least = sorted(flops for name, flops in beside.items() if "permute" in name)
    assert least[2] >= attention  # but for the exposed one, and one beside a projection


def test_a_window_reads_its_halos():
    """Forward, again in backward, and float32 gradients: a halo before either half."""
    fields = {"num_layers": LAYERS, "attention.window": WINDOW}
    report, planned, _ = compiled(config_of("mistral-7b-v0.1", fields))
    rows = sent(report, planned, "collective-permute")
    tokens = PIECE // (LENGTH // CONTEXT)
    assert sum(row.runs for row in rows) == 6 * LAYERS
    assert sum(row.volume for row in rows) == LAYERS * 2 * WINDOW * tokens * (1 + 1 + 2)
    assert attention_calls(report) == {2 * LAYERS}  # all in cuDNN: halves, and halos


def test_an_exchange_of_heads_is_as_planned():
    config = config_of("llama3-8b", {"num_layers": LAYERS}, context_strategy="exchange")
    report, planned, _ = compiled(config)
    sent(report, planned, "all-to-all", (CONTEXT - 1) / CONTEXT)


def test_chunks_of_chosen_owners_need_one_kernel_call():
    """Documents: forward, again in backward, and gradients of queries and of keys and values."""
    fields = {"num_layers": LAYERS, "recompute": "full"}
    fields["attention.backend"] = AttentionBackend.mosaic
    report, _, _ = compiled(config_of("llama3-8b", fields, context_chunks=8))
    assert report.kernels["mosaic_gpu_v2"] == 4 * LAYERS
    assert not any(row.kind == "collective-permute" for row in report.collectives)


@pytest.mark.parametrize(
    ("length", "gpus", "strategy"), [(LENGTH, 8, "ring"), (2**20, 64, "hierarchy")]
)
def test_llama_8b_trains_on_long_rows_with_selective_recomputation(length, gpus, strategy):
    """One row on all GPUs, the weights sharded over context: no device holds a copy of them."""
    parallel = {"context": gpus, "context_strategy": strategy, "fsdp_context": True}
    report, planned, _ = compiled(config_of("llama3-8b", {}, length, **parallel))
    assert planned.total == pytest.approx(report.total, rel=NEAR)
