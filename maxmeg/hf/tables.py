"""The families of dense decoders that Hugging Face's transformers has: names of tensors and of
settings. (Those with experts are in expert_tables.py.)

A family says what all of its models have in common (`constants`), which keys of config.json are
which fields, and which tensors are which arrays. Defaults are those of transformers' classes: a key
that a file lacks has that value.
"""

import dataclasses
import typing
from collections.abc import Mapping

from maxmeg.config.model import Activation, Norm, NormPlace, Position, QkNorm
from maxmeg.hf.keys import (
    MOST_LAYERS,
    Choice,
    Falcon,
    Fixed,
    Ignored,
    Key,
    Part,
    QueryScalar,
    ScaledEmbedding,
)
from maxmeg.hf.rotary import Rotary
from maxmeg.hf.windows import AlternatingWindow, LateWindow

Modules = Mapping[typing.Any, str]  # of a name of ours, or a tuple of names


@dataclasses.dataclass(frozen=True)
class Family:
    """Modules are named without `.weight` and `.bias`; those of a layer without its number, ours as
    `attention.query`, `mlp.norm`. Several of ours make one of theirs that is fused.

    layer: what their names begin with. grouped: fused modules whose outputs are [q.. k v] for each
    key/value head. outputs_first: their projections are [out, in]. own_norms: modules where each
    mixer of a parallel block has its own norm. arrays: names of tensors, not of modules. experts:
    of an expert's tensor, its number at {}, or of the stack of all [expert, in, out], several of
    ours taking turns along `out`. ignored: patterns of tensors that hold no weights.
    renamed: patterns of names in other files. code: of the modules that came with the first files,
    before transformers had the family; they compute the same, and are not run.
    """

    model_type: str
    parts: tuple[Part, ...]
    ends: Modules
    layer: str
    layers: Modules
    constants: Mapping[str, typing.Any]
    own_norms: Modules = dataclasses.field(default_factory=dict)
    grouped: frozenset[str] = frozenset()
    outputs_first: bool = True
    arrays: Modules = dataclasses.field(default_factory=dict)
    experts: Modules = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    renamed: tuple[tuple[str, str], ...] = ()
    code: str = ""


