"""Guard: what every request passes before a route sees it: its host, and the size and time of its body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from gistkit_serve.server.errors import Refused

# A name or an address in brackets, and perhaps a port.
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d{0,5})?")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """An ASGI application before another one, which it hands whole bodies.

    Args:
        app: the other one.
        most: bytes of a body.
        seconds: in which it has come.
        hosts: names that a request may call this server by, so that no page in a browser reaches it by a name that
            leads to this address; None: any.
    """

    def __init__(self, app: Any, *, most: int, seconds: float, hosts: frozenset[str] | None) -> None:
        self.app, self.most, self.seconds, self.hosts = app, most, seconds, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length[:20]) > self.most:
                raise self._too_long()
            body = await asyncio.wait_for(self._body(receive), self.seconds)
        except TimeoutError:
            await _answer(Refused(408, f"the body took longer than {self.seconds:g} s"), scope, receive, send)
            return
        except Refused as error:
            await _answer(error, scope, receive, send)
            return
        if body is None:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replayed, send)

    def _check_host(self, host: str) -> None:
        parts = _HOST.fullmatch(host)
        name = host if parts is None else parts[1]
        if self.hosts is not None and (parts is None or name.lower() not in self.hosts):
            raise Refused(403, f"Host: expected one of {', '.join(sorted(self.hosts))}, got {name[:80]!r}")

    async def _body(self, receive: Receive) -> bytes | None:
        """The body; None where the client has gone."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most:
                raise self._too_long()
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_long(self) -> Refused:
        return Refused(413, f"body: expected at most {self.most:,} bytes, got more", code="body_too_long")


async def _answer(error: Refused, scope: Message, receive: Receive, send: Send) -> None:
    # What is left of the body is not read.
    await JSONResponse(error.body(), error.status, {"connection": "close"})(scope, receive, send)
