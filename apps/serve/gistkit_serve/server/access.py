"""Access: a line in the log and a number in the metrics for every request, by an id that the answer has too."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from gistkit_serve.server.errors import Refused
from gistkit_serve.server.metrics import Metrics

log, errors = logging.getLogger("gistkit_serve.access"), logging.getLogger("gistkit_serve")
HEADER = b"x-request-id"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ID = re.compile(rb"[\w.:-]{1,64}", re.ASCII)


class Access:
    """An ASGI application before another one."""

    def __init__(self, app: Any, *, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # A proxy may have given it one.
        given = dict(scope["headers"]).get(HEADER, b"")
        name = given if _ID.fullmatch(given) else secrets.token_hex(8).encode()
        begun, status = time.perf_counter(), 0

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, name)]}
            await send(message)

        try:
            await self.app(scope, receive, answered)
        except Exception as error:
            if status:
                raise
            errors.error("a request failed", exc_info=error)
            await Refused(500, f"the server failed: {type(error).__name__}", code="failed").response()(
                scope, receive, answered
            )
        finally:
            seconds = time.perf_counter() - begun
            route = getattr(scope.get("route"), "path", "other")
            # Anybody may make up methods, and addresses in headers.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.seconds.labels(method, route, status).observe(seconds)
            # As it came, where no character is one that a terminal obeys.
            path = scope.get("raw_path", b"")[:200].decode("latin-1").encode("ascii", "backslashreplace").decode()
            log.info("%s %s %s %s %d %.3f s", name.decode(), _address(scope), method, path, status, seconds)


def _address(scope: Scope) -> str:
    """The address of the client; - for what is none."""
    # What follows % may be any text.
    given = (scope.get("client") or ("",))[0].partition("%")[0]
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        return "-"
