"""The processes of a run: how they start, find and bind themselves, and agree."""
