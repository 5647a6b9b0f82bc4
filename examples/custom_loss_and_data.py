"""Train with a loss and a dataset of your own; nothing in maxmeg has to change.

Command:  python examples/custom_loss_and_data.py
Time:     20 s on two CPU cores
Result:   the model continues 3 6 9 12 ... ; runs/counting, which can be resumed like any run
"""

import jax
import jax.numpy as jnp
import numpy as np

import maxmeg
from maxmeg.data.source import Datasets
from maxmeg.data.tokenizers.load import load_tokenizer


class Counting:
    """Rows of numbers with a constant difference. Sample n is the same in every process."""

    vocab_size, sequence_length, samples_per_epoch, num_tokens = 100, 16, 10_000, 160_000

    def batch(self, indices):
        rows = [np.random.default_rng(n).integers(1, 5, 2) for n in indices]
        steps_BL = np.array([start + by * np.arange(17) for start, by in rows], np.int32)
        places_BL = np.broadcast_to(np.arange(16, dtype=np.int32), (len(rows), 16))
        return {
            "tokens": steps_BL[:, :-1],
            "targets": steps_BL[:, 1:],
            "positions": places_BL,
            "loss_mask": (places_BL > 0).astype(np.float32),  # the difference is seen from then on
        }


def focal(logits_BLV, batch):
    """Focal loss (Lin et al. 2017): targets that are predicted well count less."""
    log_p_BLV = jax.nn.log_softmax(logits_BLV)
    log_p_BL = jnp.take_along_axis(log_p_BLV, batch.targets[..., None], axis=-1)[..., 0]
    return -((1 - jnp.exp(log_p_BL)) ** 2) * log_p_BL


config = maxmeg.config(
    "gpt",
    **{
        "run_dir": "runs/counting",
        "data.tokenizer": "null:100",
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "data.sequence_length": 16,
        "train.num_steps": 150,
        "train.eval_every": 0,
        "log.sample_prompt": "",
    },
)
run = maxmeg.train(config, Datasets(load_tokenizer("null:100"), Counting()), loss=focal)
print("3 6 9 12", run.generate("3 6 9 12", max_new_tokens=6, temperature=0))
