"""Weights that compute, made of those that are stored: cast, gathered, fused, in 8-bit codes."""
