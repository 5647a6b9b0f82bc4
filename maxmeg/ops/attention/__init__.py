"""Attention over whole sequences: the call, its options and its backends."""
