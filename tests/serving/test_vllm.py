"""vLLM serves every family's exports, with the greedy tokens that maxmeg writes."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import LINEAR, YARN, encoder_decoders, encoders, families, sparse, with_states
from hf_folders import random_tensors, write_config, write_tensors, write_tokenizer
from layouts import mesh_of, tiny_batch
from smollm2 import REPOSITORY
from smollm2 import converted as real_model

from maxmeg.config.model import DType
from maxmeg.config.options import Quantize
from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.eval_step import make_eval_step
from maxmeg.hf.convert import export_model, import_model, open_folder
from maxmeg.hf.families.classifier_tables import CLASSIFIERS
from maxmeg.hf.families.read import FAMILIES, model_config
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained, load_run
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling

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
    "falcon 11b": {"ffn_hidden_size": 4 * HIDDEN},  # it reads no ffn_hidden_size
    "ernie 4.5": {"use_bias": False},  # it drops the bias of the output projection
    "cohere": {"attention_bias": False},  # it drops the biases
    "cohere 2": {"sliding_window": 64},  # its window is longer by one token
    "ministral 3": {"rope_parameters": YARN},  # it does not read llama_4_scaling_beta
}
# Its log-probabilities of hybrid models differ from transformers' by up to 0.04, in float32 too.
INEXACT = {"lfm 2": 0.08}
CASES = families(HIDDEN, HEADS, HEAD_DIM)
del CASES["stable lm, parallel"]  # it reads no use_parallel_residual, and wants a second norm
# Of models with scans it serves Mamba-2's on a CPU: others want bfloat16, or kernels for GPUs.
SCANS = with_states(HIDDEN, HEADS, HEAD_DIM)
CASES |= {"mamba 2": SCANS.pop("mamba 2")}
QUANTIZED = ("llama", "phi 3")
REAL_PROMPTS, REAL_COUNT = 64, 64
TIE = 1e-3  # nats between two tokens that rounding may exchange
MOST_TIES = 4  # prompts
SAME_LOSS, ROUNDED = 1e-5, 1e-3  # relative: most of the same numbers, least of rounded ones


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


def with_outliers(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Change the layers' matrices so that vLLM's 8-bit products are exact on every CPU.

    On CPUs without VNNI oneDNN adds pairs of products in 16 bits, and cuts large sums off. Here
    each row gets one large number beside a 0. All other int8 codes are then below 64, which is
    safe.
    """
    for name, array in tensors.items():
        if array.ndim == 2 and "layers" in name:
            rows = np.arange(len(array))
            columns = 2 * rows % array.shape[1]
            array[rows, columns] = 2.1 * np.abs(array).max(axis=1)
            array[rows, columns + 1] = 0
    return tensors


def converted(
    name: str, folder: Path, quantize: Quantize = Quantize.none
) -> tuple[Trained, list[list[int]]]:
    """Makes `hf`, `run` and `exported` there; the loaded run and its tokens after each prompt."""
    family, settings = CASES[name]
    model = model_config(settings | OTHERWISE.get(name, {}) | {"architectures": [family]})
    write_config(folder / "hf", model, family)
    write_tokenizer(folder / "hf")
    tensors = enlivened(random_tensors(model, family, np.float32))
    tensors = tensors if quantize is Quantize.none else with_outliers(tensors)
    write_tensors(folder / "hf", tensors)
    import_model(open_folder(folder / "hf"), folder / "run")
    target = folder / "exported"
    export_model(folder / "run", target, DType.float32, SHARD_BYTES, quantize=quantize)
    assert len([*(folder / "exported").glob("*.safetensors")]) > 1
    ours = load_run(str(folder / "run"), dtype=DType.float32)
    replies = Engine(ours).generate(PROMPTS, Request(COUNT, Sampling(temperature=0)))
    return ours, [reply.tokens for reply in replies]


PROMPTS = [np.random.default_rng(n).integers(2, 60, n) for n in LENGTHS]


