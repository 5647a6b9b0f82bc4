"""BERT and its relatives: hidden states, logits and gradients are those of Hugging Face's classes;
import and export are exact inverses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_cases import encoders
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
from maxmeg.models.lm import LM

CLOSE = 1e-5  # largest error over the largest value
CASES = encoders()
PAIRED = {name for name, (architecture, _) in CASES.items() if "PreTraining" in architecture}


@pytest.fixture
def inputs():
    """Ids, types and segments (0: padding) of three rows, of which two are shorter."""
    random = np.random.default_rng(0)
    ids, types = random.integers(5, 61, (3, LENGTH)), np.zeros((3, LENGTH), int)
    types[:, LENGTH // 2 :] = 1
    lengths = np.array([LENGTH, LENGTH - 7, 3])
    segments = (np.arange(LENGTH) < lengths[:, None]).astype(int)
    return ids, types, segments


@jax.jit
def evaluated(model: LM, ids, types, segments, masked):
    """(loss of masked tokens and pairs, (hidden states, logits, pairs' logits)), gradients."""

    def loss(model: LM):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        ctx = Context(positions, segments, token_types_BL=types)
        x, _, _ = model.stack(model.embed_tokens(ids, ctx), ctx)
        h_BLD = model.normed(x["target"])
        logits_BLV = model.logits(model.outputs(x, ctx))
        log_BLV = jax.nn.log_softmax(logits_BLV)
        picked = jnp.take_along_axis(log_BLV, ids[..., None], axis=-1)[..., 0]
        total, pairs = -(picked * masked).sum() / masked.sum(), None
        if model.bert.pair is not None:
            pairs = model.bert.pair_logits(h_BLD[:, :1])
            total -= jax.nn.log_softmax(pairs)[:, 1].mean()
        return total, (h_BLD, logits_BLV, pairs)

    return jax.value_and_grad(loss, has_aux=True)(model)


@pytest.mark.parametrize("name", CASES)
def test_encoder(name, tmp_path, inputs):
    family = CASES[name][0]
    theirs, config = saved(name, tmp_path, CASES)
    model = model_config(config)
    tensors = load_file(tmp_path / "model.safetensors")
    known = canonical_names(tensors, family)
    assert all(name == known[name] for name in tensors)
    ours = imported(tensors, model, family)

    ids, types, segments = inputs
    types = types * (model.bert.token_types > 1)
    masked = segments * (np.arange(LENGTH) % 3 == 1)
    (value, (hidden, logits, pairs)), gradients = evaluated(
        ours, *map(jnp.asarray, (ids, types, segments, masked))
    )
    arguments = {"input_ids": ids, "attention_mask": segments}
    arguments |= {"token_type_ids": types} if model.bert.token_types else {}
    arguments = {name: torch.tensor(array) for name, array in arguments.items()}
    body = getattr(theirs, theirs.base_model_prefix, theirs)
    wanted = body(**arguments).last_hidden_state.detach().numpy()
    assert close(np.asarray(hidden) * segments[..., None], wanted * segments[..., None], CLOSE)
    if model.bert.pooler and name not in PAIRED:
        pooled = body(**arguments).pooler_output.detach().numpy()
        assert close(np.asarray(ours.bert.pooled(hidden[:, :1]))[:, 0], pooled, CLOSE)
    if "its layers" not in name:
        labels = torch.tensor(np.where(masked == 1, ids, -100))
        labels = {"labels": labels} | (
            {"next_sentence_label": torch.ones(3, dtype=torch.long)} if pairs is not None else {}
        )
        output = theirs(**arguments, **labels)
        output.loss.backward()
        scores = output.prediction_logits if name in PAIRED else output.logits
        scores = scores.detach().numpy() * segments[..., None]
        assert close(np.asarray(logits) * segments[..., None], scores, CLOSE)
        if name in PAIRED:
            order = output.seq_relationship_logits.detach().numpy()
            assert close(np.asarray(pairs), order, CLOSE)
        assert float(value) == pytest.approx(float(output.loss.detach()), rel=CLOSE)
        assert_same_gradients(gradients, theirs, model, family, tmp_path / "gradients")

    folder = tmp_path / "exported"
    assert_returns(ours, model, family, config, tensors, folder)
    again = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
    again = getattr(again, again.base_model_prefix, again)
    with torch.no_grad():
        np.testing.assert_array_equal(again(**arguments).last_hidden_state.numpy(), wanted)
