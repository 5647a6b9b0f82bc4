"""Indices of embeddings: writing them, and searching them."""
