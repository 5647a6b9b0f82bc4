"""Typed settings of a run. Imports no JAX."""
