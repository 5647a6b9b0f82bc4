"""What surrounds the training loop: hooks, writers, progress, profiles, signals, guards."""
