"""Refused: why a request has no answer, in the form of OpenAI's errors."""

from __future__ import annotations

import errno
import json
from typing import Any

from fastapi.responses import Response


class Refused(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        message: what was expected and what came.
        param: the field that it is about, None: none.
        code: a word for programs, None: none.
    """

    def __init__(self, status: int, message: str, param: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, **headers: str) -> Response:
        """The answer, with when to come again where that may help."""
        if self.status == 503:
            headers["retry-after"] = "1"
        # A name in a message may have halves of characters, which no UTF-8 has; they are escaped.
        return Response(json.dumps(self.body()), self.status, headers, "application/json")


def storage_failed(error: OSError) -> Refused:
    """What a disk that is full, or cannot be written or read, is to a client: 507, or 503 for what may pass."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Refused(507, "the disk is full: memories have to be removed first", code="disk_full")
    # The error's own text may have a path.
    reason = error.strerror or type(error).__name__
    return Refused(503, f"the folder of memories failed: {reason}", code="storage_failed")
