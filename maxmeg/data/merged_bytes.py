"""GPT-2's byte pairs merged by tiktoken, several times as fast, where it must give the same ids.

`tokenizers` merges the pairs of a list, tiktoken any two neighbours whose bytes are a token; both
take the pair that comes first in the list, or by its id. Suppose tiktoken merges a pair (x, y) that
is not in the list, as the first such, into the token t. No merge crossed the ends of t's bytes
before, so within them all went as if they were the whole text: encoding t alone with the list comes
to (x, y) as well, and stops there. So if the ids have the order of the list, and the list encodes
every token's own bytes to that token, there is no such pair.
"""

import itertools
import json
from typing import Any

# GPT-2's, written without backtracking.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def byte_letters() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def merged_bytes(vocabulary: bytes, merges: bytes) -> Any | None:
    """A tiktoken.Encoding by what vocab.json and merges.txt hold; None where it might differ."""
    import tiktoken
    import tokenizers

    ids: dict[str, int] = json.loads(vocabulary)
    lines = [line for line in merges.decode("utf-8").split("\n") if line]
    pairs = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
    letters = byte_letters()
    made = ["".join(pair) for pair in pairs]
    if not all(len(pair) == 2 for pair in pairs) or not {*letters, *made} <= ids.keys():
        return None
    order = [ids[token] for token in made]
    if any(b <= a for a, b in itertools.pairwise(order)):
        return None
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ids, pairs))
    encoded = model.encode_batch_fast(made, add_special_tokens=False)
    if any(one.ids != [i] for one, i in zip(encoded, order, strict=True)):
        return None
    ranks = {bytes(letters[c] for c in token): ids[token] for token in (*letters, *made)}
    if len(set(ranks.values())) < len(ranks):
        return None
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
