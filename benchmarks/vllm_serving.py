"""vLLM on memories against vLLM on full texts, SmolLM2-135M: the same server, reader and questions.

The documents are those of asking.py, docstrings of torch.nn with made-up facts among their paragraphs, cut to --tokens.
A question names its memory, or follows the whole text. Each server answers with vLLM's prefix cache and without; with
it, every text was asked once before, so that its prefix is there. Answers have 16 tokens, greedy. Compressing is not in
it: that is one pass over a text, once. It needs vLLM in an environment of its own, which `make vllm` makes.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import httpx
from asking import QUESTIONS
from serving import documents_of, free_port, served

from gistkit.evaluate.data import QUESTION
from gistkit.hf.smollm2 import load_smollm2

NEW_TOKENS = 16
# Tokens of a paged cache that vLLM's prefix cache gives up last; its metric counts those in use by requests.
USAGE = "vllm:kv_cache_usage_perc"


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds to the first token of an answer, and to its end."""
    begun, first = time.perf_counter(), None
    fixed = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json={**body, **fixed}) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if first is None and line.startswith("data: {"):
                first = time.perf_counter() - begun
    return first or 0.0, time.perf_counter() - begun


async def usage(client: httpx.AsyncClient, seen: list[float]) -> None:
    """Reads how much of the paged cache requests hold, until it is cancelled."""
    while True:
        text = (await client.get("/metrics")).text
        seen += [float(line.split()[-1]) for line in text.splitlines() if line.startswith(USAGE)]
        await asyncio.sleep(0.2)


async def measure(url: str, bodies: Sequence[Mapping[str, Any]], at_once: int, cache_bytes: int) -> dict[str, Any]:
    """What clients meet who ask `at_once` questions at a time."""
    gate, seen = asyncio.Semaphore(at_once), [0.0]
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=httpx.Limits(max_connections=None)) as client:

        async def one(body: Mapping[str, Any]) -> tuple[float, float]:
            async with gate:
                return await ask(client, body)

        watch = asyncio.create_task(usage(client, seen))
        begun = time.perf_counter()
        times = await asyncio.gather(*map(one, bodies))
        lasted = time.perf_counter() - begun
        watch.cancel()
    return {
        "at_once": at_once,
        "requests": len(bodies),
        "first": statistics.median(first for first, _ in times),
        "last": statistics.median(last for _, last in times),
        "requests_s": len(bodies) / lasted,
        "tokens_s": NEW_TOKENS * len(bodies) / lasted,
        "cache_mib": max(seen) * cache_bytes / 2**20,
    }


def main() -> int:
    """Measures both, prints a row for each case, and keeps the rows where asked."""
    parser = harness.parser(__doc__, "python benchmarks/vllm_serving.py --quick --python build/vllm/bin/python")
    parser.add_argument("--python", default="build/vllm/bin/python", help="that has vLLM (default: %(default)s)")
    parser.add_argument("--compressor", default="smollm2-avgpool-2x", help="trained compressor (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=480, help="of a document (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=8, help="number of documents (default: %(default)s)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32], help="questions (default: 1 8 32)")
    parser.add_argument("--requests", type=int, default=8, help="at least so many a case (default: %(default)s)")
    options = parser.parse_args()
    found, rows = harness.begin("vllm", options), list[dict[str, Any]]()
    content = {
        "machine": found, "threads": options.threads, "compressor": options.compressor,
        "tokens": options.tokens, "documents": options.documents, "rows": rows,
    }  # fmt: skip

    def keep(row: dict[str, Any]) -> None:
        """Also for when the next case takes more memory than there is; the machine's file waits for all of them."""
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            harness.write("vllm", content, options)

    _, tokenizer = load_smollm2()
    with tempfile.TemporaryDirectory(prefix="gistkit-vllm-") as place:
        read = documents_of(tokenizer, options.documents, options.tokens)
        texts = {f"text-{seed}": one for seed, one in enumerate(read)}
        for name, (text, _) in texts.items():
            Path(place, f"{name}.txt").write_text(text)
        files = [str(Path(place, f"{name}.txt")) for name in texts]
        gistkit = [sys.executable, "-m", "gistkit.cli"]
        compressor = ["--compressor", options.compressor]
        subprocess.run([*gistkit, "compress", *files, *compressor], check=True)
        memories = [file.replace(".txt", ".gist") for file in files]
        words = ["export", *compressor, "--merged", "--out", f"{place}/served", "--memories", *memories]
        subprocess.run([*gistkit, *words], check=True)
        cache_bytes = 2**30
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        for caching in (True, False):
            port = free_port()
            command = [
                options.python, "-m", "gistkit_vllm", f"{place}/served", "--dtype", "float32", "--enforce-eager",
                "--max-model-len", "1024", "--max-num-seqs", str(max(options.at_once)), "--port", str(port),
                f"--{'' if caching else 'no-'}enable-prefix-caching",
            ]  # fmt: skip
            with served(command, port, options.threads):
                for kind in ("memory", "text"):
                    asked = (
                        {
                            "prompt": (text if kind == "text" else "") + QUESTION.format(question=facts[turn].question),
                            **({"kv_transfer_params": {"memory": name}} if kind == "memory" else {}),
                        }
                        for turn in range(QUESTIONS)
                        for name, (text, facts) in texts.items()
                    )
                    bodies = [{"model": options.compressor, **body} for body in asked]
                    # Each text once: what follows finds it in the prefix cache, where there is one.
                    start = bodies[: len(texts)]
                    url, cold = f"http://127.0.0.1:{port}", None
                    for at_once in options.at_once:
                        if cold is None:
                            cold = asyncio.run(measure(url, start, 1, cache_bytes))
                            keep({"kind": kind, "prefix_cache": caching, "cold": True, **cold})
                        count = max(options.requests, at_once)
                        some = list(islice(bodies[len(texts) :], count))
                        row = asyncio.run(measure(url, some, at_once, cache_bytes))
                        keep({"kind": kind, "prefix_cache": caching, "cold": False, **row})
    if not options.json:
        harness.write("vllm", content, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
