"""peft loads exported adapters onto transformers' base without a word, and gives our logits; those
that it writes give its logits here."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from adapters import merged
from lora_runs import write_lora_run

from maxmeg.config import files
from maxmeg.config.model import DType
from maxmeg.hf.convert import import_model, open_folder
from maxmeg.hf.peft import export_adapter
from maxmeg.inference.adapters import with_adapters
from maxmeg.inference.load import load_run

peft = pytest.importorskip("peft")

LOGITS = 1e-4  # largest error over the scale of the logits
VOCAB, LENGTH = 61, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WIDE = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
CASES = [
    ("LlamaForCausalLM", WIDE, ("query", "value")),
    ("Qwen3ForCausalLM", {**WIDE, "head_dim": 12}, ("*",)),
    ("Phi3ForCausalLM", WIDE, ("query", "value", "mlp.*")),
    ("GPTNeoXForCausalLM", {**SIZES, "intermediate_size": 48}, ("attention.*",)),
    ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}, ("query", "key", "out")),
]
PATTERNS = {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}}
WRITTEN = [
    ("LlamaForCausalLM", WIDE, ["q_proj", "down_proj"], {"use_rslora": True, **PATTERNS}),
    ("Phi3ForCausalLM", WIDE, ["qkv_proj", "gate_up_proj"], {}),
    (
        "GPT2LMHeadModel",
        GPT2,
        ["c_attn", "c_proj"],
        {"fan_in_fan_out": True, "layers_to_transform": [1]},
    ),
]


def saved(architecture: str, settings: dict, folder) -> None:
    """Their model with random weights at which adapters count."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    theirs = kind(kind.config_class(**settings))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)


@pytest.mark.parametrize(
    ("architecture", "settings", "targets"), CASES, ids=[case[0] for case in CASES]
)
def test_peft_loads_adapters_and_gives_our_logits(architecture, settings, targets, tmp_path, heard):
    saved(architecture, settings, tmp_path / "hf")
    base, run = tmp_path / "base", tmp_path / "run"
    import_model(open_folder(tmp_path / "hf"), base, "null:60")
    config = files.load(base / "config.yaml")
    config.checkpoint.init_from, config.model.dtype = str(base), DType.float32
    write_lora_run(run, config, rank=3, alpha=12.0, dropout=0.1, targets=targets)
    folder = export_adapter(str(run), str(tmp_path / "peft"), base=str(tmp_path / "hf"))

    ids = np.random.default_rng(0).integers(0, 60, (2, LENGTH))
    ours = np.asarray(jax.jit(lambda m, i: m(i))(load_run(str(run)).model, jnp.asarray(ids)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    plain = theirs(torch.tensor(ids)).logits.detach().numpy()
    heard.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of peft, which asks transformers for what that has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.PeftModel.from_pretrained(theirs, folder).eval()
    actual = adapted(torch.tensor(ids)).logits.detach().numpy()
    scale = np.abs(ours).max()
    assert not heard and np.abs(actual - ours).max() <= LOGITS * scale
    assert np.abs(plain - ours).max() > 0.05 * scale
    merged = adapted.merge_and_unload()(torch.tensor(ids)).logits.detach().numpy()
    assert np.abs(merged - ours).max() <= LOGITS * scale


@pytest.mark.parametrize(
    ("architecture", "settings", "targets", "options"), WRITTEN, ids=[case[0] for case in WRITTEN]
)
def test_adapters_of_peft_give_its_logits(architecture, settings, targets, options, tmp_path):
    saved(architecture, settings, tmp_path / "hf")
    import_model(open_folder(tmp_path / "hf"), tmp_path / "base", "null:60")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    lora = {"r": 3, "lora_alpha": 12, "target_modules": targets, "init_lora_weights": False}
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**lora, **options)).eval()
    adapted.save_pretrained(tmp_path / "peft")

    ids = np.random.default_rng(0).integers(0, 60, (2, LENGTH))
    actual = adapted(torch.tensor(ids)).logits.detach().numpy()
    base = load_run(str(tmp_path / "base"), dtype=DType.float32)
    model = with_adapters(base, {"one": tmp_path / "peft"}).model
    ours, plain = (np.asarray(each(jnp.asarray(ids))) for each in (merged(model), base.model))
    scale = np.abs(ours).max()
    assert np.abs(actual - ours).max() <= LOGITS * scale
    assert np.abs(plain - ours).max() > 0.05 * scale
