"""config.json <-> ModelConfig, and tensors in files <-> arrays of the model, for every family."""

import dataclasses
import functools
import itertools
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping

import jax

from maxmeg.checkpoint.names import VOCABULARY_TABLES, array_name
from maxmeg.config.context import KINDS
from maxmeg.config.initial import FREE
from maxmeg.config.layers import SHARED, Layer, places
from maxmeg.config.mixers import MtpConfig, RouterScore
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.model_rules import model_problems
from maxmeg.config.setting import declared_problems, walk, with_fields
from maxmeg.hf.families.architectures import (
    FAMILIES,
    architecture,
    effective_keys,
    table_of,
    text_part,
)
from maxmeg.hf.families.binding import Binding, Consecutive, Fusion, Place, Shaped
from maxmeg.hf.families.delta_tables import QWEN_MTP
from maxmeg.hf.families.experts import MTP_LAYERS, MtpAttention, attention_and
from maxmeg.hf.families.keys import TOKENS, Keys, resolved, with_layers
from maxmeg.hf.families.mamba import LetteredMtp
from maxmeg.hf.families.tables import Family, Modules, MtpNames
from maxmeg.models.lm import LM

Shape = tuple[int, ...]
START_TOKEN = "decoder_start_token_id"
# What torch.compile, FSDP, recomputation and DistributedDataParallel put into names.
WRAPPERS = r"(^module|\b_orig_mod|\b_fsdp_wrapped_module|\b_checkpoint_wrapped_module)\."
# Fields beside config.initial.FREE that no config.json has: tokens are dropped in training only.
DROPS = {"moe.capacity_factor", "moe.drop_policy"}
CLOSE = 1e-9  # relative tolerance for numbers that were squared and rooted


def model_config(config: Mapping[str, typing.Any]) -> ModelConfig:
    """Return the model that a config.json describes; ValueError for keys of other families' models,
    and for values that are not supported."""
    return read_config(config)[0]


def read_config(config: Mapping[str, typing.Any]) -> tuple[ModelConfig, list[str]]:
    """Return the model that a config.json describes, and its keys without effect."""
    name, keys = architecture(config), Keys(text_part(config))
    fields = dict(FAMILIES[name].constants)
    for part in FAMILIES[name].parts:
        part.read(keys, fields)
    passed = keys.finish(name, FAMILIES[name].code, effective_keys)
    model = with_fields(ModelConfig(), with_layers(fields))
    if problems := [*declared_problems(model, "model."), *model_problems(model)]:
        raise ValueError("config.json does not describe a valid model:\n" + "\n".join(problems))
    return model, passed


def with_saved_tensors(model: ModelConfig, names: Iterable[str], family: str) -> ModelConfig:
    """Return the model with MTP layers only if the files, whose tensors are `names`, have them:
    config.json names layers that are not saved, or (Qwen3-Next) not those that are. The same holds
    for the output weights of T5 v1.1, which transformers 5 calls tied in any case."""
    table, saved_names = table_of(family), {*canonical_names(names, family).values()}
    if (
        model.has_source
        and model.logit_scale == 1
        and f"{table.ends['output']}.weight" in saved_names
    ):
        model = dataclasses.replace(model, tied=False)
    if table.mtp is QWEN_MTP and not model.mtp.num_layers and "mtp.fc.weight" in saved_names:
        mtp = MtpConfig(num_layers=1, layers=attention_and(model.has("moe")))
        return dataclasses.replace(model, mtp=mtp)
    depths = range(model.mtp.num_layers)
    prefixes = tuple(mtp_name(table.mtp.prefix, depth, model) for depth in depths)
    saved = any(name.startswith(prefixes) for name in saved_names)
    return model if saved else model.without_mtp()


def with_writable_mtp(model: ModelConfig, family: str) -> ModelConfig:
    """Return the model without MTP layers if the family has none."""
    keys = (LetteredMtp, MtpAttention)
    parts = table_of(family).parts
    has_key = MTP_LAYERS in parts or any(isinstance(part, keys) for part in parts)
    return model if has_key else model.without_mtp()


