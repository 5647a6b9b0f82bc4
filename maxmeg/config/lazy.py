"""Modules that a run may not need: loaded when something of theirs is first asked for."""

import importlib
import typing


class Lazy:
    """Stands for the module of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> typing.Any:
        return getattr(importlib.import_module(self._name), attribute)
