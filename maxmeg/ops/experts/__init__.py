"""Mixture of experts: routing, dispatch and grouped matrix products."""
