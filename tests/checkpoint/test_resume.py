"""What a run resumes, and `load_run` loads, beside damaged files and several processes."""

import errno
import functools
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from key_value_store import KeyValueStore
from layouts import mesh_of, tiny

from maxmeg.checkpoint import manager
from maxmeg.checkpoint.disk import to_tree
from maxmeg.checkpoint.initialize import base_of, check_base, initialize
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import to_arrays
from maxmeg.checkpoint.resume import resume
from maxmeg.config import files
from maxmeg.config.errors import report
from maxmeg.config.files import CHECKPOINTS
from maxmeg.config.flags import run_command
from maxmeg.config.model import Norm
from maxmeg.config.schema import Optimizer
from maxmeg.hf.trained import open_run
from maxmeg.inference.load import load_run
from maxmeg.optim.build import make_optimizer
from maxmeg.processes import multihost
from maxmeg.runtime.faults.lock import lock_folder, lock_run
from maxmeg.state import TrainState, abstract_state

TOKENIZER = "null:60"
WIDTHS = {1: 32, 2: 32, 3: 64}  # hidden size by step: the newest checkpoint is of another model


def config_of(step: int = 2):
    config = tiny({"hidden_size": WIDTHS[step], "num_layers": 1, "norm": Norm.layernorm}, fsdp=1)
    config.data.tokenizer = TOKENIZER
    return config


@functools.cache
def abstract_of(width: int = 32) -> TrainState:
    config = config_of(next(step for step, of_step in WIDTHS.items() if of_step == width))
    return abstract_state(config, make_optimizer(config.optim), mesh_of(config))


