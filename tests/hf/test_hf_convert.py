"""Hugging Face folders to runs and back: bitwise, every tensor accounted for, in little memory."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece
from adapters import merged
from hf_cases import encoder_decoders, sparse
from hf_cases import families as families_of_cases
from hf_folders import (
    BF16,
    LLAMA,
    MODELS,
    TIED,
    assert_same_tensors,
    convert_in,
    make_folder,
    random_tensors,
    write_config,
    write_tensors,
    write_tokenizer,
)
from lora_runs import write_lora_run

from maxmeg.checkpoint import stream
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import to_arrays
from maxmeg.checkpoint.stream import StreamWriter
from maxmeg.config import files
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.named import load_config
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.data.samples.aligned import start_token
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import padding_of
from maxmeg.hf import convert, trained
from maxmeg.hf.families import read as families
from maxmeg.hf.formats.safetensors import SafetensorsFolder
from maxmeg.inference.load import load_run
from maxmeg.inference.mesh import local_mesh
from maxmeg.inference.requests import check_ids

BLOCK_BYTES = 1 << 20
GROWTH_BYTES = 8 << 20  # of peak memory: less than one layer has
MERGED = 1e-6  # of sums in another order
FAMILY, FINAL_NORM = "LlamaForCausalLM", "model/final_norm/weight"


@pytest.mark.parametrize("family", MODELS)
def test_import_and_export_return_the_same_bits(tmp_path, family):
    tensors = make_folder(tmp_path / "hf", family, shard_bytes=10_000)
    report = convert_in(tmp_path / "hf", tmp_path / "run")
    assert report.num_tensors == len(tensors) and report.family == family
    assert report.num_parameters == sum(array.size for array in tensors.values())
    assert Checkpointer(tmp_path / "run" / "checkpoints").steps() == [0]
    convert.export_model(tmp_path / "run", tmp_path / "bf16", max_shard_bytes=20_000)
    assert_same_tensors(tmp_path / "bf16", tensors)
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 2
    convert.export_model(tmp_path / "hf", tmp_path / "f32", DType.float32)
    assert_same_tensors(tmp_path / "f32", {n: a.astype("f4") for n, a in tensors.items()})
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == [family]
    assert families.differences(MODELS[family], families.model_config(config)) == []
    names = {path.name for path in (tmp_path / "f32").iterdir()}
    assert names == {path.name for path in (tmp_path / "hf").iterdir()} - {"modeling_evil.py"} - {
        path.name for path in (tmp_path / "hf").glob("model*.safetensors*")
    } | {"model.safetensors"}


def test_an_imported_run_holds_the_model(tmp_path):
    """Padding zero, config and tokenizer of the folder."""
    make_folder(tmp_path / "hf")
    convert_in(tmp_path / "hf", tmp_path / "run")
    loaded = load_run(str(tmp_path / "run"), master_weights=True)
    saved = files.load(tmp_path / "run" / "config.yaml")
    assert loaded.config == dataclasses.replace(saved, parallel=loaded.config.parallel)
    assert loaded.step == 0 and loaded.config.run_dir == str(tmp_path / "run")
    assert families.differences(loaded.config.model, LLAMA) == []
    assert loaded.config.data.sequence_length == LLAMA.max_position
    assert loaded.tokenizer.decode([2, 5]) == "w2 w5" and loaded.tokenizer.eod == 0
    with pytest.raises(ValueError, match=r"num_heads=4 is not divisible by parallel\.tensor=3"):
        load_run(str(tmp_path / "run"), mesh=local_mesh(3))
    arrays = {name: np.asarray(array) for name, array in to_arrays(loaded.model).items()}
    for table in ("embedding.table", "output.table"):
        assert arrays[table].shape[0] == 128 and not arrays[table][LLAMA.vocab_size :].any()


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
TENSORS = {  # of an untied Llama
    "missing": (
        lambda t: {n: a for n, a in t.items() if n not in (QUERY, NORM)},
        f"2 tensors are missing: {NORM}, {QUERY}",
    ),
    "extra": (
        lambda t: t | {"model.layers.3.mlp.up_proj.weight": t[NORM]},
        "1 tensors do not belong to a LlamaForCausalLM: model.layers.3.mlp.up_proj.weight",
    ),
    "misshapen": (
        lambda t: t | {QUERY: t[QUERY][:16]},
        rf"{QUERY} is bfloat16\[16, 32\]: config.json needs shape \[32, 32\]",
    ),
    "dtype": (lambda t: t | {NORM: t[NORM].astype("f8")}, "is float64"),
    "duplicate": (
        lambda t: t | {"norm.weight": t[NORM]},
        "norm.weight and .*norm.weight are both model.norm.weight",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_every_tensor_is_accounted_for(tmp_path, case):
    change, message = TENSORS[case]
    make_folder(tmp_path / "hf", tensors=change(random_tensors(LLAMA, FAMILY)))
    with pytest.raises(ValueError, match=message):
        convert_in(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_may_have_keys_of_layers_that_read_those_of_others(tmp_path):
    """As those of Gemma 4 E2B; an export has none."""
    settings = families_of_cases()["gemma 4 shared"]
    model = families.model_config({"architectures": [settings[0]], **settings[1]})
    tensors = random_tensors(model, settings[0])
    key = "model.layers.{}.self_attn.{}.weight"
    assert key.format(3, "k_proj") not in tensors
    unread = {key.format(3, n): tensors[key.format(1, n)] for n in ("k_proj", "v_proj", "k_norm")}
    make_folder(tmp_path / "hf", settings[0], model, tensors | unread)
    convert_in(tmp_path / "hf", tmp_path / "run")
    convert.export_model(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tensors)


def test_tied_weights_stored_twice_must_be_equal(tmp_path):
    tensors = random_tensors(TIED, FAMILY)
    table = tensors[EMBEDDING]
    make_folder(tmp_path / "same", model=TIED, tensors=tensors | {"lm_head.weight": table})
    convert_in(tmp_path / "same", tmp_path / "run")
    other = table.copy()
    other[-1, -1] *= 2
    make_folder(tmp_path / "other", model=TIED, tensors=tensors | {"lm_head.weight": other})
    with pytest.raises(ValueError, match=rf"lm_head\.weight and {EMBEDDING} are tied .* differ"):
        convert_in(tmp_path / "other", tmp_path / "run2")


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text('{"vocab_size": 3, "vocab_size": 4}')


def large_tokenizer(folder):
    write_tokenizer(folder, words=90)


FOLDERS = {
    no_config: "has no config.json",
    broken_config: "'vocab_size' is given twice",
    large_tokenizer: r"needs 90 rows with the end of a document \('<\|end\|>', id 0\), .* has 70:",
}


def test_added_tokens_may_have_no_row(tmp_path):
    """A text with one of them is an error, and padding is another token."""
    make_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", 70, ["<image>", "<pad>"])
    report = convert_in(tmp_path / "hf", tmp_path / "run")
    assert "no row for 2 added tokens of the tokenizer (<image>, <pad>)" in report.notes[0]
    tokenizer = load_tokenizer(f"{report.tokenizer}?pad=<pad>")
    assert (padding_of(tokenizer, 70), padding_of(tokenizer, 72)) == (0, 71)
    with pytest.raises(
        ValueError, match=r"token 70 \('<image>'\) is not in the model's vocab.* 70:"
    ):
        check_ids(tokenizer.encode("w2 <image> w3"), 70, tokenizer=tokenizer)


@pytest.mark.parametrize("damage", FOLDERS, ids=lambda damage: damage.__name__)
def test_bad_folders_are_refused_and_nothing_is_left(tmp_path, damage):
    make_folder(tmp_path / "hf")
    damage(tmp_path / "hf")
    with pytest.raises(ValueError, match=FOLDERS[damage]):
        convert_in(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_existing_files_are_not_overwritten(tmp_path):
    make_folder(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    for attempt in (convert_in, lambda a, b: convert.export_model(a, b)):
        with pytest.raises(ValueError, match="exists and is not empty"):
            attempt(tmp_path / "hf", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_imports_take_another_tokenizer_or_none(tmp_path):
    make_folder(tmp_path / "hf")
    source = convert.open_folder(tmp_path / "hf")
    report = convert.import_model(source, tmp_path / "a", tokenizer="null:50")
    assert report.tokenizer == "null:50" and not report.notes
    (tmp_path / "other").mkdir()
    write_tokenizer(tmp_path / "other", words=33)
    bare = dataclasses.replace(source, files=())
    report = convert.import_model(bare, tmp_path / "b")
    assert report.tokenizer == "null:70" and "there is no tokenizer" in report.notes[0]
    assert (
        "no tokenizer was written" in convert.export_model(tmp_path / "b", tmp_path / "c").notes[0]
    )
    given = convert.with_tokenizer(source, tmp_path / "other" / "tokenizer.json")
    convert.import_model(given, tmp_path / "d")
    assert load_run(str(tmp_path / "d")).tokenizer.vocab_size == 33
    assert (tmp_path / "d" / "huggingface" / "generation_config.json").exists()
    spec = f"huggingface:{tmp_path / 'other'}?special_tokens=<image>"
    copy = f"huggingface:{tmp_path / 'e' / 'tokenizer'}?special_tokens=<image>"
    assert convert.import_model(source, tmp_path / "e", tokenizer=spec).tokenizer == copy
    notes = convert.export_model(tmp_path / "e", tmp_path / "f").notes
    assert "lack the options of data.tokenizer: special_tokens=<image>" in notes[0]
    own = (tmp_path / "other" / "tokenizer.json").read_bytes()
    assert (tmp_path / "f" / "tokenizer.json").read_bytes() == own


@pytest.mark.parametrize("has_output", [False, True])
def test_t5_without_tokenizer_begins_as_config_json_says(tmp_path, has_output):
    """transformers 5 calls the output weights of v1.1 tied, also if its files have them."""
    family, settings = encoder_decoders()["t5 v1.1, tied"]
    settings = settings | {"architectures": [family], "decoder_start_token_id": 7, "x": 1}
    model = families.model_config(settings)
    table = random_tensors(model, family)["shared.weight"]
    more = {"lm_head.weight": 2 * table} if has_output else {}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    write_tensors(tmp_path / "hf", random_tensors(model, family) | more)
    notes = convert_in(tmp_path / "hf", tmp_path / "run").notes
    assert "null:61" in notes[0] and notes[1].endswith("passed over: x")
    config = files.load(tmp_path / "run" / "config.yaml")
    assert config.model.tied == (not has_output) and config.model.logit_scale == 1
    assert start_token(load_tokenizer(config.data.tokenizer), config.data.start_token) == 7


def test_a_folder_with_only_a_sentencepiece_model_is_imported(tmp_path):
    make_folder(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with open(tmp_path / "hf" / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e f g h", "abc def gh"] * 9), model_writer=file,
            vocab_size=20, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
    spec = convert_in(tmp_path / "hf", tmp_path / "run").tokenizer
    assert spec == f"sentencepiece:{tmp_path / 'run' / 'huggingface' / 'tokenizer.model'}"
    assert not convert.export_model(tmp_path / "run", tmp_path / "back").notes
    assert (tmp_path / "back" / "tokenizer.model").stat().st_size > 0


def write_run(folder, config, arrays, step=5):
    """A run as training leaves it."""
    infos = trained.array_paths(config.model) if arrays is None else arrays
    saved = {"config": files.to_dict(config), "tokenizer": "bytes", "consumed_samples": 9}
    with StreamWriter(folder / "checkpoints", step, infos, saved) as writer:
        for number, (path, info) in enumerate(infos.items()):
            array = np.full(info.shape, 1 + number / 8, info.dtype)
            array[70:] = 0 if path.endswith("table") else array[70:]
            writer.write(path, array)


def test_a_run_that_was_trained_here_is_exported(tmp_path):
    config = Config(model=dataclasses.replace(LLAMA, vocab_divisible_by=100))
    write_run(tmp_path / "run", config, None)
    report = convert.export_model(tmp_path / "run", tmp_path / "hf")
    assert report.family == FAMILY
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described["eos_token_id"] == 256  # of the tokenizer of bytes
    assert SafetensorsFolder(tmp_path / "hf").tensors[EMBEDDING].shape == (70, 32)


def test_checkpoints_that_are_not_the_model_of_their_config(tmp_path):
    config = Config(model=LLAMA)
    infos = trained.array_paths(LLAMA)
    some = {name: info for name, info in infos.items() if "norm" not in name}
    more = infos | {"model/stack/lora": infos[FINAL_NORM]}
    shape = dataclasses.replace(infos[FINAL_NORM], shape=(31,))
    cases = {
        "the checkpoint lacks 3 arrays": some,
        "1 unexpected arrays: model/stack/lora": more,
        "model/final_norm/weight is .*31": infos | {FINAL_NORM: shape},
    }
    for number, (message, arrays) in enumerate(cases.items()):
        write_run(tmp_path / str(number), config, arrays)
        with pytest.raises(ValueError, match=message):
            convert.export_model(tmp_path / str(number), tmp_path / "hf")
    write_run(tmp_path / "good", config, None)
    with pytest.raises(ValueError, match="--family=Llama: choose one of"):
        convert.export_model(tmp_path / "good", tmp_path / "hf", family="Llama")
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot express this model"):
        convert.export_model(tmp_path / "good", tmp_path / "hf", family="GPT2LMHeadModel")
    assert not (tmp_path / "hf").exists()


def write_adapters(folder, base, **changes):
    """A run with adapters beside a base that is read in place."""
    config = load_config(f"finetune:{base}")
    config.model = with_fields(config.model, changes)
    return write_lora_run(folder, config, rank=2)


def test_adapters_are_merged_as_they_were_trained(tmp_path):
    """Into the base as it was frozen, in bfloat16; the files come from the base's folder."""
    make_folder(tmp_path / "hf", tensors=random_tensors(LLAMA, FAMILY, np.float32))
    adapters = write_adapters(tmp_path / "run", tmp_path / "hf")
    assert len(adapters) >= 4
    convert.export_model(tmp_path / "run", tmp_path / "merged", DType.float32)
    actual = SafetensorsFolder(tmp_path / "merged")
    beside = load_run(str(tmp_path / "run"), master_weights=True).model
    model = to_arrays(jax.jit(merged)(beside))
    arrays = {name: np.asarray(array) for name, array in model.items()}
    for binding in families.bindings(LLAMA, FAMILY):
        parts = [
            arrays[p.name] if p.layer is None else arrays[p.name][p.layer] for p in binding.ours
        ]
        wanted = binding.join(parts)[: binding.shape[0]]
        np.testing.assert_allclose(actual.read(binding.theirs), wanted, rtol=MERGED, atol=MERGED)
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
    write_adapters(tmp_path / "grown", tmp_path / "hf", vocab_size=90)
    with pytest.raises(ValueError, match="base has 70 tokens, the run 90"):
        convert.export_model(tmp_path / "grown", tmp_path / "other")


