"""The repeated unit of a group of the stack, with the sizes of its arrays. Nothing is compiled."""

import dataclasses
import functools

from maxmeg.layers.mixer import MixerSpec, Widths
from maxmeg.layers.residual import ResidualSpec
from maxmeg.layers.stream import Side


@dataclasses.dataclass(frozen=True)
class Unit:
    """The repeated unit of a group of the stack, and sizes of its mixers' arrays (`Widths`).

    layers: number of model layers in the unit. tensor: number of devices that share its heads.
    ratio: number of tokens of an encoder-decoder's source for each of the target.
    """

    repeats: int
    layers: int
    specs: tuple[ResidualSpec, ...]
    tensor: int
    ratio: float = 0.0

    @property
    def reads_source(self) -> bool:
        """Whether its tokens are those of an encoder-decoder's source."""
        return all(spec.side == "source" for spec in self.specs)

    @functools.cached_property
    def sublayer_widths(self) -> tuple[tuple[Widths, ...], ...]:
        """Of the mixers of each sublayer."""
        return tuple(
            tuple(self._widths(mixer, one.side) for mixer in one.mixers) for one in self.specs
        )

    def _widths(self, mixer: MixerSpec, side: Side) -> Widths:
        """For each token of its side, also where the other side's are projected."""
        widths = mixer.widths(self.tensor)
        if not mixer.reads_memory:
            return widths
        stored = {
            name: int(self._memory(side) * width) if name in ("key", "value") else width
            for name, width in widths.stored.items()
        }
        return dataclasses.replace(widths, stored=stored, queries_keys_values=sum(stored.values()))

    @functools.cached_property
    def widths(self) -> tuple[Widths, ...]:
        return tuple(one for widths in self.sublayer_widths for one in widths)

    @functools.cached_property
    def weights(self) -> int:
        """Number of weights that a token is multiplied with, as `unit_costs`."""
        return sum(mixer.weights() for one in self.specs for mixer in one.mixers)

    def multiply_adds(self, length: int) -> int:
        """Of its matrix products in forward, for one sequence of its tokens."""
        mixers = [mixer for one in self.specs for mixer in one.mixers]
        source = int(length * self.ratio)
        return int(sum(sum(mixer.multiplications(length, source)) for mixer in mixers))

    @property
    def sublayers(self) -> int:
        return len(self.specs)

    @property
    def streams(self) -> int:
        """Number of residual streams that backward reads: the input, and the output of each
        sublayer; not that of the last one unless a norm follows it."""
        return self.sublayers + (self.specs[-1].place != "pre")

    @functools.cached_property
    def columns(self) -> int:
        """Width of the column-parallel outputs, without experts; a device has 1 / tensor of it."""
        return sum(sum(one.stored.values()) for one in self.widths)

    def kept_columns(self, names: frozenset[str]) -> tuple[int, int]:
        """Widths of the outputs with these names: those cut over tensor, and replicated ones."""
        cut = [width for one in self.widths for name, width in one.stored.items() if name in names]
        full = [w for one in self.widths for name, w in one.replicated.items() if name in names]
        return sum(cut), sum(full)

    def total(self, name: str) -> int:
        """Sum of one of the `Widths` of all mixers."""
        return sum(getattr(one, name) for one in self.widths)

    @functools.cached_property
    def gathered(self) -> tuple[int, ...]:
        """Width of each sequence that is gathered over tensor: by the mixers themselves, and the
        inputs of sublayers."""
        streams = [
            spec.mixers[0].hidden_size
            for spec in self.specs
            if any(mixer.reads == "whole" for mixer in spec.mixers)
        ]
        streams += [
            int(self._memory(spec.side) * mixer.hidden_size)
            for spec in self.specs
            for mixer in spec.mixers
            if mixer.reads_memory
        ]
        return tuple([width for one in self.widths for width in one.gathered] + streams)

    def _memory(self, side: Side) -> float:
        """Number of the other side's tokens for each of this side."""
        return 1 / self.ratio if side == "source" else self.ratio

    @functools.cached_property
    def sparse(self) -> int:
        """Number of sublayers with experts."""
        return sum(mixer.name == "moe" for one in self.specs for mixer in one.mixers)
