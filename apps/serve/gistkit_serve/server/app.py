"""The routes of `gistkit serve`: memories, and chat completions in OpenAI's format over them."""

from __future__ import annotations

import asyncio
import html
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from gistkit.ask.turns import Turns
from gistkit.compress.compressor import Compressor
from gistkit.compress.tokens import QUESTION
from gistkit_serve.server.access import Access
from gistkit_serve.server.entry import Entry
from gistkit_serve.server.errors import Refused, storage_failed
from gistkit_serve.server.guard import Guard
from gistkit_serve.server.metrics import Metrics
from gistkit_serve.server.repository import MemoryRepository
from gistkit_serve.server.requests import ChatBody, TextBody
from gistkit_serve.server.worker import Answer, Job, Limits, Question, Sampling, Text, Worker

# Names by which a server on this machine alone is called.
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Of an answer, where a request says nothing of it and the server's limit is no lower.
_NEW_TOKENS = 256


def application(
    compressor: Compressor,
    repository: MemoryRepository,
    *,
    names: Sequence[str] = ("gistkit",),
    turns: Turns | None = None,
    limits: Limits | None = None,
    seconds: float = 120.0,
    body_bytes: int = 2**20,
    hosts: frozenset[str] | None = LOOPBACK,
    key: str | None = None,
    peer: int | None = None,
    requests: int | None = None,
) -> FastAPI:
    """The ASGI application of `gistkit serve`.

    Args:
        compressor: with a tokenizer, in eval mode. While the application runs nothing else may use it.
        repository: of its memories; it stays open.
        names: of the model, in `/v1/models`; answers have the first one.
        turns: the text around questions. None: that of training.
        limits: of sizes and numbers.
        seconds: from a request to the end of its answer; what takes longer is refused.
        body_bytes: of a request's body, at most.
        hosts: names that requests may call this server by; None: any.
        key: that requests have to have; None: none.
        peer: requests of one other machine at a time; None: half of the queue.
        requests: of all at a time; None: as many as wait in both queues and are answered.
    """
    if key is not None and not key.strip():
        raise ValueError("key: expected one or None, got an empty one")
    limits, name, metrics = limits or Limits(), names[0], Metrics(repository)
    turns = turns or Turns(QUESTION, QUESTION)
    started = int(time.time())

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        worker = app.state.worker = metrics.worker = Worker(compressor, repository, turns, limits)
        yield
        await asyncio.to_thread(worker.close)

    # FastAPI's pages of documentation load scripts from a network.
    app = FastAPI(title="gistkit serve", lifespan=running, docs_url=None, redoc_url=None)
    peer = max(1, limits.queue // 2) if peer is None else peer
    requests = 2 * limits.queue + limits.batch if requests is None else requests
    app.add_middleware(Guard, most=body_bytes, seconds=seconds, hosts=hosts, key=key, peer=peer, requests=requests)
    # The last one comes first.
    app.add_middleware(Access, metrics=metrics)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return error.response()

    @app.exception_handler(OSError)
    async def unwritten(request: Request, error: OSError) -> Response:
        return storage_failed(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        # A type that a field may have is among the places, such as list[Part]; a field nobody knows may be called so.
        parts = [str(part) for part in first["loc"][1:] if "[" not in str(part) or first["type"] == "extra_forbidden"]
        # What is no JSON has a number of bytes for a place.
        place = "" if first["type"] == "json_invalid" else ".".join(parts)
        kind = request.headers.get("content-type", "none").partition(";")[0]
        if first["loc"][0] == "body" and "json" not in kind:
            return Refused(400, f"content-type: expected application/json, got {kind[:80]}").response()
        return Refused(400, f"{place or 'body'}: {first['msg']}", place.partition(".")[0] or None).response()

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        return Refused(error.status_code, str(error.detail)).response()

    @app.post("/v1/memories", status_code=201)
    async def add_memory(body: TextBody, request: Request) -> dict[str, Any]:
        entry: Entry = await _Exchange(request, seconds, lambda tell: Text(tell, body.text)).next()
        return {**_memory(entry), "removed": list(entry.removed)}

    @app.get("/v1/memories")
    async def list_memories() -> dict[str, Any]:
        return {"object": "list", "data": [_memory(entry) for entry in reversed(repository.entries())]}

    @app.get("/v1/memories/{memory:path}")
    async def show_memory(memory: str) -> dict[str, Any]:
        try:
            return _memory(await asyncio.to_thread(repository.entry, memory))
        except KeyError:
            raise _unknown(memory) from None

    @app.delete("/v1/memories/{memory:path}")
    async def remove_memory(memory: str) -> dict[str, Any]:
        if memory in repository.offline.entries:
            raise Refused(403, "memory: expected one that was added here, got one of --store, which stays as it is")
        try:
            await asyncio.to_thread(repository.remove, memory)
        except KeyError:
            raise _unknown(memory) from None
        return {"id": memory, "object": "memory.deleted", "deleted": True}

    @app.post("/v1/chat/completions", response_model=None)
    async def complete(body: ChatBody, request: Request) -> Response | dict[str, Any]:
        if body.model is not None and body.model not in names:
            expected = " or ".join(names)
            raise Refused(404, f"model: expected {expected}, got {body.model[:80]!r}", "model", code="model_not_found")
        new_tokens = min(_NEW_TOKENS, limits.new_tokens) if body.max_tokens is None else body.max_tokens
        if new_tokens > limits.new_tokens:
            raise Refused(400, f"max_tokens: expected at most {limits.new_tokens}, got {new_tokens}", "max_tokens")
        asked = body.turns()
        # So near to 0 the likeliest token is all but certain, and logits would overflow.
        sampling = Sampling(body.temperature, body.top_p, body.seed) if body.temperature >= 1e-3 else Sampling()

        def question(tell: Callable[[Any], None]) -> Question:
            return Question(tell, body.memory, asked, new_tokens, sampling, body.stop, body.stream, body.ignore_eos)

        exchange = _Exchange(request, seconds, question)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
        # What is refused of a stream has its status too.
        answer = await exchange.next()
        if body.stream:
            events = _events(exchange, answer, head, body.stream_options.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.reason}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": one, "object": "model", "created": started, "owned_by": "gistkit"} for one in names],
        }

    @app.get("/health")
    async def health() -> dict[str, Any]:
        worker: Worker = app.state.worker
        if not worker.alive:
            raise Refused(503, "the thread that answers has ended", code="worker_ended")
        return {
            "status": "ok",
            "memories": len(repository),
            "ram_bytes": repository.ram_bytes,
            "disk_bytes": repository.disk_bytes,
            "waiting": worker.waiting,
            "running": len(worker.running),
            "done": worker.done,
        }

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_documentation(app.openapi()))

    return app


