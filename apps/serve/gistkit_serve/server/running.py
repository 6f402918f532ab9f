"""run: the application on a socket, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from gistkit.common.signals import Interrupted
from gistkit_serve.server.errors import Refused

# Seconds that open requests have to end after Ctrl-C, that a connection without a request stays open, and that the
# headers of a request may take; and that a client may leave its answer unread.
GRACE, IDLE, HEADERS, UNREAD = 5, 30, 10, 30


class _Connection(H11Protocol):
    """A connection that gives its place up to a newer one while its client has sent no whole request."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn would count those that wait, and refuse in plain text.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self.since = self.loop.time()

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room for itself, if there is none."""
        super().connection_made(transport)
        self._expect()
        others = [one for one in self.connections if one is not self and not one.transport.is_closing()]
        if self._most is not None and len(others) >= self._most:
            waiting = [one for one in others if isinstance(one, _Connection) and one.waits]
            if waiting:
                min(waiting, key=lambda one: one.since).transport.abort()
            else:
                self.app = _full

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._expect(False)
        self._read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, whose headers must not take long."""
        super().data_received(data)
        self.since = self.loop.time()
        self._expect(self.cycle is None or self.cycle.response_complete)

    def pause_writing(self) -> None:
        """The client reads slower than its answer comes, which must not last."""
        super().pause_writing()
        self._read()
        self._unread = self.loop.call_later(UNREAD, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._read()

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _expect(self, headers: bool = True) -> None:
        if headers and self._late is None:
            self._late = self.loop.call_later(HEADERS, self.transport.abort)
        elif not headers and self._late is not None:
            self._late.cancel()
            self._late = None


async def _full(scope: Any, receive: Any, send: Any) -> None:
    """What a connection beyond the limit is answered, where all others are being served."""
    error = Refused(503, "too many connections", code="connections_full")
    await error.response(connection="close")(scope, receive, send)


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


def run(app: FastAPI, listener: socket.socket, connections: int) -> None:
    """Serves until SIGINT, also where whoever started the process left it ignored, SIGTERM or SIGHUP.

    Args:
        app: of `application`.
        listener: bound to the address; it is closed at the end.
        connections: open at a time; one more takes the place of that which has sent nothing for longest.

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
        limit_concurrency=connections,
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
