"""How settings are declared, set and read by dotted name, and the rules that they declare."""

import copy
import dataclasses
import enum
import functools
import math
import operator
import typing
from collections.abc import Iterator, Mapping

from maxmeg.config.hints import SYNONYMS, nearest, removed
from maxmeg.config.values import convert, text

Settings = typing.TypeVar("Settings")
LARGEST = 2**53  # whole numbers up to here are exact as floats too
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
    absent: bool = False,
    former: str = "",
    **bounds: float,
) -> typing.Any:
    """Declare a dataclass field: its meaning, Megatron-LM's flag, and the rules for its value.

    bounds: at_least, at_most (inclusive), above, below (exclusive), of the value. needs: the value
    has no effect, and must be the default, unless this condition on the same section holds: "rank"
    (that field is not at its default) or "scaling=yarn|llama3" (it has one of these values). A
    field that is a section passes its condition on to all of its fields. effect, for the model's
    fields: what a change does to trained weights: "function" (they compute something else),
    "adapted" (something else that training can adapt to) or "none". absent: the section is None
    until one of its fields is set. former: an earlier name, which is accepted with a warning.
    """
    section = typing.cast(type, default) if dataclasses.is_dataclass(default) else None
    metadata = {"doc": doc, "flag": flag, "bounds": bounds, "needs": needs, "effect": effect}
    metadata |= {"section": section, "former": former}
    if section and not absent:
        return dataclasses.field(default_factory=section, metadata=metadata)
    return dataclasses.field(default=None if section else default, metadata=metadata)


