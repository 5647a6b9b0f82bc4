"""Rules of the settings of Mamba-2 and of the delta rule."""

from collections.abc import Iterator

from maxmeg.config.model import ModelConfig
from maxmeg.config.recurrent import DELTA_KERNEL_SIZES, SCAN_KERNEL_SIZES, ScanBackend
from maxmeg.config.setting import divisors


def mamba_problems(model: ModelConfig) -> Iterator[str]:
    mamba, heads = model.mamba, model.mamba_heads
    if not mamba.num_heads and 2 * model.hidden_size % mamba.head_dim:
        yield (
            f"model.mamba.head_dim={mamba.head_dim} does not divide 2 x model.hidden_size="
            f"{2 * model.hidden_size}: choose it in {divisors(2 * model.hidden_size)}, or set "
            "model.mamba.num_heads"
        )
    elif heads % model.mamba_groups:
        yield (
            f"model.mamba.num_groups={mamba.num_groups} does not divide the {heads} heads of "
            f"Mamba-2: choose it in {divisors(heads)}, or change model.mamba.num_heads"
        )
    if mamba.max_step and mamba.max_step < mamba.min_step:
        yield (
            f"model.mamba.max_step={mamba.max_step} is smaller than min_step={mamba.min_step}: "
            "raise it, or set it to 0, which is no limit"
        )
    if mamba.chunk < 2 or mamba.chunk & (mamba.chunk - 1):
        yield f"model.mamba.chunk={mamba.chunk} must be a power of 2: choose 64, 128 or 256"
    most = SCAN_KERNEL_SIZES
    if mamba.backend is ScanBackend.mosaic and (
        mamba.state_size > most[0] or mamba.head_dim > most[1]
    ):
        yield (
            f"model.mamba.backend=mosaic takes state_size up to {most[0]} and head_dim up to "
            f"{most[1]}, not {mamba.state_size} and {mamba.head_dim}: set backend=auto or xla"
        )
    if mamba.scales and len(mamba.scales) != 5:
        yield (
            f"model.mamba.scales={mamba.scales} must be 5 factors, of z, x, B, C and dt, or none"
        )


def delta_problems(model: ModelConfig) -> Iterator[str]:
    delta, keys = model.delta, model.delta_key_heads
    if delta.num_heads % keys:
        yield (
            f"model.delta.num_key_heads={keys} does not divide the {delta.num_heads} heads of the "
            f"delta rule: choose it in {divisors(delta.num_heads)}, or change "
            "model.delta.num_heads"
        )
    if model.has("kda") and keys != delta.num_heads:
        yield (
            f"model.delta.num_key_heads={keys} is for gated_delta only: the mixer kda has queries "
            "and keys for every head, set it to 0"
        )
    if delta.chunk < 2 or delta.chunk & (delta.chunk - 1):
        yield f"model.delta.chunk={delta.chunk} must be a power of 2: choose 32, 64 or 128"
    if delta.backend is not ScanBackend.mosaic:
        return
    if model.has("kda"):
        yield (
            "model.delta.backend=mosaic is for gated_delta only, and model.layers="
            f"{model.layers!r} has kda, whose decays are those of channels: set backend=auto or xla"
        )
    most, value = DELTA_KERNEL_SIZES, model.delta_value_size
    if delta.key_size > most[0] or value > most[1]:
        yield (
            f"model.delta.backend=mosaic takes key_size up to {most[0]} and value_size up to "
            f"{most[1]}, not {delta.key_size} and {value}: set backend=auto or xla"
        )
