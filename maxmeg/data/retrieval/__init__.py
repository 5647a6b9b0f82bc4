"""Samples of biencoders: queries with the texts that answer them."""
