"""What a conversion takes: `python benchmarks/conversion.py [FOLDER]` (9 GB of disk, 2 minutes).

A Llama of 24 layers (1.5 GB of random bfloat16 in shards of 100 MB) becomes a run's folder and goes
back. Each way is a process of its own; its peak memory must stay within 1.5 x the largest shard and
1 GB. Prints seconds and memory, as JSON.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARD_BYTES = 100_000_000
LAYERS = 24
FAMILY = "LlamaForCausalLM"


def make(folder: Path) -> None:
    """The model's folder; one layer's values serve for all."""
    import ml_dtypes
    import numpy as np

    from maxmeg.checkpoint.stream import TensorInfo
    from maxmeg.config.model import ModelConfig
    from maxmeg.config.setting import with_fields
    from maxmeg.hf.families import read as families
    from maxmeg.hf.formats.safetensors import SafetensorsWriter

    model = with_fields(
        ModelConfig(),
        {
            "vocab_size": 32000,
            "num_layers": LAYERS,
            "hidden_size": 1536,
            "attention.num_heads": 12,
            "mlp.ffn_size": 4096,
            "max_position": 2048,
        },
    )
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {b.theirs: TensorInfo(dtype, b.shape) for b in families.bindings(model, FAMILY)}
    rng = np.random.default_rng(0)
    made: dict[tuple[int, ...], np.ndarray] = {}
    with SafetensorsWriter(folder, tensors, SHARD_BYTES) as writer:
        for name, info in tensors.items():
            if info.shape not in made:
                made[info.shape] = rng.standard_normal(info.shape, np.float32).astype(dtype)
            writer.write(name, made[info.shape])
    (folder / "config.json").write_text(json.dumps(families.hf_config(model, FAMILY)))


def convert(way: str, source: Path, target: Path) -> dict[str, float]:
    """One conversion, in this process."""
    from maxmeg.hf import convert

    start = time.time()
    if way == "import":
        convert.import_model(convert.open_folder(source), target)
    else:
        convert.export_model(source, target, max_shard_bytes=SHARD_BYTES)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": time.time() - start, "peak_bytes": peak}


def in_a_process(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def main(folder: Path) -> None:
    there, run, back = (folder / name for name in ("hf", "run", "back"))
    make(there)
    largest = max(path.stat().st_size for path in there.glob("*.safetensors"))
    limit = 1.5 * largest + 1e9
    total = sum(path.stat().st_size for path in there.glob("*.safetensors"))
    print(json.dumps({"model_bytes": total, "largest_shard": largest, "limit_bytes": limit}))
    for way, source, target in (("import", there, run), ("export", run, back)):
        found = in_a_process(way, str(source), str(target))
        print(json.dumps({"way": way, **found, "within": found["peak_bytes"] <= limit}))
    shards = sorted(there.glob("*.safetensors"))
    same = all(path.read_bytes() == (back / path.name).read_bytes() for path in shards)
    print(json.dumps({"bitwise_the_same": same}))


if __name__ == "__main__":
    if sys.argv[1:2] in (["import"], ["export"]):
        print(json.dumps(convert(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
    elif sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
