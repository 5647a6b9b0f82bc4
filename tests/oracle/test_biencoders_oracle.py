"""Exported biencoders: the vectors of transformers' models with the modules of the exported folder
are those of maxmeg."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import maxmeg
from maxmeg.config.head import Biencoder, two_encoders
from maxmeg.config.model import DType
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.hf.convert import export_model
from maxmeg.hf.families.read import model_config
from maxmeg.models.lm import LM

CLOSE = 1e-5  # relative to the largest number of a vector
ROOM, VOCAB = 24, 61
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": ROOM + 1, "pad_token_id": 0}
ONE = {"head.biencoder": Biencoder.shared, "bert.pooler": False, "vocab_divisible_by": 1}
TWO = ONE | {"head.biencoder": Biencoder.separate, "layers": two_encoders(3), "num_layers": 6}
CASES = {  # model class, fields
    "shared": ("BertModel", ONE),
    "pooler and projection": ("BertModel", ONE | {"bert.pooler": True, "head.projection": 12}),
    "separate": ("BertModel", TWO | {"head.projection": 12}),
    "RoBERTa": ("RobertaModel", ONE | {"bert.pooler": True, "head.projection": 12}),
    "Megatron-BERT": ("MegatronBertModel", ONE | {"head.projection": 12}),
    "ModernBERT": ("ModernBertModel", ONE | {"head.projection": 12}),
}
# RoBERTa numbers positions from 1 on, and gives none to id 0.
IDS = [np.random.default_rng(n).integers(1, VOCAB, n).tolist() for n in (ROOM, 1, 7)]


def theirs(folder) -> np.ndarray:
    """The vectors of a folder's modules, as sentence-transformers runs them."""
    first, pooling, *dense = json.loads((folder / "modules.json").read_text())
    assert first["type"].endswith("models.Transformer") and first["path"] == ""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    settings = json.loads((folder / pooling["path"] / "config.json").read_text())
    assert settings["pooling_mode_cls_token"] and not settings["pooling_mode_mean_tokens"]
    rows = []
    for ids in IDS:
        with torch.no_grad():
            x = model(torch.tensor([ids])).last_hidden_state[:, 0]
            for module in dense:
                path = folder / module["path"]
                settings = json.loads((path / "config.json").read_text())
                shape = settings["in_features"], settings["out_features"]
                linear = torch.nn.Linear(*shape, bias=settings["bias"])
                weights = load_file(path / "model.safetensors")
                linear.load_state_dict({k.removeprefix("linear."): v for k, v in weights.items()})
                kind = settings["activation_function"].rpartition(".")[2]
                x = getattr(torch.nn, kind)()(linear(x))
        rows.append(x[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_transformers(name, tmp_path):
    family, fields = CASES[name]
    model = model_config({"architectures": [family], **SIZES})
    model = with_fields(model, fields | {"dtype": DType.float32, "init_std": 0.3})
    config = Config(model=model)
    config.data.tokenizer = f"null:{VOCAB - 1}"
    weights = jax.jit(lambda key: LM(key, model))(jax.random.key(0))
    random = np.random.default_rng(0)  # no bias is 0, no weight of a norm 1
    weights = jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape).astype("f"), weights)
    ours = maxmeg.LanguageModel(weights, config)
    ours.save(tmp_path / "run")
    report = export_model(tmp_path / "run", tmp_path / "hf", DType.float32)
    folders = {"query": True, "text": False} if name == "separate" else {"": False}
    for folder, queries in folders.items():
        found, wanted = theirs(tmp_path / "hf" / folder), ours.embed(IDS, queries=queries)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=CLOSE * np.abs(wanted).max())
        assert f"SentenceTransformer('{tmp_path / 'hf' / folder}')" in report.loaded_by
    has_note = name in ("shared", "separate", "Megatron-BERT")
    assert any("no pooler" in note for note in report.notes) == has_note
