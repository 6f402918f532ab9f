"""Front: what stands before vLLM's routes, so that a client names a memory and sends its question, no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from gistkit_vllm import memory_files

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST = 1 << 25


class Front:
    """ASGI middleware for vLLM's `--middleware gistkit_vllm.front.Front`.

    A request whose `kv_transfer_params` name a memory gets as many placeholder tokens before its prompt as the memory
    has tokens. One that names no memory there is gets HTTP 404, and a damaged memory, or a name that no memory can be
    saved under, 400, without the engine; other requests pass as they are. So do those that are longer than `LONGEST`,
    which vLLM reads after its own check of keys: the engine refuses a memory whose placeholders are missing.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in (COMPLETIONS, CHAT):
            return await self.app(scope, receive, send)
        body, more = await _body(receive)
        if more:
            return await self.app(scope, _received(body, receive, more), send)
        try:
            request = json.loads(body)
            params = request["kv_transfer_params"]
            named = {key: params[key] for key in ("memory", "save") if key in params}
        except (ValueError, KeyError, TypeError, RecursionError):
            named = {}
        if not named:
            return await self.app(scope, _received(body, receive), send)
        option = scope["app"].state.vllm_config.kv_transfer_config.get_from_extra_config
        try:
            if request.get("use_beam_search") not in (None, False):
                # vLLM's beams are requests of their own, of which no connector hears.
                raise ValueError(f"use_beam_search: expected false with a {' or '.join(named)}, got true")
            if "save" in named:
                _check_save(request, named["save"], option("save", False))
        except ValueError as error:
            code = "memory_not_saved" if "save" in named else "memory_not_read"
            return await self._refuse(scope, send, 400, str(error), code)
        try:
            if "memory" in named:
                _place(request, path, memory_files.about(Path(option("store", ".")), named["memory"])[0])
        except memory_files.Missing as error:
            return await self._refuse(scope, send, 404, str(error), "memory_not_found")
        except (ValueError, OSError) as error:
            return await self._refuse(scope, send, 400, str(error), "memory_not_read")
        body = json.dumps(request).encode()
        headers = [(key, value) for key, value in scope["headers"] if key.lower() != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self.app(scope, _received(body, receive), send)

    async def _refuse(self, scope: Scope, send: Send, status: int, message: str, code: str) -> None:
        """Answers with an error in OpenAI's shape, to those alone whom vLLM's own check of keys lets through."""
        answer: list[Message] = []

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def keep(part: Message) -> None:
            answer.append(part)

        await self.app(scope, nothing, keep)
        if answer and answer[0].get("status") in (401, 403):
            for part in answer:
                await send(part)
            return
        error = {"message": message, "type": "invalid_request_error", "param": "kv_transfer_params", "code": code}
        await JSONResponse({"error": error}, status)(scope, nothing, send)


def _check_save(request: dict[str, Any], name: object, saves: bool) -> None:
    """Refuses what the engine would, as far as the request alone tells."""
    memory_files.check_new(name)
    if not saves:
        raise ValueError("save: expected a server that was started with --save, got one that only reads")
    if isinstance(prompt := request.get("prompt"), list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise ValueError(f"save: expected one prompt, got {len(prompt)}")


def _place(request: dict[str, Any], path: str, about: memory_files.About) -> None:
    """Writes the placeholders before a prompt; the chat template writes those of messages."""
    if path == CHAT:
        given = request.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise ValueError(f"chat_template_kwargs: expected settings by name, got {type(given).__name__}")
        # The text is for templates of earlier exports.
        request["chat_template_kwargs"] = {**given, "memory_tokens": about.tokens, "memory_text": about.text}
        return
    prompt: Any = request.get("prompt")
    many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    request["add_special_tokens"] = False
    request["prompt"] = [_before(one, about) for one in prompt] if many else _before(prompt, about)


def _before(prompt: Any, about: memory_files.About) -> Any:
    if isinstance(prompt, str):
        return about.text * about.tokens + prompt
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return [about.placeholder] * about.tokens + prompt
    raise ValueError(f"prompt: expected a text or token ids after a memory, got {type(prompt).__name__}")


async def _body(receive: Receive) -> tuple[bytes, bool]:
    """The body of a request, and whether there is more of it than is read here."""
    body = bytearray()
    while True:
        part = await receive()
        body += part.get("body", b"")
        more = part["type"] == "http.request" and bool(part.get("more_body"))
        if len(body) > LONGEST or not more:
            return bytes(body), more


def _received(body: bytes, receive: Receive, more: bool = False) -> Receive:
    """What an application receives of a body that was read, and then from the client; `more`: of the body too."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": more}

    return again
