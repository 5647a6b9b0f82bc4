"""Targets of further tokens are those of megatron-core, also of packed rows."""

import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxmeg.models.mtp import SHIFTED, shifted

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its imports say of optional packages
    from megatron.core.transformer.multi_token_prediction import roll_tensor

LENGTH, DEPTHS = 12, 3


@pytest.mark.parametrize("ends", [[LENGTH], [1, 6, 8, LENGTH]])
def test_what_comes_later_is_what_is_rolled(ends: list[int]):
    """Megatron-LM rolls once more for each depth; packed rows it rolls document by document."""
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(1, 50, (1, LENGTH)) for name in SHIFTED}
    batch["loss_mask"] = (rng.random((1, LENGTH)) < 0.6).astype(np.float32)
    segments = 1 + np.searchsorted(ends, np.arange(LENGTH), side="right")
    packed = {"segment_ids": jnp.asarray(segments)[None]} if len(ends) > 1 else {}
    params = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, *ends])) if packed else None
    ours = {name: jnp.asarray(array) for name, array in batch.items()} | packed
    theirs = {name: torch.tensor(array) for name, array in batch.items()}
    for depth in range(1, DEPTHS + 1):
        later = shifted(ours, depth)
        for name in SHIFTED:
            theirs[name], total = roll_tensor(theirs[name], packed_seq_params=params)
            np.testing.assert_array_equal(later[name], theirs[name].numpy(), err_msg=name)
            assert float(later[name].sum()) == float(total)
