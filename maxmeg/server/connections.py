"""Connections of a server: many at once, and none that is held without a request."""

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

OPEN_SECONDS = 20.0  # for a request's headers to arrive
MOST_FILES = 65536


class Connection(H11Protocol):
    """uvicorn's connection, which is closed when a request does not arrive in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        self._look(None)

    def _look(self, idle_since: object) -> None:
        """Close the connection if it has had no request since the last look."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        state = (self.cycle,) if is_idle else None
        if state is not None and state == idle_since:
            return self.transport.abort()
        self.loop.call_later(OPEN_SECONDS, self._look, state)


def allow_many() -> None:
    """Raise this process's limit of open files, each connection being one, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
