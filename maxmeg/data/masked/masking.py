"""Choose the masked tokens of a sample: whole words and runs of words, as Megatron-LM draws
them."""

import bisect
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from maxmeg.config.data import MASKED_SHARE
from maxmeg.data.corpus.indexed import check_vocabulary
from maxmeg.data.tokenizers.tokenizer import Tokenizer

_CONTINUES = "##"  # prefix of pieces that continue a word
_GEOMETRIC = 0.2  # from SpanBERT, https://arxiv.org/abs/1907.10529 section 3.1


@dataclasses.dataclass(frozen=True)
class Masking:
    """How many tokens are masked, and in what runs; the defaults are those of Megatron-LM's BERT.

    probability: share of the tokens. max_ngram: the largest number of words in a run; the number is
    drawn with weights 1/n (reversed with prefers_longer), or from a geometric distribution.
    whole_words: mask all pieces of a word together. short_probability: share of samples that are
    made shorter.
    """

    probability: float = MASKED_SHARE
    max_ngram: int = 3
    whole_words: bool = True
    prefers_longer: bool = False
    geometric: bool = False
    short_probability: float = 0.1


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What masking needs of a tokenizer: special tokens, and the tokens that continue a word
    ("##...")."""

    size: int
    continues: np.ndarray  # bool [size]
    pad: int
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    sentinels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        special = [self.cls, self.sep, self.mask, self.bos, self.eos, *self.sentinels]
        if self.pad in special:
            raise ValueError(
                f"the padding id {self.pad} is also another special token's: padding could not be "
                "told from text; use a tokenizer with a padding token of its own"
            )

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int = 0) -> "Vocabulary":
        """From a tokenizer; its end-of-document token ends T5's texts. vocab_size: number of valid
        ids; 0 means the tokenizer's."""
        if tokenizer.pad is None:
            raise ValueError(
                f"{tokenizer.spec} has no padding token, which masked samples need: use a "
                "tokenizer that has one"
            )
        size = vocab_size or tokenizer.vocab_size
        # A single piece is decoded as it is written in the vocabulary.
        continues = [tokenizer.decode([i]).startswith(_CONTINUES) for i in range(size)]
        special = {name: getattr(tokenizer, name) for name in ("cls", "sep", "mask", "bos")}
        eos = None if tokenizer.eod == tokenizer.pad else tokenizer.eod
        sentinels = tuple(i for i in tokenizer.sentinels if i < size)
        return cls(
            size, np.array(continues), tokenizer.pad, eos=eos, sentinels=sentinels, **special
        )

    def need(self, *names: str) -> list[int]:
        """The ids of special tokens that an objective requires; ValueError where one is missing."""
        missing = [name for name in names if getattr(self, name) in (None, ())]
        if missing:
            raise ValueError(
                f"the tokenizer has no {', '.join(missing)} token: use one that was made for this "
                "objective"
            )
        return [getattr(self, name) for name in names]

    def check(self, tokens: np.ndarray, where: str) -> None:
        """ValueError where one of the tokens, which are from `where`, is not in the vocabulary."""
        check_vocabulary(tokens, self.size, where)


def masked_spans(
    tokens: np.ndarray,
    target: int,
    rules: Masking,
    vocabulary: Vocabulary,
    random: np.random.RandomState,
    replace: Callable[[int], None] = lambda position: None,
) -> list[list[int]]:
    """The masked positions, one list per run of words, in the order in which they are drawn.

    target: the intended number of tokens of the sample. replace: called with each position when it
    is chosen; it may draw from `random`.
    """
    special = np.zeros(len(tokens), bool)
    for token in (vocabulary.cls, vocabulary.sep):
        if token is not None:
            special |= tokens == token
    (positions,) = np.nonzero(~special)
    starts = np.ones(len(positions), bool)
    if rules.whole_words:
        starts = ~vocabulary.continues[tokens[positions]]
        starts[:1] = True  # the rest of a word that began before the sample
    (begins,) = np.nonzero(starts)
    bounds = [*begins.tolist(), len(positions)]
    count = len(begins)
    places = positions.tolist()
    # As in Megatron-LM the first operand is not rounded: very short samples may have no mask.
    most = min(rules.probability * target, max(1, round(len(tokens) * rules.probability)))
    order = np.arange(count)
    random.shuffle(order)
    ngrams = _ngrams(rules)
    is_masked = bytearray(len(tokens))
    spans: list[list[int]] = []
    total = 0
    for word in order.tolist():
        if total >= most:
            break
        if rules.geometric:
            n = min(int(random.geometric(_GEOMETRIC)), rules.max_ngram)
        else:
            n = bisect.bisect_right(ngrams, random.random()) + 1
        begin = bounds[word]
        while n and total + bounds[min(word + n, count)] - begin > most:
            n -= 1
        if not n:
            continue
        chosen = places[begin : bounds[min(word + n, count)]]
        if any(is_masked[position] for position in chosen):
            continue
        for position in chosen:
            is_masked[position] = 1
            replace(position)
        total += len(chosen)
        spans.append(chosen)
    return spans


@functools.cache
def _ngrams(rules: Masking) -> list[float]:
    """Cumulative probabilities of 1, 2, ... words, rounded as in NumPy's `choice`, whose last
    bit sometimes decides."""
    weights = 1.0 / np.arange(1, rules.max_ngram + 1)
    weights = weights / weights.sum()
    if rules.prefers_longer:
        weights = weights[::-1]
    weights = weights / weights.sum()
    cumulative = weights.cumsum()
    return (cumulative / cumulative[-1]).tolist()
