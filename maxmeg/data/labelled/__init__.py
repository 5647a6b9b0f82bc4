"""Labelled data: texts or pairs of texts, words, and questions with choices."""
