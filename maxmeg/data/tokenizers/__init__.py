"""Tokenizers: one interface, every kind of vocabulary, and training of new ones."""
