"""Rules between the settings of a model, beside those that the fields declare. No JAX."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass

from maxmeg.config.bert import BertConfig
from maxmeg.config.context import KINDS
from maxmeg.config.head import OUTPUT_FIELDS, Biencoder, HeadConfig
from maxmeg.config.layers import GROUPS, SHARED, Layer
from maxmeg.config.mixers import ExpertBackend, ExpertExchange, QkNorm, RouterScore
from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.recompute import recompute_problems
from maxmeg.config.recurrent_rules import delta_problems, mamba_problems
from maxmeg.config.schema import Config
from maxmeg.config.setting import (
    assignment,
    bound_problems,
    check_bounds,
    declared_problems,
    divisors,
    field_of,
    get,
    walk,
)
from maxmeg.config.source import source_problems

# Groups and fields that only some mixers read.
READERS = {
    group: tuple(name for name, groups in GROUPS.items() if group in groups)
    for group in dict.fromkeys(itertools.chain(*GROUPS.values()))
}
READERS |= {"delta.rank": ("kda",)}
READERS |= {"mup.base_head_dim": KINDS}
MLP = ("mlp", "wide_mlp")
READERS |= {"mlp.gate_scale": MLP, "mlp.output_scale": MLP}
LOCAL = ("local", "shared_local", "local_mla")
READERS |= dict.fromkeys(("attention.window", "attention.chunk", "rotary.local_base"), LOCAL)
READERS |= dict.fromkeys(("attention.local_head_dim", "attention.local_kv_heads"), LOCAL[:2])
OF_DECODERS = ("temperature_length", "keys_as_values", "value_norm")  # not of mla either
# What Sinkhorn's algorithm replaces.
NOT_WITH_SINKHORN = (
    "aux_loss",
    "sequence_aux_loss",
    "global_aux_loss",
    "bias_balancing",
    "num_groups",
    "capacity_factor",
    "score",
    "softmax_before_topk",
    "normalize_weights",
    "force_balance",
)


def check_model(model: ModelConfig) -> None:
    """Raise a ValueError that lists every rule that the settings of a model to be made break.

    The sizes that a run takes from its corpus (`config.validate.resolve`) must be set.
    """
    check_bounds(model, "model.")
    problems = [*declared_problems(model, "model."), *model_problems(model)]
    if model.vocab_size < 1:
        problems.append(f"model.vocab_size={model.vocab_size}: set it to the tokenizer's size")
    if model.position is Position.learned and model.max_position < 1:
        problems.append(
            f"model.max_position={model.max_position} with position=learned: set it to the longest "
            "sequence"
        )
    sizes = model.retro.chunk_length, model.retro.neighbour_length
    if has_pattern(model) and model.has_neighbours and not all(sizes):
        problems.append(f"model.retro with chunks and neighbours of {sizes} tokens: set both")
    if problems:
        raise ValueError("\n".join(problems))


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the broken rules between fields; only that of the pattern, where it has no meaning.

    None where a number is beyond its bounds: some rules loop over it.
    """
    if any(bound_problems(model)):
        return
    try:
        kinds = {*model.layer_kinds, *[model.mtp_layer] * model.mtp.num_layers}
    except ValueError as error:
        yield str(error)
        return
    unquantized = model.first_layers_bf16 + model.last_layers_bf16
    if unquantized >= model.num_layers:
        yield (
            f"model.first_layers_bf16 + last_layers_bf16 = {unquantized} must be less than "
            f"model.num_layers={model.num_layers}: else train.quantization has no layers"
        )
    yield from unread_problems(model)
    yield from recompute_problems(model.recompute)
    for kind in kinds:
        yield from kind_problems(kind)
    if model.has(*KINDS):
        yield from head_problems(model)
    yield from window_problems(model)
    yield from shared_problems(model)
    yield from norm_problems(model)
    yield from bert_problems(model)
    yield from mup_problems(model)
    yield from source_problems(model)
    if model.is_mla:
        yield from mla_problems(model)
    if model.has("mamba"):
        yield from mamba_problems(model)
    if model.has("gated_delta", "kda"):
        yield from delta_problems(model)
    if model.has("moe"):
        yield from moe_problems(model)
    if model.mtp.num_layers and not model.attention.causal:
        yield (
            f"model.mtp.num_layers={model.mtp.num_layers} predicts later tokens, which a model "
            "with model.attention.causal=false reads: set it to 0"
        )


