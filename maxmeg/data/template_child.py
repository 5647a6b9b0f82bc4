"""A chat template's own process: python template_child.py, a request in JSON on stdin.

{"template", "variables", "conversations", "marks", "seconds", "bytes", "characters"} -> on stdout
{"texts", "generation"}, whether there is a {% generation %} block, and where it stops early "error"
and "index". It imports nothing of maxmeg, and limits itself before it reads a template.
"""

import datetime
import json
import resource
import sys
import typing

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

SHOWN = 500  # characters of an error


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox; what is unsafe is refused when it is read, not when it is used."""

    def unsafe_undefined(self, obj: typing.Any, attribute: str) -> typing.Any:
        raise jinja2.exceptions.SecurityError(
            f"it reads the attribute {attribute!r} of a {type(obj).__name__}"
        )


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's text, and renders it."""

    tags: typing.ClassVar = {"generation"}
    marks: typing.ClassVar = ["", ""]  # of this process's request
    seen = False

    def parse(self, parser):
        Generation.seen = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("shown"), [], [], body).set_lineno(line)

    def shown(self, caller) -> str:
        before, after = self.marks
        return before + caller() + after


class Namespace(jinja2.utils.Namespace):
    """namespace() without names that Python keeps for itself."""

    def __init__(*args, **values):  # self among args: a value may have that name
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
    """What transformers offers to templates."""
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = to_json
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": Namespace,
    }
    return made


def render(request: dict) -> dict:
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
                    raise ValueError(f"it writes more than {request['characters']} characters")
                pieces.append(piece)
            texts.append("".join(pieces))
    except MemoryError:
        error = f"it needs more than {request['bytes'] >> 20} MiB"
    except RecursionError:
        error = "its macros or blocks call each other without end"
    except Exception as raised:  # a template can raise whatever Python can
        error = f"{type(raised).__name__}: {raised}"[:SHOWN]
    found = {"texts": texts, "generation": Generation.seen}
    return found if error is None else found | {"error": error, "index": index}


def main() -> None:
    request = json.load(sys.stdin)
    seconds, size = request["seconds"], request["bytes"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    json.dump(render(request), sys.stdout)


if __name__ == "__main__":
    main()