class Section:
    """Settings: the base of a dataclass, which checks each value when it is set.

    AttributeError for an unknown name; TypeError for a value that is not of the field's type. Text
    is read as on a command line. A section is printed as the settings that are not at their
    defaults.
    """

    def __setattr__(self, name: str, value: typing.Any) -> None:
        kinds = fields(type(self))
        if name not in kinds:
            if message := removed(name):
                raise AttributeError(message)
            match = nearest(name, [*kinds, *SYNONYMS])
            hint = f"did you mean {match}?" if match else "docs/config.md lists all fields"
            raise AttributeError(f"{type(self).__name__} has no field {name!r}: {hint}")
        field = field_of(self, name)
        below = field.metadata["section"]
        if below is None:
            try:
                value = convert(name, value, kinds[name])
            except ValueError as error:
                raise TypeError(str(error)) from None
        elif not isinstance(value, below) and not (value is None and field.default is None):
            raise TypeError(f"{name}={value!r} is no {below.__name__}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        defaults = {path: value for path, value, _ in walk(type(self)())}
        lines = [
            f"\n  {path}={repr(value) if isinstance(value, str) else text(value)}"
            for path, value, _ in walk(self)
            if path not in defaults or value != defaults[path]
        ]
        return f"{type(self).__name__}({','.join(lines)})"


@functools.cache
def fields(section: type) -> dict[str, typing.Any]:
    """Return the type of each field of a section."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def former_names(section: type) -> dict[str, str]:
    """Return the present names of the fields that had others, by these others."""
    declared = {field.metadata.get("former"): field.name for field in dataclasses.fields(section)}
    return {former: name for former, name in declared.items() if former}


def shared_values(kind: type, section: typing.Any) -> dict[str, typing.Any]:
    """The section's values of the settings that are fields of the dataclass `kind` too; of an enum,
    the value of its member."""
    names = {field.name for field in dataclasses.fields(kind)} & set(vars(section))
    values = {name: getattr(section, name) for name in names}
    return {n: v.value if isinstance(v, enum.Enum) else v for n, v in values.items()}


def get(section: typing.Any, path: str) -> typing.Any:
    """Return the value of a dotted field name, such as "moe.top_k"; None in an absent section."""

    def below(parent: typing.Any, name: str) -> typing.Any:
        return None if parent is None else getattr(parent, name)

    return functools.reduce(below, path.split("."), section)


def field_of(section: typing.Any, path: str) -> dataclasses.Field:
    """Return the declaration of a dotted field name."""
    parents, _, name = path.rpartition(".")
    return type(get(section, parents) if parents else section).__dataclass_fields__[name]


def with_fields(section: Settings, values: Mapping[str, typing.Any]) -> Settings:
    """Return a copy of a section in which fields have new values: {"moe.top_k": 2, ...}.

    Raises TypeError for a name that is no field.
    """
    result = copy.deepcopy(section)
    for path, value in values.items():
        set_field(result, path, copy.deepcopy(value))
    return result


def set_field(section: typing.Any, path: str, value: typing.Any) -> None:
    """Set the field of a dotted name. An absent section in it begins with its defaults.

    Raises TypeError for a name that is no field.
    """
    *parents, name = path.split(".")
    parent = section
    for each in parents:
        if getattr(parent, each, "") is None:
            setattr(parent, each, field_of(parent, each).metadata["section"]())
        parent = getattr(parent, each, None)
    if name not in getattr(type(parent), "__dataclass_fields__", ()):
        raise TypeError(f"{type(section).__name__} has no field {path}")
    setattr(parent, name, value)


@functools.cache
def declarations(kind: type) -> tuple[tuple[dataclasses.Field, bool], ...]:
    """Return (field, whether it is a section) of the fields of a dataclass."""
    return tuple(
        (field, field.metadata.get("section") is not None) for field in dataclasses.fields(kind)
    )


def walk(
    section: typing.Any, prefix: str = ""
) -> Iterator[tuple[str, typing.Any, dataclasses.Field]]:
    """Yield (dotted name, value, field) of every field that is no section. Skips absent ones."""
    for field, is_section in declarations(type(section)):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if not is_section:
            yield path, value, field
        elif value is not None:
            yield from walk(value, f"{path}.")


def assignment(path: str, value: typing.Any) -> str:
    """A setting as errors show it: model.mlp.activation=gelu."""
    return f"{path}={getattr(value, 'name', value)}"


def bound_problems(section: typing.Any, prefix: str = "") -> Iterator[str]:
    """Yield the broken bounds of a section's fields; whole numbers are at most LARGEST."""
    for path, value, field in walk(section, prefix):
        bounds = field.metadata["bounds"]
        if isinstance(value, int) and value > LARGEST:
            bounds = {"at_most": LARGEST} | bounds
        if not all(BOUNDS[k](value, limit) for k, limit in bounds.items()):  # or NaN
            limits = " and ".join(f"{k.replace('_', ' ')} {limit}" for k, limit in bounds.items())
            yield f"{path}={value} must be {limits}"


def check_bounds(section: typing.Any, prefix: str = "") -> None:
    """ValueError for numbers beyond their bounds. Other rules may loop over them."""
    if problems := list(bound_problems(section, prefix)):
        raise ValueError("\n".join(problems))


def declared_problems(section: typing.Any, prefix: str = "") -> Iterator[str]:
    """Yield the broken bounds and conditions that the fields of a section declare."""
    yield from bound_problems(section, prefix)
    yield from _condition_problems(section, prefix)


def _condition_problems(section: typing.Any, prefix: str) -> Iterator[str]:
    for field, is_section in declarations(type(section)):
        needs = field.metadata["needs"]
        if not (needs or is_section):
            continue
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if needs and not _holds(section, needs):
            leaves = walk(value, f"{path}.") if is_section else [(path, value, field)]
            changed = [
                assignment(name, leaf) for name, leaf, each in leaves if leaf != each.default
            ]
            if changed:
                verb = "has" if len(changed) == 1 else "have"
                condition = needs.replace("|", " or ")
                yield (
                    f"{', '.join(changed)} {verb} no effect without {prefix}{condition}: set that, "
                    f"or leave {'this' if len(changed) == 1 else 'these'} out"
                )
        if is_section:
            yield from _condition_problems(value, f"{path}.") if value is not None else ()


def _holds(section: typing.Any, condition: str) -> bool:
    path, equals, values = condition.partition("=")
    value = get(section, path)
    if equals:
        return getattr(value, "name", str(value)) in values.split("|")
    return value != field_of(section, path).default


def divisors(number: int, at_most: int = 0) -> str:
    """Return the divisors of a number, up to `at_most` if it is given, as text: "1, 2, 3, 6"."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    return ", ".join(str(d) for d in sorted(divisors) if d <= (at_most or number))
