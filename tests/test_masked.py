"""BERT: masked tokens and pairs of segments; the same losses and gradients on every layout."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import (
    LENGTH,
    assert_equal_but_rounding,
    batch_gradients,
    first_samples,
    mesh_of,
    named_gradients,
    on_host,
    tiny,
)
from masked_corpus import SIZE, corpus, vocabulary
from short_runs import curve

import maxmeg
from maxmeg import evaluate, generate, preprocess
from maxmeg.config.bert import Transform
from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.mixers import Activation
from maxmeg.config.model import Norm, NormPlace, Position
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Config
from maxmeg.data.build import build_dataset
from maxmeg.data.masked.bert import BertDataset
from maxmeg.data.placement import local_rows, place_batch
from maxmeg.data.resuming import record_order, warn_of_order
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.layers.context import Context
from maxmeg.models.mixers import pattern
from maxmeg.objectives.masked import MASKED
from maxmeg.planning.cost.flops import training_flops

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
SLOW = pytest.mark.slow
LAYOUTS = [
    ({"pipe": 2, "tensor": 2, "fsdp": 2}, 4),
    pytest.param({"pipe": 2, "fsdp": 2, "schedule": Schedule.zero_bubble}, 2, marks=SLOW),
    pytest.param({"data": 2, "fsdp": 1, "context": 2, "tensor": 2}, 2, marks=SLOW),
]
HEADS = {
    **{"norm": Norm.layernorm, "norm_place": NormPlace.post_residual, "tied": True},
    **{"position": Position.learned, "max_position": LENGTH + 2, "bert.position_offset": 2},
    **{"mlp.activation": Activation.gelu, "mlp.bias": True, "bert.token_types": 2},
    **{f"bert.{name}": True for name in ("embedding_norm", "output_bias", "pooler", "pair_head")},
    **{"bert.transform": Transform.gelu_tanh, "attention.causal": False},
}


def gradients(folder: Path, parallel: dict, micro_batch_size: int, dropout: bool = True):
    """(sums, gradients by name in model order, model, batch) of one batch of masked pairs.

    A quarter of the labels are 1. With as many of each, the terms of the pair head's gradient
    cancel to 1 / 220 of their size, and one rounding of the weights changes it by 1e-5.
    """
    model = HEADS | {"vocab_size": SIZE, "num_layers": 4, "dropout_hidden": 0.1 * dropout}
    config = tiny(model, {"micro_batch_size": micro_batch_size}, **parallel)
    config.data.objective = Objective.masked
    config.data.paths, config.data.sentence_pairs = ("sentences",), True
    data = BertDataset(corpus(folder), "1,0,0", 0, LENGTH, vocabulary())

    def samples(numbers):
        return data.batch(numbers) | {"is_swapped": (numbers % 4 == 0).astype(np.int32)}

    sums, *found, batch = batch_gradients(config, first_samples(samples))
    assert sorted(batch.extra) == ["is_swapped", "token_types"]
    return MASKED.metrics(sums), *found, batch


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return gradients(tmp_path_factory.mktemp("one"), {"fsdp": 1}, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "micro"), LAYOUTS)
def test_layout_equals_one_device(one_device, tmp_path, parallel, micro):
    assert one_device[0].keys() == {"loss", "pair_loss", "pair_accuracy"}
    found = gradients(tmp_path, parallel, micro)
    assert_equal_but_rounding(found, one_device, TOLERANCE, FLOOR)


def test_the_loss_is_that_of_masked_tokens_and_of_the_order_of_pairs(tmp_path):
    """As Megatron-LM adds them: each is a mean of its own."""
    *found, model, batch = gradients(tmp_path, {"fsdp": 1}, 0, dropout=False)

    def loss(model):
        rows = jax.tree.map(lambda array: array[0], batch)
        ctx = Context(rows.positions, rows.segment_ids, token_types_BL=rows.extra["token_types"])
        x, _, _ = model.stack(model.embed_tokens(rows.tokens, ctx), ctx)
        log_BLV = jax.nn.log_softmax(model.logits(model.outputs(x, ctx)))
        picked_BL = jnp.take_along_axis(log_BLV, rows.targets[..., None], -1)[..., 0]
        order_B2 = jax.nn.log_softmax(model.bert.pair_logits(x["target"][:, :1]))
        labels_B = rows.extra["is_swapped"]
        order = -jnp.take_along_axis(order_B2, labels_B[:, None], 1).mean()
        words = -(picked_BL * rows.loss_mask).sum() / rows.loss_mask.sum()
        accuracy = (order_B2.argmax(1) == labels_B).mean()
        return words + order, {"loss": words, "pair_loss": order, "pair_accuracy": accuracy}

    wanted, values = jax.jit(jax.grad(loss, has_aux=True))(on_host(model))
    assert_equal_but_rounding(tuple(found), (values, named_gradients(wanted)), TOLERANCE, FLOOR)


def test_more_masked_tokens_than_have_logits_are_refused():
    config = Config(data=DataConfig(objective=Objective.masked, sequence_length=512))
    assert config.data.max_targets == 80  # of 77
    mesh = mesh_of(tiny({}, {}, fsdp=1))
    rows, mask = local_rows(mesh, max_targets=80), np.zeros((1, 512), np.float32)
    arrays = {name: np.zeros((1, 512), np.int32) for name in ("tokens", "targets", "positions")}
    for count in (80, 81):
        mask[:, :count] = 1
        if count == 81:
            with pytest.raises(ValueError, match=r"81 masked tokens, and .* at most 80 of data.se"):
                place_batch(arrays | {"loss_mask": mask}, rows, mesh, 1)
        else:
            place_batch(arrays | {"loss_mask": mask}, rows, mesh, 1)


@pytest.mark.parametrize("mixer", ["attention", "local", "mla", "local_mla"])
def test_every_attention_is_bidirectional(mixer):
    """Layers read the setting, and the planner counts all scores."""
    fields = {"layers": f"*({mixer},mlp)", "attention.window": 5 * mixer.startswith("local")}
    causal, model = (tiny(fields | {"attention.causal": causal}).model for causal in (True, False))
    specs = [pattern(config)[0][0][0].mixers[0] for config in (causal, model)]
    assert [vars(spec)["causal"] for spec in specs] == [True, False]
    assert training_flops(model, LENGTH) == training_flops(causal, LENGTH, causal=False)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, str]:
    """The data settings of a corpus that counts, a sentence for each ten."""
    folder = tmp_path_factory.mktemp("counting")
    digits = ["Zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "zero", *digits]
    (folder / "vocab.txt").write_text("\n".join(words))
    text = json.dumps({"text": " ".join(f"{' '.join(digits)}." for _ in range(6))})
    (folder / "a.jsonl").write_text("\n".join([text] * 40))
    spec = f"wordpiece:{folder}/vocab.txt"
    flags = [f"--input={folder}/a.jsonl", f"--output={folder}/out", f"--tokenizer={spec}"]
    assert preprocess.main([*flags, "--split_sentences", "--workers=0"]) == 0
    return {"data.paths": f"{folder}/out_text_sentence", "data.tokenizer": spec}


@SLOW
def test_a_run_learns_and_does_not_generate(settings, tmp_path, capsys):
    settings = settings | {
        "run_dir": str(tmp_path),
        "data.sequence_length": 32,
        "data.split": "8,1,1",
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "parallel.pipe": 2,
        "parallel.tensor": 2,
        "train.num_steps": 110,
        "train.micro_batch_size": 2,
        "train.eval_every": 110,
        "optim.lr": 3e-3,
        "log.every": 1,
    }
    maxmeg.train(maxmeg.config("bert", **settings))
    rows = curve(tmp_path)
    frequencies = np.log(10)  # the loss of a model that does not read the sentence
    assert rows[0]["loss"] > frequencies
    last = np.mean([row["loss"] for row in rows[-10:]]), rows[-1]["validation_loss"]
    assert max(last) < 0.8 * frequencies
    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=str(tmp_path)))
    assert "validation loss" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"bidirectional model .* does not continue text"):
        generate.main(generate.Options(prompt=("one",), run_dir=str(tmp_path)))


def test_one_corpus_is_read(settings, caplog):
    config = Config().data
    config.objective, config.sequence_length, config.split = Objective.masked, 32, "1,0,0"
    config.tokenizer = settings["data.tokenizer"]
    tokenizer, one = load_tokenizer(config.tokenizer), settings["data.paths"]
    data = build_dataset(config, [one], tokenizer, 0, seed=1)
    assert isinstance(data, BertDataset) and not data.batch(np.arange(9))["is_swapped"].any()
    assert build_dataset(config, [one], tokenizer, 1, seed=1) is None
    longer = build_dataset(config, [one], tokenizer, 0, 1, samples=data.num_samples + 1)
    saved = record_order(data, 5)
    warn_of_order(saved, data, 5)
    assert not caplog.text
    warn_of_order(saved, longer, 5)  # several epochs are shuffled together
    assert "changed: train.num_steps, beyond whole epochs of sentences" in caplog.text
    with pytest.raises(ValueError, match="reads one corpus, not 2"):
        build_dataset(config, [one, one], tokenizer, 0, seed=1)
