"""Quantized exports have the matrices that quantization-aware training multiplies. All their other
tensors equal those of an export that is not quantized."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import families as dense
from hf_cases import sparse
from hf_folders import random_tensors

from maxmeg.config.model import DType
from maxmeg.config.options import Convert, Quantize, To
from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.convert import main
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf import convert
from maxmeg.hf.families import read as families
from maxmeg.hf.formats.quantized import QUANTIZATION
from maxmeg.hf.formats.safetensors import SafetensorsFolder
from maxmeg.hf.quantize import FORMATS, notes_of
from maxmeg.hf.trained import TrainedModel
from maxmeg.ops.recipes import RECIPES

HIDDEN, HEADS, HEAD_DIM = 64, 4, 32
MODELS = dense(HIDDEN, HEADS, HEAD_DIM) | sparse(HIDDEN, HEADS, HEAD_DIM)
STACKED = ("gpt oss", "gpt oss, unscaled", "granite moe", "granite moe, shared", "llama 4")
STACKED += ("gemma 4 moe",)  # whose experts have sizes that no format quantizes
REFUSED = {"gpt 2": r"\[inputs, outputs\]", **dict.fromkeys(STACKED, "several matrices")}
QUICK = [("llama", form) for form in FORMATS] + [("mixtral", Quantize.nvfp4)]
ALIKE = ("llama 3", "mistral", "qwen 2", "qwen 3", "gemma 2", "olmo 2", "starcoder 2", "nemotron")
NAMES = [name for name in MODELS if name not in (*REFUSED, *ALIKE)]  # as Llama, matrix by matrix
# Every other family, and every format about as often.
LONG = [case for case in zip(NAMES, itertools.cycle(FORMATS), strict=False) if case not in QUICK]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)]
NOT_ROUNDED = r"embed|lm_head|\.w[tp]e$|\.(gate|router|eh_proj)$"  # others that blocks divide


def write_run(name, folder, changes=()):
    """Makes `run`, of random weights."""
    family, settings = MODELS[name]
    model = families.model_config(settings | {"architectures": [family]})
    config = Config(run_dir=str(folder / "run"), model=with_fields(model, dict(changes)))
    config.data.tokenizer = f"null:{model.vocab_size}"
    tensors = random_tensors(config.model, family, np.float32)
    pieces = (
        (piece, tensors[binding.theirs] if expert is None else tensors[binding.theirs][expert])
        for binding in families.bindings(config.model, family)
        for expert, piece in binding.pieces()
    )
    convert.write_run(config, load_tokenizer(config.data.tokenizer).identity, pieces)


@functools.partial(jax.jit, static_argnums=1)
def rounded(w_IO: jax.Array, form: Quantize) -> jax.Array:
    recipe = RECIPES[FORMATS[form].recipe]
    of_columns = {"axis": -2, "keepdims": True} if form is Quantize.int8 else {}
    copies = recipe.weights(w_IO, jnp.max(jnp.abs(w_IO), **of_columns))
    return recipe.wide(copies[0], jnp.float32)


@pytest.mark.parametrize("name, form", CASES)
def test_matrices_are_as_in_training_and_the_rest_as_in_a_plain_export(tmp_path, name, form):
    write_run(name, tmp_path)
    run, trained = tmp_path / "run", TrainedModel(tmp_path / "run")
    family = MODELS[name][0]
    convert.export_model(run, tmp_path / "plain", DType.float32, family=family)
    report = convert.export_model(
        run, tmp_path / "q", DType.float32, 100_000, None, family, False, form
    )
    assert report.loaded_by == f"vllm serve {tmp_path / 'q'}"
    stored, served = SafetensorsFolder(tmp_path / "q").tensors, convert.open_folder(tmp_path / "q")
    plain = SafetensorsFolder(tmp_path / "plain")
    assert served.weights.tensors.keys() == plain.tensors.keys()
    assert "are dequantized" in served.notes[0]
    ignored = json.loads((tmp_path / "q" / "config.json").read_text())[QUANTIZATION]["ignore"]
    assert "lm_head" in ignored
    count = 0
    for binding in families.bindings(trained.model, family):
        module, unrounded = binding.theirs.removesuffix(".weight"), plain.read(binding.theirs)
        read = served.weights.read(binding.theirs)
        if f"{module}.weight_scale" in stored:
            count += 1
            assert module not in ignored
            wanted = [np.asarray(rounded(trained.read(place), form)) for place in binding.ours]
            np.testing.assert_array_equal(read, binding.join(wanted).astype(read.dtype))
            continue
        np.testing.assert_array_equal(read, unrounded)
        if unrounded.ndim == 2 and min(unrounded.shape) > 1:
            assert module in ignored
            parts = [trained.read(place).shape for place in binding.ours]
            is_whole = all(size % 32 == 0 for part in parts for size in part)
            assert not is_whole or re.search(NOT_ROUNDED, module), module
    assert count >= trained.model.num_layers


def test_layers_in_16_bits_stay_so(tmp_path):
    write_run("llama", tmp_path, {"last_layers_bf16": 1})
    convert.export_model(tmp_path / "run", tmp_path / "q", quantize=Quantize.mxfp4)
    scales = [name for name in SafetensorsFolder(tmp_path / "q").tensors if "scale" in name]
    assert {name.split(".")[2] for name in scales} == {"0"}


@pytest.mark.parametrize("name", REFUSED)
def test_families_with_other_matrices_are_refused(tmp_path, name):
    write_run(name, tmp_path)
    with pytest.raises(ValueError, match=REFUSED[name]):
        convert.export_model(
            tmp_path / "run", tmp_path / "q", family=MODELS[name][0], quantize=Quantize.int8
        )
    assert not (tmp_path / "q").exists()


def test_models_whose_sizes_blocks_do_not_divide_are_refused(tmp_path):
    write_run("llama", tmp_path, {"hidden_size": 40, "attention.head_dim": 10, "mlp.ffn_size": 24})
    with pytest.raises(ValueError, match="multiples of 32"):
        convert.export_model(tmp_path / "run", tmp_path / "q", quantize=Quantize.mxfp4)


def test_notes_say_how_serving_differs_from_training():
    recipe = QuantizationRecipe
    assert "--quantize=int8" in notes_of(recipe.qat_int8, Quantize.none)[0]
    assert "--quantize=mxfp4" in notes_of(recipe.qat_mxfp4, Quantize.int8)[0]
    assert "calibrate" in notes_of(recipe.qat_nvfp4, Quantize.nvfp4)[0]
    assert not notes_of(recipe.qat_int8, Quantize.int8) and not notes_of(recipe.none, Quantize.none)


def test_a_list_shows_no_quantized_tensors():
    with pytest.raises(ValueError, match="omit --quantize"):
        main(Convert("runs/x", "out", To.huggingface, list=True, quantize=Quantize.int8))
