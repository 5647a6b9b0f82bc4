"""Settings of mixers that keep a state of fixed size: short convolution, Mamba-2, linear
attention."""

import dataclasses
import enum

from maxmeg.config.setting import Section, setting

SCAN_KERNEL_SIZES = 256, 128  # largest state_size and head_dim of mosaic
DELTA_KERNEL_SIZES = 128, 128  # largest key_size and value_size of mosaic


class ScanBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    mosaic = "mosaic"


@dataclasses.dataclass(repr=False)
class ConvConfig(Section):
    """Gated short convolution (LFM2)."""

    kernel_size: int = setting(
        3, "number of tokens that a channel's kernel covers, the current one included", at_least=1
    )
    bias: bool = setting(False, "biases of the projections and of the convolution")


@dataclasses.dataclass(repr=False)
class MambaConfig(Section):
    """Mamba-2, a state-space model (Dao and Gu, 2024)."""

    num_heads: int = setting(
        0, "number of heads; 0: 2 x hidden_size / head_dim", "--mamba-num-heads", at_least=0
    )
    head_dim: int = setting(64, "number of channels of a head", "--mamba-head-dim", at_least=1)
    num_groups: int = setting(
        0,
        "number of groups of heads that share keys (B) and queries (C): a divisor of the number of "
        "heads, and a multiple or divisor of parallel.tensor; 0: the largest divisor of both 8 and "
        "the heads",
        "--mamba-num-groups",
        at_least=0,
    )
    state_size: int = setting(
        128, "size of the state of a channel", "--mamba-state-dim", at_least=1
    )
    kernel_size: int = setting(
        4, "number of tokens that the convolution covers, the current one included", at_least=1
    )
    bias: bool = setting(False, "biases of the projections")
    conv_bias: bool = setting(True, "bias of the convolution")
    norm: bool = setting(True, "normalize the gated output over each group, before its projection")
    min_step: float = setting(0.0, "smallest step size (dt)", at_least=0)
    max_step: float = setting(0.0, "largest step size (dt); 0: no limit", at_least=0)
    chunk: int = setting(
        128, "number of tokens that the scan multiplies at once", at_least=1, effect="none"
    )
    backend: ScanBackend = setting(
        ScanBackend.auto,
        "kernel of the scan: mosaic (ours, Hopper only, bfloat16, state_size up to 256, padded to "
        "128 or 256, head_dim up to 128, padded to 64 or 128, chunks of 128, not timed yet) | xla; "
        "auto: the faster one where it was measured, else xla",
        effect="none",
    )
    scales: tuple[float, ...] = setting(
        (),
        "factors of the projections z, x, B, C and dt (Falcon-H1); empty: 1",
    )
    output_scale: float = setting(1.0, "factor of the sublayer's output (Falcon-H1)", above=0)


@dataclasses.dataclass(repr=False)
class DeltaConfig(Section):
    """Linear attention by the delta rule: the mixers gated_delta (Gated DeltaNet, Qwen3-Next) and
    kda (Kimi Delta Attention)."""

    num_heads: int = setting(
        32, "number of heads (of values)", "--linear-num-value-heads", at_least=1
    )
    num_key_heads: int = setting(
        0,
        "number of heads of queries and keys, each for equally many heads: a divisor of num_heads, "
        "and a multiple or divisor of parallel.tensor; 0: num_heads, the only number for kda",
        "--linear-num-key-heads",
        at_least=0,
    )
    key_size: int = setting(
        128, "size of a head's queries and keys", "--linear-key-head-dim", at_least=1
    )
    value_size: int = setting(
        0, "size of a head's values; 0: key_size", "--linear-value-head-dim", at_least=0
    )
    kernel_size: int = setting(
        4,
        "number of tokens that the convolution covers, the current one included",
        "--linear-conv-kernel-dim",
        at_least=1,
    )
    rank: int = setting(
        0, "rank of kda's projections to the gate and to the decays; 0: key_size", at_least=0
    )
    chunk: int = setting(
        64, "number of tokens that the scan multiplies at once", at_least=1, effect="none"
    )
    backend: ScanBackend = setting(
        ScanBackend.auto,
        "kernel of the scan: mosaic (ours, for gated_delta only, Hopper only, bfloat16, key_size "
        "and value_size up to 128, padded to 128 and to 64 or 128, chunks of 64, not timed yet) | "
        "xla; auto: the faster one where it was measured, else xla",
        effect="none",
    )
