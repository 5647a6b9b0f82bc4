"""These tests compile for GPUs; .ci/run installs `.[plan]` and runs the folder."""

import importlib.util

# Without the plugin's wheels nothing here can run.
collect_ignore_glob = [] if importlib.util.find_spec("jax_cuda13_plugin") else ["test_*.py"]
