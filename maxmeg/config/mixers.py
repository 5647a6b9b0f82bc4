"""Settings of the mixers: attention, MLP, experts; and of multi-token prediction."""

import dataclasses
import enum

from maxmeg.config.setting import Section, setting


class Activation(enum.Enum):
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    swiglu = "swiglu"
    geglu = "geglu"
    geglu_erf = "geglu_erf"
    quick_geglu = "quick_geglu"
    relu = "relu"
    relu_squared = "relu_squared"


class AttentionBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    cudnn = "cudnn"
    mosaic = "mosaic"
    triton = "triton"


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
    batched = "batched"


class ExpertExchange(enum.Enum):
    auto = "auto"
    gather = "gather"
    all_to_all = "all_to_all"


class ExpertDrop(enum.Enum):
    position = "position"
    weight = "weight"


@dataclasses.dataclass(repr=False)
class AttentionConfig(Section):
    """Attention: heads, masks and scores. Multi-latent attention (`mla`) reads these too."""

    num_heads: int = setting(4, "number of query heads", "--num-attention-heads")
    num_kv_heads: int = setting(
        0,
        "number of key/value heads: a divisor of num_heads, and a multiple or divisor of "
        "parallel.tensor; 0: num_heads; 1: multi-query attention",
        "--num-query-groups",
    )
    head_dim: int = setting(
        0,
        "head size; 0: hidden_size / num_heads; of mla: size of the part of a head that is not "
        "rotated (--qk-head-dim)",
        "--kv-channels",
        at_least=0,
    )
    local_head_dim: int = setting(
        0, "head size of the mixer local (Gemma 4); 0: as in the others", at_least=0
    )
    local_kv_heads: int = setting(
        0, "number of key/value heads of the mixer local (Gemma 4); 0: as in others", at_least=0
    )
    keys_as_values: bool = setting(
        False,
        "in mixers other than local, values are the key projection before its norm and rotation "
        "(Gemma 4)",
    )
    value_norm: bool = setting(
        False, "normalize the values of each head, without weights (Gemma 4)"
    )
    causal: bool = setting(
        True,
        "a token attends to itself and earlier tokens only; false: to all tokens (bidirectional, "
        "as BERT), for data.objective=masked",
    )
    window: int = setting(
        0,
        "sliding window of the mixers local and local_mla: number of tokens that a token attends "
        "to, itself included; > 0",
        "--window-size",
        at_least=0,
        effect="adapted",
    )
    chunk: int = setting(
        0,
        "size of chunks in the mixers local and local_mla, in place of a sliding window: a token "
        "attends to earlier tokens of its own chunk of the document (Llama 4); 0: window",
        at_least=0,
        effect="adapted",
    )
    softcap: float = setting(0.0, "scores become c tanh(scores / c); 0: off", at_least=0)
    scale: float = setting(0.0, "factor of the scores; 0: 1 / sqrt(key size)", at_least=0)
    temperature_length: int = setting(
        0,
        "attention temperature for long contexts: the query at position p is multiplied by 1 + "
        "temperature_scale log(1 + floor((p + temperature_offset) / temperature_length)), in the "
        "mixer nope_attention (Llama 4), or in all layers of a model without it (Ministral 3); "
        "0: off",
        at_least=0,
        effect="adapted",
    )
    temperature_scale: float = setting(
        0.1,
        "growth of the attention temperature",
        at_least=0,
        needs="temperature_length",
        effect="adapted",
    )
    temperature_offset: int = setting(
        0,
        "added to positions in the attention temperature (Llama 4: 1)",
        at_least=0,
        needs="temperature_length",
        effect="adapted",
    )
    output_scale: float = setting(1.0, "factor of the sublayer's output (Falcon-H1)", above=0)
    sinks: bool = setting(
        False, "a learned logit per head in the softmax's denominator", "--softmax-type"
    )
    qk_norm: QkNorm = setting(
        QkNorm.none,
        "normalize queries and keys: head: each head; heads: all heads of a token together (OLMo "
        "2); l2: each head, without weights, except in the mixer nope_attention (Llama 4)",
        "--qk-layernorm",
    )
    bias_qkv: bool = setting(
        False,
        "biases of the query, key and value projections; of mla: of the projections to the latents",
        "--add-qkv-bias",
    )
    bias_out: bool = setting(
        False, "bias of the output projection (the flag is its negation)", "--disable-bias-linear"
    )
    output_gate: bool = setting(
        False,
        "multiply each head's output by a sigmoid of a projection of the input, which follows the "
        "head's query in the query projection (Qwen3-Next)",
        "--attention-output-gate",
    )
    dropout: float = setting(
        0.0,
        "dropout rate of the attention weights, in [0, 1)",
        "--attention-dropout",
        at_least=0,
        below=1,
        effect="none",
    )
    backend: AttentionBackend = setting(
        AttentionBackend.auto,
        "kernel; auto: cudnn on a GPU where it supports the case, else xla",
        "--attention-backend",
        effect="none",
    )


