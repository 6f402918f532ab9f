"""run: the application on a socket, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI

from gistkit.common.signals import Interrupted

# Seconds that open requests have to end after Ctrl-C, and that a connection without a request stays open.
GRACE, IDLE = 5, 30


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
        connections: open at a time, more are refused.

    Raises:
        Interrupted: or KeyboardInterrupt, after the signal.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
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
