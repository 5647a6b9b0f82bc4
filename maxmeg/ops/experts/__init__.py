"""Mixture of experts: routing, dispatch, exchange and grouped matrix products."""
