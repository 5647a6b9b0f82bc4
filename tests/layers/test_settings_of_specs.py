"""Fields of specs that take the settings of the same name: a new one is a decision."""

from maxmeg.config.layers import MIXERS
from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import shared_values
from maxmeg.layers.attention import AttentionSpec
from maxmeg.layers.moe import RoutingSpec
from maxmeg.models.mixers import BY_NAME

HEADS = "backend bias_out bias_qkv causal chunk dropout head_dim keys_as_values num_heads "
HEADS += "num_kv_heads output_gate qk_norm scale sinks softcap value_norm window"
DELTA = "backend chunk kernel_size key_size num_heads num_key_heads"
MLP = "activation bias ffn_size gate_scale"
EXPERTS = "aux_loss backend bias_balancing bias_rate ffn_size global_aux_loss jitter latent_size "
EXPERTS += "logit_bias scale_inputs sequence_aux_loss shared_ffn_size shared_gate z_loss"
TAKEN = {
    **{(f"{k}Spec", "attention"): HEADS for k in ("Attention", "Mla", "Cross", "ChunkedCross")},
    ("ChunkedCrossSpec", "retro"): "chunk_length",
    ("DeltaSpec", "delta"): f"{DELTA} value_size",
    ("KdaSpec", "delta"): f"{DELTA} rank value_size",
    ("MambaSpec", "mamba"): "backend bias chunk conv_bias head_dim kernel_size num_groups "
    "num_heads scales state_size",
    ("LayerEmbeddingSpec", "layer_embedding"): "size",
    ("LayerEmbeddingSpec", "mlp"): "activation",
    ("MlaSpec", "mla"): "kv_rank query_rank rotary_size value_size",
    ("MlpSpec", "mlp"): MLP,
    ("MoeSpec", "mlp"): MLP,
    ("MoeSpec", "moe"): EXPERTS,
    ("AttentionSpec", "relative"): "buckets distance",
    ("RoutingSpec", "moe"): "force_balance group_score_topk normalize_weights num_experts "
    "num_groups scale score sinkhorn softmax_before_topk top_k topk_groups",
    ("ShortConvSpec", "conv"): "bias kernel_size",
}


def test_specs_take_these_settings_by_name():
    pairs = [(BY_NAME[spec], group) for spec, *groups in MIXERS.values() for group in groups]
    pairs += [(AttentionSpec, "relative"), (RoutingSpec, "moe")]
    names = {(k.__name__, g): shared_values(k, getattr(ModelConfig(), g)) for k, g in pairs}
    assert {pair: " ".join(sorted(taken)) for pair, taken in names.items() if taken} == TAKEN
