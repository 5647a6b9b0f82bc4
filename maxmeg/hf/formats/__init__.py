"""File formats and quantizations that checkpoints come in."""
