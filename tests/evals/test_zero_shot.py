"""Zero-shot tasks: each token is scored once, with the context that Megatron-LM's windows give."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.evals.harness import HarnessModel
from maxmeg.evals.zero_shot import is_task, lambada, plain_wikitext, run_zero_shot, wikitext
from maxmeg.inference.load import Trained

CONTEXT, CLOSE = 16, 1e-4  # float32: paddings differ


@pytest.fixture(scope="module")
def trained() -> Trained:
    config = tiny({"init_std": 0.3, "max_position": CONTEXT}, fsdp=1)
    mesh = mesh_of(config)
    _, _, state = tiny_state(config, mesh)
    return Trained(state.model, config, load_tokenizer("null:61"), 0, mesh)


@pytest.fixture(scope="module")
def model(trained) -> HarnessModel:
    return HarnessModel(trained, 4)


forward = jax.jit(lambda model, ids_BL: model(ids_BL))


def log_probabilities(trained: Trained, ids) -> np.ndarray:
    """Of each next token after ids[:-1]."""
    padded = np.zeros((1, CONTEXT), int)
    padded[0, : len(ids) - 1] = ids[:-1]
    logits_LV = np.float64(forward(trained.model, jnp.asarray(padded))[0, : len(ids) - 1])
    log_LV = logits_LV - np.log(np.exp(logits_LV).sum(1, keepdims=True))
    return log_LV[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize(("length", "stride"), [(45, 5), (45, 16), (9, 5)])
def test_wikitext_scores_each_token_once(trained, model, tmp_path, length, stride):
    ids = np.random.default_rng(0).integers(0, 60, length)
    (tmp_path / "wiki").write_text(" ".join(map(str, ids)) + " \n")
    # As in Megatron-LM: windows of CONTEXT + 1 tokens, the last `stride` targets of all but one.
    nats, count = 0.0, 0
    for start in range(0, max(length - 1, 1), stride):
        window = ids[start : start + CONTEXT + 1]
        values = log_probabilities(trained, window)
        values = values if start == 0 else values[CONTEXT - stride :]
        nats, count = nats - values.sum(), count + len(values)
    assert count == length - 1
    found = wikitext(model, str(tmp_path / "wiki"), stride=stride)
    assert found["tokens"] == count and found["tokens_per_word"] == 1
    assert found["token_perplexity"] == pytest.approx(np.exp(nats / count), rel=CLOSE)
    assert found["word_perplexity"] == found["token_perplexity"]


def test_wikitext_is_made_plain():
    text = ' = = Cats = = \n The cat \'s tail ( 3 @.@ 5 m ) , " long " ; 1 @,@ 000 @-@ year . \n'
    plain = '== Cats ==\nThe cat\'s tail (3.5 m), "long"; 1,000-year.\n'
    assert plain_wikitext(text) == f" {plain}"


def test_lambada_asks_for_the_last_word(trained, tmp_path):
    random = np.random.default_rng(1)
    rows = [random.integers(0, 60, 9).tolist() for _ in range(5)]
    for row in rows[:2]:  # the word that the model predicts
        padded = np.zeros((1, CONTEXT), int)
        padded[0, :8] = row[:8]
        row[8] = int(np.argmax(forward(trained.model, jnp.asarray(padded))[0, 7]))
    lines = [json.dumps({"text": " ".join(map(str, row))}) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    nats = -np.mean([log_probabilities(trained, np.array(row))[-1] for row in rows])
    (line,) = run_zero_shot(trained, [f"lambada:{tmp_path}/a.jsonl"], 4)
    assert line == f"lambada: accuracy 0.4, word_perplexity {np.exp(nats):.6g}, passages 5"


def test_files_that_cannot_be_read(trained, model, tmp_path):
    assert is_task("lambada:x") and not is_task("lambada") and not is_task("lambada_openai")
    with pytest.raises(ValueError, match="task wikitext:none: there is no file none"):
        run_zero_shot(trained, ["wikitext:none"], 4)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    with pytest.raises(ValueError, match=r"a.jsonl line 1: a passage is an object with a text of"):
        lambada(model, str(tmp_path / "a.jsonl"))
    (tmp_path / "a").write_text("1")
    with pytest.raises(ValueError, match="holds no text of two words"):
        wikitext(model, str(tmp_path / "a"))
