"""Tokenized corpora: .bin/.idx files on disk and in object storage, and their checksums."""
