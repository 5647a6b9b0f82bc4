"""Tables of the dense decoder families of Hugging Face's transformers: one `Family` for each model
class. expert_tables.py holds the families with experts.

Defaults are those of transformers' config classes: a key that a config.json lacks has that value.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.config.model import ModelConfig, Norm, NormPlace, Position
from maxmeg.hf.families.binding import Columns, Consecutive, Interleaved
from maxmeg.hf.families.keys import (
    MAX_LAYERS,
    Choice,
    Falcon,
    Fixed,
    Ignored,
    Key,
    ParallelResidual,
    Part,
    QueryScalar,
    ScaledEmbedding,
)
from maxmeg.hf.families.rotary import Rotary
from maxmeg.hf.families.windows import AlternatingWindow, LateWindow

Modules = Mapping[typing.Any, str]  # maxmeg's name, or a tuple of names -> transformers' name
ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"}


@dataclasses.dataclass(frozen=True)
class MtpNames:
    """Names of an MTP layer's modules, and the prefix of those of its transformer layer.

    In them {layer} stands for the layer's number after those of the model, {depth} for its number
    among MTP layers. Where each sublayer is a layer of its own, {place} counts them, from {first}
    to {last} in this MTP layer.
    """

    embedding_norm: str = "model.layers.{layer}.enorm"
    hidden_norm: str = "model.layers.{layer}.hnorm"
    projection: str = "model.layers.{layer}.eh_proj"
    final_norm: str = "model.layers.{layer}.shared_head.norm"
    prefix: str = "model.layers.{layer}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one model class of transformers stores its settings and its tensors.

    Modules are named without `.weight` and `.bias`, modules of a layer also without the layer's
    prefix; maxmeg's names are like `attention.query` and `mlp.norm`. A tuple of maxmeg's names
    stands for projections that transformers fuses into one module.

    model_type: as in config.json. parts: the keys of config.json. constants: fields of ModelConfig
    that all models of the family share. ends: modules outside the layers. layer: prefix of a
    layer's modules, followed by the layer's number. layers: modules of a layer. own_norms: their
    norms where each mixer of a parallel block has a norm of its own. arrays: tensors of a layer
    that are not a module's weight or bias. shapes: full shape of each vector that is stored with
    extra dimensions of size 1; -1 stands for its length. experts: weights of the experts, with {}
    for the expert's number, or of all experts stacked, several projections as `stacking` says.
    joined: as `experts`, for files that store all experts of a layer in one tensor (Consecutive);
    such files are read, not written. by_layer: {array: (tensor, how)}, where the tensor holds the
    arrays of all layers one after the other. repeated_keys: keys that an export repeats from the
    imported config.json where this changes no result. grouped: fused modules, outputs [queries..
    key value] for each key/value head, or what belongs to each key head of the delta rule.
    outputs_first: whether projections are stored as [out, in]. ignored: patterns of tensors that
    hold no weights. renamed: (pattern, replacement) for names in other files. copies: tensors that
    may repeat the embedding. layer_names(model, number): (prefix, modules) of a layer, where these
    differ by layer. code: pattern of remote-code modules that compute the same as transformers;
    they are never run. mtp: names of MTP layers, for families with a key for their number.
    never_null: ids of special tokens that transformers' class refuses as null.
    """

    model_type: str
    parts: Sequence[Part]
    layers: Modules
    constants: Mapping[str, typing.Any]
    ends: Modules = dataclasses.field(default_factory=lambda: ENDS)
    layer: str = "model.layers."
    own_norms: Modules = dataclasses.field(default_factory=dict)
    grouped: frozenset[str] = frozenset()
    outputs_first: bool = True
    arrays: Modules = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    experts: Modules = dataclasses.field(default_factory=dict)
    stacking: type[Interleaved | Consecutive | Columns] = Interleaved
    joined: Modules = dataclasses.field(default_factory=dict)
    by_layer: Mapping[str, tuple[str, type[Columns | Consecutive]]] = dataclasses.field(
        default_factory=dict
    )
    repeated_keys: tuple[str, ...] = ()
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    renamed: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()
    layer_names: Callable[[ModelConfig, int], tuple[str, Modules]] | None = None
    code: str = ""
    mtp: MtpNames = MtpNames()
    never_null: tuple[str, ...] = ()


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
BIASES = ("attention.bias_qkv", "attention.bias_out", "mlp.bias")
ATTENTION_BIASES = BIASES[:2]


