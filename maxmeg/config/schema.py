"""Every setting of a training run: nested dataclasses, one documented field a line.

`setting` stores beside each default its meaning (unit, constraint) and the Megatron-LM flag it
replaces; `docs/config.md` is generated from them (`python -m maxmeg.config.docs`). Rules between
fields live in `validate.py`; nothing derived is stored.
"""

import dataclasses
import enum
import math

from maxmeg.config.data import DataConfig
from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import setting
from maxmeg.config.watchdog import WatchdogConfig


class LossBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    tiled = "tiled"
    mosaic = "mosaic"


class Verify(enum.Enum):
    readback = "readback"
    crc = "crc"
    off = "off"


class Schedule(enum.Enum):
    gpipe = "gpipe"
    one_f_one_b = "one_f_one_b"
    zero_bubble = "zero_bubble"


class ExpertExchange(enum.Enum):
    auto = "auto"
    gather = "gather"
    all_to_all = "all_to_all"
    ragged = "ragged"


class LossReduction(enum.Enum):
    token_mean = "token_mean"
    megatron = "megatron"


class Optimizer(enum.Enum):
    adamw = "adamw"
    sgd = "sgd"


class LrDecay(enum.Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    inverse_square_root = "inverse_square_root"
    wsd = "wsd"


class WsdDecay(enum.Enum):
    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


class WeightDecayRamp(enum.Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclasses.dataclass
class ParallelConfig:
    """Sizes of the mesh axes, slowest first; fsdp=0 takes all devices that are left."""

    pipe: int = setting(1, "pipeline stages", "--pipeline-model-parallel-size")
    data: int = setting(1, "replicas (gradients summed once a step)")
    fsdp: int = setting(
        0, "parameters sharded, gathered at use; 0: all other devices", "--use-megatron-fsdp"
    )
    expert: int = setting(
        1,
        "devices that experts are spread over; batches too, but along tensor and context",
        "--expert-model-parallel-size",
    )
    expert_tensor: int = setting(
        0,
        "devices that an expert is cut over; 0: as tensor; fewer: experts lie along the rest of "
        "tensor too, and of context, which expert counts",
        "--expert-tensor-parallel-size",
    )
    expert_exchange: ExpertExchange = setting(
        ExpertExchange.auto,
        "how tokens reach experts: all_to_all (padded) | ragged | gather (all tokens everywhere); "
        "auto: all_to_all",
        "--moe-token-dispatcher-type",
        needs="expert",
    )
    expert_buffer: float = setting(
        1.5,
        "what an exchange holds over a device's mean load, at least 1; more goes in further rounds",
        at_least=1,
        needs="expert",
    )
    context: int = setting(1, "sequence of attention sharded", "--context-parallel-size")
    tensor: int = setting(
        1, "heads, MLP and vocabulary sharded; the sequence too", "--tensor-model-parallel-size"
    )
    zero1: bool = setting(
        True, "masters and optimizer sharded over data", "--use-distributed-optimizer"
    )
    schedule: Schedule = setting(
        Schedule.one_f_one_b,
        "order of a pipeline's work: one_f_one_b | zero_bubble (weight gradients apart) | gpipe",
    )
    chunks: int = setting(
        1,
        "chunks of layers a stage, interleaved (one_f_one_b alone)",
        "--num-virtual-stages-per-pipeline-rank",
        at_least=1,
    )
    chunk_layers: tuple[int, ...] = setting(
        (),
        "layers of every chunk in model order, pipe x chunks numbers; empty: as many in each",
        "--pipeline-model-parallel-layout",
    )
    first_stage_layers: int = setting(
        0,
        "layers of the first stage; 0: as the others",
        "--decoder-first-pipeline-num-layers",
        at_least=0,
    )
    last_stage_layers: int = setting(
        0,
        "layers of the last stage; 0: as the others",
        "--decoder-last-pipeline-num-layers",
        at_least=0,
    )
    pad_layers: bool = setting(
        False, "layers that do not divide: the last chunks get one less and skip its place"
    )

    @property
    def fold(self) -> int:
        """Devices along tensor that hold different experts."""
        return max(self.tensor // (self.expert_tensor or self.tensor or 1), 1)

    @property
    def expert_axis(self) -> int:
        """The mesh's `expert`: devices that hold different experts, of those along data."""
        return self.expert // (self.fold * self.context) if self.expert > 1 else 1

    @property
    def devices(self) -> int:
        """Those that the sizes name; fsdp=0 counts as one."""
        others = (self.pipe, self.data, max(self.fsdp, 1), self.context, self.tensor)
        return math.prod(others) * self.expert_axis


@dataclasses.dataclass
class OptimConfig:
    """Optimizer, learning-rate and weight-decay schedules (Megatron-LM's formulas)."""

    optimizer: Optimizer = setting(Optimizer.adamw, "update rule", "--optimizer")
    lr: float = setting(3e-4, "peak learning rate, >= 0", "--lr", at_least=0)
    min_lr: float = setting(0.0, "floor of the learning rate, in [0, lr]", "--min-lr")
    warmup_init_lr: float = setting(0.0, "where warm-up begins, in [0, lr]", "--lr-warmup-init")
    decay: LrDecay = setting(LrDecay.cosine, "shape after warm-up", "--lr-decay-style")
    warmup_steps: int = setting(
        0,
        "steps of linear warm-up: the samples that the first steps of the run consume, like all "
        "lengths in steps here; steps before a resume count with the batch size that they had",
        "--lr-warmup-iters",
        at_least=0,
    )
    warmup_samples: int = setting(
        0, "the same in samples; give one of the two", "--lr-warmup-samples", at_least=0
    )
    warmup_fraction: float = setting(
        0.0,
        "warm-up as a fraction of the decay's length, in [0, 1); used where warmup_steps and "
        "warmup_samples are 0",
        "--lr-warmup-fraction",
        at_least=0,
        below=1,
    )
    decay_steps: int = setting(
        0, "step at which min_lr is reached; 0: train.num_steps", "--lr-decay-iters", at_least=0
    )
    decay_samples: int = setting(
        0, "the same in samples; give one of the two", "--lr-decay-samples", at_least=0
    )
    wsd_decay: WsdDecay = setting(
        WsdDecay.exponential, "shape of the last part of wsd", "--lr-wsd-decay-style"
    )
    wsd_decay_steps: int = setting(
        0, "length of the last part of wsd, steps", "--lr-wsd-decay-iters"
    )
    weight_decay: float = setting(
        0.01,
        "decoupled weight decay (--start-weight-decay with a ramp)",
        "--weight-decay",
        at_least=0,
    )
    weight_decay_end: float = setting(
        -1.0, "weight decay at train.num_steps; negative: as at start", "--end-weight-decay"
    )
    weight_decay_ramp: WeightDecayRamp = setting(
        WeightDecayRamp.constant, "from start to end", "--weight-decay-incr-style"
    )
    beta1: float = setting(0.9, "decay of Adam's first moment", "--adam-beta1", at_least=0, below=1)
    beta2: float = setting(
        0.95, "decay of Adam's second moment", "--adam-beta2", at_least=0, below=1
    )
    eps: float = setting(1e-8, "Adam's epsilon", "--adam-eps", at_least=0)
    momentum: float = setting(0.9, "SGD momentum", "--sgd-momentum", at_least=0, below=1)
    clip_norm: float = setting(1.0, "global gradient norm limit; 0: off", "--clip-grad", at_least=0)


@dataclasses.dataclass
class TrainConfig:
    """Length and batches of the run."""

    num_steps: int = setting(
        100, "optimizer steps, with those before a resume", "--train-iters", at_least=1
    )
    global_batch_size: int = setting(
        32,
        "samples per step; a resumed run with another size continues from its consumed samples",
        "--global-batch-size",
    )
    micro_batch_size: int = setting(
        0, "samples a device and microbatch; 0: no accumulation", "--micro-batch-size", at_least=0
    )
    batch_rampup: tuple[int, ...] = setting(
        (), "(start, increment, samples) of a growing batch", "--rampup-batch-size"
    )
    batch_schedule: str = setting(
        "", "'0:768 250B:1536': batch size from that many tokens on", "--step-batch-size-schedule"
    )
    loss_reduction: LossReduction = setting(
        LossReduction.token_mean,
        "token_mean over the global batch, or megatron's mean of microbatch means",
        "--calculate-per-token-loss",
    )
    z_loss: float = setting(0.0, "weight of mean(logsumexp^2)", at_least=0)
    label_smoothing: float = setting(
        0.0,
        "share of the target that all other words get, in [0, 1); evaluation has none",
        at_least=0,
        below=1,
    )
    loss_chunk: int = setting(
        2048, "tokens whose logits exist at once on a device; backend xla", at_least=1
    )
    loss_backend: LossBackend = setting(
        LossBackend.auto,
        "auto: xla, or tiled where a chunk's logits take over 1 GiB (on a CPU 512 MiB)",
        "--cross-entropy-fusion-impl",
    )
    eval_every: int = setting(
        50, "steps between validations; 0: never", "--eval-interval", at_least=0
    )
    eval_steps: int = setting(8, "batches of a validation", "--eval-iters", at_least=1)
    exit_after_minutes: float = setting(
        0.0,
        "save and stop once the process has run for so many minutes; 0: no limit",
        "--exit-duration-in-mins",
        at_least=0,
    )
    exit_at: int = setting(
        0, "save and stop after each step divisible by this; 0: off", "--exit-interval", at_least=0
    )
    max_skipped_steps: int = setting(
        10,
        "a step whose loss or gradient norm is not finite is skipped: it changes nothing; the run "
        "stops after so many skipped steps in a row, >= 1",
        at_least=1,
    )
    rerun_bad_steps: bool = setting(
        False,
        "run a skipped step again from the same state: another result is a transient fault of the "
        "hardware, the same result is not; waits for every step before the next is dispatched",
        "--rerun-mode",
    )
    deterministic: bool = setting(
        False,
        "on GPUs the same program gives bitwise the same result, also after a restart; slower: no "
        "atomic additions, no tuned products, no NVLink SHARP; on CPUs it always does",
        "--deterministic-mode",
    )


@dataclasses.dataclass
class CheckpointConfig:
    """What is saved, and what is resumed."""

    load: str = setting(
        "auto",
        "auto: resume what the run folder holds | none: never | FOLDER: auto, else that run's",
        "--load",
    )
    init_from: str = setting(
        "",
        "begin with the weights in this folder (a run's, or maxmeg.convert's); empty: random",
        "--finetune",
    )
    upcycle_noise: float = setting(
        0.0,
        "experts that begin as copies of a dense model's MLP in init_from differ by noise of this "
        "times the weights' root mean square",
        "--moe-use-upcycling",
        at_least=0,
    )
    save_every: int = setting(
        100, "steps; the last step is always saved; 0: only the last", "--save-interval", at_least=0
    )
    keep_last: int = setting(2, "newest checkpoints kept, >= 1", at_least=1)
    keep_every: int = setting(
        0, "also keep steps divisible by this; 0: none", "--save-retain-interval", at_least=0
    )
    asynchronous: bool = setting(True, "write while training goes on", "--async-save")
    verify: Verify = setting(
        Verify.crc,
        "crc: the manifest has a checksum of every file | readback: and files are read from the "
        "disk again before older checkpoints are deleted | off: values alone are checked, at load",
    )
    timeout_seconds: int = setting(
        1800,
        "how long a process waits for the others while they save or restore, > 0",
        "--distributed-timeout-minutes",
        at_least=1,
    )


@dataclasses.dataclass
class LogConfig:
    """What is shown and written while the run goes on."""

    every: int = setting(10, "steps between console lines", "--log-interval", at_least=1)
    tensorboard: bool = setting(True, "event files in RUN_DIR/tensorboard", "--tensorboard-dir")
    wandb_project: str = setting("", "Weights & Biases project; empty: off", "--wandb-project")
    profile_start: int = setting(
        0, "first step of a jax.profiler trace; 0: none", "--profile-step-start", at_least=0
    )
    profile_steps: int = setting(3, "steps in the trace", "--profile-step-end", at_least=1)
    spike_zscore: float = setting(
        6.0,
        "warn when a loss is so many standard deviations above the mean of the last 100; 0: never",
        "--check-for-spiky-loss",
        at_least=0,
    )
    sample_prompt: str = setting("", "text to continue when training ends; empty: none")


@dataclasses.dataclass
class LoraConfig:
    """Low-rank adapters, trained beside a base that is frozen in the model's dtype."""

    rank: int = setting(0, "of the adapters; 0: none, all parameters are trained", at_least=0)
    alpha: float = setting(16.0, "their output is scaled by alpha / rank", above=0, needs="rank")
    dropout: float = setting(
        0.0, "of what adapters read, in [0, 1)", at_least=0, below=1, needs="rank"
    )
    targets: tuple[str, ...] = setting(
        ("query", "value"),
        "projections by patterns of their paths or path endings: query, mixers.attention.*, mlp.up",
        needs="rank",
    )


@dataclasses.dataclass
class Config:
    """One training run."""

    run_dir: str = setting(
        "runs/gpt",
        "holds config, tokenizer, checkpoints, metrics, data cache; it may be moved",
        "--save",
    )
    seed: int = setting(1234, "of weights, dropout and data order", "--seed")
    model: ModelConfig = setting(ModelConfig, "the network")
    data: DataConfig = setting(DataConfig, "the corpus")
    parallel: ParallelConfig = setting(ParallelConfig, "the mesh")
    optim: OptimConfig = setting(OptimConfig, "the optimizer")
    train: TrainConfig = setting(TrainConfig, "the loop")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "saving and resuming")
    log: LogConfig = setting(LogConfig, "seeing it")
    lora: LoraConfig = setting(LoraConfig, "adapters")
    watchdog: WatchdogConfig = setting(WatchdogConfig, "hangs and dead processes")
