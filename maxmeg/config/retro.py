"""Settings of RETRO: chunks of the text, and the neighbours that its layers read. No JAX."""

import dataclasses
import enum

from maxmeg.config.setting import Section, setting


class Neighbours(enum.Enum):
    nearest = "nearest"
    shuffled = "shuffled"
    none = "none"


@dataclasses.dataclass(repr=False)
class RetroConfig(Section):
    """Sizes that the mixers chunked_cross, encoder_cross and encoder_attention work with."""

    chunk_length: int = setting(
        0, "tokens of a chunk; 0: data.chunk_length", at_least=0, effect="adapted"
    )
    neighbour_length: int = setting(
        0, "tokens of a neighbour; 0: data.neighbour_length", at_least=0, effect="adapted"
    )


def retro_layers(chunked: tuple[int, ...], num_layers: int, encoder_layers: int = 2) -> str:
    """model.layers of a decoder with chunked cross attention in the layers with these numbers, from
    1 on; the encoder stands before the first one's cross attention, as in Megatron-LM."""
    if not chunked or not 1 <= min(chunked) <= max(chunked) <= num_layers:
        raise ValueError(
            f"chunked cross attention in layers {chunked}: name layers from 1 to {num_layers}"
        )
    encoder = f"{encoder_layers}(encoder_attention,encoder_cross,encoder_mlp) encoder_norm"
    layers = []
    for number in range(1, num_layers + 1):
        plain = "attention,mlp" if number not in chunked else "attention,chunked_cross,mlp"
        first = f"attention {encoder} chunked_cross,mlp"
        layers.append(first if number == min(chunked) else plain)
    return " ".join(layers)
