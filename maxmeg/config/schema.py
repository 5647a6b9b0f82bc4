"""Every setting of a training run: nested dataclasses, one documented field a line.

`setting` stores beside each default its meaning (unit, constraint) and the Megatron-LM flag it
replaces; `docs/config.md` is generated from them (`python -m maxmeg.config.docs`). Rules between
fields live in `validate.py`; nothing derived is stored.
"""

import dataclasses
import enum
import math

from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import setting


class LossBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    tiled = "tiled"
    mosaic = "mosaic"


class DataOrder(enum.Enum):
    megatron = "megatron"
    native = "native"


class Objective(enum.Enum):
    gpt = "gpt"
    sft = "sft"


class Packing(enum.Enum):
    none = "none"
    greedy = "greedy"
    first_fit = "first_fit"
    best_fit = "best_fit"


class TooLong(enum.Enum):
    drop = "drop"
    truncate = "truncate"


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
class DataConfig:
    """Corpus, tokenizer and how samples are cut."""

    paths: tuple[str, ...] = setting(
        (),
        "prefixes of .bin/.idx files, with weights (0.7,a,0.3,b) or, for one epoch of each, "
        "without; cut by split; empty, as all that names corpora: Python's own sources",
        "--data-path",
    )
    split: str = setting("969,30,1", "weights of train, validation and test", "--split")
    train_paths: tuple[str, ...] = setting(
        (), "as paths, each read whole; instead of paths and split", "--train-data-path"
    )
    validation_paths: tuple[str, ...] = setting((), "as train_paths", "--valid-data-path")
    test_paths: tuple[str, ...] = setting((), "as train_paths", "--test-data-path")
    blend: str = setting(
        "",
        "YAML or JSON file instead of paths: a list as there, or train, validation, test: lists",
        "--data-args-path, --per-split-data-args-path",
    )
    mock: bool = setting(
        False, "documents that count, made without files, a third for each set", "--mock-data"
    )
    validate_each: bool = setting(
        False,
        "validation_paths (or those of blend) are sets of their own: the loss of each, and their "
        "mean",
        "--multiple-validation-sets",
    )
    blend_surplus: float = setting(
        0.005,
        "samples made for each corpus of a weighted blend beyond its share, a fraction >= 0",
        "--mid-level-dataset-surplus",
    )
    blend_changes: tuple[str, ...] = setting(
        (),
        "other training blends from steps on: 1000:0.5,a,0.5,b,5000:0.2,b,0.8,c or 1000:FILE.yaml; "
        "each corpus goes on with its next sample",
    )
    order: DataOrder = setting(
        DataOrder.megatron,
        "megatron: the same samples as there, which depend on seed and number of steps, and each "
        "validation goes on where the last ended; native: an order that is computed, not stored, "
        "and every validation reads the same samples, the first in reading order",
    )
    objective: Objective = setting(
        Objective.gpt,
        "gpt: every token of .bin/.idx files | sft: what the assistant says in chats, of which "
        "paths are .jsonl files (a row: {messages: [{role, content}, ...]})",
        "--sft",
    )
    chat_template: str = setting(
        "", "Jinja file for sft; empty: the tokenizer's", "--sft-tokenizer-prompt-format"
    )
    too_long: TooLong = setting(
        TooLong.drop, "of chats beyond sequence_length + 1 tokens: drop | truncate, counted"
    )
    packing: Packing = setting(
        Packing.none,
        "rows of whole documents that do not see each other: greedy | first_fit | best_fit; none: "
        "gpt cuts through them (order), sft has a chat a row",
    )
    sequence_length: int = setting(256, "tokens a sample", "--seq-length")
    tokenizer: str = setting(
        "bytes",
        "bytes | null:N | sentencepiece:FILE | huggingface:FILE | gpt2:FOLDER | wordpiece:FILE | "
        "tiktoken:FILE; ?special_tokens=NAME,NAME after it adds tokens",
        "--tokenizer-type",
    )
    cache_dir: str = setting(
        "",
        "on a disk of the node: prepared corpora, orders of samples, what is read of corpora in "
        "object storage (s3://bucket/prefix); empty: RUN_DIR/data",
        "--data-cache-path, --object-storage-cache-path",
    )
    cache_gb: float = setting(
        50.0, "of .bin files in object storage, GB (10^9 bytes) a node keeps in cache_dir, > 0"
    )
    chunk_kb: int = setting(
        1024,
        "of them, KiB read at once: more where the cache holds a whole corpus, less where not",
    )
    num_workers: int = setting(0, "loader processes; 0: threads", "--num-workers")
    prefetch: int = setting(2, "batches made ahead, per worker, >= 1")
    reset_position_ids: bool = setting(
        False, "positions restart after each end of document", "--reset-position-ids"
    )
    reset_attention_mask: bool = setting(
        False, "no attention across documents", "--reset-attention-mask"
    )
    eod_mask_loss: bool = setting(
        False, "no loss where the input is the end of a document", "--eod-mask-loss"
    )
    fim_rate: float = setting(
        0.0, "share of documents in samples to fill in the middle of, in [0, 1]", "--fim-rate"
    )
    fim_spm_rate: float = setting(
        0.5, "of those, with the suffix before the prefix, in [0, 1]", "--fim-spm-rate"
    )
    fim_tokens: tuple[str, ...] = setting(
        (),
        "prefix, middle, suffix and padding token, by name or id",
        "--fim-prefix-token, --fim-middle-token, --fim-suffix-token, --fim-pad-token",
    )
    fim_split: str = setting(
        "", "token that divides documents into fragments; empty: none", "--fim-split-sample"
    )
    fim_fragment_rate: float = setting(0.5, "share of fragments, in [0, 1]", "--fim-fragment-rate")
    fim_no_prefix: str = setting(
        "", "texts that begin with this stay as they are; empty: none", "--fim-no-prefix"
    )

    @property
    def has_segments(self) -> bool:
        """Whether attention stays within documents."""
        return self.reset_attention_mask or self.packing is not Packing.none


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
    )
    expert_buffer: float = setting(
        1.5,
        "what an exchange holds over a device's mean load, at least 1; more goes in further rounds",
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
    )
    chunk_layers: tuple[int, ...] = setting(
        (),
        "layers of every chunk in model order, pipe x chunks numbers; empty: as many in each",
        "--pipeline-model-parallel-layout",
    )
    first_stage_layers: int = setting(
        0, "layers of the first stage; 0: as the others", "--decoder-first-pipeline-num-layers"
    )
    last_stage_layers: int = setting(
        0, "layers of the last stage; 0: as the others", "--decoder-last-pipeline-num-layers"
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
    lr: float = setting(3e-4, "peak learning rate, >= 0", "--lr")
    min_lr: float = setting(0.0, "floor of the learning rate, in [0, lr]", "--min-lr")
    warmup_init_lr: float = setting(0.0, "where warm-up begins, in [0, lr]", "--lr-warmup-init")
    decay: LrDecay = setting(LrDecay.cosine, "shape after warm-up", "--lr-decay-style")
    warmup_steps: int = setting(0, "steps of linear warm-up", "--lr-warmup-iters")
    warmup_samples: int = setting(
        0, "the same in samples; give one of the two", "--lr-warmup-samples"
    )
    decay_steps: int = setting(
        0, "step at which min_lr is reached; 0: train.num_steps", "--lr-decay-iters"
    )
    decay_samples: int = setting(
        0, "the same in samples; give one of the two", "--lr-decay-samples"
    )
    wsd_decay: WsdDecay = setting(
        WsdDecay.exponential, "shape of the last part of wsd", "--lr-wsd-decay-style"
    )
    wsd_decay_steps: int = setting(
        0, "length of the last part of wsd, steps", "--lr-wsd-decay-iters"
    )
    weight_decay: float = setting(
        0.01, "decoupled weight decay (--start-weight-decay with a ramp)", "--weight-decay"
    )
    weight_decay_end: float = setting(
        -1.0, "weight decay at train.num_steps; negative: as at start", "--end-weight-decay"
    )
    weight_decay_ramp: WeightDecayRamp = setting(
        WeightDecayRamp.constant, "from start to end", "--weight-decay-incr-style"
    )
    beta1: float = setting(0.9, "decay of Adam's first moment", "--adam-beta1")
    beta2: float = setting(0.95, "decay of Adam's second moment", "--adam-beta2")
    eps: float = setting(1e-8, "Adam's epsilon", "--adam-eps")
    momentum: float = setting(0.9, "SGD momentum", "--sgd-momentum")
    clip_norm: float = setting(1.0, "global gradient norm limit; 0: off", "--clip-grad")


@dataclasses.dataclass
class TrainConfig:
    """Length and batches of the run."""

    num_steps: int = setting(100, "optimizer steps", "--train-iters")
    global_batch_size: int = setting(32, "samples a step", "--global-batch-size")
    micro_batch_size: int = setting(
        0, "samples a device and microbatch; 0: no accumulation", "--micro-batch-size"
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
    z_loss: float = setting(0.0, "weight of mean(logsumexp^2)")
    label_smoothing: float = setting(
        0.0, "share of the target that all other words get, in [0, 1); evaluation has none"
    )
    loss_chunk: int = setting(2048, "tokens whose logits exist at once on a device; backend xla")
    loss_backend: LossBackend = setting(
        LossBackend.auto,
        "auto: xla, or tiled where a chunk's logits take over 1 GiB (on a CPU 512 MiB)",
        "--cross-entropy-fusion-impl",
    )
    eval_every: int = setting(50, "steps between validations; 0: never", "--eval-interval")
    eval_steps: int = setting(8, "batches of a validation", "--eval-iters")


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
    )
    save_every: int = setting(
        100, "steps; the last step is always saved; 0: only the last", "--save-interval"
    )
    keep_last: int = setting(2, "newest checkpoints kept, >= 1")
    keep_every: int = setting(
        0, "also keep steps divisible by this; 0: none", "--save-retain-interval"
    )
    asynchronous: bool = setting(True, "write while training goes on", "--async-save")


@dataclasses.dataclass
class LogConfig:
    """What is shown and written while the run goes on."""

    every: int = setting(10, "steps between console lines", "--log-interval")
    tensorboard: bool = setting(True, "event files in RUN_DIR/tensorboard", "--tensorboard-dir")
    wandb_project: str = setting("", "Weights & Biases project; empty: off", "--wandb-project")
    profile_start: int = setting(
        0, "first step of a jax.profiler trace; 0: none", "--profile-step-start"
    )
    profile_steps: int = setting(3, "steps in the trace", "--profile-step-end")
    sample_prompt: str = setting("", "text to continue when training ends; empty: none")


@dataclasses.dataclass
class LoraConfig:
    """Low-rank adapters, trained beside a base that is frozen in the model's dtype."""

    rank: int = setting(0, "of the adapters; 0: none, all parameters are trained")
    alpha: float = setting(16.0, "their output is scaled by alpha / rank")
    dropout: float = setting(0.0, "of what adapters read, in [0, 1)")
    targets: tuple[str, ...] = setting(
        ("query", "value"),
        "projections by patterns of their paths or path endings: query, mixers.attention.*, mlp.up",
    )


@dataclasses.dataclass
class Config:
    """One training run."""

    run_dir: str = setting("runs/gpt", "holds config, checkpoints, metrics, data cache", "--save")
    seed: int = setting(1234, "of weights, dropout and data order", "--seed")
    model: ModelConfig = setting(ModelConfig, "the network")
    data: DataConfig = setting(DataConfig, "the corpus")
    parallel: ParallelConfig = setting(ParallelConfig, "the mesh")
    optim: OptimConfig = setting(OptimConfig, "the optimizer")
    train: TrainConfig = setting(TrainConfig, "the loop")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "saving and resuming")
    log: LogConfig = setting(LogConfig, "seeing it")
    lora: LoraConfig = setting(LoraConfig, "adapters")
