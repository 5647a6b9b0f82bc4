"""llama.cpp reads GGUF files that are written here: greedy tokens, and log-probabilities."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_gguf_oracle import EXPERTS, GEMMA, LLAMA3, QWEN2, QWEN3, assign, make_run

from maxmeg.config.model import DType
from maxmeg.config.options import Quantize
from maxmeg.hf import gguf_export
from maxmeg.hf.formats import gguf

pytest.importorskip("xllamacpp")

CHILD, COUNT = Path(__file__).with_name("llama_cpp_child.py"), 8
EXACT = 5e-3  # llama.cpp computes GELU by a table in float16
ROUNDED = 0.1  # and products with weights in fewer bits from activations in as many
FORMS = [
    (DType.float32,),
    (DType.float16,),
    (DType.bfloat16,),
    (DType.bfloat16, Quantize.q8_0),
    (DType.bfloat16, Quantize.q4_0),
]
# Rounding may change which experts a token has: then it has all of them.
EVERY = QWEN3 | {"num_experts_per_tok": QWEN3["num_experts"]}
CASES = [
    ("llama", {}, FORMS),
    ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, FORMS),
    ("qwen2", {}, FORMS),
    ("qwen3", {"head_dim": 128}, FORMS),
    ("gemma2", GEMMA, FORMS),
    ("gemma3_text", GEMMA, FORMS),
    ("mixtral", {"num_local_experts": 4, "sliding_window": None}, FORMS[:1]),
    ("qwen2_moe", QWEN2, FORMS[:1]),
    ("qwen3_moe", QWEN3, FORMS[:1]),
    ("qwen3_moe", EVERY, FORMS[1:]),
    ("olmoe", {**EXPERTS, "num_key_value_heads": 4}, FORMS[:1]),
]


def of_llama_cpp(path: Path, ids: list[int]) -> dict:
    command = [sys.executable, str(CHILD), str(path), json.dumps(ids), str(COUNT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not run.returncode, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("kind", "more", "forms"), CASES)
def test_llama_cpp_reads_the_file(tmp_path, kind, more, forms):
    """Of each form: what llama.cpp computes, and transformers with the file's weights."""
    model, ids = make_run(tmp_path, kind, more)
    for number, form in enumerate(forms):
        path = tmp_path / f"{number}.gguf"
        gguf_export.export_gguf(tmp_path / "run", path, *form)
        weights = gguf.open_file(path).weights
        assign(model, weights)
        answer = of_llama_cpp(path, ids)
        with torch.no_grad():
            rows = model(torch.tensor([ids + answer["tokens"]])).logits[0].log_softmax(-1)
        steps = rows[len(ids) - 1 : -1]
        tolerance = EXACT if form == FORMS[0] else ROUNDED
        chosen = steps[range(COUNT), answer["tokens"]]
        assert (steps.max(-1).values - chosen).max() <= tolerance, form
        for token, wanted in answer["first"]:
            assert abs(float(steps[0, token]) - wanted) <= tolerance or wanted < -20, form
