"""Threads that share a compressor, or a model: one at a time is in a pass, whose adapters are its own."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gistkit.compress import AvgPool, FiveHundredX
from tests.helpers.models import tiny_llama

METHODS = {
    "x500": lambda model: FiveHundredX(model, chunk=8, ratio=4, window=16, lora=4),
    "avgpool": lambda model: AvgPool(model, ratio=4, window=16, lora=4),
}


@pytest.fixture
def often():
    """Threads change at nearly every line."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def answer(compressor, seed):
    ids = torch.randint(3, 50, (2, 19), generator=torch.Generator().manual_seed(seed))
    memory = compressor.encode(ids)
    return memory, compressor.generate(memory, ids[:, :4], max_new_tokens=4)


@pytest.mark.parametrize("names", [["x500"], ["avgpool"], ["x500", "avgpool"]], ids="-".join)
def test_threads_get_what_each_gets_alone(names, often):
    model = tiny_llama(bos_token_id=1)
    compressors = [METHODS[name](model) for name in names]
    with torch.no_grad():
        for compressor in compressors:
            for parameter in compressor.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn_like(parameter)
            compressor.eval()
    jobs = [(compressor, seed) for seed in range(12) for compressor in compressors]
    expected = [answer(*job) for job in jobs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda job: answer(*job), jobs))
    for (memory, tokens), (ours, written) in zip(expected, found, strict=True):
        assert torch.equal(tokens, written)
        for one, other in zip(memory.tensors, ours.tensors, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_copy_of_a_compressor_waits_for_nobody():
    compressor = METHODS["x500"](tiny_llama()).eval()
    other = copy.deepcopy(compressor)
    with compressor.using("encoder"), ThreadPoolExecutor(1) as thread:
        thread.submit(answer, other, 0).result(timeout=60)
