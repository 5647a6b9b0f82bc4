"""SmolLM2-135M-Instruct, from the GGUF file of a package: imported, scored, trained, exported.

The commands are run as a user does; transformers judges what they make.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from harness_tasks import assert_same, both
from peft import PeftModel
from smollm2 import REPOSITORY, converted, export, gguf_file, run
from tokenizers import pre_tokenizers

from maxmeg.checkpoint.names import to_arrays
from maxmeg.config import files
from maxmeg.config.model import DType
from maxmeg.config.schema import Config
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.chat.template import load_chat_template
from maxmeg.data.loader import eval_batches
from maxmeg.data.placement import local_rows
from maxmeg.eval_step import make_eval_step
from maxmeg.evals.perplexity import mean_loss
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained, load_run
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.parallel.trainable import frozen

LOSS = 1e-4  # relative
SAME_LOSS = 1e-6  # relative; the same arrays in the same program
LOGITS = 1e-4  # largest error over the scale of the logits
STEPS, LENGTH, SAMPLES, EVAL_STEPS = 8, 64, 2, 4
ADAPTERS_BYTES = 3e6
LOWER = 0.02  # nats a token, of the held-out loss
NEW_TOKENS = 32
PARAGRAPH = (
    "The lighthouse stands at the end of a long pier of grey stone. Every evening, when the "
    "fishing boats come home, its keeper climbs the two hundred steps and lights the lamp. On "
    "clear nights it can be seen from thirty miles away; in fog, a horn takes its place."
)
PROMPTS = (
    "def fibonacci(n):\n",
    "The three primary colours are",
    "import os\n\nclass Reader:\n    def __init__(self, path):\n        self.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds `run`, the converted model, and `hf`, the export of that."""
    return converted(tmp_path_factory.mktemp("smollm2"))


def finetuned(folder: Path, name: str, *flags: str) -> Path:
    """A run that continues the converted model on Python's own sources."""
    run(
        "train",
        f"--config=finetune:{folder / 'run'}",
        f"--config.run_dir={folder / name}",
        "--config.data.builtin=source",
        f"--config.data.cache_dir={folder / 'data'}",
        f"--config.data.sequence_length={LENGTH}",
        "--config.model.dtype=float32",
        f"--config.train.global_batch_size={SAMPLES}",
        f"--config.train.num_steps={STEPS}",
        f"--config.train.eval_every={STEPS}",
        f"--config.train.eval_steps={EVAL_STEPS}",
        "--config.optim.warmup_steps=2",
        "--config.log.tensorboard=false",
        *flags,
    )
    return folder / name


@pytest.fixture(scope="module")
def continued(folder) -> Path:
    return finetuned(folder, "continued", "--config.optim.lr=1e-4")


@pytest.fixture(scope="module")
def adapters(folder, continued) -> Path:
    """After `continued`, which prepares the corpus."""
    digests = manifest(folder / "run")
    made = finetuned(folder, "adapters", "--config.optim.lr=2e-3", "--config.lora.rank=8")
    assert manifest(folder / "run") == digests
    return made


def manifest(folder: Path) -> dict:
    """The checksums of a checkpoint's tensors."""
    (path,) = (folder / "checkpoints").glob("*/manifest.json")
    return json.loads(path.read_text())["body"]["tensors"]


def loaded(folder: Path) -> Trained:
    return load_run(str(folder), dtype=DType.float32)


def theirs_of(folder: Path):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values())
    return model.eval()


@functools.cache
def forward():
    return jax.jit(lambda model, ids_BL: model(ids_BL))


def token_loss(logits_LV: np.ndarray, ids) -> float:
    """Mean cross entropy in float64 of every token after the first."""
    logits_LV = logits_LV[:-1].astype(np.float64)
    logits_LV -= logits_LV.max(1, keepdims=True)
    losses_L = np.log(np.exp(logits_LV).sum(1)) - logits_LV[np.arange(len(ids) - 1), ids[1:]]
    return float(losses_L.mean())


def assert_same_model(ours: Trained, theirs, text: str = PARAGRAPH) -> float:
    """Loss and logits of a text; the loss."""
    ids = ours.tokenizer.encode(text).tolist()
    actual = np.asarray(forward()(ours.model, jnp.array([ids])))[0]
    with torch.no_grad():
        answer = theirs(torch.tensor([ids]), labels=torch.tensor([ids]))
    wanted = answer.logits[0].numpy()
    loss = token_loss(actual, ids)
    assert loss == pytest.approx(answer.loss.item(), rel=LOSS)
    assert np.abs(actual - wanted).max() <= LOGITS * np.abs(wanted).max()
    return loss


