"""The file of measured choices: "auto" follows it, and what is wrong in it is an error."""

import enum
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxmeg.config.schema import Config
from maxmeg.ops import block_matmul, choices, chunk_scan
from maxmeg.ops.attention import call as attention
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import SETTINGS, Device, choose
from maxmeg.ops.decode_attention import call as decode_attention
from maxmeg.ops.experts import grouped_matmul

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as Python does for gpu.py

from gpu_parts import choices as writer

HOPPER, AMPERE, CPU = Device("cuda", (9, 0)), Device("cuda", (8, 0)), Device("cpu")
BACKENDS = {
    "attention": attention.BACKENDS,
    "block_matmul": block_matmul.BACKENDS,
    "chunk_scan": chunk_scan.BACKENDS,
    "delta_scan": chunk_scan.BACKENDS,
    "decode attention": decode_attention.BACKENDS,
    "grouped_matmul": grouped_matmul.BACKENDS,
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    path = tmp_path / "choices.json"
    path.write_text("{}")
    monkeypatch.setattr(choices, "FILE", path)
    return path


def automatic(device: Device, spec: ScoreSpec = attention.CAUSAL) -> str:
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    return attention.choice((x, x, x, spec, Operands()), "auto", device)[0]


def test_a_choice_is_followed_on_its_gpu_alone(file: Path):
    assert automatic(HOPPER) == automatic(AMPERE) == "cudnn"
    choices.read.cache_clear()
    file.write_text(json.dumps({"9.0": {"attention": ["mosaic", "xla"]}}))
    assert automatic(HOPPER) == "mosaic"
    assert automatic(AMPERE) == "cudnn" and automatic(CPU) == "xla"


@pytest.mark.parametrize(("rows", "chosen"), [(1, "xla"), (8, "mosaic")])
def test_auto_takes_no_scan_whose_programs_leave_a_gpu_idle(file: Path, rows: int, chosen: str):
    """16 heads a row, as of Nemotron-H on 8 devices along tensor. Named, it is taken."""
    file.write_text(json.dumps({"9.0": {"chunk_scan": ["mosaic"]}}))
    call = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    keys, values = call((rows, 256, 1, 128)), call((rows, 256, 16, 64))
    states = call((rows, 16, 128, 64))
    inputs = chunk_scan.Inputs(keys, keys, values, call((rows, 256, 16, 1)), None, states)
    pick = functools.partial(choose, "chunk_scan", chunk_scan.BACKENDS, chunk_scan.ORDER)
    assert pick("auto", (inputs,), HOPPER)[0] == chosen
    assert pick("mosaic", (inputs,), HOPPER)[0] == "mosaic"


def test_a_measured_backend_that_cannot_run_a_call_is_passed_over(file: Path):
    soft_cap = ScoreSpec(softcap=5.0)
    file.write_text(json.dumps({"9.0": {"attention": ["cudnn", "triton"]}}))
    assert (automatic(HOPPER), automatic(HOPPER, soft_cap)) == ("cudnn", "triton")


@pytest.mark.parametrize("op", choices.OPS)
def test_an_unknown_backend_is_an_error_with_the_known_ones(file: Path, op: str):
    file.write_text(json.dumps({"9.0": {op: ["xla", "tritno"]}}))
    names = ", ".join(BACKENDS[op])
    message = rf"choices.json: {op} .* 9.0 must be among {names}, not \['tritno'\]; .*--choices"
    with pytest.raises(ValueError, match=message):
        choices.measured_order(op, BACKENDS[op], ("xla",), (9, 0))
    assert choices.measured_order(op, BACKENDS[op], ("xla",), (8, 0)) == ["xla"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "items"),
        ('{"9.0": 1}', "not iterable"),
        ('{"9.0": {"atention": []}}', r"9.0: \['atention'\] must be among attention, block_matmul"),
        ('{"9.0": {"attention": "xla"}}', r"9.0: \['attention'\] must be lists of backends"),
    ],
)
def test_a_file_of_another_form_is_an_error(file: Path, text: str, words: str):
    file.write_text(text)
    with pytest.raises(ValueError, match=f"must map compute capabilities .*{words}.*--choices"):
        automatic(HOPPER)


def test_the_file_of_the_package_names_known_backends():
    for capability in choices.read(choices.FILE):
        major, minor = map(int, capability.split("."))
        for op in choices.OPS:
            choices.measured_order(op, BACKENDS[op], (), (major, minor))


def checked(op: str, backend: str, ok: bool = True) -> dict:
    return {"part": f"check-{op}", "item": f"{op} {backend}", "ok": ok}


ROWS = [
    checked("attention", "cudnn"),
    checked("attention", "mosaic"),
    checked("attention", "triton", ok=False),
    checked("decode", "mosaic", ok=False),
    {"part": "attention", "both xla tflops": 90.0, "both cudnn tflops": 400.0}
    | {"both mosaic tflops": 500.0, "both triton tflops": 999.0, "both mosaic of xla": 5.6},
    {"part": "attention", "both xla tflops": 100.0, "both cudnn tflops": 410.0},
    {"part": "attention", "both mosaic tflops": 500.0, "both cudnn tflops": 400.0},
    {"part": "decode", "xla tb_per_s": 1.0, "mosaic tb_per_s": 3.0},
]


def test_what_was_measured_and_right_is_written_and_read(file: Path):
    file.write_text(json.dumps({"8.0": {"attention": ["xla"]}, "9.0": {"grouped_matmul": ["xla"]}}))
    writer.write(file, "9.0", ROWS)
    assert choices.read(file) == {
        "8.0": {"attention": ["xla"]},
        "9.0": {"attention": ["mosaic", "cudnn", "xla"], "grouped_matmul": ["xla"]},
    }
    assert automatic(HOPPER) == "mosaic" and automatic(AMPERE) == "xla"
    assert {op for op, _, _ in writer.RATES.values()} == set(choices.OPS)
    assert writer.FILE.samefile(Path(choices.__file__).with_name("choices.json"))


@pytest.mark.parametrize(("capability", "rows"), [("", ROWS), ("9.0", []), ("9.0", ROWS[-1:])])
def test_nothing_is_written_without_a_gpu_or_a_comparison(file: Path, capability: str, rows: list):
    with pytest.raises(ValueError, match=r"needs a GPU and two backends .*: run all parts"):
        writer.write(file, capability, rows)
    assert file.read_text() == "{}"


def test_errors_name_settings_that_exist():
    assert SETTINGS.keys() < {*BACKENDS, "linear + cross entropy"}
    for path in SETTINGS.values():
        backend = functools.reduce(getattr, path.split("."), Config())
        assert isinstance(backend, enum.Enum) and backend.value == "auto", path
