"""Attention over sequences that are sharded over context: gathers, rings, all-to-alls."""
