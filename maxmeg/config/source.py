"""Rules of encoder-decoders, which read a source beside the tokens that they predict. No JAX."""

import math
from collections.abc import Iterator

from maxmeg.config.context import strategies
from maxmeg.config.data import Objective
from maxmeg.config.layers import ENCODER, Layer
from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import divisors

DECODER = ("attention", "cross", "mlp")
EXAMPLE = "6(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"


def source_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the broken rules of an encoder-decoder's layers, and of what only it may have."""
    if model.position is Position.relative and not model.has_source:
        yield (
            "model.position=relative is for encoder-decoders, whose layers are like "
            f"{EXAMPLE}: choose rotary, learned or none"
        )
    if not model.has_source:
        return
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
    known = (*ENCODER, *DECODER)
    for kind in dict.fromkeys(kinds):
        if others := [name for name in sum(kind, ()) if name not in known]:
            yield (
                f"{layers} has {', '.join(others)} in an encoder-decoder, whose mixers are "
                f"{', '.join(known)}: use these"
            )
    for path, broken, remedy in (
        ("position=rotary", model.position is Position.rotary, "choose relative, learned or none"),
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


def is_encoder(kind: Layer) -> bool | None:
    """Whether a layer belongs to the encoder; None if it has mixers of both."""
    sides = {name in ENCODER for name in sum(kind, ())}
    return sides.pop() if len(sides) == 1 else None


def objective_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules between the objective's samples and the model."""
    data, has_source = config.data, config.model.has_source
    if data.objective.has_source != has_source:
        able = ", ".join(o.value for o in Objective if o.has_source == has_source)
        what = "an encoder-decoder" if has_source else "a model without an encoder and cross"
        yield (
            f"data.objective={data.objective.value} cannot train {what} (model.layers="
            f"{config.model.layers!r}), which serves {able}: choose one of these, or other layers"
        )
    if has_source and config.log.sample_prompt:
        yield (
            f"log.sample_prompt={config.log.sample_prompt!r}: an encoder-decoder does not continue "
            'text: set log.sample_prompt=""'
        )
    room, longest = config.model.max_position, data.source_tokens
    if has_source and config.model.position is Position.learned and 0 < room < longest:
        yield (
            f"data.source_length={longest} is longer than model.max_position={room}: shorten the "
            "one or raise the other"
        )


def layout_problems(config: Config, tensor: int) -> Iterator[str]:
    """Yield the broken rules between the source and the sizes of tensor and context."""
    parallel, length = config.parallel, config.data.source_tokens
    if not config.model.has_source:
        return
    unit = math.lcm(2 * parallel.context, parallel.context * tensor)
    unit = tensor if parallel.context == 1 else unit
    if length % unit:
        yield (
            f"data.source_length={length} is not divisible by {unit}, which parallel.tensor="
            f"{tensor} and context={parallel.context} need: choose tensor in "
            f"{divisors(length, at_most=2 * tensor)}, or change data.source_length"
        )
    yield from context_problems(config.model, parallel)


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
