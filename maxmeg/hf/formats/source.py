"""A model in another format, as conversion reads it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maxmeg.checkpoint.stream import TensorInfo


class Weights(Protocol):
    """Tensors by name, read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, *index: int) -> np.ndarray:
        """Return a tensor, or the entry `index` of its first dimensions."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to import: its config.json, its weights, and the small files beside them.

    texts: {file name: content} of further small files to write. no_tokenizer: why the source has no
    tokenizer, where it has none. notes: what an import should tell about the weights.
    """

    config: Mapping[str, Any]
    weights: Weights
    files: tuple[Path, ...]
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    no_tokenizer: str = "neither tokenizer.json nor tokenizer.model was found"
    notes: tuple[str, ...] = ()
