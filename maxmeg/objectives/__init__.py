"""What models are trained for: one table of objectives, each a loss of a model's outputs."""
