"""Long tables of cases, of which the quick tests run a part."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], each: int) -> list:
    """The cases, of which all but every `each`-th are marked slow."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    slow = pytest.mark.slow
    return [pytest.param(*row, marks=[slow] * (i % each > 0)) for i, row in enumerate(rows)]
