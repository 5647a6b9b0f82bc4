"""GGUF: metadata become settings, llama.cpp's rearrangements are undone, files are read."""

import numpy as np
import pytest
from hf_folders import LLAMA, TIED, random_tensors

from maxmeg import convert as command
from maxmeg.config.flags import run_command
from maxmeg.config.mixers import QkNorm
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.setting import get
from maxmeg.data.chat.template import load_chat_template
from maxmeg.hf import convert
from maxmeg.hf.families import read as families
from maxmeg.hf.formats import gguf
from maxmeg.hf.formats.gguf import describe, llama3_factors
from maxmeg.inference.load import load_run

Q8_ERROR = 1 / 127  # half a step of 1 / 127 of a block's largest value, and its own rounding


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
    "experts": ("llama", {"expert_count": 8}, None, "llama.expert_count=8: this key is not known"),
    "head": ("llama", {"rope__dimension_count": 4}, None, "=4 must be the size of a head, 8"),
    "factors": ("llama", {}, np.ones(4) * 3, "neither as Llama 3.1"),
    "scaling": ("llama", {"rope__scaling__type": "magic"}, None, "rope.scaling.type='magic'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_metadata_are_refused(case):
    name, more, factors, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        describe(metadata(name, **more), 70, True, factors)


def test_special_tokens_are_carried():
    fields = metadata("llama") | {"tokenizer.ggml.eos_token_id": 2}
    assert describe(fields, 70, True, None)[0]["eos_token_id"] == 2


def test_missing_metadata_are_named():
    fields = metadata("llama")
    del fields["llama.block_count"]
    with pytest.raises(ValueError, match=r"lack llama\.block_count"):
        describe(fields, 70, True, None)


def permuted(array, num_heads):
    """As llama.cpp's conversion writes queries and keys."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


OURS = {hf: ggml for ggml, hf in gguf.LAYERS.items()} | {v: k for k, v in gguf.ENDS.items()}


def ggml_name(name):
    module, leaf = name.rsplit(".", 1)
    if module in OURS:
        return f"{OURS[module]}.{leaf}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{OURS[inner]}.{leaf}"


def write_gguf(path, model, tensors, quantised=False, tokenizer=False):
    library = pytest.importorskip("gguf")
    writer = library.GGUFWriter(path, "llama")
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(len(TOKENS) - 1)
        writer.add_chat_template("{{ messages[0].content }}<end>")
    for key, value in metadata("llama").items():
        if key == "general.architecture":
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(key, value)
    for name, array in tensors.items():
        heads = {"q_proj": model.attention.num_heads, "k_proj": model.kv_heads}.get(
            name.split(".")[-2]
        )
        array = permuted(array, heads) if heads else array
        if quantised and array.ndim == 2:
            kind = library.GGMLQuantizationType.Q8_0
            raw = library.quants.quantize(array.astype(np.float32), kind)
            writer.add_tensor(ggml_name(name), raw, raw_dtype=kind)
        else:
            writer.add_tensor(ggml_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TOKENS = ["a", "b", "ab", "\u0120", "<end>"]


def test_the_tokenizer_of_the_file_is_kept(tmp_path, capsys):
    """The printed next step works: text and chats; an export has the tokenizer's files."""
    tensors = random_tensors(LLAMA, "LlamaForCausalLM", np.float32)
    write_gguf(tmp_path / "x.gguf", LLAMA, tensors, tokenizer=True)
    argv = ["convert", f"--input={tmp_path / 'x.gguf'}", f"--output={tmp_path / 'run'}"]
    run_command(command.main, command.Options, needs_config=False, argv=argv)
    said = capsys.readouterr().out
    assert f"next: maxmeg chat {tmp_path / 'run'}" in said and "note" not in said
    tokenizer = load_run(str(tmp_path / "run")).tokenizer
    assert tokenizer.encode("ab a<end>").tolist() == [2, 3, 0, 4] and tokenizer.eod == 4
    (text,) = load_chat_template(tokenizer).render([[{"role": "user", "content": "b"}]])
    assert text == "b<end>"
    convert.export_model(tmp_path / "run", tmp_path / "hf")
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names <= {path.name for path in (tmp_path / "hf").iterdir()}


@pytest.mark.parametrize("model", [LLAMA, TIED], ids=["untied", "tied"])
def test_a_file_holds_the_same_model_as_a_folder(tmp_path, model):
    tensors = random_tensors(model, "LlamaForCausalLM", np.float32)
    write_gguf(tmp_path / "x.gguf", model, tensors)
    source = gguf.open_file(tmp_path / "x.gguf")
    assert families.differences(families.model_config(source.config), model) == []
    assert set(source.weights.tensors) == set(tensors)
    for name, array in tensors.items():
        assert source.weights.read(name).tobytes() == array.tobytes(), name
    report = convert.import_model(source, tmp_path / "run")
    assert report.num_tensors == len(tensors)
    assert "there is no tokenizer: the file has no tokenizer.ggml.tokens" in report.notes[0]
    convert.export_model(tmp_path / "run", tmp_path / "hf")


def test_quantised_tensors_are_dequantised(tmp_path):
    tensors = random_tensors(LLAMA, "LlamaForCausalLM", np.float32)
    tensors = {name: array for name, array in tensors.items() if array.shape[-1] == 32}
    write_gguf(tmp_path / "x.gguf", LLAMA, tensors, quantised=True)
    weights = gguf.open_file(tmp_path / "x.gguf").weights
    for name, array in tensors.items():
        error = np.abs(weights.read(name) - array).max()
        assert error <= Q8_ERROR * np.abs(array).max(), name


def test_damaged_files_are_refused(tmp_path):
    pytest.importorskip("gguf")
    for content in (b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"nonsense" * 10):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a GGUF file"):
            gguf.open_file(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="is not a file"):
        gguf.open_file(tmp_path / "none.gguf")