def hf_config(
    model: ModelConfig, family: str, source: Mapping[str, typing.Any] | None = None
) -> dict[str, typing.Any]:
    """Return the config.json of a model, with the ids of special tokens in `source` and what else
    the family takes from it.

    ValueError if the family cannot express the model.
    """
    for field in ("vocab_size", "max_position"):
        if not getattr(model, field):
            raise ValueError(f"model.{field}=0 is not set: set it")
    table, tokens = table_of(family), text_part(source or {})
    entries = {"architectures": [family], "model_type": table.model_type}
    unset = {name for name in table.never_null if tokens.get(name) is None}
    entries |= {name: tokens.get(name) for name in TOKENS if name not in unset}
    if model.has_source:  # as the samples begin, unless the source says it
        first = tokens.get("pad_token_id" if tokens.get("bos_token_id") is None else "bos_token_id")
        entries[START_TOKEN] = tokens.get(START_TOKEN, first)
    try:
        for part in table.parts:
            entries |= part.write(model)
        problems = differences(model, model_config(entries))
        repeated = entries | {name: tokens[name] for name in table.repeated_keys if name in tokens}
        if table.repeated_keys and not differences(model, model_config(repeated)):
            entries = repeated
    except ValueError as error:
        problems = [str(error)]
    if problems:
        raise ValueError(f"{family} cannot express this model: {'; '.join(problems)}")
    return entries


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Return what an error says about each field in which two models compute something else."""
    problems = []
    for field, _, _ in walk(model):
        before, after = plain_value(model, field), plain_value(other, field)
        if isinstance(before, float) and isinstance(after, float):
            equal = math.isclose(before, after, rel_tol=CLOSE)
        else:
            equal = before == after
        if equal or field in FREE | DROPS:
            continue
        if field == "layers":
            before, after = model.layers, other.layers
        texts = [getattr(value, "name", value) for value in (before, after)]
        problems.append(f"model.{field}={texts[0]} would become {texts[1]}")
    return problems


def plain_value(model: ModelConfig, field: str) -> typing.Any:
    """Return a field's value in a form that is equal for models that compute the same."""
    if field == "attention.scale":
        return model.attention.scale or model.key_size**-0.5
    if field == "mla.norm_eps" and model.is_mla:
        return model.mla.norm_eps or model.norm_eps
    if field == "delta.rank":
        return model.delta.rank or model.delta.key_size
    if field == "layers":
        return model.layer_kinds
    if field == "mtp.layers":
        return model.mtp_layer if model.mtp.num_layers else None
    if field == "max_position" and model.position is not Position.learned:
        return model.max_position if model.has(*KINDS) else None
    if field == "mlp.ffn_size" and not model.has("mlp"):
        return None
    if field == "moe.group_score_topk" and model.moe.num_groups > 1:
        return model.moe.group_score_topk or model.moe.top_k // model.moe.topk_groups
    softmax = model.moe.score is RouterScore.softmax
    if field in ("moe.softmax_before_topk", "moe.normalize_weights") and softmax:
        # The top-k of a softmax over all experts, normalized, are a softmax over the top-k.
        late = not model.moe.softmax_before_topk
        late |= model.moe.normalize_weights and model.moe.top_k > 1
        return field == "moe.softmax_before_topk" and not late
    return resolved(model, field)


def families_of(model: ModelConfig) -> list[str]:
    """Return the families that can express a model."""

    def fits(family: str) -> bool:
        try:
            hf_config(model, family)
        except ValueError:
            return False
        return True

    return [family for family in FAMILIES if fits(family)]


def array_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all arrays of an LM, without padding of the vocabulary."""
    abstract = jax.eval_shape(functools.partial(LM, config=model), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    shapes = {array_name(path): leaf.shape for path, leaf in leaves}
    for table in VOCABULARY_TABLES:
        if table in shapes:
            shapes[table] = (model.vocab_size, *shapes[table][1:])
    return shapes


MTP_MODULES = ("embedding_norm", "hidden_norm", "projection", "final_norm")
BIAS, LOAD = ".mixers.moe.bias", ".mixers.moe.load"  # the state of layers with experts
DELTA_MIXERS, VECTORS = ("gated_delta", "kda"), ("decay_log", "step_bias")
EXACT = (BIAS, *(f".mixers.mamba.{name}" for name in (*VECTORS, "skip")))
EXACT = (*EXACT, *(f".mixers.{mixer}.{name}" for mixer in DELTA_MIXERS for name in VECTORS))


def is_exact(name: str) -> bool:
    """Return whether an array is always written in float32: the router's load-balancing bias, and
    parameters that are not rounded."""
    return name.endswith(EXACT)


def unused_arrays(model: ModelConfig) -> dict[str, Shape]:
    """Return the arrays that no other format stores: the experts' loads of the previous step."""
    return {name: shape for name, shape in array_shapes(model).items() if name.endswith(LOAD)}