def sizes(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int | None, ffn: int
) -> list[Key]:
    """The keys of a model's sizes under their usual names, with their defaults."""
    return [
        Key("vocab_size", "vocab_size", vocab),
        Key("hidden_size", "hidden_size", hidden),
        Key("num_hidden_layers", "num_layers", layers, most=MAX_LAYERS),
        Key("num_attention_heads", "attention.num_heads", heads),
        Key("num_key_value_heads", "attention.num_kv_heads", kv_heads, null=True),
        Key("intermediate_size", "mlp.ffn_size", ffn),
    ]


def numerics(
    position: int, eps: float, std: float = 0.02, eps_name: str = "rms_norm_eps"
) -> list[Key]:
    """The keys of the context length, the norms' epsilon and the initial standard deviation."""
    return [
        Key("max_position_embeddings", "max_position", position),
        Key(eps_name, "norm_eps", eps),
        Key("initializer_range", "init_std", std, zero=True),
    ]


def tied(default: bool) -> Key:
    return Key("tie_word_embeddings", "tied", default)


def dropout(name: str, *fields: str, default: float = 0.0) -> Key:
    return Key(name, fields, default, null=True, zero=True)


HEAD_DIM = Key("head_dim", "attention.head_dim", None, null=True)
OPTIONAL_HEAD_DIM = Key("head_dim", "attention.head_dim", None, null=True, optional=True)
SILU = Choice("hidden_act", "mlp.activation", "silu", GATED)
ATTENTION_DROPOUT = dropout("attention_dropout", "attention.dropout")
ATTENTION_BIAS = Key("attention_bias", ATTENTION_BIASES, False)
WINDOW = "sliding_window", "attention.window"

