"""Continue a prompt: python -m maxmeg.generate --run_dir=runs/gpt --prompt="def main" """

import dataclasses

from maxmeg.config.flags import run_command
from maxmeg.config.schema import setting
from maxmeg.inference.decode import continue_text
from maxmeg.inference.load import load_run
from maxmeg.inference.sampling import Sampling
from maxmeg.parallel import multihost
from maxmeg.parallel.mesh import local_mesh


@dataclasses.dataclass
class Options:
    """What to continue, and how tokens are chosen."""

    prompt: str = setting(dataclasses.MISSING, "text to continue")
    run_dir: str = setting("runs/gpt", "folder of the run")
    step: int = setting(-1, "of the checkpoint; -1: the newest intact one")
    num_tokens: int = setting(100, "tokens to write at most, >= 1")
    temperature: float = setting(0.8, "0: always the likeliest token")
    top_k: int = setting(0, "only the k likeliest tokens; 0: all")
    top_p: float = setting(1.0, "only the likeliest tokens with that much probability together")
    seed: int = setting(0, "of the choice")
    tensor: int = setting(1, "devices that share the model")


def main(options: Options) -> None:
    multihost.order_cpu_collectives()
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    if options.num_tokens < 1:
        raise ValueError(f"num_tokens={options.num_tokens} must be at least 1")
    step = None if options.step < 0 else options.step
    trained = load_run(options.run_dir, step, local_mesh(options.tensor))
    text = continue_text(trained, options.prompt, options.num_tokens, sampling, options.seed)
    print(options.prompt + text)


if __name__ == "__main__":
    run_command(main, Options, needs_config=False)
