"""What a run reports: progress, metrics, writers, profiles."""