def test_the_tokenizer_is_that_of_the_file(folder):
    """transformers reads vocabulary, merges and chat template too, but not that each digit stands
    by itself (tokenizer.ggml.pre), which the model's own tokenizer.json says."""
    weights = gguf_file()
    theirs = transformers.AutoTokenizer.from_pretrained(
        weights.parent, gguf_file=weights.name, local_files_only=True
    )
    parts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer = loaded(folder / "run").tokenizer
    for text in (*PROMPTS, PARAGRAPH, Path(__file__).read_text(), "naïve 東京 🎉 1234"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text).tolist() == ids
    messages = [{"role": "user", "content": "Hi"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert load_chat_template(tokenizer).render([messages]) == [text]


def assert_same_text(ours: Trained, theirs) -> None:
    """Greedy, batched here and one at a time there."""
    tokenizer = ours.tokenizer
    ends = end_tokens(tokenizer, ours.config.data, ours.config.model.vocab_size)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    request = Request(NEW_TOKENS, Sampling(temperature=0), ends)
    actual = [reply.tokens for reply in Engine(ours).generate(prompts, request)]
    for ids, new in zip(prompts, actual, strict=True):
        given = torch.tensor(ids, dtype=torch.int64)[None]
        with torch.no_grad():
            text = theirs.generate(given, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        following = text[len(ids) :]
        first_end = next((i for i, one in enumerate(following) if one in ends), NEW_TOKENS)
        assert new == following[:first_end]
    assert max(map(len, actual)) == NEW_TOKENS


def held_out_loss(trained: Trained, config: Config) -> float:
    """As the validation of a run with this config."""
    tokenizer, prefixes = open_corpus(config.data, config.run_dir)
    vocab_size = config.model.vocab_size
    data = build_dataset(config.data, prefixes, tokenizer, 1, config.seed, vocab_size)
    assert data is not None
    own = dataclasses.replace(config, parallel=trained.config.parallel)
    step, rows = make_eval_step(own, trained.mesh, trained.model), local_rows(trained.mesh)
    batches = eval_batches(data, EVAL_STEPS, SAMPLES, rows)
    return mean_loss(step, trained.model, batches, trained.mesh, SAMPLES, rows)[0]


@pytest.fixture(scope="module")
def loss_before(folder, continued) -> float:
    """The imported model's held-out loss."""
    return held_out_loss(loaded(folder / "run"), files.load(continued / "config.yaml"))


def assert_learned(made: Path, loss_before: float) -> Trained:
    """Its held-out loss is lower; what was saved is what the run validated at its end."""
    config, trained = files.load(made / "config.yaml"), loaded(made)
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
    after = held_out_loss(trained, config)
    assert trained.step == STEPS and after == pytest.approx(validated, rel=SAME_LOSS)
    assert after < loss_before - LOWER
    return trained


def test_the_imported_model_is_transformers(folder):
    ours, theirs = loaded(folder / "run"), theirs_of(folder / "hf")
    assert assert_same_model(ours, theirs) < 4  # nats a token: it knows the language
    assert_same_text(ours, theirs)


def test_the_import_is_that_of_transformers(folder):
    """Bit for bit the tensors that transformers reads from the GGUF file itself."""
    weights, ours = gguf_file(), theirs_of(folder / "hf").state_dict()
    own = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32, local_files_only=True
    )
    wanted = own.state_dict()
    assert wanted.keys() == ours.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, ours[name]), name


def test_training_goes_on_and_its_export_writes_the_same(folder, continued, loss_before):
    trained = assert_learned(continued, loss_before)
    theirs = theirs_of(export(continued, folder / "continued_hf"))
    assert_same_model(trained, theirs)
    assert_same_text(trained, theirs)


def test_adapters_learn_beside_a_base_that_stays_as_it_was(folder, adapters, loss_before):
    trained = assert_learned(adapters, loss_before)
    base = to_arrays({"model": loaded(folder / "run").model})
    held = to_arrays({"model": frozen(trained.model)})
    assert base.keys() == held.keys()
    for name, array in held.items():
        assert np.array_equal(array, base[name]), name
    theirs = theirs_of(export(adapters, folder / "adapters_hf"))
    assert_same_model(trained, theirs)
    assert_same_text(trained, theirs)
    own = export(adapters, folder / "adapters_peft", "peft")
    assert own.joinpath("adapter_model.safetensors").stat().st_size < ADAPTERS_BYTES
    beside = PeftModel.from_pretrained(theirs_of(folder / "hf"), own).eval()
    assert_same_model(trained, beside)


def test_the_example_of_chats_writes_adapters_that_peft_loads(folder, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ["bash", str(REPOSITORY / "examples/lora_chat.sh"), str(folder / "hf")]
    done = subprocess.run(
        [*script, "--train.num_steps=2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "maxmeg chat runs/smollm2-finetuned" in done.stdout
    PeftModel.from_pretrained(theirs_of(folder / "hf"), tmp_path / "adapters")


@pytest.mark.filterwarnings("ignore")  # of the harness and its libraries
def test_tasks_of_the_harness_have_the_same_scores(folder, tmp_path):
    theirs, ours = both(folder / "hf", folder / "run", tmp_path)
    assert_same(theirs, ours)
    assert ours["results"]["answers"]["acc,none"] > 0.5  # four to choose from
