"""Settings from an ml_collections.ConfigDict, which get_config() of a config file may return."""

import typing

from maxmeg.config import files
from maxmeg.config.schema import Config


def is_config_dict(value: typing.Any) -> bool:
    """Return whether a value is a ConfigDict (or a FrozenConfigDict)."""
    # Imported here: only such files need it, and it takes a third of a command's start.
    from ml_collections import ConfigDict

    return isinstance(value, ConfigDict)


def to_config(config_dict: typing.Any) -> Config:
    """Return the Config with the values of a ConfigDict; other fields keep their defaults.

    Sections are nested ConfigDicts, and references are resolved. ValueError for an unknown field,
    for a value of another type, for a placeholder without a value, and for a callable.
    """
    try:
        values = _values(config_dict, "", set(files.leaves(Config)))
    except RecursionError:
        raise ValueError("a section of the ConfigDict contains itself") from None
    return files.from_dict(values)


def _values(config_dict, prefix, leaves):
    from ml_collections.config_dict import RequiredValueError

    values = {}
    for name in config_dict:
        path, is_set = f"{prefix}{name}", True
        try:
            value = config_dict[name]
        except RequiredValueError:
            value, is_set = None, False
        if not is_set or (value is None and path in leaves):
            raise ValueError(f"{path} is None or an unset placeholder: set it, or leave it out")
        if callable(value):
            raise ValueError(
                f"{path} is the callable {getattr(value, '__name__', value)}: write a number, "
                "true or false, a list, or a string (a choice is written as its name)"
            )
        values[name] = _values(value, f"{path}.", leaves) if is_config_dict(value) else value
    return values
