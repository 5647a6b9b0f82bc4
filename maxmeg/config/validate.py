"""One pure check of a whole Config, run by every command after overrides. No JAX.

Batch sizes and lengths over time are checked where they are computed: `data/batch_sizes.py` and
`optim/schedules.py`.
"""

import dataclasses
import math
from collections.abc import Iterator

from maxmeg.config import data_rules, retrieval, source
from maxmeg.config.context import DELTA, KINDS, context_problems
from maxmeg.config.data import DataOrder, Objective, Packing
from maxmeg.config.labelled import Scored
from maxmeg.config.model import ModelConfig
from maxmeg.config.model_rules import (
    expert_layout_problems,
    has_pattern,
    model_problems,
    training_problems,
)
from maxmeg.config.optim_rules import optim_problems
from maxmeg.config.parallel import FsdpGather, LaneOrder, ParallelConfig, Schedule
from maxmeg.config.schema import Config, WatchdogConfig
from maxmeg.config.setting import check_bounds, declared_problems, divisors, get
from maxmeg.config.stages import units_of_chunks

VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"  # of XLA_FLAGS, for CPUs
STACK_READERS: dict[str, tuple[str, ...]] = {"encoder": (), "vision": ()}  # models by section


def axis_sizes(parallel: ParallelConfig, num_devices: int, platform: str = "") -> dict[str, int]:
    """Return the size of every mesh axis; fsdp=0 takes the remaining devices, and fsdp_gather=step
    makes those of fsdp part of data.

    platform: "cpu", "gpu" if the devices are those that JAX sees; for the error.
    """
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
        mesh = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        num_needed = math.prod(max(size, 1) for size in sizes.values())
        devices = f"JAX sees {num_devices} {platform}" if platform else f"there are {num_devices}"
        virtual = f"; on a CPU: XLA_FLAGS={VIRTUAL_DEVICES}={num_needed}" * (platform == "cpu")
        raise ValueError(
            f"the mesh {mesh or 'of size 1'} needs {num_needed} devices"
            f"{' or a multiple' * (sizes['fsdp'] == 0)}, {devices}: set sizes of config.parallel "
            f"whose product is {num_devices} (fsdp=0 takes what the others leave){virtual}"
        )
    if parallel.fsdp_gather is FsdpGather.step:
        sizes |= {"data": sizes["data"] * sizes["fsdp"], "fsdp": 1}
    return sizes


def resolve(config: Config, tokenizer_vocab_size: int, required_size: int = 0) -> None:
    """Fill in the vocabulary and longest sequence. required_size: ids that need a row; 0: all."""
    model = config.model
    model.vocab_size = model.vocab_size or tokenizer_vocab_size
    longest = max(config.data.longest_text, config.data.source_positions)
    longest += model.bert.position_offset
    model.max_position = model.max_position or longest
    model.head.num_classes = model.head.num_classes or config.data.num_classes
    if config.data.objective.has_neighbours:
        model.retro.chunk_length = model.retro.chunk_length or config.data.chunk_length
        model.retro.neighbour_length = model.retro.neighbour_length or config.data.neighbour_length
    if (num_tokens := required_size or tokenizer_vocab_size) > model.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's {num_tokens}: "
            "raise it, or set it to 0 to take the tokenizer's"
        )


def batch_unit(config: Config, sizes: dict[str, int]) -> int:
    """Return the divisor of every global batch size: the samples of a microbatch on all replicas,
    times the number of stages with interleaved chunks."""
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    rounds = sizes["pipe"] if config.parallel.chunks > 1 else 1
    return shards * max(config.train.micro_batch_size, 1) * rounds


def setting_problems(
    config: Config, training: bool = True, computing: bool = True
) -> Iterator[str]:
    """Yield the broken rules that hold on any number of devices.

    training: also the rules for models that are trained; computing: for models that are run at all.
    """
    if not config.run_dir:
        yield "run_dir is empty: name the folder of the run, --run_dir=runs/NAME"
    for name in ("run_dir", "checkpoint.init_from"):
        if "://" in (path := get(config, name)):
            yield f"{name}={path} must be a folder: checkpoint.dir alone may be at s3:// or gs://"
    if "://" in (url := config.checkpoint.dir) and not url.startswith(("s3://", "gs://")):
        yield f"checkpoint.dir={url} must be a path, s3://BUCKET/PATH or gs://BUCKET/PATH"
    yield from stack_problems(config)
    yield from declared_problems(config)
    yield from model_problems(config.model)
    if not has_pattern(config.model):
        return
    yield from data_problems(config)
    yield from data_rules.objective_problems(config.data)
    yield from data_rules.untrained_problems(config.data) if computing else ()
    yield from bidirectional_problems(config)
    yield from labelled_problems(config)
    yield from retrieval.problems(config)
    yield from source.objective_problems(config)
    yield from data_rules.fim_problems(config.data)
    yield from optim_problems(config)
    yield from lora_problems(config)
    yield from upcycling_problems(config)
    yield from watchdog_problems(config.watchdog)
    if training:
        yield from training_problems(config)


