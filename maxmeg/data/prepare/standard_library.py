"""Built-in corpora: the source files of Python's standard library, which every machine has, and the
sentences of their docstrings."""

import ast
import hashlib
import itertools
import json
import logging
import os
import sysconfig
from pathlib import Path

from maxmeg.config.data import Builtin
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.stored import atomic_folder
from maxmeg.data.prepare.documents import split_sentences
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


def docstrings(file: Path) -> list[str]:
    """The sentences of a file's docstrings; none of a file that this Python cannot read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    paragraphs = itertools.chain(*((text or "").split("\n\n") for text in texts))
    plain = (" ".join(paragraph.split()) for paragraph in paragraphs if ">>>" not in paragraph)
    return [*itertools.chain(*map(split_sentences, plain))]


def standard_library(
    cache_dir: str | os.PathLike, tokenizer_spec: str, builtin: Builtin = Builtin.source
) -> str:
    """The prefix of the tokenized corpus in `cache_dir`, which is made on first use.

    If several processes make it at once, one of them wins: a folder appears whole, by a rename.
    """
    final, sentences = folder_of(cache_dir, tokenizer_spec, builtin), builtin is Builtin.sentences
    prefix = output_prefix(str(final / "python"), "text", sentences)
    if not final.is_dir():
        options = Options(tokenizer_spec, append_eod=not sentences, split_sentences=sentences)
        with atomic_folder(final) as temporary:
            inputs = [*map(str, source_files())]
            if sentences:
                temporary.mkdir(parents=True)
                rows = ({"text": docstrings(Path(file))} for file in inputs)
                texts = "".join(json.dumps(row) + "\n" for row in rows if row["text"])
                (temporary / "docstrings.jsonl").write_text(texts, "utf-8")
                inputs = [str(temporary / "docstrings.jsonl")]
            report = prepare(inputs, str(temporary / "python"), options, 0)
        log.info(
            "corpus: %s files of Python's standard library%s, %s tokens",
            f"{report.documents:,}",
            " (the sentences of their docstrings)" * sentences,
            f"{report.tokens:,}",
        )
    IndexedDataset(prefix)  # ValueError for a damaged file
    return prefix


def folder_of(cache_dir: str | os.PathLike, tokenizer_spec: str, builtin: Builtin) -> Path:
    """The folder of the corpus in `cache_dir`."""
    name = "docstrings" if builtin is Builtin.sentences else "standard_library"
    identity = load_tokenizer(tokenizer_spec).identity
    return Path(cache_dir, f"{name}-" + identity.replace(":", "-"))
