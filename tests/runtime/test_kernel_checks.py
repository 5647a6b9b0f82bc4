"""The check of every backend on this device, and what "auto" makes of its results."""

import contextlib
import dataclasses
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxmeg import doctor
from maxmeg.ops import choices
from maxmeg.ops.attention.call import BACKENDS, choice
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import Device, pick
from maxmeg.runtime import kernel_checks
from maxmeg.runtime.kernel_checks import (
    Case,
    cases,
    check_chosen,
    checks,
    line,
    results,
    write,
)
from maxmeg.runtime.metrics.memory import CompiledStep

HOPPER = Device("cuda", (9, 0))
CALL = (*[jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)] * 3, ScoreSpec(), Operands())


def test_every_op_has_three_cases():
    counts = {}
    for case in cases(1):
        counts[case.op] = counts.get(case.op, 0) + 1
    assert set(counts.values()) == {3}
    assert set(choices.OPS) | {"linear + cross entropy"} == set(counts)


@pytest.mark.parametrize(
    "number",
    [*range(0, 21, 3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(21) if n % 3)],
)
def test_backends_that_run_here_are_right(number):
    case = list(cases(1))[number]
    found = {check.backend: check for check in checks(case)}
    assert found["xla"].problem == found["xla"].refused == ""
    assert found["xla"].seconds > 0 and found.keys() == set(case.backends)
    if not case.is_rounded:  # its reference is xla itself
        assert found["xla"].error > 0
    for name in found.keys() - {"xla", "tiled"}:
        assert "cpu" in found[name].refused and not found[name].problem


def twice(backend: str, x):
    """Right in xla; wrong by a factor, in the gradient, by NaN and by an error elsewhere."""
    if backend == "broken":
        raise RuntimeError("no such instruction\nat line 7")
    if backend == "refused":
        raise ValueError("attention backend refused cannot run: 8 rows")
    y = 2 * x
    if backend == "gradient":
        y = 3 * x - jax.lax.stop_gradient(x)
    return {"factor": 1.1 * y, "nan": y * jnp.nan}.get(backend, y), ()


FOUND = ("xla", "factor", "gradient", "nan", "broken")


def fake_case(op: str = "attention", run=twice) -> Case:
    return Case(op, "x", FOUND, lambda key: (jax.random.normal(key, (8, 8), jnp.bfloat16),), run)


def fake() -> list:
    return list(checks(fake_case()))


def test_wrong_results_gradients_and_errors_are_found():
    problems = {check.backend: check.problem for check in fake()}
    assert problems["xla"] == ""
    assert problems["factor"] == "differs from the reference by 0.1"
    assert problems["gradient"] == "differs from the reference by 0.5"
    assert "inf" in problems["nan"]
    assert problems["broken"] == "no such instruction"
    lines = [line(check) for check in fake()]
    assert "ok, error" in lines[0] and "WRONG: no such instruction" in lines[4]


@pytest.fixture
def local(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(choices, "LOCAL", tmp_path / "cache" / "kernels.json")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    choices.local_results.cache_clear()
    yield choices.LOCAL
    choices.local_results.cache_clear()


def test_auto_follows_the_order_and_takes_no_backend_that_is_wrong(local: Path):
    assert choice(CALL, "auto", HOPPER)[0] == "cudnn"
    right = fake()[0]
    found = [
        dataclasses.replace(right, backend=n, seconds=s) for n, s in (("xla", 3.0), ("triton", 1.0))
    ]
    found.append(dataclasses.replace(right, backend="cudnn", problem="differs"))
    assert write(found) == local
    choices.local_results.cache_clear()
    assert results(found)["order"] == {"attention": ["triton", "xla"]}
    assert choices.measured_order("attention", BACKENDS, ("cudnn", "xla"), (9, 0)) == [
        "triton",
        "xla",
    ]
    with pytest.raises(
        ValueError, match=r"cudnn gave wrong results on this GPU \(x: differs\).*auto"
    ):
        choice(CALL, "cudnn", HOPPER)


@pytest.mark.parametrize("damage", [{"jax": "0.1"}, {"device": "H100"}, {"order": None}, []])
def test_results_of_another_gpu_or_jax_are_ignored_and_said(local: Path, caplog, damage):
    path = write(fake())
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | damage if damage else damage))
    choices.local_results.cache_clear()
    assert choices.local_results(path) == {}
    assert "is ignored: maxmeg doctor --kernels writes it" in caplog.text


def refuse(backend: str, x):
    return twice("refused" if backend == "gradient" else backend, x)


@pytest.fixture
def small(monkeypatch) -> None:
    """Cases of another op, of one that a kernel refuses, and of one that it runs."""
    few = [fake_case("other"), fake_case(run=refuse), fake_case()]
    monkeypatch.setattr(kernel_checks, "cases", lambda scale: few)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("xla", ""),
        ("right", ""),
        (
            "gradient",
            r"^attention backend gradient is wrong on cpu \(x: differs from the reference "
            r"by 0.5, more than 0.02\): set model.attention.backend=xla",
        ),
        ("broken", "no such instruction"),
    ],
)
def test_a_step_with_a_wrong_kernel_is_neither_compiled_nor_run(small, backend, words):
    compiled, names = [], (*FOUND, "right")
    backends = dict.fromkeys(names, types.SimpleNamespace(refuses=lambda device: ""))

    def train(state, batch, controls):
        assert pick("attention", backends, ("xla",), backend, ()) == backend
        return state

    step = CompiledStep(jax.jit(train), compiled.append)
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        step(0, {}, {})
    assert len(compiled) == (not words)


def test_what_the_doctor_found_right_is_not_checked_at_the_start(small, local: Path):
    with pytest.raises(ValueError, match="attention backend nan is wrong"):
        check_chosen({("attention", "nan")})
    write([dataclasses.replace(fake()[0], backend="nan")])
    choices.local_results.cache_clear()
    check_chosen({("attention", "nan"), ("attention", "xla")})


def test_doctor_prints_every_check_and_fails_if_one_is_wrong(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(choices, "LOCAL", tmp_path / "kernels.json")
    monkeypatch.setattr(doctor, "cases", lambda scale: [None])
    monkeypatch.setattr(doctor, "checks", lambda case, announce: fake()[:1])
    doctor.main(doctor.Options(kernels=True))
    assert "attention" in capsys.readouterr().out and not choices.LOCAL.exists()
    monkeypatch.setattr(doctor, "checks", lambda case, announce: fake())
    with pytest.raises(SystemExit, match="1"):
        doctor.main(doctor.Options(kernels=True))
    assert "4 of 5 checks are wrong" in capsys.readouterr().out


def test_a_backend_that_ends_the_process_is_wrong_from_then_on(local: Path, monkeypatch):
    def crash(case, announce):
        for check in fake()[:2]:
            announce(check)
            if check.backend == "factor":
                raise KeyboardInterrupt
            yield check

    monkeypatch.setattr(doctor, "cases", lambda scale: [None])
    monkeypatch.setattr(doctor, "checks", crash)
    with pytest.raises(KeyboardInterrupt):
        doctor.main(doctor.Options(kernels=True))
    choices.local_results.cache_clear()
    assert choices.wrong_here("attention") == {"factor": "x: it ended the process"}
