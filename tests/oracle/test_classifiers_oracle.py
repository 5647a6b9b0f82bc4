"""Classifiers: logits, losses and gradients are those of Hugging Face's classes; import and export
are exact inverses, and the commands carry the names of the classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_cases import classifiers
from safetensors.numpy import load_file
from test_families_oracle import (
    LENGTH,
    assert_returns,
    assert_same_gradients,
    close,
    imported,
    saved,
)

from maxmeg.hf.families.read import canonical_names, model_config
from maxmeg.layers.context import Context

CLOSE = 1e-5  # largest error over the largest value
CASES = classifiers()
LENGTHS = np.array([LENGTH, LENGTH - 7, 3, 1])


@jax.jit
def evaluated(model, ids, types, segments, places, labels):
    """(loss, logits at the places), gradients. places: token that is scored in each row; -1: all,
    and the loss is the mean over tokens."""

    def loss(model):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        ctx = Context(positions, segments, token_types_BL=types)
        x, _, _ = model.stack(model.embed_tokens(ids, ctx), ctx)
        logits = model.outputs(x, ctx)
        if logits.shape[-1] == 1:  # one score of each choice: two questions of two choices
            logits = logits[:, 0, 0].reshape(2, 2)
            return -jax.nn.log_softmax(logits)[jnp.arange(2), labels].mean(), logits
        if places is not None:
            logits = logits[jnp.arange(len(ids)), places]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
        weights = segments if places is None else jnp.ones(len(ids))
        return -(picked * weights).sum() / weights.sum(), logits

    return jax.value_and_grad(loss, has_aux=True)(model)


@pytest.mark.parametrize("name", CASES)
def test_classifier(name, tmp_path):
    theirs, config = saved(name, tmp_path, CASES)
    model = model_config(config)
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(name == known for name, known in canonical_names(tensors, name).items())
    ours = imported(tensors, model, name)

    random = np.random.default_rng(0)
    ids = random.integers(5, 61, (4, LENGTH))
    segments = (np.arange(LENGTH) < LENGTHS[:, None]).astype(int)
    ids = np.where(segments, ids, 0)
    types = np.tile(np.arange(LENGTH) >= 5, (4, 1)) * (model.bert.token_types > 1)
    is_words, is_choice = "Token" in name, "Choice" in name
    shape = (4, LENGTH) if is_words else (2,) if is_choice else (4,)
    labels = random.integers(0, 2 if is_choice else 3, shape)
    places = None if is_words else LENGTHS - 1 if model.attention.causal else LENGTHS * 0
    arrays = (ids, types.astype(int), segments, places, labels)
    (value, logits), gradients = evaluated(
        ours, *(a if a is None else jnp.asarray(a) for a in arrays)
    )

    arguments = {"input_ids": ids, "attention_mask": segments}
    arguments |= {} if model.attention.causal else {"token_type_ids": types.astype(int)}
    if is_choice:
        arguments = {key: array.reshape(2, 2, LENGTH) for key, array in arguments.items()}
    arguments = {key: torch.tensor(array) for key, array in arguments.items()}
    known = np.where(segments, labels, -100) if is_words else labels
    output = theirs(**arguments, labels=torch.tensor(known))
    output.loss.backward()
    wanted = output.logits.detach().numpy()
    mask = segments[..., None] if is_words else 1
    assert close(np.asarray(logits) * mask, wanted * mask, CLOSE)
    assert float(value) == pytest.approx(float(output.loss.detach()), rel=CLOSE)
    assert_same_gradients(gradients, theirs, model, name, tmp_path / "gradients")

    folder = tmp_path / "exported"
    assert_returns(ours, model, name, config, tensors, folder)
    again = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(**arguments).logits.numpy(), wanted)
