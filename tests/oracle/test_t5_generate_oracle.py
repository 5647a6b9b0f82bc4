"""T5: an imported folder writes the greedy text of transformers, of sources of different lengths at
once, with the tokenizer's own end of the source and the decoder's first token."""

import json
import re

import numpy as np
import pytest
import torch
from hf_cases import encoder_decoders
from test_generate_oracle import COUNT
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

import maxmeg
from maxmeg import generate
from maxmeg.hf.convert import import_model, open_folder
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling

LENGTHS = (30, 7, 1, 19)
SPECIAL = "<[a-z_0-9]+>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
STARTS = ["▁" + letter for letter in LETTERS]
PIECES = ["<pad>", "</s>", "<unk>", "▁", *LETTERS, *STARTS, "th", "er"]
CASES = encoder_decoders()
TEXTS = ["translate this", "a", "the <extra_id_0> of her other <extra_id_1>", "those there " * 4]


def tokenizer() -> T5Tokenizer:
    pieces = [(piece, -float(number)) for number, piece in enumerate(PIECES)]
    return T5Tokenizer(vocab=pieces, extra_ids=5)


@pytest.fixture(params=CASES)
def folder(request, tmp_path):
    """A model whose text depends on its source, with a tokenizer, in their files."""
    settings = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = T5Config(**CASES[request.param][1] | {"vocab_size": len(tokenizer())} | settings)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    if request.param == "t5 v1.1":  # as its files have it, although the class ties weights
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "block" in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    tokenizer().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs", model.eval()


def theirs_greedy(model, ids: list, **settings) -> torch.Tensor:
    longest = max(map(len, ids))
    rows = [np.pad(row, (0, longest - len(row))) for row in ids]
    masks = [np.arange(longest) < len(row) for row in ids]
    arrays = {"input_ids": rows, "attention_mask": masks}
    arrays = {name: torch.tensor(np.array(rows, np.int64)) for name, rows in arrays.items()}
    settings |= {"max_new_tokens": COUNT, "do_sample": False}
    settings["use_cache"] = False  # theirs fails if the decoder has other depths than the encoder
    return model.generate(**arrays, **settings)[:, 1:]


def test_greedy_text_equals_transformers(folder, tmp_path):
    theirs_folder, theirs = folder
    import_model(open_folder(theirs_folder), tmp_path / "run")
    ours = maxmeg.load(tmp_path / "run", dtype="float32")
    rng, size = np.random.default_rng(0), len(tokenizer())
    sources = [rng.integers(3, size, length) for length in LENGTHS]
    wanted = theirs_greedy(theirs, sources, eos_token_id=None)
    replies = ours.engine.generate(sources, Request(COUNT, Sampling(temperature=0)))
    np.testing.assert_array_equal([reply.tokens for reply in replies], wanted.numpy())
    assert len({*map(tuple, wanted.tolist())}) > 2 and len(np.unique(wanted)) > 4

    theirs_tokenizer = tokenizer()
    ids = [theirs_tokenizer(text).input_ids for text in TEXTS]
    assert [ours.encode(text).tolist() for text in TEXTS] == ids
    tokens = theirs_greedy(theirs, ids)
    wanted = theirs_tokenizer.batch_decode(tokens, skip_special_tokens=True)
    lines = [json.dumps({"prompt": text}) + "\n" for text in TEXTS]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "output.jsonl"
    prompts.write_text("".join(lines))
    files = {"prompts": str(prompts), "output": str(output), "dtype": "float32"}
    settings = {"temperature": 0.0, "num_tokens": COUNT}
    generate.main(generate.Options(run_dir=str(tmp_path / "run"), **files, **settings))
    found = [json.loads(line)["completion"] for line in output.read_text().splitlines()]
    found = [re.sub(SPECIAL, "", text).strip() for text in found]  # ours shows them
    assert found == [text.strip() for text in wanted] and len({*found}) > 2
