"""Further tokens as megatron-core predicts them: targets (in packed rows too), losses, slopes."""

import subprocess
import sys
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from megatron_further import FACTOR, FFN, HEADS, HIDDEN, PADDED

from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import Config, LossReduction
from maxmeg.config.setting import with_fields
from maxmeg.models.lm import LM
from maxmeg.objectives.language_modelling import LANGUAGE_MODELLING, shifted
from maxmeg.parallel.batch import Batch
from maxmeg.state import array_name, to_arrays
from maxmeg.step import complete, local_gradients

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its imports say of optional packages
    from megatron.core.transformer.multi_token_prediction import roll_tensor

SHIFTED = ("tokens", "positions", "targets", "loss_mask")
TOLERANCE = 1e-5  # relative to the largest of an array
LENGTH, DEPTHS = 12, 3


@pytest.mark.parametrize("ends", [[LENGTH], [1, 6, 8, LENGTH]])
def test_what_comes_later_is_what_is_rolled(ends: list[int]):
    """Megatron-LM rolls once more for each depth; packed rows it rolls document by document."""
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(1, 50, (1, LENGTH)) for name in SHIFTED}
    batch["loss_mask"] = (rng.random((1, LENGTH)) < 0.6).astype(np.float32)
    segments = 1 + np.searchsorted(ends, np.arange(LENGTH), side="right")
    packed = {"segment_ids": segments[None]} if len(ends) > 1 else {}
    params = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, *ends])) if packed else None
    ours = jax.tree.map(jnp.asarray, Batch.of(batch | packed))
    theirs = {name: torch.tensor(array) for name, array in batch.items()}
    for depth in range(1, DEPTHS + 1):
        later = shifted(ours, depth)
        for name in SHIFTED:
            theirs[name], total = roll_tensor(theirs[name], packed_seq_params=params)
            np.testing.assert_array_equal(getattr(later, name), theirs[name].numpy(), err_msg=name)
            assert float(getattr(later, name).sum()) == float(total)


def our_layer(theirs: dict, prefix: str) -> dict[str, np.ndarray]:
    """Names and layouts of one layer's weights, or of their gradients."""
    qkv = theirs[f"{prefix}self_attention.linear_qkv.weight"].reshape(HEADS, 3, -1, HIDDEN)
    pair = theirs[f"{prefix}mlp.linear_fc1.weight"]
    attention, mlp = "sublayers.0.mixers.attention.", "sublayers.1.mixers.mlp."
    names = enumerate(("query", "key", "value"))
    return {
        **{f"{attention}{name}": qkv[:, i].reshape(-1, HIDDEN).T for i, name in names},
        f"{attention}out": theirs[f"{prefix}self_attention.linear_proj.weight"].T,
        f"{mlp}gate": pair[:FFN].T,
        f"{mlp}up": pair[FFN:].T,
        f"{mlp}out": theirs[f"{prefix}mlp.linear_fc2.weight"].T,
        "sublayers.0.norm": theirs[f"{prefix}input_layernorm.weight"],
        "sublayers.1.norm": theirs[f"{prefix}pre_mlp_layernorm.weight"],
    }


def ours(actual, kind: str) -> dict[str, np.ndarray]:
    """All "weights" or "gradients" of the model by our names."""
    theirs = {n.removeprefix(f"{kind} "): actual[n] for n in actual.files if n.startswith(kind)}
    arrays = {
        "embedding.table": theirs["embedding.word_embeddings.weight"],
        "output.table": theirs["output_layer.weight"],
        "final_norm.weight": theirs["decoder.final_layernorm.weight"],
    }
    places = [("stack.groups.0.", our_layer(theirs, "decoder.layers.0."))]
    ends = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj"}
    for d in range(2):
        prefix = f"mtp.layers.{d}."
        places.append((f"mtp.depths.{d}.layer.", our_layer(theirs, f"{prefix}transformer_layer.")))
        for name, end in (ends | {"final_norm": "final_layernorm"}).items():
            arrays[f"mtp.depths.{d}.{name}.weight"] = theirs[f"{prefix}{end}.weight"].T
    return arrays | {f"{start}{n}.weight": a for start, layer in places for n, a in layer.items()}


def test_losses_and_gradients_are_those_of_its_gpt(tmp_path):
    """Of a microbatch whose depths each have their own number of tokens."""
    script = Path(__file__).with_name("megatron_further.py")
    subprocess.run([sys.executable, script, tmp_path], check=True)
    actual = np.load(tmp_path / "further.npz")
    sizes = {
        "vocab_size": PADDED,
        "hidden_size": HIDDEN,
        "attention.num_heads": HEADS,
        "mlp.ffn_size": FFN,
    }
    further = {"mtp.num_layers": 2, "mtp.loss_weight": FACTOR}
    config = with_fields(
        ModelConfig(), {"num_layers": 1, "dtype": DType.float32, **sizes, **further}
    )
    weights, gradients = ours(actual, "weights"), ours(actual, "gradients")
    model = jax.tree_util.tree_map_with_path(
        lambda path, like: jnp.asarray(weights[array_name(path)]).reshape(like.shape),
        jax.eval_shape(lambda key: LM(key, config), jax.random.key(0)),
    )
    assert to_arrays(model).keys() == weights.keys()
    batch = Batch.of({name: jnp.asarray(actual[name])[None] for name in SHIFTED})
    whole = complete(batch, LossReduction.megatron, 1, LANGUAGE_MODELLING.masks(model, batch))
    own, sums = jax.jit(
        lambda model: local_gradients(model, whole, None, Config(), LANGUAGE_MODELLING)
    )(model)
    means = [sums["loss_sum"] / sums["tokens"], *(sums["mtp_loss_sum"] / sums["mtp_tokens"])]
    np.testing.assert_allclose(means, actual["losses"], rtol=TOLERANCE)
    for name, array in to_arrays(own).items():
        wanted = gradients[name].reshape(array.shape)
        assert np.abs(array - wanted).max() <= TOLERANCE * np.abs(wanted).max(), name
