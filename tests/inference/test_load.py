"""Loading a run for inference: the dtype in which its weights are held, and what may be saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import tiny

import maxmeg
from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.model import DType
from maxmeg.inference import load
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.models.lm import LM

EXPERTS = {"layers": "*(attention,moe)", "moe.num_experts": 4, "moe.bias_balancing": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of a run in bfloat16, its float32 arrays by name)."""
    config = tiny({"num_layers": 1, "dtype": DType.bfloat16, "max_position": 32} | EXPERTS)
    config.data.tokenizer = f"null:{config.model.vocab_size}"
    model = jax.jit(lambda key: LM(key, config.model))(jax.random.key(0))
    run = tmp_path_factory.mktemp("saved") / "run"
    maxmeg.LanguageModel(model, config).save(run)
    return run, {name: np.asarray(array) for name, array in to_arrays(model).items()}


@pytest.mark.parametrize(
    ("settings", "held", "computed"),
    [
        ({}, DType.bfloat16, DType.bfloat16),
        ({"dtype": "float32"}, DType.float32, DType.float32),
        ({"master_weights": True}, DType.float32, DType.bfloat16),
    ],
)
def test_weights_are_held_in_the_compute_dtype(saved, settings, held, computed):
    run, masters = saved
    loaded = maxmeg.load(run, **settings)
    assert loaded.config.model.dtype is computed
    arrays = to_arrays(loaded.model)
    assert arrays.keys() == masters.keys()
    for name, array in arrays.items():
        dtype = jnp.float32 if name.endswith("moe.bias") else held.value  # layers' state is exact
        assert array.dtype == dtype, name
        np.testing.assert_array_equal(array, masters[name].astype(array.dtype), err_msg=name)


@pytest.mark.slow
def test_mtp_layers_are_loaded_for_an_engine(saved, tmp_path):
    config = tiny({"num_layers": 1, "max_position": 32, "mtp.num_layers": 2})
    config.data.tokenizer = f"null:{config.model.vocab_size}"
    model = jax.jit(lambda key: LM(key, config.model))(jax.random.key(0))
    maxmeg.LanguageModel(model, config).save(tmp_path / "run")
    request = Request(8, Sampling(temperature=9.0))
    engine = maxmeg.engine(tmp_path / "run", mtp=True)
    assert len(engine.generate([np.arange(3)], request)[0].tokens) == 8
    assert engine.decode_steps < 7  # one for each token after the first, without proposals
    with pytest.raises(ValueError, match=r"mtp=true: the model of .* has no MTP layers"):
        maxmeg.engine(saved[0], mtp=True)


def test_few_arrays_are_in_memory_in_float32_at_a_time(saved, monkeypatch):
    run, masters = saved
    whole, restore, reads = maxmeg.load(run), load.restore, []

    def recorded(checkpointer, step, abstract):
        reads.append([a.size * a.dtype.itemsize for a in jax.tree.leaves(abstract)])
        return restore(checkpointer, step, abstract)

    monkeypatch.setattr(load, "restore", recorded)
    total = sum(array.nbytes for array in masters.values())
    monkeypatch.setattr(load, "READ_BYTES", total // 4)
    for a, b in zip(*map(jax.tree.leaves, (whole.model, maxmeg.load(run).model)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(len(sizes) == 1 or sum(sizes) <= total // 4 for sizes in reads)
    assert 4 <= len(reads) < sum(map(len, reads)) == len(masters)


def test_rounded_weights_generate_as_their_masters_and_are_not_saved(saved, tmp_path):
    run, masters = saved
    rounded, whole = maxmeg.load(run), maxmeg.load(run, master_weights=True)
    ids = np.arange(5)
    np.testing.assert_array_equal(rounded.logits(ids), whole.logits(ids))
    for write in (rounded.save, lambda folder: rounded.to_huggingface(folder, dtype="float32")):
        with pytest.raises(ValueError, match=r"weights are bfloat16.*master_weights=True"):
            write(tmp_path / "out")
    with pytest.raises(ValueError, match="has no LongRoPE"):
        maxmeg.load(run, longrope="current")
    assert not (tmp_path / "out").exists()
    whole.save(tmp_path / "out")
    again = to_arrays(maxmeg.load(tmp_path / "out", master_weights=True).model)
    for name, array in again.items():
        np.testing.assert_array_equal(array, masters[name], err_msg=name)
