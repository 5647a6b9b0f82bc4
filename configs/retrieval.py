"""Train a biencoder: python -m maxmeg.train --config=configs/retrieval.py (--config=retrieval)

A sentence of a block is the query, and the block is to be found (inverse cloze task). Alone: a
small model of the bytes of docstrings of Python's standard library; half an hour on two CPU cores,
after which few blocks are found: begin with a trained BERT, --config=retrieval:FOLDER (numbers:
docs/retrieval.md). Other corpora: a PREFIX written by `maxmeg preprocess --split_sentences`.
--data.objective=retrieve reads queries and their texts from JSON lines. retrieval:FOLDER,separate,
or retrieval:,separate, has an encoder of queries and another of texts.
"""

from maxmeg.config.data import Objective
from maxmeg.config.head import OUTPUT_FIELDS, Biencoder, two_encoders
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import get, with_fields
from maxmeg.configs import bert
from maxmeg.hf.settings import next_run, settings_of


def get_config(argument: str = "") -> Config:
    folder, _, kind = argument.partition(",")
    biencoder, config = Biencoder[kind or "shared"], bert.get_config()
    if folder:
        source = settings_of(folder)
        config.model, config.data.tokenizer = source.model, source.data.tokenizer
        config.checkpoint.init_from, config.optim.lr, config.optim.min_lr = folder, 2e-5, 0.0
    plain = {name: get(ModelConfig(), name) for name in OUTPUT_FIELDS}
    head = {"tied": True, "bert.pooler": False, "head.biencoder": biencoder}
    config.model, data = with_fields(config.model, {**plain, **head}), config.data
    data.objective, data.sentence_pairs, data.query_length = Objective.ict, False, 64
    data.sequence_length = 320  # the query, and a block of 256
    if biencoder is Biencoder.separate:
        config.model.layers = two_encoders(config.model.num_layers)
        config.model.num_layers *= 2
        data.separate_queries, data.sequence_length = True, 256
    config.train.global_batch_size, config.train.score_scaling = 32, True
    config.run_dir = next_run(folder, "biencoder") if folder else "runs/biencoder"
    return config
