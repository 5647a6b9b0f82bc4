"""The compiled report without the wheels it needs: its inputs, its child process, its refusals."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import types
from pathlib import Path

import jax
import pytest
from layouts import controls, mesh_of, tiny, tiny_abstract, tiny_batch
from tables import thinned

from maxmeg.config.data import Objective
from maxmeg.config.schema import Optimizer
from maxmeg.planning import absent, hlo
from maxmeg.planning.compile import abstract_step, compile_report, missing_part
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.report import Collective, Compiled
from maxmeg.runtime.gpu_environment import absent_environment

FLOPS = 1.03  # over the model's; XLA's attention may make its two products again for backward
GIB = 2**30
REPORT = Compiled(
    arguments=2 * GIB,
    temporaries=5 * GIB,
    outputs_not_aliased=GIB,
    capacity=10 * GIB,
    collectives=(Collective("all-gather", ("fsdp", "tensor"), 2, 8, 4096, True),),
    kernels={"__cudnn$fmhaSoftmax": 4},
    flops=1e12,
    lower_seconds=1.5,
    compile_seconds=6.5,
)


@pytest.mark.parametrize(
    ("train", "parallel"),
    [
        ({}, {"fsdp": 8}),
        ({"micro_batch_size": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_abstract_arguments_are_those_of_a_run(train, parallel):
    config = tiny({}, train, **parallel)
    mesh = mesh_of(config)
    _, expected = abstract_step(config, mesh)
    _, abstract = tiny_abstract(config, mesh)
    real = (abstract, tiny_batch(config, mesh), controls(mesh))
    assert jax.tree.structure(expected) == jax.tree.structure(real)
    for array, other in zip(jax.tree.leaves(expected), jax.tree.leaves(real), strict=True):
        assert (array.shape, array.dtype) == (other.shape, other.dtype)
        if hasattr(other, "sharding"):
            assert array.sharding.is_equivalent_to(other.sharding, array.ndim)


def test_packed_documents_are_an_argument_too():
    config = tiny({}, {}, fsdp=2)
    config.data.reset_attention_mask = True
    _, (_, batch, _) = abstract_step(config, mesh_of(config))
    assert batch.segment_ids.shape == batch.tokens.shape


@pytest.mark.parametrize("objective", thinned([Objective.masked, Objective.gpt], 2))
def test_flops_of_the_compiled_step_are_the_models(objective):
    """Masked tokens alone have logits: a row of 16 has at most 2, which are computed as 8."""
    model = {"num_layers": 2, "recompute": "minimal", "vocab_size": 640}
    model |= {"attention.causal": objective is Objective.gpt}
    train = {"micro_batch_size": 4, "loss_chunk": 32}
    config = tiny(model, train, fsdp=1, tensor=2)
    config.optim.optimizer = Optimizer.sgd  # whose update is the least to compile
    config.data.objective, config.data.paths = objective, ("sentences",)
    config.data.sentence_pairs = False
    step, arguments = abstract_step(config, mesh_of(config))
    compiled = step.trace(*arguments).lower().compile()
    flops = 2 * hlo.matrix_flops(hlo.parse(compiled.as_text()))
    size, length = config.train.global_batch_size, config.data.sequence_length
    assert config.data.max_targets == (length if objective is Objective.gpt else 8)
    how = {"tensor": 2, "causal": False, "max_targets": config.data.max_targets}
    model_flops = training_flops(config.model, length, size, **how)
    assert 1 <= flops / model_flops <= FLOPS


@pytest.mark.parametrize(
    ("hardware", "count", "message"),
    [
        ("h300", 8, "choose from a100, h100, h200, b200"),
        ("h100", 16, "needs 8 devices, there are 16: set sizes"),
    ],
)
def test_bad_requests_start_no_process(monkeypatch, hardware, count, message):
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ValueError, match=message):
        compile_report(tiny({}, {}, fsdp=8), hardware, count)


def test_missing_plugin_names_the_extra(monkeypatch):
    def version(wheel: str) -> str:
        if wheel == "jaxlib":
            return "0.10.2"
        raise importlib.metadata.PackageNotFoundError(wheel)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match=r"jax-cuda13-plugin is not installed.*'maxmeg\[plan\]'"):
        absent.check_plugins()


def test_plugin_of_another_version_is_refused(monkeypatch):
    versions = {"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.1"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    message = "jax-cuda13-pjrt 0.10.1 does not fit jaxlib 0.10.2: pip install .*==0.10.2"
    with pytest.raises(ValueError, match=message):
        absent.check_plugins()


def child(monkeypatch, stdout: str = "", stderr: str = "", code: int = 0) -> list:
    """Replaces the child process by its answer; what it is asked comes into the list."""
    asked = []

    def run(command, **options):
        asked.append((command, json.loads(options["input"]), options["env"]))
        return types.SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_report_of_the_child_process(monkeypatch):
    answer = json.dumps(dataclasses.asdict(REPORT))
    asked = child(monkeypatch, f"a library's line\n{answer}\n")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    assert compile_report(tiny({"num_layers": 5}, {}, fsdp=8), "h200", 8) == REPORT
    ((_, request, environment),) = asked
    assert request["config"]["model"]["num_layers"] == 5
    assert (request["hardware"], request["count"], request["hlo_path"]) == ("h200", 8, "")
    assert (environment["KEPT"], environment["CUDA_VISIBLE_DEVICES"]) == ("yes", "-1")
    assert environment["XLA_FLAGS"] == "--xla_dump_to=here --xla_gpu_autotune_level=0"


def test_refusals_and_failures_of_the_child_process(monkeypatch):
    config = tiny({}, {}, fsdp=8)
    for kind in (ValueError, NotImplementedError):
        child(monkeypatch, json.dumps({"refusal": kind.__name__, "message": "not so"}))
        with pytest.raises(kind, match="not so"):
            compile_report(config, "h100", 8)
    child(monkeypatch, stderr="Traceback\nXlaRuntimeError: why", code=1)
    with pytest.raises(ChildProcessError, match=r"8 h100 failed: .*\n.*why"):
        compile_report(config, "h100", 8)
    child(monkeypatch, code=-9)
    with pytest.raises(ChildProcessError, match="killed: not enough memory on this machine"):
        compile_report(config, "h100", 8)


def test_a_failed_compile_names_the_missing_part(monkeypatch):
    monkeypatch.setattr(absent, "has_cudnn", lambda: False)
    assert "'maxmeg[plan]', or set config.model.attention.backend=xla" in missing_part(
        "INTERNAL: cuDNN not found."
    )
    assert absent.EXTRA in missing_part("INTERNAL: libdevice not found at ./libdevice.10.bc")
    assert missing_part("INTERNAL: something else") == ""
    monkeypatch.setattr(absent, "has_cudnn", lambda: True)
    assert missing_part("cuDNN says no") == ""


def test_deterministic_programs_are_compiled_for_absent_gpus():
    flags = absent_environment(deterministic=True)["XLA_FLAGS"].split()
    assert "--xla_gpu_deterministic_ops=true" in flags


def ptxas(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    program = Path(environ["CUDA_ROOT"], "bin", "ptxas")
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def test_the_child_assembles_nothing(tmp_path):
    """The `ptxas` first on PATH tells versions and writes empty files; no folder is left. A user's
    flag comes last, and wins."""
    (tmp_path / "nvvm" / "libdevice").mkdir(parents=True)
    binary = tmp_path / "out.cubin"
    own = {"CUDA_ROOT": str(tmp_path), "PATH": "/bin", "XLA_FLAGS": "--xla_a=1"}
    with absent.without_assembler(own) as environ:
        assert environ["XLA_FLAGS"] == "--xla_backend_optimization_level=0 --xla_a=1"
        folder = Path(environ["CUDA_ROOT"])
        assert environ["PATH"] == f"{folder}/bin:/bin"
        assert ptxas(environ, "in.ptx", "-o", str(binary), "-arch=sm_90a").returncode == 0
        assert binary.read_bytes() == b""
        assert ", V13.0.88" in ptxas(environ, "--version").stdout
        isa = ptxas(environ, "--input-as-string", ".version 99.99")
        assert isa.returncode and "current version is '9.0'" in isa.stderr
        assert (folder / "nvvm" / "libdevice").is_dir()
    assert not folder.exists() and (tmp_path / "nvvm" / "libdevice").is_dir()


@pytest.mark.parametrize(
    "environ", [{"MOSAIC_GPU_DUMP_PTXAS": "1"}, {"XLA_FLAGS": "--a=1 --xla_dump_to=here"}]
)
def test_dumps_are_of_the_real_assembler(environ):
    with absent.without_assembler(environ) as kept:
        assert kept == environ


def test_the_real_assembler_where_no_program_can_be_executed(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    warned = pytest.warns(UserWarning, match="with the real ptxas, which takes longer: set TMPDIR")
    with warned, absent.without_assembler({"KEPT": "yes"}) as kept:
        assert kept == {"KEPT": "yes"}