def check_settings(config: Config) -> None:
    """Raise a ValueError that lists the broken rules of a run on any number of devices."""
    check_bounds(config)
    if problems := list(setting_problems(config)):
        raise ValueError("\n".join(problems))


def validate(
    config: Config,
    num_devices: int,
    platform: str = "",
    training: bool = True,
    computing: bool = True,
) -> None:
    """Raise a ValueError that lists every broken rule with its values and the remedy.

    training: also the rules for models that are trained; computing: for models that are run at all.
    """
    check_bounds(config)
    sizes = axis_sizes(config.parallel, num_devices, platform)
    problems = list(setting_problems(config, training, computing))
    if has_pattern(config.model):
        problems += layout_problems(config, sizes)
    if problems:
        raise ValueError("\n".join(problems))


def layout_problems(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """Yield the broken rules between the settings and the sizes of the mesh axes."""
    yield from parallel_problems(config, sizes)
    length = config.data.sequence_length
    yield from context_problems(config.model, config.parallel, length, sizes["tensor"])
    yield from source.layout_problems(config, sizes["tensor"])
    yield from pipeline_problems(config, sizes)
    yield from train_problems(config, sizes)


def parallel_problems(config: Config, sizes: dict[str, int]):
    model, tensor, fsdp, name = config.model, sizes["tensor"], sizes["fsdp"], "fsdp"
    if config.parallel.fsdp_context:
        fsdp, name = fsdp * sizes["context"], "fsdp x context"
    if config.parallel.fsdp_gather is FsdpGather.step:
        yield from gather_problems(config.parallel)
    yield from expert_layout_problems(config)
    expert_ffn = model.expert_ffn if model.has("moe") else 0
    layer_size = model.layer_embedding.size * model.has("layer_embedding")
    latents = (model.mla.kv_rank, model.mla.query_rank) if model.is_mla else (0, 0)
    expert_tensor = tensor // config.parallel.fold
    # Experts are sharded along ffn_size instead where that has enough parts.
    cuts_latent = expert_ffn % (expert_tensor * sizes["fsdp"]) > 0
    cut = (
        ("model.moe.ffn_size", expert_ffn, "expert_tensor", expert_tensor),
        ("model.moe.shared_ffn_size", model.moe.shared_ffn_size, "tensor", tensor),
        ("model.mlp.ffn_size", model.ffn if model.has("mlp") else 0, "tensor", tensor),
        ("model.hidden_size", model.hidden_size if model.has("conv") else 0, "tensor", tensor),
        ("data.sequence_length", config.data.sequence_length, "tensor", tensor),
        ("model.hidden_size", model.hidden_size, name, fsdp),
        ("model.moe.latent_size", cuts_latent * model.moe.latent_size, "fsdp", sizes["fsdp"]),
        ("model.mla.kv_rank", latents[0], name, fsdp),
        ("model.layer_embedding.size", layer_size, name, fsdp),
        ("model.mla.query_rank", latents[1], name, fsdp),
    )
    yield from head_problems(model, tensor)
    for name, value, axis, size in cut:
        if value % size:
            yield (
                f"{name}={value} is not divisible by parallel.{axis}={size}: choose {axis} in "
                f"{divisors(value, at_most=2 * size)}, or change {name}"
            )


def gather_problems(parallel: ParallelConfig):
    """What parallel.fsdp_gather=step, which gathers weights once a step, requires of the others."""
    if not parallel.zero1:
        yield "parallel.fsdp_gather=step is done by ZeRO-1: set parallel.zero1=true, or microbatch"
    if parallel.fsdp_context:
        yield (
            "parallel.fsdp_gather=step gathers weights once, and parallel.fsdp_context=true those "
            "of each microbatch: set fsdp_context=false, whose devices ZeRO-1 has too, or "
            "fsdp_gather=microbatch"
        )


def head_problems(model: ModelConfig, tensor: int):
    """Rules of the heads of all mixers, which tensor cuts."""
    for mixers, numbers, names in (
        (
            KINDS,
            (model.attention.num_heads, model.kv_heads),
            ("attention.num_heads", "attention.num_kv_heads"),
        ),
        (
            ("local",) * (model.attention.local_kv_heads > 0),
            (model.attention.num_heads, model.attention.local_kv_heads),
            ("attention.num_heads", "attention.local_kv_heads"),
        ),
        (
            ("mamba",),
            (model.mamba_heads, model.mamba_groups),
            ("mamba.num_heads", "mamba.num_groups"),
        ),
        (
            DELTA,
            (model.delta.num_heads, model.delta_key_heads),
            ("delta.num_heads", "delta.num_key_heads"),
        ),
    ):
        if model.has(*mixers):
            yield from cut_problems(numbers, names, tensor)


def cut_problems(numbers: tuple[int, int], names: tuple[str, str], tensor: int):
    """Each device along tensor needs whole query heads, and whole key/value heads or one that it
    shares with other devices; so with heads and groups of other mixers."""
    heads, kv_heads = numbers
    sizes = [
        str(size)
        for size in range(1, 2 * tensor + 1)
        if heads % size == 0 and kv_heads > 0 and 0 in (kv_heads % size, size % kv_heads)
    ]
    if heads % tensor:
        rule = f"model.{names[0]}={heads} is not divisible by parallel.tensor={tensor}"
        yield f"{rule}: choose tensor in {', '.join(sizes)}, or change model.{names[0]}"
    elif str(tensor) not in sizes and kv_heads > 0:
        rule = f"model.{names[1]}={kv_heads} is neither a multiple nor a divisor of "
        rule += f"parallel.tensor={tensor}"
        yield f"{rule}: choose tensor in {', '.join(sizes)}, or change model.{names[1]}"


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
    elif parallel.chunks >= 1:
        try:
            units_of_chunks(config.model, parallel)
        except ValueError as error:
            yield str(error)


def stack_problems(config: Config):
    """A stack that the model does not read must be absent."""
    for name, models in STACK_READERS.items():
        if getattr(config, name) is not None:
            readers = f"only {', '.join(models)} read" if models else "no model reads yet"
            yield f"the section {name} is a stack that {readers}: leave out all {name}.* settings"


def data_problems(config: Config):
    model, data = config.model, config.data
    if model.mtp.num_layers >= data.sequence_length:
        yield (
            f"model.mtp.num_layers={model.mtp.num_layers} leaves no target in rows of "
            f"data.sequence_length={data.sequence_length}: predict fewer further tokens"
        )
    room = model.max_position - model.bert.position_offset
    if 0 < room < data.longest_text:
        texts = f" (texts of {data.longest_text} tokens)" * data.objective.is_retrieval
        yield (
            f"data.sequence_length={data.sequence_length}{texts} is longer than the {room} "
            f"tokens of model.max_position={model.max_position}: shorten the one or raise the other"
        )
    split_paths = [n for n in ("train_paths", "validation_paths", "test_paths") if getattr(data, n)]
    named = [n for n in ("paths", "blend", "mock") if getattr(data, n)]
    named += [", ".join(split_paths)] * bool(split_paths)
    if len(named) > 1:
        yield f"data.{' and data.'.join(named)} both name corpora: set one of them"
    if split_paths and not data.train_paths:
        yield f"data.{named[-1]} without data.train_paths names no corpus to train on: add it"
    if data.validate_each and not (data.validation_paths or data.blend):
        yield "data.validate_each=True needs data.validation_paths (or data.blend): name the sets"
    if data.order is DataOrder.megatron and not 0 <= config.seed < 2**32:
        yield f"seed={config.seed} must lie in [0, 2^32) with data.order=megatron"


def bidirectional_problems(config: Config):
    """Rules between the objective and the causal mask."""
    objective, causal = config.data.objective, config.model.attention.causal
    if not objective.takes(causal):
        able = ", ".join(o.value for o in Objective if o.takes(causal) and o.is_trained)
        yield (
            f"data.objective={objective.value} cannot train a model with model.attention.causal="
            f"{str(causal).lower()}, which serves {able}: choose one of these, or set "
            f"model.attention.causal={str(not causal).lower()}"
        )
    bert, pairs = config.model.bert, config.data.sentence_pairs
    if objective is Objective.masked and bert.pair_head != pairs:
        yield (
            f"model.bert.pair_head={str(bert.pair_head).lower()} with data.sentence_pairs="
            f"{str(pairs).lower()}: the head learns from pairs, and pairs need it; set both alike"
        )
    if pairs and bert.token_types == 1:
        yield (
            "data.sentence_pairs=true has tokens of two types, and model.bert.token_types=1 an "
            "embedding for one: set it to 2, or to 0 for none"
        )
    for mixer in ("conv", "mamba", "gated_delta", "kda"):
        if not causal and config.model.has(mixer):
            yield (
                f"model.layers={config.model.layers!r} has the mixer {mixer}, which is causal: set "
                "model.attention.causal=true, or use other mixers"
            )
    if not causal and source.has_prompt(config):
        yield (
            f"log.sample_prompt={config.log.sample_prompt!r}: a model with model.attention.causal="
            'false does not continue text: set log.sample_prompt=""'
        )


def labelled_problems(config: Config):
    """Rules of objectives with labels, and of the classifier that they need."""
    data, model, train = config.data, config.model, config.train
    name, classes, count = data.objective.value, model.head.num_classes, data.num_classes
    if not data.objective.is_labelled:
        if classes:
            able = ", ".join(o.value for o in Objective if o.is_labelled)
            yield (
                f"model.head.num_classes={classes} replaces the vocabulary's logits, which "
                f"data.objective={name} needs: choose {able}, or set num_classes=0"
            )
        return
    if not (data.paths or data.train_paths):
        yield f"data.objective={name} needs labelled files: set data.paths=FILE"
    if data.blend or data.packing is not Packing.none:
        yield f"data.blend and data.packing are not for data.objective={name}: leave them out"
    if data.objective is not Objective.choose and count < 2:
        yield f"data.objective={name} needs at least two classes: name them, data.labels=no,yes"
    elif classes not in (0, count):
        yield (
            f"model.head.num_classes={classes} is not the {count} that data.objective={name} "
            f"with classes {', '.join(data.class_names) or '(choices)'} needs: set it to {count}, "
            "or 0"
        )
    if (
        model.attention.causal
        and data.scored is Scored.first
        and data.objective is not Objective.tag
    ):
        yield (
            "data.scored=first: the first token of a causal model has seen no other; set "
            "data.scored=last"
        )
    if data.objective is Objective.choose and config.parallel.context > 1:
        yield (
            f"parallel.context={config.parallel.context} separates the choices of a question, "
            "which data.objective=choose compares: set it to 1"
        )
    for field in ("z_loss", "label_smoothing"):
        if value := getattr(train, field):
            yield f"train.{field}={value} is not for data.objective={name}: set it to 0"
    if source.has_prompt(config):
        yield (
            f"log.sample_prompt={config.log.sample_prompt!r}: a classifier does not continue text: "
            'set log.sample_prompt=""'
        )


def lora_problems(config: Config):
    lora = config.lora
    if not lora.rank:
        return
    if lora.dropout and config.parallel.context > 1 and config.model.is_mla:
        yield (
            f"lora.dropout={lora.dropout} is not for multi-latent attention with parallel.context="
            f"{config.parallel.context}, whose keys every device computes again: set it to 0"
        )
    if not lora.targets:
        yield "lora.targets is empty: name projections, as query,value, or * for all"
    if config.model.mtp.num_layers:
        yield (
            f"lora.rank={lora.rank} cannot train MTP layers (model.mtp.num_layers="
            f"{config.model.mtp.num_layers}): set it to 0, which leaves out those of the base"
        )
    if coefficient := config.model.moe.global_aux_loss:
        yield (
            f"model.moe.global_aux_loss={coefficient} needs the loads of each step, which are "
            f"frozen with the base of lora.rank={lora.rank}: use moe.aux_loss, or none"
        )


def upcycling_problems(config: Config):
    noise = config.checkpoint.upcycle_noise
    if noise and not (config.checkpoint.init_from and config.model.has("moe")):
        yield (
            f"checkpoint.upcycle_noise={noise} has no effect without checkpoint.init_from=FOLDER "
            "of a dense model and the mixer moe in model.layers: set both, or leave it at 0"
        )


def train_problems(config: Config, sizes: dict[str, int]):
    train, parallel = config.train, config.parallel
    unit = batch_unit(config, sizes)
    rounds = f" x pipe {sizes['pipe']} (interleaved)" if parallel.chunks > 1 else ""
    if train.global_batch_size < 1 or train.global_batch_size % unit:
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
    is_one = not train.micro_batch_size or (train.global_batch_size == unit and not rounds)
    if parallel.lanes is LaneOrder.together and is_one:
        yield (
            "parallel.lanes=together runs one microbatch beside another, and this batch is one: "
            "set train.micro_batch_size so that train.global_batch_size="
            f"{train.global_batch_size} has several, or parallel.lanes=apart"
        )


def watchdog_problems(limits: WatchdogConfig):
    """Broken rules of the section, one line each."""
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        lowest = {"silence": 2.0, "straggler": 1.0}.get(field.name, 0.0)
        if value != 0 and not value >= lowest:  # nan too
            yield f"watchdog.{field.name}={value} must be 0 (off) or at least {lowest:g}"
