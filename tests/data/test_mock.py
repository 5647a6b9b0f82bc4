"""Mock data: a corpus that nobody wrote, read as any other."""

import pickle

import numpy as np

from maxmeg.config.schema import Config
from maxmeg.config.validate import validate
from maxmeg.data.build import build_dataset, build_validation, open_corpus
from maxmeg.data.corpus.mock import MockCorpus
from maxmeg.data.samples.gpt import GptDataset


def test_documents_count_and_end():
    data = MockCorpus(100, 99)
    assert len(data) == 100_000 and data.num_tokens == data.lengths.sum()
    for i in (0, 7, 99_999):
        length = int(data.lengths[i])
        document = data.get(i)
        assert document.dtype == np.int32 and document[-1] == 99 and len(document) == length
        assert (document[:-1] == np.arange(1, length) % 100).all()
        assert (data.get(i, 3, length - 5) == document[3:-2]).all()
    some = data.tokens[0 : data.starts(np.array([5]))[0]]
    assert (some == np.concatenate([data.get(i) for i in range(5)])).all()
    assert not len(data.tokens[4:4])


def test_a_run_reads_it_without_files(tmp_path):
    config = Config()
    config.data.mock, config.data.sequence_length = True, 64
    config.data.reset_attention_mask = True
    validate(config, 1)
    tokenizer, prefixes = open_corpus(config.data, str(tmp_path))
    parts = []
    for index in range(3):
        data = build_dataset(config.data, prefixes, tokenizer, index, 1234, samples=50)
        assert isinstance(data, GptDataset)
        batch = data.batch(np.arange(20))
        follows = (batch["tokens"] + 1) % tokenizer.vocab_size == batch["targets"]
        assert follows.mean() > 0.99 and batch["segment_ids"].max() < 5
        again = pickle.loads(pickle.dumps(data)).batch(np.arange(20))
        assert all((again[name] == batch[name]).all() for name in batch)
        parts.append(data.ranges[0])
    assert parts == [(0, 33_333), (33_333, 66_667), (66_667, 100_000)]
    assert list(build_validation(config, prefixes, tokenizer)) == [""]
    assert not list(tmp_path.iterdir())
