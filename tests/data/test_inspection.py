"""Inspecting datasets: numbers that can be counted by hand, and every problem planted is found."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.data.inspect.composition import SplitUse
from maxmeg.data.inspect.contents import bin_range, inspect, inspection_text, summarize_lengths
from maxmeg.data.inspect.page import check_report, write_report
from maxmeg.data.samples.dataset import Use
from maxmeg.data.tokenizers.load import load_tokenizer

BYTES = load_tokenizer("bytes")


def write(prefix: Path, texts: list[str], eod: bool = True, **kind) -> str:
    with IndexedWriter(prefix, 257, **kind) as writer:
        for text in texts:
            ids = BYTES.encode(text).tolist()
            writer.add_document(ids + [256] * eod if ids else [], None if ids else [])
    return str(prefix)


@given(st.lists(st.integers(0, 70000), min_size=1, max_size=30))
def test_lengths_are_summarized_and_binned(values):
    found = summarize_lengths(np.array(values, np.int32))
    assert (found.smallest, found.largest, found.total) == (min(values), max(values), len(values))
    assert found.median == np.median(values) and abs(found.mean - np.mean(values)) < 1e-6
    for i, count in enumerate(found.counts):
        low, high = bin_range(i)
        assert count == sum(low <= value <= high for value in values)
    assert sum(found.counts) == len(values)


def test_a_clean_corpus_has_no_problems(tmp_path):
    prefix = write(tmp_path / "x", ["hello", "bye\x1b[2J", "hello world"])
    found = inspect(prefix, BYTES, verify=True)
    assert (found.num_tokens, found.num_bytes, found.dtype) == (26, 52, "uint16")
    assert (found.documents.total, found.documents.median, found.modes) == (3, 8, None)
    assert (found.problems, found.notes, found.checksums) == ((), (), "verified, all match")
    text = inspection_text(found)
    assert "26 tokens of uint16 (52 bytes) in 3 sequences of 3 documents" in text
    assert "tokens per document: min 6, median 8, mean 8.7, max 12" in text
    assert re.search(r"^ +4 to 7 +1 #{20}\n +8 to 15 +2 #{40}$", text, re.MULTILINE)
    assert "tokens per sequence" not in text and "problems: none found" in text
    assert "document 0, 6 of its 6 tokens:\nhello" in text
    # Control sequences of a corpus do not reach the terminal.
    shown = inspection_text(inspect(prefix, BYTES, document=1))
    assert "bye\\x1b[2J" in shown and "\x1b" not in shown


def test_everything_worth_knowing_is_reported(tmp_path):
    prefix = write(tmp_path / "x", ["", "ab", ""], eod=False, checksums=False, multimodal=True)
    text = inspection_text(inspect(prefix, BYTES))
    assert "2 of 3 documents are empty" in text
    assert "1 of 1 sampled documents do not end with the tokenizer's end-of-document id" in text
    assert "x.sums: damage to .bin would not be noticed" in text
    assert "multimodal: 1 of mode 0" in text and "tokens per sequence" in text
    assert "document 1, 2 of its 2 tokens:\nab" in text
    assert "97 98" in inspection_text(inspect(prefix))


def test_problems_are_found(tmp_path):
    prefix = write(tmp_path / "x", ["abc"])
    (problem,) = inspect(prefix, vocab_size=256).problems
    assert "id 256 is not in the vocabulary [0, 256)" in problem
    assert inspect(prefix).problems == ()
    Path(f"{prefix}.bin").write_bytes(bytes(8))
    (problem,) = inspect(prefix, BYTES, verify=True).problems
    assert "x.bin differs" in problem
    Path(f"{prefix}.sums").unlink()
    found = inspect(prefix, BYTES, verify=True)
    assert "--create" in found.problems[0] and "problem: " in inspection_text(found)
    with pytest.raises(ValueError, match=r"no document 1: choose one in \[0, 1\)"):
        inspect(prefix, document=1)


def test_a_report_shows_every_dataset_and_escapes_its_texts(tmp_path):
    prefixes = [write(tmp_path / name, ["abc", "<i>" * 3]) for name in ("a_<i>", "b")]
    found = [inspect(prefix, BYTES) for prefix in prefixes]
    use = Use("train", 4, 28, 2.0, 1.25)
    write_report(f"{tmp_path}/two.html", found, [SplitUse(use, ())], "maxmeg preprocess x")
    page = (tmp_path / "two.html").read_text()
    assert "<i>" not in page.replace("<i style", "") and "a_&lt;i&gt;" in page
    for part in ("2 datasets", "28", "50.0%", "1.250", "4 to 7", "maxmeg preprocess x"):
        assert part in page, part
    assert page.count("<pre>") == page.count("no problems found") == 2
    write_report(f"{tmp_path}/one.html", found[:1])
    assert "Share of the tokens" not in (tmp_path / "one.html").read_text()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", ["x.png", "none/x.html", "folder.html"])
def test_places_that_cannot_hold_a_report_are_refused(tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ValueError, match="--report="):
        check_report(f"{tmp_path}/{name}")
