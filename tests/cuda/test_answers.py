"""Answers on a GPU, whose single tokens are replays of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gistkit.ask import Conversation
from gistkit.compress.steps import LARGE
from tests.compress.test_steps import COUNT, MORE, QUICK, ids, made, memories
from tests.helpers.devices import gpu


@gpu
@pytest.mark.parametrize(("family", "name"), [*QUICK, *MORE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_writes_the_tokens_of_the_models_own_loop(family: str, name: str, dtype: torch.dtype) -> None:
    compressor = made(name, family).to("cuda", dtype)
    memory, prompts, steps = memories(compressor, 9, 19, 17), [ids(4), [], ids(2)], compressor.lm.steps

    def written(**options: Any) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(3)
        return compressor.generate(
            memory, prompts, generator=generator, max_new_tokens=COUNT, pad_token=0, **options
        ).cpu()

    for options in ({}, {"do_sample": True, "top_p": 0.9}):
        found, again = written(**options), written(**options)
        assert steps.refused is None and len(steps._kept) == 1
        assert torch.equal(found, again)
        steps.refused = "compared with"
        expected = written(**options)
        steps.refused = None
        # Keys are shared out among blocks by the size of the cache, which a rounding of bfloat16 feels.
        assert torch.equal(found, expected) or dtype == torch.bfloat16


@gpu
def test_a_conversation_on_a_gpu_is_that_of_the_models_own_loop() -> None:
    compressor = made("gistpool").float().to("cuda")
    captured, plain = (Conversation(compressor, memories(compressor, 19)) for _ in range(2))
    for turn in range(3):
        found = captured.reply(ids(3, turn), max_new_tokens=COUNT)
        assert compressor.lm.steps._kept
        compressor.lm.steps.refused = "compared with"
        assert torch.equal(found, plain.reply(ids(3, turn), max_new_tokens=COUNT))
        compressor.lm.steps.refused = None


@gpu
def test_a_block_too_large_for_a_gpu_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = made().to("cuda")
    memory = memories(compressor, 9)
    compressor.generate(memory, max_new_tokens=COUNT)
    block = compressor.lm.steps._block
    assert block is not None
    most = LARGE * block.nbytes - 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, most))
    compressor.generate(memory, max_new_tokens=COUNT)
    assert compressor.lm.steps._block is None
