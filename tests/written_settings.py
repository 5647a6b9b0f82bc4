"""Settings of tests as they are written on a command line: "optim.lr=3e-4; data.paths=a,b"."""

import typing

from maxmeg.config import files, values
from maxmeg.config.schema import Config


def values_of(text: str, section: type = Config) -> dict[str, typing.Any]:
    """Values by dotted name, of the types that the section's fields have."""
    kinds = files.leaves(section)
    pairs = [each.partition("=") for each in text.split("; ") if each]
    return {path: values.convert(path, value, kinds[path]) for path, _, value in pairs}
