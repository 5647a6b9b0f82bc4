"""Attention of new tokens over a key/value cache: the call and its backends."""
