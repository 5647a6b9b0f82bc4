"""Names of metrics in TensorBoard and Weights & Biases: train/loss, val/loss, optim/lr, ..."""

from maxmeg.layers.balance import LOSSES
from maxmeg.layers.qk_clip import LARGEST

_GROUPS = {
    "val": ("validation_loss", "validation_loss_per_byte", "validation_accuracy"),
    "optim": (
        *("learning_rate", "weight_decay", "grad_norm", "skipped", "rerun", "loss_scale"),
        LARGEST,
    ),
    "perf": (
        *("step_seconds", "tokens_per_second", "tflops_per_device", "mfu"),
        *("data_wait_seconds", "eval_seconds", "save_seconds", "median_process_seconds"),
        *("slowest_process", "slowest_process_seconds", "slowest_process_data_wait_seconds"),
    ),
    "memory": ("peak_memory_gib",),
    "data": ("tokens", "consumed_samples", "consumed_tokens"),
    "moe": ("expert_load_max", "expert_load_entropy", "expert_dropped", *LOSSES),
}
_SHORT = {
    "learning_rate": "lr",
    "validation_loss": "loss",
    "validation_loss_per_byte": "loss_per_byte",
    "validation_accuracy": "accuracy",
    "peak_memory_gib": "peak_gib",
    "expert_load_max": "load_max",
    "expert_load_entropy": "load_entropy",
    "expert_dropped": "dropped",
}
_GROUPED = {
    name: f"{group}/{_SHORT.get(name, name)}" for group, names in _GROUPS.items() for name in names
}


def grouped(name: str) -> str:
    """The name of a metric with its group. What follows a slash stays: val/loss/web.

    Metrics that are in no other group, such as those of an objective, are in train.
    """
    base, slash, rest = name.partition("/")
    return _GROUPED.get(base, f"train/{base}") + slash + rest
