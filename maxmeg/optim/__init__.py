"""Optimizer and schedules."""
