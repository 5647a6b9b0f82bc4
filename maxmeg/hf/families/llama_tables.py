"""Tables of dense decoder families that combine what Llama, Gemma and GPT-NeoX have."""

import dataclasses

from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.hf.families.keys import (
    MAX_LAYERS,
    Choice,
    Fields,
    Fixed,
    Ignored,
    Json,
    Key,
    Keys,
    Part,
    ScaledEmbedding,
    refused,
)
from maxmeg.hf.families.mamba import GRANITE_SCALES, Scale
from maxmeg.hf.families.rotary import ORIGINAL, Rotary, UnscaledLocal
from maxmeg.hf.families.tables import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    BIASES,
    GATED,
    GATED_MLP,
    GEMMA2,
    GPT2,
    GPT2_PARTS,
    HEAD_DIM,
    HEAD_NORMS,
    LAYERNORM,
    LLAMA_LAYER,
    MISTRAL,
    OLMO2,
    OPTIONAL_HEAD_DIM,
    POST_NORMS,
    PRE_NORMS,
    PROJECTIONS,
    ROOT,
    SILU,
    UNGATED,
    Family,
    dropout,
    numerics,
    sizes,
    tied,
)
from maxmeg.hf.families.windows import (
    PATTERN,
    UNROTATED,
    AlternatingWindow,
    ListedWindow,
    UnrotatedGlobals,
    UnrotatedLayers,
)

MLP_BIAS = Key("mlp_bias", "mlp.bias", False)
PAIRS = {**ROOT, "rotary.interleaved": True}
JOINED_MLP = {("mlp.gate", "mlp.up"): "mlp.gate_up_proj", "mlp.out": "mlp.down_proj"}
OLD_GELU = {**GATED, "gelu": GATED["gelu_new"]}  # as transformers reads the first files of Gemma
UNGATED_LAYER = {
    **PROJECTIONS,
    **PRE_NORMS,
    "mlp.up": "mlp.up_proj",
    "mlp.out": "mlp.down_proj",
}


class OneNormBlock(Part):
    """Whether attention and MLP form a parallel block with one norm (StableLM)."""

    name = "use_parallel_residual"

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["parallel"] = keys.read(self.name, False, bool)

    def write(self, model: ModelConfig) -> Json:
        return {self.name: model.parallel_block}


SCORES = "attention_multiplier"


class AttentionScale(Scale):
    """The factor of the attention scores; null: 1 / sqrt(head size) (HyperCLOVA X)."""

    def __init__(self) -> None:
        super().__init__(SCORES, "attention.scale")

    def read(self, keys: Keys, fields: Fields) -> None:
        if keys.take(self.name) is not None:
            super().read(keys, fields)


