"""RETRO on text: maxmeg train --config=retro --data.paths=PREFIX

PREFIX: a corpus of .bin/.idx files whose neighbours `maxmeg neighbours --config=retro
--data.paths=PREFIX --encoder=RUN_DIR` has found; RUN_DIR is a model that embeds text, such as one
of --config=bert. A small byte-level model for a CPU. --config=retro:2,4,6: chunked cross attention
in these layers. Compare `maxmeg evaluate runs/retro --neighbours=none` and shuffled.
"""

from maxmeg.config.data import Objective
from maxmeg.config.model import DType, Position
from maxmeg.config.retro import retro_layers
from maxmeg.config.schema import Config, LrDecay


def get_config(chunked: str = "2,4") -> Config:
    config, numbers = Config(run_dir="runs/retro"), tuple(map(int, chunked.split(",")))
    model, data, train, optim = config.model, config.data, config.train, config.optim
    num_layers = max(4, *numbers)
    model.layers = retro_layers(numbers, num_layers)
    model.num_layers = num_layers + 4  # two of the encoder, its norm, and a layer in two parts
    model.dtype, model.hidden_size = DType.float32, 64
    model.position = Position.learned  # so that queries find a place in the continuation
    data.objective, data.split = Objective.retro, "92,4,4"
    data.chunk_length, data.num_neighbours, data.neighbour_length = 16, 2, 32
    data.sequence_length = 64
    train.global_batch_size, train.num_steps = 16, 800
    train.eval_every = config.checkpoint.save_every = 200
    train.eval_steps, config.log.every = 32, 40
    optim.lr, optim.min_lr, optim.warmup_fraction = 3e-3, 3e-4, 0.05
    optim.decay = LrDecay.cosine
    return config
