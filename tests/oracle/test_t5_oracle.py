"""T5: logits and gradients are those of Hugging Face's class; import and export are exact inverses;
buckets of relative positions are theirs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_cases import VOCAB, encoder_decoders
from safetensors.numpy import load_file
from test_families_oracle import assert_returns, close, exported, imported, saved_gradients
from transformers.models.t5.modeling_t5 import T5Attention

from maxmeg.hf.families.read import aliases, canonical_names, model_config
from maxmeg.layers.context import Source
from maxmeg.models.lm import LM
from maxmeg.ops.attention.spec import ScoreSpec
from maxmeg.ops.attention.xla import bias_buckets

CLOSE = 1e-5  # largest error over the largest value
FLOOR = 1e-7  # of gradients
SOURCE, TARGET = 20, 14
CASES = encoder_decoders()


@jax.jit
def evaluated(model: LM, source: Source, ids, targets):
    """(loss, logits), gradients."""

    def loss(model: LM):
        logits_BLV = model(ids, source)
        log_BLV = jax.nn.log_softmax(logits_BLV)
        return -jnp.take_along_axis(log_BLV, targets[..., None], axis=-1).mean(), logits_BLV

    return jax.value_and_grad(loss, has_aux=True)(model)


@pytest.mark.parametrize("name", CASES)
def test_t5(name, tmp_path):
    family, settings = CASES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    settings = kind.config_class(**settings)
    theirs = kind._from_config(settings, attn_implementation="eager").eval()
    if name == "t5 v1.1":  # as its files have it, although the class ties weights
        theirs.config.tie_word_embeddings = False
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.shared.weight))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = model_config(config)
    assert (model.tied, model.logit_scale == 1) == (name != "t5 v1.1", name != "t5")
    known = canonical_names(tensors := load_file(tmp_path / "model.safetensors"), family)
    repeated = aliases(model, family)
    tensors = {known[tensor]: array for tensor, array in tensors.items()}
    tensors = {tensor: array for tensor, array in tensors.items() if tensor not in repeated}
    ours = imported(tensors, model, family)

    random = np.random.default_rng(0)
    ids, targets = random.integers(1, VOCAB, (2, 3, TARGET))
    source_ids = random.integers(1, VOCAB, (3, SOURCE))
    segments = (np.arange(SOURCE) < np.array([SOURCE, SOURCE - 7, 3])[:, None]).astype(int)
    source = Source.of(jnp.asarray(source_ids), jnp.asarray(segments))
    (value, logits), gradients = evaluated(ours, source, jnp.asarray(ids), jnp.asarray(targets))
    arguments = {"input_ids": source_ids, "attention_mask": segments, "decoder_input_ids": ids}
    arguments = {key: torch.tensor(array) for key, array in arguments.items()}
    output = theirs(**arguments, labels=torch.tensor(targets))
    output.loss.backward()
    wanted = output.logits.detach().numpy()
    assert close(np.asarray(logits), wanted, CLOSE)
    assert float(value) == pytest.approx(float(output.loss.detach()), rel=CLOSE)

    folder = tmp_path / "exported"
    assert_returns(ours, model, family, config, tensors, folder)
    again = kind.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(**arguments).logits.numpy(), wanted)
    truth = saved_gradients(theirs, tmp_path / "gradients")
    for tensor, gradient in exported(gradients, model, family).items():
        assert close(gradient, truth[known.get(tensor, tensor)], CLOSE, FLOOR), tensor


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("count", "distance"), [(32, 128), (8, 12), (32, 100), (64, 256)])
def test_buckets(causal: bool, count: int, distance: int):
    distances, spec = np.arange(-300, 301), ScoreSpec(causal=causal, distance=distance)
    wanted = T5Attention._relative_position_bucket(
        torch.tensor(distances), not causal, num_buckets=count, max_distance=distance
    )
    actual = bias_buckets(jnp.asarray(distances), count, spec)
    np.testing.assert_array_equal(actual, wanted.numpy())