GRANITE = Family(
    model_type="granite",
    parts=sizes(32000, 4096, 32, 32, None, 11008)
    + numerics(2048, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False), MLP_BIAS]
    + [*GRANITE_SCALES, Rotary()],
    layers=LLAMA_LAYER,
    constants=ROOT,
)
GLM = Family(
    model_type="glm",
    parts=sizes(151552, 4096, 40, 32, 2, 13696)
    + numerics(131072, 1.5625e-7)
    + [Key("head_dim", "attention.head_dim", 128, null=True), SILU, ATTENTION_DROPOUT]
    + [Key("attention_bias", "attention.bias_qkv", True), tied(False)]
    + [Rotary(fraction_default=0.5)],
    layers={**PROJECTIONS, **JOINED_MLP, **PRE_NORMS},
    constants=PAIRS,
)
GLM4 = dataclasses.replace(
    GLM,
    model_type="glm4",
    layers={
        **GLM.layers,
        "attention.post_norm": "post_self_attn_layernorm",
        "mlp.post_norm": "post_mlp_layernorm",
    },
    constants={**PAIRS, "norm_place": NormPlace.sandwich},
)
OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    parts=[part for part in OLMO2.parts if not isinstance(part, Rotary)]
    + [AlternatingWindow(4), UnscaledLocal(default=500000.0)],
)
GEMMA = Family(
    model_type="gemma",
    parts=sizes(256000, 3072, 28, 16, 16, 24576)
    + numerics(8192, 1e-6)
    + [Key("head_dim", "attention.head_dim", 256), ATTENTION_BIAS, ATTENTION_DROPOUT, tied(True)]
    + [Choice("hidden_act", "mlp.activation", "gelu_pytorch_tanh", OLD_GELU)]
    + [ScaledEmbedding(), Ignored("hidden_activation")]
    + [Fixed("use_bidirectional_attention", False), Rotary()],
    layers=LLAMA_LAYER,
    constants={**ROOT, "norm_one_plus": True},
)
VAULT_GEMMA = dataclasses.replace(
    GEMMA2,
    model_type="vaultgemma",
    layers={
        **PROJECTIONS,
        **GATED_MLP,
        "attention.norm": "input_layernorm",
        "mlp.norm": "pre_feedforward_layernorm",
    },
    constants={**ROOT, "norm_one_plus": True},
)
ARCEE = Family(
    model_type="arcee",
    parts=sizes(32000, 2560, 32, 32, None, 18432)
    + numerics(4096, 1e-5)
    + [HEAD_DIM, Choice("hidden_act", "mlp.activation", "relu2", UNGATED), ATTENTION_BIAS]
    + [MLP_BIAS, ATTENTION_DROPOUT, tied(False), Rotary()],
    layers=UNGATED_LAYER,
    constants=ROOT,
)
JAIS2 = Family(
    model_type="jais2",
    parts=sizes(150272, 3328, 32, 26, None, 26624)
    + numerics(8192, 1e-5, eps_name="layer_norm_eps")
    + [HEAD_DIM, Choice("hidden_act", "mlp.activation", "relu2", UNGATED)]
    + [Key("attention_bias", BIASES[:2], True), Key("mlp_bias", "mlp.bias", True)]
    + [ATTENTION_DROPOUT, tied(False), Rotary()],
    layers=UNGATED_LAYER,
    constants=LAYERNORM,
)
SEED_OSS = Family(
    model_type="seed_oss",
    parts=sizes(155136, 4096, 64, 80, 8, 27648)
    + numerics(524288, 1e-6)
    + [Key("head_dim", "attention.head_dim", 128, null=True), SILU, tied(False), MLP_BIAS]
    + [Key("attention_bias", "attention.bias_qkv", True)]
    + [Key("attention_out_bias", "attention.bias_out", False)]
    + [dropout("attention_dropout", "attention.dropout", default=0.1)]
    + [dropout("residual_dropout", "dropout_hidden", default=0.1)]
    + [Fixed("pretraining_tp", 1), Rotary()],
    layers=LLAMA_LAYER,
    constants=ROOT,
)
CWM_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    ORIGINAL: 8192,
}
CWM = Family(
    model_type="cwm",
    parts=sizes(128256, 6144, 64, 48, 8, 21504)
    + numerics(131072, 1e-5)
    + [Key("head_dim", "attention.head_dim", 128), SILU, ATTENTION_DROPOUT, tied(False)]
    + [Fixed("mlp_bias", False), Fixed("pretraining_tp", 1)]
    + [AlternatingWindow(4, default=8192, first=True)]
    + [Rotary(default=1e6, missing=CWM_LLAMA3)],
    layers=LLAMA_LAYER,
    constants=ROOT,
    never_null=("bos_token_id",),
)
HELIUM = Family(
    model_type="helium",
    parts=sizes(48000, 2560, 24, 20, 20, 7040)
    + numerics(4096, 1e-8)
    + [Key("head_dim", "attention.head_dim", 128), SILU, ATTENTION_DROPOUT, tied(False)]
    + [Key("attention_bias", "attention.bias_qkv", False), MLP_BIAS, Rotary(default=100000.0)],
    layers=LLAMA_LAYER,
    constants=PAIRS,
)
ERNIE = Family(
    model_type="ernie4_5",
    parts=sizes(103424, 1024, 18, 16, 2, 3072)
    + numerics(131072, 1e-5)
    + [Key("head_dim", "attention.head_dim", 128, null=True), SILU, tied(True)]
    + [Key("use_bias", BIASES, False), Rotary(default=500000.0)],
    layers=LLAMA_LAYER,
    constants=PAIRS,
)
COHERE = Family(
    model_type="cohere",
    parts=sizes(256000, 8192, 40, 64, None, 22528)
    + numerics(8192, 1e-5, eps_name="layer_norm_eps")
    + [SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(True), Fixed("use_qk_norm", False)]
    + [Scale("logit_scale", "logit_scale", default=0.0625), Rotary(default=500000.0)],
    layers={**LLAMA_LAYER, "attention.norm": "input_layernorm"},
    constants={**LAYERNORM, "norm_bias": False, "rotary.interleaved": True, "parallel": True},
)
COHERE2 = dataclasses.replace(
    COHERE,
    model_type="cohere2",
    parts=sizes(256000, 8192, 40, 64, None, 22528)
    + numerics(8192, 1e-5, eps_name="layer_norm_eps")
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(True)]
    + [Scale("logit_scale", "logit_scale", default=0.0625)]
    + [AlternatingWindow(4, PATTERN), UnrotatedGlobals(), Rotary()],
)
EXAONE4 = Family(
    model_type="exaone4",
    parts=sizes(102400, 4096, 32, 32, 32, 16384)
    + numerics(2048, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False), ListedWindow(4), Rotary()],
    layers={**PROJECTIONS, **HEAD_NORMS, **GATED_MLP, **POST_NORMS},
    constants={**ROOT, "norm_place": NormPlace.post, "attention.qk_norm": QkNorm.head},
)
SMOLLM3 = Family(
    model_type="smollm3",
    parts=sizes(128256, 2048, 36, 16, 4, 11008)
    + numerics(32768, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(True), MLP_BIAS]
    + [Fixed("use_sliding_window", False), Ignored("sliding_window", "max_window_layers")]
    + [UnrotatedLayers(), Fixed("pretraining_tp", 1), Rotary(default=2e6)],
    layers=LLAMA_LAYER,
    constants=ROOT,
)
STABLE_LM = Family(
    model_type="stablelm",
    parts=sizes(50304, 2560, 32, 32, 32, 6912)
    + numerics(4096, 1e-5, eps_name="layer_norm_eps")
    + [SILU, ATTENTION_DROPOUT, tied(False), Fixed("qk_layernorm", False)]
    + [Key("use_qkv_bias", "attention.bias_qkv", False), Fixed("hidden_dropout", 0.0)]
    + [OneNormBlock(), Rotary(fraction_default=0.25)],
    layers=LLAMA_LAYER,
    constants=LAYERNORM,
)
MINISTRAL = dataclasses.replace(
    MISTRAL,
    model_type="ministral",
    parts=[*MISTRAL.parts[:-2], ListedWindow(), Rotary()],
)
HYPERCLOVAX = dataclasses.replace(
    GRANITE,
    model_type="hyperclovax",
    parts=[
        *[part for part in GRANITE.parts if not isinstance(part, Scale | Rotary)],
        *[Fixed("use_post_norm", True), Scale("logits_scaling", "logit_scale")],
        *[Scale("embedding_multiplier", "embedding_scale"), Fixed("residual_multiplier", 1.0)],
        *[AttentionScale(), Rotary()],
    ],
    layers={**LLAMA_LAYER, "attention.post_norm": "post_norm1", "mlp.post_norm": "post_norm2"},
    constants={**ROOT, "norm_place": NormPlace.sandwich},
)


