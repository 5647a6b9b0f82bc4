"""Tool calls in a model's text, in the form that its chat template teaches."""

import dataclasses
import json
import sys
import typing
from collections.abc import Sequence

from maxmeg.inference.schemas import escapes, prepared

LARGEST = sys.float_info.max
BETWEEN = " \n;"  # calls that need no opening
STRICT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Schemas = list[tuple[str, dict]]  # names of functions, and the schemas of their parameters


def _number(text: str) -> float:
    """A number that JSON can write again: 1e999 becomes the largest one."""
    return max(-LARGEST, min(LARGEST, float(text)))


def _refused(text: str) -> typing.NoReturn:
    raise ValueError(f"{text} is not JSON")


DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_refused)


@dataclasses.dataclass(frozen=True)
class ToolForm:
    """A call is `opening` {"name": ..., `arguments`: {...}} `closing`; is_list: a list of these.

    starts: a call can only be the first thing in the text.
    """

    opening: str
    closing: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    starts: bool = False

    def parse(self, text: str, is_whole: bool) -> tuple[str, list[dict[str, str]]]:
        """Return the text without calls, and the calls.

        What is returned for a beginning of a text, with is_whole=False, stays for the whole text.
        """
        content, calls, at = "", [], 0
        while (start := self._find(text, at)) >= 0:
            block, end = self._read(text, start + len(self.opening))
            if not end:  # it is not JSON, or not all of it is here
                break
            content, at = content + text[at:start], end
            calls += block
        rest, start = text[at:], self._find(text, at)
        if not is_whole:
            rest = rest[: start - at] if start >= 0 else without_partial(rest, self.opening)
            rest = "" if self.starts and not rest.strip(BETWEEN) else rest
        content += rest
        return (content.rstrip() if calls or not is_whole else content), calls

    def _find(self, text: str, at: int) -> int:
        if self.starts:
            return at if text[at:].lstrip(BETWEEN).startswith("{") else -1
        return text.find(self.opening, at)

    def _read(self, text: str, at: int) -> tuple[list[dict[str, str]], int]:
        """The calls that begin at a place of the text, and where they end; ([], 0) if none do."""
        at = len(text) - len(text[at:].lstrip(BETWEEN if self.starts else None))
        try:
            value, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [], 0
        after = text[end:].lstrip()
        if not after.startswith(self.closing):
            return [], 0
        end = len(text) - len(after) + len(self.closing)
        values = value if isinstance(value, list) else [value]
        calls = [self._call(value) for value in values]
        return ([call for call in calls if call], end) if all(calls) else ([], 0)

    def _call(self, value: typing.Any) -> dict[str, str] | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = json.dumps(value.get(self.arguments, {}), ensure_ascii=False)
        return {"name": value["name"], "arguments": arguments}

    def grammar(self, functions: Schemas, is_single: bool) -> str:
        """A Lark grammar of one call of these functions, or of one or more.

        Each schema is a %json rule of its own: its pointers, such as #/$defs/Place, stay valid.
        """
        gap = "\n" if self.closing else ""
        before, after, between = self.opening + gap, gap + self.closing, gap or "; "
        if self.is_list:
            before, after, between = "", "", ", "
        rules = []
        for i, (name, parameters) in enumerate(functions):
            opening = f'{before}{{"name": {json.dumps(name)}, "{self.arguments}": '
            schema = {"type": "object"} | prepared(parameters)
            schema["x-guidance"] = STRICT | {"json_allowed_escapes": escapes(parameters)}
            rules += [f"call{i}: {json.dumps(opening)} arguments{i} {json.dumps('}' + after)}"]
            rules += [f"arguments{i}: %json {json.dumps(schema)}"]
        others = "" if is_single else f" ({json.dumps(between)} call)*"
        start = (
            f'{json.dumps(self.opening + "[")} call{others} "]"'
            if self.is_list
            else "call" + others
        )
        call = " | ".join(f"call{i}" for i in range(len(functions)))
        return "\n".join([f"start: {start}", f"call: {call}", *rules, ""])


def without_partial(text: str, mark: str) -> str:
    """Remove from the end of a text what may be the beginning of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return text[:-size]
    return text


def tool_form(template: str) -> ToolForm | None:
    """The form of calls in a chat template; None if it has none that is known."""
    if "<tool_call>" in template and "<function=" not in template:
        return ToolForm("<tool_call>", "</tool_call>")
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return ToolForm("[TOOL_CALLS]", is_list=True)
    if "tools" in template and '"parameters":' in template:
        return ToolForm("", arguments="parameters", starts=True)
    return None


def schemas(tools: Sequence[typing.Any], only: str = "") -> Schemas:
    """The parameters' schemas of all tools, or of the one with this name."""
    functions = [(tool.function.name, tool.function.parameters or {}) for tool in tools]
    chosen = [(name, parameters) for name, parameters in functions if only in ("", name)]
    if not chosen:
        names = sorted(name for name, _ in functions)
        raise ValueError(f"tool_choice names {only!r}, and tools has {names}")
    return chosen
