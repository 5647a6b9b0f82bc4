"""The layer of DeepSeek's files that predicts one more token is transformers' own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_cases import VOCAB
from safetensors.numpy import load_file
from test_families_oracle import CASES, LENGTH, imported, saved
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from maxmeg.config.schema import TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.hf.families.read import bindings, model_config
from maxmeg.layers.context import Context
from maxmeg.objectives.language_modelling import LANGUAGE_MODELLING
from maxmeg.parallel.batch import Batch

LOSS = 1e-5  # relative, of a sum over tokens


def in_files(layer: MtpLayer, number: int) -> dict[str, np.ndarray]:
    """The layer's tensors by their names in DeepSeek's files."""
    start, actual = f"model.layers.{number}.", {}
    for name, tensor in layer.state_dict().items():
        name, array = start + name.removeprefix("mtp_block."), tensor.numpy()
        stem, is_stack, part = name.partition("mlp.experts.")
        if not is_stack:
            actual[name.replace(f"{start}post_norm", f"{start}shared_head.norm")] = array
            continue
        for expert, one in enumerate(array):
            parts = np.split(one, 2) if part == "gate_up_proj" else [one]
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for own, values in zip(names, parts, strict=True):
                actual[f"{stem}mlp.experts.{expert}.{own}.weight"] = values
    return actual


def test_mtp_layers_equal_transformers(tmp_path, monkeypatch):
    family, settings = CASES["deepseek v3"]
    monkeypatch.setitem(CASES, "predicting", (family, settings | {"num_mtp_layers": 1}))
    theirs, config = saved("predicting", tmp_path)
    layer = MtpLayer(
        theirs.config.get_mtp_config(),
        deepseek.DeepseekV3DecoderLayer,
        deepseek.DeepseekV3RMSNorm,
        0,
    ).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    model = with_fields(model_config(config), {"moe.aux_loss": 0.0})
    tensors = load_file(tmp_path / "model.safetensors") | in_files(layer, model.num_layers)
    assert model.mtp.num_layers == 1
    assert tensors.keys() == {binding.theirs for binding in bindings(model, family)}
    ours = imported(tensors, model, family)

    ids = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    positions = torch.arange(1, LENGTH)[None]
    with torch.no_grad():
        hidden = theirs.model(torch.tensor(ids)).last_hidden_state[:, :-1]
        later = theirs.model.embed_tokens(torch.tensor(ids[:, 1:]))
        mask = torch.full((LENGTH - 1, LENGTH - 1), -torch.inf).triu(1)[None, None]
        rotary = theirs.model.rotary_emb(later, position_ids=positions)
        actual = layer(later, hidden, rotary, mask, positions, None)
        logits = theirs.lm_head(actual)[:, :-1]
        wanted = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(ids[:, 2:]).flatten(), reduction="sum"
        )

    @jax.jit
    def run(ours, ids_BL):
        positions_BL = jnp.broadcast_to(jnp.arange(LENGTH), ids_BL.shape)
        batch = Batch(
            tokens=ids_BL,
            targets=jnp.roll(ids_BL, -1, axis=1),
            positions=positions_BL,
            loss_mask=(positions_BL < LENGTH - 1).astype(jnp.float32),
            divisors=jnp.ones(2),
        )
        ctx = Context(positions_BL)
        x_BLD = ours.stack(ours.embed_tokens(ids_BL, ctx), ctx)[0]
        later = LANGUAGE_MODELLING.later(ours, batch, ctx)
        outputs, _ = LANGUAGE_MODELLING.further(ours, x_BLD, later, batch, ctx)
        h_BLD = ours.outputs(x_BLD, ctx)
        return LANGUAGE_MODELLING.loss(ours, h_BLD, batch, TrainConfig(), ctx, *outputs)[1]

    sums = run(ours, jnp.asarray(ids))
    assert sums["mtp_tokens"] == 2 * (LENGTH - 2)
    assert float(sums["mtp_loss_sum"][0]) == pytest.approx(float(wanted), rel=LOSS)
