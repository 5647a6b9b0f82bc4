"""One pure check of a whole Config, run by every command after overrides. No JAX.

Lengths and batch sizes over time are checked where they are computed: `optim/schedules.py`.
"""

import dataclasses
import math

from maxmeg.config.architecture import divisors, experts, model_problems
from maxmeg.config.schema import (
    Config,
    DataConfig,
    DataOrder,
    LoraConfig,
    Objective,
    Packing,
    ParallelConfig,
    Schedule,
)
from maxmeg.config.stages import layers_of_chunks

UNSUPPORTED_AXES = ("context",)


def axis_sizes(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Size of every mesh axis; fsdp=0 takes the devices that the others leave."""
    sizes = {
        name: getattr(parallel, name)
        for name in ("pipe", "data", "fsdp", "expert", "context", "tensor")
    }
    for name, size in sizes.items():
        if size < (0 if name == "fsdp" else 1):
            raise ValueError(f"parallel.{name}={size} must be at least 1 (fsdp may be 0: the rest)")
    cut = parallel.expert_tensor
    if cut and (cut < 0 or parallel.tensor % cut):
        raise ValueError(
            f"parallel.expert_tensor={cut} does not divide tensor={parallel.tensor}: choose it in "
            f"{divisors(parallel.tensor)}, or 0 for tensor"
        )
    inner = parallel.context * parallel.fold
    if parallel.expert % inner and (parallel.expert > 1 or parallel.fold > 1):
        raise ValueError(
            f"parallel.expert={parallel.expert} is not divisible by {inner}: with expert_tensor="
            f"{cut} experts lie along {parallel.fold} of the devices along tensor and along "
            f"context {parallel.context} first; set expert to a multiple, or expert_tensor=0"
        )
    sizes["expert"] = parallel.expert_axis
    others = math.prod(size for name, size in sizes.items() if name != "fsdp")
    if sizes["fsdp"] == 0 and num_devices % others == 0:
        sizes["fsdp"] = num_devices // others
    total = math.prod(sizes.values())
    if total != num_devices:
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
        raise ValueError(
            f"the mesh {shown or 'of size 1'} does not make {num_devices} devices: set the sizes "
            f"of config.parallel to divisors of {num_devices} ({divisors(num_devices)}) whose "
            "product it is (fsdp=0 takes what the others leave)"
        )
    return sizes


def resolve(config: Config, tokenizer_vocab_size: int) -> None:
    """Fill in what the corpus decides: the vocabulary and the longest sequence."""
    model = config.model
    model.vocab_size = model.vocab_size or tokenizer_vocab_size
    model.max_position = model.max_position or config.data.sequence_length
    if tokenizer_vocab_size > model.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's "
            f"{tokenizer_vocab_size}: raise it, or set it to 0 to take the tokenizer's"
        )


def batch_unit(config: Config, sizes: dict[str, int]) -> int:
    """What every global batch size must divide by: a microbatch of all replicas, or, with
    interleaved chunks, as many of them as stages."""
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    rounds = sizes["pipe"] if config.parallel.chunks > 1 else 1
    return shards * max(config.train.micro_batch_size, 1) * rounds


def validate(config: Config, num_devices: int) -> None:
    """Raise a ValueError that lists every broken rule with its values and the remedy."""
    sizes = axis_sizes(config.parallel, num_devices)
    for name in UNSUPPORTED_AXES:
        if sizes[name] > 1:
            raise NotImplementedError(
                f"parallel.{name}={sizes[name]}: this axis must be 1; available are pipe, "
                "data, fsdp, expert and tensor"
            )
    problems = [
        *model_problems(config.model),
        *parallel_problems(config, sizes),
        *pipeline_problems(config, sizes),
        *data_problems(config),
        *objective_problems(config.data),
        *fim_problems(config.data),
        *optim_problems(config),
        *train_problems(config, sizes),
        *lora_problems(config),
        *upcycling_problems(config),
        *limits(config),
    ]
    if problems:
        raise ValueError("\n".join(problems))


def parallel_problems(config: Config, sizes: dict[str, int]):
    model, tensor, fsdp = config.model, sizes["tensor"], sizes["fsdp"]
    yield from experts.layout_problems(config)
    expert_ffn = model.expert_ffn if model.num_experts else 0
    expert_tensor = tensor // config.parallel.fold
    cut = (
        ("model.num_experts", model.num_experts, "expert", config.parallel.expert),
        ("model.expert_ffn_size", expert_ffn, "expert_tensor", expert_tensor),
        ("model.shared_ffn_size", model.shared_ffn_size, "tensor", tensor),
        ("model.num_heads", model.num_heads, "tensor", tensor),
        ("model.num_kv_heads", model.kv_heads, "tensor", tensor),
        ("model.ffn_size", model.ffn, "tensor", tensor),
        ("data.sequence_length", config.data.sequence_length, "tensor", tensor),
        ("model.hidden_size", model.hidden_size, "fsdp", fsdp),
        ("model.mla_kv_rank", model.mla_kv_rank, "fsdp", fsdp),
        ("model.mla_query_rank", model.mla_query_rank, "fsdp", fsdp),
    )
    for name, value, axis, size in cut:
        if value % size:
            yield (
                f"{name}={value} is not divisible by parallel.{axis}={size}: choose {axis} in "
                f"{divisors(value, at_most=2 * size)}, or change {name}"
            )


def pipeline_problems(config: Config, sizes: dict[str, int]):
    parallel, pipe = config.parallel, sizes["pipe"]
    if pipe > 1 and not config.model.scan_layers:
        yield f"model.scan_layers=false is not for a pipeline (parallel.pipe={pipe}): set it true"
    if pipe > 1 and (dense := config.model.dense_layers) and config.model.layers_of_unit > 1:
        yield (
            f"model.expert_pattern with {dense} layers without experts and then kinds that repeat "
            f"after {config.model.layers_of_unit} is not for a pipeline (parallel.pipe={pipe}): "
            "choose a pattern whose kinds repeat from the first layer on, or pipe=1"
        )
    if parallel.chunks > 1 and pipe == 1:
        yield f"parallel.chunks={parallel.chunks} needs parallel.pipe > 1: set chunks=1"
    elif parallel.chunks > 1 and parallel.schedule is not Schedule.one_f_one_b:
        yield (
            f"parallel.schedule={parallel.schedule.name} does not support "
            f"parallel.chunks={parallel.chunks}: set chunks=1, or schedule=one_f_one_b"
        )
    elif parallel.chunks >= 1 and config.model.num_layers >= 1:
        try:
            layers_of_chunks(parallel, config.model.num_layers, config.model.layers_of_unit)
        except ValueError as error:
            yield str(error)


def data_problems(config: Config):
    model, data = config.model, config.data
    if model.mtp_depths >= data.sequence_length:
        yield (
            f"model.mtp_depths={model.mtp_depths} leaves no target in rows of "
            f"data.sequence_length={data.sequence_length}: predict fewer further tokens"
        )
    if 0 < model.max_position < data.sequence_length:
        yield (
            f"data.sequence_length={data.sequence_length} is longer than "
            f"model.max_position={model.max_position}: shorten the one or raise the other"
        )
    own = [n for n in ("train_paths", "validation_paths", "test_paths") if getattr(data, n)]
    named = [n for n in ("paths", "blend", "mock") if getattr(data, n)]
    named += [", ".join(own)] * bool(own)
    if len(named) > 1:
        yield f"data.{' and data.'.join(named)} both name corpora: set one of them"
    if own and not data.train_paths:
        yield f"data.{named[-1]} without data.train_paths names no corpus to train on: add it"
    if data.validate_each and not (data.validation_paths or data.blend):
        yield "data.validate_each=True needs data.validation_paths (or data.blend): name the sets"
    if data.order is DataOrder.megatron and not 0 <= config.seed < 2**32:
        yield f"seed={config.seed} must lie in [0, 2^32) with data.order=megatron"


def objective_problems(data: DataConfig):
    is_sft, is_packed = data.objective is Objective.sft, data.packing is not Packing.none
    if is_sft and data.blend:
        yield "data.blend is for .bin/.idx files: name chats by data.paths with data.objective=sft"
    if is_sft and not (data.paths or data.train_paths):
        yield "data.objective=sft needs chats: set data.paths=FILE.jsonl"
    if data.blend_changes and (is_sft or is_packed):
        yield (
            "data.blend_changes is for blends of .bin/.idx files: leave it out with "
            "data.objective=sft and data.packing, which read files one after the other"
        )
    if data.mock and (is_sft or is_packed or data.blend_changes):
        yield "data.mock=True is for data.objective=gpt, without packing and blend_changes"
    for name in ("chat_template", "too_long"):
        if not is_sft and (value := getattr(data, name)) != getattr(DataConfig(), name):
            yield f"data.{name}={value} has no effect without data.objective=sft: set it"
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if (is_sft or is_packed) and getattr(data, name):
            yield (
                f"data.{name}=True is for samples that are cut through documents; rows of "
                "data.objective=sft and data.packing keep documents apart: leave it out"
            )


def fim_problems(data: DataConfig):
    names = [f.name for f in dataclasses.fields(data) if f.name.startswith("fim_")]
    for name in names:
        value = getattr(data, name)
        if name.endswith("_rate") and not 0 <= value <= 1:
            yield f"data.{name}={value} must lie in [0, 1]"
        if not data.fim_rate and value != getattr(DataConfig(), name):
            yield f"data.{name}={value} has no effect with data.fim_rate=0: set that, as 0.5"
    if data.fim_fragment_rate != DataConfig().fim_fragment_rate and not data.fim_split:
        yield f"data.fim_fragment_rate={data.fim_fragment_rate} needs data.fim_split, a token"
    if data.fim_rate and len(data.fim_tokens) != 4:
        yield (
            f"data.fim_rate={data.fim_rate} needs data.fim_tokens, not {data.fim_tokens}: name "
            "prefix, middle, suffix and padding, as <fim_prefix>,<fim_middle>,<fim_suffix>,"
            "<fim_pad>"
        )
    if data.fim_rate and (data.objective is Objective.sft or data.packing is not Packing.none):
        yield (
            f"data.fim_rate={data.fim_rate} is for samples that are cut through documents: leave "
            "it out with data.objective=sft and data.packing"
        )


def optim_problems(config: Config):
    optim = config.optim
    for name in ("min_lr", "warmup_init_lr"):
        if not 0 <= getattr(optim, name) <= optim.lr:
            yield f"optim.{name}={getattr(optim, name)} must lie in [0, optim.lr={optim.lr}]"


def lora_problems(config: Config):
    lora, plain = config.lora, LoraConfig()
    if not lora.rank:
        for name in ("alpha", "dropout", "targets"):
            if (value := getattr(lora, name)) != getattr(plain, name):
                yield f"lora.{name}={value} has no effect with lora.rank=0: set lora.rank, as 8"
        return
    if not lora.targets:
        yield "lora.targets is empty: name projections, as query,value, or * for all"
    if config.model.mtp_depths:
        yield (
            f"lora.rank={lora.rank} is not for layers of further tokens (model.mtp_depths="
            f"{config.model.mtp_depths}): set mtp_depths=0, which leaves those of the base out"
        )
    if coefficient := config.model.router_global_aux_loss:
        yield (
            f"model.router_global_aux_loss={coefficient} needs the loads of each step, which are "
            f"not counted beside lora.rank={lora.rank}: use router_aux_loss, or none"
        )
    if not lora.alpha > 0:
        yield f"lora.alpha={lora.alpha} must be positive: adapters are scaled by alpha / rank"


def upcycling_problems(config: Config):
    noise = config.checkpoint.upcycle_noise
    if noise and not (config.checkpoint.init_from and config.model.num_experts):
        yield (
            f"checkpoint.upcycle_noise={noise} has no effect without checkpoint.init_from=FOLDER "
            "of a dense model and model.num_experts: set both, or leave it at 0"
        )


def train_problems(config: Config, sizes: dict[str, int]):
    train = config.train
    unit = batch_unit(config, sizes)
    if train.global_batch_size < 1 or train.global_batch_size % unit:
        rounds = f" x pipe {sizes['pipe']} (interleaved)" if config.parallel.chunks > 1 else ""
        below = train.global_batch_size // unit * unit
        nearest = f"{below} and {below + unit}" if below else f"{unit} and {2 * unit}"
        yield (
            f"train.global_batch_size={train.global_batch_size} is not divisible by {unit} = "
            f"data {sizes['data']} x fsdp {sizes['fsdp']} x expert {sizes['expert']} x "
            f"train.micro_batch_size {max(train.micro_batch_size, 1)}{rounds}: the "
            f"nearest choices are {nearest}"
        )
    if sizes["pipe"] > 1 and not train.micro_batch_size:
        yield (
            f"parallel.pipe={sizes['pipe']} needs microbatches: set train.micro_batch_size to the "
            "samples a device and microbatch, for at least as many microbatches as stages"
        )


LOWEST = {
    "model.vocab_size": 0,
    "model.vocab_divisible_by": 1,
    "model.num_layers": 1,
    "model.hidden_size": 1,
    "model.head_dim": 0,
    "model.mla_kv_rank": 0,
    "model.mla_query_rank": 0,
    "model.mla_rotary_size": 0,
    "model.mla_value_size": 0,
    "model.mla_norm_eps": 0,
    "model.ffn_size": 0,
    "model.num_experts": 0,
    "model.expert_ffn_size": 0,
    "model.shared_ffn_size": 0,
    "model.router_bias_rate": 0,
    "model.router_aux_loss": 0,
    "model.router_sequence_aux_loss": 0,
    "model.router_global_aux_loss": 0,
    "model.expert_latent_size": 0,
    "model.router_z_loss": 0,
    "model.expert_capacity": 0,
    "model.mtp_depths": 0,
    "model.max_position": 0,
    "model.norm_eps": 0,
    "model.rotary_base": 1,
    "model.rotary_attention_factor": 0,
    "model.init_std": 0,
    "model.logit_softcap": 0,
    "model.attention_window": 0,
    "model.attention_softcap": 0,
    "model.attention_scale": 0,
    "data.blend_surplus": 0,
    "data.sequence_length": 1,
    "data.cache_gb": 0.01,
    "data.chunk_kb": 1,
    "data.num_workers": 0,
    "data.prefetch": 1,
    "train.num_steps": 1,
    "train.micro_batch_size": 0,
    "train.loss_chunk": 1,
    "train.z_loss": 0,
    "train.eval_every": 0,
    "train.eval_steps": 1,
    "parallel.chunks": 1,
    "parallel.first_stage_layers": 0,
    "parallel.last_stage_layers": 0,
    "optim.lr": 0,
    "optim.eps": 0,
    "optim.clip_norm": 0,
    "optim.weight_decay": 0,
    "optim.warmup_steps": 0,
    "optim.warmup_samples": 0,
    "optim.decay_steps": 0,
    "optim.decay_samples": 0,
    "lora.rank": 0,
    "checkpoint.upcycle_noise": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 0,
    "checkpoint.save_every": 0,
    "log.every": 1,
    "log.profile_start": 0,
    "log.profile_steps": 1,
}
BELOW_ONE = (
    "train.label_smoothing",
    "model.dropout_hidden",
    "model.dropout_attention",
    "model.dropout_embedding",
    "model.router_jitter",
    "lora.dropout",
    "optim.beta1",
    "optim.beta2",
    "optim.momentum",
)


def limits(config: Config):
    """Bounds of single fields."""
    for path in (*LOWEST, *BELOW_ONE):
        section, name = path.split(".")
        value, lowest = getattr(getattr(config, section), name), LOWEST.get(path, 0)
        if not value >= lowest:  # nan too
            yield f"{path}={value} must be at least {lowest}"
        if path in BELOW_ONE and value >= 1:
            yield f"{path}={value} must be below 1"
    if not 0 < config.model.rotary_fraction <= 1:
        yield f"model.rotary_fraction={config.model.rotary_fraction} must lie in (0, 1]"
