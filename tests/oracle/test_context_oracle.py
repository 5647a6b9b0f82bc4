"""The tokens of each rank along context, as Megatron-LM slices a batch."""

import warnings

import numpy as np
import pytest
import torch

from maxmeg.parallel.sequence import SequenceShard, context_order

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its imports say of optional packages
    from megatron.core import utils


@pytest.mark.parametrize("context", [2, 3, 4, 8])
def test_each_rank_has_the_tokens_of_megatrons(context, monkeypatch):
    monkeypatch.setattr(utils, "get_pg_size", lambda group: context)
    length, parts = 48, []
    for rank in range(context):
        monkeypatch.setattr(utils, "get_pg_rank", lambda group, rank=rank: rank)
        batch = {"tokens": torch.arange(2 * length).reshape(2, length)}
        wanted = utils.get_batch_on_this_cp_rank(batch, cp_group=object())["tokens"].numpy()
        shard = SequenceShard(length, context, rank)
        np.testing.assert_array_equal(shard.places(np.arange(shard.length)), wanted[0])
        np.testing.assert_array_equal(wanted[1], wanted[0] + length)
        parts.append(wanted[0])
    np.testing.assert_array_equal(context_order(length, context), np.concatenate(parts))
