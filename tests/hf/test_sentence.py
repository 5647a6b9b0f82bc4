"""Exports of biencoders that are refused. Vectors of those exported: tests/oracle."""

import types

import jax
import pytest

import maxmeg
from maxmeg.config.head import Biencoder, two_encoders
from maxmeg.config.model import DType, NormPlace
from maxmeg.config.options import Quantize
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.hf import convert
from maxmeg.hf.families.read import model_config
from maxmeg.hf.sentence import encoders_of
from maxmeg.models.lm import LM

SIZES = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 8, "pad_token_id": 0}
SEPARATE = {"head.biencoder": Biencoder.separate, "layers": two_encoders(2), "num_layers": 4}
SEPARATE |= {"bert.pooler": False, "head.projection": 6, "dtype": DType.float32}


def test_families_and_roundings_cannot_be_chosen(tmp_path):
    model = with_fields(model_config({"architectures": ["BertModel"], **SIZES}), SEPARATE)
    config = Config(model=model)
    config.data.tokenizer = "null:127"
    weights = jax.jit(lambda key: LM(key, model))(jax.random.key(0))
    maxmeg.LanguageModel(weights, config).save(tmp_path / "run")
    for refused in ({"family": "BertModel"}, {"quantize": Quantize.int8}):
        with pytest.raises(ValueError, match="biencoder"):
            convert.export_model(tmp_path / "run", tmp_path / "other", **refused)


def test_layers_without_a_class_are_refused():
    model = with_fields(model_config({"architectures": ["BertModel"], **SIZES}), SEPARATE)
    model = with_fields(model, {"norm_place": NormPlace.pre})
    trained = types.SimpleNamespace(model=model, config=Config(model=model))
    with pytest.raises(ValueError, match=r"(?s)BertModel cannot.*norm_place.*ModernBertModel can"):
        encoders_of(trained)  # pyright: ignore
