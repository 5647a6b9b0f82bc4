"""One pure check of a whole Config, run by every command after overrides. No JAX.

Lengths and batch sizes over time are checked where they are computed: `optim/schedules.py`.
"""

import dataclasses
import math

from maxmeg.config.model import ModelConfig, NormPlace, Position, RotaryScaling
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


def divisors(number: int, at_most: int = 0) -> str:
    """ "1, 2, 3, 6" for 6, up to `at_most` if it is given."""
    highest = min(number, at_most or number)
    return ", ".join(str(d) for d in range(1, highest + 1) if number % d == 0)


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
        *limits(config),
    ]
    if problems:
        raise ValueError("\n".join(problems))


def model_problems(model: ModelConfig):
    if model.num_heads < 1 or (not model.head_dim and model.hidden_size % model.num_heads):
        yield (
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_heads={model.num_heads}: choose num_heads in "
            f"{divisors(model.hidden_size)}, or set model.head_dim"
        )
    elif model.kv_heads < 1 or model.num_heads % model.kv_heads:
        yield (
            f"model.num_heads={model.num_heads} is not divisible by "
            f"model.num_kv_heads={model.kv_heads}: choose num_kv_heads in "
            f"{divisors(model.num_heads)}"
        )
    elif model.position is Position.rotary and int(model.head_size * model.rotary_fraction) < 2:
        yield (
            f"model.rotary_fraction={model.rotary_fraction} of head size {model.head_size} leaves "
            "fewer than 2 dimensions to rotate: raise it, or set model.position=none"
        )
    else:
        yield from rotary_problems(model)
    yield from norm_problems(model)
    yield from window_problems(model)
    yield from expert_problems(model)


OPTIONS_OF_EXPERTS = {  # the setting without which these have no effect
    "num_experts": (
        "experts_per_token", "expert_ffn_size", "shared_ffn_size", "first_dense_layers",
        "router_score", "router_over_all", "router_normalize", "router_scale", "router_groups",
        "router_bias", "router_aux_loss", "router_sequence_aux_loss", "router_z_loss",
        "expert_capacity", "expert_backend",
    ),
    "shared_ffn_size": ("shared_gate",),
    "router_groups": ("router_groups_kept", "router_group_best"),
    "router_bias": ("router_bias_rate",),
    "expert_capacity": ("expert_drop",),
}  # fmt: skip