def has_pattern(model: ModelConfig) -> bool:
    """Whether model.layers describes model.num_layers layers."""
    try:
        return bool(model.layer_kinds)
    except ValueError:
        return False


def unread_problems(model: ModelConfig) -> Iterator[str]:
    """Settings that no layer of the pattern reads must be as by default."""
    for group, mixers in READERS.items():
        if model.has(*mixers):
            continue
        value = get(model, group)
        leaves = list(walk(value, f"model.{group}.")) if is_dataclass(value) else []
        leaves = leaves or [(f"model.{group}", value, field_of(model, group))]
        changed = [assignment(path, leaf) for path, leaf, field in leaves if leaf != field.default]
        if changed:
            yield (
                f"{', '.join(changed)}: no layer of model.layers={model.layers!r} reads "
                f"{'this' if len(changed) == 1 else 'these'}: leave "
                f"{'it' if len(changed) == 1 else 'them'} out, or use the mixer "
                f"{' or '.join(mixers)}"
            )


def unread_settings(model: ModelConfig, paths: Iterable[str]) -> Iterator[str]:
    """Yield an error for explicitly set fields, even at their default, that no layer reads."""
    for group, mixers in READERS.items():
        name = f"model.{group}"
        set_paths = [path for path in paths if path == name or path.startswith(f"{name}.")]
        if set_paths and not model.has(*mixers):
            yield (
                f"{', '.join(set_paths)}: no layer of model.layers={model.layers!r} reads "
                f"{name}: leave it out, or use the mixer {' or '.join(mixers)}"
            )


def kind_problems(kind: Layer) -> Iterator[str]:
    """Rules of one kind of layer."""
    for sublayer in kind:
        if "moe" in sublayer and len(sublayer) > 1:
            yield f"model.layers has {'+'.join(sublayer)}: moe cannot be in a parallel block"
        attention = [name for name in sublayer if "attention" in GROUPS[name]]
        if len(attention) > 1:
            yield (
                f"model.layers has {'+'.join(sublayer)}: {' and '.join(attention)} cannot stand in "
                "one sublayer, whose attention has one set of parameters"
            )


def head_problems(model: ModelConfig) -> Iterator[str]:
    """Rules of the heads of attention, and of their rotation."""
    num_heads = model.attention.num_heads
    if num_heads < 1 or (not model.attention.head_dim and model.hidden_size % num_heads):
        yield (
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.attention.num_heads={num_heads}: choose num_heads in "
            f"{divisors(model.hidden_size)}, or set model.attention.head_dim"
        )
    elif num_heads % (local := model.attention.local_kv_heads or 1):
        yield (
            f"model.attention.num_heads={num_heads} is not divisible by "
            f"model.attention.local_kv_heads={local}: choose it in {divisors(num_heads)}"
        )
    elif model.kv_heads < 1 or num_heads % model.kv_heads:
        yield (
            f"model.attention.num_heads={num_heads} is not divisible by "
            f"model.attention.num_kv_heads={model.kv_heads}: choose num_kv_heads in "
            f"{divisors(num_heads)}"
        )
    elif model.position is Position.rotary and not model.is_mla and model.rotated_size < 2:
        yield (
            f"model.rotary.fraction={model.rotary.fraction} of head size {model.head_size} leaves "
            "fewer than 2 dimensions to rotate: raise it, or set model.position=none"
        )
    elif model.position is Position.rotary:
        yield from rotary_problems(model)


