"""Metrics of a run: progress, writers, plots, profiles."""
