"""Exported biencoders: arrays of both encoders, what is refused. Their vectors: tests/oracle."""

import types

import jax
import numpy as np
import pytest

import maxmeg
from maxmeg.config.head import Biencoder, two_encoders
from maxmeg.config.model import DType, NormPlace
from maxmeg.config.options import Quantize
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.hf import convert
from maxmeg.hf.families.read import model_config
from maxmeg.hf.formats.safetensors import SafetensorsFolder
from maxmeg.hf.sentence import encoders_of
from maxmeg.models.lm import LM
from maxmeg.state import to_arrays

SIZES = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 8, "pad_token_id": 0}
SEPARATE = {"head.biencoder": Biencoder.separate, "layers": two_encoders(2), "num_layers": 4}
SEPARATE |= {"bert.pooler": False, "head.projection": 6, "dtype": DType.float32}


@pytest.mark.slow
def test_each_encoder_has_its_own_weights(tmp_path):
    model = with_fields(model_config({"architectures": ["BertModel"], **SIZES}), SEPARATE)
    config = Config(model=model)
    config.data.tokenizer = "null:127"
    weights = jax.jit(lambda key: LM(key, model))(jax.random.key(0))
    maxmeg.LanguageModel(weights, config).save(tmp_path / "run")
    convert.export_model(tmp_path / "run", tmp_path / "hf", DType.float32)
    for refused in ({"family": "BertModel"}, {"quantize": Quantize.int8}):
        with pytest.raises(ValueError, match="biencoder"):
            convert.export_model(tmp_path / "run", tmp_path / "other", **refused)
    arrays, checked = to_arrays(weights), 0
    listed = convert.exported(tmp_path / "run")
    for name, binding in listed:
        folder, _, tensor = name.partition("/")
        if binding.ours[0].name in arrays:
            found = SafetensorsFolder(tmp_path / "hf" / folder).read(tensor)
            wanted = [np.asarray(arrays[place.name])[place.index] for place in binding.ours]
            np.testing.assert_array_equal(found, binding.join(wanted))
            checked += 1
    assert len(listed) - checked == 4  # weight and bias of two poolers
    dense = [SafetensorsFolder(tmp_path / "hf" / name / "2_Dense") for name in ("query", "text")]
    for folder, prefix in zip(dense, ("query.", ""), strict=True):
        wanted = np.asarray(arrays[f"{prefix}classifier.linear.weight"]).T
        np.testing.assert_array_equal(folder.read("linear.weight"), wanted)


def test_layers_without_a_class_are_refused():
    model = with_fields(model_config({"architectures": ["BertModel"], **SIZES}), SEPARATE)
    model = with_fields(model, {"norm_place": NormPlace.pre})
    trained = types.SimpleNamespace(model=model, config=Config(model=model))
    with pytest.raises(ValueError, match=r"(?s)BertModel cannot.*norm_place.*ModernBertModel can"):
        encoders_of(trained)  # pyright: ignore
