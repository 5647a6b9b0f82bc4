"""Layers in the local view: each sees its shard of the parameters and of the batch.

Names of tensors end in their shape, a letter a dimension:
B batch, L query length, M key length, D model, F feed-forward, H query heads, G key/value heads,
J query heads a key/value head, K head dim, V vocabulary, T tokens (B x L), E experts, C capacity,
N state, P patch, S stage, X channels.
"""