def expert_problems(model: ModelConfig):
    experts, chosen, plain = model.num_experts, model.experts_per_token, ModelConfig()
    for needed, names in OPTIONS_OF_EXPERTS.items():
        if getattr(model, needed) == getattr(plain, needed):
            changed = [n for n in names if getattr(model, n) != getattr(plain, n)]
            if changed:
                shown = ", ".join(f"model.{n}={getattr(model, n)}" for n in changed)
                yield f"{shown} has no effect without model.{needed}: set that, or leave this out"
    if not experts:
        return
    groups, kept = model.router_groups, model.router_groups_kept
    if not 1 <= chosen <= experts:
        yield f"model.experts_per_token={chosen} must be from 1 to num_experts={experts}"
    if groups < 1 or experts % groups:
        yield (
            f"model.router_groups={groups} does not divide num_experts={experts}: choose it in "
            f"{divisors(experts)}"
        )
    elif not 1 <= kept <= groups or chosen > kept * (experts // groups):
        yield (
            f"model.router_groups_kept={kept} of router_groups={groups}, each of "
            f"{experts // groups} experts, must hold experts_per_token={chosen}: keep more groups, "
            f"at most {groups}"
        )
    elif not 0 <= model.router_group_best <= experts // groups:
        yield (
            f"model.router_group_best={model.router_group_best} must be from 0 to the "
            f"{experts // groups} experts of a group"
        )
    if not 0 <= model.first_dense_layers < model.num_layers:
        yield (
            f"model.first_dense_layers={model.first_dense_layers} must leave some of "
            f"num_layers={model.num_layers} for the experts"
        )
    if model.first_dense_layers and model.attention_global_every:
        yield "model.first_dense_layers cannot be beside attention_global_every: set one to 0"
    if model.parallel_block:
        yield "model.num_experts cannot be in a parallel_block: set num_experts=0, or that to false"


def window_problems(model: ModelConfig):
    every, window, base = (
        *(model.attention_global_every, model.attention_window),
        model.rotary_local_base,
    )
    if every == 1 or every < 0 or (every and not window):
        yield (
            f"model.attention_global_every={every} with attention_window={window}: every n-th "
            "layer beside those with a window needs n >= 2 and a window; 0: no layer is global"
        )
    if base and not (every and base >= 1 and model.position is Position.rotary):
        yield (
            f"model.rotary_local_base={base} must be at least 1, and needs layers with a window "
            f"beside global ones (attention_global_every={every}) and position=rotary "
            f"(it is {model.position.name}): leave it at 0"
        )


def norm_problems(model: ModelConfig):
    if model.parallel_norms and not model.parallel_block:
        yield "model.parallel_norms=true needs model.parallel_block=true: set both, or neither"
    if model.parallel_norms and model.norm_place is NormPlace.post:
        yield "model.parallel_norms=true has no effect with norm_place=post: choose pre"


def rotary_problems(model: ModelConfig):
    kind, plain = model.rotary_scaling, ModelConfig()
    used = ROTARY[kind] if model.position is Position.rotary else ()
    for name in ("rotary_scaling", *ROTARY_FIELDS):
        value = getattr(model, name)
        if value == getattr(plain, name) or name in used or (name == "rotary_scaling" and used):
            continue
        where = f"rotary_scaling={kind.name} and position={model.position.name}"
        yield f"model.{name}={getattr(value, 'name', value)} has no effect with {where}: leave it"
    if kind is RotaryScaling.none or not used:
        return
    if not model.rotary_factor >= 1:
        yield f"model.rotary_factor={model.rotary_factor} must be at least 1"
    if "rotary_original_length" in used and model.rotary_original_length < 2:
        yield (
            f"model.rotary_original_length={model.rotary_original_length} must be the length "
            f"before scaling (at least 2) with rotary_scaling={kind.name}"
        )
    if "rotary_low" in used and not 0 < model.rotary_low < model.rotary_high:
        yield (
            f"model.rotary_low={model.rotary_low} and rotary_high={model.rotary_high} must be "
            "turns with 0 < low < high"
        )
    wanted = int(model.head_size * model.rotary_fraction) // 2
    for name in ("rotary_short_factors", "rotary_long_factors"):
        values = getattr(model, name)
        if name in used and (len(values) != wanted or not all(value > 0 for value in values)):
            yield (
                f"model.{name} must be {wanted} positive numbers, one for each pair that "
                f"rotates; they are {len(values)}"
            )


def parallel_problems(config: Config, sizes: dict[str, int]):
    model, tensor, fsdp = config.model, sizes["tensor"], sizes["fsdp"]
    if sizes["expert"] > 1 and not model.num_experts:
        yield (
            f"parallel.expert={sizes['expert']} is for models with experts: set model.num_experts, "
            "or use fsdp or data instead"
        )
    cut = (
        ("model.num_experts", model.num_experts, "expert", sizes["expert"]),
        ("model.expert_ffn_size", model.expert_ffn if model.num_experts else 0, "tensor", tensor),
        ("model.shared_ffn_size", model.shared_ffn_size, "tensor", tensor),
        ("model.num_heads", model.num_heads, "tensor", tensor),
        ("model.num_kv_heads", model.kv_heads, "tensor", tensor),
        ("model.ffn_size", model.ffn, "tensor", tensor),
        ("data.sequence_length", config.data.sequence_length, "tensor", tensor),
        ("model.hidden_size", model.hidden_size, "fsdp", fsdp),
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
    if not lora.alpha > 0:
        yield f"lora.alpha={lora.alpha} must be positive: adapters are scaled by alpha / rank"


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
    "model.ffn_size": 0,
    "model.num_experts": 0,
    "model.expert_ffn_size": 0,
    "model.shared_ffn_size": 0,
    "model.router_bias_rate": 0,
    "model.router_aux_loss": 0,
    "model.router_sequence_aux_loss": 0,
    "model.router_z_loss": 0,
    "model.expert_capacity": 0,
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
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 0,
    "checkpoint.save_every": 0,
    "log.every": 1,
    "log.profile_start": 0,
    "log.profile_steps": 1,
}
_SCALED = ("rotary_factor", "rotary_original_length")
ROTARY = {  # what each scaling reads
    RotaryScaling.none: (),
    RotaryScaling.linear: ("rotary_factor",),
    RotaryScaling.ntk: ("rotary_factor",),
    RotaryScaling.dynamic: _SCALED,
    RotaryScaling.llama3: (*_SCALED, "rotary_low", "rotary_high"),
    RotaryScaling.yarn: (
        *(*_SCALED, "rotary_low", "rotary_high", "rotary_attention_factor", "rotary_truncate"),
    ),
    RotaryScaling.longrope: (
        *(*_SCALED, "rotary_attention_factor", "rotary_short_factors", "rotary_long_factors"),
    ),
}
ROTARY_FIELDS = sorted({name for names in ROTARY.values() for name in names})
BELOW_ONE = (
    "train.label_smoothing",
    "model.dropout_hidden",
    "model.dropout_attention",
    "model.dropout_embedding",
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
