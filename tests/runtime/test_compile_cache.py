"""A run on GPUs keeps its compiled programs: resuming it compiles nothing again."""

import collections
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from short_runs import EACH, config, write_corpus

from maxmeg.config.files import COMPILE_CACHE
from maxmeg.runtime import gpu_environment
from maxmeg.train import main

EVENTS = "/jax/compilation_cache/"
SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Commands set up the process as on GPUs; the user has chosen no folder for programs."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    monkeypatch.setattr(gpu_environment, "uses_gpu", lambda: True)
    for name in (gpu_environment._FRACTION_NAMES[0], SETTINGS[1].upper()):
        monkeypatch.setenv(name, "")
    jax.config.update(SETTINGS[0], None)
    jax.config.update(SETTINGS[1], 1.0)  # JAX's default
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def events():
    """Numbers of the compilation cache's events."""
    counts: collections.Counter[str] = collections.Counter()

    def count(event: str, **_) -> None:
        counts[event.removeprefix(EVENTS)] += event.startswith(EVENTS)

    jax.monitoring.register_event_listener(count)
    yield counts
    jax.monitoring.unregister_event_listener(count)


@pytest.mark.slow
def test_a_restart_compiles_nothing(tmp_path: Path, as_on_gpus, events):
    corpus = write_corpus(tmp_path)
    programs = []
    for steps in (EACH, 2 * EACH):
        events.clear()
        jax.clear_caches()  # a new process has none
        compilation_cache.reset_cache()
        main(config(corpus, tmp_path / "run", steps, {"num_layers": 1}, {"fsdp": 8}))
        files = (tmp_path / "run" / COMPILE_CACHE).glob("*-cache")
        programs.append({file.name for file in files})
    assert {"jit_init", "jit_train_step"} <= {name.rsplit("-", 2)[0] for name in programs[0]}
    assert programs[1] == programs[0]
    assert events["cache_misses"] == 0
    assert events["cache_hits"] == events["compile_requests_use_cache"] > 0