def window_problems(model: ModelConfig) -> Iterator[str]:
    window, chunk = model.attention.window, model.attention.chunk
    base = model.rotary.local_base
    if model.has(*LOCAL) and not window and not chunk:
        yield f"model.attention.window={window} must be at least 1 with a local mixer (or a chunk)"
    if window and chunk:
        yield (
            f"model.attention.window={window} and model.attention.chunk={chunk} exclude each "
            "other: set one of them to 0"
        )
    for name in OF_DECODERS if model.has_source else ():
        if value := getattr(model.attention, name):
            yield (
                f"{assignment(f'model.attention.{name}', value)} is for models without an encoder: "
                "leave it out"
            )
    if base and not base >= 1:
        yield f"model.rotary.local_base={base} must be at least 1, or 0"
    if model.is_mla and model.has("attention", "local", "raw_attention", "nope_attention"):
        yield f"model.layers={model.layers!r}: mla cannot be combined with attention and local"


def shared_problems(model: ModelConfig) -> Iterator[str]:
    """Rules of mixers that read other arrays of the residual stream than their input."""
    before: set[str] = set()
    for name in (name for kind in model.layer_kinds for part in kind for name in part):
        if name in SHARED and SHARED[name] not in before:
            yield (
                f"model.layers={model.layers!r} has no {SHARED[name]} before the first {name}, "
                "which reads its keys and values: put one before it"
            )
            break
        before.add(name)
    mixers = (*SHARED, "layer_embedding")
    if model.mtp.num_layers and {*mixers} & {name for part in model.mtp_layer for name in part}:
        yield (
            f"model.mtp.layers={model.mtp.layers!r}: an MTP layer cannot have "
            f"{', '.join(mixers)}; set it to attention,mlp, or model.mtp.num_layers=0"
        )
    if model.has_source and model.has(*mixers):
        yield (
            f"model.layers={model.layers!r}: {', '.join(mixers)} are for models without an "
            "encoder: leave them out"
        )


def norm_problems(model: ModelConfig) -> Iterator[str]:
    if model.parallel_norms and not model.parallel_block:
        yield (
            f"model.parallel_norms=true needs a parallel block in model.layers={model.layers!r}: "
            "write for example *(attention+mlp), or leave it out"
        )
    if model.parallel_norms and model.norm_place in (NormPlace.post, NormPlace.post_residual):
        place = model.norm_place.value
        yield f"model.parallel_norms=true has no effect with norm_place={place}: choose pre"
    if model.residual_scale != 1 and model.norm_place in (NormPlace.post, NormPlace.sandwich):
        yield (
            f"model.residual_scale={model.residual_scale} has no effect with norm_place="
            f"{model.norm_place.value}, which normalizes what it multiplies: set it to 1"
        )


def bert_problems(model: ModelConfig) -> Iterator[str]:
    """Rules of the embeddings and heads around the layers."""
    bert, offset = model.bert, model.bert.position_offset
    if offset and model.position is not Position.learned:
        yield f"model.bert.position_offset={offset} needs model.position=learned: leave it out"
    elif 0 < model.max_position <= offset:
        yield (
            f"model.max_position={model.max_position} leaves no row after model.bert."
            f"position_offset={offset}: set it to the longest sequence plus the offset"
        )
    if bert.pair_head and not bert.pooler:
        yield "model.bert.pair_head=true reads the pooler's output: set model.bert.pooler=true"
    yield from output_problems(model)


def mup_problems(model: ModelConfig) -> Iterator[str]:
    """Rules of muP, which knows of no matrices but those of layers, embeddings and outputs."""
    if not model.mup.base_hidden_size:
        return
    for group, default in (("bert", BertConfig()), ("head", HeadConfig())):
        if getattr(model, group) != default:
            yield (
                f"model.mup.base_hidden_size={model.mup.base_hidden_size} has no rule for the "
                f"matrices of model.{group}: set it to 0, or leave model.{group} at its defaults"
            )


