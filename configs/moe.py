"""A mixture of experts on text: python -m maxmeg.train --config=configs/moe.py

The layers of configs/gpt.py with eight experts in place of each MLP, two for every token, on the
source code of Python's standard library; 5 minutes on two CPU cores, validation loss about 1.77
nats per byte. --parallel.expert=8 gives each of eight devices one expert of every layer.

Written as an ml_collections.ConfigDict.
"""

from ml_collections import ConfigDict

from maxmeg.config import files
from maxmeg.configs import gpt


def get_config() -> ConfigDict:
    config = ConfigDict(files.to_dict(gpt.get_config()))
    config.lock()  # a misspelt name is an error
    moe = {"num_experts": 8, "top_k": 2, "ffn_size": 128}
    moe |= {"bias_balancing": True, "sequence_aux_loss": 1e-4}
    config.update(run_dir="runs/moe", model={"layers": "*(attention,moe)", "moe": moe})
    return config
