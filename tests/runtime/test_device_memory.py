"""Memory in use on fake devices, and a step that is compiled once, before it runs."""

import contextlib
import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.runtime.metrics.memory import GIB, CompiledStep, memory_limit, peak_memory_hook
from maxmeg.runtime.metrics.progress import Progress, memory_size
from maxmeg.runtime.metrics.writers import JsonlWriter


def device(**gib: float):
    """A device with these memory statistics; a CPU without any."""
    stats = {name: int(amount * GIB) for name, amount in gib.items()} or None
    return types.SimpleNamespace(memory_stats=lambda: stats)


GPUS = [device(peak_bytes_in_use=peak, bytes_limit=72.8) for peak in (30.0, 31.25, 29.0)]


@pytest.mark.parametrize(("devices", "peak"), [(GPUS, 31.25), ([device()], None), (None, None)])
def test_the_peak_of_the_fullest_device_is_shown_and_written(tmp_path, devices, peak):
    out, metrics = io.StringIO(), {"loss": 2.0}
    peak_memory_hook(devices).call(1, metrics)
    Progress(10, file=out)(1, metrics)
    with contextlib.closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer:
        writer(0, metrics)
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written.get("peak_memory_gib") == peak
    assert ("31.2GiB" in out.getvalue()) == (peak is not None)
    assert memory_limit(devices) == (int(72.8 * GIB) if peak else None)


def test_a_step_is_compiled_once_a_shape_before_it_runs():
    events = []

    def listen(event: str, duration_secs: float, **details: str | int):
        if event.endswith("backend_compile_duration") and "halved" in str(details):
            events.append("compile")

    def halved(state, batch, controls):
        return {"w": state["w"] * controls["rate"]}, batch["x"].sum()

    jitted = jax.jit(halved, donate_argnums=0)
    step = CompiledStep(jitted, lambda compiled: events.append(compiled.memory_analysis()))
    state = {"w": jax.device_put(jnp.ones((8, 128)), jax.devices()[0])}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for rows in (4, 4, 2, 4):
            batch = {"x": jnp.ones((rows, 8))}
            state, total = step(state, batch, {"rate": np.float32(0.5)})
            assert float(total) == rows * 8
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event in events if event == "compile"] == ["compile"] * 2
    memory = [event for event in events if event != "compile"]
    assert [m.argument_size_in_bytes for m in memory] == [4 * (8 * 128 + 8 * r + 1) for r in (4, 2)]
    assert float(state["w"][0, 0]) == 0.5**4


def test_memory_sizes_are_parsed():
    assert memory_size(29.71 * GIB) == "29.7 GiB" and memory_size(2**20 * 41.25) == "41.2 MiB"
