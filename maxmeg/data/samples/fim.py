"""Fill in the middle (Bavarian et al. 2022), by Megatron-LM's rules.

Documents within a sample are cut at two random characters into prefix, middle and suffix, which are
then reordered, with sentinel tokens between them. Megatron-LM draws from one random stream, so its
samples depend on the samples that were read before; here every sample has its own stream.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from maxmeg.config.data import DataConfig
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer

SENTINELS = ("prefix", "middle", "suffix", "pad")


@dataclasses.dataclass(frozen=True)
class FimRules:
    """Rates and tokens of DataConfig; with a `split` token, fragments between such tokens are
    permuted."""

    rate: float
    spm_rate: float
    fragment_rate: float
    sentinels: Mapping[str, int]
    eod: int
    split: int | None = None
    no_prefix: str = ""


class Fim:
    """Applies fill-in-the-middle to samples; the length stays the same, with padding at the end."""

    def __init__(self, rules: FimRules, tokenizer: Tokenizer, seed: int) -> None:
        self.rules, self.tokenizer, self.seed = rules, tokenizer, seed
        self._special = tokenizer.special_ids

    def __reduce__(self) -> tuple:
        return _remade, (self.rules, self.tokenizer.spec, self.seed)

    def __call__(self, text: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows, number of tokens before the padding of each) for samples with these numbers."""
        permuted, lengths = np.full_like(text, self.rules.sentinels["pad"]), []
        for row, (tokens, sample) in enumerate(zip(text, samples.tolist(), strict=True)):
            stream = np.random.RandomState([self.seed & 0xFFFFFFFF, sample >> 32, sample % 2**32])
            new = self.transform(tokens, stream)[: len(tokens)]
            permuted[row, : len(new)] = new
            lengths.append(len(new))
        return permuted, np.array(lengths)

    def transform(self, tokens: np.ndarray, stream: np.random.RandomState) -> np.ndarray:
        """Permute one sample, before it is cut or padded; draws random numbers as Megatron-LM
        does."""
        return self._by_parts(tokens, self.rules.eod, lambda part: self._document(part, stream))

    def _by_parts(self, tokens: np.ndarray, separator: int, change: Callable) -> np.ndarray:
        """Apply `change` to the parts between separators; empty parts are dropped with their
        separator, except at the end."""
        pieces, start = [], 0
        for at in np.flatnonzero(tokens == separator).tolist():
            if at > start:
                pieces += [change(tokens[start:at]), [separator]]
            start = at + 1
        return np.concatenate([*pieces, change(tokens[start:])]).astype(np.int64)

    def _document(self, tokens: np.ndarray, stream: np.random.RandomState) -> np.ndarray:
        rules = self.rules
        if rules.split is None or not (tokens == rules.split).any():
            return self._permuted(tokens, rules.rate, stream)
        if not stream.binomial(1, rules.rate):
            return tokens
        rate = rules.fragment_rate
        return self._by_parts(tokens, rules.split, lambda part: self._permuted(part, rate, stream))

    def _permuted(
        self, tokens: np.ndarray, rate: float, stream: np.random.RandomState
    ) -> np.ndarray:
        if not stream.binomial(1, rate):
            return tokens
        text = self.tokenizer.decode(t for t in tokens.tolist() if t not in self._special)
        if self.rules.no_prefix and text.startswith(self.rules.no_prefix):
            return tokens
        low, high = sorted(stream.randint(low=0, high=len(text) + 1, size=2).tolist())
        parts = (text[:low], text[low:high], text[high:])
        prefix, middle, suffix = (self.tokenizer.encode(part) for part in parts)
        begin, mid, end = ([self.rules.sentinels[name]] for name in SENTINELS[:3])
        if stream.binomial(1, self.rules.spm_rate):  # suffix-prefix-middle (SPM)
            return np.concatenate([begin, end, suffix, mid, prefix, middle])
        return np.concatenate([begin, prefix, end, suffix, mid, middle])


def make_fim(config: DataConfig, tokenizer: Tokenizer, seed: int, vocab_size: int) -> Fim:
    """The transform that the settings ask for. ValueError for tokens that do not exist."""
    rates = (config.fim_rate, config.fim_spm_rate, config.fim_fragment_rate)
    sentinels = sentinel_ids(config.fim_tokens, tokenizer, vocab_size)
    split = None
    if config.fim_split:
        split = token_of(config.fim_split, "data.fim_split", tokenizer, vocab_size)
    rules = FimRules(*rates, sentinels, tokenizer.eod, split, config.fim_no_prefix)
    return Fim(rules, tokenizer, seed)


def _remade(rules: FimRules, spec: str, seed: int) -> Fim:
    return Fim(rules, load_tokenizer(spec), seed)


def sentinel_ids(names: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    """The token ids of SENTINELS, from names or numbers of tokens."""
    ids = [token_of(name, "data.fim_tokens", tokenizer, vocab_size) for name in names]
    if len(set(ids[:3])) < 3:
        raise ValueError(f"data.fim_tokens={','.join(names)} must be distinct tokens")
    return dict(zip(SENTINELS, ids, strict=True))


def token_of(name: str, setting: str, tokenizer: Tokenizer, vocab_size: int) -> int:
    """The id of a token, from its name or number."""
    token = tokenizer.token_id(name)
    token = int(name) if token is None and name.isdecimal() else token
    if token is None or token >= vocab_size:
        raise ValueError(
            f"{setting}: {name!r} is neither a token of {tokenizer.spec} nor an id below "
            f"{vocab_size}: give the name or the id of a token"
        )
    return token
