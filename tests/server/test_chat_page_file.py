"""The file of the chat page: its size, what it may load, and what may run in it."""

import base64
import hashlib
import re

from fake_api import PAGE

from maxmeg.pages.templates import COLOURS

READABLE = 4.5  # contrast of text, WCAG 2.1 level AA


def test_the_page_is_small_and_loads_nothing():
    assert len(PAGE.splitlines()) <= 200
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|import |src=", PAGE) == []


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone():
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in PAGE, f"{tag} has changed: its hash is {digest}"
    assert "default-src 'none'; connect-src 'self';" in PAGE


def colour_of(text: str) -> list[float]:
    """Return red, green and blue (0 to 1) of a CSS color #rgb or #rrggbb."""
    digits = text[1:] if len(text) == 7 else "".join(2 * digit for digit in text[1:])
    return [value / 255 for value in bytes.fromhex(digits)]


def luminance(rgb: list[float]) -> float:
    parts = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb)
    return sum(part * weight for part, weight in zip(parts, (0.2126, 0.7152, 0.0722), strict=True))


def test_text_is_readable_in_light_and_dark():
    for scheme in (0, 1):
        colours = {name: colour_of(pair[scheme]) for name, pair in COLOURS.items()}
        for accent in ("accent", "bad"):  # behind questions and errors: 13 % of it
            mixed = zip(colours[accent], colours["card"], strict=True)
            colours[f"on {accent}"] = [0.13 * a + 0.87 * b for a, b in mixed]
        pairs = [("ink", "on accent"), ("soft", "on accent"), ("bad", "on bad"), ("on", "accent")]
        pairs += [(text, back) for text in ("ink", "soft", "accent") for back in ("page", "card")]
        for pair in pairs:
            low, high = sorted(luminance(colours[name]) for name in pair)
            assert (high + 0.05) / (low + 0.05) >= READABLE, (pair, scheme)
