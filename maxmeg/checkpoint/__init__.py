"""Asynchronous, atomic checkpoints whose every bit is verified when they are loaded."""
