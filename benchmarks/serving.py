"""Many clients ask about documents at once, SmolLM2-135M: `gistkit serve` against `transformers serve`.

The documents are those of asking.py: docstrings of torch.nn with made-up facts among their paragraphs. gistkit reads
each of them once, and a question names its memory: that of the compressor, and then one of ratio 1, which keeps the
keys and values of the whole document. transformers gets the whole document with every question, in the model's chat
template. Each client asks one question after another; answers have at most 24 tokens of one line, and are greedy.
While the clients of gistkit ask, another one adds a text, and five seconds after it the next; the server keeps 32
memories. The servers run one after the other, each as a process of its own, whose resident memory is read every second.
`transformers serve` needs the package openai too.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import harness
import httpx
from asking import ANSWER, QUESTIONS, Fact, answering, document
from tqdm import tqdm

from gistkit.evaluate import contains_answer
from gistkit.evaluate.data import QUESTION
from gistkit.hf.smollm2 import load_smollm2

FULL, KEPT_FULL = "transformers serve, full context", "gistkit serve, full context kept"
# Nothing is left out, so one pass over a text is enough.
WHOLE = ["--ratio", "1", "--option", "by=streaming", "--option", "fit=false"]
KEPT = 32
"""Memories that gistkit's server keeps."""
PAUSE = 5.0
"""Seconds from a text that was added, while the clients ask, to the next."""


