"""Train with rows of 32,768 tokens on 8 devices along context, from a shorter model, with YaRN.

Command:  python examples/long_context.py
Time:     8 minutes on two CPU cores, which stand for the 8 devices; another length as argument
Result:   needles found in 32,768 tokens: the last one by the model of 512 tokens, nearly all after
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import maxmeg
from maxmeg.data.source import Datasets
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.evals.needles import Needles, needles_found

VOCABULARY, SHORT, DEPTHS = 96, 512, (0.0, 0.25, 0.5, 0.75, 1.0)
LONG = int(sys.argv[1]) if len(sys.argv) > 1 else 32_768


def train(length: int, steps: int, rows: int, lr: float, **settings):
    """Train runs/needles-LENGTH on rows with needles."""
    model = {
        "layers": "*(local,mlp attention,mlp)",
        "num_layers": 2,
        "hidden_size": 64,
        "init_std": 0.125,
        "attention.num_heads": 2,
        "attention.window": 2,  # local attention tells a word which key is before it
    }
    run = {
        "run_dir": f"runs/needles-{length}",
        "data.tokenizer": f"null:{VOCABULARY}",
        "data.sequence_length": length,
        "train.global_batch_size": rows,
        "train.num_steps": steps,
        "train.eval_every": 0,
        "optim.lr": lr,
        "log.sample_prompt": "",
        "watchdog.step": 0.0,  # a long step takes longer than a minute on a slow machine
    }
    config = maxmeg.config("gpt", **run, **{f"model.{n}": v for n, v in model.items()}, **settings)
    tokenizer = load_tokenizer(config.data.tokenizer)
    maxmeg.train(config, Datasets(tokenizer, Needles(VOCABULARY, length)))


train(32, 400, 128, 4e-3)
train(SHORT, 100, 16, 1e-3, **{"checkpoint.init_from": "runs/needles-32"})
yarn = {"scaling": "yarn", "factor": LONG / SHORT, "original_length": SHORT, "high": 32.0}
longer = {f"model.rotary.{name}": value for name, value in yarn.items()}
longer |= {"parallel.context": 8, "checkpoint.init_from": f"runs/needles-{SHORT}"}
train(LONG, 8, 1, 5e-4, **longer)

print("depth                ", " ".join(f"{depth:6.0%}" for depth in DEPTHS))
for length in (SHORT, LONG):
    found = needles_found(maxmeg.load(f"runs/needles-{length}"), LONG, DEPTHS)
    print(f"trained with {length:>6,}: ", " ".join(f"{share:6.0%}" for share in found))
