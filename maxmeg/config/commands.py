"""The commands of `maxmeg` as data. `maxmeg/__main__.py` imports a command when it runs."""

import dataclasses

from maxmeg.config import options


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, `maxmeg NAME`.

    target: MODULE:FUNCTION. The function takes (config, options), or those of the two that the
    command has. options: the dataclass of the command's options. config: whether --config names a
    run; None: it may. arguments: the function takes the list of arguments instead, parses them
    itself and returns the exit code.
    """

    target: str
    summary: str
    options: type | None = None
    config: bool | None = False
    arguments: bool = False


COMMANDS = {
    "train": Command("maxmeg.train:command", "train or fine-tune a model", options.Train, True),
    "evaluate": Command("maxmeg.evaluate:main", "loss or benchmark tasks", options.Evaluate),
    "generate": Command("maxmeg.generate:main", "continue prompts or chats", options.Generate),
    "chat": Command("maxmeg.chat:main", "talk with a model in the terminal", options.Chat),
    "retrieve": Command("maxmeg.retrieve:main", "search by a biencoder", options.Retrieve),
    "serve": Command("maxmeg.serve:main", "OpenAI's API over HTTP", options.Serve),
    "replay": Command("maxmeg.serve:replay", "repeat a server's request log", options.Replay),
    "preprocess": Command(
        "maxmeg.preprocess:command", "tokenize, inspect and merge corpora", arguments=True
    ),
    "neighbours": Command(
        "maxmeg.retrieval.neighbours:main",
        "build RETRO's neighbour index",
        options.Neighbours,
        True,
    ),
    "convert": Command(
        "maxmeg.convert:main", "from and to Hugging Face, Megatron-LM", options.Convert, None
    ),
    "plan": Command("maxmeg.plan:main", "memory and time on GPUs", options.Plan, True),
    "plot": Command("maxmeg.plot:main", "compare runs on a page", arguments=True),
    "doctor": Command("maxmeg.doctor:main", "check a machine or a job", options.Doctor),
    "config": Command("maxmeg.config.compare:main", "compare settings", arguments=True),
    "launch": Command("maxmeg.runtime.launchers:main", "paths of launch scripts", arguments=True),
    "models": Command(
        "maxmeg.planning.show.models:main", "named architectures and their sizes", arguments=True
    ),
}
