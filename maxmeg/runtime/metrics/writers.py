"""Writers of metrics: metrics.jsonl, TensorBoard event files, Weights & Biases.

Process 0 alone writes. A run that resumes after step k replaces the metrics of later steps. A full
disk stops a writer, never the training.
"""

import importlib.util
import json
import logging
import math
import os
import pathlib
import time
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol

from maxmeg.data.corpus.stored import write_atomically
from maxmeg.runtime.metrics.hooks import Hook, Metrics
from maxmeg.runtime.metrics.names import grouped

_log = logging.getLogger(__name__)


class JsonlWriter:
    """One line of JSON per step: {"step": n, "time": ..., "loss": ...}; NaN and inf become null.

    time: Unix seconds. The first line that this writer adds also has `once`, unless empty: texts
    by name, such as the commit of maxmeg.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        start_step: int = 0,
        once: Mapping[str, str] = types.MappingProxyType({}),
    ):
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(self._path, start_step)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        self._once = {name: text for name, text in once.items() if text}

    def __call__(self, step: int, metrics: Metrics) -> None:
        row = {"step": step, "time": round(time.time(), 3), **self._once}
        self._once = {}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Finite scalars with grouped names in event files under `folder`."""

    def __init__(self, folder: str | os.PathLike, start_step: int = 0):
        self._folder = os.fspath(folder)
        self._start_step = start_step
        self._writer = None

    def __call__(self, step: int, metrics: Metrics) -> None:
        if self._writer is None:
            import tensorboardX  # slow to import: only once the first step runs

            # From purge_step on, TensorBoard ignores the older files of the folder.
            self._writer = tensorboardX.SummaryWriter(
                self._folder,
                purge_step=self._start_step + 1,
                flush_secs=10,
                filename_suffix=f".{self._start_step:08}",  # names have whole seconds only
            )
        for name, value in metrics.items():
            if math.isfinite(value):  # it would warn at each other one, which no plot shows
                self._writer.add_scalar(grouped(name), value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbWriter:
    """A Weights & Biases run; metrics have grouped names.

    A resumed training continues the run with the id in its folder.
    """

    def __init__(self, project: str, run_dir: str | os.PathLike, config: dict):
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"log.wandb_project={project!r} needs the wandb package:"
                " pip install 'maxmeg[wandb]', or leave it empty"
            )
        import wandb  # pyright: ignore[reportMissingImports]

        run_dir = pathlib.Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=id_file.read_text(),
            resume="allow",
            dir=os.fspath(run_dir),
            config=config,
        )

    def __call__(self, step: int, metrics: Metrics) -> None:
        self._run.log({grouped(name): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class Writer(Protocol):
    """Writes the metrics of every step."""

    def __call__(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def writer_hook(writer: Writer) -> Hook:
    """Hook that writes every step, until an OSError: then it warns once and stops writing."""
    name = type(writer).__name__
    failed = []

    def call(step, metrics):
        if not failed:
            _guarded(lambda: writer(step, metrics), f"step {step}", name, failed)

    def close():
        _guarded(writer.close, "close", name, failed)

    return Hook(call, close=close)


def _guarded(action: Callable[[], None], what: str, name: str, failed: list) -> None:
    try:
        action()
    except OSError as error:
        failed.append(error)
        _log.warning("%s stops at %s, training goes on: %s", name, what, error)


def _drop_after(path, start_step):
    """Remove the rows of steps after `start_step`, and an incomplete last line."""
    if not path.exists():
        return
    lines, is_whole = [], True
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            keep = line.endswith("\n") and json.loads(line)["step"] <= start_step
        except (ValueError, KeyError, TypeError):
            keep = False
        is_whole &= keep
        if keep:
            lines.append(line)
    if not is_whole:
        write_atomically(path, "".join(lines).encode())
