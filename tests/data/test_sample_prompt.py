"""The prompt of the sample at the end of training, from a validation document of one's own."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_gpt_dataset import open_dataset

import maxmeg
from maxmeg.data.sample_prompt import PYTHON, sample_prompt
from maxmeg.data.samples.blending import blended
from maxmeg.data.source import Corpora
from maxmeg.data.tokenizers.load import load_tokenizer

EOD, SUM = 256, "1 + 2 = 3\n"


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({}, SUM, "1 + 2 ="),
        ({}, "A first sentence that goes on and on and on", "A first sentence that goes on"),
        ({}, "Ångström", "Ångs"),
        ({"log.sample_prompt": "Once"}, SUM, "Once"),
        ({"data.paths": ""}, SUM, PYTHON),
        ({"data.paths": "", "data.mock": True}, SUM, ""),
        ({"data.objective": "sft"}, SUM, ""),
        ({"model.attention.causal": False}, SUM, ""),
    ],
)
def test_a_sample_continues_the_users_own_text(settings, text, expected, make_corpus):
    prefix, source = make_corpus([[65, EOD], [EOD], [*text.encode(), EOD]]), object.__new__(Corpora)
    config = maxmeg.config("gpt", **{"data.paths": prefix, "model.max_position": 128} | settings)
    source.tokenizer = load_tokenizer("bytes")
    data = blended([open_dataset(prefix, 1, 4, "1,2,0")], [1.0], None)
    assert sample_prompt(config, source, data) == expected
    tokens = {"tokens": np.array([[*text.encode(), EOD, 7]])}
    made = SimpleNamespace(tokenizer=source.tokenizer, batch=lambda numbers: tokens)
    assert sample_prompt(config, made, made) == expected.replace(PYTHON, "1 + 2 =")
