"""maxmeg: large-model training in JAX for NVIDIA GPUs."""

__version__ = "0.1.0"