def of_vllm(folder: Path, jobs: dict[str, tuple]) -> dict[str, dict]:
    """What vLLM answers to jobs: name -> (folder of a model, prompts, number of new tokens)."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    child = Path(__file__).with_name("vllm_child.py")
    command = [sys.executable, str(child), "jobs.json", "answers.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """Of both, for all cases: vLLM takes longer to start than to write."""
    folder = tmp_path_factory.mktemp("served")
    ours = {name: converted(name, folder / name) for name in CASES}
    prompts = [prompt.tolist() for prompt in PROMPTS]
    for name in QUANTIZED:
        ours[f"{name} int8"] = converted(name, folder / f"{name} int8", Quantize.int8)
    jobs = {name: (str(folder / name / "exported"), prompts, COUNT) for name in ours}
    theirs = of_vllm(folder, jobs)
    models = {name: {"run": run, "ours": tokens} for name, (run, tokens) in ours.items()}
    return {name: models[name] | theirs[name] for name in ours}


def test_every_decoder_without_experts_is_served():
    unserved = {*CLASSIFIERS}
    for cases in (sparse(), SCANS, encoders(), encoder_decoders()):
        unserved |= {family for family, _ in cases.values()}
    assert {family for family, _ in CASES.values()} >= FAMILIES.keys() - unserved


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_the_same(name, answers):
    actual = answers[name]
    assert "error" not in actual, actual["error"]
    if name in INEXACT:
        for prompt, tokens in zip(PROMPTS, actual["tokens"], strict=True):
            logits_LV = actual["run"].model(jnp.array([[*prompt, *tokens]]))[
                0, len(prompt) - 1 : -1
            ]
            chosen_L = logits_LV[np.arange(COUNT), np.array(tokens)]
            assert (logits_LV.max(-1) - chosen_L).max() <= INEXACT[name]
        return
    assert actual["tokens"] == actual["ours"]
    assert len({token for tokens in actual["ours"] for token in tokens}) > 4


def losses_of(run: Trained, recipe: QuantizationRecipe) -> list[float]:
    """The validation loss of each prompt in a run with this recipe."""
    config, losses = copy.deepcopy(run.config), []
    config.train.quantization.recipe = recipe
    config.train.global_batch_size = config.train.micro_batch_size = 1
    for prompt in PROMPTS:
        text = prompt[None].astype(np.int32)
        given = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        config.data.sequence_length = given["tokens"].size
        mesh = mesh_of(config)
        whole = np.ones_like(given["tokens"], np.float32)
        batch = tiny_batch(config, mesh, **given, loss_mask=whole)
        sums = make_eval_step(config, mesh, run.model)(run.model, batch)
        losses.append(float(sums["loss_sum"] / sums["tokens"]))
    return losses


@pytest.mark.parametrize("name", QUANTIZED)
def test_losses_of_int8_exports_are_those_of_quantization_aware_training(name, answers):
    actual = answers[f"{name} int8"]
    assert "error" not in actual, actual["error"]
    plain, rounded = (
        np.array(losses_of(actual["run"], recipe))
        for recipe in (QuantizationRecipe.none, QuantizationRecipe.qat_int8)
    )
    # The median: a number halfway between two codes may be rounded to the other one in vLLM.
    assert np.median(np.abs(actual["losses"] / rounded - 1)) <= SAME_LOSS
    assert np.median(np.abs(plain / rounded - 1)) >= ROUNDED


def test_many_prompts_have_the_same_greedy_tokens_of_real_weights(tmp_path):
    """Prompts of text and of random tokens, all at once. Where the tokens begin to differ, both of
    them are as likely as each other."""
    folder = real_model(tmp_path)
    trained = load_run(str(folder / "run"), dtype=DType.float32)
    text = trained.tokenizer.encode((REPOSITORY / "LICENSE").read_text("utf-8"))
    rng, half = np.random.default_rng(0), REAL_PROMPTS // 2
    prompts = [text[i * 20 : i * 20 + 5 + i].tolist() for i in range(half)]
    prompts += [rng.integers(20, 49000, 5 + i).tolist() for i in range(half)]
    request = Request(REAL_COUNT, Sampling(temperature=0, top_logprobs=2))
    replies = Engine(trained, max_num_seqs=16).generate([*map(np.array, prompts)], request)
    jobs = {"": (str(folder / "hf"), prompts, REAL_COUNT)}
    theirs = of_vllm(folder, jobs)[""]["tokens"]
    differ = [pair for pair in zip(replies, theirs, strict=True) if pair[0].tokens != pair[1]]
    assert len(differ) <= MOST_TIES
    for reply, tokens in differ:
        pairs = enumerate(zip(reply.tokens, tokens, strict=True))
        place = next(i for i, (one, other) in pairs if one != other)
        (_, likeliest), (second, next_likely) = reply.top[place]
        assert second == tokens[place] and likeliest - next_likely <= TIE
