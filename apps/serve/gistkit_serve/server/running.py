"""run: the application on a socket, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from gistkit.common.signals import Interrupted

# Seconds that open requests have to end after Ctrl-C, that a connection without a request stays open, and that the
# headers of a request may take.
GRACE, IDLE, HEADERS = 5, 30, 10


class _Connection(H11Protocol):
    """A connection that ends where the headers of a request, the first one too, take too long."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expects headers."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expects nothing."""
        self._expect(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, which may be the beginning of its headers."""
        super().data_received(data)
        self._expect(self.cycle is None or self.cycle.response_complete)

    def _expect(self, headers: bool = True) -> None:
        if headers and self._late is None:
            self._late = self.loop.call_later(HEADERS, self.transport.abort)
        elif not headers and self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """A server whose open answers end with an error, not in the middle of a line, where their time is over."""

    ended_by = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ended_by = sig
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: FastAPI = self.config.app  # type: ignore[assignment]
        timer = asyncio.get_running_loop().call_later(GRACE, app.state.worker.stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serves until SIGINT, also where whoever started the process left it ignored, SIGTERM or SIGHUP.

    Args:
        app: of `application`.
        listener: bound to the address; it is closed at the end.

    Raises:
        Interrupted: or KeyboardInterrupt, after the signal.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        http=_Connection,
        ws="none",
        lifespan="on",
        timeout_keep_alive=IDLE,
        # For what is stuck elsewhere.
        timeout_graceful_shutdown=2 * GRACE,
    )
    server = _Server(config)
    hangup = signal.getsignal(signal.SIGHUP)
    # uvicorn hears SIGINT and SIGTERM alone. nohup has SIGHUP ignored, and a thread hears nothing.
    if hangup not in (signal.SIG_IGN, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, server.handle_exit)
        try:
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGHUP, hangup)
    else:
        server.run(sockets=[listener])
    # uvicorn raises the signal once more when it has ended, which does nothing where it is ignored.
    if server.ended_by:
        raise Interrupted(server.ended_by)
