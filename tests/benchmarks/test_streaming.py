"""The benchmark of reading on token by token: who takes part, what is measured, and the table and picture of it."""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import picture
import pytest
import streaming
import suites
import torch

from tests.helpers.models import tiny_llama

BOS = 1


def model():
    return tiny_llama(bos_token_id=BOS, num_hidden_layers=3).float()


def text(tokens):
    return torch.cat([torch.full((1, 1), BOS), torch.randint(2, 50, (1, tokens - 1))], 1)


def test_each_contender_reads_on_as_one_pass_does():
    plain, own = model(), model()
    mixed = streaming.readers(plain, ["strided", "learned"], torch.randint(2, 50, (1, 400)))
    memories = streaming.compressors(plain)
    ids = text(330)
    with ExitStack() as stack, torch.no_grad():
        found = streaming.start(stack, mixed, memories, plain, own, ids[:, :300], 30)
        for token in ids[0, 300:].split(1):
            logits = {name: contender.step(token) for name, contender in found.items()}
        sizes = {name: contender.nbytes() for name, contender in found.items()}
        assert own.config._attn_implementation == "gistkit" and plain.config._attn_implementation == "sdpa"
    assert own.config._attn_implementation == "sdpa"
    assert list(logits) == [*mixed, *memories, streaming.THEIRS, streaming.OURS]
    everything = plain(ids).logits[:, -1]
    for name in (streaming.THEIRS, streaming.OURS):
        torch.testing.assert_close(logits[name], everything, rtol=1e-3, atol=1e-3)
    for name, reader in mixed.items():
        wanted = reader.compressor.logits(reader.hidden(reader.rows(ids))[:, -1])
        torch.testing.assert_close(logits[name], wanted, rtol=1e-3, atol=1e-3)
        assert (logits[name] - everything).abs().max() > 0.05
    for name, compressor in memories.items():
        memory = compressor.encode(ids[:, 1:299])
        wanted = compressor.logits(compressor.decode(memory, "lm", ids[:, 299:])[:, -1])
        torch.testing.assert_close(logits[name], wanted, rtol=1e-3, atol=1e-3)
        assert (logits[name] - everything).abs().max() > 0.05
    config = plain.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert sizes[streaming.THEIRS] == sizes[streaming.OURS] == 330 * token
    # What token 329 sees of: its segment and the three before, from 224 on, every tenth token before them, and BOS.
    assert sizes["gistkit, mixed resolution, strided"] == len({0, *range(10, 330, 10), *range(224, 330)}) * token
    for name, compressor in memories.items():
        assert sizes[name] == (compressor.encode(ids[:, 1:299]).num_tokens + 31) * token
    # A segment and the three before, BOS, and means.
    assert sizes["gistkit, Compressive"] == (1 + 330 - 224 + 224 // streaming.MEMORY_RATIO) * token
    # All three layers are scored with, so that the recent tokens are there twice.
    assert sizes["gistkit, mixed resolution, learned"] > 2 * (1 + 330 - 224) * token


def contenders(monkeypatch, seconds, **logits):
    """Contenders of known times, {name: seconds of each step}, whose caches grow by a MiB a step."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(streaming, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def one(name, seconds):
        done = []

        def step(token):
            clock.now += seconds[len(done)]
            done.append(token)
            return torch.full((1, 3), logits.get(name, 0.0))

        return streaming.Contender(step, lambda: len(done) << 20)

    return {name: one(name, its) for name, its in seconds.items()}


def test_steps_after_the_warm_up_are_counted(monkeypatch):
    steady = [9.0, 9.0, 0.1, 0.1, 0.1, 0.1]
    # As where a segment ends: one step in four takes longer, which the mean shows.
    uneven = [9.0, 9.0, 0.1, 0.1, 0.5, 0.1]
    told = []
    found = contenders(monkeypatch, {"mixed": uneven, streaming.THEIRS: steady, streaming.OURS: steady})
    first, second, third = streaming.read(found, torch.arange(6), 512, lambda: told.append(0))
    assert len(told) == 6
    assert first["form"] == "mixed" and first["case"] == "512 tokens read" and first["runs"] == 4
    assert (first["mean"], first["median"]) == pytest.approx((200, 100))
    assert (second["mean"], second["low"], second["high"]) == pytest.approx((100, 100, 100))
    assert first["mib"] == third["mib"] == 4.5


def test_full_contexts_that_differ_are_refused(monkeypatch):
    steady = [0.1] * 6
    found = contenders(monkeypatch, {streaming.THEIRS: steady, streaming.OURS: steady}, **{streaming.OURS: 0.5})
    with pytest.raises(ValueError, match=r"logits: expected the same ones of both full contexts, got .* 0\.5"):
        list(streaming.read(found, torch.arange(6), 512))


def results():
    """What streaming.py writes, of two contenders."""
    means = {"gistkit, mixed resolution, strided": (20.0, 21.0), streaming.THEIRS: (10.0, 25.0)}
    rows = [
        {"form": form, "tokens": tokens, "mean": mean, "mib": tokens / 256}
        for form, both in means.items()
        for tokens, mean in zip((256, 4096), both, strict=True)
    ]
    machine = {"processor": "some", "threads": 2, "instruction_set": "avx2", "torch": "2", "commit": "abc"}
    sizes = {"ratio": 10, "tau": 128, "segment": 32, "memory_ratio": 8, "dtype": "float32", "floor": 9.0, "window": 64}
    return {"suite": "streaming", "machine": machine, **sizes, "milliseconds": streaming.growth(rows[::-1])}


def test_growth_is_that_of_each_contender():
    assert {(row["form"], row["tokens"]): row["growth"] for row in results()["milliseconds"]} == {
        ("gistkit, mixed resolution, strided", 256): 1.0,
        ("gistkit, mixed resolution, strided", 4096): 1.05,
        (streaming.THEIRS, 256): 1.0,
        (streaming.THEIRS, 4096): 2.5,
    }


def test_the_picture_shows_each_contender_in_both_panels(tmp_path):
    suites.write(tmp_path / "figures.json", "streaming-bfloat16", results())
    drawn = picture.draw(tmp_path / "figures.json", "streaming-bfloat16")
    assert drawn == tmp_path / "streaming-bfloat16.png" and drawn.read_bytes().startswith(b"\x89PNG")
    time, cache = picture.draw_streaming(results()).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in time.lines}
    assert drawn == {
        "gistkit, mixed resolution, strided": [[256, 20], [4096, 21]],
        streaming.THEIRS: [[256, 10], [4096, 25]],
    }
    assert [line.get_ydata().tolist() for line in cache.lines] == [[1, 16]] * 2
    assert time.get_ylim()[0] == 0


def test_the_floor_is_a_product_with_every_weight(monkeypatch):
    seen, clock = [], SimpleNamespace(now=0.0)
    monkeypatch.setattr(streaming, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def product(x, weight):
        clock.now += weight.numel()
        seen.append(tuple(weight.shape))
        return linear(x, weight)

    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    plain = model()
    shapes = [tuple(part.weight.shape) for part in plain.modules() if isinstance(part, torch.nn.Linear)]
    assert streaming.floor(plain, 3) == pytest.approx(1e3 * sum(rows * columns for rows, columns in shapes))
    assert seen == 3 * shapes


def test_without_the_weights_the_text_is_bytes(monkeypatch):
    def missing(dtype):
        raise ImportError("none")

    monkeypatch.setattr(streaming, "load_smollm2", missing)
    monkeypatch.setattr(streaming, "load_random", lambda dtype: tiny_llama(bos_token_id=BOS, vocab_size=256).to(dtype))
    found, ids, sample, corpus = streaming.load(300)
    assert found.dtype == torch.float32 and corpus.unit == "bytes"
    assert ids.shape == (1, 300) and ids[0, 0] == BOS and sample.shape == (1, streaming.SAMPLE)
    assert torch.equal(ids[0, 1:], corpus.train[:299].long()) and torch.equal(sample[0], corpus.train[300:].long())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "40"], r"--window: expected a multiple of 32, got 40"),
        (["--lengths", "512", "48"], r"--lengths: expected at least the window, 64 tokens, got 48"),
    ],
)
def test_windows_are_whole_segments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["streaming.py", *arguments])
    with pytest.raises(SystemExit):
        streaming.main()
    assert message in capsys.readouterr().err
