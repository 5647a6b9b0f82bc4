"""Compare the packages of this environment with the bounds in pyproject.toml.

    python .ci/check_versions.py [--lowest] [EXTRA ...]

Prints the version of every requirement of maxmeg and of the extras. Exits with 1 if a package is
missing or outside its bounds; with --lowest also if a package is newer than its lower bound.
`pip check` tests in addition that the packages fit each other.
"""

import argparse
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(entries: list[str]) -> Iterator[Requirement]:
    """The requirements in a list that hold on this platform, with those of included extras."""
    for requirement in map(Requirement, entries):
        if requirement.name == PROJECT["name"]:
            for extra in sorted(requirement.extras):
                yield from requirements(EXTRAS[extra])
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def lower_bound(requirement: Requirement) -> Version | None:
    """The version after `>=` or `==`; None without one."""
    bounds = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
    return max(bounds, default=None)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem(requirement: Requirement, lowest: bool = False) -> str:
    """What is wrong with the installed version of a requirement; empty if nothing is."""
    name, installed = requirement.name, installed_version(requirement.name)
    if installed is None:
        return f"{name} is not installed"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"{name} {installed} is outside the bounds {requirement.specifier}"
    bound = lower_bound(requirement)
    if lowest and Version(installed) != bound:
        return f"{name} {installed} is not at its lower bound {bound}: raise it in pyproject.toml"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lowest", action="store_true")
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    arguments = parser.parse_args()
    extras = (f"{PROJECT['name']}[{extra}]" for extra in arguments.extras)
    wanted = list(requirements([*PROJECT["dependencies"], *extras]))
    print(", ".join(f"{r.name} {installed_version(r.name)}" for r in wanted))
    if problems := [text for r in wanted if (text := problem(r, arguments.lowest))]:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
