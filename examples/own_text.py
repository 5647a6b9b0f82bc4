"""Train a small language model on your own text, and let it write.

Command:  python examples/own_text.py [FILE ...]     (default: the help texts of Python's builtins)
Time:     30 s on two CPU cores
Result:   a validation loss of about 2.3 nats per byte; words like those of the texts;
          runs/own_text, which `maxmeg generate --run_dir=runs/own_text` reads
"""

import builtins
import pathlib
import sys

import maxmeg

documents = [pathlib.Path(name).read_text() for name in sys.argv[1:]]
documents = documents or [str(value.__doc__) for value in vars(builtins).values()]

config = maxmeg.config(
    "gpt",
    **{
        "run_dir": "runs/own_text",
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.max_position": 256,
        "data.sequence_length": 64,
        "train.num_steps": 600,
        "train.eval_every": 300,
        "log.sample_prompt": "",
    },
)
run = maxmeg.train(config, documents)
print(run)
print("Return " + run.generate("Return ", max_new_tokens=100, temperature=0.5))