KEYS = ("attention.key", "attention.value", "attention.key_norm")
FEED_FORWARD = ("mlp", "wide_mlp", "moe", "encoder_mlp")


def module_name(name: str, model: ModelConfig, kind: Layer, first: int) -> str:
    """Return where a unit has the module `name` ("attention.query") of a layer of this kind.

    The sublayers of the layer begin with number `first` in the unit. Norms are listed under
    "attention" and "mlp", whatever mixers the layer has. Empty if the layer has no such mixer.
    """
    mixer, _, rest = name.partition(".")

    def is_alike(other: str) -> bool:
        kinds = FEED_FORWARD, ("layer_embedding",)
        return all((other in names) == (mixer in names) for names in kinds)

    matches = [n for n, mixers in enumerate(kind) if mixer in mixers]
    matches += [n for n, mixers in enumerate(kind) if any(map(is_alike, mixers))]
    number = next(iter(matches), None)
    if number is None:
        return ""
    at, mixers = first + number, kind[number]
    if rest == "norm" and model.parallel_norms and len(mixers) > 1:
        return f"sublayers.{at}.norms.{mixer}"
    if rest in ("norm", "post_norm", "scale"):
        # The one norm of a parallel block is listed under its first mixer.
        return f"sublayers.{at}.{rest}" if is_alike(next(iter(mixers))) else ""
    return f"sublayers.{at}.mixers.{mixer.removeprefix('encoder_')}.{rest}"


def bindings(model: ModelConfig, family: str | Family) -> list[Binding]:
    """Return the binding of every tensor in the model's safetensors files, in the files' order."""
    table, shapes = table_of(family), array_shapes(model)
    result: list[Binding] = []
    units: list[Unit] = []
    for module, theirs in table.ends.items():
        for leaf, name in (("table", "weight"), ("weight", "weight"), ("bias", "bias")):
            if (array := f"{module}.{leaf}") in shapes:
                is_matrix = leaf == "weight" and len(shapes[array]) > 1
                binding = Binding.of_array(f"{theirs}.{name}", array, shapes[array])
                if is_matrix:
                    binding = fused(binding.theirs, binding.ours, shapes, 1, table)
                result.append(binding)
    for layer, at in enumerate(places(model.groups)):
        unit = Unit(f"stack.groups.{at.group}.", at.repeat, at.sublayer, model.layer_kinds[layer])
        units.append(unit)
        names = f"{table.layer}{layer}.", table.layers
        if table.layer_names is not None:
            names = table.layer_names(model, layer)
        result += layer_bindings(names, unit, model, table, shapes)
    for array, (theirs, stacking) in table.by_layer.items() if model.has("layer_embedding") else ():
        ours = tuple(
            Place(f"{prefix}{module_name(array, model, kind, first)}", repeat)
            for prefix, repeat, first, kind in units
        )
        joined = stacked(theirs, ours, shapes, stacking)
        result.append(dataclasses.replace(joined, stacked=False))
    for depth in range(model.mtp.num_layers):
        result += mtp_bindings(depth, model, table, shapes)
    unused = {name for name in shapes if name.endswith(LOAD)}
    result = [binding for binding in result if binding.ours[0].name not in unused]
    bound = {place.name for binding in result for place in binding.ours}
    if missing := shapes.keys() - bound - unused:
        raise ValueError(f"{table.model_type} has no tensor for {', '.join(sorted(missing))}")
    return result


