"""Every setting of a training run: nested dataclasses, one documented field a line.

`setting` stores beside each default its meaning (unit, constraint) and the Megatron-LM flag it
replaces; `docs/config.md` is generated from them (`python -m maxmeg.config.docs`). Rules between
fields live in `validate.py`; nothing derived is stored.
"""

import dataclasses
import enum

from maxmeg.config.data import DataConfig
from maxmeg.config.model import ModelConfig
from maxmeg.config.optimizers import (
    AdafactorConfig,
    EmaConfig,
    MuonConfig,
    QkClipConfig,
    SoapConfig,
)
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.quantization import QuantizationConfig
from maxmeg.config.setting import Section, setting


class LossBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    tiled = "tiled"
    mosaic = "mosaic"


class Verify(enum.Enum):
    readback = "readback"
    crc = "crc"
    off = "off"


class LossReduction(enum.Enum):
    token_mean = "token_mean"
    megatron = "megatron"


class Optimizer(enum.Enum):
    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"
    lion = "lion"
    soap = "soap"
    adafactor = "adafactor"


class Moments(enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float8 = "float8"


class Masters(enum.Enum):
    float32 = "float32"
    remainders = "remainders"


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


@dataclasses.dataclass(repr=False)
class LossScaleConfig(Section):
    """Scale of the loss with model.dtype=float16: it halves where gradients overflow."""

    fixed: float = setting(
        0.0, "constant scale; 0: dynamic", "--loss-scale", at_least=0, below=1e38
    )
    initial: float = setting(
        2.0**32,
        "scale of the first step",
        "--initial-loss-scale",
        above=0,
        below=1e38,
        needs="fixed=0.0",
    )
    minimum: float = setting(
        1.0,
        "smallest scale; steps that overflow at it count for train.max_skipped_steps",
        "--min-loss-scale",
        above=0,
        needs="fixed=0.0",
    )
    window: int = setting(
        1000,
        "steps without an overflow before it doubles",
        "--loss-scale-window",
        at_least=1,
        needs="fixed=0.0",
    )
    hysteresis: int = setting(
        2,
        "number of overflows tolerated before the scale is halved; refilled when the scale doubles",
        "--hysteresis",
        at_least=1,
        needs="fixed=0.0",
    )


@dataclasses.dataclass(repr=False)
class OptimConfig(Section):
    """Optimizer, learning-rate and weight-decay schedules (Megatron-LM's formulas)."""

    optimizer: Optimizer = setting(Optimizer.adamw, "update rule", "--optimizer")
    lr: float = setting(3e-4, "peak learning rate, >= 0", "--lr", at_least=0)
    min_lr: float = setting(0.0, "minimum learning rate, in [0, lr]", "--min-lr")
    warmup_init_lr: float = setting(
        0.0, "learning rate at the start of the warm-up, in [0, lr]", "--lr-warmup-init"
    )
    decay: LrDecay = setting(LrDecay.cosine, "schedule after the warm-up", "--lr-decay-style")
    warmup_steps: int = setting(
        0,
        "steps of linear warm-up. Schedules advance by samples: a length in steps, here and below, "
        "means the samples of the run's first steps, with the batch sizes that they had",
        "--lr-warmup-iters",
        at_least=0,
    )
    warmup_samples: int = setting(
        0, "warm-up in samples, instead of warmup_steps", "--lr-warmup-samples", at_least=0
    )
    warmup_fraction: float = setting(
        0.0,
        "warm-up as a fraction of the decay's length, in [0, 1); used if warmup_steps and "
        "warmup_samples are 0",
        "--lr-warmup-fraction",
        at_least=0,
        below=1,
    )
    decay_steps: int = setting(
        0, "step at which min_lr is reached; 0: train.num_steps", "--lr-decay-iters", at_least=0
    )
    decay_samples: int = setting(
        0,
        "length of the decay in samples, instead of decay_steps",
        "--lr-decay-samples",
        at_least=0,
    )
    wsd_decay: WsdDecay = setting(
        WsdDecay.exponential,
        "schedule of the decay phase of wsd",
        "--lr-wsd-decay-style",
        needs="decay=wsd",
    )
    wsd_decay_steps: int = setting(
        0, "length of the decay phase of wsd, steps", "--lr-wsd-decay-iters"
    )
    weight_decay: float = setting(
        0.01,
        "decoupled weight decay (--start-weight-decay with a ramp)",
        "--weight-decay",
        at_least=0,
    )
    weight_decay_end: float = setting(
        -1.0, "weight decay at train.num_steps; negative: constant", "--end-weight-decay"
    )
    weight_decay_ramp: WeightDecayRamp = setting(
        WeightDecayRamp.constant, "schedule of the weight decay", "--weight-decay-incr-style"
    )
    beta1: float = setting(
        0.9,
        "decay of Adam's first moment; with Lion, weight of the momentum in the update",
        "--adam-beta1, --lion-beta1",
        at_least=0,
        below=1,
        needs="optimizer=adamw|muon|lion|soap",
    )
    beta2: float = setting(
        0.95,
        "decay of Adam's second moment, and of Lion's momentum",
        "--adam-beta2, --lion-beta2",
        at_least=0,
        below=1,
        needs="optimizer=adamw|muon|lion|soap",
    )
    eps: float = setting(
        1e-8, "Adam's epsilon", "--adam-eps", at_least=0, needs="optimizer=adamw|muon|soap"
    )
    momentum: float = setting(
        0.9, "SGD momentum", "--sgd-momentum", at_least=0, below=1, needs="optimizer=sgd"
    )
    groups: tuple[str, ...] = setting(
        (),
        "PATTERN:RATE:DECAY multiplies learning rate and weight decay of the parameters whose "
        "names match the pattern (with * and ?); the first match counts",
        "--decoupled-lr",
    )
    moments: Moments = setting(
        Moments.float32,
        "dtype in which moments of matrices are stored; bfloat16 and float8 round stochastically, "
        "float8 has a scale for each block of 128 elements",
        "--exp-avg-dtype, --exp-avg-sq-dtype",
    )
    masters: Masters = setting(
        Masters.float32,
        "float32 | remainders: store bfloat16 weights and the other 16 bits of their float32 "
        "masters; needs model.dtype=bfloat16",
        "--use-precision-aware-optimizer",
    )
    ema: EmaConfig = setting(EmaConfig, "moving average of the weights")
    offload: bool = setting(
        False,
        "keep float32 masters (or the remainders of masters=remainders), the optimizer's state and "
        "averages in pinned host memory; the device updates one layer at a time, with muon and "
        "soap as many as a stage has devices",
        "--offload-optimizer-states, --optimizer-cpu-offload",
    )
    clip_norm: float = setting(1.0, "global gradient norm limit; 0: off", "--clip-grad", at_least=0)
    loss_scale: LossScaleConfig = setting(LossScaleConfig, "loss scaling for float16")
    qk_clip: QkClipConfig = setting(
        QkClipConfig, "clipping of attention logits, with any optimizer"
    )
    muon: MuonConfig = setting(MuonConfig, "Muon", needs="optimizer=muon")
    soap: SoapConfig = setting(SoapConfig, "SOAP", needs="optimizer=soap")
    adafactor: AdafactorConfig = setting(AdafactorConfig, "Adafactor", needs="optimizer=adafactor")


@dataclasses.dataclass(repr=False)
class TrainConfig(Section):
    """Length, batches and loss of the run."""

    num_steps: int = setting(
        100,
        "number of optimizer steps, those before a resume included",
        "--train-iters",
        at_least=1,
    )
    global_batch_size: int = setting(
        32,
        "samples per step; a resumed run with another size continues from its consumed samples",
        "--global-batch-size",
        at_most=10**7,
    )
    micro_batch_size: int = setting(
        0, "samples per device and microbatch; 0: no accumulation", "--micro-batch-size", at_least=0
    )
    batch_rampup: tuple[int, ...] = setting(
        (), "batch size ramp-up: start, increment, samples", "--rampup-batch-size"
    )
    batch_schedule: str = setting(
        "",
        "'0:768 250B:1536': batch size 768, and 1536 after 250 billion tokens",
        "--step-batch-size-schedule",
    )
    loss_reduction: LossReduction = setting(
        LossReduction.token_mean,
        "token_mean over the global batch, or megatron's mean of microbatch means",
        "--calculate-per-token-loss",
    )
    score_scaling: bool = setting(
        False,
        "data.objective=ict or retrieve: divide scores by sqrt(model.hidden_size)",
        "--retriever-score-scaling",
    )
    z_loss: float = setting(0.0, "weight of mean(logsumexp^2)", at_least=0)
    label_smoothing: float = setting(
        0.0,
        "label smoothing of the training loss, in [0, 1)",
        at_least=0,
        below=1,
    )
    loss_chunk: int = setting(
        2048, "tokens whose logits are in memory at once on a device (loss_backend=xla)", at_least=1
    )
    loss_backend: LossBackend = setting(
        LossBackend.auto,
        "auto: xla, or tiled if a chunk's logits exceed 1 GiB (on a CPU 512 MiB)",
        "--cross-entropy-fusion-impl",
    )
    quantization: QuantizationConfig = setting(QuantizationConfig, "products in 8 and 4 bits")
    eval_every: int = setting(
        50, "steps between validations; 0: never", "--eval-interval", at_least=0
    )
    eval_steps: int = setting(
        8,
        "number of batches per validation; 0: the whole validation set, each sample once",
        "--eval-iters, --full-validation",
        at_least=0,
    )
    exit_after_minutes: float = setting(
        0.0,
        "save and stop after this many minutes; 0: no limit",
        "--exit-duration-in-mins",
        at_least=0,
    )
    exit_at: int = setting(
        0, "save and stop after each step divisible by this; 0: off", "--exit-interval", at_least=0
    )
    gc_interval: int = setting(
        100,
        "steps between collections of Python's garbage, which all processes make after the same "
        "step; 0: each process when Python chooses",
        "--manual-gc-interval",
        at_least=0,
    )
    max_skipped_steps: int = setting(
        10,
        "a step whose loss or gradient norm is not finite is skipped; the run stops after so many "
        "skipped steps in a row, >= 1",
        at_least=1,
    )
    rerun_bad_steps: bool = setting(
        False,
        "run a skipped step again from the same state: a different result shows a transient fault "
        "of the hardware; every step is awaited before the next is dispatched",
        "--rerun-mode",
    )
    deterministic: bool = setting(
        False,
        "bitwise reproducible results on GPUs; slower: no atomic additions, no autotuned matrix "
        "products, no NVLink SHARP; CPUs are always deterministic",
        "--deterministic-mode",
    )


@dataclasses.dataclass(repr=False)
class CheckpointConfig(Section):
    """Saving, resuming and initial weights."""

    dir: str = setting(
        "",
        "folder of the checkpoints, which no other run may use: a path, s3://BUCKET/PATH or "
        "gs://BUCKET/PATH; empty: RUN_DIR/checkpoints",
    )
    load: str = setting(
        "auto",
        "auto: resume from the run folder | none: refuse a run folder that holds checkpoints | "
        "FOLDER: as auto; if the run folder holds none, resume from that run",
        "--load",
    )
    init_from: str = setting(
        "",
        "folder of initial weights, a run or a Hugging Face folder; empty: random",
        "--finetune",
    )
    upcycle_noise: float = setting(
        0.0,
        "upcycling of a dense model in init_from: standard deviation of the noise on the experts, "
        "relative to the weights' root mean square",
        "--moe-use-upcycling",
        at_least=0,
    )
    save_every: int = setting(
        100,
        "steps between checkpoints; the last step is always saved; 0: only the last",
        "--save-interval",
        at_least=0,
    )
    keep_last: int = setting(2, "number of newest checkpoints to keep, >= 1", at_least=1)
    keep_every: int = setting(
        0, "also keep steps divisible by this; 0: none", "--save-retain-interval", at_least=0
    )
    asynchronous: bool = setting(
        True, "write in the background, while training continues", "--async-save"
    )
    verify: Verify = setting(
        Verify.crc,
        "crc: store a checksum of every file | readback: also read the files back from the disk "
        "before older checkpoints are deleted | off: only digests of the values, checked at load",
    )
    timeout_seconds: int = setting(
        1800,
        "time limit for processes to agree while they save or restore, seconds, > 0",
        "--distributed-timeout-minutes",
        at_least=1,
    )


@dataclasses.dataclass(repr=False)
class LogConfig(Section):
    """Console output, metrics and profiles."""

    every: int = setting(10, "steps between console lines", "--log-interval", at_least=1)
    tensorboard: bool = setting(True, "event files in RUN_DIR/tensorboard", "--tensorboard-dir")
    wandb_project: str = setting("", "Weights & Biases project; empty: off", "--wandb-project")
    profile_start: int = setting(
        0, "first step of a jax.profiler trace; 0: none", "--profile-step-start", at_least=0
    )
    profile_steps: int = setting(3, "steps in the trace", "--profile-step-end", at_least=1)
    spike_zscore: float = setting(
        6.0,
        "warn if a loss is this many standard deviations above the mean of the last 100; 0: never",
        "--check-for-spiky-loss",
        at_least=0,
    )
    parameters: bool = setting(
        False, "print the table of all parameters: shapes, sharding, bytes per device"
    )
    sample_prompt: str = setting(
        "",
        "text to continue when training ends; auto: the first words of a validation document, or "
        "for the built-in corpus a line of Python; empty: none",
    )


@dataclasses.dataclass(repr=False)
class LoraConfig(Section):
    """Low-rank adapters (LoRA); the base is frozen in the model's dtype."""

    rank: int = setting(
        0, "rank of the adapters; 0: no adapters, all parameters are trained", at_least=0
    )
    alpha: float = setting(
        16.0, "the adapters' output is scaled by alpha / rank", above=0, needs="rank"
    )
    dropout: float = setting(
        0.0, "dropout rate of the adapters' input, in [0, 1)", at_least=0, below=1, needs="rank"
    )
    targets: tuple[str, ...] = setting(
        ("query", "value"),
        "projections with adapters: patterns of names or their ends: mixers.attention.*, mlp.up",
        needs="rank",
    )


@dataclasses.dataclass(repr=False)
class WatchdogConfig(Section):
    """Limits after which a run that hangs or has lost a process ends, with exit code 75."""

    step: float = setting(
        60.0,
        "seconds without a finished step, or 10 times the median step if that is longer: then the "
        "stacks of all threads are written to RUN_DIR/hangs and the run ends; 0: no limit",
    )
    silence: float = setting(
        60.0,
        "seconds without a heartbeat after which a process counts as dead, >= 2; 0: no limit",
        "--distributed-timeout-minutes",
    )
    start: float = setting(
        7200.0, "seconds to open the data and to restore, before the first step; 0: no limit"
    )
    compile: float = setting(
        3600.0, "seconds for the first step of every batch size, which compiles; 0: no limit"
    )
    validate: float = setting(3600.0, "seconds for a validation; 0: no limit")
    save: float = setting(3600.0, "seconds in which saving may hold up the next step; 0: no limit")
    shutdown: float = setting(
        3600.0, "seconds after the last step, last save included; 0: no limit"
    )
    straggler: float = setting(
        1.2,
        "every log.every steps, name the process whose work outside of the compiled step takes "
        "longest if it is more than this times the median of the others, >= 1; 0: off",
        "--log-straggler",
    )


@dataclasses.dataclass(repr=False)
class Config(Section):
    """One training run."""

    run_dir: str = setting(
        "runs/gpt",
        "run folder: config, tokenizer, checkpoints, metrics, data cache; it may be moved",
        "--save",
    )
    seed: int = setting(1234, "random seed of weights, dropout and data order", "--seed")
    model: ModelConfig = setting(ModelConfig, "the network")
    data: DataConfig = setting(DataConfig, "the corpus")
    parallel: ParallelConfig = setting(ParallelConfig, "the mesh")
    optim: OptimConfig = setting(OptimConfig, "the optimizer")
    train: TrainConfig = setting(TrainConfig, "the loop")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "saving and resuming")
    log: LogConfig = setting(LogConfig, "seeing it")
    lora: LoraConfig = setting(LoraConfig, "adapters")
    watchdog: WatchdogConfig = setting(WatchdogConfig, "hangs and dead processes")
    encoder: ModelConfig | None = setting(
        ModelConfig,
        "reserved for an encoder with settings of its own (encoder.num_layers ...). No model reads "
        "it yet: setting one of them is an error. T5's encoder is part of model.layers",
        absent=True,
    )
    vision: ModelConfig | None = setting(
        ModelConfig,
        "reserved for a vision tower (vision.num_layers ...). No model reads it yet: setting one "
        "of them is an error",
        absent=True,
    )
