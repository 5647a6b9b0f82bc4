"""Layers in the local view: each sees its shard of the parameters and of the batch.

Names of tensors end in their shape, one letter per dimension:
B batch, L query length, M key length, D model, F feed-forward, H query heads, G key/value heads,
J query heads per key/value head, K head dim (in routing: experts per token), V vocabulary or value
head dim, T tokens (B x L), E experts, C capacity, R rows dispatched to experts, I and O input and
output of a projection, X channels.
"""
