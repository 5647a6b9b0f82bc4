"""Private interfaces of jax that the code depends on: a release that changes them fails here."""

import importlib.util
import inspect

from jax._src import distributed
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from maxmeg.ops.attention import cudnn as attention_cudnn
from maxmeg.processes import coordinator, multihost


def test_the_key_value_store_of_the_coordinator():
    """processes/multihost.py: how processes agree when they save, and watch each other."""
    assert multihost.distributed is distributed and coordinator._jax is _jax
    state = distributed.global_state
    assert (state.client, state.process_id, state.num_processes) == (None, 0, 1)
    assert state.coordinator_address is None
    names = ("key_value_set", "blocking_key_value_get", "key_value_dir_get", "key_value_delete")
    for name in (*names, "wait_at_barrier"):
        assert callable(getattr(_jax.DistributedRuntimeClient, name))
    signature = _jax.get_distributed_runtime_service.__doc__ or ""
    assert signature.startswith("get_distributed_runtime_service(address: str, num_nodes: int, ")
    assert "heartbeat_timeout: int" in signature


def test_the_function_behind_dot_product_attention():
    """ops/attention/cudnn.py: its keywords, masks and residual; and how it asks for a GPU."""
    parameters = inspect.signature(fused.dot_product_attention).parameters
    assert [*parameters][:3] == ["query", "key", "value"]
    used = {"scale", "mask_type", "sliding_window_length", "return_residual"}
    assert used <= {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert {"CAUSAL", "NO_MASK"} <= set(fused.MaskType.__members__)
    assert not inspect.signature(fused.check_cudnn_version).parameters
    # It is replaced by name in its module, where the checks must look it up.
    assert "check_compute_capability" in fused.check_is_flash_attention.__code__.co_names
    replaced = [fused.check_compute_capability, attention_cudnn.has_capability]
    assert [[*inspect.signature(f).parameters] for f in replaced] == [["capability"]] * 2


def test_the_rules_that_masks_and_sinks_call():
    """ops/attention/cudnn.py: their parameters, and where log-sum-exp and output are saved."""
    assert attention_cudnn.refuses_rules() == ""
    forward = inspect.getsource(fused._dot_product_attention_fwd_rule)
    assert (
        "outputs[1], outputs[0])\n  if return_residual:\n    return tuple(outputs), res" in forward
    )
    backward = inspect.getsource(fused._dot_product_attention_bwd_rule)
    assert "activation, fwd_output) = res\n" in backward
    assert "\n  if return_residual:\n    grad_output = grad_output[0]" in backward


def test_importing_attention_leaves_cudnns_check_alone(monkeypatch):
    """It is replaced only when a program is compiled for a GPU that is not here."""
    monkeypatch.setattr(fused, "check_compute_capability", check := object())
    spec = importlib.util.spec_from_file_location("imported_again", attention_cudnn.__file__)
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert fused.check_compute_capability is check