def _documentation(schema: dict[str, Any]) -> str:
    """A page of the routes and the fields they take, without scripts."""
    parts = ["<!doctype html><meta charset=utf-8><title>gistkit serve</title><h1>gistkit serve</h1>"]
    for path, methods in schema["paths"].items():
        parts += [f"<h2>{method.upper()} {html.escape(path)}</h2>" for method in methods]
    for name, one in schema["components"]["schemas"].items():
        parts.append(f"<h3>{html.escape(name)}</h3><pre>{html.escape(json.dumps(one, indent=2))}</pre>")
    return "\n".join(parts)


class _Exchange:
    """A request, which the worker has, and what it tells of it, until an error, an answer or the client's end."""

    def __init__(self, request: Request, seconds: float, job: Callable[[Callable[[Any], None]], Job]) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[Any] = asyncio.Queue()
        self._end, self._seconds = self._loop.time() + seconds, seconds
        self._job = job(self._tell)
        request.app.state.worker.submit(self._job)
        self._gone = asyncio.ensure_future(_disconnected(request.receive))
        # Also where a stream ends before its first event.
        self._gone.add_done_callback(lambda _: setattr(self._job, "cancelled", True))

    def end(self) -> None:
        """Nobody waits any more."""
        self._gone.cancel()

    def _tell(self, item: Any) -> None:
        # The server may have ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._told.put_nowait, item)

    async def next(self) -> Any:
        """What the worker tells next; Refused if that is an error, the time is over, or the client has gone."""
        told = asyncio.ensure_future(self._told.get())
        try:
            left = max(self._end - self._loop.time(), 0)
            await asyncio.wait({told, self._gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                if self._gone.done():
                    raise Refused(499, "the client has gone")
                raise Refused(504, f"expected an answer within {self._seconds:g} s, got none", code="time_over")
            item = told.result()
            if isinstance(item, Exception):
                raise item if isinstance(item, Refused) else Refused(400, str(item))
        except BaseException:
            self.end()
            raise
        finally:
            told.cancel()
        if not isinstance(item, str):
            self.end()
        return item


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _events(exchange: _Exchange, first: Any, head: dict[str, Any], usage: bool) -> AsyncIterator[str]:
    """The server-sent events of an answer; an error, once it has begun, is one of them."""

    def chunk(delta: dict[str, str], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event({**head, "object": "chat.completion.chunk", "choices": [choice]})

    item = first
    try:
        yield chunk({"role": "assistant", "content": ""})
        while not isinstance(item, Answer):
            yield chunk({"content": item})
            item = await exchange.next()
        yield chunk({}, item.reason)
        if usage:
            yield _event({**head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(item)})
    except Refused as error:
        yield _event(error.body())
    finally:
        exchange.end()
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(answer: Answer) -> dict[str, Any]:
    """The tokens that were read and written; those of the memory count as a cache's."""
    read = answer.memory_tokens + answer.prompt_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": answer.new_tokens,
        "total_tokens": read + answer.new_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.memory_tokens},
    }


def _memory(entry: Entry) -> dict[str, Any]:
    """A memory as its routes show it."""
    return {
        "id": entry.id,
        "object": "memory",
        "used": entry.used,
        "tokens": entry.tokens,
        "memory_tokens": entry.memory_tokens,
        "uncompressed_tokens": entry.rest,
        "bytes": entry.nbytes,
        "in_ram": entry.memory is not None,
    }


def _unknown(memory: str) -> Refused:
    return Refused(404, f"memory: expected the id of a memory, got {memory[:80]!r}", code="memory_not_found")
