"""Models: a residual stack described by a pattern, with its embedding and output."""
