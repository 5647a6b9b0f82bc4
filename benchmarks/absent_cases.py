"""Models and layouts that the benchmarks for absent GPUs compile, and a process that compiles one.

`python benchmarks/absent_cases.py REQUEST`: compiles with the package of the checkout that
MAXMEG_CHECKOUT names (empty: this one), perhaps as it was at another commit, and prints JSON.
"""

import dataclasses
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

sys.path.insert(0, os.environ.get("MAXMEG_CHECKOUT") or str(Path(__file__).parent.parent))

from maxmeg.config.architectures import use_architecture
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.planning.compile import compile_report


@dataclasses.dataclass(frozen=True)
class Case:
    """A named architecture on `gpus` GPUs. micro_batch: samples per device and microbatch.

    layers, length: 0 means the architecture's. recompute: the default of the command.
    """

    model: str
    gpus: int = 1
    parallel: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    micro_batch: int = 1
    microbatches: int = 1
    length: int = 0
    recompute: str = "minimal"
    layers: int = 0

    def config(self) -> Config:
        defaults = ParallelConfig()
        fields = {n: type(getattr(defaults, n))(value) for n, value in self.parallel.items()}
        parallel = ParallelConfig(**fields)
        shards = self.gpus // (parallel.pipe * parallel.tensor * parallel.context)
        train = TrainConfig(
            global_batch_size=self.micro_batch * self.microbatches * shards,
            micro_batch_size=self.micro_batch,
        )
        config = use_architecture(Config(parallel=parallel, train=train), self.model)
        config.model.num_layers = self.layers or config.model.num_layers
        config.model.recompute = self.recompute
        config.model.attention.backend = AttentionBackend.cudnn
        config.data.sequence_length = self.length or config.data.sequence_length
        return config


def compiled(case: Case, path: Path, checkout: str = "") -> dict:
    """`Compiled` of a case as a dict, by the package of `checkout`; the compiled text is written
    to `path`."""
    request = json.dumps({"case": dataclasses.asdict(case), "path": str(path.resolve())})
    child = subprocess.run(
        [sys.executable, __file__, request],
        env={**os.environ, "MAXMEG_CHECKOUT": checkout},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    request = json.loads(sys.argv[1])
    case = Case(**request["case"])
    report = compile_report(case.config(), "h100", case.gpus, request["path"])
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