class LayerBases(Part):
    """The base of each layer's rotary embedding, 0 for a layer without one (Granite SWA)."""

    name = "layer_rope_theta"

    def read(self, keys: Keys, fields: Fields) -> None:
        bases, local = keys.take(self.name), fields["local"]
        if bases is None:
            return
        is_list = isinstance(bases, list) and len(bases) == len(local)
        is_list = is_list and all(isinstance(base, int | float) for base in bases)
        rotated = {float(base) for base in bases if base} if is_list else set()
        if not is_list or len(rotated) > 1:
            raise refused(self.name, bases, f"it must be {len(local)} times one number, or 0")
        if any(is_local and not base for is_local, base in zip(local, bases, strict=True)):
            raise refused(self.name, bases, "layers with a sliding window must have a base")
        fields["rotary.base"] = next(iter(rotated), fields["rotary.base"])
        fields["first"] = [
            "local" if is_local else "attention" if base else UNROTATED
            for is_local, base in zip(local, bases, strict=True)
        ]

    def write(self, model: ModelConfig) -> Json:
        mixers = [model.mixers(layer) for layer in range(model.num_layers)]
        return {self.name: [0 if UNROTATED in names else model.rotary.base for names in mixers]}


GRANITE_SWA = dataclasses.replace(
    GRANITE,
    model_type="granite_swa",
    parts=sizes(100352, 2560, 24, 20, 4, 8192)
    + numerics(8192, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(True), MLP_BIAS]
    + [AlternatingWindow(4, default=128, first=True), *GRANITE_SCALES, Rotary(), LayerBases()],
    constants={**ROOT, "attention.sinks": True},
    arrays={"attention.sinks": "self_attn.sinks"},
)
STARCODER = dataclasses.replace(
    GPT2,
    model_type="gpt_bigcode",
    parts=[
        Key("vocab_size", "vocab_size", 50257),
        Key("n_positions", "max_position", 1024),
        *[part for part in GPT2_PARTS if not isinstance(part, Choice)],
        Choice("activation_function", "mlp.activation", "gelu_pytorch_tanh", UNGATED),
        *[tied(True), Fixed("scale_attn_weights", True), Fixed("multi_query", True)],
        Ignored("num_key_value_heads"),
    ],
    constants={**GPT2.constants, "attention.num_kv_heads": 1},
    outputs_first=True,
)


