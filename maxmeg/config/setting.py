"""How a setting is declared."""

import dataclasses
import typing


def setting(default: typing.Any, doc: str, flag: str = "") -> typing.Any:
    """A dataclass field with its meaning and, where there is one, Megatron-LM's flag."""
    metadata = {"doc": doc, "flag": flag}
    if dataclasses.is_dataclass(default):  # a section
        return dataclasses.field(default_factory=typing.cast(type, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
