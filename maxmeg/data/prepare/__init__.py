"""From text to a tokenized corpus: reading, encoding, shuffling, merging."""
