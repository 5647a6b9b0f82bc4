"""The prompt of the sample that training writes at its end."""

from collections.abc import Iterable

import numpy as np

from maxmeg.config.data import Objective
from maxmeg.config.schema import Config
from maxmeg.config.source import has_prompt
from maxmeg.data.samples.blending import Blend
from maxmeg.data.samples.dataset import Dataset
from maxmeg.data.samples.gpt import GptDataset
from maxmeg.data.source import Corpora, Source
from maxmeg.data.tokenizers.tokenizer import Tokenizer

PYTHON = "class Reader:\n    def "  # for the built-in corpus
_TOKENS, _SEQUENCES = 32, 16  # most tokens of a prompt, and sequences that are searched for one


def sample_prompt(config: Config, source: Source, data: Dataset) -> str:
    """Return log.sample_prompt, and for "auto" the first words of a document of `data`.

    They are a line of Python for the built-in corpus, and "" for mock data, for chats and for
    models that do not continue text.
    """
    log, model, settings = config.log, config.model, config.data
    if has_prompt(config) or not log.sample_prompt:
        return log.sample_prompt
    continues = model.attention.causal and not model.has_source and not model.head.num_classes
    if not continues or settings.mock or settings.objective is Objective.sft:
        return ""
    if isinstance(source, Corpora) and not settings.names_corpus:
        return PYTHON
    return first_words(data, source.tokenizer, min(_TOKENS, model.max_position // 2))


def first_words(data: Dataset, tokenizer: Tokenizer, count: int) -> str:
    """Return the text of the first `count` tokens of a document without its last word."""
    for ids in beginnings(data, count):
        ends = np.flatnonzero(ids == tokenizer.eod)
        text = tokenizer.decode(ids[: ends[0] if ends.size else count].tolist()).rstrip()
        *words, last = text.split() or [""]
        if text:
            return text[: -len(last) if words else len(text) // 2].rstrip()
    return ""


def beginnings(data: Dataset, count: int) -> Iterable[np.ndarray]:
    """Yield the first tokens of a few documents; of datasets made in Python, of a sample."""
    while isinstance(data, Blend):
        data = data.members[0]
    if not isinstance(data, GptDataset):
        yield data.batch(np.array([0]))["tokens"][0, :count]
        return
    for corpus, (begin, end) in zip(data.corpora, data.ranges, strict=True):
        for sequence in range(begin, min(end, begin + _SEQUENCES)):
            yield corpus.get(sequence, 0, min(count, int(corpus.lengths[sequence])))
