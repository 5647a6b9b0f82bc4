"""Settings of the model: its architecture and numerics."""

import dataclasses
import enum
import math

from maxmeg.config.bert import BertConfig
from maxmeg.config.head import ENCODER_LAYERS, Biencoder, HeadConfig
from maxmeg.config.layers import ENCODER, RETRO, Groups, Layer, grouped, one_layer, parse
from maxmeg.config.mixers import (
    AttentionConfig,
    LayerEmbeddingConfig,
    MlaConfig,
    MlpConfig,
    MoeConfig,
    MtpConfig,
)
from maxmeg.config.positions import RelativeConfig, RotaryConfig
from maxmeg.config.recompute import NAMES
from maxmeg.config.recurrent import ConvConfig, DeltaConfig, MambaConfig
from maxmeg.config.retro import RetroConfig
from maxmeg.config.setting import Section, setting, with_fields


class Position(enum.Enum):
    rotary = "rotary"
    learned = "learned"
    relative = "relative"
    none = "none"


class Norm(enum.Enum):
    rmsnorm = "rmsnorm"
    layernorm = "layernorm"


class DType(enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class NormPlace(enum.Enum):
    pre = "pre"
    post = "post"
    sandwich = "sandwich"
    post_residual = "post_residual"


@dataclasses.dataclass(repr=False)
class MupConfig(Section):
    """muP (Yang et al., 2022): hyperparameters tuned at a base width, transferred to this width."""

    base_hidden_size: int = setting(
        0,
        "hidden_size of the base model; m is hidden_size relative to it. The layers' matrices have "
        "init_std / sqrt(m) and a learning rate by the rule of optim.optimizer (AdamW: lr / m), "
        "but not those whose inputs are a rank (of mla, kda, moe.latent_size); logits are "
        "multiplied by 1 / m; 0: no muP",
        "--use-mup, --mup-base-hidden-size, --scaling-base-hidden-size",
        at_least=0,
    )
    base_head_dim: int = setting(
        0,
        "head_dim of the base model: attention scores are multiplied by sqrt(base_head_dim) / "
        "head_dim; 0: head_dim does not change with the width",
        "--mup-base-head-dim, --scaling-base-head-dim",
        needs="base_hidden_size",
        at_least=0,
    )


@dataclasses.dataclass(repr=False)
class ModelConfig(Section):
    """Architecture and numerics of the language model."""

    vocab_size: int = setting(
        0,
        "vocabulary size without padding; 0: the tokenizer's",
        "--vocab-size",
        at_least=0,
        effect="adapted",
    )
    vocab_divisible_by: int = setting(
        128,
        "the vocabulary is padded to a multiple of this times parallel.tensor",
        "--make-vocab-size-divisible-by",
        at_least=1,
        effect="none",
    )
    num_layers: int = setting(4, "number of layers", "--num-layers", at_least=1, at_most=10_000)
    hidden_size: int = setting(
        128, "width of the residual stream", "--hidden-size", at_least=1, at_most=10**6
    )
    layers: str = setting(
        "*(attention,mlp)",
        "mixers of the layers: commas join sublayers, spaces layers, + mixers that read the same "
        "input (parallel block); 3(...) repeats, *(...) repeats up to num_layers; mixers are "
        "attention, mla, local and local_mla (sliding window), conv (gated short convolution), "
        "mamba (Mamba-2), gated_delta and kda (linear attention), mlp, moe; raw_attention (without "
        "a norm of its input, ModernBERT's first layer), nope_attention (without a rotary "
        "embedding, SmolLM3); T5's "
        "encoder_attention, encoder_mlp, encoder_norm and cross; RETRO's encoder_cross and "
        "chunked_cross; Gemma 4's shared_attention and shared_local (which read keys and values of "
        "the last attention or local layer), wide_mlp (twice mlp.ffn_size) and layer_embedding (an "
        "embedding of each layer); or Megatron-LM's "
        "--hybrid-layer-pattern",
        "--hybrid-layer-pattern, --moe-layer-freq, --window-attn-skip-freq",
    )
    first_layers_bf16: int = setting(
        0,
        "number of layers at the start that are computed in model.dtype under train.quantization; "
        "they form a separate group in checkpoints",
        "--first-last-layers-bf16, --num-layers-at-start-in-bf16",
        effect="none",
        at_least=0,
    )
    last_layers_bf16: int = setting(
        0,
        "number of layers at the end that are computed in model.dtype under train.quantization",
        "--num-layers-at-end-in-bf16",
        effect="none",
        at_least=0,
    )
    parallel_norms: bool = setting(
        False,
        "mixers of a parallel block (a+b) have a norm each (GPT-NeoX, Falcon 40B)",
    )
    norm: Norm = setting(Norm.rmsnorm, "kind of normalization", "--normalization")
    norm_eps: float = setting(1e-5, "added to the variance", "--norm-epsilon", at_least=0)
    norm_one_plus: bool = setting(False, "store norm weights minus 1", "--apply-layernorm-1p")
    norm_bias: bool = setting(
        True, "LayerNorm adds a bias; false for ModernBERT", needs="norm=layernorm"
    )
    norm_place: NormPlace = setting(
        NormPlace.pre,
        "what each sublayer normalizes: its input (pre), its output (post, OLMo 2), both "
        "(sandwich), or the sum of its input and output (post_residual, BERT; then no norm "
        "follows the last layer)",
    )
    position: Position = setting(
        Position.rotary,
        "position embedding; relative: a learned bias of the attention scores (T5)",
        "--position-embedding-type",
    )
    max_position: int = setting(
        0,
        "longest sequence, and size of a learned position table; 0: data.sequence_length",
        "--max-position-embeddings",
        at_least=0,
        effect="adapted",
    )
    embedding_scale: float = setting(
        1.0, "factor of the embeddings (Gemma: sqrt(hidden_size))", "--mup-embedding-mult"
    )
    layer_scale: bool = setting(
        False,
        "multiply each layer's output, the residual stream, by a number that is not trained: 1, or "
        "that of an imported model (Gemma 4)",
    )
    residual_scale: float = setting(
        1.0, "factor of every sublayer's output, before the residual sum (Granite)", above=0
    )
    logit_scale: float = setting(1.0, "factor of the logits (Granite, Falcon-H1)", above=0)
    tied: bool = setting(
        False,
        "the output weights are the embedding's (the flag is its negation)",
        "--untie-embeddings-and-output-weights",
    )
    dropout_hidden: float = setting(
        0.0,
        "dropout rate before each residual sum, in [0, 1)",
        "--hidden-dropout",
        at_least=0,
        below=1,
        effect="none",
    )
    dropout_embedding: float = setting(
        0.0,
        "dropout rate after the embedding, in [0, 1)",
        at_least=0,
        below=1,
        effect="none",
    )
    logit_softcap: float = setting(0.0, "logits become c tanh(logits / c); 0: off", at_least=0)
    init_std: float = setting(
        0.02,
        "standard deviation of the initial weights",
        "--init-method-std",
        at_least=0,
        effect="none",
    )
    scaled_output_init: bool = setting(
        True,
        "initialize attention and MLP output weights with init_std / sqrt(2 num_layers)",
        effect="none",
    )
    dtype: DType = setting(
        DType.bfloat16,
        "compute dtype; master weights are float32; float16: the loss is scaled (optim.loss_scale)",
        "--bf16, --fp16",
        effect="none",
    )
    recompute: str = setting(
        "minimal",
        "activations to recompute in backward: minimal (norms, activation functions, rotations) | "
        "selective (attention and MLA's up-projections too) | full (whole layers); or the names of "
        "the activations to store, with commas; offload: before a name or a policy stores them in "
        f"pinned host memory, as in minimal,offload:mlp_up. Names: {', '.join(NAMES)}",
        "--recompute-granularity, --fine-grained-activation-offloading, --offload-modules",
        effect="none",
    )
    scan_layers: bool = setting(
        True,
        "run repeated layers as a loop; false: unroll them, which takes longer to compile and "
        "copies less",
        effect="none",
    )
    scan_unroll: int = setting(
        1,
        "repeats of a unit per iteration of the loop over layers: 2 runs fewer kernels and hides "
        "more of fsdp's gathers, for more memory; repeats that do not fill an iteration run after "
        "the loop",
        needs="scan_layers=True",
        at_least=1,
        effect="none",
    )
    mup: MupConfig = setting(MupConfig, "muP")
    attention: AttentionConfig = setting(AttentionConfig, "attention")
    rotary: RotaryConfig = setting(
        RotaryConfig, "rotary position embedding", needs="position=rotary"
    )
    relative: RelativeConfig = setting(
        RelativeConfig, "relative position bias", needs="position=relative"
    )
    mla: MlaConfig = setting(MlaConfig, "multi-latent attention")
    conv: ConvConfig = setting(ConvConfig, "gated short convolution")
    mamba: MambaConfig = setting(MambaConfig, "Mamba-2")
    delta: DeltaConfig = setting(DeltaConfig, "linear attention by the delta rule")
    mlp: MlpConfig = setting(MlpConfig, "feed-forward layer")
    layer_embedding: LayerEmbeddingConfig = setting(
        LayerEmbeddingConfig, "embeddings of each layer"
    )
    moe: MoeConfig = setting(MoeConfig, "mixture of experts")
    bert: BertConfig = setting(BertConfig, "BERT's embeddings and heads")
    head: HeadConfig = setting(HeadConfig, "classifier")
    retro: RetroConfig = setting(RetroConfig, "chunks and neighbours (RETRO)")
    mtp: MtpConfig = setting(MtpConfig, "multi-token prediction", needs="mtp.num_layers")

    @property
    def kv_heads(self) -> int:
        return self.attention.num_kv_heads or self.attention.num_heads

    @property
    def head_size(self) -> int:
        return self.attention.head_dim or self.hidden_size // max(self.attention.num_heads, 1)

    @property
    def local_head_size(self) -> int:
        """Head size of the mixer local."""
        return self.attention.local_head_dim or self.head_size

    @property
    def mamba_heads(self) -> int:
        return self.mamba.num_heads or 2 * self.hidden_size // self.mamba.head_dim

    @property
    def mamba_groups(self) -> int:
        return self.mamba.num_groups or math.gcd(8, self.mamba_heads)

    @property
    def delta_key_heads(self) -> int:
        return self.delta.num_key_heads or self.delta.num_heads

    @property
    def delta_rank(self) -> int:
        return self.delta.rank or self.delta.key_size

    @property
    def delta_value_size(self) -> int:
        return self.delta.value_size or self.delta.key_size

    @property
    def layer_kinds(self) -> tuple[Layer, ...]:
        """Every layer: its sublayers, each the names of its mixers."""
        return parse(self.layers, self.num_layers)

    @property
    def groups(self) -> Groups:
        """The layers as units that repeat: ((layers of the unit, repeats), ...). Layers in `dtype`
        under train.quantization are separate groups."""
        return sum(self._grouped_parts, ())

    @property
    def unquantized_groups(self) -> frozenset[int]:
        """The groups that are computed in `dtype` under train.quantization."""
        first, middle, last = map(len, self._grouped_parts)
        return frozenset((*range(first), *range(first + middle, first + middle + last)))

    @property
    def _grouped_parts(self) -> tuple[Groups, Groups, Groups]:
        """The groups of the first, the other and the last layers."""
        start, end = self.first_layers_bf16, self.num_layers - self.last_layers_bf16
        kinds = self.layer_kinds
        first, middle, last = (grouped(p) for p in (kinds[:start], kinds[start:end], kinds[end:]))
        return first, middle, last

    @property
    def num_units(self) -> int:
        """Number of units, which are what a stack and the chunks of a pipeline count."""
        return sum(repeats for _, repeats in self.groups)

    @property
    def mtp_layer(self) -> Layer:
        """The sublayers of each MTP layer."""
        return one_layer(self.mtp.layers) if self.mtp.layers else self.layer_kinds[-1]

    def has(self, *mixers: str) -> bool:
        """Whether any layer, also for MTP, has one of the mixers."""
        kinds = {*self.layer_kinds, *[self.mtp_layer] * self.mtp.num_layers}
        return any(name in mixers for kind in kinds for sublayer in kind for name in sublayer)

    @property
    def parallel_block(self) -> bool:
        """Whether any sublayer sums several mixers."""
        return any(len(sublayer) > 1 for kind in set(self.layer_kinds) for sublayer in kind)

    @property
    def has_source(self) -> bool:
        """Whether it is an encoder-decoder, which reads a source beside the target's tokens, or has
        two encoders."""
        return self.has("cross", *RETRO, *ENCODER)

    @property
    def one_encoder(self) -> "ModelConfig":
        """Either encoder of a biencoder that has two, as a model; itself if it has one."""
        if self.head.biencoder is not Biencoder.separate:
            return self
        fields = {"layers": ENCODER_LAYERS, "num_layers": self.num_layers // 2}
        return with_fields(self, fields | {"head.biencoder": Biencoder.shared})

    @property
    def has_neighbours(self) -> bool:
        """Whether its source are the neighbours of the target's chunks (RETRO)."""
        return self.has(*RETRO)

    @property
    def has_source_text(self) -> bool:
        """Whether the source is a text that the target answers (encoder-decoders, not RETRO)."""
        return self.has_source and not self.has_neighbours

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-latent."""
        return self.has("mla", "local_mla")

    def mixers(self, layer: int) -> tuple[str, ...]:
        """The mixers of a layer, in order."""
        return sum(self.layer_kinds[layer], ())

    @property
    def key_size(self) -> int:
        """Size of a head's queries and keys."""
        return self.head_size + (self.mla.rotary_size if self.is_mla else 0)

    @property
    def value_size(self) -> int:
        return (self.mla.value_size if self.is_mla else 0) or self.head_size

    @property
    def rotated_size(self) -> int:
        """Size of the rotated part of a head."""
        share = int(self.head_size * self.rotary.fraction)
        return self.mla.rotary_size if self.is_mla else share

    @property
    def gated(self) -> bool:
        return "glu" in self.mlp.activation.value

    @property
    def ffn(self) -> int:
        gated = max(int(4 * self.hidden_size * 2 / 3 / 64), 1) * 64
        return self.mlp.ffn_size or (gated if self.gated else 4 * self.hidden_size)

    @property
    def expert_ffn(self) -> int:
        return self.moe.ffn_size or self.ffn

    @property
    def width_multiplier(self) -> float:
        """The width relative to muP's base model; 1 without muP."""
        return self.hidden_size / (self.mup.base_hidden_size or self.hidden_size)

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the initial weights of the layers' matrices that read a width."""
        return self.init_std / self.width_multiplier**0.5

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial weights of a sublayer's output projection."""
        depth = (2 * self.num_layers) ** 0.5 if self.scaled_output_init else 1
        return self.hidden_std / depth

    def derived(self, group: str) -> Section:
        """A group of a mixer's settings, with the numbers that its zeros stand for."""
        numbers: dict = {
            "mamba": {"num_heads": self.mamba_heads, "num_groups": self.mamba_groups},
            "delta": {
                "num_key_heads": self.delta_key_heads,
                "value_size": self.delta_value_size,
                "rank": self.delta_rank,
            },
        }.get(group, {})
        return dataclasses.replace(getattr(self, group), **numbers)

    def without_mup(self) -> "ModelConfig":
        """Return an equivalent model without muP, whose logit_scale and attention.scale include
        muP's factors."""
        if not self.mup.base_hidden_size:
            return self
        fields: dict = {"mup": MupConfig(), "logit_scale": self.logit_scale / self.width_multiplier}
        if base := self.mup.base_head_dim:
            fields["attention.scale"] = (self.attention.scale or base**-0.5) * base / self.key_size
        return with_fields(self, fields)

    def without_mtp(self) -> "ModelConfig":
        """Return the model without its MTP layers."""
        return dataclasses.replace(self, mtp=MtpConfig())

    def padded_vocab_size(self, tensor: int, pipe: int = 1) -> int:
        """Vocabulary rounded up as Megatron-LM does, so that every rank gets as much of it."""
        multiple = math.lcm(self.vocab_divisible_by, pipe) * tensor
        return -(-self.vocab_size // multiple) * multiple
