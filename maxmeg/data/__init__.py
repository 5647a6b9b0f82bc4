"""Training data: .bin/.idx files, tokenizers, preprocessing, samples, and the loader that makes
batches.

No module of this package imports JAX; `loader` imports Grain when a loader is constructed.
"""
