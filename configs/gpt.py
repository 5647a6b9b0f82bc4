"""GPT on text: python -m maxmeg.train --config=configs/gpt.py (in short: maxmeg train --config=gpt)

Alone: a small byte-level model of Python's own standard library; about 2 minutes on two CPU
cores, losses of validation and test about 1.7 nats per byte.
With the name of an architecture (`maxmeg models` lists them), --config=configs/gpt.py:qwen3-8b, in
short qwen3-8b: that architecture from scratch with usual settings, for GPUs; give it
--data.paths=PREFIX.
"""

from maxmeg.config.architectures import use_architecture
from maxmeg.config.data import Builtin
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LrDecay


def get_config(size: str = "") -> Config:
    config = Config()
    config.optim.decay = LrDecay.cosine
    if size:
        config = use_architecture(config, size)
        config.run_dir = f"runs/{size}"
        config.train.global_batch_size = 512
        config.train.micro_batch_size = 1
        config.train.num_steps = 100_000
        config.train.eval_every = config.checkpoint.save_every = 1000
        config.optim.lr, config.optim.min_lr, config.optim.warmup_fraction = 3e-4, 3e-5, 0.02
        config.optim.weight_decay = 0.1
        return config
    config.model.dtype = DType.float32
    config.model.hidden_size, config.model.num_layers = 128, 4
    config.data.sequence_length, config.data.builtin = 128, Builtin.source
    config.data.split = "92,4,4"  # 21 files each; of 98,1,1 there are 5, whose losses differ
    config.train.global_batch_size = 8
    config.train.num_steps = 800
    config.train.eval_every = config.checkpoint.save_every = 200
    config.train.eval_steps = 32
    config.log.every = 40
    config.optim.lr, config.optim.min_lr, config.optim.warmup_fraction = 3e-3, 3e-4, 0.05
    config.log.sample_prompt = "auto"
    return config
