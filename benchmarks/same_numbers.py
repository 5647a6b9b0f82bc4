"""Whether a change leaves the numbers alone: losses, gradient norms and compiled programs.

    python benchmarks/same_numbers.py record|compare FILE [NAME ...] [--programs]

record: five steps of each of RUNS on eight virtual CPU devices; writes losses and gradient norms as
hexadecimal floats. compare: runs them again and prints what differs; the exit status is 1 if
anything does. NAME: parts of the names of runs; none: all. --programs: instead compiles PROGRAMS
for H100s that are not here (needs `pip install -e '.[plan]'`) and takes state, temporaries,
collectives and FLOPs. `record` adds to FILE and leaves out what it already holds.

All runs take about 8 CPU-minutes. Programs are compiled without XLA's optimizations of code and
without fused multiply-adds, so that the numbers do not depend on what XLA fuses. With
JAX_COMPILATION_CACHE_DIR set, `compare` compiles only what has changed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np
from absent_cases import Case

from maxmeg.checkpoint.initialize import create_state
from maxmeg.config import files, values
from maxmeg.config.data import HAS_TEXT, Objective
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import validate
from maxmeg.data.placement import place_batch, place_flag
from maxmeg.planning.compile import compile_report
from maxmeg.program import Program

STEPS = 5
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_max_isa=AVX --xla_cpu_enable_concurrency_optimized_scheduler=false "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
    "--xla_cpu_collective_timeout_seconds=600"
)
THREADS = "32"  # with fewer, XLA's CPU runtime can deadlock
BASE = (
    "model.vocab_size=61; model.vocab_divisible_by=8; model.num_layers=2; model.hidden_size=32; "
    "model.attention.num_heads=8; model.dtype=float32; data.sequence_length=16; "
    "train.global_batch_size=16; train.loss_chunk=24; optim.lr=0.01"
)
STAGES = "parallel.pipe=2; train.micro_batch_size=1; "
EXPERTS = "model.layers=*(attention,moe); model.moe.ffn_size=32; "
SPREAD = EXPERTS + "parallel.expert=4; parallel.fsdp=2; "
DROPOUT = "model.dropout_hidden=0.2; model.attention.dropout=0.1; model.dropout_embedding=0.1; "
DOCUMENTS = "data.reset_attention_mask=true; data.reset_position_ids=true; "
MLA = "model.mla.kv_rank=16; model.mla.query_rank=24; model.mla.rotary_size=2; "
DELTA = "model.delta.num_heads=8; model.delta.chunk=4; model.delta.kernel_size=3; "
BERT = (
    "model.norm=layernorm; model.norm_place=post_residual; model.tied=true; "
    "model.position=learned; model.max_position=32; model.attention.causal=false; "
    "model.mlp.activation=gelu; model.bert.token_types=2; "
    "model.bert.embedding_norm=true; model.bert.pooler=true; "
)
QUANTIZED = "model.dtype=bfloat16; model.hidden_size=64; model.mlp.ffn_size=256; "
QUANTIZED += "train.quantization.recipe="
RUNS = {
    "llama fsdp": "model.attention.num_kv_heads=2; train.micro_batch_size=1; "
    "train.global_batch_size=32; parallel.gradient_dtype=bfloat16; optim.ema.decay=0.9",
    "gpt zero1 dropout": DROPOUT + "parallel.data=8; parallel.fsdp=1; model.tied=true; "
    "model.attention.num_kv_heads=2; model.attention.bias_qkv=true; model.attention.bias_out=true; "
    "model.mlp.bias=true; model.mlp.activation=gelu_tanh; model.norm=layernorm; "
    "model.position=learned; model.max_position=16; model.attention.qk_norm=heads; "
    "train.label_smoothing=0.1",
    "gemma tensor": "model.layers=*(local+mlp attention,mlp); model.attention.window=5; "
    "model.attention.softcap=5.0; model.attention.sinks=true; model.norm_place=sandwich; "
    "model.norm_one_plus=true; model.embedding_scale=3.0; model.logit_softcap=5.0; "
    "model.rotary.local_base=50.0; parallel.tensor=4; parallel.fsdp=2; model.recompute=selective",
    "layer embeddings": "model.layers=local,mlp,layer_embedding attention,mlp,layer_embedding "
    "*(shared_local,wide_mlp,layer_embedding shared_attention,wide_mlp,layer_embedding); "
    "model.num_layers=6; model.layer_embedding.size=6; model.layer_scale=true; "
    "model.norm_place=sandwich; model.attention.num_kv_heads=1; model.attention.window=5; "
    "model.attention.local_head_dim=6; model.vocab_size=64; parallel.tensor=2; parallel.fsdp=2; "
    + STAGES,
    "replicas without zero1": "parallel.data=4; parallel.fsdp=1; parallel.tensor=2; "
    "parallel.zero1=false; model.parallel_norms=true; model.layers=*(attention+mlp)",
    "ring": DOCUMENTS + "parallel.context=4; parallel.context_strategy=ring; parallel.fsdp=2; "
    "parallel.fsdp_context=true; model.layers=*(local,mlp attention,mlp); model.attention.window=5",
    "exchange": DROPOUT + "parallel.context=2; parallel.context_strategy=exchange; "
    "parallel.tensor=2; parallel.data=2; parallel.fsdp=1",
    "hierarchy": "parallel.context=4; parallel.context_strategy=hierarchy; "
    "parallel.context_inner=2; parallel.fsdp=2; model.rotary.scaling=yarn; "
    "model.rotary.factor=2.0; model.rotary.original_length=8",
    "context chunks": DOCUMENTS + "parallel.context=2; parallel.context_chunks=4; "
    "parallel.fsdp=2; parallel.tensor=2",
    "1f1b": STAGES + "parallel.tensor=2; parallel.fsdp=2; train.loss_backend=tiled; "
    "train.z_loss=0.001; train.loss_reduction=megatron",
    "interleaved": STAGES + "parallel.chunks=2; parallel.data=2; parallel.fsdp=2; "
    "model.num_layers=4; model.dtype=bfloat16; optim.masters=remainders; optim.moments=bfloat16",
    "zero bubble mla": STAGES + MLA + "parallel.schedule=zero_bubble; parallel.fsdp=4; "
    "model.layers=*(mla,mlp); model.mtp.num_layers=1; model.num_layers=4",
    "1f1b full": STAGES + "parallel.fsdp=2; parallel.context=2; model.recompute=full",
    "padded hybrid": "model.layers=*(mamba attention+mamba,mlp); model.num_layers=3; "
    "model.mamba.head_dim=8; model.mamba.state_size=6; model.mamba.chunk=4; parallel.pipe=2; "
    "parallel.pad_layers=true; parallel.context=2; parallel.tensor=2; parallel.fsdp=1; "
    "train.micro_batch_size=4; " + DOCUMENTS,
    "gated delta conv": DELTA + "model.layers=*(gated_delta,mlp conv,mlp attention,mlp); "
    "model.num_layers=3; model.delta.num_key_heads=4; model.delta.key_size=6; "
    "model.delta.value_size=4; model.attention.output_gate=true; parallel.tensor=2; "
    "parallel.context=2; parallel.fsdp=2; model.conv.bias=true; model.scan_layers=false",
    "kda muon": DELTA + "model.layers=*(kda,mlp mla,mlp); model.delta.key_size=4; "
    "model.delta.rank=3; parallel.tensor=2; parallel.fsdp=2; parallel.data=2; "
    "optim.optimizer=muon; optim.muon.per_head=true; optim.qk_clip.threshold=0.01; " + MLA,
    "experts dropless": SPREAD + "model.moe.aux_loss=0.01; model.moe.z_loss=0.001; "
    "model.moe.backend=batched; model.mtp.num_layers=1; " + DOCUMENTS,
    "experts capacity": SPREAD + "model.moe.capacity_factor=1.25; model.moe.drop_policy=weight; "
    "model.moe.pad_to_capacity=true; model.moe.global_aux_loss=0.01; "
    "parallel.expert_exchange=gather",
    "experts sinkhorn": SPREAD + "model.moe.sinkhorn=true; model.moe.jitter=0.1; "
    "parallel.expert_exchange=all_to_all",
    "experts by nodes": SPREAD + "parallel.expert_nodes=2; model.moe.top_k=3; "
    "model.moe.score=sigmoid; model.moe.normalize_weights=true; model.moe.bias_balancing=true; "
    "model.moe.num_groups=4; model.moe.topk_groups=2; model.moe.shared_ffn_size=32; "
    "model.moe.shared_gate=true; model.moe.backend=xla",
    "experts folded": EXPERTS + "parallel.expert=4; parallel.expert_tensor=1; parallel.tensor=2; "
    "parallel.context=2; model.moe.latent_size=16; model.moe.sequence_aux_loss=0.1; "
    "model.moe.logit_bias=true; parallel.pipe=2; train.micro_batch_size=2",
    "tensorwise": STAGES + QUANTIZED + "tensorwise; parallel.data=4; parallel.fsdp=1; "
    "model.first_layers_bf16=1; model.num_layers=4; train.quantization.format=e4m3",
    "tensorwise experts": SPREAD + QUANTIZED + "tensorwise; "
    "model.moe.score=sqrt_softplus; "
    "train.micro_batch_size=1",
    "blockwise dispatch": EXPERTS + QUANTIZED + "blockwise; train.quantization.dispatch=true; "
    "model.hidden_size=128; model.moe.ffn_size=128; parallel.expert=4; parallel.data=2; "
    "parallel.fsdp=1; parallel.zero1=false",
    "mxfp8 ring": QUANTIZED
    + "mxfp8; model.layers=*(local_mla,mlp mla,mlp); model.attention.window=5; parallel.context=4; "
    "parallel.context_strategy=ring; parallel.fsdp=2; parallel.zero1=false; "
    "model.mla.kv_rank=64; model.mla.rotary_size=32",
    "nvfp4": QUANTIZED + "nvfp4; model.hidden_size=128; parallel.tensor=2; parallel.fsdp=4",
    "mxfp4": QUANTIZED + "mxfp4; model.hidden_size=128; parallel.fsdp=4; parallel.data=2; "
    "parallel.zero1=false; optim.optimizer=lion",
    "qat nvfp4": QUANTIZED + "qat_nvfp4; model.hidden_size=128; parallel.fsdp=8; "
    "optim.optimizer=sgd",
    "qat mxfp4": QUANTIZED + "qat_mxfp4; model.hidden_size=256; parallel.fsdp=8; "
    "model.scan_unroll=2",
    "qat int8": QUANTIZED + "qat_int8; parallel.data=8; parallel.fsdp=1; optim.optimizer=adafactor",
    "offload soap": "parallel.fsdp=4; parallel.data=2; optim.optimizer=soap; optim.offload=true; "
    "model.layers=*(raw_attention,mlp); model.norm_place=post",
    "float16 moments float8": "model.dtype=float16; parallel.fsdp=8; optim.moments=float8; "
    "model.hidden_size=128; model.layers=*(nope_attention,mlp attention,mlp); "
    "model.position=none; model.attention.qk_norm=head",
    "mup lora": "model.mup.base_hidden_size=16; model.attention.num_kv_heads=1; "
    "lora.rank=4; lora.targets=*; lora.dropout=0.1; parallel.tensor=2; parallel.fsdp=4; "
    + DOCUMENTS,
    "bert": BERT + "data.objective=masked; data.sentence_pairs=true; data.paths=a; "
    "model.bert.pair_head=true; model.bert.transform=gelu_tanh; model.bert.output_bias=true; "
    "parallel.pipe=2; parallel.tensor=2; parallel.fsdp=2; train.micro_batch_size=4",
    "classifier": BERT + "data.objective=classify; data.paths=a; data.labels=a,b,c,d; "
    "model.head.num_classes=4; model.head.dropout=0.1; parallel.tensor=2; parallel.fsdp=4",
    "biencoder": BERT + "data.objective=retrieve; data.paths=a.jsonl; data.query_length=8; "
    "data.negatives=1; data.sequence_length=32; model.head.biencoder=shared; "
    "model.head.projection=12; parallel.fsdp=4; parallel.tensor=2; train.score_scaling=true",
    "t5": DROPOUT + "data.objective=span_corruption; data.paths=a; data.source_length=32; "
    "model.layers=2(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp); "
    "model.num_layers=5; model.position=relative; model.relative.buckets=8; "
    "model.relative.distance=12; model.mlp.activation=geglu; parallel.pipe=2; parallel.tensor=2; "
    "parallel.context=2; parallel.fsdp=1; train.micro_batch_size=4",
    "retro": "data.objective=retro; data.paths=a; data.chunk_length=4; data.num_neighbours=2; "
    "data.neighbour_length=8; model.num_layers=3; model.position=learned; "
    "model.max_position=16; model.retro.chunk_length=4; model.retro.neighbour_length=8; "
    "model.layers=attention,encoder_attention,encoder_cross,encoder_mlp,encoder_norm "
    "*(chunked_cross,mlp); parallel.tensor=2; parallel.context=2; parallel.fsdp=2",
}
SHARDED = {"fsdp": 8, "tensor": 2}
STAGED = {"pipe": 2, "tensor": 2, "expert": 4, "fsdp": 2, "pad_layers": True}
PROGRAMS = {  # fewer layers than the models have, so that each compiles in a few minutes
    "llama3-8b": Case("llama3-8b", 16, {"pipe": 4, "fsdp": 2, "tensor": 2}, 1, 8, layers=8),
    "mixtral-8x7b": Case("mixtral-8x7b", 16, {"expert": 8, "fsdp": 2}, length=4096, layers=4),
    "deepseek-v3": Case("deepseek-v3", 32, STAGED, 1, 4, 4096, "full", layers=6),
    "nemotron-h-8b": Case("nemotron-h-8b", 16, SHARDED),
    "t5-3b": Case("t5-3b", 16, SHARDED),
}


def config_of(text: str) -> Config:
    kinds = files.leaves(Config)
    pairs = [part.partition("=") for part in f"{BASE}; {text}".split("; ") if part]
    return with_fields(
        Config(), {path: values.convert(path, value, kinds[path]) for path, _, value in pairs}
    )


def samples(config: Config) -> dict[str, Any]:
    """Return random arrays of a global batch, as the config's objective needs them."""
    rng, data = np.random.default_rng(0), config.data
    size, length = config.train.global_batch_size, data.sequence_length
    shape, places_L = (size, length), np.arange(length, dtype=np.int32)
    ids = [rng.integers(0, config.model.vocab_size, shape, dtype=np.int32) for _ in range(2)]
    batch: dict[str, Any] = {"tokens": ids[0], "targets": ids[1]}
    batch["positions"] = np.broadcast_to(places_L, shape)
    batch["loss_mask"] = np.float32(rng.random(shape) < 0.8)
    if data.has_segments:  # two documents per row and at most four padding tokens
        cuts_B1 = rng.integers(2, length // 2 + 1, (size, 1))
        is_text_BL = places_L < length - rng.integers(0, 5, (size, 1))
        is_second_BL = places_L >= cuts_B1
        batch["positions"] = np.int32(places_L - np.where(is_second_BL, cuts_B1, 0))
        batch["segment_ids"] = np.int32((1 + is_second_BL) * is_text_BL)
        batch["loss_mask"] = batch["loss_mask"] * is_text_BL
        batch["token_types"] = np.int32(is_second_BL)
    if data.objective.is_labelled:
        batch["targets"] = ids[1] % config.model.head.num_classes
    if data.objective is Objective.masked:
        batch["loss_mask"] = batch["loss_mask"] * (places_L % 3 == 0)
        batch["is_swapped"] = np.arange(size, dtype=np.int32) % 2
    elif not data.objective.is_labelled:
        batch.pop("token_types", None)
    if data.objective.is_retrieval:
        batch["loss_mask"] = np.float32(np.broadcast_to(places_L == 0, shape))
        for number in range(1 + data.negatives):
            batch[f"{HAS_TEXT}{number}"] = np.full(size, number == 0, np.int32)
    if source := data.source_tokens:
        shape = (size, source)
        batch["encoder_tokens"] = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
        batch["encoder_segment_ids"] = np.int32(rng.random(shape) < 0.9)
    return batch


def run(name: str) -> dict[str, list[str]]:
    """Return losses and gradient norms of the steps of a run."""
    config = config_of(RUNS[name])
    validate(config, jax.device_count())
    program = Program(config, None)
    state = create_state(config, program.optimizer, program.abstract)
    size = config.train.global_batch_size
    batch = place_batch(samples(config), program.rows, program.mesh, size)
    controls: dict[str, Any] = {
        "learning_rate": np.float32(config.optim.lr),
        "weight_decay": np.float32(0.1),
    }
    controls["stop"] = place_flag(False, program.mesh)
    found: dict[str, list[str]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        state, metrics = program.traced_step(state, batch, controls)
        for key, numbers in found.items():
            numbers.append(float(metrics[key]).hex())
    return found


def program(name: str) -> dict:
    """Return bytes, FLOPs and collectives per device of a compiled program."""
    case = PROGRAMS[name]
    config = case.config()
    if config.model.has_source:  # cuDNN has no relative positions; nothing opens the corpus
        config.model.attention.backend = AttentionBackend.xla
        config.data.paths = ("a",)
    report = compile_report(config, "h100", case.gpus)
    found = {"state": report.arguments, "temporaries": report.temporaries}
    found |= {"flops": report.flops.hex(), "kernels": dict(sorted(report.kernels.items()))}
    rows = [(r.kind, ",".join(r.axes), r.runs, r.volume) for r in report.collectives]
    return found | {"collectives": [" ".join(map(str, row)) for row in sorted(rows)]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether a change leaves the numbers alone.")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--programs", action="store_true", help="compile for absent H100s instead")
    given = parser.parse_args()
    os.environ |= {"XLA_FLAGS": FLAGS, "NPROC": THREADS, "JAX_PLATFORMS": "cpu"}
    jax.config.update("jax_platforms", "cpu")
    measure: Callable[[str], dict] = program if given.programs else run
    known, parts = PROGRAMS if given.programs else RUNS, given.names or [""]
    chosen = [name for name in known if any(part in name for part in parts)]
    recorded = json.loads(given.file.read_text()) if given.file.exists() else {}
    changed = 0
    for name in chosen:
        if (name in recorded) == (given.action == "record"):
            print(f"{name}: {'recorded already' if name in recorded else 'not recorded'}")
            continue
        started = time.monotonic()
        found = measure(name)
        seconds = f"{time.monotonic() - started:.0f} s"
        if given.action == "record":
            recorded[name] = found
            given.file.write_text(json.dumps(recorded, indent=1) + "\n")
            print(f"{name}: {seconds}", flush=True)
            continue
        lines = [
            f"{name}: {key}: {recorded[name].get(key)} before, {value} now"
            for key, value in found.items()
            if value != recorded[name].get(key)
        ]
        changed += bool(lines)
        print("\n".join(lines or [f"{name}: same, {seconds}"]), flush=True)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
