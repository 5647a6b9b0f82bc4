"""maxmeg: large-model training in JAX for NVIDIA GPUs.

    import maxmeg

    run = maxmeg.load("runs/gpt")
    print(run.generate("def main", max_new_tokens=50))

The names in __all__ are those of maxmeg.api, which is imported when one of them is first used:
`import maxmeg` imports no JAX. Three of them, config, plan and train, are also modules of the
commands. These modules can be called, so that maxmeg.train(config) works in every order of imports.
"""

import sys
import types
import typing

if typing.TYPE_CHECKING:
    from maxmeg.api import LanguageModel, capture, config, engine, load, plan, train

__version__ = "0.1.0"
__all__ = ["LanguageModel", "capture", "config", "engine", "load", "plan", "train"]


class _CallableModule(types.ModuleType):
    """A module that is called as the function of its name in maxmeg.api."""

    def __call__(self, *arguments: typing.Any, **settings: typing.Any) -> typing.Any:
        return __getattr__(self.__name__.rpartition(".")[2])(*arguments, **settings)


class _Package(types.ModuleType):
    """This package, which makes the modules config, plan and train callable when they load."""

    def __setattr__(self, name: str, value: typing.Any) -> None:
        if name in __all__ and type(value) is types.ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'maxmeg' has no attribute {name!r}")
    from maxmeg import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
