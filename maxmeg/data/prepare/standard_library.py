"""The default corpus: the source files of Python's standard library, which every machine has."""

import hashlib
import logging
import os
import sysconfig
from pathlib import Path

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.stored import atomic_folder
from maxmeg.data.prepare.encoding import Options, output_prefix
from maxmeg.data.prepare.run import prepare
from maxmeg.data.tokenizers.load import load_tokenizer

log = logging.getLogger("maxmeg")

# Third-party packages, tests, and long tables that are data rather than text.
_EXCLUDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3",
    "encodings", "pydoc_data", "ensurepip", "__phello__",
}  # fmt: skip
_SEED = b"maxmeg"  # seed of the order of the files


def source_files(folder: Path | None = None) -> list[Path]:
    """The files of the corpus in a pseudo-random order, so that any range mixes all packages."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        files += [
            Path(here, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        raise ValueError(f"{folder} holds no Python sources: name a corpus with data.paths")

    def rank(path: Path) -> bytes:
        return hashlib.sha256(_SEED + path.relative_to(folder).as_posix().encode()).digest()

    return sorted(files, key=rank)


def standard_library(cache_dir: str | os.PathLike, tokenizer_spec: str) -> str:
    """The prefix of the tokenized corpus in `cache_dir`, which is made on first use.

    If several processes make it at once, one of them wins: a folder appears whole, by a rename.
    """
    tokenizer = load_tokenizer(tokenizer_spec)
    final = Path(cache_dir, "standard_library-" + tokenizer.identity.replace(":", "-"))
    prefix = output_prefix(str(final / "python"), "text")
    if not final.is_dir():
        options = Options(tokenizer_spec, append_eod=True)
        with atomic_folder(final) as temporary:
            report = prepare(list(map(str, source_files())), str(temporary / "python"), options, 0)
        log.info(
            "corpus: %s files of Python's standard library, %s tokens",
            *(f"{number:,}" for number in (report.documents, report.tokens)),
        )
    IndexedDataset(prefix)  # ValueError for a damaged file
    return prefix
