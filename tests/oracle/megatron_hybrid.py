"""megatron-core's hybrid model on CPU: stand-ins for what needs a GPU.

Its mixer, stack and checkpoints are megatron-core's own; the fused convolution and scan of
mamba_ssm are transformers' in PyTorch.
"""

import sys
import types


def without_kernels() -> None:
    """Put modules in place of mamba_ssm, einops and megatron-core's kernels in Triton.

    Before megatron-core's mixer is imported. PyTorch for CPU comes without Triton.
    """
    import torch

    class RMSNorm(torch.nn.Module):
        """Of each group of channels; the gate was applied before."""

        def __init__(self, width: int, eps: float, group_size: int, **_: object) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))
            self.eps, self.group_size = eps, group_size

        def forward(self, x):
            grouped = x.unflatten(-1, (-1, self.group_size))
            unit = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
            return unit.flatten(-2) * self.weight

    def rearrange(x, pattern: str):
        return x.squeeze(1) if pattern == "d 1 w -> d w" else x.transpose(0, 1)

    def l2norm(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    modules = {
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": None},  # megatron-core has its own
        "einops": {"rearrange": rearrange, "repeat": None},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": combined,
        },
    }
    for name, members in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:end]))
            module.__path__ = []
            sys.modules.setdefault(module.__name__, module)
        vars(sys.modules[name]).update(members)
    name = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    kernels = types.ModuleType(name)  # of inference alone
    kernels.tensor_get_slice_after = kernels.tensor_masked_update = kernels.tensor_merge = None
    sys.modules[name] = kernels  # found by its whole name: its parents stay megatron-core's


def combined(
    zxBCdt, weight, bias, dt_bias, A, D, chunk_size, activation, headdim, ngroups, **_: object
):
    """What the fused kernel computes of [z | x | B | C | dt], [batch, length, ...]."""
    import torch
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    assert activation == "silu"
    width, convolved = len(A) * headdim, len(weight)
    z, xBC, dt = zxBCdt.split((width, convolved, len(A)), -1)
    padding = weight.shape[1] - 1
    xBC = torch.conv1d(xBC.mT, weight[:, None], bias, padding=padding, groups=convolved)
    xBC = torch.nn.functional.silu(xBC[..., : zxBCdt.shape[1]].mT)
    states = (convolved - width) // 2
    x, B, C = xBC.split((width, states, states), -1)
    B, C = (part.unflatten(-1, (ngroups, -1)) for part in (B, C))
    heads = x.unflatten(-1, (-1, headdim))
    y = mamba2_chunk_scan(heads, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True)
    y = y[0] if isinstance(y, tuple) else y
    return y.flatten(-2) * torch.nn.functional.silu(z)


def build(config, pattern: str, **arguments: object):
    """A MambaModel of layers without Transformer Engine; keys are those of the fused modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import gated_delta_net, mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    mamba_block.TENorm = WrappedTorchNorm
    parts = get_gpt_layer_local_spec(normalization=config.normalization).submodules
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    names |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}

    def layer(module: type, keys: dict, **modules: object) -> ModuleSpec:
        return ModuleSpec(
            module,
            submodules=TransformerLayerSubmodules(**modules, sharded_state_dict_keys_map=keys),
        )

    fed = {"pre_mlp_layernorm": WrappedTorchNorm, "mlp_bda": parts.mlp_bda}
    attended = {"input_layernorm": WrappedTorchNorm, "self_attention": parts.self_attention}
    attended |= {"self_attn_bda": parts.self_attn_bda}
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    delta = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    delta_names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    kinds = {
        "*": layer(TransformerLayer, names, **attended),
        "G": layer(
            TransformerLayer,
            delta_names,
            **attended
            | {"self_attention": ModuleSpec(gated_delta_net.GatedDeltaNet, submodules=delta)},
        ),
    }

    class Attention:
        """Makes attention, or Gated DeltaNet, which this version's stack has no letter for."""

        def __new__(cls, *arguments, layer_number: int, **options):
            spec = kinds[pattern[layer_number - 1]]
            options |= {"submodules": spec.submodules, "layer_number": layer_number}
            return spec.module(*arguments, **options)

    gated_delta_net.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule
    experts = get_moe_module_spec(False, config.num_moe_experts or 2, False)
    stack = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(Attention),
        mlp_layer=layer(MLPLayer, names, mlp=parts.mlp, **fed),
        moe_layer=layer(TransformerLayer, {}, mlp=experts, **fed),
    )
    return MambaModel(
        config,
        ModuleSpec(mamba_block.MambaStack, submodules=stack),
        hybrid_override_pattern=pattern.replace("G", "*"),
        **arguments,
    )


def allocated() -> list[tuple[int, float, float, str]]:
    """(number of layers, ratios of attention and of MLPs, letters of the layers)."""
    import numpy as np
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    rng = np.random.default_rng(0)
    cases = [(int(rng.integers(1, 60)), *(rng.random(2) / 2)) for _ in range(200)]
    return [(*case, "".join(allocate_layers(*case))) for case in cases]
