"""GGUF: metadata become settings, llama.cpp's rearrangements are undone, files are read."""

import json

import numpy as np
import pytest
import tokenizers
from hf_folders import GPT2, LLAMA, TIED, random_tensors, write_config, write_tensors
from tokenizers import models, pre_tokenizers

from maxmeg import convert as command
from maxmeg.config.architectures import architecture
from maxmeg.config.flags import run_command
from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import DType
from maxmeg.config.options import Quantize, To
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.setting import get, with_fields
from maxmeg.data.chat.template import load_chat_template
from maxmeg.hf import convert, gguf_export
from maxmeg.hf.families import read as families
from maxmeg.hf.formats import gguf
from maxmeg.hf.formats.gguf import describe, llama3_factors
from maxmeg.inference.load import load_run


def metadata(name, **more):
    keys = {
        "block_count": 3,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "rope.freq_base": 10000.0,
    }
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    return {"general.architecture": name} | {f"{name}.{key}": v for key, v in keys.items()}


FACTORS = llama3_factors(5e5, 8, 32.0)
GEMMA = {"attention__key_length": 16, "attention__value_length": 16, "attention__sliding_window": 8}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
WORKING = {
    "llama": ("llama", {"rope__dimension_count": 8, "vocab_size": 70}, None, {"norm_eps": 1e-5}),
    "llama 3.2": (
        "llama", {"rope__freq_base": 5e5}, FACTORS.astype(np.float32),
        {"rotary.scaling": RotaryScaling.llama3, "rotary.factor": 32, "rotary.base": 5e5},
    ),
    "linear": (
        "llama", {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, None,
        {"rotary.scaling": RotaryScaling.linear, "rotary.factor": 4},
    ),
    "qwen2": ("qwen2", {}, None, {"attention.bias_qkv": True, "attention.num_kv_heads": 2}),
    "qwen3": ("qwen3", {"attention__key_length": 16}, None, 
              {"attention.qk_norm": QkNorm.head, "attention.head_dim": 16}),
    "gemma2": (
        "gemma2", GEMMA2, None,
        {"attention.softcap": 50, "logit_softcap": 30,
         "layers": "*(local,mlp attention,mlp)",
         "attention.window": 8, "norm_one_plus": True, "attention.scale": 0.25},
    ),
    "gemma3": (
        "gemma3", GEMMA | {"block_count": 12, "rope__freq_base": 1e6}, None,
        {"layers": "*(5(local,mlp) attention,mlp)", "rotary.base": 1e6, "rotary.local_base": 1e4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORKING)
def test_metadata_describe_the_model(case):
    name, more, factors, wanted = WORKING[case]
    config, family = describe(metadata(name, **more), 70, name != "qwen2", factors)
    model = families.model_config(config)
    assert families.architecture(config) == family.name
    assert model.vocab_size == 70 and model.max_position == 64 and model.tied == (name != "qwen2")
    actual = {field: get(model, field) or model.head_size**-0.5 for field in wanted}
    assert actual == pytest.approx(wanted) or actual == wanted


REFUSED = {
    "architecture": ("mamba", {}, None, "general.architecture='mamba': supported are llama"),
    "experts": ("qwen3", {"expert_count": 8}, None, "qwen3.expert_count=8: this key is not known"),
    "experts' number": ("llama", {"expert_count": 8}, None, "lack llama.expert_used_count"),
    "head": ("llama", {"rope__dimension_count": 4}, None, "=4 must be the size of a head, 8"),
    "factors": ("llama", {}, np.ones(4) * 3, "neither as Llama 3.1"),
    "scaling": ("llama", {"rope__scaling__type": "magic"}, None, "rope.scaling.type='magic'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_metadata_are_refused(case):
    name, more, factors, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        describe(metadata(name, **more), 70, True, factors)


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ({"eos": 2}, 2),
        ({"eos": 2, "eot": 5, "eom": 2}, [2, 5]),
        ({"eos": 2, "eot": 70}, 2),
    ],
)
def test_special_tokens_are_carried(ids, ends):
    """The ends of turns and messages end generation too."""
    fields = metadata("llama") | {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
    assert describe(fields, 70, True, None)[0]["eos_token_id"] == ends


def test_missing_metadata_are_named():
    fields = metadata("llama")
    del fields["llama.block_count"]
    with pytest.raises(ValueError, match=r"lack llama\.block_count"):
        describe(fields, 70, True, None)


def make_run(folder, model=LLAMA, family="LlamaForCausalLM", tokenizer=True):
    """Write `run`, and return its tensors by transformers' names."""
    write_config(folder / "hf", model, family)
    tensors = random_tensors(model, family, np.float32)
    write_tensors(folder / "hf", tensors)
    if tokenizer:
        bpe = models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[("a", "b")])
        made = tokenizers.Tokenizer(bpe)
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.add_special_tokens(["<end>"])
        made.save(str(folder / "hf" / "tokenizer.json"))
        named = {"eos_token": "<end>", "chat_template": "{{ messages[0].content }}<end>"}
        (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(named))
    convert.import_model(convert.open_folder(folder / "hf"), folder / "run")
    return tensors


TOKENS = ["a", "b", "ab", "\u0120", "<end>"]
EXPERTS = with_fields(
    LLAMA,
    {"layers": "*(attention,moe)", "moe.num_experts": 3, "moe.ffn_size": 64, "moe.aux_loss": 0.01},
)
SHARED = {"moe.softmax_before_topk": True, "moe.shared_ffn_size": 32, "moe.shared_gate": True}
QWEN = with_fields(LLAMA, {"attention.bias_qkv": True, "mlp.ffn_size": 64})
KINDS = [
    *((LLAMA, "llama", form) for form in gguf_export.TYPES),
    (TIED, "llama", DType.float32),
    (QWEN, "qwen2", Quantize.q8_0),
    (with_fields(LLAMA, {"attention.qk_norm": QkNorm.head}), "qwen3", DType.float32),
    (EXPERTS, "llama with experts", Quantize.q4_0),
    (with_fields(EXPERTS, {"attention.bias_qkv": True, **SHARED}), "qwen2moe", Quantize.q8_0),
    (with_fields(EXPERTS, {"attention.qk_norm": QkNorm.head}), "qwen3moe", DType.bfloat16),
    (
        with_fields(EXPERTS, {"attention.qk_norm": QkNorm.heads, "moe.softmax_before_topk": True}),
        *("olmoe", DType.float16),
    ),
]


@pytest.mark.parametrize(("model", "name", "form"), KINDS)
def test_a_file_holds_the_model_that_was_written(tmp_path, model, name, form):
    library = pytest.importorskip("gguf")
    tensors = make_run(tmp_path, model, gguf.FAMILIES[name].name)
    chosen = (DType.bfloat16, form) if form in Quantize else (form,)
    report = gguf_export.export_gguf(tmp_path / "run", tmp_path / "x.gguf", *chosen)
    names = {gguf.ggml_name(theirs, name) for theirs in tensors}
    assert (report.family, report.num_tensors) == (name, len(names))
    assert any("float16" in note for note in report.notes) is (form in Quantize and model is LLAMA)
    source = gguf.open_file(tmp_path / "x.gguf")
    untrained = with_fields(model, {"moe.aux_loss": 0.0})
    assert families.differences(families.model_config(source.config), untrained) == []
    assert source.weights.tensors.keys() == tensors.keys()
    for theirs, array in tensors.items():
        is_exact = array.ndim < 2 or theirs.endswith("gate.weight")
        kind = "F32" if is_exact else gguf_export.TYPES[form][0]
        if form is Quantize.q4_0 and ("embed" in theirs or "lm_head" in theirs):
            kind = "Q8_0"
        kind = library.GGMLQuantizationType[
            "F16" if kind[0] == "Q" and array.shape[1] % 32 else kind
        ]
        pairs = gguf.to_ggml(theirs, array, name, source.config)
        wanted = library.quants.dequantize(library.quants.quantize(pairs, kind), kind)
        permuted = gguf.to_ggml(theirs, source.weights.read(theirs), name, source.config)
        np.testing.assert_array_equal(permuted, wanted)
        if kind.name == "F32":
            assert source.weights.read(theirs).tobytes() == array.tobytes()


def test_a_file_keeps_tokenizer_and_chat_template(tmp_path, capsys):
    """The printed next step works: text and chats."""
    make_run(tmp_path)
    for argv in (
        ["--to=gguf", f"--input={tmp_path / 'run'}", f"--output={tmp_path / 'x.gguf'}"],
        [f"--input={tmp_path / 'x.gguf'}", f"--output={tmp_path / 'again'}"],
    ):
        argv = ["convert", *argv]
        run_command(command.main, command.Options, needs_config=False, argv=argv)
    said = capsys.readouterr().out
    assert f"next: llama-cli -m {tmp_path / 'x.gguf'}" in said and "note" not in said
    assert f"next: maxmeg chat {tmp_path / 'again'}" in said
    tokenizer = load_run(str(tmp_path / "again")).tokenizer
    assert tokenizer.encode("ab a<end>").tolist() == [2, 3, 0, 4] and tokenizer.eod == 4
    (text,) = load_chat_template(tokenizer).render([[{"role": "user", "content": "b"}]])
    assert text == "b<end>"


def test_models_and_tokenizers_that_gguf_lacks_are_refused(tmp_path):
    make_run(tmp_path, tokenizer=False)
    with pytest.raises(ValueError, match=r"data\.tokenizer=null:70: a GGUF file holds"):
        gguf_export.export_gguf(tmp_path / "run", tmp_path / "x.gguf")
    with pytest.raises(ValueError, match=r"name a file that does not exist, ending in \.gguf"):
        gguf_export.export_gguf(tmp_path / "run", tmp_path / "x")
    part = with_fields(LLAMA, {"rotary.fraction": 0.5})
    for model, kind in (
        (GPT2, "GPT2LMHeadModel: "),
        (part, r".*\(llama: .*rotary\.fraction"),
        (architecture("gpt-oss-20b"), "GptOssForCausalLM: "),
    ):
        with pytest.raises(ValueError, match=f"GGUF is written for llama, .* model is {kind}"):
            gguf_export.architecture(model)
    for to, how in (("gguf", "int8"), ("huggingface", "q8_0")):
        options = command.Options(str(tmp_path / "run"), "x", To(to), quantize=Quantize(how))
        with pytest.raises(ValueError, match=f"--quantize={how} needs --to="):
            command.main(options)


def test_damaged_files_are_refused(tmp_path):
    pytest.importorskip("gguf")
    for content in (b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"nonsense" * 10):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read as a GGUF file: .*download it again"):
            gguf.open_file(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="is not a file"):
        gguf.open_file(tmp_path / "none.gguf")
