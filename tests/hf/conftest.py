"""Tests of conversions describe the same few models over and over: their shapes are traced once."""

from collections.abc import Iterator

import pytest

from maxmeg.config.model import ModelConfig
from maxmeg.hf.families import read


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """`array_shapes` traces a whole model, and conversions call it several times for each."""
    trace, known = read.array_shapes, {}

    def array_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
        key = repr(model)
        if key not in known:
            known[key] = trace(model)
        return dict(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "array_shapes", array_shapes)
        yield
