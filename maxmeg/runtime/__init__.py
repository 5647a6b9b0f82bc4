"""Around the training loop: environment, hooks, metrics, signals, faults."""
