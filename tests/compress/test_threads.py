"""Threads that share a compressor, or a model: one at a time is in a pass, whose adapters are its own."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch

from gistkit.common import text_ids
from gistkit.compress import ICAE, AvgPool, Dodo, FiveHundredX, MixedResolution, Select
from gistkit.compress.scores import kvzip
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer, tiny, tiny_llama
from tests.helpers.tiers import slow, tiers

METHODS = {
    "x500": lambda model: FiveHundredX(model, chunk=8, ratio=4, window=16, lora=4),
    "avgpool": lambda model: AvgPool(model, ratio=4, window=16, lora=4),
    "dodo": lambda model: Dodo(model, ratio=4, layer=1, threshold=0.0, window=16, lora=4),
}


@pytest.fixture(autouse=True)
def often():
    """Threads change at nearly every line."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def text(seed, length=19):
    return torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(seed))


def answer(compressor, seed):
    memory = compressor.encode(text(seed))
    return *memory.tensors, compressor.generate(memory, text(seed, 4), max_new_tokens=4)


def losses(compressor, seed):
    with torch.no_grad():
        return tuple(compressor(text(seed), continuation_ids=text(seed + 100, 5)).values())


def continued(reader, seed):
    return (reader.generate(text(seed), max_new_tokens=3),)


def folded(compressor, seed):
    with compressor.folded():
        return answer(compressor, seed)


def assert_as_alone(jobs):
    """Each job (function, compressor, seed) gives in threads what it gives alone."""
    expected = [function(*given) for function, *given in jobs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda job: job[0](*job[1:]), jobs))
    for alone, beside in zip(expected, found, strict=True):
        for one, other in zip(alone, beside, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("names", [["x500", "avgpool"], *slow((["dodo"],))], ids="-".join)
def test_threads_get_what_each_gets_alone(names):
    model = tiny_llama(bos_token_id=1)
    compressors = [unsettle(METHODS[name](model)).eval() for name in names]
    assert_as_alone([(answer, compressor, seed) for seed in range(12) for compressor in compressors])


@pytest.mark.parametrize("family", tiers(["llama", "gpt2"]))
def test_losses_beside_encoding(family):
    compressor = unsettle(ICAE(tiny(family), chunk=8, ratio=4, lora=4)).eval()
    jobs = [(losses, compressor, seed) for seed in range(10)]
    assert_as_alone(
        jobs + [(lambda *job: compressor.encode(text(job[1])).tensors, compressor, seed) for seed in range(20)]
    )


@pytest.mark.slow
def test_reading_on_beside_encoding():
    compressor = unsettle(METHODS["dodo"](tiny_llama(bos_token_id=1))).eval()
    reader = MixedResolution(compressor, tau=8, segment=4)
    assert_as_alone([job for seed in range(6) for job in ((continued, reader, seed), (answer, compressor, seed))])


@pytest.mark.slow
def test_folded_maps_are_gone_when_the_last_thread_leaves():
    compressor = unsettle(METHODS["avgpool"](tiny_llama(bos_token_id=1))).eval()
    before = answer(compressor, 0)
    assert_as_alone([(folded, compressor, seed) for seed in range(12)])
    first, second = compressor.folded(), compressor.folded()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    for one, other in zip(before, answer(compressor, 0), strict=True):
        assert torch.equal(one, other)
    assert not any("forward" in vars(module) for module in compressor.model.modules())


def test_a_copy_of_a_compressor_waits_for_nobody():
    compressor = METHODS["x500"](tiny_llama()).eval()
    other, made = copy.deepcopy(compressor), []
    with compressor.using("encoder"):
        thread = Thread(target=lambda: made.append(answer(other, 0)), daemon=True)
        thread.start()
        thread.join(timeout=60)
    assert made


def test_scores_read_their_request_in_a_thread_s_turn(monkeypatch):
    """A tokenizer keeps whether names of control tokens are text."""
    compressor = Select(tiny_llama(vocab_size=258, bos_token_id=1), ratio=2, fit=True, question="Who?").eval()
    compressor.tokenizer = byte_tokenizer()
    held, own = [], text_ids.text_ids

    def seen(*arguments, **options):
        held.append(compressor.lm.turn()._is_owned())
        return own(*arguments, **options)

    for module in (text_ids, kvzip):
        monkeypatch.setattr(module, "text_ids", seen)
    compressor.encode([[5, 6, 7, 8, 9, 10, 11, 12]])
    assert len(held) > 3 and all(held)
