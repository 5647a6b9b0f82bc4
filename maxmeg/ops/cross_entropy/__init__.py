"""Cross entropy over a vocabulary: the call, its options and its backends."""
