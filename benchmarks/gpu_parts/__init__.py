"""The parts of benchmarks/gpu.py: each module yields (item, function that measures it)."""
