"""Models: one residual stack driven by a pattern, and what stands before and after it."""