SEEING: dict[str, typing.Any] = {  # files of the language model in a vision-language model
    "ignored": (
        r"rotary_emb\.inv_freq$",
        r"^(model\.)?(vision_tower|multi_modal_projector)\.",
    ),
    "renamed": (
        (r"^(language_model\.model|model\.language_model)\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
}

LLAMA = Family(
    model_type="llama",
    parts=sizes(32000, 4096, 32, 32, None, 11008)
    + numerics(2048, 1e-6)
    + [HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False)]
    + [Key("mlp_bias", "mlp.bias", False), Fixed("pretraining_tp", 1)]
    + [Fixed("rope_interleaved", False), Rotary()],
    layers=LLAMA_LAYER,
    constants=ROOT,
)
MISTRAL = Family(
    model_type="mistral",
    parts=sizes(32000, 4096, 32, 32, 8, 14336)
    + numerics(131072, 1e-6)
    + [HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False)]
    + [Key(*WINDOW, 4096, null=True), Rotary()],
    layers=LLAMA_LAYER,
    constants=ROOT,
    **SEEING,
)
QWEN2 = Family(
    model_type="qwen2",
    parts=sizes(151936, 4096, 32, 32, 32, 22016)
    + numerics(32768, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False)]
    + [LateWindow(), Fixed("use_mrope", False), Rotary()],
    layers=LLAMA_LAYER,
    constants={**ROOT, "attention.bias_qkv": True},
)
QWEN3 = Family(
    model_type="qwen3",
    parts=sizes(151936, 4096, 32, 32, 32, 22016)
    + numerics(32768, 1e-6)
    + [Key("head_dim", "attention.head_dim", 128), SILU, ATTENTION_BIAS, ATTENTION_DROPOUT]
    + [tied(False), LateWindow(), Rotary()],
    layers={**LLAMA_LAYER, **HEAD_NORMS},
    constants={**ROOT, "attention.qk_norm": QkNorm.head},
)
GEMMA = {**ROOT, "norm_one_plus": True, "norm_place": NormPlace.sandwich}
GEMMA_PARTS: list[Part] = [
    Key("head_dim", "attention.head_dim", 256),
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    tied(True),
    Choice("hidden_activation", "mlp.activation", "gelu_pytorch_tanh", GATED),
    ScaledEmbedding(),
    QueryScalar(),
    Ignored("hidden_act", "sliding_window_size"),
    Fixed("use_bidirectional_attention", False),
]
GEMMA_LAYER = {
    **PROJECTIONS,
    **GATED_MLP,
    **POST_NORMS,
    "attention.norm": "input_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
}
GEMMA2 = Family(
    model_type="gemma2",
    parts=sizes(256000, 2304, 26, 8, 4, 9216)
    + numerics(8192, 1e-6)
    + GEMMA_PARTS
    + [Key("final_logit_softcapping", "logit_softcap", 30.0, null=True)]
    + [Key("attn_logit_softcapping", "attention.softcap", 50.0, null=True)]
    + [AlternatingWindow(2), Rotary()],
    layers=GEMMA_LAYER,
    constants=GEMMA,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    parts=sizes(262208, 2304, 26, 8, 4, 9216)
    + numerics(131072, 1e-6)
    + GEMMA_PARTS
    + [Key("final_logit_softcapping", "logit_softcap", None, null=True)]
    + [Ignored("attn_logit_softcapping")]  # transformers reads the key without applying it
    + [AlternatingWindow(6, "sliding_window_pattern")]
    + [Rotary(default=1e6, local="rope_local_base_freq")],
    layers={**GEMMA_LAYER, **HEAD_NORMS},
    constants={**GEMMA, "attention.qk_norm": QkNorm.head},
    **SEEING,
)
OLMO2 = Family(
    model_type="olmo2",
    parts=sizes(50304, 4096, 32, 32, None, 11008)
    + numerics(2048, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False), Rotary()],
    layers={**PROJECTIONS, **HEAD_NORMS, **GATED_MLP, **POST_NORMS},
    constants={**ROOT, "norm_place": NormPlace.post, "attention.qk_norm": QkNorm.heads},
)
PHI3 = Family(
    model_type="phi3",
    parts=sizes(32064, 3072, 32, 32, None, 8192)
    + numerics(4096, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False)]
    + [dropout("resid_pdrop", "dropout_hidden"), dropout("embd_pdrop", "dropout_embedding")]
    + [Fixed("attention_bias", False), Key(*WINDOW, None, null=True)]
    + [Rotary(fraction_default=1.0, kinds=("default", "longrope"), original=4096)],
    layers={
        QKV: "self_attn.qkv_proj",
        "attention.out": "self_attn.o_proj",
        ("mlp.gate", "mlp.up"): "mlp.gate_up_proj",
        "mlp.out": "mlp.down_proj",
        **PRE_NORMS,
    },
    constants=ROOT,
    code=r"(configuration|modeling)_phi3\.",
)
FOUR_H = {"mlp.up": "mlp.dense_h_to_4h", "mlp.out": "mlp.dense_4h_to_h"}
GPT_NEOX = Family(
    model_type="gpt_neox",
    parts=[key for key in sizes(50432, 6144, 44, 64, None, 24576) if "key_value" not in key.name]
    + numerics(2048, 1e-5, eps_name="layer_norm_eps")
    + [Choice("hidden_act", "mlp.activation", "gelu", UNGATED), ATTENTION_DROPOUT, tied(False)]
    + [dropout("hidden_dropout", "dropout_hidden", "dropout_embedding")]
    + [Key("attention_bias", ATTENTION_BIASES, True), ParallelResidual()]
    + [Ignored("attention_probs_dropout_prob", "hidden_dropout_prob")]
    + [Rotary("rotary_emb_base", fraction="rotary_pct", fraction_default=0.25)],
    ends={
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    layer="gpt_neox.layers.",
    layers={
        QKV: "attention.query_key_value",
        "attention.out": "attention.dense",
        **FOUR_H,
        **PRE_NORMS,
    },
    constants={**LAYERNORM, "mlp.bias": True},
    grouped=frozenset({"attention.query_key_value"}),
    ignored=(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)
FALCON_SIZES = [
    Key("vocab_size", "vocab_size", 65024),
    Key("hidden_size", "hidden_size", 4544),
    Key("num_hidden_layers", "num_layers", 32, most=MAX_LAYERS),
    Key("num_attention_heads", "attention.num_heads", 71),
    Key("ffn_hidden_size", "mlp.ffn_size", None, null=True),
]
FALCON = Family(
    model_type="falcon",
    parts=FALCON_SIZES
    + numerics(2048, 1e-5, eps_name="layer_norm_epsilon")
    + [Choice("activation", "mlp.activation", "gelu", UNGATED), Key("bias", BIASES, False)]
    + [ATTENTION_DROPOUT, dropout("hidden_dropout", "dropout_hidden"), tied(True)]
    + [Fixed("alibi", False), Fixed("apply_residual_connection_post_layernorm", False)]
    + [Falcon(), Rotary()],
    ends={
        "embedding": "transformer.word_embeddings",
        "final_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer="transformer.h.",
    layers={
        QKV: "self_attention.query_key_value",
        "attention.out": "self_attention.dense",
        **FOUR_H,
        **PRE_NORMS,
    },
    constants=LAYERNORM,
    own_norms={"attention.norm": "ln_attn", "mlp.norm": "ln_mlp"},
    grouped=frozenset({"self_attention.query_key_value"}),
    code=r"(configuration|modeling)_falcon\.",
)
STARCODER2 = Family(
    model_type="starcoder2",
    parts=sizes(49152, 3072, 30, 24, 2, 12288)
    + numerics(4096, 1e-5, 0.018042, eps_name="norm_epsilon")
    + [OPTIONAL_HEAD_DIM, Choice("hidden_act", "mlp.activation", "gelu_pytorch_tanh", UNGATED)]
    + [Key("use_bias", BIASES, True), Key(*WINDOW, None, null=True), tied(True)]
    + [ATTENTION_DROPOUT, dropout("residual_dropout", "dropout_hidden")]
    + [dropout("embedding_dropout", "dropout_embedding")]
    + [Fixed("norm_type", "layer_norm"), Fixed("mlp_type", "default")]
    + [Fixed("scale_attn_weights", True), Ignored("layer_norm_epsilon"), Rotary()],
    layers={**PROJECTIONS, "mlp.up": "mlp.c_fc", "mlp.out": "mlp.c_proj", **PRE_NORMS},
    constants=LAYERNORM,
)
NEMOTRON = Family(
    model_type="nemotron",
    parts=sizes(256000, 6144, 32, 48, None, 24576)
    + numerics(4096, 1e-5, 0.0134, eps_name="norm_eps")
    + [HEAD_DIM, Choice("hidden_act", "mlp.activation", "relu2", UNGATED), ATTENTION_BIAS]
    + [Key("mlp_bias", "mlp.bias", False), ATTENTION_DROPOUT, tied(False)]
    + [Rotary(fraction_default=0.5), Fixed("pretraining_tp", 1)]
    + [Ignored("layer_norm_eps", "rope_percent")],
    layers={**PROJECTIONS, "mlp.up": "mlp.up_proj", "mlp.out": "mlp.down_proj", **PRE_NORMS},
    constants={**LAYERNORM, "norm_one_plus": True},
)
GPT2_PARTS: list[Part] = [
    Key("n_embd", "hidden_size", 768),
    Key("n_layer", "num_layers", 12, most=MAX_LAYERS),
    Key("n_head", "attention.num_heads", 12),
    Key("n_inner", "mlp.ffn_size", None, null=True),
    Choice("activation_function", "mlp.activation", "gelu_new", UNGATED),
    Key("layer_norm_epsilon", "norm_eps", 1e-5),
    Key("initializer_range", "init_std", 0.02, zero=True),
    dropout("resid_pdrop", "dropout_hidden", default=0.1),
    dropout("embd_pdrop", "dropout_embedding", default=0.1),
    dropout("attn_pdrop", "attention.dropout", default=0.1),
]
GPT2 = Family(
    model_type="gpt2",
    parts=[
        Key("vocab_size", "vocab_size", 50257),
        Key("n_positions", "max_position", 1024),
        *GPT2_PARTS,
        tied(True),
        Fixed("scale_attn_weights", True),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Ignored("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj"),
        Ignored("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ],
    ends={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer="transformer.h.",
    layers={
        QKV: "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
        "attention.norm": "ln_1",
        "mlp.norm": "ln_2",
    },
    constants={**LAYERNORM, **dict.fromkeys(BIASES, True), "position": Position.learned},
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
