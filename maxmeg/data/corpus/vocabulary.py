"""PREFIX.tokenizer: which tokenizer wrote a corpus, beside its .bin and .idx files.

Megatron-LM's files do not say it, and ids of another vocabulary train without an error.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from maxmeg.data.corpus import storage
from maxmeg.data.corpus.stored import write_atomically
from maxmeg.data.tokenizers.tokenizer import Tokenizer

SUFFIX = ".tokenizer"
SHOWN = 3  # corpora in a message

log = logging.getLogger("maxmeg")


def write_vocabulary(prefix: str, identity: str) -> None:
    """Write the tokenizer's identity; an empty identity removes the file."""
    path = Path(prefix + SUFFIX)
    if identity:
        write_atomically(path, json.dumps({"identity": identity}).encode() + b"\n")
    else:
        path.unlink(missing_ok=True)


def vocabulary_of(prefix: str) -> str:
    """Return the identity of the tokenizer of a corpus; empty without a file that says it."""
    if not _exists(prefix + SUFFIX):
        return ""
    try:
        with storage.open_input(prefix + SUFFIX) as file:
            return str(json.loads(file.read())["identity"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{prefix}{SUFFIX} is damaged ({error}): delete it") from error


def common_vocabulary(prefixes: Sequence[str]) -> str:
    """Return the tokenizer identity that these corpora share; empty if one has no such file.
    ValueError if they were written by different tokenizers."""
    identities = {prefix: vocabulary_of(prefix) for prefix in prefixes}
    prefix_of = {identity: prefix for prefix, identity in identities.items() if identity}
    if len(prefix_of) > 1:
        details = ", ".join(f"{prefix} by {identity}" for identity, prefix in prefix_of.items())
        raise ValueError(f"corpora of different tokenizers: {details}; prepare all with one")
    return next(iter(prefix_of)) if all(identities.values()) and prefix_of else ""


def _exists(path: str) -> bool:
    try:
        return storage.exists(path)
    except ValueError:  # without permission to list, missing objects are "forbidden"
        return False


def check_vocabularies(names: Sequence[str], tokenizer: Tokenizer, warns: bool) -> None:
    """ValueError for a corpus that was written with another tokenizer.

    names: prefixes of corpora; names of text files are ignored. warns: whether to log a warning for
    corpora without a .tokenizer file.
    """
    unknown = []
    for prefix in (name for name in names if _exists(f"{name}.idx")):
        identity = vocabulary_of(prefix)
        if identity and identity != tokenizer.identity:
            raise ValueError(
                f"{prefix} was written with the tokenizer {identity}, and data.tokenizer="
                f"{tokenizer.spec} is {tokenizer.identity}: set data.tokenizer to the one that "
                "wrote it, or preprocess the texts again"
            )
        if not identity:
            unknown.append(prefix)
    if unknown and warns:
        tail = f" and {len(unknown) - SHOWN} others" if len(unknown) > SHOWN else ""
        log.warning(
            f"{', '.join(unknown[:SHOWN])}{tail}: no {SUFFIX} file says which tokenizer wrote it; "
            f"make sure that it was data.tokenizer={tokenizer.spec}"
        )
