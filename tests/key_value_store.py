"""A key-value store in memory, with the interface of the client of JAX's coordinator."""

import threading

import jax


class KeyValueStore:
    """Threads share it as processes share the coordinator's. While `silent` is set, calls fail as
    if the coordinator did not answer."""

    def __init__(self):
        self.values, self.changed, self.silent = {}, threading.Condition(), threading.Event()

    def _check(self):
        if self.silent.is_set():
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    def key_value_set(self, key, value, allow_overwrite=False):
        self._check()
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS {key}")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, prefix):
        self._check()
        return [(key, text) for key, text in [*self.values.items()] if key.startswith(prefix)]

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED {key}")
            return self.values[key]

    def key_value_delete(self, prefix):
        with self.changed:
            for key in [key for key in self.values if key.startswith(f"{prefix}/")]:
                del self.values[key]

    def wait_at_barrier(self, name, milliseconds):
        pass
