"""Settings of the mesh: sizes of its axes, and how work is divided over them."""

import dataclasses
import enum
import math

from maxmeg.config.mixers import ExpertExchange
from maxmeg.config.setting import Section, setting


class GradientDType(enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Schedule(enum.Enum):
    one_f_one_b = "one_f_one_b"
    zero_bubble = "zero_bubble"


FsdpGather = enum.Enum("FsdpGather", {"microbatch": "microbatch", "step": "step", "auto": "auto"})
LaneOrder = enum.Enum("LaneOrder", {"apart": "apart", "together": "together", "auto": "auto"})

GPUS_A_NODE = 8


@dataclasses.dataclass(repr=False)
class ParallelConfig(Section):
    """Sizes of the mesh axes, slowest first, and settings of the pipeline and of experts."""

    pipe: int = setting(1, "pipeline stages", "--pipeline-model-parallel-size")
    data: int = setting(1, "data-parallel replicas")
    fsdp: int = setting(
        0,
        "devices that shard parameters (FSDP, ZeRO-3); 0: all other devices",
        "--use-megatron-fsdp",
    )
    fsdp_gather: FsdpGather = setting(
        FsdpGather.auto,
        "how often the devices of fsdp gather a layer's weights: microbatch, in forward and in "
        "backward of each | step, once, by ZeRO-1: the devices count as data, and each holds all "
        "weights and the sums of all gradients meanwhile; auto: step where fsdp=0, on GPUs that "
        "`maxmeg plan` knows, where it fits and the planner's step is at least 1 % shorter",
    )
    expert: int = setting(
        1,
        "expert-parallel size; these devices also shard the batch, except along tensor and context",
        "--expert-model-parallel-size",
    )
    expert_tensor: int = setting(
        0,
        "tensor-parallel size of an expert; 0: as tensor; less than tensor: MoE parallel "
        "folding, where expert counts the other devices along tensor, and those along context too",
        "--expert-tensor-parallel-size",
    )
    expert_exchange: ExpertExchange = setting(
        ExpertExchange.auto,
        "token dispatch: all_to_all (padded) | gather (all tokens on all devices); auto: "
        "all_to_all",
        "--moe-token-dispatcher-type",
        needs="expert",
    )
    expert_buffer: float = setting(
        1.5,
        "size of the dispatch buffer over the mean load of a device (with "
        "model.moe.backend=batched, of an expert), >= 1; more tokens take extra rounds",
        at_least=1,
    )
    expert_nodes: int = setting(
        0,
        "two-level dispatch, a token is sent once per node and then inside the node: number of "
        "nodes of an expert-parallel group; 1: off; 0: on, with 8 GPUs per node, if routing is "
        "limited to groups (model.moe.num_groups), else off",
        at_least=0,
        needs="expert",
    )
    context: int = setting(
        1, "context-parallel size: devices that share a sequence", "--context-parallel-size"
    )
    context_strategy: str = setting(
        "auto",
        "how attention gets the keys and values of the other devices of a sequence: ring | "
        "exchange (all-to-all of heads) | hierarchy (exchange inside nodes, ring between them) | "
        "gather (all keys) | auto; or one for each mixer, such as attention=ring,local=exchange. "
        "With a ring, layers with a window get only the tokens inside it",
        "--cp-comm-type",
        needs="context",
    )
    context_chunks: int = setting(
        0,
        "number of chunks of a row per device (8 is enough); they are assigned row by row so that "
        "attention within documents costs all devices the same, and keys are gathered; 0: two "
        "chunks, in Megatron-LM's order",
        "--hybrid-context-parallel",
        at_least=0,
        needs="context",
    )
    fsdp_context: bool = setting(
        False,
        "FSDP shards over the context axis too: less memory, one all-gather per layer in forward "
        "and one in backward",
        needs="context",
    )
    context_inner: int = setting(
        0,
        "number of devices that exchange heads in a hierarchy, a divisor of context; 0: those of a "
        "node",
        "--hierarchical-context-parallel-sizes",
        at_least=0,
        needs="context",
    )
    tensor: int = setting(
        1, "tensor-parallel size; the sequence is sharded too", "--tensor-model-parallel-size"
    )
    zero1: bool = setting(
        True,
        "shard master weights and optimizer over all devices that replicate a weight (ZeRO-1)",
        "--use-distributed-optimizer",
    )
    gradient_dtype: GradientDType = setting(
        GradientDType.float32,
        "dtype in which gradients are summed over devices: float32 | bfloat16 (half the bytes, "
        "less exact); over microbatches they are always summed in float32",
        "--grad-reduce-in-bf16",
    )
    schedule: Schedule = setting(
        Schedule.one_f_one_b,
        "pipeline schedule: one_f_one_b | zero_bubble (separate weight gradients)",
    )
    lanes: LaneOrder = setting(
        LaneOrder.auto,
        "forward of one microbatch and backward of another: apart, one after the other | together, "
        "layer by layer in one loop, so that the products of one hide the collectives of the other "
        "(memory for one more microbatch; the same numbers); auto: together on GPUs that `maxmeg "
        "plan` knows, where it fits and the planner's step is at least 1 % shorter",
    )
    chunks: int = setting(
        1,
        "chunks of layers per stage; more than 1: interleaved 1F1B (only one_f_one_b)",
        "--num-virtual-stages-per-pipeline-rank",
        at_least=1,
    )
    chunk_layers: tuple[int, ...] = setting(
        (),
        "number of layers of every chunk in model order, pipe x chunks numbers; empty: equal, or, "
        "where the layers differ, chosen so that the most expensive chunk is as cheap as possible",
        "--pipeline-model-parallel-layout",
    )
    first_stage_layers: int = setting(
        0,
        "number of layers of the first stage; 0: as the others",
        "--decoder-first-pipeline-num-layers",
        at_least=0,
    )
    last_stage_layers: int = setting(
        0,
        "number of layers of the last stage; 0: as the others",
        "--decoder-last-pipeline-num-layers",
        at_least=0,
    )
    pad_layers: bool = setting(
        False, "if the layers are not divisible by the chunks, the last chunks get one layer less"
    )

    @property
    def fold(self) -> int:
        """Devices along tensor that hold different experts."""
        return max(self.tensor // (self.expert_tensor or self.tensor or 1), 1)

    @property
    def expert_axis(self) -> int:
        """Size of the mesh axis `expert`: devices with different experts, of those along data."""
        return self.expert // (self.fold * self.context) if self.expert > 1 else 1

    @property
    def experts_cross_nodes(self) -> bool:
        """Whether tokens are exchanged between nodes."""
        return self.expert > 1 and self.expert * (self.tensor // self.fold) > GPUS_A_NODE

    def nodes_of_experts(self, num_groups: int) -> int:
        """Number of nodes, if tokens are sent once to every node; 1: directly to the devices."""
        if self.expert_nodes:
            return self.expert_nodes
        spanned = self.expert * (self.tensor // self.fold) // GPUS_A_NODE
        by_node = self.expert_exchange in (ExpertExchange.auto, ExpertExchange.all_to_all)
        by_node &= num_groups > 1 and spanned > 1 and self.expert % max(spanned, 1) == 0
        return spanned if by_node else 1

    @property
    def devices(self) -> int:
        """Number of devices by the sizes; fsdp=0 counts as one."""
        others = (self.pipe, self.data, max(self.fsdp, 1), self.context, self.tensor)
        return math.prod(others) * self.expert_axis
