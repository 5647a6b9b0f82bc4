"""Hugging Face: model families, their files, and conversion both ways."""
