"""BERT on sentences: python -m maxmeg.train --config=configs/bert.py (in short: --config=bert)

Predicts masked tokens, and whether two segments are swapped. Alone: a small model of the bytes of
docstrings of Python's standard library; 3 to 4 minutes on two CPU cores, validation loss about 2.9
nats per masked byte (3.2 by frequencies alone: BERT learns slowly). Other corpora: a PREFIX written
by `maxmeg preprocess --split_sentences`, and its --data.tokenizer. --config=bert:bert-base: an
architecture of that name (`maxmeg models bert`), for GPUs.
"""

from maxmeg.config.architectures import use_architecture
from maxmeg.config.data import Builtin
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LrDecay
from maxmeg.configs import gpt


def get_config(size: str = "") -> Config:
    if size:
        return gpt.get_config(size)
    config = use_architecture(Config(run_dir="runs/bert"), "bert-base")
    model, data = config.model, config.data
    model.dtype, model.num_layers, model.hidden_size = DType.float32, 4, 128
    model.attention.num_heads, model.attention.num_kv_heads, model.mlp.ffn_size = 4, 0, 512
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
