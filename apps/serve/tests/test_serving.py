"""The load test of the servers: what its clients count, what is said of memory, and the table of it."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx", reason="httpx, which the test extra brings, is not installed")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import serving  # noqa: E402

pytestmark = pytest.mark.slow


def server(fails=()):
    """A server in this process that answers "Oslo." in 3 tokens; the requests of these numbers fail."""
    seen, at_once = [], [0, 0]

    async def answer(request):
        number = len(seen)
        seen.append(json.loads(request.content))
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.02)
        at_once[0] -= 1
        if number in fails:
            return httpx.Response(503, json={"error": {}})
        choices = [{"message": {"content": "It is Oslo."}}]
        return httpx.Response(200, json={"choices": choices, "usage": {"completion_tokens": 3}})

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server"), seen, at_once


def test_clients_ask_at_once_until_the_time_is_over_and_count_what_they_get():
    client, seen, at_once = server(fails={2, 3})
    bodies = [({"memory": "a"}, "Oslo"), ({"memory": "b"}, "Rome")]
    load = asyncio.run(serving.ask_all(client, bodies, 4, 0.25))
    assert at_once[1] == 4 and {body["memory"] for body in seen} == {"a", "b"}
    assert len(load.seconds) + len(load.errors) == len(seen) >= 12
    assert [error.split(":")[0] for error in load.errors] == ["HTTPStatusError"] * 2
    assert load.tokens == 3 * len(load.seconds) and min(load.seconds) >= 0.02
    asked = [body["memory"] == "a" for number, body in enumerate(seen) if number not in (2, 3)]
    assert load.right == sum(asked)
    assert 0.25 <= load.lasted < 5


def test_a_row_has_quantiles_rates_and_the_peaks_of_both_halves():
    load = serving.Load([float(second) for second in range(1, 101)], 400, 50, ["x"], 20.0)
    samples = [(float(second), 100.0 + second % 7) for second in range(200)]
    row = serving.row("some", load, 1.5, samples)
    assert (row["requests"], row["errors"], row["p50"], row["p95"]) == (100, 1, 50.5, 95)
    assert (row["rate"], row["tokens"], row["right"], row["reading"]) == (5, 20, 50, 1.5)
    assert row["rss"] == row["first"] == row["second"] == 106 and 50 <= len(row["samples"]) <= 70
    growing = serving.row("some", load, 0, [(0.0, 1.0), (5.0, 2.0), (10.0, 9.0)])
    assert (growing["first"], growing["second"], growing["rss"]) == (2, 9, 9)


def test_a_server_that_answers_nothing_has_a_row_too():
    row = serving.row("none", serving.Load(errors=["x"] * 3, lasted=1.0), 0, [(0.0, 5.0)])
    assert (row["requests"], row["errors"], row["rate"]) == (0, 3, 0) and row["p95"] != row["p95"]


def test_the_memory_of_a_process_is_read_while_it_lives():
    resident = serving.Resident(os.getpid())
    resident.read(1.0)
    assert resident.samples[0][0] == 1 and resident.samples[0][1] > 50
    ended = serving.Resident(2**22 + 1)
    ended.read(1.0)
    assert ended.samples == []


def test_texts_are_added_beside_the_questions_and_failures_are_noted(monkeypatch):
    monkeypatch.setattr(serving, "PAUSE", 0.01)
    client, seen, _ = server(fails={1})
    errors, resident = [], serving.Resident(os.getpid())

    async def a_while():
        tasks = [asyncio.create_task(each) for each in (serving.add_texts(client, errors), serving.watch(resident))]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()

    asyncio.run(a_while())
    assert len({body["text"] for body in seen}) == len(seen) >= 3
    assert len(errors) == 1 and errors[0].startswith("memories: HTTPStatusError") and len(resident.samples) == 1


def test_a_server_that_ends_at_once_says_why():
    command = [sys.executable, "-c", "raise SystemExit('no port')"]
    with pytest.raises(RuntimeError, match="no port"), serving.served(command, serving.free_port(), 1):
        pass