def test_rows_beyond_the_vocabulary_must_be_zero(tmp_path):
    write_run(tmp_path / "run", Config(model=dataclasses.replace(LLAMA, vocab_size=65)), None)
    with pytest.raises(ValueError, match="128 rows for a vocabulary of 65, and the rows beyond"):
        convert.export_model(tmp_path / "run", tmp_path / "hf")


def peak_bytes(folder: Path, model: ModelConfig, family: str) -> int:
    """Return the peak memory of arrays during an import and an export, without mapped files."""
    write_config(folder / "hf", model, family)
    shapes = {binding.theirs: binding.shape for binding in families.bindings(model, family)}
    one = np.ones((), BF16)
    write_tensors(folder / "hf", {name: np.broadcast_to(one, s) for name, s in shapes.items()})
    tracemalloc.start()
    convert_in(folder / "hf", folder / "run")
    convert.export_model(folder / "run", folder / "back")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.slow
def test_memory_grows_neither_with_layers_nor_with_words_nor_with_experts(tmp_path, monkeypatch):
    """A layer has 10 MiB, the embedding 64 MiB, and an expert 1.5 MiB in two tensors."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", BLOCK_BYTES)
    dense = {"hidden_size": 512, "mlp.ffn_size": 1024, "attention.num_kv_heads": 4}
    cases = ({"num_layers": 2}, {"num_layers": 10}, {"num_layers": 2, "vocab_size": 1 << 15})
    peaks = [
        peak_bytes(tmp_path / f"dense {number}", with_fields(LLAMA, dense | changes), FAMILY)
        for number, changes in enumerate(cases)
    ]
    assert max(peaks) - peaks[0] < GROWTH_BYTES
    family, settings = sparse()["gpt oss"]
    settings |= {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 1024}
    settings["architectures"] = [family]
    few, many = (
        families.model_config({**settings, "num_local_experts": count}) for count in (2, 32)
    )
    peaks = [peak_bytes(tmp_path / str(m.moe.num_experts), m, family) for m in (few, many)]
    assert peaks[1] - peaks[0] < GROWTH_BYTES