def bindings_of_files(names: Iterable[str], model: ModelConfig, family: str) -> list[Binding]:
    """As `bindings`, of files with these tensors by canonical names: experts may be `joined`."""
    table, plain = table_of(family), bindings(model, family)
    if not table.joined:
        return plain
    stacked_table = dataclasses.replace(table, experts=table.joined, stacking=Consecutive)
    in_files = {*names}
    stacked = [b for b in bindings(model, stacked_table) if b.stacked and b.theirs in in_files]
    covered = {place[:2] for binding in stacked for place in binding.ours}
    return [*stacked, *(b for b in plain if all(place[:2] not in covered for place in b.ours))]


class Unit(typing.NamedTuple):
    """Where a layer lies in the model: the prefix of its unit's arrays, its entry in them (None:
    they are not stacked), the number of its first sublayer in the unit, and its sublayers."""

    prefix: str
    repeat: int | None
    first: int
    kind: Layer


def mtp_name(pattern: str, depth: int, model: ModelConfig, sublayer: int = 0) -> str:
    """Return a name in MtpNames for an MTP layer."""
    count = len(model.mtp_layer)
    first, numbers = depth * count, {"layer": model.num_layers + depth, "depth": depth}
    numbers |= {"first": first, "last": first + count - 1, "place": first + sublayer}
    return pattern.format(**numbers)


def mtp_bindings(
    depth: int, model: ModelConfig, table: Family, shapes: dict[str, Shape]
) -> list[Binding]:
    """Return the bindings of one MTP layer's tensors."""
    result, prefix, kind = [], f"mtp.depths.{depth}.", model.mtp_layer
    for module in MTP_MODULES:
        theirs = mtp_name(getattr(table.mtp, module), depth, model)
        place = (Place(f"{prefix}{module}.weight"),)
        result.append(fused(f"{theirs}.weight", place, shapes, 1, table))
    parts = [(mixers,) for mixers in kind] if "{place}" in table.mtp.prefix else [kind]
    for number, part in enumerate(parts):
        names = mtp_name(table.mtp.prefix, depth, model, number), table.layers
        unit = Unit(f"{prefix}layer.", None, number, part)
        result += layer_bindings(names, unit, model, table, shapes)
    return result


def layer_bindings(
    layer: tuple[str, Modules],
    unit: Unit,
    model: ModelConfig,
    table: Family,
    shapes: dict[str, Shape],
) -> list[Binding]:
    """Return the bindings of one layer's tensors. layer: its prefix in the files, its modules."""
    prefix, modules = layer

    def arrays(
        names: str | tuple[str, ...], leaf: str, expert: int | None = None
    ) -> tuple[Place, ...]:
        """The arrays of modules; none unless the model has all of them."""
        names = (names,) if isinstance(names, str) else names
        ours = [f"{unit.prefix}{module_name(n, model, unit.kind, unit.first)}{leaf}" for n in names]
        has_all = all(name in shapes for name in ours)
        return tuple(Place(name, unit.repeat, expert) for name in ours) if has_all else ()

    result: list[Binding] = []
    modules = {**modules, **(table.own_norms if model.parallel_norms else {})}
    for names, theirs in modules.items():
        is_delta = any("delta." in name for name in names)
        groups = model.delta_key_heads if is_delta else model.kv_heads
        groups = groups if theirs in table.grouped else 1
        for leaf in (".weight", ".bias"):
            if ours := arrays(names, leaf):
                result.append(fused(f"{theirs}{leaf}", ours, shapes, groups, table))
    for names, theirs in table.arrays.items():
        if ours := arrays(names, ""):
            binding = fused(theirs, ours, shapes, 1, table)
            if theirs in table.shapes:
                count, shape = shapes[ours[0].name][-1], table.shapes[theirs]
                shaped = Shaped(tuple(count if size == -1 else size for size in shape))
                binding = Binding(theirs, shaped.shape, ours, shaped.split, shaped.join)
            result.append(dataclasses.replace(binding, exact=is_exact(ours[0].name)))
    for names, theirs in table.experts.items():
        if "{}" not in theirs and (ours := arrays(names, "")):
            result.append(stacked(theirs, ours, shapes, table.stacking))
        for expert in range(model.moe.num_experts) if "{}" in theirs else ():
            if ours := arrays(names, "", expert):
                result.append(fused(theirs.format(expert), ours, shapes, 1, table))
    return [dataclasses.replace(b, theirs=f"{prefix}{b.theirs}") for b in result]


