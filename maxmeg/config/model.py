"""Settings of the model: its architecture and numerics."""

import dataclasses
import enum
import math

from maxmeg.config.lazy import Lazy
from maxmeg.config.setting import setting

experts = Lazy("maxmeg.config.experts")


class Position(enum.Enum):
    rotary = "rotary"
    learned = "learned"
    none = "none"


class Norm(enum.Enum):
    rmsnorm = "rmsnorm"
    layernorm = "layernorm"


class Activation(enum.Enum):
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    swiglu = "swiglu"
    geglu = "geglu"
    quick_geglu = "quick_geglu"
    relu_squared = "relu_squared"


class Recompute(enum.Enum):
    none = "none"
    selective = "selective"
    full = "full"


class DType(enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class AttentionBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    cudnn = "cudnn"
    mosaic = "mosaic"
    triton = "triton"


class RotaryScaling(enum.Enum):
    none = "none"
    linear = "linear"
    ntk = "ntk"
    dynamic = "dynamic"
    llama3 = "llama3"
    yarn = "yarn"
    longrope = "longrope"


class NormPlace(enum.Enum):
    pre = "pre"
    post = "post"
    sandwich = "sandwich"


class QkNorm(enum.Enum):
    none = "none"
    head = "head"
    heads = "heads"
    l2 = "l2"


class RouterScore(enum.Enum):
    softmax = "softmax"
    sigmoid = "sigmoid"
    sqrt_softplus = "sqrt_softplus"


class ExpertBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    mosaic = "mosaic"


class ExpertDrop(enum.Enum):
    position = "position"
    weight = "weight"


@dataclasses.dataclass
class ModelConfig:
    """Architecture and numerics of the language model."""

    vocab_size: int = setting(0, "tokens without padding; 0 takes the tokenizer's", "--vocab-size")
    vocab_divisible_by: int = setting(
        128, "padding: to this times parallel.tensor", "--make-vocab-size-divisible-by"
    )
    num_layers: int = setting(4, "transformer layers", "--num-layers")
    hidden_size: int = setting(128, "width of the residual stream", "--hidden-size")
    num_heads: int = setting(4, "query heads", "--num-attention-heads")
    num_kv_heads: int = setting(
        0, "key/value heads, divides num_heads; 0: as many; 1: MQA", "--num-query-groups"
    )
    head_dim: int = setting(
        0,
        "size of a head; 0: hidden_size / num_heads; with mla_kv_rank: of the part that does not "
        "rotate (--qk-head-dim)",
        "--kv-channels",
    )
    mla_kv_rank: int = setting(
        0, "multi-latent attention: size of the keys' and values' latent; 0: off", "--kv-lora-rank"
    )
    mla_query_rank: int = setting(
        0, "size of the queries' latent; 0: one projection makes them", "--q-lora-rank"
    )
    mla_rotary_size: int = setting(
        64, "size of a head's part that rotates; heads share its key", "--qk-pos-emb-head-dim"
    )
    mla_value_size: int = setting(0, "size of a head's values; 0: head_dim", "--v-head-dim")
    mla_norm_eps: float = setting(0.0, "norm_eps of the latents' norms; 0: as of the others")
    ffn_size: int = setting(
        0,
        "inner width of the MLP; 0: 4 x hidden_size, or int(8/3 hidden_size / 64) x 64 when gated",
        "--ffn-hidden-size",
    )
    activation: Activation = setting(
        Activation.swiglu, "MLP nonlinearity; those with glu in their names are gated", "--swiglu"
    )
    activation_clamp: float = setting(
        0.0,
        "of a gated activation: its input is at most this, what it gates within +- this; 0: none",
        "--activation-func-clamp-value",
    )
    glu_offset: float = setting(
        0.0, "added to what a gated activation gates (GPT-OSS: 1)", "--glu-linear-offset"
    )
    norm: Norm = setting(Norm.rmsnorm, "kind of normalization", "--normalization")
    norm_eps: float = setting(1e-5, "added to the variance", "--norm-epsilon")
    norm_one_plus: bool = setting(False, "norm weights are stored as w - 1", "--apply-layernorm-1p")
    norm_place: NormPlace = setting(
        NormPlace.pre, "what sublayers normalize: their input, their output (OLMo 2), or both"
    )
    position: Position = setting(
        Position.rotary, "how positions enter", "--position-embedding-type"
    )
    max_position: int = setting(
        0,
        "longest sequence; size of a learned table; 0: data.sequence_length",
        "--max-position-embeddings",
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies", "--rotary-base")
    rotary_fraction: float = setting(
        1.0, "part of each head that rotates, in (0, 1]", "--rotary-percent"
    )
    rotary_interleaved: bool = setting(
        False, "rotate pairs (2i, 2i+1) instead of halves", "--rotary-interleaved"
    )
    rotary_scaling: RotaryScaling = setting(
        RotaryScaling.none,
        "how frequencies change for sequences longer than rotary_original_length",
        "--use-rope-scaling",
    )
    rotary_factor: float = setting(
        1.0, "how much longer; at least 1; of linear also by how much", "--rope-scaling-factor"
    )
    rotary_original_length: int = setting(0, "tokens of the sequences before scaling")
    rotary_low: float = setting(
        1.0, "turns in the original length below which waves are divided (yarn: beta slow)"
    )
    rotary_high: float = setting(
        4.0, "turns above which waves are kept (llama3 4, yarn's beta fast 32)"
    )
    rotary_attention_factor: float = setting(
        0.0, "of queries and keys as they rotate; 0: what yarn and longrope derive from the factor"
    )
    rotary_truncate: bool = setting(True, "yarn's bounds are whole dimensions")
    rotary_short_factors: tuple[float, ...] = setting(
        (), "longrope: divisor of each frequency in rows up to the original length"
    )
    rotary_long_factors: tuple[float, ...] = setting((), "longrope: the same in longer rows")
    qk_norm: QkNorm = setting(
        QkNorm.none,
        "queries and keys are normalized: each head, all heads together (OLMo 2), or each head "
        "without weights (l2)",
        "--qk-layernorm",
    )
    num_experts: int = setting(
        0, "experts in place of the MLP, of which a token takes some; 0: none", "--num-experts"
    )
    experts_per_token: int = setting(2, "experts that a token goes to", "--moe-router-topk")
    expert_ffn_size: int = setting(
        0, "inner width of an expert; 0: that of the MLP", "--moe-ffn-hidden-size"
    )
    shared_ffn_size: int = setting(
        0,
        "inner width of an expert that every token goes to; 0: none",
        "--moe-shared-expert-intermediate-size",
    )
    shared_gate: bool = setting(
        False, "the token gates the shared expert", "--moe-shared-expert-gate"
    )
    expert_latent_size: int = setting(
        0,
        "experts read and write projections of that width, one for all; 0: the residual stream",
        "--moe-latent-size",
    )
    first_dense_layers: int = setting(0, "layers at the start that keep an MLP")
    expert_every: int = setting(
        1, "layers 0, n, 2n ... have experts, the others an MLP", "--moe-layer-freq"
    )
    expert_pattern: tuple[int, ...] = setting(
        (), "of every layer whether it has experts, 1 or 0; empty: see above", "--moe-layer-freq"
    )
    router_score: RouterScore = setting(
        RouterScore.softmax,
        "of an expert for a token: softmax | sigmoid | sqrt_softplus",
        "--moe-router-score-function",
    )
    router_over_all: bool = setting(
        False, "softmax over all experts, not over those chosen", "--moe-router-pre-softmax"
    )
    router_normalize: bool = setting(False, "a token's weights are divided by their sum")
    router_scale: float = setting(1.0, "multiplies the weights", "--moe-router-topk-scaling-factor")
    router_groups: int = setting(
        1, "groups of experts, of which a token uses some", "--moe-router-num-groups"
    )
    router_groups_kept: int = setting(1, "groups that a token uses", "--moe-router-group-topk")
    router_group_best: int = setting(
        0, "experts whose scores make a group's; 0: experts_per_token / router_groups_kept"
    )
    router_logit_bias: bool = setting(False, "the router's logits have a trained bias (GPT-OSS)")
    router_bias: bool = setting(
        False,
        "a bias on the scores, for the choice alone, evens loads without a loss",
        "--moe-router-enable-expert-bias",
    )
    router_bias_rate: float = setting(
        1e-3, "its step, after each global batch", "--moe-router-bias-update-rate"
    )
    router_aux_loss: float = setting(
        0.0, "coefficient of the loss of uneven loads, over a microbatch", "--moe-aux-loss-coeff"
    )
    router_sequence_aux_loss: float = setting(0.0, "the same over each sequence")
    router_global_aux_loss: float = setting(
        0.0, "the same over a global batch, by the loads of the one before it"
    )
    router_sinkhorn: bool = setting(
        False,
        "instead of these: in training a device's tokens are spread evenly, by Sinkhorn's scaling; "
        "weights are sigmoids for one expert a token, else softmax over all",
        "--moe-router-load-balancing-type",
    )
    router_jitter: float = setting(
        0.0,
        "in training the router's input is multiplied by noise from 1 - this to 1 + this",
        "--moe-input-jitter-eps",
    )
    benchmark_even_experts: bool = setting(
        False,
        "for benchmarks alone: tokens take the experts in turn, the router chooses nothing",
        "--moe-router-force-load-balancing",
    )
    router_z_loss: float = setting(
        0.0, "of logsumexp^2 of the router's logits", "--moe-z-loss-coeff"
    )
    expert_capacity: float = setting(
        0.0,
        "an expert takes this times its even share of a device's tokens; 0: all, none is dropped",
        "--moe-expert-capacity-factor",
    )
    expert_drop: ExpertDrop = setting(
        ExpertDrop.position,
        "beyond the capacity: the last tokens, or those of least weight",
        "--moe-token-drop-policy",
    )
    expert_pad: bool = setting(
        False,
        "every expert computes as many rows as it takes at most, some of them empty",
        "--moe-pad-expert-input-to-capacity",
    )
    expert_backend: ExpertBackend = setting(
        ExpertBackend.auto,
        "of the experts' products: xla, which on a GPU multiplies every token by every expert; "
        "mosaic on Hopper; auto: xla, until mosaic was measured",
        "--moe-grouped-gemm",
    )
    mtp_depths: int = setting(
        0, "further tokens that training predicts, each by one layer more", "--mtp-num-layers"
    )
    mtp_loss: float = setting(
        0.1, "times the mean of their losses is added", "--mtp-loss-scaling-factor"
    )
    attention_window: int = setting(
        0, "tokens that a token attends to, itself among them; 0: all before it", "--window-size"
    )
    attention_global_every: int = setting(
        0, "with a window: every n-th layer attends to all tokens before it; 0: none does"
    )
    rotary_local_base: float = setting(
        0.0, "base in layers with a window beside global ones, unscaled; 0: rotates as in those"
    )
    attention_softcap: float = setting(0.0, "scores become c tanh(scores / c); 0: off")
    attention_scale: float = setting(0.0, "of the scores; 0: 1 / sqrt(size of a key)")
    attention_sinks: bool = setting(
        False, "a learned logit a head in the softmax's denominator", "--softmax-type"
    )
    bias_qkv: bool = setting(
        False, "biases on query, key, value; with mla_kv_rank: of latents", "--add-qkv-bias"
    )
    bias_attention_out: bool = setting(
        False, "bias on the attention output (the flag is its negation)", "--disable-bias-linear"
    )
    bias_mlp: bool = setting(
        False, "biases on the MLP's projections (the flag is its negation)", "--disable-bias-linear"
    )
    parallel_block: bool = setting(False, "attention and MLP read the same norm and are summed")
    parallel_norms: bool = setting(
        False, "attention and MLP of a parallel block have a norm each (GPT-NeoX, Falcon 40B)"
    )
    embedding_scale: float = setting(1.0, "multiplies the embedding (Gemma: sqrt(hidden_size))")
    tied: bool = setting(
        False,
        "output weights are the embedding's (the flag is its negation)",
        "--untie-embeddings-and-output-weights",
    )
    dropout_hidden: float = setting(
        0.0, "dropout before each residual sum, in [0, 1)", "--hidden-dropout"
    )
    dropout_attention: float = setting(
        0.0, "dropout of attention weights, in [0, 1)", "--attention-dropout"
    )
    dropout_embedding: float = setting(0.0, "dropout after the embedding, in [0, 1)")
    logit_softcap: float = setting(0.0, "logits become c tanh(logits / c); 0: off")
    init_std: float = setting(0.02, "standard deviation of initial weights", "--init-method-std")
    scaled_output_init: bool = setting(
        True, "attention and MLP output weights start at init_std / sqrt(2 num_layers)"
    )
    dtype: DType = setting(DType.bfloat16, "compute dtype; masters are float32", "--bf16")
    attention_backend: AttentionBackend = setting(
        AttentionBackend.auto, "auto: cudnn on a GPU where it can, else xla", "--attention-backend"
    )
    recompute: Recompute = setting(
        Recompute.none,
        "made again in backward: none (what is cheap) | selective (attention and what mla makes of "
        "latents too) | full (layers)",
        "--recompute-granularity",
    )
    scan_layers: bool = setting(
        True, "layers run as a loop; false: one program, longer to compile, that copies less"
    )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // max(self.num_heads, 1)

    @property
    def key_size(self) -> int:
        """Of a head's queries and keys."""
        return self.head_size + (self.mla_rotary_size if self.mla_kv_rank else 0)

    @property
    def value_size(self) -> int:
        return (self.mla_value_size if self.mla_kv_rank else 0) or self.head_size

    @property
    def rotated_size(self) -> int:
        """Of the part of a head that rotates."""
        share = int(self.head_size * self.rotary_fraction)
        return self.mla_rotary_size if self.mla_kv_rank else share

    @property
    def gated(self) -> bool:
        return "glu" in self.activation.value

    @property
    def ffn(self) -> int:
        gated = int(4 * self.hidden_size * 2 / 3 / 64) * 64
        return self.ffn_size or (gated if self.gated else 4 * self.hidden_size)

    @property
    def expert_ffn(self) -> int:
        return self.expert_ffn_size or self.ffn

    def has_experts(self, layer: int) -> bool:
        if not self.num_experts or layer < self.first_dense_layers:
            return False
        if self.expert_pattern:
            return bool(self.expert_pattern[layer % len(self.expert_pattern)])
        return layer % self.expert_every == 0

    @property
    def dense_layers(self) -> int:
        """Layers with an MLP before those whose kinds repeat."""
        return experts.periods(self)[0] if self.num_experts else 0

    def without_mtp(self) -> "ModelConfig":
        """The model that predicts the next token alone."""
        return dataclasses.replace(self, mtp_depths=0, mtp_loss=ModelConfig.mtp_loss)

    @property
    def layers_of_unit(self) -> int:
        """Layers after which the kinds of layers repeat."""
        each = experts.periods(self)[1] if self.num_experts else 1
        return math.lcm(max(self.attention_global_every, 1), each)

    @property
    def num_units(self) -> int:
        """What a stack and the chunks of a pipeline count; the last unit may be shorter."""
        return self.dense_layers - (self.dense_layers - self.num_layers) // self.layers_of_unit

    def padded_vocab_size(self, tensor: int, pipe: int = 1) -> int:
        """Vocabulary rounded up as Megatron-LM does, so that every rank gets as much of it."""
        multiple = math.lcm(self.vocab_divisible_by, pipe) * tensor
        return -(-self.vocab_size // multiple) * multiple
