"""The process that renders chat templates: python template_child.py, with a JSON request per line.

A request is {"template", "variables", "conversations", "marks", "seconds", "bytes", "characters"}.
The answer, a line on stdout, is {"texts", "generation"}, where "generation" says whether the
template has {% generation %} blocks. If rendering fails, the answer also has "error" and "index",
the failing conversation. Each request is answered by a fork of this process, which limits its
resources before it reads the template; if that fork does not end well, the answer is {"status"},
its exit code or minus a signal. This file imports nothing from maxmeg.
"""

import contextlib
import datetime
import json
import os
import resource
import sys
import typing

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

SHOWN = 500  # most characters of an error


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which raises an error when a template reads an unsafe attribute."""

    def unsafe_undefined(self, obj: typing.Any, attribute: str) -> typing.Any:
        raise jinja2.exceptions.SecurityError(
            f"it reads the attribute {attribute!r} of a {type(obj).__name__}"
        )


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: renders its body, between the marks of the
    request."""

    tags: typing.ClassVar = {"generation"}
    marks: typing.ClassVar = ["", ""]  # of the request
    is_used = False

    def parse(self, parser):
        Generation.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller) -> str:
        before, after = self.marks
        return before + caller() + after


class Namespace(jinja2.utils.Namespace):
    """namespace() that refuses names that begin with an underscore."""

    def __init__(*args, **values):  # self is in args, as a value may be named self
        for name in dict(*args[1:], **values):
            refuse_underscore(name)
        jinja2.utils.Namespace.__init__(*args, **values)

    def __setitem__(self, name, value):
        refuse_underscore(name)
        super().__setitem__(name, value)


def refuse_underscore(name) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"it sets the attribute {name!r} of a namespace")


def raise_exception(message) -> typing.NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def environment() -> Environment:
    """The functions and filters that transformers offers to templates."""
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    sandbox = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": Namespace,
    }
    return sandbox


def render(request: dict) -> dict:
    """Render each conversation of the request, within the limit on characters."""
    index, texts, error = -1, [], None
    room = request["characters"]
    Generation.marks = request["marks"]
    try:
        template = environment().from_string(request["template"])
        for index, conversation in enumerate(request["conversations"]):  # noqa: B007
            pieces = []
            for piece in template.generate(**request["variables"] | conversation):
                room -= len(piece)
                if room < 0:
                    raise ValueError(f"it renders more than {request['characters']} characters")
                pieces.append(piece)
            texts.append("".join(pieces))
    except MemoryError:
        error = f"it needs more than {request['bytes'] >> 20} MiB"
    except RecursionError:
        error = "its macros or blocks call each other without end"
    except Exception as raised:  # a template can raise any exception
        error = f"{type(raised).__name__}: {raised}"[:SHOWN]
    answer = {"texts": texts, "generation": Generation.is_used}
    return answer if error is None else answer | {"error": error, "index": index}


def answer(line: bytes) -> bytes:
    """Answer a request in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            request = json.loads(line)
            seconds, size = request["seconds"], request["bytes"]
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            with open(writing, "wb") as pipe:
                pipe.write(json.dumps(render(request)).encode())
            status = 0
        os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return json.dumps({"status": code}).encode() if code else reply


def main() -> None:
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