GATED = {
    "silu": Activation.swiglu,
    "swish": Activation.swiglu,
    "gelu_pytorch_tanh": Activation.geglu,
    "gelu_new": Activation.geglu,
}
UNGATED = {
    "gelu": Activation.gelu,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu_new": Activation.gelu_tanh,
    "gelu_fast": Activation.gelu_tanh,
    "relu2": Activation.relu_squared,
}
QKV = ("attention.query", "attention.key", "attention.value")
ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"}
PROJECTIONS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
}
PRE_NORMS = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
POST_NORMS = {
    "attention.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
HEAD_NORMS = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
GATED_MLP = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.out": "mlp.down_proj"}
LLAMA_LAYER = {**PROJECTIONS, **GATED_MLP, **PRE_NORMS}

ROOT = {"norm": Norm.rmsnorm}
LAYERNORM = {"norm": Norm.layernorm}
BIASES = ("bias_qkv", "bias_attention_out", "bias_mlp")
ATTENTION_BIASES = BIASES[:2]


def sizes(vocab: int, hidden: int, layers: int, heads: int, kv: int | None, ffn: int) -> tuple:
    """Keys of the usual names, with their defaults."""
    return (
        Key("vocab_size", "vocab_size", vocab),
        Key("hidden_size", "hidden_size", hidden),
        Key("num_hidden_layers", "num_layers", layers, most=MOST_LAYERS),
        Key("num_attention_heads", "num_heads", heads),
        Key("num_key_value_heads", "num_kv_heads", kv, null=True),
        Key("intermediate_size", "ffn_size", ffn),
    )


def numerics(position: int, eps: float, std: float = 0.02, eps_name: str = "rms_norm_eps") -> tuple:
    return (
        Key("max_position_embeddings", "max_position", position),
        Key(eps_name, "norm_eps", eps),
        Key("initializer_range", "init_std", std, zero=True),
    )


def tied(default: bool) -> Key:
    return Key("tie_word_embeddings", "tied", default)


def dropout(name: str, *fields: str, default: float = 0.0) -> Key:
    return Key(name, fields, default, null=True, zero=True)


HEAD_DIM = Key("head_dim", "head_dim", None, null=True)
OWN_HEAD_DIM = Key("head_dim", "head_dim", None, null=True, extra=True)
SILU = Choice("hidden_act", "activation", "silu", GATED)
ATTENTION_DROPOUT = dropout("attention_dropout", "dropout_attention")
ATTENTION_BIAS = Key("attention_bias", ATTENTION_BIASES, False)
WINDOW = "sliding_window", "attention_window"

LLAMA = Family(
    "llama",
    (
        *sizes(32000, 4096, 32, 32, None, 11008),
        *numerics(2048, 1e-6),
        *(HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False)),
        *(Key("mlp_bias", "bias_mlp", False), Fixed("pretraining_tp", 1)),
        *(Fixed("rope_interleaved", False), Rotary()),
    ),
    *(ENDS, "model.layers.", LLAMA_LAYER, ROOT),
)
MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    parts=(
        *sizes(32000, 4096, 32, 32, 8, 14336),
        *numerics(131072, 1e-6),
        *(HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False)),
        *(Key(*WINDOW, 4096, null=True), Rotary()),
    ),
)
QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    parts=(
        *sizes(151936, 4096, 32, 32, 32, 22016),
        *numerics(32768, 1e-6),
        *(OWN_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False)),
        *(LateWindow(), Fixed("use_mrope", False), Rotary()),
    ),
    constants={**ROOT, "bias_qkv": True},
)
QWEN3 = dataclasses.replace(
    LLAMA,
    model_type="qwen3",
    parts=(
        *sizes(151936, 4096, 32, 32, 32, 22016),
        *numerics(32768, 1e-6),
        *(Key("head_dim", "head_dim", 128), SILU, ATTENTION_BIAS, ATTENTION_DROPOUT),
        *(tied(False), LateWindow(), Rotary()),
    ),
    layers={**LLAMA_LAYER, **HEAD_NORMS},
    constants={**ROOT, "qk_norm": QkNorm.head},
)
GEMMA = {**ROOT, "norm_one_plus": True, "norm_place": NormPlace.sandwich}
GEMMA_PARTS = (
    *(Key("head_dim", "head_dim", 256), ATTENTION_BIAS, ATTENTION_DROPOUT, tied(True)),
    Choice("hidden_activation", "activation", "gelu_pytorch_tanh", GATED),
    *(ScaledEmbedding(), QueryScalar(), Ignored(("hidden_act", "sliding_window_size"))),
    Fixed("use_bidirectional_attention", False),
)
GEMMA_LAYER = {
    **PROJECTIONS,
    **GATED_MLP,
    **POST_NORMS,
    "attention.norm": "input_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
}
GEMMA2 = Family(
    "gemma2",
    (
        *sizes(256000, 2304, 26, 8, 4, 9216),
        *numerics(8192, 1e-6),
        *GEMMA_PARTS,
        Key("final_logit_softcapping", "logit_softcap", 30.0, null=True),
        Key("attn_logit_softcapping", "attention_softcap", 50.0, null=True),
        *(AlternatingWindow(2), Rotary()),
    ),
    *(ENDS, "model.layers.", GEMMA_LAYER, GEMMA),
)
GEMMA3 = Family(
    "gemma3_text",
    (
        *sizes(262208, 2304, 26, 8, 4, 9216),
        *numerics(131072, 1e-6),
        *GEMMA_PARTS,
        Key("final_logit_softcapping", "logit_softcap", None, null=True),
        Key("attn_logit_softcapping", "attention_softcap", None, null=True),
        AlternatingWindow(6, "sliding_window_pattern"),
        Rotary(default=1e6, local="rope_local_base_freq"),
    ),
    *(ENDS, "model.layers.", {**GEMMA_LAYER, **HEAD_NORMS}, {**GEMMA, "qk_norm": QkNorm.head}),
    ignored=(r"^(model\.)?(vision_tower|multi_modal_projector)\.",),
    renamed=(  # the text part of models that also see
        (r"^(language_model\.model|model\.language_model)\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
)
OLMO2 = Family(
    "olmo2",
    (
        *sizes(50304, 4096, 32, 32, None, 11008),
        *numerics(2048, 1e-5),
        *(OWN_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False), Rotary()),
    ),
    *(ENDS, "model.layers.", {**PROJECTIONS, **HEAD_NORMS, **GATED_MLP, **POST_NORMS}),
    {**ROOT, "norm_place": NormPlace.post, "qk_norm": QkNorm.heads},
)
PHI3 = Family(
    "phi3",
    (
        *sizes(32064, 3072, 32, 32, None, 8192),
        *numerics(4096, 1e-5),
        *(OWN_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False)),
        *(dropout("resid_pdrop", "dropout_hidden"), dropout("embd_pdrop", "dropout_embedding")),
        *(Fixed("attention_bias", False), Key(*WINDOW, None, null=True)),
        Rotary(part_default=1.0, kinds=("default", "longrope"), original=4096),
    ),
    *(ENDS, "model.layers."),
    {
        QKV: "self_attn.qkv_proj",
        "attention.out": "self_attn.o_proj",
        ("mlp.gate", "mlp.up"): "mlp.gate_up_proj",
        "mlp.out": "mlp.down_proj",
        **PRE_NORMS,
    },
    ROOT,
    code=r"(configuration|modeling)_phi3\.",
)
GPT_NEOX = Family(
    "gpt_neox",
    (
        *(part for part in sizes(50432, 6144, 44, 64, None, 24576) if "key_value" not in part.name),
        *numerics(2048, 1e-5, eps_name="layer_norm_eps"),
        *(Choice("hidden_act", "activation", "gelu", UNGATED), ATTENTION_DROPOUT, tied(False)),
        dropout("hidden_dropout", "dropout_hidden", "dropout_embedding"),
        Key("attention_bias", ATTENTION_BIASES, True),
        Key("use_parallel_residual", ("parallel_block", "parallel_norms"), True),
        Ignored(("attention_probs_dropout_prob", "hidden_dropout_prob")),
        Rotary("rotary_emb_base", part="rotary_pct", part_default=0.25),
    ),
    {
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    "gpt_neox.layers.",
    {
        QKV: "attention.query_key_value",
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.out": "mlp.dense_4h_to_h",
        **PRE_NORMS,
    },
    {**LAYERNORM, "bias_mlp": True},
    grouped=frozenset({"attention.query_key_value"}),
    ignored=(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)
FALCON = Family(
    "falcon",
    (
        Key("vocab_size", "vocab_size", 65024),
        Key("hidden_size", "hidden_size", 4544),
        Key("num_hidden_layers", "num_layers", 32, most=MOST_LAYERS),
        Key("num_attention_heads", "num_heads", 71),
        Key("ffn_hidden_size", "ffn_size", None, null=True),
        *numerics(2048, 1e-5, eps_name="layer_norm_epsilon"),
        *(Choice("activation", "activation", "gelu", UNGATED), Key("bias", BIASES, False)),
        *(ATTENTION_DROPOUT, dropout("hidden_dropout", "dropout_hidden"), tied(True)),
        *(Fixed("alibi", False), Fixed("apply_residual_connection_post_layernorm", False)),
        *(Falcon(), Rotary()),
    ),
    {
        "embedding": "transformer.word_embeddings",
        "final_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.",
    {
        QKV: "self_attention.query_key_value",
        "attention.out": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.out": "mlp.dense_4h_to_h",
        **PRE_NORMS,
    },
    LAYERNORM,
    own_norms={"attention.norm": "ln_attn", "mlp.norm": "ln_mlp"},
    grouped=frozenset({"self_attention.query_key_value"}),
    code=r"(configuration|modeling)_falcon\.",
)
STARCODER2 = Family(
    "starcoder2",
    (
        *sizes(49152, 3072, 30, 24, 2, 12288),
        *numerics(4096, 1e-5, 0.018042, eps_name="norm_epsilon"),
        *(OWN_HEAD_DIM, Choice("hidden_act", "activation", "gelu_pytorch_tanh", UNGATED)),
        *(Key("use_bias", BIASES, True), Key(*WINDOW, None, null=True), tied(True)),
        *(ATTENTION_DROPOUT, dropout("residual_dropout", "dropout_hidden")),
        dropout("embedding_dropout", "dropout_embedding"),
        *(Fixed("norm_type", "layer_norm"), Fixed("mlp_type", "default")),
        *(Fixed("scale_attn_weights", True), Ignored(("layer_norm_epsilon",)), Rotary()),
    ),
    *(ENDS, "model.layers."),
    {**PROJECTIONS, "mlp.up": "mlp.c_fc", "mlp.out": "mlp.c_proj", **PRE_NORMS},
    LAYERNORM,
)
NEMOTRON = Family(
    "nemotron",
    (
        *sizes(256000, 6144, 32, 48, None, 24576),
        *numerics(4096, 1e-5, 0.0134, eps_name="norm_eps"),
        *(HEAD_DIM, Choice("hidden_act", "activation", "relu2", UNGATED), ATTENTION_BIAS),
        *(Key("mlp_bias", "bias_mlp", False), ATTENTION_DROPOUT, tied(False)),
        *(Rotary(part_default=0.5), Fixed("pretraining_tp", 1)),
        Ignored(("layer_norm_eps", "rope_percent")),
    ),
    *(ENDS, "model.layers."),
    {**PROJECTIONS, "mlp.up": "mlp.up_proj", "mlp.out": "mlp.down_proj", **PRE_NORMS},
    {**LAYERNORM, "norm_one_plus": True},
)
GPT2_PARTS = (
    Key("n_embd", "hidden_size", 768),
    Key("n_layer", "num_layers", 12, most=MOST_LAYERS),
    Key("n_head", "num_heads", 12),
    Key("n_inner", "ffn_size", None, null=True),
    Choice("activation_function", "activation", "gelu_new", UNGATED),
    Key("layer_norm_epsilon", "norm_eps", 1e-5),
    Key("initializer_range", "init_std", 0.02, zero=True),
    dropout("resid_pdrop", "dropout_hidden", default=0.1),
    dropout("embd_pdrop", "dropout_embedding", default=0.1),
    dropout("attn_pdrop", "dropout_attention", default=0.1),
)
GPT2 = Family(
    "gpt2",
    (
        Key("vocab_size", "vocab_size", 50257),
        Key("n_positions", "max_position", 1024),
        *GPT2_PARTS,
        *(tied(True), Fixed("scale_attn_weights", True)),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Ignored(("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj")),
        Ignored(("summary_activation", "summary_proj_to_labels", "summary_first_dropout")),
    ),
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.",
    {
        QKV: "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
        "attention.norm": "ln_1",
        "mlp.norm": "ln_2",
    },
    {**LAYERNORM, **dict.fromkeys(BIASES, True), "position": Position.learned},
    outputs_first=False,
    ignored=(r"\.attn\.(bias|masked_bias)$",),
)

DENSE: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Olmo2ForCausalLM": OLMO2,
    "Phi3ForCausalLM": PHI3,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "FalconForCausalLM": FALCON,
    "Starcoder2ForCausalLM": STARCODER2,
    "NemotronForCausalLM": NEMOTRON,
    "GPT2LMHeadModel": GPT2,
}
