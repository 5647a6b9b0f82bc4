"""How settings are declared, read by dotted name, and checked by the rules that they declare."""

import copy
import dataclasses
import functools
import operator
import typing
from collections.abc import Iterator, Mapping

Section = typing.TypeVar("Section")
BOUNDS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def setting(
    default: typing.Any,
    doc: str,
    flag: str = "",
    *,
    needs: str = "",
    effect: str = "function",
    **bounds: float,
) -> typing.Any:
    """Declare a dataclass field: its meaning, Megatron-LM's flag, and the rules for its value.

    bounds: at_least, at_most (inclusive), above, below (exclusive), of the value. needs: the value
    has no effect, and must be the default, unless this condition on the same section holds: "rank"
    (that field is not at its default) or "scaling=yarn|llama3" (it has one of these values). A
    field that is a section passes its condition on to all of its fields. effect, for the model's
    fields: what a change does to trained weights: "function" (they compute something else),
    "adapted" (something else that training can adapt to) or "none".
    """
    metadata = {"doc": doc, "flag": flag, "bounds": bounds, "needs": needs, "effect": effect}
    if dataclasses.is_dataclass(default):  # a section
        return dataclasses.field(default_factory=typing.cast(type, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def get(section: typing.Any, path: str) -> typing.Any:
    """Return the value of a dotted field name, such as "moe.top_k"."""
    return functools.reduce(getattr, path.split("."), section)


def field_of(section: typing.Any, path: str) -> dataclasses.Field:
    """Return the declaration of a dotted field name."""
    parents, _, name = path.rpartition(".")
    return type(get(section, parents) if parents else section).__dataclass_fields__[name]


def with_fields(section: Section, values: Mapping[str, typing.Any]) -> Section:
    """Return a copy of a section in which fields have new values: {"moe.top_k": 2, ...}.

    Raises TypeError for a name that is no field.
    """
    result = copy.deepcopy(section)
    for path, value in values.items():
        set_field(result, path, copy.deepcopy(value))
    return result


def set_field(section: typing.Any, path: str, value: typing.Any) -> None:
    """Set the field of a dotted name; raises TypeError for a name that is no field."""
    parents, _, name = path.rpartition(".")
    parent = get(section, parents) if parents else section
    if name not in getattr(type(parent), "__dataclass_fields__", ()):
        raise TypeError(f"{type(section).__name__} has no field {path}")
    setattr(parent, name, value)


def walk(
    section: typing.Any, prefix: str = ""
) -> Iterator[tuple[str, typing.Any, dataclasses.Field]]:
    """Yield (dotted name, value, field) of every field that is no section."""
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{path}.")
        else:
            yield path, value, field


def shown(path: str, value: typing.Any) -> str:
    """A setting as errors show it: model.mlp.activation=gelu."""
    return f"{path}={getattr(value, 'name', value)}"


def declared_problems(section: typing.Any, prefix: str = "") -> Iterator[str]:
    """Yield the broken bounds and conditions that the fields of a section declare."""
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        is_section = dataclasses.is_dataclass(value)
        needs = field.metadata["needs"]
        if needs and not _holds(section, needs):
            leaves = walk(value, f"{path}.") if is_section else [(path, value, field)]
            changed = [shown(name, leaf) for name, leaf, each in leaves if leaf != each.default]
            if changed:
                verb = "has" if len(changed) == 1 else "have"
                condition = needs.replace("|", " or ")
                yield (
                    f"{', '.join(changed)} {verb} no effect without {prefix}{condition}: set that, "
                    f"or leave {'this' if len(changed) == 1 else 'these'} out"
                )
        if is_section:
            yield from declared_problems(value, f"{path}.")
            continue
        bounds = field.metadata["bounds"]
        if not all(BOUNDS[name](value, limit) for name, limit in bounds.items()):  # also NaN
            wanted = " and ".join(f"{n.replace('_', ' ')} {limit}" for n, limit in bounds.items())
            yield f"{path}={value} must be {wanted}"


def _holds(section: typing.Any, condition: str) -> bool:
    path, equals, values = condition.partition("=")
    value = get(section, path)
    if equals:
        return getattr(value, "name", str(value)) in values.split("|")
    return value != get(type(section)(), path)


def divisors(number: int, at_most: int = 0) -> str:
    """Return the divisors of a number, up to `at_most` if it is given, as text: "1, 2, 3, 6"."""
    highest = min(number, at_most or number)
    return ", ".join(str(d) for d in range(1, highest + 1) if number % d == 0)
