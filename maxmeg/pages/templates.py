"""The Jinja templates of this folder, and what they are given."""

import base64
import hashlib

import jinja2

COLOURS = {  # in light and in dark mode; on: text on the accent
    "page": ("#f4f5f8", "#0e1013"),
    "card": ("#ffffff", "#181b21"),
    "ink": ("#1c2430", "#e8ebf0"),
    "soft": ("#566172", "#9aa4b2"),
    "line": ("#dfe3ea", "#2b3038"),
    "track": ("#e7e9ee", "#2a2f38"),
    "accent": ("#2f69cf", "#82aaf5"),
    "on": ("#ffffff", "#0e1013"),
    "good": ("#1b7f5c", "#4cc79b"),
    "bad": ("#b3261e", "#ff9d90"),
}
SERIES = ("#4c84e6", "#2fa37c", "#e8a33d", "#c65f8f", "#7d6bd6", "#45a6c4", "#b58863", "#8a94a6")


def colour(index: int) -> str:
    """The colour of the line, part or row with this number."""
    return SERIES[index % len(SERIES)]


def render(template: str, **values) -> str:
    """Fill in a template. Texts are escaped; a name without a value is an error."""
    return _ENVIRONMENT.get_template(template).render(values)


def _digest(text: str) -> str:
    """The hash by which a Content-Security-Policy allows a script or a style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("maxmeg.pages", ""),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: round(value, 2) if isinstance(value, float) else value,
)
_ENVIRONMENT.globals |= {"colour": colour, "colours": COLOURS}
_ENVIRONMENT.filters["digest"] = _digest
