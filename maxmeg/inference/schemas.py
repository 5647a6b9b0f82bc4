"""JSON schemas as llguidance follows them: stricter where its grammar allows what a validator
refuses, and an error where it cannot be made stricter."""

import json
import typing

VALUES = {"const", "enum", "default", "examples", "example"}  # keywords that hold no schemas
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
FORMATS = {  # of the standard; others describe a text and do not limit it
    *("date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
# Years from 1, as in Python's dates; February 29 in leap years only; no second 60.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURS = "(0[48]|[2468][048]|[13579][26])"
_DATE = f"({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])"
_DATE += f"|([0-9]{{2}}{_FOURS}|{_FOURS}00)-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9].*"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt ]{_TIME}$"}


def prepared(schema: typing.Any) -> typing.Any:
    """Return a schema whose texts, if llguidance takes it, validate against the one given.

    ValueError for what it would not follow.
    """
    if isinstance(schema, list):
        return [prepared(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not supported: leave it out")
    _check_repeats(schema)
    result = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: prepared(each) for name, each in value.items()}
        result[key] = value if key in VALUES else prepared(value) if key not in NAMED else value
    name = schema.get("format")
    if isinstance(name, str) and name not in FORMATS:
        del result["format"]
    if isinstance(name, str) and name in PATTERNS:
        pattern = {"pattern": PATTERNS[name]}
        result |= {"allOf": [*result.get("allOf", []), pattern]} if "pattern" in result else pattern
    return result


def _check_repeats(schema: dict) -> None:
    """ValueError where a name written twice could count as two properties."""
    least, required = schema.get("minProperties"), schema.get("required")
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    distinct = 1 + (len({*required}) if isinstance(required, list) else 0)
    if is_open and isinstance(least, int) and least > distinct:
        raise ValueError(
            f"minProperties={least} with additionalProperties or patternProperties needs "
            f"{least - 1} names in required: a reply could write one name twice"
        )


def escapes(schema: typing.Any) -> str:
    r"""Return the letters that may follow a backslash in texts. \u is allowed only for control
    characters in the schema: a name written with it would not be compared with `properties`."""
    return 'nrbtf\\"' + "u" * ("\\u00" in json.dumps(schema, ensure_ascii=False))
