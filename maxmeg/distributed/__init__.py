"""Algorithms over several devices: attention over context shards, exchange of experts' tokens."""
