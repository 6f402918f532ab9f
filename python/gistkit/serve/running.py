"""run: the application on a socket, until Ctrl-C."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

# Seconds that open requests have to end after Ctrl-C, and that a connection without a request stays open.
GRACE, IDLE = 5, 30


class _Server(uvicorn.Server):
    """A server whose open answers end with an error, not in the middle of a line, where their time is over."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: FastAPI = self.config.app  # type: ignore[assignment]
        timer = asyncio.get_running_loop().call_later(GRACE, app.state.worker.stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def run(app: FastAPI, listener: socket.socket, connections: int) -> None:
    """Serves until SIGINT or SIGTERM, which then acts as it would elsewhere.

    Args:
        app: of `application`.
        listener: bound to the address; it is closed at the end.
        connections: open at a time, more are refused.
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
    _Server(config).run(sockets=[listener])
