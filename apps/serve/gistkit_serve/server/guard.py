"""Guard: what every request passes before a route: its host, key and client, and the size and time of its body."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from gistkit_serve.server.errors import Refused

# A name or an address in brackets, and perhaps a port.
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d{0,5})?")
# What needs no key, since it says nothing of memories, and no place: a server that is full is alive.
_OPEN = {"/health", "/docs", "/openapi.json"}
_BODY = 30.0
"""Seconds in which a body has come, at most."""


class Guard:
    """An ASGI application before another one, which it hands whole bodies.

    Args:
        app: the other one.
        most: bytes of a body.
        seconds: in which it has come.
        hosts: names that a request may call this server by, so that no page in a browser reaches it by a name that
            leads to this address; None: any.
        key: that requests have as a bearer token; None: none is needed.
        peer: requests of one address at a time, but for those of this machine.
        requests: of all addresses at a time, whose bodies have come; bodies on their way have room for as many.
    """

    def __init__(
        self,
        app: Any,
        *,
        most: int,
        seconds: float,
        hosts: frozenset[str] | None,
        key: str | None,
        peer: int,
        requests: int,
    ) -> None:
        self.app, self.most, self.seconds, self.hosts = app, most, min(seconds, _BODY), hosts
        self._key, self._peer, self._all = None if key is None else key.strip().encode(), peer, requests
        self._requests = Counter[str]()
        # Requests whose bodies have come, and the bytes of those on their way: who sends slowly takes nobody's place.
        self._passed = self._coming = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        self._requests[address] += 1
        try:
            await self._pass(address, scope, receive, send)
        except Refused as error:
            # What is left of the body is not read.
            headers = {"connection": "close"} | ({"www-authenticate": "Bearer"} if error.status == 401 else {})
            await error.response(**headers)(scope, receive, send)
        finally:
            self._requests[address] -= 1
            if not self._requests[address]:
                del self._requests[address]

    async def _pass(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        self._check_key(scope["path"], headers.get(b"authorization", b""))
        if self._requests[address] > self._peer and not address.startswith("127.") and address != "::1":
            raise Refused(503, f"expected at most {self._peer} requests of {address} at a time", code="peer_limit")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.most:
            raise self._too_long()
        try:
            body = await asyncio.wait_for(self._body(receive), self.seconds)
        except TimeoutError:
            raise Refused(408, f"the body took longer than {self.seconds:g} s") from None
        if body is None:
            return
        if self._passed >= self._all and scope["path"] not in _OPEN:
            raise self._full()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        self._passed += 1
        try:
            await self.app(scope, replayed, send)
        finally:
            self._passed -= 1

    def _check_host(self, host: str) -> None:
        parts = _HOST.fullmatch(host)
        name = host if parts is None else parts[1]
        if self.hosts is not None and (parts is None or name.lower() not in self.hosts):
            raise Refused(403, f"Host: expected one of {', '.join(sorted(self.hosts))}, got {name[:80]!r}")

    def _check_key(self, path: str, given: bytes) -> None:
        if self._key is None or path in _OPEN:
            return
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(token.strip(), self._key):
            raise Refused(
                401, "Authorization: expected Bearer and the server's key, got another or none", code="invalid_api_key"
            )

    async def _body(self, receive: Receive) -> bytes | None:
        """The body; None where the client has gone."""
        parts, size = [], 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._coming += len(parts[-1])
                if size > self.most:
                    raise self._too_long()
                if self._coming > self._all * self.most:
                    raise self._full()
                if not message.get("more_body"):
                    return b"".join(parts)
        finally:
            self._coming -= size

    def _full(self) -> Refused:
        return Refused(503, f"expected at most {self._all} requests at a time", code="requests_full")

    def _too_long(self) -> Refused:
        return Refused(413, f"body: expected at most {self.most:,} bytes, got more", code="body_too_long")
