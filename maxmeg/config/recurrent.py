"""Settings of mixers that keep a state of fixed size: short convolution, linear attention."""

import dataclasses

from maxmeg.config.setting import setting


@dataclasses.dataclass
class ConvConfig:
    """Gated short convolution (LFM2)."""

    kernel_size: int = setting(
        3, "number of tokens that a channel's kernel covers, the current one included", at_least=1
    )
    bias: bool = setting(False, "biases of the projections and of the convolution")


@dataclasses.dataclass
class DeltaConfig:
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
