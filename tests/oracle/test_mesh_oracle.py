"""Every family of attention and MLPs on a mesh: weights cut over pipe, fsdp and tensor give the
loss and the gradients of Hugging Face's own models. (tests/test_step.py has the layouts and
options, also of scans; tests/test_moe_training.py those of experts, tests/test_masked.py those of
encoders.)"""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from hf_cases import families, with_states
from layouts import in_model_order, mesh_of, tiny, tiny_batch
from safetensors.numpy import load_file
from test_families_oracle import assert_same_gradients, imported, saved

from maxmeg.config.model import DType
from maxmeg.hf.families.classifier_tables import CLASSIFIERS
from maxmeg.hf.families.encoder_tables import ENCODERS
from maxmeg.hf.families.expert_tables import SPARSE
from maxmeg.hf.families.read import FAMILIES, model_config
from maxmeg.hf.families.t5_tables import ENCODER_DECODERS
from maxmeg.models.lm import LM
from maxmeg.optim.build import make_optimizer
from maxmeg.state import abstract_state, from_tree, nested, orders_of, to_arrays
from maxmeg.step import make_gradients

LOSS = 1e-5  # relative
CUT = {"pipe": 2, "fsdp": 2, "tensor": 2}
CASES = families()
# One model of each family, the first: compiling takes long. Falcon 7B has one key/value head.
NAMES = {CASES[name][0]: name for name in reversed(CASES)}


def test_every_family_has_a_case():
    scans = {family for family, _ in with_states().values()}
    others = SPARSE.keys() | ENCODERS.keys() | CLASSIFIERS.keys()
    others |= ENCODER_DECODERS.keys()
    assert NAMES.keys() == FAMILIES.keys() - others - scans


def on_mesh(ours: LM, abstract: LM) -> LM:
    """The model's arrays cut as an abstract one's, with its padding of the vocabulary."""
    wanted, orders, arrays = to_arrays({"model": abstract}), orders_of({"model": abstract}), {}
    for name, leaf in to_arrays({"model": ours}).items():
        leaf, like = np.asarray(leaf), wanted[name]
        padded, order = np.zeros(like.shape, leaf.dtype), orders.get(name.replace(".", "/"))
        if order is None:  # the vocabulary may be padded
            padded[: len(leaf)] = leaf[: len(padded)]
        else:
            padded[np.array(order) >= 0] = leaf[[layer for layer in order if layer >= 0]]
        arrays[name] = jax.device_put(padded, like.sharding)
    return from_tree(nested(arrays), {"model": abstract})["model"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_family_on_a_mesh(name, tmp_path):
    family = CASES[name][0]
    theirs, settings = saved(name, tmp_path)
    model = dataclasses.replace(model_config(settings), dtype=DType.float32)
    ours = imported(load_file(tmp_path / "model.safetensors"), model, family)
    config = tiny(vars(model), {"global_batch_size": 8, "micro_batch_size": 2}, **CUT)
    mesh = mesh_of(config)
    abstract = abstract_state(config, make_optimizer(config.optim), mesh).model
    batch = tiny_batch(config, mesh)
    key = jax.random.key_data(jax.random.key(0))  # there is no dropout
    gradients_of = jax.jit(make_gradients(config, mesh, abstract))
    actual, sums = gradients_of(on_mesh(ours, abstract), batch, key)

    tokens, targets, weights = (
        torch.tensor(np.concatenate(np.asarray(array)))
        for array in (batch.tokens, batch.targets, batch.loss_mask)
    )
    logits = theirs(tokens.long()).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.long().flatten(), reduction="none"
    )
    loss = (losses * weights.flatten()).sum() / weights.sum()
    loss.backward()
    assert float(sums["loss_sum"] / sums["tokens"]) == pytest.approx(float(loss.detach()), rel=LOSS)
    gradients = in_model_order({"model": actual})["model"]
    assert_same_gradients(gradients, theirs, model, family, tmp_path / "gradients")
