"""JAX's coordination service in a process of its own, started by process 0 of a run.

JAX would run it inside process 0: when that process is killed, JAX aborts all the others with a
C++ stack trace before they can say why. Here process 0 is a process like the others, and the
service outlives it until they have noticed.

The child, `python coordinator.py ADDRESS NUM_PROCESSES HEARTBEAT LINGER`, imports nothing of
maxmeg. It prints "ready" or an error. When its stdin closes it ends, at once after the line "done",
otherwise (process 0 is gone) after LINGER seconds.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

READY, DONE = "ready", "done"


class Coordinator:
    """The child process that runs the coordination service.

    Raises:
      ValueError: the port is in use, or the service cannot be started.
    """

    def __init__(self, address: str, num_processes: int, heartbeat: int, linger: float):
        arguments = [address, str(num_processes), str(heartbeat), str(linger)]
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(pathlib.Path(__file__)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._child.stdout is not None
        answer = self._child.stdout.readline().strip()
        if answer != READY:
            self._child.communicate()
            reason = answer or f"its process ended with code {self._child.returncode}"
            raise ValueError(
                f"the coordinator cannot listen on {address}: {reason}. Choose a free port, the "
                "same in every process: set JAX_COORDINATOR_PORT under Slurm or Open MPI, "
                "otherwise MAXMEG_COORDINATOR or JAX_COORDINATOR_ADDRESS to HOST:PORT"
            )

    def close(self) -> None:
        """End the service. Call this after every process has disconnected."""
        self._child.communicate(DONE)


def serve(address: str, num_processes: int, heartbeat: int, linger: float) -> None:
    """Run the service until stdin closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for process 0, which may save first
        signal.signal(number, signal.SIG_IGN)
    try:
        _check_free(int(address.rpartition(":")[2]))
        service = _jax.get_distributed_runtime_service(
            address, num_processes, heartbeat_timeout=heartbeat
        )
    except Exception as error:
        print(" ".join(str(error).split()), flush=True)
        return
    print(READY, flush=True)
    if sys.stdin.readline() == DONE:
        service.shutdown()
        return
    time.sleep(linger)
    os._exit(0)  # the service would wait for processes that are gone


def _check_free(port: int) -> None:
    """Raise OSError if another program listens on the port; the service would share it."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"port {port} of {socket.gethostname()}: {reason}") from error


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
