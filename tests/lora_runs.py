"""Folders of LoRA runs with random adapters, as training leaves them."""

import functools

import jax
import numpy as np

from maxmeg.checkpoint.initialize import base_of
from maxmeg.checkpoint.names import to_arrays
from maxmeg.checkpoint.stream import StreamWriter, TensorInfo
from maxmeg.config import files
from maxmeg.config.schema import Config, LoraConfig
from maxmeg.data import run_folder
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.models.lm import language_model


def write_lora_run(run_dir, config: Config, **lora) -> dict[str, np.ndarray]:
    """Writes the checkpoint of step 3; the adapters by their names in it."""
    config.run_dir, config.lora = str(run_dir), LoraConfig(**lora)
    make = functools.partial(language_model, config=config)
    arrays = to_arrays({"model": jax.eval_shape(make, jax.random.key(0))})
    rng, made = np.random.default_rng(1), {}
    for name, array in arrays.items():
        if ".lora." in name:
            made[name.replace(".", "/")] = 0.2 * rng.standard_normal(array.shape, np.float32)
    infos = {path: TensorInfo(array.dtype, array.shape) for path, array in made.items()}
    identity = load_tokenizer(config.data.tokenizer).identity
    settings = files.to_dict(run_folder.stored(config))
    metadata = {"config": settings, "tokenizer": identity, "base": base_of(config)}
    moments = {f"optimizer/{path.removeprefix('model/')}": path for path in made}
    infos |= {moment: infos[path] for moment, path in moments.items()}
    with StreamWriter(run_dir / "checkpoints", 3, infos or empty(), metadata) as writer:
        for path, array in (made or {"step": np.zeros((), np.int32)}).items():
            writer.write(path, array)
        for moment, path in moments.items():
            writer.write(moment, made[path])
    run_folder.write(config)
    return made


def empty() -> dict[str, TensorInfo]:
    return {"step": TensorInfo(np.dtype(np.int32), ())}
