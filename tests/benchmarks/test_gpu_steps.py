"""Whole steps and answers, tried without a GPU: every row's code, and what the host has to launch for a layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_steps
import pytest


def setting(layers: int) -> gpu_steps.Setting:
    return gpu_steps.Setting("cpu", gpu_steps.TINY | {"num_hidden_layers": layers}, [(2, 128)], 64, chunk=32)


def launched(call: Callable[[], Any]) -> int:
    call()
    with gpu_steps.Calls() as calls:
        call()
    return calls.count


def a_layer(make: Callable[[gpu_steps.Setting], Callable[[], Any]]) -> float:
    """Operations that a layer adds to a call."""
    few, many = (launched(make(setting(layers))) for layers in (4, 8))
    return (many - few) / 4


def step(name: str) -> Callable[[gpu_steps.Setting], Callable[[], Any]]:
    return lambda s: gpu_steps.our_step(s, gpu_steps.compressors(s.chunk)[name](s.fresh()), 2, 128)


# Operations of a layer at most, forward and backward: what there was once must not come back.
STEPS = {"GistPool": 395, "AvgPool": 420, "500x": 190, "ICAE": 180, "Dodo": 235, "Dodo, reading on": 111}


@pytest.mark.parametrize("name", STEPS)
def test_what_a_layer_launches_in_a_step(name: str) -> None:
    assert a_layer(step(name)) <= STEPS[name]


@pytest.mark.parametrize("name", ["GistPool", "500x"])
def test_what_a_layer_launches_for_a_token(name: str) -> None:
    def answer(tokens: int) -> Callable[[gpu_steps.Setting], Callable[[], Any]]:
        def make(s: gpu_steps.Setting) -> Callable[[], Any]:
            compressor = gpu_steps.compressors(s.chunk)[name](s.fresh()).eval()
            memory, question = compressor.encode(s.ids(1, 64)), s.ids(1, 4)
            return lambda: compressor.generate(memory, question, max_new_tokens=tokens, stop_tokens=())

        return make

    assert (a_layer(answer(28)) - a_layer(answer(12))) / 16 <= 35


@pytest.mark.slow
def test_every_row_runs(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert gpu_steps.main(["--quick", "--device", "cpu", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert not [row for row in rows if "error" in row]
    assert {row["form"] for row in rows} >= {*gpu_steps.compressors(32), "whole context: transformers"}
    assert {row["case"].split(",")[0] for row in rows} == {"step", "encode", "32 tokens"}
    assert all(row["ms"] >= row["host_ms"] > 0 and row["gpu"] and row["commit"] for row in rows)
