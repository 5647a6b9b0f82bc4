"""BERT on sentences: maxmeg train --config=bert --data.paths=PREFIX --data.tokenizer=wordpiece:FILE

PREFIX: a corpus written by `maxmeg preprocess --split_sentences`. Predicts masked tokens and
whether the two segments of a sample are swapped; a small model for a CPU. --config=bert:bert-base,
or --config=bert-base: an architecture of that name (`maxmeg models bert`), for GPUs.
"""

from maxmeg.config.data import Builtin
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LrDecay
from maxmeg.configs import gpt
from maxmeg.models.registry import use_architecture


def get_config(size: str = "") -> Config:
    if size:
        return gpt.get_config(size)
    config = use_architecture(Config(run_dir="runs/bert"), "bert-base")
    model, data = config.model, config.data
    model.dtype, model.num_layers, model.hidden_size = DType.float32, 4, 128
    model.attention.num_heads, model.attention.num_kv_heads = 4, 0
    model.mlp.ffn_size = 512
    model.dropout_hidden = model.dropout_embedding = model.attention.dropout = 0.0
    model.vocab_size = model.max_position = 0  # as the tokenizer and the rows need
    data.sequence_length, data.builtin = 128, Builtin.sentences
    data.tokenizer = "bytes?pad=<pad>&cls=<cls>&sep=<sep>&mask=<mask>"
    return small_run(config, 1e-3, 1e-4)


def small_run(config: Config, lr: float, min_lr: float) -> Config:
    """Set a small corpus's split, and steps and rates of a run on a CPU."""
    train, optim = config.train, config.optim
    config.data.split = "92,4,4"
    train.global_batch_size, train.num_steps = 16, 800
    train.eval_every = config.checkpoint.save_every = 200
    train.eval_steps, config.log.every = 32, 40
    optim.lr, optim.min_lr, optim.warmup_fraction = lr, min_lr, 0.05
    optim.decay = LrDecay.cosine
    return config
