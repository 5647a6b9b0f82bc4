"""The log of a server: a JSON line per request, from which `maxmeg replay` repeats them."""

import dataclasses
import hashlib
import json
import logging
import struct
import time
import typing
import weakref
from collections.abc import Iterator

from maxmeg.inference.engine import Engine, Reply
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.server.worker import Ticket

logger = logging.getLogger(__name__)
EARLY = ("cancelled", "error", "grammar")  # replies whose log-probabilities are not compared


class Journal:
    """An observer that writes what a replay needs. shape: settings on which the bytes depend.

    A file that cannot be written, on a full disk for example, ends the log, not the server.
    """

    def __init__(self, file: typing.TextIO, shape: dict[str, typing.Any]) -> None:
        self.file, self.is_open = file, True
        weakref.finalize(self, file.close)
        self._write({"engine": shape})

    def token(self, count: int, seconds: float, is_first: bool) -> None:
        pass

    def stepped(self, engine: Engine, seconds: float) -> None:
        pass

    def ended(self, ticket: Ticket, seconds: float) -> None:
        request = dataclasses.asdict(dataclasses.replace(ticket.request, grammar=None))
        line = {"id": ticket.id, "time": round(time.time(), 3), "seed": ticket.seed}
        line |= {"n": ticket.n, "prompts": ticket.prompts, "request": request}
        line |= {"grammar": ticket.grammar, "replies": [*map(record, ticket.replies)]}
        self._write(line)

    def _write(self, line: dict) -> None:
        if not self.is_open:
            return
        try:
            self.file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self.file.flush()
        except OSError as error:
            self.is_open = False
            logger.warning("the log ends here, the server goes on: %s", error)


def record(reply: Reply) -> dict[str, typing.Any]:
    """The tokens of a reply, and a hash of them with its log-probabilities and text."""
    numbers = [*reply.logprobs, *reply.prompt_logprobs]
    digest = hashlib.sha256(struct.pack(f"<{len(numbers)}d", *numbers))
    digest.update(json.dumps([reply.tokens, reply.top, reply.prompt_top, reply.text]).encode())
    fields = {"reason": reply.reason, "tokens": reply.tokens}
    return fields | {"digest": digest.hexdigest()[:32]}


def read_log(path: str) -> tuple[dict[str, typing.Any], list[dict]]:
    """The settings of the engine and the lines of the requests after the last start of a server."""
    shape, lines = None, []
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}") from None
            if "engine" in line:
                shape, lines = line["engine"], []
            else:
                lines.append(line)
    if shape is None:
        raise ValueError(f"{path} is not the log of a server: it has no line of its engine")
    return shape, lines


def replayed(engine: Engine, lines: list[dict]) -> Iterator[tuple[str, str]]:
    """Repeat the requests of a log together; yield the id of each and how it differs, or ""."""
    started = []
    for line in lines:
        fields = dict(line["request"])
        sampling = fields.pop("sampling")
        sampling["logit_bias"] = tuple(map(tuple, sampling["logit_bias"]))
        fields |= {name: tuple(fields[name]) for name in ("ends", "stops")}
        fields["grammar"] = engine.grammars.compile(*line["grammar"]) if line["grammar"] else None
        request = Request(sampling=Sampling(**sampling), **fields)
        started.append(
            [
                engine.submit(line["prompts"][i // line["n"]], request, line["seed"], i)
                for i in range(len(line["replies"]))
            ]
        )
    ended_early = [
        (len(old["tokens"]), new)
        for line, replies in zip(lines, started, strict=True)
        for old, new in zip(line["replies"], replies, strict=True)
        if old["reason"] in EARLY
    ]
    while engine.step():
        for count, reply in ended_early:
            if len(reply.tokens) >= count:
                engine.cancel(reply)
    for line, replies in zip(lines, started, strict=True):
        pairs = zip(line["replies"], replies, strict=True)
        differences = [(i, _difference(old, record(new))) for i, (old, new) in enumerate(pairs)]
        yield line["id"], "; ".join(f"reply {i}: {text}" for i, text in differences if text)


def _difference(old: dict, new: dict) -> str:
    if old["reason"] in EARLY:
        new = new | {"tokens": new["tokens"][: len(old["tokens"])], "digest": old["digest"]}
    for place, pair in enumerate(zip(old["tokens"], new["tokens"], strict=False)):
        if pair[0] != pair[1]:
            return f"token {place} was {pair[0]} and is {pair[1]}"
    if len(old["tokens"]) != len(new["tokens"]):
        return f"it had {len(old['tokens'])} tokens and has {len(new['tokens'])}"
    return "" if old["digest"] == new["digest"] else "same tokens, other log-probabilities or text"
