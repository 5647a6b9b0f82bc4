"""A dataset whose samples say their numbers, for tests of blends."""

import numpy as np


class Numbers:
    """A dataset whose sample n is the text (name, n)."""

    vocab_size, sequence_length, num_tokens, samples_per_epoch = 100, 2, 40, 20

    def __init__(self, name: int) -> None:
        self.name = name

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        names = np.full(len(indices), self.name)
        return {"tokens": np.stack([names, indices], 1), "mask": names > 0}
