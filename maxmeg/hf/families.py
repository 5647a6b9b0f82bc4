"""config.json <-> ModelConfig, and a model's tensors <-> arrays, of every family in tables.py."""

import functools
import math
import re
import typing
from collections.abc import Iterable, Mapping

import jax

from maxmeg.config.architecture import model_problems
from maxmeg.config.model import ModelConfig
from maxmeg.hf.binding import Binding, Fusion, Place, only, same
from maxmeg.hf.keys import TOKENS, Keys, refused, resolved
from maxmeg.hf.tables import FAMILIES, Family
from maxmeg.models.lm import LM, layer_places
from maxmeg.state import VOCABULARY_TABLES, array_name

Shape = tuple[int, ...]

SEES = "Gemma3ForConditionalGeneration"  # its text part is a model of its own
OF_THE_WHOLE = (*TOKENS, "tie_word_embeddings", "quantization_config", "auto_map")
# Fields that change how a model trains or runs, not what it is.
FREE = {
    *("vocab_divisible_by", "dropout_hidden", "dropout_attention", "dropout_embedding"),
    *("init_std", "scaled_output_init", "dtype", "attention_backend", "recompute", "scan_layers"),
}
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
        if field not in FREE and not equal:
            shown = [getattr(value, "name", value) for value in (ours, theirs)]
            lost.append(f"model.{field}={shown[0]} would become {shown[1]}")
    return lost


def plain_value(model: ModelConfig, field: str) -> typing.Any:
    if field == "attention_scale":
        return model.attention_scale or model.head_size**-0.5
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


def our_module(short: str, model: ModelConfig, first: int) -> str:
    """`attention.query` within a unit: the layer's sublayers begin with number `first`."""
    mixer, _, rest = short.partition(".")
    at = first if mixer == "attention" or model.parallel_block else first + 1
    if rest == "norm" and model.parallel_norms:
        return f"sublayers.{at}.norms.{mixer}"
    if rest in ("norm", "post_norm"):
        # A parallel block has one, which goes by attention's name.
        shared = mixer != "attention" and model.parallel_block
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
    modules = {**table.layers, **(table.own_norms if model.parallel_norms else {})}
    for layer, (group, repeat, first) in enumerate(layer_places(model)):
        for short, theirs in modules.items():
            names = (short,) if isinstance(short, str) else short
            ours = [f"stack.groups.{group}.{our_module(name, model, first)}" for name in names]
            groups = model.kv_heads if theirs in table.grouped else 1
            for leaf in ("weight", "bias"):
                places = tuple(Place(f"{name}.{leaf}", repeat) for name in ours)
                if any(place.name in shapes for place in places):
                    name = f"{table.layer}{layer}.{theirs}.{leaf}"
                    found.append(fused(name, places, shapes, groups, table))
    bound = {place.name for binding in found for place in binding.ours}
    if missing := shapes.keys() - bound:
        raise ValueError(f"{table.model_type} has no tensor for {', '.join(sorted(missing))}")
    return found


def fused(
    theirs: str, places: tuple[Place, ...], shapes: dict[str, Shape], groups: int, table: Family
) -> Binding:
    """The binding of one projection, of several fused ones, or of a vector."""
    inner = [shapes[place.name][1:] for place in places]
    widths = tuple(shape[-1] // groups for shape in inner)
    fusion = Fusion(groups, widths, table.outputs_first)
    shape = (*inner[0][:-1], fusion.outputs)
    shape = shape[::-1] if table.outputs_first else shape
    return Binding(theirs, shape, places, fusion.split, fusion.join)


def aliases(model: ModelConfig, family: str) -> dict[str, str]:
    """Tensors that a file may hold once more: name -> the name of the binding they must equal."""
    ends = table_of(family).ends
    return {f"{ends['output']}.weight": f"{ends['embedding']}.weight"} if model.tied else {}


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
