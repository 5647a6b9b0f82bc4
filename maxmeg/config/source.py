"""Rules of encoder-decoders and RETRO, which read a source beside the tokens that they predict: a
text, or neighbours of its chunks. No JAX."""

import math
from collections.abc import Iterator

from maxmeg.config.context import strategies
from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.head import Biencoder, two_encoders
from maxmeg.config.layers import ENCODER, Layer
from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import divisors

DECODER = ("attention", "cross", "mlp")
RETRO_DECODER = ("attention", "chunked_cross", "mlp")
EXAMPLE = "6(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
RETRO_EXAMPLE = (
    "attention 2(encoder_attention,encoder_cross,encoder_mlp) encoder_norm chunked_cross,mlp "
    "*(attention,mlp attention,chunked_cross,mlp)"
)


def source_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the broken rules of an encoder-decoder's layers, and of what only it may have."""
    is_retro = model.has_neighbours
    if model.position is Position.relative and (is_retro or not model.has_source):
        yield (
            "model.position=relative is for encoder-decoders, whose layers are like "
            f"{EXAMPLE}: choose rotary, learned or none"
        )
    if model.head.biencoder is Biencoder.separate:
        yield from two_encoders_problems(model)
        return
    if not model.has_source:
        return
    yield from retro_problems(model) if is_retro else side_problems(model)
    mixers = (*ENCODER, *(RETRO_DECODER if is_retro else DECODER))
    for kind in dict.fromkeys(model.layer_kinds):
        if others := [name for name in sum(kind, ()) if name not in mixers]:
            yield (
                f"model.layers={model.layers!r} has {', '.join(others)} in an encoder-decoder, "
                f"whose mixers are {', '.join(mixers)}: use these"
            )
    rotary = model.position is Position.rotary and not is_retro
    for path, broken, remedy in (
        ("position=rotary", rotary, "choose relative, learned or none"),
        ("attention.causal=false", not model.attention.causal, "true; it is the decoder's"),
        ("norm_place", model.norm_place is not NormPlace.pre, "set it to pre"),
        ("layers with +", model.parallel_block, "write sublayers apart, with commas"),
        ("mtp.num_layers", model.mtp.num_layers, "set it to 0"),
        ("attention.sinks", model.attention.sinks, "set it to false"),
        ("attention.output_gate", model.attention.output_gate, "set it to false"),
    ):
        if broken:
            yield f"model.{path} is not supported in an encoder-decoder: {remedy}"
    count, distance = model.relative.buckets, model.relative.distance
    if model.position is Position.relative and (count % 4 or distance <= count // 2):
        yield (
            f"model.relative.buckets={count} and distance={distance}: buckets must be a multiple "
            "of 4, and distance more than half of them"
        )


def two_encoders_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the broken rules of a biencoder whose queries and texts have an encoder each."""
    layers = two_encoders(model.num_layers // 2)
    if model.num_layers < 4:
        yield (
            f"model.num_layers={model.num_layers} with head.biencoder=separate: set it to 4 or "
            "more, at least two layers in each encoder"
        )
    if model.num_layers % 2 or model.layers != layers:
        yield (
            f"model.layers={model.layers!r} with num_layers={model.num_layers} are not the two "
            f"encoders of head.biencoder=separate: set layers={layers!r} and an even num_layers"
        )
    if model.first_layers_bf16 or model.last_layers_bf16:
        yield (
            f"model.first_layers_bf16={model.first_layers_bf16} and last_layers_bf16="
            f"{model.last_layers_bf16} are not supported with head.biencoder=separate, which "
            "has one group of layers for each encoder: set both to 0"
        )
    if model.position not in (Position.learned, Position.none):
        yield (
            f"model.position={model.position.value} is not supported with head.biencoder="
            "separate: choose learned or none"
        )


def side_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the broken rules of the order of an encoder's and a decoder's layers."""
    kinds, layers = model.layer_kinds, f"model.layers={model.layers!r}"
    if not model.has("cross"):
        yield f"{layers} has an encoder that nothing reads: write for example {EXAMPLE}"
    if not model.has("encoder_attention"):
        yield (
            f"{layers} has cross attention without a memory to read: put an encoder's layers "
            f"before it, for example {EXAMPLE}"
        )
    sides = [is_encoder(kind) for kind in kinds]
    norms = [number for number, kind in enumerate(kinds) if "encoder_norm" in sum(kind, ())]
    if None in sides or sides != sorted(sides, key=bool, reverse=True):
        yield f"{layers}: all layers of the encoder must stand before those of the decoder"
    elif norms != [sides.count(True) - 1] or kinds[norms[0]] != (("encoder_norm",),):
        yield f"{layers}: one layer encoder_norm must stand between encoder and decoder"


def retro_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the broken rules of the order of RETRO's sublayers."""
    names = [name for kind in model.layer_kinds for name in sum(kind, ())]
    layers, is_encoder = f"model.layers={model.layers!r}", [name in ENCODER for name in names]
    if "encoder_attention" not in names:
        yield (
            f"{layers} has cross attention without a memory to read: put the encoder of the "
            f"neighbours before it, for example {RETRO_EXAMPLE}"
        )
    elif "chunked_cross" not in names:
        yield f"{layers} has an encoder that nothing reads: write for example {RETRO_EXAMPLE}"
    else:
        places = [place for place, inside in enumerate(is_encoder) if inside]
        block = [*range(places[0], places[-1] + 1)]
        norms = [place for place, name in enumerate(names) if name == "encoder_norm"]
        if places != block or norms != places[-1:] or "chunked_cross" in names[: places[-1]]:
            yield (
                f"{layers}: the encoder's layers must follow each other, with one encoder_norm "
                f"at their end, before the first chunked_cross, as in {RETRO_EXAMPLE}"
            )


def is_encoder(kind: Layer) -> bool | None:
    """Whether a layer belongs to the encoder; None if it has mixers of both."""
    sides = {name in ENCODER for name in sum(kind, ())}
    return sides.pop() if len(sides) == 1 else None


def objective_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules between the objective's samples and the model."""
    data, has_source = config.data, config.model.has_source
    reads = has_source, config.model.has_neighbours
    is_biencoder = config.model.head.biencoder is Biencoder.separate  # retrieval.problems checks it
    if not is_biencoder and (data.has_source, data.objective.has_neighbours) != reads:
        trained = [o for o in Objective if o.is_trained]
        able = ", ".join(o.value for o in trained if (o.has_source, o.has_neighbours) == reads)
        what = "an encoder-decoder" if has_source else "a model without an encoder and cross"
        what = "RETRO" if config.model.has_neighbours else what
        yield (
            f"data.objective={data.objective.value} cannot train {what} (model.layers="
            f"{config.model.layers!r}), which serves {able}: choose one of these, or other layers"
        )
    if has_source and has_prompt(config):
        yield (
            f"log.sample_prompt={config.log.sample_prompt!r}: an encoder-decoder or RETRO writes "
            'no sample in training: set log.sample_prompt=""'
        )
    yield from chunk_problems(config) if all(reads) and data.objective.has_neighbours else ()
    first = data.start_token
    if first >= 0 and not config.model.has_source_text:
        yield (
            f"data.start_token={first} has no effect on this model: only the targets of "
            "an encoder-decoder begin with it; leave it at -1"
        )
    if has_source and 0 < config.model.vocab_size <= first:
        yield (
            f"data.start_token={first} is not below model.vocab_size={config.model.vocab_size}: "
            "give an id of the vocabulary, or -1"
        )
    room, longest = config.model.max_position, data.source_positions
    name = "neighbour_length" if data.objective.has_neighbours else source_name(data)
    if has_source and config.model.position is Position.learned and 0 < room < longest:
        yield (
            f"data.{name}={longest} is longer than model.max_position={room}: shorten the "
            "one or raise the other"
        )


def has_prompt(config: Config) -> bool:
    """Whether log.sample_prompt is a text. "auto" asks for a sample only of models that write."""
    return config.log.sample_prompt not in ("", "auto")


def chunk_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules of RETRO's chunks and neighbours."""
    data, retro = config.data, config.model.retro
    length, chunk = data.sequence_length, data.chunk_length
    if length % chunk:
        yield (
            f"data.chunk_length={chunk} does not divide data.sequence_length={length}: choose it "
            f"in {divisors(length, at_most=2 * chunk)}, or change the other"
        )
    for name in ("chunk_length", "neighbour_length"):
        if getattr(retro, name) not in (0, size := getattr(data, name)):
            yield (
                f"model.retro.{name}={getattr(retro, name)} is not data.{name}={size}: set the "
                "model's to 0, which takes the data's, or both alike"
            )
    if len(data.paths) != 1 or data.blend or data.train_paths:
        yield (
            "data.objective=retro reads one corpus: set data.paths=PREFIX, and leave data.blend "
            "and data.train_paths empty"
        )


def source_name(data: DataConfig) -> str:
    """The setting that says how long a source is."""
    return "query_length" if data.objective.is_retrieval else "source_length"


def layout_problems(config: Config, tensor: int) -> Iterator[str]:
    """Yield the broken rules between the source and the sizes of tensor and context."""
    parallel, length = config.parallel, config.data.source_tokens
    if not config.model.has_source:
        return
    if config.model.has_neighbours:
        yield from chunk_layout_problems(config, tensor)
        return
    unit = math.lcm(2 * parallel.context, parallel.context * tensor)
    unit = tensor if parallel.context == 1 else unit
    if length % unit:
        yield (
            f"data.{source_name(config.data)}={length} is not divisible by {unit}, which "
            f"parallel.tensor={tensor} and context={parallel.context} need: choose tensor in "
            f"{divisors(length, at_most=2 * tensor)}, or change the length"
        )
    yield from context_problems(config.model, parallel)


def chunk_layout_problems(config: Config, tensor: int) -> Iterator[str]:
    """Yield the broken rules of the devices that share RETRO's chunks and their neighbours."""
    data, context = config.data, config.parallel.context
    length, unit = data.sequence_length, 2 * context * data.chunk_length
    if context > 1 and length % unit:
        yield (
            f"parallel.context={context} cuts data.sequence_length={length} into {2 * context} "
            f"pieces, each of which must be a multiple of data.chunk_length={data.chunk_length}: "
            f"choose a sequence_length that is a multiple of {unit}, or context=1"
        )
    if data.source_tokens % (context * tensor):
        yield (
            f"the {data.source_tokens} tokens of a sample's neighbours are not divisible by "
            f"parallel.context={context} x tensor={tensor}: change these, data.num_neighbours or "
            "data.neighbour_length"
        )
    yield from context_problems(config.model, config.parallel)


def context_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    others = set(strategies(parallel.context_strategy).values()) - {"auto", "gather"}
    if parallel.context_chunks:
        yield (
            f"parallel.context_chunks={parallel.context_chunks} chooses owners of one sequence, "
            "and an encoder-decoder has two: set it to 0"
        )
    if parallel.context > 1 and others and model.position is Position.relative:
        yield (
            f"parallel.context_strategy={parallel.context_strategy}: relative position biases need "
            "every key in its place: choose auto or gather"
        )