def state_of(step: int) -> TrainState:
    """Every array of the abstract state filled with its step."""
    return jax.tree.map(
        lambda a: jax.device_put(np.full(a.shape, step, a.dtype), a.sharding),
        abstract_of(WIDTHS[step]),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("saved")
    checkpointer = Checkpointer(folder / CHECKPOINTS, keep_last=3, asynchronous=False)
    for step in WIDTHS:
        config = files.to_dict(config_of(step))
        metadata = {"config": config, "tokenizer": TOKENIZER, "step": step}
        assert checkpointer.save(step, to_tree(state_of(step)), metadata)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy of the run folder with steps 1 and 2."""
    shutil.copytree(saved, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / CHECKPOINTS / "step_00000003")
    return tmp_path / "run"


def manifest_of(run, step):
    return run / CHECKPOINTS / f"step_{step:08d}" / "manifest.json"


def damages(data: bytes):
    """Damaged manifests; None: the file is deleted."""
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    yield from [None, b"", b"{}", b"[]", b"null", data[:-1], data + b" ", b"\xff" * len(data)]
    yield from [bytes(flipped), data[: len(data) // 2], data.replace(b"32", b"64", 1)]


def test_no_damage_to_the_newest_manifest_stops_a_load(run):
    path, checkpoints = manifest_of(run, 2), run / CHECKPOINTS
    for data in damages(path.read_bytes()):
        path.unlink() if data is None else path.write_bytes(data)
        actual = Checkpointer(checkpoints).latest(lambda step, manifest: (step, manifest.metadata))
        assert actual is not None and actual[0] == actual[1]["step"] == 1, data
        assert open_run(run).metadata["step"] == 1


def test_config_and_weights_are_of_one_checkpoint(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    newest = open_run(tmp_path / "run").metadata
    assert newest["step"] == 3 and newest["config"]["model"]["hidden_size"] == 64
    arrays = sorted((tmp_path / "run" / CHECKPOINTS / "step_00000003" / "arrays").rglob("c/0/0"))
    arrays[0].write_bytes(b"damaged")
    reader = open_run(tmp_path / "run")
    assert reader.metadata["step"] == 2 and (reader.read("model/embedding/table") == 2).all()
    trained = load_run(str(tmp_path / "run"))
    assert (trained.step, trained.config.model.hidden_size) == (2, 32)
    for name, array in to_arrays(trained.model).items():
        assert (np.asarray(array) == 2).all(), name


def test_a_checkpoint_of_other_layers_names_the_first_that_differs(run):
    config = config_of(2)
    config.run_dir, config.model.layers = str(run), "*(mlp)"
    checkpointer = Checkpointer(run / CHECKPOINTS)
    with pytest.raises(ValueError, match=r"step 2 is of another model: layer 0 is mlp in .* there"):
        resume(config, checkpointer, abstract_of(), TOKENIZER)
    config = config_of(2)
    config.run_dir, config.model.last_layers_bf16 = str(run), 1
    with pytest.raises(ValueError, match=r"bf16=1, but the checkpoint of step 2 has 0.*init_from"):
        resume(config, checkpointer, abstract_of(), TOKENIZER)


def test_a_checkpoint_of_another_optimizer_names_both(run):
    config = config_of(2)
    config.run_dir, config.optim.optimizer = str(run), Optimizer.lion
    abstract = abstract_state(config, make_optimizer(config.optim), mesh_of(config))
    with pytest.raises(ValueError, match=r"has the state of optim.optimizer=adamw, not of lion"):
        resume(config, Checkpointer(run / CHECKPOINTS), abstract, TOKENIZER)


def test_initial_weights_come_from_an_intact_checkpoint(saved, run):
    config, abstract = config_of(), abstract_of()
    config.checkpoint.init_from = str(run)
    optimizer = make_optimizer(config.optim)
    for step in (2, 1):
        state, base = initialize(config, optimizer, abstract, TOKENIZER)
        assert (np.asarray(to_arrays(state)["model.final_norm.weight"]) == step).all()
        manifest_of(run, step).write_bytes(b"")
    assert base == {}
    shutil.copy(saved / CHECKPOINTS / "step_00000001" / "manifest.json", manifest_of(run, 1))
    config.lora.rank = 2
    first = base_of(config)
    assert first["step"] == 1
    check_base(config, first)
    with pytest.raises(ValueError, match="trained with the frozen base"):
        check_base(config, first | {"digest": "another"})


def test_one_line_is_printed_if_all_checkpoints_are_damaged(run, capsys):
    for step in (1, 2):
        manifest_of(run, step).write_bytes(b"{}")
    functions: list[Callable] = [
        lambda: resume(config_of(), Checkpointer(run / CHECKPOINTS), abstract_of(), TOKENIZER),
        lambda: load_run(str(run)),
        lambda: load_run(str(run), 1),
    ]
    for function in functions:
        with pytest.raises(SystemExit) as ended:
            run_command(function, needs_config=False, argv=["command"])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1, error
        assert error.startswith("error: ") and "manifest.json" in error


def after(count: int, error: Exception, function: Callable) -> Callable:
    """The function, which raises the error at its first `count` calls."""
    calls = itertools.count()

    def call(*arguments):
        if next(calls) < count:
            raise error
        return function(*arguments)

    return call


NO_DAMAGE = [  # an error while arrays are read, how often, and what becomes of it
    (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8GiB"), 1, None),
    (MemoryError("Unable to allocate 8 GiB"), 1, None),
    (PermissionError(errno.EACCES, "Permission denied"), 1, None),
    (OSError(errno.ESTALE, "Stale file handle"), 3, 2),
    (OSError(errno.EIO, "Input/output error"), 4, None),
]


@pytest.mark.parametrize("starts", ["resume", "load_run"])
@pytest.mark.parametrize(("error", "count", "step"), NO_DAMAGE, ids=lambda x: type(x).__name__)
def test_errors_that_are_no_damage_pass_as_themselves(
    run, monkeypatch, caplog, starts, error, count, step
):
    waited = []
    monkeypatch.setattr(manager.time, "sleep", waited.append)
    monkeypatch.setattr(manager.storage, "read", after(count, error, manager.storage.read))

    def begin() -> int:
        if starts == "load_run":
            return load_run(str(run)).step
        return resume(config_of(), Checkpointer(run / CHECKPOINTS), abstract_of(), TOKENIZER).step

    if step:
        assert begin() == step and waited == [1, 4, 16]
    else:
        with pytest.raises(type(error)) as raised:
            begin()
        assert raised.value is error and waited in ([], [1, 4, 16])
        assert report(error, None) == {errno.EIO: 75, errno.EACCES: 2}.get(
            getattr(error, "errno", 0), 1
        )
    assert "DAMAGED" not in caplog.text


def test_a_reader_beside_a_run_that_prunes_lists_again(run, caplog):
    """The run saves the next step, and deletes the older ones, after each listing."""
    reader, writer = (Checkpointer(run / CHECKPOINTS, keep_last=1) for _ in range(2))
    metadata, list_steps, rounds = reader.manifest(2).metadata, reader.steps, []

    def listed() -> list[int]:
        steps = list_steps()
        rounds.append(steps)
        if len(rounds) < 4:
            writer.save(len(rounds) + 2, to_tree(state_of(2)), metadata)
            writer.wait()
        return steps

    reader.steps = listed
    found = resume(config_of(), reader, abstract_of(), TOKENIZER)
    assert found.step == 5 and [1, 2] in rounds and "DAMAGED" not in caplog.text


@pytest.fixture
def two_processes(monkeypatch):
    """Calls a function of a process's number in two threads; returns results or exceptions."""
    index = threading.local()
    store = KeyValueStore()
    monkeypatch.setattr(multihost, "store", lambda: store)
    monkeypatch.setattr(jax, "process_index", lambda: getattr(index, "value", 0))
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def call(function):
        results = {}

        def one(number):
            index.value = number
            try:
                results[number] = function(number)
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [results.get(number, "hangs") for number in range(2)]

    return call


def checkpointer_of(number, run, hidden: set[str]):
    """Of process 1 the listing lacks the folders that are hidden from it."""
    checkpointer = Checkpointer(run / CHECKPOINTS, timeout_seconds=20)
    if number:
        checkpointer.steps = lambda: [  # type: ignore[method-assign]
            step for step in (1, 2) if f"step_{step:08d}" not in hidden
        ]
    return checkpointer


HIDDEN = {  # folders that process 1 does not list, step of a damaged manifest, step to resume
    "newest": ({"step_00000002"}, None, 2),
    "all": ({"step_00000001", "step_00000002"}, None, 2),
    "none, newest damaged": (set(), 2, 1),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_process_0_decides_what_every_process_resumes(run, two_processes, caplog, case):
    hidden, damaged, expected = HIDDEN[case]
    if damaged:
        manifest_of(run, damaged).write_bytes(b"")

    def work(number):
        checkpointer = checkpointer_of(number, run, hidden)
        return resume(config_of(), checkpointer, abstract_of(), TOKENIZER)

    resumed = [(begun.step, begun.metadata["step"]) for begun in two_processes(work)]
    assert resumed == [(expected, expected)] * 2
    damage = [record for record in caplog.records if "DAMAGED" in record.getMessage()]
    assert len(damage) == (damaged is not None)  # told once, by process 0


def test_errors_of_one_process_are_raised_by_all(run, two_processes, monkeypatch):
    read, failure = manager.storage.read, OSError(errno.EIO, "Input/output error", "c/0/0")
    monkeypatch.setattr(manager, "RETRY_SECONDS", ())

    def work(number):
        return checkpointer_of(number, run, set()).restore(2, to_tree(abstract_of()))

    for error, text in (
        (failure, "process 1: Input/output error: c/0/0"),
        (MemoryError("none is left"), "process 1: none is left"),
        (KeyError("w"), "process 1: KeyError: 'w'"),
    ):

        def read_or_fail(*arguments, error=error):
            if jax.process_index():
                raise error
            return read(*arguments)

        monkeypatch.setattr(manager.storage, "read", read_or_fail)
        kind = RuntimeError if isinstance(error, KeyError) else type(error)
        for raised in two_processes(work):
            assert type(raised) is kind and text in str(raised)
            assert getattr(raised, "errno", None) == getattr(error, "errno", None)


def test_errors_reach_all_processes_and_keep_them_aligned(run, two_processes):
    """A process that made other objects before, a folder of another run, errors of process 0."""
    config, abstract = config_of(), abstract_of()
    config.checkpoint.load = "none"

    def refused(number):
        if number:  # a branch that only this process takes
            for _ in range(3):
                Checkpointer(run / "elsewhere")
        return resume(config, checkpointer_of(number, run, {"step_00000001"}), abstract, TOKENIZER)

    for error in two_processes(refused):
        assert isinstance(error, ValueError)
        assert "already holds checkpoints of steps [1, 2]" in str(error)

    def absent(number):  # process 1 never answers
        return number or Checkpointer(run, timeout_seconds=1).manifest(2)

    error, _ = two_processes(absent)
    assert "process 1: no answer to 'newest' in 1 s" in str(error)

    def missing(number):
        return checkpointer_of(number, run, set()).manifest(7)

    for error in two_processes(missing):
        assert isinstance(error, ValueError) and "has [1, 2]" in str(error)


def test_a_lock_that_process_0_cannot_take_is_refused_to_all(run, two_processes):
    def take(number):
        with lock_run(run):
            return number

    with lock_folder(run):
        for error in two_processes(take):
            assert isinstance(error, OSError) and f"process {os.getpid()} on host" in str(error)
    assert two_processes(take) == [0, 1]


def test_a_file_that_is_not_visible_yet_is_waited_for(run, two_processes, monkeypatch):
    """A network file system may show a new file late."""
    path, exists, looks = manifest_of(run, 2), Path.exists, []

    def exists_late(self):
        if self == path and jax.process_index() and len(looks) < 2:
            looks.append(self)
            return False
        return exists(self)

    monkeypatch.setattr(Path, "exists", exists_late)
    monkeypatch.setattr(manager.time, "sleep", lambda seconds: None)
    actual = two_processes(lambda number: Checkpointer(run / CHECKPOINTS).manifest(2).step)
    assert actual == [2, 2] and len(looks) == 2