class OffsetPositions(Part):
    """The learned positions begin with two rows that no token reads (OPT)."""

    name, offset = "max_position_embeddings", 2

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["max_position"] = keys.read(self.name, 2048, int) + self.offset
        fields["bert.position_offset"] = self.offset

    def write(self, model: ModelConfig) -> Json:
        return {self.name: model.max_position - self.offset}


class WordWidth(Part):
    """word_embed_proj_dim must be hidden_size, as in all models but OPT 350M."""

    name = "word_embed_proj_dim"

    def read(self, keys: Keys, fields: Fields) -> None:
        width = keys.take(self.name)
        if width not in (None, fields["hidden_size"]):
            raise refused(self.name, width, f"it must be hidden_size={fields['hidden_size']}")

    def write(self, model: ModelConfig) -> Json:
        return {self.name: model.hidden_size}


OPT = Family(
    model_type="opt",
    parts=[
        Key("vocab_size", "vocab_size", 50272),
        Key("hidden_size", "hidden_size", 768),
        Key("num_hidden_layers", "num_layers", 12, most=MAX_LAYERS),
        Key("num_attention_heads", "attention.num_heads", 12),
        Key("ffn_dim", "mlp.ffn_size", 3072),
        Key("init_std", "init_std", 0.02, zero=True),
        Key("enable_bias", BIASES, True),
        Choice("activation_function", "mlp.activation", "relu", {"relu": Activation.relu}),
        dropout("dropout", "dropout_hidden", "dropout_embedding", default=0.1),
        *[ATTENTION_DROPOUT, tied(True), OffsetPositions(), WordWidth()],
        *[Fixed("do_layer_norm_before", True), Fixed("_remove_final_layer_norm", False)],
        *[Fixed("layerdrop", 0.0), Fixed("layer_norm_elementwise_affine", True)],
    ],
    ends={
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "output": "lm_head",
    },
    layer="model.decoder.layers.",
    layers={
        **PROJECTIONS,
        "attention.out": "self_attn.out_proj",
        "attention.norm": "self_attn_layer_norm",
        "mlp.norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.out": "fc2",
    },
    constants={**LAYERNORM, "position": Position.learned},
    renamed=((r"^decoder\.", "model.decoder."),),
)
SIMILAR: dict[str, Family] = {
    "GPTBigCodeForCausalLM": STARCODER,
    "OPTForCausalLM": OPT,
    "HyperCLOVAXForCausalLM": HYPERCLOVAX,
    "GraniteSWAForCausalLM": GRANITE_SWA,
    "GraniteForCausalLM": GRANITE,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "Olmo3ForCausalLM": OLMO3,
    "GemmaForCausalLM": GEMMA,
    "VaultGemmaForCausalLM": VAULT_GEMMA,
    "ArceeForCausalLM": ARCEE,
    "Jais2ForCausalLM": JAIS2,
    "SeedOssForCausalLM": SEED_OSS,
    "CwmForCausalLM": CWM,
    "HeliumForCausalLM": HELIUM,
    "Ernie4_5ForCausalLM": ERNIE,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Exaone4ForCausalLM": EXAONE4,
    "SmolLM3ForCausalLM": SMOLLM3,
    "StableLmForCausalLM": STABLE_LM,
    "MinistralForCausalLM": MINISTRAL,
}
