"""The file of the chat page: its size, what it may load, and what may run in it."""

import base64
import hashlib
import re

from fake_api import PAGE


def test_the_page_is_small_and_loads_nothing():
    page = PAGE.read_text()
    assert len(page.splitlines()) <= 200
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|import |src=", page) == []


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone():
    page = PAGE.read_text()
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page, f"{tag} has changed: its hash is {digest}"
    assert "default-src 'none'; connect-src 'self';" in page
