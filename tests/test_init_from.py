"""Runs that begin with the weights of another: the same, with more words, refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import convert_in, make_folder
from layouts import by_name, mesh_of, tiny, tiny_state

from maxmeg.checkpoint.initialize import create_state
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import nested, to_arrays
from maxmeg.checkpoint.resume import resume, start
from maxmeg.config import files
from maxmeg.config.files import CHECKPOINTS
from maxmeg.config.model import Position
from maxmeg.config.named import load_config
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.schema import Config

LAYOUT: dict = {"pipe": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> tuple[str, Config, dict[str, np.ndarray]]:
    """A converted model's folder: its arrays alone; (folder, config, arrays by name)."""
    folder = str(tmp_path_factory.mktemp("source"))
    config = tiny(model={"num_layers": 2, "max_position": 16}, fsdp=1)
    state = tiny_state(config, mesh_of(config))[2]
    tree = nested({n: a + 1 for n, a in to_arrays({"model": state.model}).items()})
    tree["model"]["embedding"]["table"] = jnp.where(
        jnp.arange(64)[:, None] < 61, tree["model"]["embedding"]["table"], 0
    )
    tree["model"]["output"]["table"] = tree["model"]["embedding"]["table"]
    checkpointer = Checkpointer(f"{folder}/{CHECKPOINTS}", asynchronous=False)
    assert checkpointer.save(0, tree, {"config": files.to_dict(config), "tokenizer": "words"})
    arrays = {name: np.asarray(array) for name, array in to_arrays(tree).items()}
    return folder, config, arrays


def begun(source, parallel: dict, **model) -> tuple[Config, dict[str, np.ndarray]]:
    """The config, and the arrays in model order of a state that begins with the source."""
    fields = {"num_layers": 2, "max_position": 16, **model}
    config = tiny(fields, {"micro_batch_size": 2}, **parallel)
    config.checkpoint.init_from, config.seed = f"{source[0]}/checkpoints/..", 7
    _, abstract, state = tiny_state(config, mesh_of(config))
    wanted, made = to_arrays(abstract), to_arrays(state)
    assert all(made[name].sharding == wanted[name].sharding for name in wanted)
    return config, by_name(state)


@pytest.mark.parametrize("parallel", [{"fsdp": 1}, LAYOUT])
def test_weights_are_the_sources_on_every_layout(source, parallel):
    """Also with another padding of the vocabulary, and with rotary scaling."""
    scaling = {"rotary.scaling": RotaryScaling.linear, "rotary.factor": 4.0}
    _, found = begun(source, parallel, **scaling)
    for name, wanted in source[2].items():
        rows = min(len(found[name]), len(wanted))
        np.testing.assert_array_equal(found[name][:rows], wanted[:rows], err_msg=name)
        assert not found[name][rows:].any()
    assert found["step"] == 0 and not any(a.any() for n, a in found.items() if ".mu." in n)


def test_new_words_begin_as_random_ones(source):
    config, found = begun(source, LAYOUT, vocab_size=90)
    config.checkpoint.init_from = ""
    state = tiny_state(config, mesh_of(config))[2]
    for name in ("model.embedding.table", "model.output.table"):
        np.testing.assert_array_equal(found[name][:61], source[2][name][:61])
        np.testing.assert_array_equal(found[name][61:], by_name(state)[name][61:])
        assert found[name][61:90].any(axis=1).all() and not found[name][90:].any()


def test_a_hugging_face_folder_begins_a_run_as_its_import(tmp_path):
    """Over a pipeline, whose second stage has a layer of padding."""
    make_folder(tmp_path / "hf")
    convert_in(tmp_path / "hf", tmp_path / "run")
    states = []
    for name in ("hf", "run"):
        config = load_config(f"finetune:{tmp_path / name}")
        config.parallel, config.train.micro_batch_size = (
            ParallelConfig(**LAYOUT, pad_layers=True),
            2,
        )
        states.append(by_name(tiny_state(config, mesh_of(config))[2]))
    np.testing.assert_equal(*states)


def test_adapters_add_no_words(source):
    config = tiny({"num_layers": 2, "max_position": 16, "vocab_size": 90}, fsdp=1)
    config.checkpoint.init_from, config.lora.rank = source[0], 2
    with pytest.raises(ValueError, match=r"vocab_size=90 adds tokens to the 61.*at random"):
        tiny_state(config, mesh_of(config))


def test_another_model_tokenizer_or_an_empty_folder_is_refused(source, tmp_path):
    config = dataclasses.replace(source[1])
    config.checkpoint = dataclasses.replace(config.checkpoint, init_from=source[0])
    optimizer, abstract, _ = tiny_state(source[1], mesh_of(source[1]))
    own = Checkpointer(tmp_path)
    assert resume(config, own, abstract, "words") is None
    begun = start(config, own, optimizer, abstract, "words")
    assert (begun.step, begun.metadata, begun.base) == (0, {}, {})
    with pytest.raises(ValueError, match=r"vocabulary \(letters\) is not the checkpoint's"):
        start(config, own, optimizer, abstract, "letters")
    config.model = dataclasses.replace(config.model, position=Position.none)
    with pytest.raises(ValueError, match="is another model: position rotary -> none"):
        create_state(config, optimizer, abstract)
    config.checkpoint.init_from = str(tmp_path)
    with pytest.raises(ValueError, match="holds no checkpoint; give the run_dir"):
        create_state(config, optimizer, abstract)
