"""The mesh, which logical axis lies on which mesh axes, and the collectives the model calls."""
