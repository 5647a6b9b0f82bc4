"""The layer that predicts one more token: DeepSeek's is transformers' own, those of hybrids are
their model's own layers and norms in the order of vLLM's."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_cases import VOCAB
from safetensors.numpy import load_file
from test_families_oracle import CASES, LENGTH, exported, imported, saved
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from maxmeg.config.schema import TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.hf.families.read import (
    bindings,
    canonical_names,
    differences,
    hf_config,
    model_config,
    with_saved_tensors,
)
from maxmeg.layers.context import Context
from maxmeg.objectives.language_modelling import LANGUAGE_MODELLING
from maxmeg.parallel.batch import Batch

LOSS = 1e-5  # relative, of a sum over tokens


def apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With the experts one by one, as in files."""
    actual = {}
    for name, array in tensors.items():
        stem, is_stack, part = name.partition(".experts.")
        if not is_stack or "shared_experts" in name:
            actual[name] = array
            continue
        for expert, one in enumerate(array):
            parts = np.split(one, 2) if part == "gate_up_proj" else [one]
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for own, values in zip(names, parts, strict=True):
                actual[f"{stem}.experts.{expert}.{own}.weight"] = values
    return actual


def deepseek_layer(theirs):
    """(layer, its tensors' names in the files), as all of the following."""
    config = theirs.config.get_mtp_config()
    layer = MtpLayer(config, deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm, 0)
    start = f"model.layers.{theirs.config.num_hidden_layers}."
    names = {"mtp_block.": "", "post_norm": "shared_head.norm"}
    return layer, lambda name: start + replaced(name, names)


class Depth(torch.nn.Module):
    """Layers of the model after a projection, each with weights of its own."""

    def __init__(self, layers, norm):
        super().__init__()
        width = norm.weight.shape[0]
        self.enorm, self.hnorm, self.final = (copy.deepcopy(norm) for _ in range(3))
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.layers = torch.nn.ModuleList(copy.deepcopy(layer) for layer in layers)

    def forward(self, later, hidden, rotary, mask, positions, _):
        x = self.fc(torch.cat([self.enorm(later), self.hnorm(hidden)], -1))
        for layer in self.layers:
            extra = {} if rotary is None else {"position_embeddings": rotary}
            x = layer(x, attention_mask=mask, position_ids=positions, **extra)
        return self.final(x)


def replaced(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def qwen_layer(theirs):
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "final": "norm"}
    layer = Depth([theirs.model.layers[-1]], theirs.model.norm)
    return layer, lambda name: "mtp." + replaced(name, names)


def nemotron_layer(theirs):
    names = {"enorm": "layers.0.enorm", "hnorm": "layers.0.hnorm", "fc": "layers.0.eh_proj"}
    names |= {"final": "layers.1.final_layernorm"}
    attention, experts = theirs.model.layers[2], theirs.model.layers[1]
    layer = Depth([attention, experts], theirs.model.norm_f)
    return layer, lambda name: name if name.startswith("layers.") else replaced(name, names)


LAYERS = {
    "deepseek v3": (deepseek_layer, "num_mtp_layers"),
    "qwen 3 next": (qwen_layer, "num_nextn_predict_layers"),
    "qwen 3.5": (qwen_layer, "mtp_num_hidden_layers"),
    "nemotron h": (nemotron_layer, "num_nextn_predict_layers"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_mtp_layers_equal_transformers(case, tmp_path, monkeypatch):
    family, settings = CASES[case]
    made, key = LAYERS[case]
    monkeypatch.setitem(CASES, "predicting", (family, settings | {key: 1}))
    theirs, config = saved("predicting", tmp_path)
    layer, name_of = made(theirs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    layer.eval()
    tensors = apart({name_of(name): t.numpy() for name, t in layer.state_dict().items()})
    if case == "nemotron h":
        tensors = {f"mtp.{name}": array for name, array in tensors.items()}
    model = with_fields(model_config(config), {"moe.aux_loss": 0.0})
    assert model.mtp.num_layers == 1
    tensors |= load_file(tmp_path / "model.safetensors")
    known = canonical_names(tensors, family)
    assert not differences(model, with_saved_tensors(model, tensors, family))
    tensors = {known[name]: array for name, array in tensors.items()}
    assert tensors.keys() == {binding.theirs for binding in bindings(model, family)}
    ours = imported(tensors, model, family)
    back = exported(ours, model, family)
    assert all(np.array_equal(back[name], array) for name, array in tensors.items())
    written = hf_config(model, family, config)
    assert written[key if case != "deepseek v3" else "num_nextn_predict_layers"] == 1

    ids = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    positions = torch.arange(1, LENGTH)[None]
    with torch.no_grad():
        hidden = theirs.model(torch.tensor(ids)).last_hidden_state[:, :-1]
        later = theirs.get_input_embeddings()(torch.tensor(ids[:, 1:]))
        mask = torch.full((LENGTH - 1, LENGTH - 1), -torch.inf).triu(1)[None, None]
        emb = getattr(theirs.model, "rotary_emb", None)
        rotary = emb(later, position_ids=positions) if emb else None
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
        x = ours.stack(ours.embed_tokens(ids_BL, ctx), ctx)[0]
        later = LANGUAGE_MODELLING.head_inputs(ours, batch, ctx)
        outputs, _ = LANGUAGE_MODELLING.loss_inputs(ours, x, later, batch, ctx)
        h_BLD = ours.outputs(x, ctx)
        return LANGUAGE_MODELLING.loss(ours, h_BLD, batch, TrainConfig(), ctx, *outputs)[1]

    sums = run(ours, jnp.asarray(ids))
    assert sums["mtp_tokens"] == 2 * (LENGTH - 2)
    assert float(sums["mtp_loss_sum"][0]) == pytest.approx(float(wanted), rel=LOSS)
