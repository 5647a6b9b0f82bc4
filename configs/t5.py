"""T5 on sentences: python -m maxmeg.train --config=configs/t5.py (in short: --config=t5)

Predicts the spans that the source lacks. Alone: a small model of the bytes of docstrings of
Python's standard library; 3 minutes on two CPU cores, validation loss about 2.5 nats per target.
Other corpora: a PREFIX written by `maxmeg preprocess --split_sentences`, and its --data.tokenizer,
which has padding, a first token and sentinels. Pairs of texts: --data.objective=seq2seq
--data.paths=SOURCE,TARGET, written by `maxmeg preprocess --aligned`. --config=t5:t5-base: an
architecture of that name (`maxmeg models t5`), for GPUs.
"""

from maxmeg.config.architectures import use_architecture
from maxmeg.config.data import Builtin
from maxmeg.config.model import DType
from maxmeg.config.schema import Config
from maxmeg.configs import gpt
from maxmeg.configs.bert import small_run


def get_config(size: str = "") -> Config:
    if size:
        return gpt.get_config(size)
    config = use_architecture(Config(run_dir="runs/t5"), "t5-v1.1-small")
    model, data = config.model, config.data
    model.dtype, model.num_layers, model.hidden_size = DType.float32, 5, 128
    model.layers = "2(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
    model.attention.num_heads, model.attention.num_kv_heads = 4, 0
    model.attention.head_dim, model.mlp.ffn_size = 32, 256
    model.dropout_hidden = model.dropout_embedding = model.attention.dropout = 0.0
    model.vocab_size = model.max_position = 0  # as the tokenizer and the rows need
    data.source_length, data.sequence_length, data.builtin = 128, 64, Builtin.sentences
    data.tokenizer = "bytes?extra_ids=100&pad=<pad>&bos=<s>"
    return small_run(config, 1e-3, 1e-4)
