"""Tiny GPT models of megatron-core, their logits, and checkpoints as Megatron-LM saves them.

    pip install torch megatron-core
    python tests/oracle/megatron_model.py FOLDER RANK   # RANK 0 and 1, at the same time

Two processes on CPU: `gpt`, `mixtral` and `biased` (experts with biases) over two pipeline stages,
`llama` and `hybrid` over two tensor-parallel ranks, `shared` over two expert-parallel ones. Of
each FOLDER gets NAME.npy, the logits of `tokens()`, and NAME_KEYS/iter_0000010 for the ways to name
tensors: layers stacked, apart, and with halves of [gate; up] apart too. allocated.json gets the
layers that ratios place (megatron_hybrid.py).
"""

import argparse
import contextlib
import json
import pathlib
import sys
import warnings
import zlib

import megatron_bert
import megatron_hybrid
import megatron_t5

VOCAB, PADDED, LAYERS, HIDDEN, HEADS, LENGTH = 120, 128, 3, 32, 4, 16
COMMON = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
# Arguments of Megatron-LM's command line; those that are megatron-core's too go there.
GPT = {
    **COMMON,
    "num_layers": 2 * LAYERS,
    "ffn_hidden_size": 128,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "bias_gelu_fusion": True,
    "apply_layernorm_1p": False,
}
LLAMA = {
    **COMMON,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 12,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "rotary_percent": 0.5,
    "untie_embeddings_and_output_weights": True,
    "bias_swiglu_fusion": False,
}
MIXTRAL = {
    **{name: value for name, value in LLAMA.items() if name != "qk_layernorm"},
    "num_layers": 4,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 20,
    "moe_router_load_balancing_type": "none",
}
# Beside a dense layer; the biases of the choice are counts, not trained.
SHARED = {
    **MIXTRAL,
    "num_layers": LAYERS,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
BIASED = {
    **{**GPT, "num_layers": 2, "num_experts": 2, "moe_router_topk": 1},
    **{"moe_router_pre_softmax": True, "moe_router_load_balancing_type": "none"},
    "bias_gelu_fusion": False,
}
# Attention without positions; Mamba-2 with two groups, each of them on its tensor-parallel rank.
HYBRID = {
    **COMMON,
    "num_layers": 6,
    "hybrid_override_pattern": "ME*M-G",
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "bias_swiglu_fusion": False,
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "untie_embeddings_and_output_weights": True,
    "mamba_state_dim": 6,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 20,
    "moe_router_load_balancing_type": "none",
}
# Its MLPs have the fused GELU, by a tanh, and the layer before its logits the exact one.
BERT = {**GPT, "num_layers": 2, "bert": True}
T5 = {**GPT, "num_layers": 2, "encoder_num_layers": 3, "decoder_num_layers": 2}
T5 |= {"bias_gelu_fusion": False, "max_position_embeddings": megatron_t5.SOURCE}
STACKED, APART = {}, {"non_homogeneous_layers": True}
HALVES = {"singleton_local_shards": True}
# name: arguments, (tensor, pipe, expert), how tensors are named
MODELS = {
    "gpt": (GPT, (1, 2, 1), {"stacked": STACKED, "apart": APART}),
    "llama": (LLAMA, (2, 1, 1), {"stacked": STACKED, "halves": HALVES}),
    "mixtral": (MIXTRAL, (1, 2, 1), {"stacked": STACKED, "halves": HALVES}),
    "shared": (SHARED, (1, 1, 2), {"apart": APART}),
    "biased": (BIASED, (1, 2, 1), {"stacked": STACKED}),
    "hybrid": (HYBRID, (2, 1, 1), {"apart": APART}),
    "bert": (BERT, (2, 1, 1), {"stacked": STACKED}),
}


def tokens():
    """[1, LENGTH] ids."""
    import numpy as np

    return (np.arange(LENGTH) * 37 % VOCAB)[None]


def without_cuda():
    """megatron-core asks for a GPU where none is needed."""
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # it is asked for without Transformer Engine too
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()


def build(arguments: dict, tensor: int, pipe: int):
    """The model of this rank, biases and norms random too."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)  # what is on both ranks is the same there
    known = {**COMMON, **arguments}
    fields = {k: v for k, v in known.items() if k in TransformerConfig.__dataclass_fields__}
    if known.get("swiglu"):
        fields |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if known.get("num_experts"):
        ranks = parallel_state.get_expert_model_parallel_world_size()
        fields |= {"num_moe_experts": known["num_experts"], "expert_model_parallel_size": ranks}
    config = TransformerConfig(
        **fields,
        layernorm_epsilon=known.get("norm_epsilon", 1e-5),
        bias_activation_fusion=known.get("bias_gelu_fusion", False),
        use_cpu_initialization=True,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipe,
        pipeline_dtype=torch.float32,
    )
    norm = known.get("normalization")
    tied = not known["untie_embeddings_and_output_weights"]
    spec = get_gpt_layer_local_spec(
        qk_layernorm=bool(known.get("qk_layernorm")), normalization=norm
    )
    if known.get("num_experts"):
        spec = get_gpt_decoder_block_spec(config, False, normalization=norm)
    options = {
        "vocab_size": PADDED,
        "max_sequence_length": LENGTH,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "parallel_output": False,
        "position_embedding_type": known["position_embedding_type"],
        "rotary_base": known.get("rotary_base", 10000),
        "rotary_percent": known.get("rotary_percent", 1.0),
        "share_embeddings_and_output_weights": tied,
    }
    if pattern := known.get("hybrid_override_pattern"):
        model = megatron_hybrid.build(config, pattern, **options).eval()  # experts want it
    elif "decoder_num_layers" in known:
        model = megatron_t5.build(config, known, **options)
    elif known.get("bert"):
        model = megatron_bert.build(config, **options)
    else:
        model = GPTModel(config, spec, **options)
    rank = parallel_state.get_tensor_model_parallel_rank()
    counts = [(n, b) for n, b in model.named_buffers() if n.endswith("router.expert_bias")]
    for name, parameter in [*model.named_parameters(), *counts]:
        if tied:
            name = name.replace("output_layer", "embedding.word_embeddings")
        shard = rank if getattr(parameter, "tensor_model_parallel", False) else 0
        if ".local_experts." in name:
            shard = parallel_state.get_expert_model_parallel_rank()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shard}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        # bfloat16 holds the sums, so that such checkpoints are exact.
        parameter.data = (parameter.data + 0.1 * noise).bfloat16().float()
    return model


def forward(model, pipe: int):
    """The logits, on the last stage."""
    import torch
    import torch.distributed as dist

    ids = torch.tensor(tokens())
    positions = torch.arange(LENGTH)[None]
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
    if pipe > 1 and dist.get_rank() == 1:
        hidden = torch.empty(LENGTH, 1, HIDDEN)
        dist.recv(hidden, 0)
        model.set_input_tensor(hidden)
    with torch.no_grad():
        out = model(ids, positions, mask)
    if pipe > 1 and dist.get_rank() == 0:
        dist.send(out.contiguous(), 1)
    return out


def save(model, arguments: dict, naming: dict, folder: pathlib.Path) -> None:
    """A checkpoint with an optimizer's tensor and a random state, as after 10 iterations."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.transformer.enums import AttnBackend

    iteration = folder / "iter_0000010"
    iteration.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = model.sharded_state_dict(metadata=naming)
    state = {f"model {name}": value for name, value in weights.items()}
    moment = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight",
        torch.ones(4, 4),
        (0, rank, world),
    )
    state |= {"optimizer": moment}
    state |= {"rng": ShardedObject("rng_state", {"seed": 1}, (world,), (rank,))}
    plain = {"max_position_embeddings": LENGTH, **arguments}
    plain |= {"padded_vocab_size": PADDED, "seq_length": LENGTH}
    plain |= {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1}  # and the end of a text
    plain |= {"attention_backend": AttnBackend.auto, "params_dtype": torch.bfloat16}
    state |= {"args": argparse.Namespace(**plain), "iteration": 10, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, iteration)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


def main(folder: pathlib.Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    megatron_hybrid.without_kernels()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    from megatron.core import parallel_state

    without_cuda()
    if rank == 1:
        (folder / "allocated.json").write_text(json.dumps(megatron_hybrid.allocated()))
    for name, (arguments, (tensor, pipe, expert), namings) in MODELS.items():
        parallel_state.initialize_model_parallel(tensor, pipe, expert_model_parallel_size=expert)
        model = build(arguments, tensor, pipe)
        if name == "bert":
            logits, pairs = megatron_bert.forward(model, torch.tensor(tokens()))
            np.save(folder / "pairs.npy", pairs.numpy())
        else:
            logits = forward(model, pipe)
        if rank == 1:
            np.save(folder / f"{name}.npy", logits.numpy()[..., :VOCAB])
        if name == "llama":
            model = model.bfloat16()
        for named, naming in namings.items():
            save(model, arguments, dict(naming), folder / f"{name}_{named}")
        parallel_state.destroy_model_parallel()
    dist.barrier()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
