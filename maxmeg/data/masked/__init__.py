"""Samples of masked models: BERT and T5."""
