"""Samples of T5: golden ones of Megatron-LM's, and that no token is lost."""

import dataclasses
import pickle

import numpy as np
import pytest
from masked_corpus import BOS, EOS, SENTINELS, corpus, vocabulary

from maxmeg.data.masked.masking import Masking
from maxmeg.data.masked.sentences import SentenceOrder
from maxmeg.data.masked.t5 import T5Dataset

# megatron-core 0.16.1, seed 1234, 20 and 16 tokens, probability 0.3: encoder, decoder
GOLDEN = [
    ([6, 13, 20, 54, 41, 48, 7, 14, 21, 28, 35, 55], [4, 54, 27, 34, 55, 42, 49]),
    ([54, 15, 22, 29, 36, 43, 55], [4, 54, 8, 55, 50]),
    ([54, 15, 22, 55, 36, 43, 50], [4, 54, 8, 55, 29]),
]
RULES = Masking(0.3, 10, geometric=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def test_samples_equal_the_golden_ones(data):
    ours = T5Dataset(data, "1,0,0", 0, (20, 16), vocabulary(), RULES, SentenceOrder(1234, 6))
    batch = ours.batch(np.arange(len(GOLDEN)))
    for row, (encoder, decoder) in enumerate(GOLDEN):
        size, width = len(encoder), len(decoder)
        assert batch["encoder_tokens"][row].tolist() == encoder + [0] * (20 - size)
        assert batch["encoder_segment_ids"][row].tolist() == [1] * size + [0] * (20 - size)
        assert batch["tokens"][row].tolist() == decoder + [0] * (16 - width)
        assert batch["targets"][row].tolist() == [*decoder[1:], EOS] + [0] * (16 - width)
        assert batch["segment_ids"][row].tolist() == [1] * width + [0] * (16 - width)
        assert batch["loss_mask"][row].tolist() == [1] * width + [0] * (16 - width)
    again = pickle.loads(pickle.dumps(ours)).batch(np.arange(len(GOLDEN)))
    assert all((again[name] == batch[name]).all() for name in batch)


def test_encoder_and_decoder_hold_every_token_once(data):
    ours = T5Dataset(data, "1,0,0", 0, (14, 16), vocabulary(), RULES, SentenceOrder(5, 60))
    batch = ours.batch(np.arange(ours.num_samples))
    for row in range(ours.num_samples):
        sentences, target = ours.sentences(row, np.random.RandomState())
        decoder = batch["tokens"][row][batch["segment_ids"][row] > 0].tolist()
        assert decoder.pop(0) == BOS
        spans: dict[int, list[int]] = {}
        for token in decoder:
            if token in SENTINELS:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert tuple(spans) == SENTINELS[: len(spans)] and all(spans.values())
        encoder = batch["encoder_tokens"][row][batch["encoder_segment_ids"][row] > 0].tolist()
        whole = [token for piece in encoder for token in spans.pop(piece, [piece])]
        assert whole == np.concatenate(sentences)[:target].tolist() and not spans


def test_invalid_input_is_refused(data):
    def opened(names, **rules):
        return T5Dataset(data, "1,0,0", 0, (20, 8), names, Masking(**rules), SentenceOrder(1, 9))

    for missing in ({"bos": None}, {"eos": None}, {"sentinels": ()}):
        with pytest.raises(ValueError, match=f"no {next(iter(missing))} token"):
            opened(dataclasses.replace(vocabulary(), **missing))
    few = dataclasses.replace(vocabulary(), sentinels=SENTINELS[:1])
    with pytest.raises(ValueError, match="the tokenizer 1 sentinels"):
        opened(few, probability=0.5, max_ngram=1).batch(np.arange(9))
    with pytest.raises(ValueError, match="tokens of the decoder, which has 8"):
        opened(vocabulary(), probability=0.5, max_ngram=3).batch(np.arange(9))
