"""RETRO on text: python -m maxmeg.train --config=configs/retro.py --data.paths=PREFIX

PREFIX: a corpus of .bin/.idx files whose neighbours `maxmeg neighbours --config=retro
--data.paths=PREFIX --encoder=RUN_DIR` has found; RUN_DIR is a model that embeds text, such as one
of --config=bert. A small byte-level model; 3 minutes on two CPU cores. Where documents repeat
passages of others, the loss with neighbours is lower than `maxmeg evaluate runs/retro
--neighbours=none` and shuffled. --config=retro:2,4,6: chunked cross attention in these layers.
"""

from maxmeg.config.data import Objective
from maxmeg.config.model import DType, Position
from maxmeg.config.retro import retro_layers
from maxmeg.config.schema import Config
from maxmeg.configs.bert import small_run


def get_config(chunked: str = "2,4") -> Config:
    config, numbers = Config(run_dir="runs/retro"), tuple(map(int, chunked.split(",")))
    model, data = config.model, config.data
    num_layers = max(4, *numbers)
    model.layers = retro_layers(numbers, num_layers)
    model.num_layers = num_layers + 4  # two of the encoder, its norm, and a layer in two parts
    model.dtype, model.hidden_size = DType.float32, 64
    model.position = Position.learned  # so that queries find a place in the continuation
    data.objective, data.sequence_length = Objective.retro, 64
    data.chunk_length, data.num_neighbours, data.neighbour_length = 16, 2, 32
    return small_run(config, 3e-3, 3e-4)
