"""Corpora: .bin/.idx files, tokenizers, preprocessing, samples and the loader.

Nothing here imports JAX; `loader` imports Grain when a loader is made.
"""
