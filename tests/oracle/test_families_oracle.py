"""Every family: the same weights give the logits and gradients of Hugging Face's own models, import
and export are exact inverses, and what is exported loads there without a word."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_cases import VOCAB, YARN, families, gated, sparse, with_states
from safetensors.numpy import load_file, save_file

from maxmeg.checkpoint.names import VOCABULARY_TABLES, array_name
from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import get, walk, with_fields
from maxmeg.hf.families.read import (
    BIAS,
    FAMILIES,
    architecture,
    array_shapes,
    bindings,
    canonical_names,
    differences,
    hf_config,
    model_config,
    unused_arrays,
)
from maxmeg.models.lm import LM

LOGITS = 1e-5  # largest error over the scale of the logits
GRADIENTS = 1e-4  # largest error over the largest gradient of each array
FLOOR = 1e-7  # the key's bias has no gradient in exact arithmetic
LENGTH = 24
PUBLISHED = sorted((Path(__file__).parents[1] / "golden" / "configs").glob("*.json"))
CASES = (
    families()
    | sparse()
    | with_states()
    | {"yarn": ("LlamaForCausalLM", {**gated(), "rope_parameters": {**YARN, "truncate": True}})}
)


def saved(name: str, folder, cases: dict = CASES):
    """Their model, with weights at which norms and biases count, and the files it is saved in."""
    architecture, settings = cases[name]
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    theirs = kind._from_config(kind.config_class(**settings), attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    return theirs.eval(), json.loads((folder / "config.json").read_text())


def imported(tensors: dict[str, np.ndarray], model: ModelConfig, family: str):
    """Our model of the tensors of their files."""
    arrays = {name: np.zeros(shape) for name, shape in unused_arrays(model).items()}
    shapes = array_shapes(model)
    for binding in bindings(model, family):
        assert tensors[binding.theirs].shape == binding.shape
        parts = binding.split(tensors[binding.theirs])
        for place, part in zip(binding.ours, parts, strict=True):
            array = arrays.setdefault(place.name, np.full(shapes[place.name], np.nan, np.float32))
            assert np.isnan(array[place.index]).all()
            array[place.index] = part

    def put(path, array):
        wanted = arrays.pop(array_name(path))
        rows = array.shape[0] - wanted.shape[0]  # of padding
        return jnp.asarray(np.pad(wanted, [(0, rows)] + [(0, 0)] * (wanted.ndim - 1)))

    empty = jax.eval_shape(functools.partial(LM, config=model), jax.random.key(0))
    filled = jax.tree_util.tree_map_with_path(put, empty)
    assert not arrays
    return filled


def exported(ours, model: ModelConfig, family: str) -> dict[str, np.ndarray]:
    """Their tensors of a tree like our model."""
    leaves = jax.tree_util.tree_leaves_with_path(ours)
    arrays = {array_name(path): np.asarray(leaf) for path, leaf in leaves}
    for table in VOCABULARY_TABLES:  # without padding
        if table in arrays:
            arrays[table] = arrays[table][:VOCAB]
    actual = {}
    for binding in bindings(model, family):
        parts = [arrays[place.name][place.index] for place in binding.ours]
        actual[binding.theirs] = binding.join(parts)
    return actual


def assert_returns(ours, model: ModelConfig, family: str, config: dict, tensors, folder) -> dict:
    """Our model becomes their tensors again, and a config.json of the same model, in a new folder
    of theirs; that config.json."""
    back = exported(ours, model, family)
    assert back.keys() == tensors.keys()
    for tensor in tensors:
        np.testing.assert_array_equal(back[tensor], tensors[tensor], err_msg=tensor, strict=True)
    written = hf_config(model, family, config)
    assert not differences(model, model_config(written))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    save_file({n: np.ascontiguousarray(a) for n, a in back.items()}, folder / "model.safetensors")
    return written


@jax.jit
def evaluated(model: LM, ids_BL: jax.Array):
    """(loss, logits), gradients."""

    def loss(model):
        logits_BLV = model(ids_BL)
        log_BLV = jax.nn.log_softmax(logits_BLV[:, :-1])
        return -jnp.take_along_axis(log_BLV, ids_BL[:, 1:, None], axis=-1).mean(), logits_BLV

    return jax.value_and_grad(loss, has_aux=True)(model)


def close(actual: np.ndarray, wanted: np.ndarray, tolerance: float, floor: float = 0.0) -> bool:
    return np.abs(actual - wanted).max() <= tolerance * np.abs(wanted).max() + floor


def saved_gradients(theirs, folder) -> dict[str, np.ndarray]:
    """After its backward, by the names in their files, where experts are one by one."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0) if parameter.grad is None else parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same_gradients(ours, theirs, model: ModelConfig, family: str, folder):
    """Of every tensor of theirs after its backward; its own weights are lost."""
    truth = saved_gradients(theirs, folder)
    untrained = BIAS, ".scale"
    counted = {b.theirs for b in bindings(model, family) if b.ours[0].name.endswith(untrained)}
    for tensor, gradient in exported(ours, model, family).items():
        wanted = truth.pop(tensor)  # what is counted has no gradient there
        assert tensor in counted or close(gradient, wanted, GRADIENTS, FLOOR), tensor
    assert not truth


