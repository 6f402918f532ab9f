"""`gistkit serve`: answers a second at 1 client and at several, and how long a question waits beside a long text.

The documents are those of serving.py; answers are greedy, and have 24 tokens each (`ignore_eos`) or end by themselves,
after some 5. In each round one client asks for a while, then several do, so that what else the machine does meets both
alike. After the rounds a text is compressed, and until
that is done a client asks one short question after another, streamed: the seconds to its first word.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import httpx
from asking import ANSWER
from serving import about_memories, ask_all, documents_of, free_port, served, with_compressor

from gistkit.hf.smollm2 import load_smollm2

DOCUMENTS, TOKENS = 4, 500
LONG = 6000
"""Tokens of the text that is compressed beside the questions."""


async def first_word(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    """Seconds until a streamed answer has begun."""
    begun = time.perf_counter()
    async with client.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 8}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
    return time.perf_counter() - begun


async def measure(port: int, documents: Any, long: str, options: Any) -> dict[str, Any]:
    """Rates of each round, and the seconds of questions alone and beside a long text."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=3600) as client:
        bodies = await about_memories(client, documents, {"max_tokens": ANSWER})
        await first_word(client, bodies[0][0])
        rounds = []
        for number in range(options.rounds):
            rates: dict[str, dict[str, float]] = {"24 tokens": {}, "as they end": {}}
            for form, by_clients in rates.items():
                asked = [({**body, "ignore_eos": form == "24 tokens"}, right) for body, right in bodies]
                for clients in (1, options.clients):
                    load = await ask_all(client, asked, clients, options.seconds)
                    if load.errors:
                        raise RuntimeError(load.errors[0])
                    by_clients[str(clients)] = len(load.seconds) / load.lasted
            rounds.append(rates)
            print(f"  round {number}: {rates}, load {os.getloadavg()[0]:.1f}", flush=True)
        alone = [await first_word(client, bodies[number][0]) for number in range(8)]
        begun = time.perf_counter()
        compressing = asyncio.create_task(client.post("/v1/memories", json={"text": long}))
        await asyncio.sleep(0.5)
        beside: list[float] = []
        while not compressing.done():
            beside.append(await first_word(client, bodies[len(beside) % len(bodies)][0]))
        compressing.result().raise_for_status()
        took = time.perf_counter() - begun
    return {"rounds": rounds, "alone": alone, "beside": beside, "compression": took}


def main() -> int:
    """Measures one server, prints what came of it, and keeps it where asked."""
    parser = harness.parser(__doc__, "python benchmarks/joining.py --rounds 3 --seconds 20")
    parser.add_argument("--clients", type=int, default=8, help="at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each half of a round (default: %(default)s)")
    options = with_compressor(parser)
    found = harness.begin("joining", options)
    tokenizer = load_smollm2()[1]
    documents = documents_of(tokenizer, DOCUMENTS, TOKENS)
    ((long, _),) = documents_of(tokenizer, 1, LONG)
    port = free_port()
    command = [sys.executable, "-m", "gistkit.cli", "serve", "--port", str(port), "--device", "cpu"]
    command += ["--compressor", options.compressor, "--timeout", "3600"]
    with served(command, port, options.threads):
        content = asyncio.run(measure(port, documents, long, options))
    for form in content["rounds"][0]:
        ratios = [one[form][str(options.clients)] / one[form]["1"] for one in content["rounds"]]
        print(
            f"  {form}: {options.clients} clients have {statistics.median(ratios):.2f} times the answers/s of 1 "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    alone, beside = content["alone"], content["beside"]
    print(
        f"  the first word after {statistics.median(alone):.2f} s, at most {max(alone):.2f} s; while {LONG} tokens are "
        f"compressed ({content['compression']:.0f} s) {statistics.median(beside):.2f} s, at most {max(beside):.2f} s "
        f"({len(beside)} questions)"
    )
    content |= {
        "machine": found, "threads": options.threads, "clients": options.clients,
        "seconds": options.seconds, "compressor": Path(options.compressor).name, "long": LONG,
    }  # fmt: skip
    harness.write("joining", content, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
