"""Models and meshes of eight devices, drawn at random, give one device's loss and gradients."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from layouts import BATCH, LENGTH, assert_equal_but_rounding, model_gradients, tiny
from written_settings import values_of

from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.config.setting import with_fields

TOLERANCE = 3e-5  # relative, float32: the order of sums differs; delta rules amplify rounding
FLIPPED = 0.2  # with 8-bit products: single numbers, or parts of a sum, round to other codes
SAME_LOSS = 1e-3  # relative, with 8-bit products
FLOOR = 1e-8  # for gradients that are zero in exact arithmetic
# Of a hundred valid runs that were drawn at random, the three with the most pairs of settings,
# and those that have shown a fault.
# Settings whose meaning depends on the layout are not among them: the balance loss over a
# microbatch, capacity, and means over microbatches.
RUNS = {
    "a pipeline of experts in 8 bits": (
        "model.num_layers=9; model.layers=mlp *(mamba,moe attention,moe); model.norm=layernorm; "
        "model.norm_place=post_residual; model.dropout_hidden=0.2; model.dropout_embedding=0.1; "
        "model.logit_softcap=5.0; model.mup.base_hidden_size=16; model.attention.num_kv_heads=2; "
        "model.attention.sinks=true; model.attention.qk_norm=heads; model.mamba.head_dim=16; "
        "model.mamba.num_groups=4; model.mamba.state_size=6; model.mamba.kernel_size=2; "
        "model.mamba.norm=false; model.mamba.min_step=0.01; model.mamba.chunk=4; "
        "model.mlp.ffn_size=64; model.mlp.activation=gelu_tanh; model.moe.ffn_size=32; "
        "model.moe.latent_size=16; model.moe.normalize_weights=true; "
        "model.moe.bias_balancing=true; model.moe.sequence_aux_loss=0.1; model.moe.z_loss=0.01; "
        "model.moe.backend=batched; model.mtp.num_layers=1; "
        "parallel.pipe=2; parallel.data=2; parallel.fsdp=1; parallel.expert=2; "
        "parallel.expert_exchange=all_to_all; parallel.expert_buffer=1.0; parallel.context=2; "
        "train.micro_batch_size=2; train.z_loss=0.001; train.loss_backend=xla; "
        "train.quantization.recipe=tensorwise"
    ),
    "four padded stages of delta rules and convolutions": (
        "model.num_layers=14; model.layers=*(kda,moe conv,moe); model.norm=layernorm; "
        "model.norm_one_plus=true; model.norm_place=post; model.position=learned; "
        "model.max_position=16; model.dropout_hidden=0.2; model.logit_softcap=5.0; "
        "model.recompute=full; model.mup.base_hidden_size=16; model.attention.num_heads=4; "
        "model.conv.kernel_size=1; model.delta.num_heads=8; model.delta.key_size=6; "
        "model.delta.kernel_size=2; model.delta.rank=3; model.delta.chunk=4; "
        "model.mlp.ffn_size=64; model.mlp.activation=geglu_erf; model.moe.top_k=3; "
        "model.moe.ffn_size=32; model.moe.score=sqrt_softplus; model.moe.normalize_weights=true; "
        "model.moe.num_groups=4; model.moe.topk_groups=2; model.moe.z_loss=0.01; "
        "model.moe.backend=batched; "
        "parallel.pipe=4; parallel.fsdp=1; parallel.expert=2; parallel.expert_buffer=3.0; "
        "parallel.context=2; parallel.context_strategy=gather; parallel.zero1=false; "
        "parallel.pad_layers=true; "
        "train.micro_batch_size=1; train.z_loss=0.001; train.label_smoothing=0.1; "
        "train.loss_backend=xla"
    ),
    "latent attention over four devices, in rows of two documents": (
        "model.num_layers=4; model.layers=*(local_mla+mlp mla,moe); model.norm_one_plus=true; "
        "model.norm_place=post_residual; model.position=learned; model.max_position=16; "
        "model.embedding_scale=3.0; model.logit_softcap=5.0; model.attention.window=9; "
        "model.attention.softcap=5.0; model.attention.bias_out=true; model.mla.kv_rank=16; "
        "model.mla.rotary_size=2; model.mlp.ffn_size=64; model.mlp.bias=true; "
        "model.moe.ffn_size=32; model.moe.shared_ffn_size=32; model.moe.latent_size=16; "
        "model.moe.score=sigmoid; model.moe.normalize_weights=true; model.moe.jitter=0.1; "
        "model.moe.backend=batched; "
        "parallel.fsdp=1; parallel.context=4; parallel.context_strategy=gather; "
        "parallel.fsdp_context=true; parallel.tensor=2; train.loss_backend=xla"
    ),
    "latent attention of an MTP layer, whose weights are sharded over context": (
        "model.layers=*(mla,mlp); model.mla.kv_rank=16; model.mla.rotary_size=2; "
        "model.mtp.num_layers=1; parallel.data=2; parallel.fsdp=1; parallel.context=2; "
        "parallel.context_strategy=exchange; parallel.tensor=2; parallel.fsdp_context=true"
    ),
}


def documents() -> dict[str, np.ndarray]:
    """Rows of two documents, the positions in each from 0 on."""
    cuts_B1 = np.random.default_rng(1).integers(1, LENGTH, (BATCH, 1))
    places_L = np.arange(LENGTH)
    positions_BL = np.where(places_L < cuts_B1, places_L, places_L - cuts_B1)
    segments_BL = 1 + (places_L >= cuts_B1)
    return {"positions": np.int32(positions_BL), "segment_ids": np.int32(segments_BL)}


def check_run(name: str) -> None:
    values = values_of(RUNS[name])
    extra = documents() if "documents" in name else {}
    of_model = {path: value for path, value in values.items() if not path.startswith("parallel")}
    whole = with_fields(tiny(fsdp=1), of_model | {"train.micro_batch_size": 0})
    (loss, found), (wanted_loss, wanted) = (
        model_gradients(config, **extra) for config in (with_fields(tiny(), values), whole)
    )
    is_exact = whole.train.quantization.recipe is QuantizationRecipe.none
    same_loss, same = (TOLERANCE, TOLERANCE) if is_exact else (SAME_LOSS, FLIPPED)
    assert_equal_but_rounding(({}, found), ({}, wanted), same, FLOOR)
    assert loss == pytest.approx(wanted_loss, rel=same_loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_random_layouts_equal_one_device(name: str, counts: dict[str, int]):
    """In a process of its own, and once more if XLA's CPU runtime has deadlocked in a program with
    many collectives, and aborted (benchmarks/NOTES.md)."""
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=120"
    environ = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}"}
    program = f"import test_random_layouts as t; t.check_run({name!r})"
    command, folder = [sys.executable, "-c", program], Path(__file__).parent

    def run() -> subprocess.CompletedProcess:
        return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)

    ended = run()
    if ended.returncode == -signal.SIGABRT and "rendezvous" in ended.stderr:
        counts["repeated"] += 1
        ended = run()
    assert ended.returncode == 0, ended.stderr[-5000:]