@dataclass
class Load:
    """What clients met: seconds of each answer, its tokens and whether it is right, and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    right: int = 0
    errors: list[str] = field(default_factory=list)
    lasted: float = 0.0


@dataclass
class Resident:
    """A process's resident memory, MiB, and the second at which it was read."""

    pid: int
    samples: list[tuple[float, float]] = field(default_factory=list)

    def read(self, second: float) -> None:
        """One more sample; none once the process has ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return
        lines = [line.split() for line in status.splitlines() if line.startswith("VmRSS:")]
        self.samples += [(round(second, 1), int(words[1]) / 1024) for words in lines]


async def ask_all(
    client: httpx.AsyncClient,
    bodies: Sequence[tuple[dict[str, Any], str]],
    clients: int,
    seconds: float,
    tell: Callable[[], object] = lambda: None,
) -> Load:
    """So many clients at once that ask until the time is over; answers that were begun count too.

    They take `bodies` in turn, requests and what their right answers contain; `tell` is called after each answer.
    """
    load, turn, start = Load(), count(), time.perf_counter()

    async def one() -> None:
        while time.perf_counter() - start < seconds:
            body, right = bodies[next(turn) % len(bodies)]
            begun = time.perf_counter()
            try:
                response = await client.post("/v1/chat/completions", json=body)
                response.raise_for_status()
                content = response.json()
                text = content["choices"][0]["message"]["content"] or ""
                load.tokens += content["usage"]["completion_tokens"]
                load.seconds.append(time.perf_counter() - begun)
                load.right += bool(contains_answer(text, [right]))
            except (httpx.HTTPError, LookupError, ValueError) as error:
                load.errors.append(f"{type(error).__name__}: {error}")
                # A server that refuses at once is not to be asked without end.
                await asyncio.sleep(0.1)
            tell()

    await asyncio.gather(*(one() for _ in range(clients)))
    load.lasted = time.perf_counter() - start
    return load


def documents_of(tokenizer: Any, count: int, tokens: int) -> list[tuple[str, list[Fact]]]:
    """Texts of so many tokens, and the facts in each that it is asked about."""
    read = (document(tokenizer, tokens, QUESTIONS, seed) for seed in range(count))
    return [(tokenizer.decode(ids), facts) for ids, facts in read]


async def about_memories(
    client: httpx.AsyncClient, documents: Sequence[tuple[str, list[Fact]]], common: dict[str, Any]
) -> list[tuple[dict[str, Any], str]]:
    """Adds the documents; the bodies of `ask_all` that name their memories."""
    bodies = []
    for text, facts in documents:
        response = await client.post("/v1/memories", json={"text": text})
        memory = response.raise_for_status().json()["id"]
        for fact in facts:
            messages = [{"role": "user", "content": fact.question}]
            bodies.append(({"memory": memory, "messages": messages, **common}, fact.answer))
    return bodies


def with_compressor(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, --compressor among them: by default what `gistkit ask` takes."""
    parser.add_argument(
        "--compressor", default=next(iter(answering()), None), metavar="NAME",
        help="trained compressor, name or folder (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    if options.compressor is None:
        parser.error("--compressor: expected a trained compressor's name or folder, got none, and none comes with this")
    return options


async def watch(resident: Resident) -> None:
    """Reads a server's memory every second, until it is cancelled."""
    start = time.perf_counter()
    while True:
        resident.read(time.perf_counter() - start)
        await asyncio.sleep(1)


async def add_texts(client: httpx.AsyncClient, errors: list[str]) -> None:
    """Adds a text now and then, until it is cancelled, and notes what goes wrong."""
    for number in count():
        try:
            response = await client.post("/v1/memories", json={"text": f"Text {number}. " + "And so on. " * 50})
            response.raise_for_status()
        except httpx.HTTPError as error:
            errors.append(f"memories: {type(error).__name__}: {error}")
        await asyncio.sleep(PAUSE)


def row(name: str, load: Load, reading: float, samples: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What came of one server.

    Returns:
        "requests", "errors": answers and what went wrong; "p50", "p95": seconds of an answer; "rate", "tokens": answers
        and their tokens a second; "right": percent of answers with the right one within; "reading": seconds to read
        the documents once, before; "rss": peak MiB; "first", "second": its peaks in either half of the time; "samples":
        one of ten, about.
    """
    ordered = sorted(load.seconds)
    half = samples[-1][0] / 2 if samples else 0.0
    parts = [[mib for second, mib in samples if (second > half) == late] or [math.nan] for late in (False, True)]
    return {
        "form": name,
        "requests": len(ordered),
        "errors": len(load.errors),
        "p50": statistics.median(ordered) if ordered else math.nan,
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else math.nan,
        "rate": len(ordered) / load.lasted,
        "tokens": load.tokens / load.lasted,
        "right": 100 * load.right / max(len(ordered), 1),
        "reading": reading,
        "rss": max(max(part) for part in parts),
        "first": max(parts[0]),
        "second": max(parts[1]),
        "samples": list(samples)[:: max(1, len(samples) // 60)],
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def served(command: Sequence[str], port: int, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a process, once it answers; ended at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(list(command), stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            while True:
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(command)} has ended:\n{log.read().decode()[-2000:]}")
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def measure(
    name: str, port: int, pid: int, prepare: Callable[[httpx.AsyncClient], Any], adds: bool, options: Any
) -> dict[str, Any]:
    """The row of a server that runs: `prepare` has it read the documents; `adds`: texts are added beside the asking."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=3600, limits=limits) as client:
        start = time.perf_counter()
        bodies = await prepare(client)
        reading = time.perf_counter() - start
        # What a server does once is done.
        (await client.post("/v1/chat/completions", json=bodies[0][0])).raise_for_status()
        resident, errors = Resident(pid), list[str]()
        beside = [asyncio.create_task(watch(resident))]
        if adds:
            beside.append(asyncio.create_task(add_texts(client, errors)))
        with tqdm(desc=name, unit="answer", dynamic_ncols=True) as bar:
            load = await ask_all(client, bodies, options.clients, options.seconds, bar.update)
        for task in beside:
            task.cancel()
        load.errors += errors
        for error in load.errors[:3]:
            print(f"  {name}: {error}", file=sys.stderr)
        return row(name, load, reading, resident.samples)


def main() -> int:
    """Asks both servers, prints a row for each, and keeps the rows where asked."""
    parser = harness.parser(__doc__, "python benchmarks/serving.py --clients 8 --seconds 30")
    parser.add_argument("--clients", type=int, help="at once (default: 64; 8 if --quick)")
    parser.add_argument("--seconds", type=float, help="in which requests begin (default: 600; 30 if --quick)")
    parser.add_argument("--tokens", type=int, default=1000, help="of a document (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=4, help="number of documents (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="of gistkit serve (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=("gistkit", "kept", "transformers"), default=("gistkit", "kept", "transformers"),
        help="these servers, one after the other (default: all; kept: the full context's keys and values)",
    )  # fmt: skip
    options = with_compressor(parser)
    options.clients = options.clients or (8 if options.quick else 64)
    options.seconds = options.seconds or (30.0 if options.quick else 600.0)
    found = harness.begin("serving", options)
    model, tokenizer = load_smollm2()
    documents = documents_of(tokenizer, options.documents, options.tokens)
    common = {"max_tokens": ANSWER, "temperature": 0, "stop": ["\n"]}
    rows = []
    with tempfile.TemporaryDirectory(prefix="gistkit-serving-") as place:
        folder = Path(place) / "smollm2"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model

        compressed = partial(about_memories, documents=documents, common=common)

        async def whole(client: httpx.AsyncClient) -> list[tuple[dict[str, Any], str]]:
            bodies = []
            for text, fact in ((text, fact) for text, facts in documents for fact in facts):
                messages = [{"role": "user", "content": text + QUESTION.format(question=fact.question)}]
                bodies.append(({"model": str(folder), "messages": messages, **common}, fact.answer))
            return bodies

        own, theirs = free_port(), free_port()

        def gistkit(*words: str) -> list[str]:
            """The command of a server of ours."""
            return [
                *(sys.executable, "-m", "gistkit.cli", "serve", "--port", str(own), "--device", "cpu"),
                *("--max-memories", str(KEPT), "--timeout", "3600", "--queue", str(2 * options.clients)),
                *("--batch", str(options.batch), "--compressor", options.compressor, *words),
            ]

        contenders = {
            "gistkit": (f"gistkit serve, {Path(options.compressor).name}", gistkit(), own, compressed),
            "kept": (KEPT_FULL, gistkit(*WHOLE), own, compressed),
            "transformers": (
                FULL,
                [
                    *(sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)),
                    *("--port", str(theirs), "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"),
                ],
                theirs,
                whole,
            ),
        }
        for name, command, port, prepare in (contenders[each] for each in options.only):
            adds = prepare is compressed
            with served(command, port, options.threads) as process:
                one = asyncio.run(measure(name, port, process.pid, prepare, adds, options))
            rows.append(one)
            print(
                f"  {one['form']:36} {one['requests']} answers, {one['errors']} errors, p50 {one['p50']:.2f} s, p95 "
                f"{one['p95']:.2f} s, {one['rate']:.2f} answers/s, {one['tokens']:.1f} tokens/s, right within "
                f"{one['right']:.0f}%, {one['rss']:.0f} MiB ({one['first']:.0f}, then {one['second']:.0f})",
                flush=True,
            )
    content = {
        "machine": found, "threads": options.threads, "clients": options.clients,
        "seconds": options.seconds, "tokens": options.tokens, "documents": options.documents,
        "batch": options.batch, "rows": rows,
    }  # fmt: skip
    harness.write("serving", content, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
