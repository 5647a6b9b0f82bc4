"""vLLM serves every family's exports, with the greedy tokens that maxmeg writes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import LINEAR, families, with_states
from hf_folders import random_tensors, write_config, write_tensors, write_tokenizer

from maxmeg.config.model import DType
from maxmeg.hf.convert import export_model, import_model, open_folder
from maxmeg.hf.families.classifier_tables import CLASSIFIERS
from maxmeg.hf.families.encoder_tables import ENCODERS
from maxmeg.hf.families.expert_tables import SPARSE
from maxmeg.hf.families.read import FAMILIES, model_config
from maxmeg.hf.families.t5_tables import ENCODER_DECODERS
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import load_run
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.models.lm import LM

COUNT = 16
LENGTHS = (5, 12, 18)  # of prompts
SHARD_BYTES = 100_000  # several files a model
HIDDEN, HEADS, HEAD_DIM = 128, 4, 64  # its kernels for CPUs take heads of 32, 64 and more
# What vLLM computes otherwise than transformers, and no setting of an export changes:
OTHERWISE = {
    # it rotates every text as if it were of the greatest length
    "qwen 2": {"rope_parameters": LINEAR, "max_position_embeddings": 64},
    # it takes the ratio of both lengths for the factor, and does not go beyond the first
    "phi 3": {"original_max_position_embeddings": 64, "max_position_embeddings": 256},
    # its feed-forward layers have 4 times the width of the model
    "falcon 11b": {"ffn_hidden_size": 4 * HIDDEN},
}
# Its log-probabilities of hybrid models differ from transformers' by up to 0.04, in float32 too.
INEXACT = {"lfm 2": 0.08}
CASES = families(HIDDEN, HEADS, HEAD_DIM)
# Of models with scans it serves Mamba-2's on a CPU: others want bfloat16, or kernels for GPUs.
SCANS = with_states(HIDDEN, HEADS, HEAD_DIM)
CASES |= {"mamba 2": SCANS.pop("mamba 2")}


def enlivened(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights at which the text is no echo and norms and biases count."""
    actual = {}
    for name, array in tensors.items():
        if array.ndim == 1:
            is_scale = re.search(r"norm|ln_", name) and name.endswith("weight")
            actual[name] = 0.1 * array + bool(is_scale)
            continue
        is_embedding = re.search(r"embed_tokens|embed_in|word_emb|wte", name)
        actual[name] = array * (0.4 if is_embedding else 2.0) / array.shape[1] ** 0.5
    return actual


def converted(name: str, folder: Path) -> tuple[LM, list[list[int]]]:
    """Makes `hf`, `run` and `exported` there; our model and its tokens after each prompt."""
    family, settings = CASES[name]
    model = model_config(settings | OTHERWISE.get(name, {}) | {"architectures": [family]})
    write_config(folder / "hf", model, family)
    write_tokenizer(folder / "hf")
    tensors = enlivened(random_tensors(model, family, np.float32))
    write_tensors(folder / "hf", tensors)
    import_model(open_folder(folder / "hf"), folder / "run")
    export_model(folder / "run", folder / "exported", DType.float32, SHARD_BYTES)
    assert len([*(folder / "exported").glob("*.safetensors")]) > 1
    ours = load_run(str(folder / "run"), dtype=DType.float32)
    replies = Engine(ours).generate(PROMPTS, Request(COUNT, Sampling(temperature=0)))
    return ours.model, [reply.tokens for reply in replies]


PROMPTS = [np.random.default_rng(n).integers(2, 60, n) for n in LENGTHS]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """Of both, for all cases: vLLM takes longer to start than to write."""
    folder = tmp_path_factory.mktemp("served")
    ours = {name: converted(name, folder / name) for name in CASES}
    prompts = [prompt.tolist() for prompt in PROMPTS]
    jobs = {name: (str(folder / name / "exported"), prompts, COUNT) for name in CASES}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    child = Path(__file__).with_name("vllm_child.py")
    command = [sys.executable, str(child), "jobs.json", "answers.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((folder / "answers.json").read_text())
    models = {name: {"model": model, "ours": tokens} for name, (model, tokens) in ours.items()}
    return {name: models[name] | theirs[name] for name in CASES}


def test_every_family_is_served():
    unserved = SPARSE.keys() | ENCODERS.keys() | CLASSIFIERS.keys()
    unserved |= ENCODER_DECODERS.keys()
    unserved |= {family for family, _ in SCANS.values()}
    assert {family for family, _ in CASES.values()} == FAMILIES.keys() - unserved


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_the_same(name, answers):
    actual = answers[name]
    assert "error" not in actual, actual["error"]
    if name in INEXACT:
        for prompt, tokens in zip(PROMPTS, actual["tokens"], strict=True):
            logits_LV = actual["model"](jnp.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
            chosen_L = logits_LV[np.arange(COUNT), np.array(tokens)]
            assert (logits_LV.max(-1) - chosen_L).max() <= INEXACT[name]
        return
    assert actual["tokens"] == actual["ours"]
    assert len({token for tokens in actual["ours"] for token in tokens}) > 4
