"""transformers reads GGUF files that are written here: weights, logits and tokens."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from maxmeg.config.model import DType
from maxmeg.config.options import Quantize
from maxmeg.hf import convert, gguf_export
from maxmeg.hf.formats import gguf

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
QWEN2 = {**EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
QWEN3 = {**EXPERTS, "head_dim": 128, "moe_intermediate_size": 32, "norm_topk_prob": True}
# transformers takes the widths of experts from its defaults, not from a GGUF file.
WIDTHS = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
CASES = [
    ("llama", {}, (DType.float32,)),
    ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, (DType.float16,)),
    ("mistral", {"sliding_window": None}, (DType.float16, Quantize.q8_0)),
    ("qwen2", {}, (DType.bfloat16,)),
    ("qwen3", {"head_dim": 128}, (DType.float16, Quantize.q4_0)),
    ("qwen2_moe", QWEN2 | WIDTHS, (DType.float32,)),
    ("qwen3_moe", QWEN3 | {"moe_intermediate_size": 768}, (DType.float16, Quantize.q8_0)),
    ("gemma2", GEMMA, (DType.float32,)),
    ("gemma3_text", GEMMA, (DType.float16, Quantize.q8_0)),
]
TOLERANCE = 1e-5  # of float32 sums
TEXT = "hello the cat</s> it's 12"


def write_tokenizer(folder):
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=special)
    made.train_from_iterator(["hello world", "the cat sat"] * 9, trainer)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return made.encode(TEXT).ids


def make_run(tmp_path, kind, more):
    """(transformers' random model, ids of TEXT); its folder is `hf`, and its import `run`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | more)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "hf")
    ids = write_tokenizer(tmp_path / "hf")
    convert.import_model(convert.open_folder(tmp_path / "hf"), tmp_path / "run")
    return model, ids


def parameters(weights):
    """A file's tensors as transformers holds them: the experts of a layer stacked."""
    arrays, experts = {}, {}
    for name in weights.tensors:
        layer, _, expert = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if not expert:
            arrays[layer] = weights.read(name)
            continue
        projection = expert.split(".")[1]
        experts.setdefault(layer, {}).setdefault(projection, []).append(weights.read(name))
    for layer, projections in experts.items():
        gate, up, down = map(np.stack, projections.values())
        arrays[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        arrays[f"{layer}.experts.down_proj"] = down
    return arrays


def assign(model, weights):
    """Give a model of transformers a file's weights."""
    for name, array in parameters(weights).items():
        model.get_parameter(name).data = torch.from_numpy(array.copy())


@pytest.mark.parametrize(("kind", "more", "form"), CASES)
def test_transformers_reads_the_file(tmp_path, kind, more, form):
    model, ids = make_run(tmp_path, kind, more)
    gguf_export.export_gguf(tmp_path / "run", tmp_path / "x.gguf", *form)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    state, weights = theirs.state_dict(), gguf.open_file(tmp_path / "x.gguf").weights
    for name, array in parameters(weights).items():
        assert np.array_equal(state[name].numpy(), array), name
    assign(model, weights)
    rope_scaling = "rope_parameters" in more  # which transformers does not read
    with torch.no_grad():
        logits, wanted = (m(torch.tensor([ids])).logits for m in (theirs, model))
    assert rope_scaling or (logits - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == ids
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("</s>", "{{ messages }}</s>")