def output_problems(model: ModelConfig) -> Iterator[str]:
    """Rules of models without logits of tokens."""
    classes, biencoder = model.head.num_classes, model.head.biencoder
    if not model.head.replaces_output:
        return
    if classes and biencoder is not Biencoder.none:
        yield (
            f"model.head.num_classes={classes} with biencoder={biencoder.name}: a model has "
            "classes or text vectors: leave one out"
        )
    name = f"num_classes={classes}" if classes else f"biencoder={biencoder.name}"
    for path in OUTPUT_FIELDS:
        if (value := get(model, path)) != get(ModelConfig(), path):
            yield (
                f"{assignment(f'model.{path}', value)} has no effect with model.head.{name}, which "
                "replaces the output weights: leave it out"
            )
    if not model.tied:
        yield (
            f"model.tied=false has output weights that model.head.{name} does not use: set "
            "model.tied=true"
        )


def rotary_problems(model: ModelConfig) -> Iterator[str]:
    rotary, kind = model.rotary, model.rotary.scaling
    if kind is RotaryScaling.none:
        return
    without_length = RotaryScaling.linear, RotaryScaling.ntk, RotaryScaling.proportional
    if kind not in without_length and rotary.original_length < 2:
        yield (
            f"model.rotary.original_length={rotary.original_length} must be the length before "
            f"scaling (at least 2) with scaling={kind.name}"
        )
    if not 0 < rotary.low < rotary.high:
        yield (
            f"model.rotary.low={rotary.low} and high={rotary.high} must be turns with "
            "0 < low < high"
        )
    count = model.rotated_size // 2
    for name in ("short_factors", "long_factors") if kind is RotaryScaling.longrope else ():
        values = getattr(rotary, name)
        if len(values) != count or not all(value > 0 for value in values):
            yield (
                f"model.rotary.{name} must be {count} positive numbers, one for each rotated "
                f"pair; they are {len(values)}"
            )


def mla_problems(model: ModelConfig) -> Iterator[str]:
    size = model.mla.rotary_size
    if model.position is Position.rotary and (size < 2 or size % 2):
        yield (
            f"model.mla.rotary_size={size} must be even and at least 2 with position=rotary: "
            "choose 64, or set model.position=none"
        )
    heads, rotary = model.attention, model.rotary
    for path, broken, remedy in (
        ("attention.num_kv_heads", model.kv_heads != heads.num_heads, "set it to 0"),
        ("attention.qk_norm", heads.qk_norm is not QkNorm.none, "set it to none"),
        ("attention.output_gate", heads.output_gate, "set it to false"),
        *((f"attention.{n}", bool(getattr(heads, n)), "leave it out") for n in OF_DECODERS),
        ("rotary.fraction", rotary.fraction != 1, "mla.rotary_size says it: set it to 1"),
    ):
        if broken:
            yield (
                f"{assignment(f'model.{path}', get(model, path))} does not apply to multi-latent "
                f"attention (mixer mla): {remedy}"
            )


