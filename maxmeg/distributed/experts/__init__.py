"""Tokens on their way to experts on other devices, and back."""
