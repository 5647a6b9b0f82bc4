"""Training objectives: losses of a model's outputs, in one table."""
