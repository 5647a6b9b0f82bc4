"""config.json <-> ModelConfig, and a model's tensors <-> arrays, of every family in tables.py."""

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Iterable, Mapping

import jax

from maxmeg.config.architecture import model_problems
from maxmeg.config.model import ModelConfig, RouterScore
from maxmeg.hf.binding import Binding, Fusion, Interleaved, Place, only, same
from maxmeg.hf.expert_tables import SPARSE
from maxmeg.hf.experts import Predicted
from maxmeg.hf.keys import TOKENS, Keys, refused, resolved
from maxmeg.hf.tables import DENSE, Family
from maxmeg.models.lm import LM, layer_places
from maxmeg.state import VOCABULARY_TABLES, array_name

Shape = tuple[int, ...]
FAMILIES: dict[str, Family] = {**DENSE, **SPARSE}
SEES = "Gemma3ForConditionalGeneration"  # its text part is a model of its own
OF_THE_WHOLE = (*TOKENS, "tie_word_embeddings", "quantization_config", "auto_map")
# Fields that change how a model trains or runs, not what it is.
FREE = {
    *("vocab_divisible_by", "dropout_hidden", "dropout_attention", "dropout_embedding"),
    *("init_std", "scaled_output_init", "dtype", "attention_backend", "recompute", "scan_layers"),
    *("router_bias_rate", "router_aux_loss", "router_sequence_aux_loss", "router_z_loss"),
    *("router_global_aux_loss", "router_jitter", "mtp_loss", "expert_backend"),
}
DROPS = {"expert_capacity", "expert_drop", "expert_pad"}  # of training: what is published has none
PLACEMENT = ("first_dense_layers", "expert_every", "expert_pattern")
CLOSE = 1e-9  # of numbers that go through a root and back


