"""Memory, FLOPs and communication of a training step, by formulas."""