@dataclasses.dataclass(repr=False)
class MlaConfig(Section):
    """Multi-latent attention (DeepSeek-V2)."""

    kv_rank: int = setting(
        512, "size of the latent of keys and values", "--kv-lora-rank", at_least=1
    )
    query_rank: int = setting(
        0,
        "size of the queries' latent; 0: one projection without a latent",
        "--q-lora-rank",
        at_least=0,
    )
    rotary_size: int = setting(
        64,
        "size of the rotated part of a head, whose key all heads share",
        "--qk-pos-emb-head-dim",
        at_least=0,
    )
    value_size: int = setting(
        0, "size of a head's values; 0: attention.head_dim", "--v-head-dim", at_least=0
    )
    norm_eps: float = setting(0.0, "epsilon of the latents' norms; 0: model.norm_eps", at_least=0)


@dataclasses.dataclass(repr=False)
class LayerEmbeddingConfig(Section):
    """Embeddings of each layer."""

    size: int = setting(
        256, "width of the embedding that a layer has of each token (Gemma 4 E2B, E4B)", at_least=1
    )


@dataclasses.dataclass(repr=False)
class MlpConfig(Section):
    """The feed-forward layer; experts share its activation and bias."""

    ffn_size: int = setting(
        0,
        "intermediate size; 0: 4 x hidden_size, or, gated, 8/3 hidden_size in whole 64s",
        "--ffn-hidden-size",
        at_least=0,
    )
    activation: Activation = setting(
        Activation.swiglu,
        "activation function; those with glu in their names are gated, geglu_erf by GELU without "
        "the approximation of geglu",
        "--swiglu",
    )
    activation_clamp: float = setting(
        0.0,
        "clamps the gate branch of a gated activation to at most x, and its linear (up) branch to "
        "[-x, x]; 0: off",
        "--activation-func-clamp-value",
        at_least=0,
        needs="activation=swiglu|geglu|geglu_erf|quick_geglu",
    )
    glu_offset: float = setting(
        0.0,
        "constant added to the linear (up) branch of a gated activation (GPT-OSS: 1)",
        "--glu-linear-offset",
        needs="activation=swiglu|geglu|geglu_erf|quick_geglu",
    )
    gate_scale: float = setting(
        1.0,
        "factor of the gate branch of the mixer mlp, before its activation (Falcon-H1)",
        above=0,
        needs="activation=swiglu|geglu|geglu_erf|quick_geglu",
    )
    output_scale: float = setting(1.0, "factor of the output of the mixer mlp (Falcon-H1)", above=0)
    bias: bool = setting(
        False, "biases of the projections (the flag is its negation)", "--disable-bias-linear"
    )