@pytest.mark.parametrize("name", CASES)
def test_family(name, tmp_path, heard):
    family = CASES[name][0]
    theirs, config = saved(name, tmp_path)
    heard.clear()
    model = with_fields(model_config(config), {"moe.aux_loss": 0.0})  # of the loss below
    tensors = load_file(tmp_path / "model.safetensors")
    known = canonical_names(tensors, family)
    assert all(name == known[name] for name in tensors)
    ours = imported(tensors, model, family)

    ids = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    output = theirs(torch.tensor(ids), labels=torch.tensor(ids))
    output.loss.backward()
    wanted = output.logits.detach().numpy()
    (value, logits), gradients = evaluated(ours, jnp.asarray(ids))
    assert close(np.asarray(logits), wanted, LOGITS)
    assert float(value) == pytest.approx(float(output.loss.detach()), rel=LOGITS)
    assert_same_gradients(gradients, theirs, model, family, tmp_path / "gradients")

    folder = tmp_path / "exported"
    written = assert_returns(ours, model, family, config, tensors, folder)
    assert hf_config(model_config(written), family, config) == written
    heard.clear()
    again = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
    assert not heard
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.tensor(ids)).logits.numpy(), wanted)


NEEDED = {  # without which their classes' own sizes are no model
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", [name for name in FAMILIES])
def test_what_a_file_lacks_is_what_their_class_says(family):
    kind = getattr(transformers, family).config_class
    needed = NEEDED.get(family, {})
    told = kind(architectures=[family], **needed).to_json_string(use_diff=False)
    told = json.loads(told)
    bare = model_config({"architectures": [family], **needed})
    full = model_config(told)
    assert not differences(bare, full)
    kind.from_dict(hf_config(bare, family))  # it refuses no null
    free = [path for path, _, _ in walk(bare) if "dropout" in path or path == "init_std"]
    assert [get(bare, path) for path in free] == [get(full, path) for path in free]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_files_are_read_as_they_read_them(path):
    """Older keys, and what their class makes of them."""
    written = json.loads(path.read_text())
    written.pop("quantization_config", None)  # of the files, not of the model
    (family,) = written["architectures"]
    kind = getattr(transformers, family).config_class
    told = json.loads(kind.from_dict(written).to_json_string(use_diff=False))
    told.pop("auto_map", None)
    assert not differences(model_config(written), model_config(told))


@pytest.mark.parametrize(
    ("kind", "name", "rest"),
    [
        ("Gemma3", "gemma 3", {"mm_tokens_per_image": 1}),
        ("Mistral3", "mistral", {"tie_word_embeddings": False}),
    ],
)
def test_text_part_of_a_model_that_sees(kind, name, rest, tmp_path):
    torch.manual_seed(0)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = CASES[name][1] | {"model_type": {"Gemma3": "gemma3_text"}.get(kind, name)}
    vision["model_type"] = {"Gemma3": "siglip_vision_model"}.get(kind, "pixtral")
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **rest)
    kind = getattr(transformers, f"{kind}ForConditionalGeneration")
    theirs = kind._from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    model, family = model_config(settings), architecture(settings)
    assert not differences(model, model_config(saved(name, tmp_path / "text")[1]))
    tensors = load_file(tmp_path / "model.safetensors")
    known = canonical_names(tensors, family)
    ours = imported({known[name]: tensors[name] for name in known}, model, family)
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, LENGTH))
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids)).logits.numpy()
    (_, logits), _ = evaluated(ours, jnp.asarray(ids))
    assert close(np.asarray(logits), wanted, LOGITS)
