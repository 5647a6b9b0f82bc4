"""T5: encoder and decoder in one stack; the same losses and gradients on every layout."""

from pathlib import Path

import jax
import numpy as np
import pytest
import short_runs
from layouts import LENGTH, assert_equal_but_rounding, batch_gradients, first_samples, tiny
from masked_corpus import SIZE, corpus, vocabulary

from maxmeg import evaluate, generate
from maxmeg.config.data import Objective
from maxmeg.config.mixers import Activation
from maxmeg.config.model import Position
from maxmeg.config.parallel import Schedule
from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.data.masked.t5 import T5Dataset
from maxmeg.objectives.table import OBJECTIVES
from maxmeg.ops.attention.call import choice
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import Device

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
SLOW = pytest.mark.slow
SOURCE = 2 * LENGTH
LAYERS = "2(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
MODEL = {
    **{"layers": LAYERS, "num_layers": 5, "position": Position.relative, "vocab_size": SIZE},
    **{"relative.buckets": 8, "relative.distance": 12, "attention.scale": 1.0},
    **{"mlp.activation": Activation.geglu, "dropout_hidden": 0.1, "dropout_embedding": 0.1},
    "attention.dropout": 0.1,
}
LAYOUTS = [
    {"pipe": 2, "tensor": 2, "fsdp": 2},
    {"pipe": 2, "context": 2, "tensor": 2, "fsdp": 1, "schedule": Schedule.zero_bubble},
]


def gradients(folder: Path, parallel: dict, micro_batch_size: int):
    """(sums, gradients by name in model order) of one batch of corrupted spans."""
    config = tiny(MODEL, {"micro_batch_size": micro_batch_size}, **parallel)
    config.data.objective, config.data.paths = Objective.span_corruption, ("sentences",)
    config.data.source_length = SOURCE
    data = T5Dataset(corpus(folder), "1,0,0", 0, (SOURCE, LENGTH), vocabulary())
    sums, found, *_ = batch_gradients(config, first_samples(data.batch))
    return OBJECTIVES[config.data.objective].metrics(sums), found


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return gradients(tmp_path_factory.mktemp("one"), {"fsdp": 1}, 0)


@SLOW
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_layout_equals_one_device(one_device, tmp_path, parallel):
    found = gradients(tmp_path, parallel, 4)
    assert_equal_but_rounding(found, one_device, TOLERANCE, FLOOR)
    assert all(np.abs(array).max() > 0 for array in one_device[1].values())


def test_relative_biases_run_in_xla_alone():
    shapes = [jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")] * 3
    bias = jax.ShapeDtypeStruct((32, 4), "bfloat16")
    call = (*shapes, ScoreSpec(causal=False, distance=128), Operands(bias_NH=bias))
    hopper = Device("cuda", (9, 0))
    name, reason = choice(call, "auto", hopper)
    assert name == "xla" and "cudnn: relative position bias is not supported" in reason
    for named in ("cudnn", "mosaic", "triton"):
        with pytest.raises(ValueError, match=rf"{named} cannot run: .* use auto or"):
            choice(call, named, hopper)


def pairs(folder: Path) -> tuple[str, ...]:
    """Prefixes of corpora of words of bytes and of the same words in capitals."""
    rng, prefixes = np.random.default_rng(0), tuple(str(folder / name) for name in "st")
    with IndexedWriter(prefixes[0], 260) as source, IndexedWriter(prefixes[1], 260) as target:
        for _ in range(60):
            words = rng.integers(97, 103, rng.integers(4, 12))
            source.add_document(words, [len(words)])
            target.add_document(words - 32, [len(words)])
    return prefixes


@SLOW
def test_a_resumed_run_on_pairs_is_bitwise_the_uninterrupted(tmp_path, capsys):
    def run(folder: Path, steps: int) -> None:
        config = short_runs.config("", folder, steps, MODEL | {"vocab_size": 0}, {"fsdp": 8})
        config.data.objective, config.data.paths = Objective.seq2seq, pairs(tmp_path)
        config.data.tokenizer = "bytes?pad=<pad>&bos=<s>"
        config.data.sequence_length, config.data.source_length = 16, 32
        short_runs.main(config)

    whole = short_runs.resumed_bitwise(run, tmp_path)
    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=str(whole), split="test"))
    assert "test loss" in capsys.readouterr().out
    generate.main(generate.Options(prompt=("one",), run_dir=str(whole), num_tokens=3))
    assert not capsys.readouterr().out.startswith("one")  # a source is not continued