@dataclasses.dataclass(repr=False)
class MoeConfig(Section):
    """Mixture of experts: sizes, router, load balancing, capacity."""

    num_experts: int = setting(8, "number of experts", "--num-experts", at_least=1)
    top_k: int = setting(2, "number of experts that each token is routed to", "--moe-router-topk")
    ffn_size: int = setting(
        0,
        "intermediate size of an expert; 0: that of the MLP",
        "--moe-ffn-hidden-size",
        at_least=0,
    )
    shared_ffn_size: int = setting(
        0,
        "intermediate size of the shared expert, which every token goes through; 0: none",
        "--moe-shared-expert-intermediate-size",
        at_least=0,
    )
    shared_gate: bool = setting(
        False,
        "gate the shared expert's output by a sigmoid of the token",
        "--moe-shared-expert-gate",
        needs="shared_ffn_size",
    )
    latent_size: int = setting(
        0,
        "experts read and write projections of this size, shared by all experts; 0: hidden_size",
        "--moe-latent-size",
        at_least=0,
    )
    scale_inputs: bool = setting(
        False,
        "multiply the input of an expert by its routing weight, not the output (Llama 4)",
        "--moe-apply-probs-on-input",
    )
    norms: bool = setting(
        False,
        "norms of the router's input, and before and after the routed experts and the shared "
        "expert, and a trained factor of each expert's routing weights, for norm_place=sandwich "
        "(Gemma 4)",
        needs="shared_ffn_size",
    )
    score: RouterScore = setting(
        RouterScore.softmax, "router score function", "--moe-router-score-function"
    )
    softmax_before_topk: bool = setting(
        False,
        "softmax over all experts instead of over the chosen ones",
        "--moe-router-pre-softmax",
    )
    normalize_weights: bool = setting(False, "divide each token's routing weights by their sum")
    scale: float = setting(1.0, "factor of the routing weights", "--moe-router-topk-scaling-factor")
    num_groups: int = setting(
        1,
        "number of expert groups for group-limited routing; 1: off",
        "--moe-router-num-groups",
    )
    topk_groups: int = setting(
        1,
        "number of groups that each token is routed to",
        "--moe-router-group-topk",
        needs="num_groups",
    )
    group_score_topk: int = setting(
        0,
        "number of highest expert scores whose sum is a group's score; 0: top_k / topk_groups",
        needs="num_groups",
    )
    logit_bias: bool = setting(False, "trained bias of the router's logits (GPT-OSS)")
    bias_balancing: bool = setting(
        False,
        "auxiliary-loss-free load balancing (DeepSeek-V3): a bias per expert, added to the scores "
        "that select experts",
        "--moe-router-enable-expert-bias",
    )
    bias_rate: float = setting(
        1e-3,
        "update size of that bias, after each step",
        "--moe-router-bias-update-rate",
        at_least=0,
        needs="bias_balancing",
        effect="none",
    )
    aux_loss: float = setting(
        0.0,
        "coefficient of the load-balancing loss over each microbatch",
        "--moe-aux-loss-coeff",
        at_least=0,
        effect="none",
    )
    sequence_aux_loss: float = setting(
        0.0, "coefficient of the load-balancing loss over each sequence", at_least=0, effect="none"
    )
    global_aux_loss: float = setting(
        0.0,
        "coefficient of the load-balancing loss over the global batch; it uses the loads of the "
        "step before",
        at_least=0,
        effect="none",
    )
    z_loss: float = setting(
        0.0,
        "coefficient of the z-loss, logsumexp^2 of the router's logits",
        "--moe-z-loss-coeff",
        at_least=0,
        effect="none",
    )
    sinkhorn: bool = setting(
        False,
        "balance by Sinkhorn's algorithm in training; the routing weights are sigmoids with "
        "top_k=1, else a softmax over all experts",
        "--moe-router-load-balancing-type",
    )
    jitter: float = setting(
        0.0,
        "in training, multiply the router's input by noise from 1 - jitter to 1 + jitter",
        "--moe-input-jitter-eps",
        at_least=0,
        below=1,
        effect="none",
    )
    force_balance: bool = setting(
        False,
        "for benchmarks only: assign tokens to experts in turn, whatever the router says",
        "--moe-router-force-load-balancing",
    )
    capacity_factor: float = setting(
        0.0,
        "capacity of an expert per device, as a multiple of the mean load; tokens beyond it are "
        "dropped; 0: dropless",
        "--moe-expert-capacity-factor",
        at_least=0,
        effect="adapted",
    )
    drop_policy: ExpertDrop = setting(
        ExpertDrop.position,
        "which tokens are dropped: the last ones (position), or those of least weight (weight)",
        "--moe-token-drop-policy",
        needs="capacity_factor",
        effect="adapted",
    )
    pad_to_capacity: bool = setting(
        False,
        "pad the input of every expert to its capacity",
        "--moe-pad-expert-input-to-capacity",
        needs="capacity_factor",
        effect="none",
    )
    backend: ExpertBackend = setting(
        ExpertBackend.auto,
        "how experts multiply: batched (equal numbers of rows for every expert, "
        "parallel.expert_buffer times the mean load, in one product; overflow in further rounds) | "
        "mosaic (our grouped kernel, Hopper only, not timed yet) | xla (grouped; on a GPU it "
        "multiplies every row by every expert); auto: on a GPU batched if capacity_factor is at "
        "most 1.1 and expert_buffer not less, else mosaic where it runs, else batched; on a CPU "
        "xla",
        "--moe-grouped-gemm",
        effect="none",
    )


@dataclasses.dataclass(repr=False)
class MtpConfig(Section):
    """Multi-token prediction (DeepSeek-V3)."""

    num_layers: int = setting(
        0,
        "number of multi-token-prediction (MTP) layers; layer k predicts token t+1+k",
        "--mtp-num-layers",
        at_least=0,
        at_most=1000,
        effect="adapted",
    )
    layers: str = setting(
        "",
        "an MTP layer, in the words of model.layers (attention,moe) or in Megatron-LM's letters "
        "(*E); empty: like the last layer of the model",
        effect="adapted",
    )
    loss_weight: float = setting(
        0.1,
        "weight of the mean of the MTP losses in the loss",
        "--mtp-loss-scaling-factor",
        above=0,
        effect="none",
    )
