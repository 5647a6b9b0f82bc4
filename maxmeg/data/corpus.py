"""The default corpus: the Python standard library's own source files, which are always there."""

import hashlib
import os
import sys
import sysconfig
import time
from pathlib import Path

from maxmeg.data.documents import TEXT
from maxmeg.data.encoding import Chunk, Options, encode_chunk, output_prefix, write_all
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.stored import appearing
from maxmeg.data.tokenizers import load_tokenizer

# Packages of others, tests, and long tables that are data more than text.
_EXCLUDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3",
    "encodings", "pydoc_data", "ensurepip", "__phello__",
}  # fmt: skip
_SEED = b"maxmeg"  # of the files' order, the same for everybody


def source_files(folder: Path | None = None) -> list[Path]:
    """The corpus's files in an order that mixes all packages, so that any range is like another."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        found += [
            Path(here, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not found:
        raise ValueError(f"{folder} holds no Python sources: name a corpus with data.paths")

    def rank(path: Path) -> bytes:
        return hashlib.sha256(_SEED + path.relative_to(folder).as_posix().encode()).digest()

    return sorted(found, key=rank)


def standard_library(cache_dir: str | os.PathLike, tokenizer_spec: str) -> str:
    """Prefix of the tokenized corpus in `cache_dir`, which is made on first use.

    Processes that start at once each make it and one of them wins: a folder appears whole, by a
    rename, or not at all.
    """
    tokenizer = load_tokenizer(tokenizer_spec)
    name = "standard_library-" + tokenizer.identity.replace(":", "-")
    final = Path(cache_dir) / name
    prefix = output_prefix(str(final / "python"), "text")
    if not final.is_dir():
        _make(final, tokenizer_spec)
    IndexedDataset(prefix)  # names a damaged file, and what to do
    return prefix


def _make(final: Path, tokenizer_spec: str) -> None:
    tokenizer = load_tokenizer(tokenizer_spec)
    options = Options(tokenizer_spec, append_eod=True)
    start = time.monotonic()
    with appearing(final) as temporary:
        chunks = (Chunk(TEXT, (str(path),)) for path in source_files())
        encoded = (encode_chunk(chunk, options, tokenizer) for chunk in chunks)
        report = write_all(encoded, str(temporary / "python"), options, tokenizer)
    print(
        f"corpus: {report.documents:,} files of Python's standard library, {report.tokens:,} "
        f"tokens, made in {time.monotonic() - start:.1f} s in {final}",
        file=sys.stderr,
    )
