"""maxmeg in Python: its names, models that are loaded, saved and looked into, short runs."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from layouts import ALTERNATING, tiny
from tokenizer_files import WORDS, folder

import maxmeg
from maxmeg import api, plan, train
from maxmeg.config.model import DType
from maxmeg.config.schema import Config
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.hf.formats.safetensors import SafetensorsFolder
from maxmeg.inference.sampling import Sampling
from maxmeg.models.lm import LM
from maxmeg.objectives.objective import Objective, objective_of, token_loss
from maxmeg.planning.compile import abstract_batch
from maxmeg.program import Program
from maxmeg.runtime.faults.lock import lock_folder

PROMPT = "a b a , b"
SAME_SUM = 1e-5  # absolute, of activations that are added in another order


def made(path, **model) -> api.LanguageModel:
    """A model with random weights that knows a few words."""
    folder(path)
    config = tiny({"vocab_size": len(WORDS), "max_position": 32, **model})
    config.data.tokenizer = f"huggingface:{path / 'tokenizer.json'}"
    model = jax.jit(lambda key: LM(key, config.model))(jax.random.key(0))
    return maxmeg.LanguageModel(model, config)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> api.LanguageModel:
    return made(tmp_path_factory.mktemp("tokenizer"), **ALTERNATING | {"num_layers": 2})


def test_importing_maxmeg_imports_neither_jax_nor_numpy():
    check = "import maxmeg, sys; assert not {'jax', 'numpy', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_modules_of_commands_are_called_as_the_functions_of_their_names():
    assert train is maxmeg.train is sys.modules["maxmeg.train"] and train.main is api.run_training
    with pytest.raises(ValueError, match="no architecture is named 'none'"):
        maxmeg.config("none")
    with pytest.raises(ValueError, match="hardware"):
        plan(Config(), "x100")
    assert {*maxmeg.__all__} <= {*dir(maxmeg)} and maxmeg.load is api.load
    with pytest.raises(AttributeError, match="has no attribute 'server_of'"):
        maxmeg.server_of  # noqa: B018


def test_settings_by_name_and_override():
    changes = {"optim.lr": 1, "model.dtype": "bfloat16", "data.paths": ["a", "b"]}
    config = maxmeg.config("gpt", **changes)
    assert (config.optim.lr, config.model.dtype) == (1.0, DType.bfloat16)
    assert config.data.paths == ("a", "b") and config.model.num_layers == 4
    with pytest.raises(ValueError, match=r"unknown field optim.rate: did you mean optim"):
        maxmeg.config("gpt", **{"optim.rate": 1})
    with pytest.raises(ValueError, match=r"train.num_steps=1.5 .* a whole number"):
        maxmeg.config("gpt", **{"train.num_steps": 1.5})


def test_a_plan_prints_as_the_command_does(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["maxmeg"])  # without settings to show in a train command
    config = tiny({"max_position": 16}, fsdp=8)
    planned = maxmeg.plan(config, "h100x8")
    plan.main(config, plan.Options(hardware="h100x8"))
    assert f"{planned}\n" == capsys.readouterr().out and "8 x h100" in str(planned)


def test_a_model_made_by_hand_is_saved_as_a_run(run, tmp_path):
    run.save(tmp_path / "run")
    again = maxmeg.load(tmp_path / "run")
    assert again.config.run_dir == str(tmp_path / "run")
    padding = 2 * (8 - len(WORDS)) * run.config.model.hidden_size  # embedding and output
    count = sum(array.size for array in jax.tree.leaves(run.model)) - padding
    assert repr(again).endswith(f"run, step 0, {count:,} parameters on 1 device)")
    np.testing.assert_array_equal(again.logits(PROMPT), run.logits(PROMPT))
    with pytest.raises(ValueError, match="run exists and is not empty"):
        run.save(tmp_path / "run")
    wider = tiny({"vocab_size": len(WORDS), "max_position": 32, "hidden_size": 64})
    with pytest.raises(ValueError, match=r"table has shape \(8, 32\), config.model \(8, 64\)"):
        api.LanguageModel(run.model, wider, run.tokenizer).save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_model_made_by_hand_is_exported(tmp_path):
    run = made(tmp_path / "words", num_layers=1)
    run.to_huggingface(tmp_path / "hf", dtype="float32")
    table = SafetensorsFolder(tmp_path / "hf").read("model.embed_tokens.weight")
    np.testing.assert_array_equal(table, run.model.embedding.table[...][: len(WORDS)])
    assert (tmp_path / "hf/tokenizer.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"words", "hf"}


def test_text_is_generated_for_one_prompt_and_for_several(run):
    texts = run.generate_batch([PROMPT, "role"], run.request(3, Sampling(temperature=0)))
    assert texts[0] == run.generate(PROMPT, max_new_tokens=3, temperature=0) and len(texts) == 2
    chosen = int(run.logits(PROMPT)[-1].argmax())
    assert texts[0].split()[0] == WORDS[chosen]
    with pytest.raises(ValueError, match="token 7 is not in the model's vocabulary of 7"):
        run.logits(np.array([1, 7]))


def test_activations_add_up_to_the_residual_stream(run):
    names = ("embedding", "layers.*", "layers.*.*", "final_norm")
    found = run.activations(PROMPT, *names)
    stream = found["embedding"]
    for layer in range(run.config.model.num_layers):
        stream = stream + found[f"layers.{layer}.attention"] + found[f"layers.{layer}.mlp"]
        np.testing.assert_allclose(found[f"layers.{layer}"], stream, atol=SAME_SUM)
    last = run.model.logits(found["final_norm"][None])[0]
    np.testing.assert_allclose(last, run.logits(PROMPT), atol=SAME_SUM)
    queries = run.activations(PROMPT, "layers.*.attention.query")
    assert [*queries] == [f"layers.{i}.attention.query" for i in range(2)]
    with pytest.raises(ValueError, match=r"no activation is named 'layers.\*.moe': nearest"):
        run.activations(PROMPT, "layers.*.moe")


def test_documents_are_written_once_and_only_under_the_lock(tmp_path):
    config = tiny({"vocab_size": 0, "num_layers": 1}, {"num_steps": 2})
    config.run_dir, documents = str(tmp_path), ["a text", np.arange(20)]
    with lock_folder(tmp_path), pytest.raises(OSError, match="in use by another run"):
        maxmeg.train(config, documents)
    assert not (tmp_path / "data").exists()
    (prefix,) = api.with_documents(documents, config).data.paths
    assert IndexedDataset(prefix).num_tokens == 6 + 1 + 20 + 1
    before = Path(f"{prefix}.bin").stat()
    assert api.write_documents(config, documents) == prefix
    assert Path(f"{prefix}.bin").stat() == before
    assert api.write_documents(config, ["another"]) != prefix  # nothing was trained yet
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert api.write_documents(config, documents) == prefix
    with pytest.raises(ValueError, match="was trained on other documents than data"):
        api.write_documents(config, ["others"])


def test_a_loss_of_ones_own_is_not_told_in_nats_per_byte():
    config = tiny({"num_layers": 1})
    for objective in (None, Objective(), objective_of(lambda logits, batch: logits[..., 0])):
        program = Program(config, np.ones(config.model.vocab_size, np.float32), objective)
        batch = abstract_batch(config, program.mesh)
        sums = jax.eval_shape(program.eval_step, program.abstract.model, batch)
        assert ("bytes" in sums) == (objective is None or objective.loss is token_loss)


@pytest.mark.slow
def test_documents_and_a_loss_of_ones_own_train(tmp_path):
    def confident(logits_BLV, batch):
        return jax.nn.logsumexp(logits_BLV, axis=-1)

    config = tiny({"vocab_size": 0, "num_layers": 1}, {"num_steps": 2, "eval_every": 0}, fsdp=8)
    config.run_dir, config.log.sample_prompt = str(tmp_path / "run"), ""
    documents = ["some text"] * 40 + [np.arange(20)]
    run = maxmeg.train(config, documents, loss=confident)
    assert (run.trained.step, run.config.model.vocab_size, config.model.vocab_size) == (2, 257, 0)
    assert isinstance(run.generate("a", max_new_tokens=2), str) and run.trained.mesh.size == 8
    for wrong, error in (([[0.5]], "has shape"), ([np.array([257])], "ids from 257"), ([], "no")):
        with pytest.raises(ValueError, match=error):
            api.train(config, wrong)
    config.model.mtp.num_layers = 1
    with pytest.raises(ValueError, match="does not train MTP layers"):
        api.train(config, documents, loss=confident)
