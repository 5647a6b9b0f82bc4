"""The train step with context parallelism, compiled for H100s that are not here."""

import dataclasses
import re
import tempfile
from pathlib import Path

from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.models.registry import use_architecture
from maxmeg.planning import hlo
from maxmeg.planning.compile import compile_report
from maxmeg.planning.report import Compiled

CONTEXT, LENGTH, WINDOW = 8, 2**17, 1024
PIECE = LENGTH // CONTEXT * 8 * 256 * 2  # bytes of keys and values: 8 heads of 2 x 128, bf16


def compiled(name: str, layers: int = 0, recompute: str = "selective", **fields):
    """(report, program, text) of an architecture on 8 or more H100s along context."""
    context, length = fields.pop("context", CONTEXT), fields.pop("length", LENGTH)
    strategy, chunks = fields.pop("strategy", "auto"), fields.pop("chunks", 0)
    config = Config(
        parallel=ParallelConfig(context=context, context_strategy=strategy, context_chunks=chunks),
        train=TrainConfig(global_batch_size=1, micro_batch_size=1),
    )
    config = use_architecture(config, name)
    config.data.sequence_length, config.data.reset_attention_mask = length, bool(chunks)
    model = dataclasses.replace(config.model, recompute=recompute, max_position=length)
    model = dataclasses.replace(model, num_layers=layers or model.num_layers)
    attention = dataclasses.replace(model.attention, **fields)
    config.model = dataclasses.replace(model, attention=attention)
    with tempfile.NamedTemporaryFile() as file:
        report = compile_report(config, "h100", context, file.name)
        text = Path(file.name).read_text()
    return report, hlo.parse(text), text


def permutes(report: Compiled) -> list:
    return [row for row in report.collectives if row.kind == "collective-permute"]


def test_a_ring_runs_beside_attention():
    """Per layer CONTEXT - 1 transfers of keys and values forward and backward, and of their float32
    gradients; one attention call a round; no conditional. Exposed is one transfer of backward."""
    layers = 2
    report, program, text = compiled("llama3-8b", layers)
    sent = permutes(report)
    assert {row.axes for row in sent} == {("context",)} and all(row.asynchronous for row in sent)
    assert sum(row.runs for row in sent) == 3 * (CONTEXT - 1) * layers
    assert sum(row.volume for row in sent) == (1 + 1 + 2) * (CONTEXT - 1) * PIECE * layers
    assert sum(row.exposed for row in sent) == layers
    kernels = {name: n for name, n in report.kernels.items() if name.startswith("__cudnn")}
    assert set(kernels.values()) == {CONTEXT * layers}
    assert not re.search(r" conditional\(", text)
    beside = hlo.flops_beside(program)
    attention = 2 * 2 * 2 * (LENGTH // 16) ** 2 * 32 * 128  # two pairs of halves, q k and p v
    least = sorted(flops for name, flops in beside.items() if "permute" in name)
    assert least[2] >= attention  # but for the exposed one, and one beside a projection


def test_a_window_reads_its_halos():
    layers = 2
    report, _, _ = compiled("mistral-7b-v0.1", layers, window=WINDOW)
    sent = permutes(report)
    tokens = PIECE // (LENGTH // CONTEXT)
    # Forward, again in backward, and float32 gradients: a halo before either half.
    assert sum(row.runs for row in sent) == 6 * layers
    assert sum(row.volume for row in sent) == layers * 2 * WINDOW * tokens * (1 + 1 + 2)
    kernels = {name: n for name, n in report.kernels.items() if name.startswith("__cudnn")}
    assert set(kernels.values()) == {2 * layers}  # all in cuDNN: halves, and halos


def test_chunks_of_chosen_owners_need_one_kernel_call():
    """Documents: forward, again in backward, and gradients of queries and of keys and values."""
    layers = 2
    report, _, text = compiled(
        "llama3-8b", layers, "full", chunks=8, backend=AttentionBackend.mosaic
    )
    assert report.kernels["mosaic_gpu_v2"] == 4 * layers and not permutes(report)
    assert report.fits and not re.search(r" conditional\(", text)


def test_a_long_sequence_fits():
    """Llama 3 8B, one sequence."""
    kept = "query,key,value,context_output,context_lse"
    report, _, text = compiled("llama3-8b", recompute=kept, strategy="ring")
    assert report.fits and not re.search(r" conditional\(", text)
