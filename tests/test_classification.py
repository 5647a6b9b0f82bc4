"""Classifiers of texts, words and choices: the same losses and gradients on every layout; a run
that learns, is evaluated as a whole, resumes bit for bit and predicts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import (
    BATCH,
    LENGTH,
    VOCAB,
    assert_equal_but_rounding,
    batch_gradients,
    first_samples,
    named_gradients,
    on_host,
    tiny,
)
from short_runs import curve
from tables import thinned

import maxmeg
from maxmeg import evaluate
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.config.data import Objective
from maxmeg.config.mixers import Activation
from maxmeg.config.model import DType, Norm, NormPlace, Position
from maxmeg.config.validate import validate
from maxmeg.data.labelled.dataset import LabelledDataset
from maxmeg.data.labelled.rows import Rows
from maxmeg.hf.convert import export_model, import_model, open_folder
from maxmeg.hf.families.read import model_config
from maxmeg.layers.context import Context
from maxmeg.models.lm import language_model
from maxmeg.objectives.table import OBJECTIVES

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-8  # for gradients that are zero in exact arithmetic
SLOW = pytest.mark.slow
ENCODER = {
    **{"norm": Norm.layernorm, "norm_place": NormPlace.post_residual, "attention.causal": False},
    **{"position": Position.learned, "max_position": LENGTH, "mlp.bias": True},
    **{"bert.token_types": 2, "bert.embedding_norm": True, "bert.pooler": True},
    **{"attention.bias_qkv": True, "attention.bias_out": True, "mlp.activation": Activation.gelu},
}
CASES = [
    pytest.param(Objective.classify, {"pipe": 2, "tensor": 2, "fsdp": 2}, 4, marks=SLOW),
    pytest.param(Objective.tag, {"data": 2, "fsdp": 1, "context": 2, "tensor": 2}, 2, marks=SLOW),
]


def examples(objective: Objective) -> LabelledDataset:
    """Random examples; the shortest texts have one token."""
    random = np.random.default_rng(0)
    choices = 3 if objective is Objective.choose else 1
    lengths = random.integers(1, LENGTH // choices + 1, BATCH * choices)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    labels = np.full(starts[-1], -1)
    if objective is Objective.tag:
        labels = random.integers(-1, 4, starts[-1])
    elif objective is Objective.choose:
        labels[starts[:-1]] = random.permuted([[0, 1, 0]] * BATCH, axis=1).reshape(-1)
    else:
        labels[starts[:-1]] = random.integers(0, 4, BATCH)
    ids = random.integers(0, VOCAB, starts[-1])
    rows = Rows(ids, labels, starts, lengths // 2, np.arange(0, BATCH * choices + 1, choices))
    return LabelledDataset(rows, LENGTH, VOCAB, choices > 1)


def gradients(objective: Objective, parallel: dict, micro_batch_size: int, dropout: float = 0.1):
    """(metrics, confusion, gradients by name in model order, model, batch) of a batch."""
    classes = 1 if objective is Objective.choose else 4
    head = {"head.num_classes": classes, "head.dropout": dropout, "num_layers": 4, "tied": True}
    config = tiny(ENCODER | head, {"micro_batch_size": micro_batch_size}, **parallel)
    config.data.objective, config.data.paths = objective, ("file",)
    config.data.labels = () if classes == 1 else tuple("abcd")
    sums, found, model, batch = batch_gradients(config, first_samples(examples(objective).batch))
    return OBJECTIVES[objective].metrics(sums), found, sums.get("confusion"), model, batch


@pytest.mark.parametrize(("objective", "parallel", "micro"), CASES)
def test_layout_equals_one_device(objective, parallel, micro):
    wanted, found = (
        gradients(objective, *layout) for layout in (({"fsdp": 1}, 0), (parallel, micro))
    )
    assert_equal_but_rounding(found, wanted, TOLERANCE, FLOOR)
    np.testing.assert_array_equal(found[2], wanted[2])


@pytest.mark.parametrize("objective", thinned([Objective.choose, Objective.classify], 2))
def test_loss_is_cross_entropy_of_the_scored_tokens(objective):
    *found, _, model, batch = gradients(objective, {"fsdp": 1}, 0, dropout=0.0)

    def loss(model):
        rows = jax.tree.map(lambda array: array[0], batch)
        ctx = Context(rows.positions, rows.segment_ids, token_types_BL=rows.extra["token_types"])
        x, _, _ = model.stack(model.embed_tokens(rows.tokens, ctx), ctx)
        pooled_BLD = jnp.tanh(model.bert.pooler(model.normed(x["target"])))
        logits_BLC = model.classifier.linear(pooled_BLD)
        if objective is Objective.choose:  # one of three places
            places_B3 = jax.vmap(lambda row: jnp.flatnonzero(row, size=3))(rows.targets)
            scores_BC = jnp.take_along_axis(logits_BLC[..., 0], places_B3, axis=1)
            answers_B = jnp.take_along_axis(rows.loss_mask, places_B3, axis=1).argmax(1)
        else:
            scores_BC, answers_B = logits_BLC[:, 0], rows.targets[:, 0]
        log_BC = jax.nn.log_softmax(scores_BC)
        mean = -jnp.take_along_axis(log_BC, answers_B[:, None], axis=1).mean()
        return mean, {"loss": mean, "accuracy": (scores_BC.argmax(1) == answers_B).mean()}

    wanted, values = jax.jit(jax.grad(loss, has_aux=True))(on_host(model))
    assert_equal_but_rounding(found, (values, named_gradients(wanted)), TOLERANCE, FLOOR)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]


def base(folder: Path) -> Path:
    """A run of an encoder with random weights, without a classifier."""
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    config = tiny(ENCODER | {"vocab_size": len(WORDS), "tied": True, "num_layers": 2})
    config.data.tokenizer = f"wordpiece:{folder}/vocab.txt"
    config.data.objective, config.data.paths = Objective.masked, ("a",)
    model = jax.jit(lambda key: language_model(key, config))(jax.random.key(0))
    maxmeg.LanguageModel(model, config).save(folder / "base")
    return folder / "base"


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    """Texts of the words a, b and c or of d, e and f, which are two classes; 70 for validation."""
    folder = tmp_path_factory.mktemp("base")
    random = np.random.default_rng(0)
    words = [random.choice([*"abcdef"[3 * (n % 2) :][:3]], 7) for n in range(470)]
    rows = [{"text": " ".join(each), "label": n % 2} for n, each in enumerate(words)]
    for name, part in (("train", rows[:400]), ("valid", rows[400:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return {
        "folder": base(folder),
        "data.train_paths": (f"{folder}/train.jsonl",),
        "data.validation_paths": (f"{folder}/valid.jsonl",),
        "data.labels": ("no", "yes"),
        "data.sequence_length": LENGTH,
        "model.dtype": "float32",
        "parallel.pipe": 2,
        "parallel.tensor": 2,
        "train.micro_batch_size": 4,
        "train.num_steps": 40,
        "train.eval_every": 40,
        "optim.lr": 5e-3,
        "log.every": 1,
    }


def trained(settings: dict, run_dir, **more) -> maxmeg.LanguageModel:
    values = {name: value for name, value in settings.items() if name != "folder"}
    values |= {"run_dir": str(run_dir), **more}
    return maxmeg.train(maxmeg.config(f"classify:{settings['folder']}", **values))


@SLOW
def test_a_run_learns_resumes_is_evaluated_and_predicts(settings, tmp_path, capsys):
    model = trained(settings, tmp_path / "whole")
    last = curve(tmp_path / "whole")[-1]
    assert last["validation_accuracy"] > 0.95 and last["loss"] < 0.3
    trained(settings, tmp_path / "parts", **{"train.exit_at": 20})
    again = trained(settings, tmp_path / "parts")
    for one, other in zip(*map(jax.tree.leaves, (model.model, again.model)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=str(tmp_path / "whole"), batch_size=32))
    said = capsys.readouterr().out
    assert "70 examples of the validation split in 3 batches" in said
    assert f"validation accuracy {100 * last['validation_accuracy']:.2f} % of 70" in said
    assert "Matthews correlation" in said
    found = np.array(model.classify(["d e f", "a b", ("e d", "f")]))
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    assert found.argmax(1).tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"num_classes=2: a classifier does not continue text"):
        model.generate("a")


@SLOW
def test_adapters_train_beside_a_new_classifier(settings, tmp_path):
    """The classifier is all that a checkpoint holds beside adapters; both are exported."""
    lora = {"lora.rank": 2, "lora.targets": ("*",), "train.num_steps": 2, "train.eval_every": 0}
    model = trained(settings, tmp_path / "run", **lora)
    saved = Checkpointer(str(tmp_path / "run" / "checkpoints")).manifest(2).tensors
    inside = {name.removeprefix("model/") for name in saved if name.startswith("model/")}
    assert {name for name in inside if "lora" not in name} == {
        "classifier/linear/weight",
        "classifier/linear/bias",
    }
    report = export_model(tmp_path / "run", tmp_path / "hf", DType.float32)
    assert report.family == "BertForSequenceClassification"
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described["id2label"] == {"0": "no", "1": "yes"}
    tokenizer = model.config.data.tokenizer
    import_model(open_folder(tmp_path / "hf"), tmp_path / "back", tokenizer)
    back = maxmeg.load(tmp_path / "back", dtype="float32")
    assert back.config.data.class_names == ("no", "yes")
    texts = ["a b", ("d", "e f a b c")]
    np.testing.assert_allclose(back.classify(texts), model.classify(texts), rtol=0, atol=1e-6)


PROBLEMS = [
    ({"data.labels": ("yes",)}, "needs at least two classes: name them"),
    ({"model.head.num_classes": 3}, "num_classes=3 is not the 2 that data.objective=classify"),
    ({"data.objective": "masked"}, "data.labels=.* has no effect|data.labels, .* have no effect"),
    (
        {"train.label_smoothing": 0.1},
        "train.label_smoothing=0.1 is not for data.objective=classify",
    ),
    ({"model.tied": False, "model.head.num_classes": 2}, "model.tied=false has output weights"),
    ({"model.logit_softcap": 3.0, "model.head.num_classes": 2}, "logit_softcap=3.0 has no effect"),
    (
        {"data.objective": "choose", "data.labels": (), "parallel.context": 2},
        "separates the choices",
    ),
    ({"model.attention.causal": True}, "data.scored=first: the first token of a causal model"),
    ({"data.packing": "greedy"}, "data.blend and data.packing are not for data.objective=classify"),
]

LLAMA = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"problem_type": "regression"}, "problem_type='regression': only single_label"),
        ({"id2label": {"0": "LABEL_0"}}, "None with 1 class"),
        ({"id2label": {"0": "a", "2": "b"}}, "must name the classes 0, 1, ... without a gap"),
    ],
)
def test_files_of_other_heads_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        model_config(LLAMA | keys)


@pytest.mark.parametrize(("values", "message"), PROBLEMS)
def test_settings_that_cannot_be(settings, values, message):
    given = {name: value for name, value in settings.items() if name != "folder"} | values
    config = maxmeg.config(f"classify:{settings['folder']}", **given)
    with pytest.raises(ValueError, match=message):
        validate(config, 8)