def moe_problems(model: ModelConfig) -> Iterator[str]:
    moe = model.moe
    experts, groups, chosen = moe.num_experts, moe.num_groups, moe.topk_groups
    if not 1 <= moe.top_k <= experts:
        yield f"model.moe.top_k={moe.top_k} must be from 1 to num_experts={experts}"
    if groups < 1 or experts % groups:
        yield (
            f"model.moe.num_groups={groups} does not divide num_experts={experts}: choose it in "
            f"{divisors(experts)}"
        )
    elif not 1 <= chosen <= groups or moe.top_k > chosen * (experts // groups):
        yield (
            f"model.moe.topk_groups={chosen} of num_groups={groups}, each of {experts // groups} "
            f"experts, must hold top_k={moe.top_k}: choose more groups, at most {groups}"
        )
    elif not 0 <= moe.group_score_topk <= experts // groups:
        yield (
            f"model.moe.group_score_topk={moe.group_score_topk} must be from 0 to the "
            f"{experts // groups} experts of a group"
        )
    if moe.norms and model.norm_place is not NormPlace.sandwich:
        yield (
            f"model.moe.norms=True needs norm_place=sandwich, not {model.norm_place.name}: the "
            "norm before a layer with experts is then part of it"
        )
    if moe.pad_to_capacity and moe.backend not in (ExpertBackend.auto, ExpertBackend.batched):
        yield (
            f"model.moe.backend={moe.backend.name} has no effect with pad_to_capacity=True, whose "
            "products have the same number of rows for every expert: leave one out"
        )
    for name, value, field in walk(moe) if moe.sinkhorn else ():
        if name in NOT_WITH_SINKHORN and value != field.default:
            yield (
                f"{assignment(f'model.moe.{name}', value)} cannot be combined with sinkhorn=True, "
                "which balances loads and computes routing weights itself: leave one out (z_loss, "
                "jitter and scale can be combined)"
            )


def expert_layout_problems(config: Config) -> Iterator[str]:
    """Rules of the settings in `parallel` that concern experts."""
    parallel, plain, moe = config.parallel, ParallelConfig(), config.model.moe
    changed = [
        assignment(f"parallel.{name}", value)
        for name in ("expert", "expert_tensor", "expert_exchange", "expert_buffer", "expert_nodes")
        if (value := getattr(parallel, name)) != getattr(plain, name)
    ]
    if changed and not config.model.has("moe"):
        yield (
            f"{', '.join(changed)}: only for models with experts; use the mixer moe in "
            "model.layers, or leave this out (to use more devices: fsdp or data)"
        )
    elif config.model.has("moe") and moe.num_experts % parallel.expert:
        yield (
            f"model.moe.num_experts={moe.num_experts} is not divisible by parallel.expert="
            f"{parallel.expert}: choose expert in "
            f"{divisors(moe.num_experts, at_most=2 * parallel.expert)}, or change "
            "model.moe.num_experts"
        )
    sorted_rows = moe.backend in (ExpertBackend.xla, ExpertBackend.mosaic)
    exchanged = parallel.expert > 1 and parallel.expert_exchange is not ExpertExchange.gather
    if sorted_rows and not exchanged and parallel.expert_buffer != plain.expert_buffer:
        yield (
            f"parallel.expert_buffer={parallel.expert_buffer} has no effect with model.moe."
            f"backend={moe.backend.name} where tokens are not exchanged (expert=1 or "
            "expert_exchange=gather): leave it out, or set backend=batched"
        )
    if config.train.quantization.dispatch and not exchanged:
        yield (
            "train.quantization.dispatch=True has no effect where tokens are not exchanged "
            f"(parallel.expert={parallel.expert}, expert_exchange={parallel.expert_exchange.name}):"
            " leave it out, or set parallel.expert above 1 and another exchange than gather"
        )
    nodes, gathers = parallel.expert_nodes, parallel.expert_exchange is ExpertExchange.gather
    if nodes > 1 and parallel.expert % nodes:
        yield (
            f"parallel.expert_nodes={nodes} does not divide expert={parallel.expert}: choose it in "
            f"{divisors(parallel.expert)}"
        )
    if nodes > 1 and gathers:
        yield (
            f"parallel.expert_nodes={nodes} needs expert_exchange=auto or all_to_all, not gather: "
            "leave one out"
        )
    if moe.pad_to_capacity and parallel.expert_buffer != plain.expert_buffer:
        yield (
            f"parallel.expert_buffer={parallel.expert_buffer}: model.moe.pad_to_capacity=True "
            "sends the same number of rows to every expert at once: leave the buffer out"
        )


def training_problems(config: Config) -> Iterator[str]:
    """Rules for training only: models that break them can be evaluated and generate text."""
    moe = config.model.moe
    weighs = moe.score is not RouterScore.softmax or moe.softmax_before_topk
    if (
        config.model.has("moe")
        and moe.top_k == 1
        and not (weighs or moe.sinkhorn or config.lora.rank)
    ):
        yield (
            "model.moe.top_k=1 with score=softmax over the chosen expert only gives weight 1, so "
            "that the router gets no gradient: set softmax_before_topk=True or score=sigmoid, or "
            "train adapters (lora.rank)"
        )
