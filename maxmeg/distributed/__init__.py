"""Algorithms over several devices: attention and scans over context, exchange of experts'
tokens, whole matrices of sharded parameters."""
