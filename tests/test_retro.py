"""RETRO: the same losses and gradients on every layout, resumed runs, and what neighbours bring."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import short_runs
from layouts import assert_equal_but_rounding, batch_gradients, first_samples, tiny
from retro_corpus import CHUNK, LENGTH, SPLIT, TOKENIZER, embed, find, write

import maxmeg
from maxmeg import evaluate
from maxmeg.config.model import Position
from maxmeg.config.retro import Neighbours
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.samples.retro import RetroDataset
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.layers.context import Context, Source
from maxmeg.models.lm import LM
from maxmeg.objectives.table import OBJECTIVES
from maxmeg.retrieval.generation import Generator
from maxmeg.retrieval.neighbours import Encoder, open_search

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
SLOW = pytest.mark.slow
LAYERS = "attention,encoder_attention,encoder_cross,encoder_mlp,encoder_norm *(chunked_cross,mlp)"
MODEL = {
    **{"layers": LAYERS, "num_layers": 3, "position": Position.learned},
    **{"retro.chunk_length": CHUNK, "retro.neighbour_length": LENGTH, "vocab_size": 257},
    **{"dropout_hidden": 0.1, "dropout_embedding": 0.1, "attention.dropout": 0.1},
    "max_position": 16,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return find(write(tmp_path_factory.mktemp("corpus")))


def gradients(data, parallel: dict, micro_batch_size: int):
    """(losses, gradients by name in model order) of one batch."""
    model = MODEL | {"max_position": data.sequence_length}
    config = tiny(model, {"micro_batch_size": micro_batch_size}, **parallel)
    config.data = data
    samples = RetroDataset(IndexedDataset(data.paths[0]), SPLIT, 0, data, TOKENIZER, 0)
    sums, found, *_ = batch_gradients(config, first_samples(samples.batch))
    return OBJECTIVES[data.objective].metrics(sums), found


@pytest.fixture(scope="module")
def on_one_device(data):
    @functools.cache
    def of(length: int):
        return gradients(dataclasses.replace(data, sequence_length=length), {"fsdp": 1}, 0)

    return of


@SLOW
@pytest.mark.parametrize(
    ("parallel", "length"),
    [
        ({"pipe": 2, "tensor": 2, "fsdp": 2}, 16),
        ({"fsdp": 2, "context": 2, "tensor": 2}, 32),
        ({"fsdp": 2, "context": 4, "context_strategy": "ring"}, 32),  # pieces of one chunk
        ({"fsdp": 1, "pipe": 2, "context": 2, "tensor": 2}, 32),
    ],
    ids=str,
)
def test_layout_equals_one_device(data, on_one_device, parallel, length):
    wanted = on_one_device(length)
    data = dataclasses.replace(data, sequence_length=length)
    found = gradients(data, parallel, 4 if "pipe" in parallel else 0)
    assert_equal_but_rounding(found, wanted, TOLERANCE, FLOOR)
    assert all(np.abs(array).max() > 0 for array in wanted[1].values())


@SLOW
def test_neighbours_of_repeated_passages_lower_the_loss(tmp_path):
    """Passages are random, so only the neighbours' continuations tell what follows: in samples, and
    in what the model writes after two of the three chunks of a passage."""
    config = find(write(tmp_path, documents=400, passages=60))
    corpus = IndexedDataset(config.paths[0])

    def samples(split_index: int, kind: Neighbours) -> RetroDataset:
        settings = dataclasses.replace(config, read_neighbours=kind)
        return RetroDataset(corpus, SPLIT, split_index, settings, TOKENIZER, 0)

    plain = {"dropout_hidden": 0.0, "dropout_embedding": 0.0, "attention.dropout": 0.0}
    run = tiny(MODEL | plain | {"attention.num_heads": 2})
    model, run.data = LM(jax.random.key(0), run.model), config

    def loss_of(model, batch):
        source = Source.of(batch["encoder_tokens"], batch["encoder_segment_ids"])
        ctx = Context(batch["positions"], batch["segment_ids"], source=source)
        logits_BLV = model.logits(model.hidden(batch["tokens"], ctx)[0])
        rows = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, batch["targets"])
        return (rows * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(model, state, batch):
        loss, found = jax.value_and_grad(loss_of)(model, batch)
        updates, state = optimizer.update(found, state)
        return optax.apply_updates(model, updates), state, loss

    data, state = samples(0, Neighbours.nearest), optimizer.init(model)
    for number in range(250):
        model, state, _ = step(model, state, data.batch(32 * number + np.arange(32)))
    losses = [step(model, state, samples(1, kind).batch(np.arange(32)))[2] for kind in Neighbours]
    assert losses[0] < min(losses[1:]) - 0.3, losses
    trained = maxmeg.LanguageModel(model, run).trained
    generator = Generator(trained, open_search(run, Encoder(embed, "letters")), batch=40)
    documents = [corpus.get(360 + number)[: 3 * CHUNK] for number in range(40)]
    request, right = Request(CHUNK, Sampling(temperature=0)), []
    for search in (generator.search, None):
        generator.search = search
        replies = generator.generate([tokens[: 2 * CHUNK] for tokens in documents], request)
        pairs = zip(replies, documents, strict=True)
        right.append(np.mean([np.equal(reply.tokens, d[2 * CHUNK :]) for reply, d in pairs]))
    assert right[0] > 0.5 > 0.2 > right[1], right


@SLOW
def test_a_resumed_run_is_bitwise_the_uninterrupted(data, tmp_path, capsys):
    def run(folder: Path, steps: int) -> None:
        config = short_runs.config("", folder, steps, MODEL | {"vocab_size": 0}, {"fsdp": 8})
        config.data, config.model.attention.num_heads = data, 4
        short_runs.main(config)

    whole = short_runs.resumed_bitwise(run, tmp_path)
    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=str(whole), split="test", neighbours="shuffled"))
    assert "test loss" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"expected|nearest"):
        evaluate.main(evaluate.Options(run_dir=str(whole), neighbours="nearst"))
