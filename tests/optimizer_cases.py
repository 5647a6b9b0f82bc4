"""Gradients for tests of optimizers."""

import numpy as np


def well_conditioned(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices with singular values of ratio 1.15: close ones' vectors would amplify rounding."""
    if len(shape) < 3:
        return rng.normal(size=shape)
    rows, columns = shape[-2:]
    rank = min(rows, columns)
    left, right = (np.linalg.qr(rng.normal(size=(*shape[:-2], n, rank)))[0] for n in shape[-2:])
    return left * (rank * 1.15 ** -np.arange(rank)) @ right.swapaxes(-1, -2)