def text_part(config: Mapping[str, typing.Any]) -> Mapping[str, typing.Any]:
    """The settings of the language model of a model that also sees; others as they are."""
    if config.get("architectures") != [SEES]:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise refused("text_config", text, f"{SEES} must have the settings of its text part")
    whole = {name: config[name] for name in OF_THE_WHOLE if name in config}
    return {**text, **whole, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


def architecture(config: Mapping[str, typing.Any]) -> str:
    """The name in FAMILIES of a config.json."""
    config = text_part(config)
    named, kind = config.get("architectures"), config.get("model_type")
    if not named:  # the kind has one language model
        named = [name for name, family in FAMILIES.items() if family.model_type == kind] or named
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(FAMILIES):
        raise refused("architectures", named, f"supported are {', '.join(FAMILIES)}")
    wanted = FAMILIES[named[0]].model_type
    if kind not in (wanted, None):
        raise refused("model_type", kind, f"{named[0]} is of model_type {wanted!r}")
    return named[0]


def table_of(family: str | Family) -> Family:
    """A table by its name, or one that no architecture of transformers has."""
    if isinstance(family, Family):
        return family
    if family not in FAMILIES:
        raise ValueError(f"no family is named {family!r}: choose from {', '.join(FAMILIES)}")
    return FAMILIES[family]


def model_config(config: Mapping[str, typing.Any]) -> ModelConfig:
    """The model that a config.json describes; ValueError for a key or value not known here."""
    name, keys = architecture(config), Keys(text_part(config))
    found = dict(FAMILIES[name].constants)
    for part in FAMILIES[name].parts:
        part.read(keys, found)
    keys.finish(name, FAMILIES[name].code)
    model = ModelConfig(**found)
    if problems := [*model_problems(model)]:
        raise ValueError("config.json describes no model:\n" + "\n".join(problems))
    return model


def as_saved(model: ModelConfig, names: Iterable[str], family: str) -> ModelConfig:
    """The model without the layers that predict further tokens where files lack all of them."""
    layers = range(model.num_layers, model.num_layers + model.mtp_depths)
    prefixes = tuple(f"{table_of(family).layer}{layer}." for layer in layers)
    there = any(name.startswith(prefixes) for name in canonical_names(names, family).values())
    return model if there or not layers else dataclasses.replace(model, mtp_depths=0)


def as_written(model: ModelConfig, family: str) -> ModelConfig:
    """The model without the layers that predict further tokens where a family has none."""
    parts = table_of(family).parts
    return model if any(isinstance(p, Predicted) for p in parts) else model.without_mtp()


def hf_config(
    model: ModelConfig, family: str, source: Mapping[str, typing.Any] | None = None
) -> dict[str, typing.Any]:
    """The config.json of a model; ids of special tokens are those of `source`, if it is given.

    ValueError if the family has no such models.
    """
    for field in ("vocab_size", "max_position"):
        if not getattr(model, field):
            raise ValueError(f"model.{field}=0 is not decided yet: set it")
    table, tokens = table_of(family), text_part(source or {})
    written = {"architectures": [family], "model_type": table.model_type}
    written |= {name: tokens.get(name) for name in TOKENS}
    try:
        for part in table.parts:
            written |= part.write(model)
        lost = differences(model, model_config(written))
    except ValueError as error:
        lost = [str(error)]
    if lost:
        raise ValueError(f"no {family} is such a model: {'; '.join(lost)}")
    return written


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Fields that make two models differ."""
    lost = []
    for field in vars(model):
        ours, theirs = plain_value(model, field), plain_value(other, field)
        both = isinstance(ours, float) and isinstance(theirs, float)
        equal = math.isclose(ours, theirs, rel_tol=CLOSE) if both else ours == theirs
        if field not in FREE | DROPS and not equal:
            if field in PLACEMENT:
                ours, theirs = getattr(model, field), getattr(other, field)
                if ours == theirs:  # another of them differs
                    continue
            shown = [getattr(value, "name", value) for value in (ours, theirs)]
            lost.append(f"model.{field}={shown[0]} would become {shown[1]}")
    return lost


def plain_value(model: ModelConfig, field: str) -> typing.Any:
    """A field's value, or what it stands for: equal for models that compute the same."""
    if field == "attention_scale":
        return model.attention_scale or model.key_size**-0.5
    if field == "mla_norm_eps" and model.mla_kv_rank:
        return model.mla_norm_eps or model.norm_eps
    placed = [model.has_experts(layer) for layer in range(model.num_layers)]
    if field in PLACEMENT:
        return placed
    if field == "ffn_size" and all(placed):
        return None  # no layer has an MLP
    if field == "router_group_best" and model.router_groups > 1:
        return model.router_group_best or model.experts_per_token // model.router_groups_kept
    softmax = model.router_score is RouterScore.softmax
    if field in ("router_over_all", "router_normalize") and softmax:
        # Divided by their sum, those chosen of a softmax over all are the softmax over them.
        late = not model.router_over_all
        late |= model.router_normalize and model.experts_per_token > 1
        return field == "router_over_all" and not late
    return resolved(model, field)


def families_of(model: ModelConfig) -> list[str]:
    """The families that have such models."""
    found = []
    for family in FAMILIES:
        try:
            hf_config(model, family)
        except ValueError:
            continue
        found.append(family)
    return found


def array_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shapes of all arrays of an LM, the vocabulary without padding."""
    abstract = jax.eval_shape(functools.partial(LM, config=model), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    shapes = {array_name(path): leaf.shape for path, leaf in leaves}
    for table in VOCABULARY_TABLES:
        if table in shapes:
            shapes[table] = (model.vocab_size, *shapes[table][1:])
    return shapes


ATTENTION = ("attention", "mla")
PREDICTED = {  # of a layer that predicts further tokens, beside what every layer has
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}
COUNT, LOAD = ".mixers.moe.bias", ".mixers.moe.load"  # how an array's name ends


def is_count(name: str) -> bool:
    """Whether an array balances loads by counts: it is exact, and none of the weights."""
    return name.endswith(COUNT)


def unused_arrays(model: ModelConfig) -> dict[str, Shape]:
    """Arrays that take no part, which no tensor holds: biases for the choice of experts of a
    router without them, zero, and loads of a step for the loss of the next."""
    return unused_of(array_shapes(model), model) if model.num_experts else {}


def unused_of(shapes: dict[str, Shape], model: ModelConfig) -> dict[str, Shape]:
    idle = (LOAD,) if model.router_bias else (LOAD, COUNT)
    return {name: shape for name, shape in shapes.items() if name.endswith(idle)}


def our_module(short: str, model: ModelConfig, first: int) -> str:
    """`attention.query` within a unit: the layer's sublayers begin with number `first`."""
    mixer, _, rest = short.partition(".")
    at = first if mixer in ATTENTION or model.parallel_block else first + 1
    if rest == "norm" and model.parallel_norms:
        return f"sublayers.{at}.norms.{mixer}"
    if rest in ("norm", "post_norm"):
        # A parallel block has one, which goes by attention's name.
        shared = mixer not in ATTENTION and model.parallel_block
        return "" if shared else f"sublayers.{at}.{rest}"
    return f"sublayers.{at}.mixers.{mixer}.{rest}"


def bindings(model: ModelConfig, family: str | Family) -> list[Binding]:
    """Every tensor of the model's safetensors files, in their order, and our arrays."""
    table, shapes = table_of(family), array_shapes(model)
    found: list[Binding] = []
    for ours, theirs in table.ends.items():
        for leaf, name in (("table", "weight"), ("weight", "weight"), ("bias", "bias")):
            if (place := f"{ours}.{leaf}") in shapes:
                shape = shapes[place]
                found.append(Binding(f"{theirs}.{name}", shape, (Place(place),), same, only))
    for layer, (group, repeat, first) in enumerate(layer_places(model)):
        place = (f"stack.groups.{group}.", repeat, first)
        found += layer_bindings(layer, place, model, table, shapes)
    for depth in range(model.mtp_depths):
        layer, ours = model.num_layers + depth, f"mtp.depths.{depth}."
        for name, theirs in PREDICTED.items():
            place = (Place(f"{ours}{name}.weight"),)
            theirs = f"{table.layer}{layer}.{theirs}.weight"
            found.append(fused(theirs, place, shapes, 1, table))
        found += layer_bindings(layer, (f"{ours}layer.", None, 0), model, table, shapes)
    unused = unused_of(shapes, model).keys()
    found = [binding for binding in found if binding.ours[0].name not in unused]
    bound = {place.name for binding in found for place in binding.ours}
    if missing := shapes.keys() - bound - unused:
        raise ValueError(f"{table.model_type} has no tensor for {', '.join(sorted(missing))}")
    return found


def layer_bindings(
    layer: int,
    place: tuple[str, int | None, int],
    model: ModelConfig,
    table: Family,
    shapes: dict[str, Shape],
) -> list[Binding]:
    """The tensors of one layer. place: how the names of its unit's arrays begin, its entry in them
    (None: they are its own) and the first of its sublayers in the unit."""
    (start, repeat, first), found = place, []

    def places(names: str | tuple[str, ...], leaf: str, expert: int | None) -> tuple[Place, ...]:
        """The arrays of a binding; none where the model has not all of them."""
        names = (names,) if isinstance(names, str) else names
        ours = [f"{start}{our_module(name, model, first)}{leaf}" for name in names]
        there = all(name in shapes for name in ours)
        return tuple(Place(name, repeat, expert) for name in ours) if there else ()

    modules = {**table.layers, **(table.own_norms if model.parallel_norms else {})}
    for names, theirs in modules.items():
        groups = model.kv_heads if theirs in table.grouped else 1
        for leaf in (".weight", ".bias"):
            if ours := places(names, leaf, None):
                found.append(fused(f"{theirs}{leaf}", ours, shapes, groups, table))
    for names, theirs in table.arrays.items():
        if ours := places(names, "", None):
            made = fused(theirs, ours, shapes, 1, table)
            found.append(dataclasses.replace(made, exact=is_count(ours[0].name)))
    for names, theirs in table.experts.items():
        by_expert = range(model.num_experts) if "{}" in theirs else [None]
        for expert in by_expert:
            if not (ours := places(names, "", expert)):
                break
            name = theirs.format(expert)
            made = stacked if expert is None else functools.partial(fused, groups=1, table=table)
            found.append(made(name, ours, shapes))
    return [dataclasses.replace(b, theirs=f"{table.layer}{layer}.{b.theirs}") for b in found]


def fused(
    theirs: str, places: tuple[Place, ...], shapes: dict[str, Shape], groups: int, table: Family
) -> Binding:
    """The binding of one projection, of several fused ones, or of a vector."""
    inner = [shapes[place.name][len(place.index) :] for place in places]
    widths = tuple(shape[-1] // groups for shape in inner)
    fusion = Fusion(groups, widths, table.outputs_first)
    shape = (*inner[0][:-1], fusion.outputs)
    shape = shape[::-1] if table.outputs_first else shape
    return Binding(theirs, shape, places, fusion.split, fusion.join)


def stacked(theirs: str, places: tuple[Place, ...], shapes: dict[str, Shape]) -> Binding:
    """The binding of a projection of all experts, or of several whose outputs take turns."""
    *inner, width = shapes[places[0].name][len(places[0].index) :]
    turns = Interleaved(len(places))
    shape = (*inner, width * len(places))
    return Binding(theirs, shape, places, turns.split, turns.join, stacked=True)


def num_experts_in(names: Iterable[str], family: str) -> int:
    """How many experts canonical names tell of; 0 where they do not."""
    table = table_of(family)
    theirs = [re.escape(name) for name in table.experts.values() if "{}" in name]
    patterns = [re.escape(table.layer) + r"\d+\." + t.replace(r"\{\}", r"(\d+)") for t in theirs]
    found = [re.fullmatch("|".join(patterns), name) for name in names] if patterns else []
    numbers = [int(group) for match in found if match for group in match.groups() if group]
    return max(numbers, default=-1) + 1


def aliases(model: ModelConfig, family: str) -> dict[str, str]:
    """Tensors that a file may hold once more: name -> the name of the binding they must equal."""
    table = table_of(family)
    ends = {end: f"{name}.weight" for end, name in table.ends.items()}
    output = ends["embedding" if model.tied else "output"]
    found = {ends["output"]: output} if model.tied else {}
    for depth in range(model.mtp_depths):
        start = f"{table.layer}{model.num_layers + depth}"
        found[f"{start}.embed_tokens.weight"] = ends["embedding"]
        found[f"{start}.shared_head.head.weight"] = output
    return found


def canonical_names(names: Iterable[str], family: str) -> dict[str, str]:
    """Name in the files -> name in `bindings`. Buffers that hold no weights are left out.

    Files of a model without its head lack the prefix, as transformers knows too.
    """
    table, found = table_of(family), {}
    prefix = table.layer.partition(".")[0] + "."
    for name in names:
        if any(re.search(pattern, name) for pattern in table.ignored):
            continue
        known = name
        for pattern, replacement in table.renamed:
            known = re.sub(pattern, replacement, known)
        if not known.startswith((prefix, table.ends["output"] + ".")):
            known = prefix + known
        found[name] = known
    return found