def fused(
    theirs: str, places: tuple[Place, ...], shapes: dict[str, Shape], groups: int, table: Family
) -> Binding:
    """Return the binding of a projection, of several fused projections, or of a vector."""
    inner = [shapes[place.name][len(place.index) :] for place in places]
    widths = tuple(shape[-1] // groups for shape in inner)
    fusion = Fusion(groups, widths, table.outputs_first)
    shape = (*inner[0][:-1], fusion.outputs)
    shape = shape[::-1] if table.outputs_first else shape
    return Binding(theirs, shape, places, fusion.split, fusion.join)


def stacked(
    theirs: str, places: tuple[Place, ...], shapes: dict[str, Shape], stacking: Callable
) -> Binding:
    """Return the binding of a projection of all experts, or of several with joined outputs."""
    *inner, width = shapes[places[0].name][len(places[0].index) :]
    joined = stacking(len(places))
    shape = (*inner, width * len(places))
    shape = (*shape[:-2], shape[-1], shape[-2]) if joined.outputs_first else shape
    return Binding(theirs, shape, places, joined.split, joined.join, stacked=True)


def unread_tensors(model: ModelConfig, family: str) -> set[str]:
    """Return tensors that files may have beside those of `bindings`: keys and values of layers that
    read those of another layer."""
    table = table_of(family)
    modules = [table.layers[name] for name in KEYS if name in table.layers]
    layers = [n for n in range(model.num_layers) if not SHARED.keys().isdisjoint(model.mixers(n))]
    names = itertools.product(layers, modules, ("weight", "bias"))
    return {f"{table.layer}{layer}.{module}.{leaf}" for layer, module, leaf in names}


def num_experts_in(names: Iterable[str], family: str) -> int:
    """Return the number of experts by the numbers in canonical names; 0 if these have none."""
    table = table_of(family)
    theirs = [re.escape(name) for name in table.experts.values() if "{}" in name]
    patterns = [re.escape(table.layer) + r"\d+\." + t.replace(r"\{\}", r"(\d+)") for t in theirs]
    matches = [re.fullmatch("|".join(patterns), name) for name in names] if patterns else []
    numbers = [int(group) for match in matches if match for group in match.groups() if group]
    return max(numbers, default=-1) + 1


def aliases(model: ModelConfig, family: str) -> dict[str, str]:
    """Return tensors that files may repeat: name -> the binding whose tensor they must equal."""
    table = table_of(family)
    ends = {end: f"{name}.weight" for end, name in table.ends.items()}
    output = ends["embedding" if model.tied else "output"]
    repeated = {ends["output"]: output} if model.tied else {}
    repeated |= dict.fromkeys(table.copies, ends["embedding"])
    if model.bert.output_bias and table.ends["output"] != table.ends["bert.output"]:
        repeated[f"{table.ends['output']}.bias"] = f"{table.ends['bert.output']}.bias"
    for number in range(model.mtp.num_layers if table.mtp == MtpNames() else 0):
        prefix = f"{table.layer}{model.num_layers + number}"
        repeated[f"{prefix}.embed_tokens.weight"] = ends["embedding"]
        repeated[f"{prefix}.shared_head.head.weight"] = output
    return repeated


def canonical_names(names: Iterable[str], family: str) -> dict[str, str]:
    """Return the name in `bindings` of each tensor, without buffers that hold no weights.

    Files of a headless model lack the prefix of all names, as transformers allows.
    """
    table, result = table_of(family), {}
    prefix = table.layer.partition(".")[0] + "."
    starts = (table.layer, table.mtp.prefix, *table.ends.values())
    roots = tuple({name.partition(".")[0] + "." for name in starts})
    for name in names:
        canonical = re.sub(WRAPPERS, "", name).removeprefix("module.")
        if any(re.search(pattern, canonical) for pattern in table.ignored):
            continue
        for pattern, replacement in table.renamed:
            canonical = re.sub(pattern, replacement, canonical)
        if not canonical.startswith(roots):
            canonical = prefix + canonical
        result[name] = canonical
    return result
