"""Whole models on a GPU: position encodings, the recorder, compressors, training, streams, a study.

Without a GPU the same bodies run on one that is pretended (`pretend_gpu`): it is the CPU, and refuses what a GPU would.
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gistkit import hf
from gistkit.compress import Dodo, FiveHundredX, Memory
from gistkit.evaluate import Example, evaluate
from gistkit.inspect import AttentionRecorder
from gistkit.nn import (
    GPT,
    TEXT_ENCODINGS,
    PositionEncoding,
    SeqPE,
    SeqPEPositions,
    SeqPERegularizer,
    position_encoding,
)
from gistkit.options.arguments import LateParser, Parser
from gistkit.train import checkpoints, read_metrics
from gistkit.train.trainer import Trainer
from tests.helpers import encodings, train_worker
from tests.helpers.devices import ON_CUDA, gpu, grid
from tests.helpers.models import tiny
from tests.helpers.pretend_gpu import NAME, pretending, waits
from tests.helpers.small_cases import CASES
from tests.hf import test_encode_images

HEADS, HEAD_DIM, LAYERS = 4, 12, 2
COMPRESSORS = {
    "500x": train_worker.make_compressor,
    "gistpool": train_worker.make_gistpool,
    "dodo": train_worker.make_dodo,
}
PLACES = torch.arange(90, 99)[None]
READERS = {"mixed": train_worker.make_reader, "compressive": train_worker.make_compressive}


@pytest.fixture(params=[NAME, ON_CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with pretending() if request.param == NAME else nullcontext():
        yield request.param


def there(tensor: Tensor, device: str) -> Tensor:
    """The tensor, which is on the device."""
    assert tensor.device.type == device, f"expected a tensor on {device}, got one on {tensor.device}"
    return tensor


def close(found: Tensor, exact: Tensor) -> None:
    """Within float32's rounding: of two layers of sums of 48 products, 1e-6 of the largest; here ten times that."""
    found, exact = found.detach().cpu().double(), exact.detach().cpu().double()
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


def text(rows: int = 2, tokens: int = 24) -> Tensor:
    return torch.randint(32, 127, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_small_cases(device: str, name: str) -> None:
    """Those that compute-sanitizer runs."""
    assert all(bool(there(x, device).isfinite().all()) for x in CASES[name](device))


def encoding(name: str, **options: Any) -> PositionEncoding:
    torch.manual_seed(0)
    encoder = SeqPE(16, digits=4, layers=2, heads=2, std=0.3)
    return position_encoding(
        name, heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, length=200, encoder=encoder, **options
    )


def logits_and_gradients(
    device: str, dtype: torch.dtype, name: str, training: bool, positions: Tensor | None
) -> list[Tensor]:
    model = tiny("gpt2", pad_token_id=0).to(device, dtype).train(training)
    position = encoding(name).to(device, dtype).train(training)
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    with hf.encode_positions(model, position):
        logits = model(ids, position_ids=None if positions is None else positions.to(device)).logits
        weights = [*position.parameters(), model.transformer.h[0].attn.c_attn.weight]
        gradients = torch.autograd.grad(logits.square().mean(), weights) if training else ()
    return [there(x, device) for x in (logits, *gradients)]


# About three of four are left to a GPU, and all encodings and both kinds of positions and passes are here.
@grid("name,training,positions", TEXT_ENCODINGS, [False, True], [None, PLACES], cpu=14, here=NAME, indirect=["device"])
def test_encode_positions(device: str, name: str, training: bool, positions: Tensor | None) -> None:
    """SeqPE in training too, whose positions are read on the CPU. Its bias has gradients that nearly cancel: they are
    as exact as the CPU's in float32."""
    found = logits_and_gradients(device, torch.float32, name, training, positions)
    on_cpu = [logits_and_gradients("cpu", dtype, name, training, positions) for dtype in (torch.float32, torch.float64)]
    for mine, rounded, exact in zip(found, *on_cpu, strict=True):
        if (rounded - exact).abs().max() <= 5e-6 * exact.abs().max():
            close(mine, exact)
        else:
            assert (mine.cpu() - exact).abs().max() <= 2 * (rounded - exact).abs().max()


@pytest.mark.parametrize("name", ["seqpe-bias", "alibi", "learned"])
@pytest.mark.parametrize("rope", [False, True])
def test_encode_positions_in_a_llama(device: str, name: str, rope: bool) -> None:
    position = encodings.encoding(name, heads=4, key_heads=2, head_dim=12, layers=2)
    found = []
    for where, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        model, its = tiny("llama").to(where, dtype), position.to(where, dtype)
        with hf.encode_positions(model, its, rope=rope):
            found.append(model(torch.arange(1, 19).view(2, 9).to(where)).logits)
    close(there(found[0], device), found[1])


@pytest.mark.parametrize("name", ["seqpe-mul", "rope-2d-mix", "learned-2d"])
def test_encode_positions_in_a_vision_transformer(device: str, name: str) -> None:
    position, found = test_encode_images.encoding(name, "ViT"), []
    for where, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        model, its = test_encode_images.model_of("ViT").to(where, dtype), position.to(where, dtype)
        with hf.encode_positions(model, its):
            found.append(model(test_encode_images.images(4, 3).to(where, dtype)).logits)
    close(there(found[0], device), found[1])


@pytest.mark.parametrize("name", ["seqpe-bias", "alibi", "rope-1e4"])
def test_generate_inside_encode_positions(device: str, name: str) -> None:
    answers = []
    for where in (device, "cpu"):
        model, position = tiny("gpt2", pad_token_id=0).float().to(where), encoding(name).to(where).eval()
        ids = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(1)).to(where)
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        with hf.encode_positions(model, position):
            answers.append(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False))
    assert torch.equal(there(answers[0], device).cpu(), answers[1])


@pytest.mark.parametrize("name", TEXT_ENCODINGS)
def test_positions_given_on_the_host(device: str, name: str) -> None:
    """As those given on the device, for encodings that read either."""
    model, position = tiny("gpt2", pad_token_id=0).float().to(device), encoding(name).to(device)
    ids, places = torch.randint(0, 50, (2, 9)).to(device), PLACES
    with hf.encode_positions(model, position):
        close(model(ids, position_ids=places).logits, model(ids, position_ids=places.to(device)).logits)


def test_a_training_step_of_seqpe_copies_no_positions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The regularizer's positions are encoded once, for its losses and the model, and never leave the host."""
    model, position = tiny("gpt2", pad_token_id=0).float().to(device).train(), encoding("seqpe-bias").to(device)
    assert isinstance(position, SeqPEPositions)
    regularizer = SeqPERegularizer(position.encoder, 9, 500, 2, pivots=4, candidates=4, windows=2, shift_rate=0.5)
    ids, step = torch.randint(0, 50, (2, 9)).to(device), regularizer.draw(2, 1)
    seen = positions_copied(monkeypatch)
    with hf.encode_positions(model, position):
        encoded = position.encoder(step.positions)
        places = step.positions[step.main]
        logits = model(ids, position_ids=places, embeddings=step.embeddings(encoded)).logits
        assert seen == ["cpu"]
        close(logits, model(ids, position_ids=places).logits)
        assert seen == ["cpu", "cpu"]
    (there(logits, device).square().mean() + regularizer.losses(step, encoded).total).backward()
    assert all(there(parameter.grad, device).abs().any() for parameter in position.parameters())


def test_frozen_embeddings(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are kept on the device; generation with positions of the device reads them once."""
    model = GPT(50, 48, 2, 4, encoding("seqpe-sum"), style="gpt2").to(device).eval()
    ids, encoder = torch.randint(0, 50, (2, 9)).to(device), model.position.encoder
    expected = torch.cat([ids, model.generate(ids, 12)[:, 9:]], 1)
    calls, encode = [], SeqPE.encode
    monkeypatch.setattr(SeqPE, "encode", lambda self, trie: calls.append(trie.shape.numel()) or encode(self, trie))
    found = model.generate(ids, 12, torch.arange(9, device=device))
    # 20 and those that may follow.
    assert calls == [83] and torch.equal(found.cpu(), expected.cpu())
    with torch.no_grad(), encoder.frozen():
        for positions in (torch.arange(6), torch.arange(40, device=device), torch.tensor([[3], [900]])):
            close(there(encoder(positions), device), encoder.plain(positions.cpu()))
        encoder.tokens.mul_(1.5)
        close(there(encoder(torch.arange(6)), device), encoder.plain(torch.arange(6)))


def positions_copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices of the positions that SeqPE's encoder is given from now on."""
    seen: list[str] = []
    forward = SeqPE.forward

    def watched(self: SeqPE, positions: Tensor, **options: Any) -> Tensor:
        seen.append(positions.device.type)
        return forward(self, positions, **options)

    monkeypatch.setattr(SeqPE, "forward", watched)
    return seen


def test_positions_that_the_host_knows_are_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a model without positions of its own SeqPE gets them on the CPU; given on a device they are copied."""
    seen = positions_copied(monkeypatch)
    ids = torch.randint(0, 50, (2, 9)).to(device)
    with hf.encode_positions(
        tiny("gpt2", pad_token_id=0).float().to(device), encoding("seqpe-bias").to(device)
    ) as model:
        model(ids)
        model(ids, position_ids=torch.arange(9, device=device)[None])
    GPT(50, 48, 2, 4, encoding("seqpe-sum"), style="gpt2").to(device)(ids)
    position = test_encode_images.encoding("seqpe-bias", "ViT").float().to(device)
    with hf.encode_positions(test_encode_images.model_of("ViT").float().to(device), position) as model:
        model(test_encode_images.images(4, 4).float().to(device)).logits.sum().backward()
    assert seen == ["cpu", device, "cpu", "cpu"]


def test_recorder(device: str) -> None:
    ids = text() % 50
    maps = []
    for where, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        model = tiny("llama").to(where, dtype)
        with AttentionRecorder() as recorder, hf.attach(model):
            model(ids.to(where))
        assert len(recorder.maps) == 2
        maps.append([there(its.weights, "cpu") for its in recorder.maps])
    for mine, exact in zip(*maps, strict=True):
        close(mine, exact)


@pytest.mark.parametrize("make", COMPRESSORS.values(), ids=COMPRESSORS)
def test_a_compressor_encodes_decodes_and_generates(device: str, make: Callable[[], Any]) -> None:
    """As on the CPU: hidden states within rounding, the same tokens."""
    rows, prompts = text().tolist(), [[5, 6, 7], [9]]
    found = []
    for where in (device, "cpu"):
        compressor = make().to(where).eval()
        with torch.no_grad():
            memory = compressor.encode(rows)
            hidden = there(compressor.decode(memory, "lm", text(tokens=5)), where)
            answer = there(compressor.generate(memory, prompts, max_new_tokens=4), where)
        found.append((hidden, answer.cpu()))
    (mine, answer), (expected, plain) = found
    close(mine, expected)
    assert torch.equal(answer, plain)


@pytest.mark.parametrize("make", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_host_waits_for_nothing_but_a_tokens_id(device: str, make: Callable[[], Any], rows: int) -> None:
    compressor = make().to(device).train()
    ids = torch.arange(rows * 40).view(rows, 40) % 40 + 3

    def step() -> None:
        for _, parameter in compressor.trainable():
            parameter.grad = None
        compressor(ids, **({"continuation_ids": ids} if "lm" in compressor.loss_weights else {}))["loss"].backward()

    step()
    compressor.eval()
    # Fingerprints are made once, from the weights on the host; plans once for each length.
    memory = compressor.encode(ids)
    prompt = ids[:, :4]
    compressor.generate(memory, prompt_ids=prompt, max_new_tokens=4)
    # Dodo's positions are those of the nuggets that the scores chose, after a look whether these are numbers.
    chosen = 2 if isinstance(compressor, Dodo) else 0
    with _waits(device) as found:
        compressor.encode(ids)
        compressor.check_readable(memory)
        compressor.decode(memory, "qa", prompt)
    assert len(found) == chosen, found
    compressor.train()
    with _waits(device) as found:
        step()
    assert len(found) == chosen, found


@contextmanager
def _waits(device: str) -> Iterator[list[Any]]:
    if device == NAME:
        with waits() as found:
            yield found
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield told
        told[:] = [one for one in told if "called a synchronizing" in str(one.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_norms_are_one_operation_each(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family).float().to(device)
    ids = (torch.arange(2 * 9).view(2, 9) + 3).to(device)
    wanted = model(ids).logits
    norm = type(model.model.norm)
    with hf.attach(model):
        monkeypatch.setattr(norm, "forward", None)
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)


def test_rows_of_a_rope_that_depends_on_their_length(device: str) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    settings = {"max_position_embeddings": 64, "rope_parameters": rope}
    rows = [list(range(2, 42)) * 3, list(range(5, 25))]
    compressors = [FiveHundredX(tiny("llama", **settings).float(), chunk=16, ratio=4, layout="upl") for _ in range(2)]
    compressors[1].load_state_dict(compressors[0].state_dict())
    expected, found = compressors[0].encode(rows), compressors[1].to(device).encode(rows)
    assert found.lengths == expected.lengths and found.device.type == torch.device(device).type
    for here, on_cpu in zip(found.to("cpu").tensors, expected.tensors, strict=True):
        torch.testing.assert_close(here, on_cpu, rtol=1e-3, atol=1e-3)
    losses = compressors[1](rows, continuation_ids=[[3, 4], [5]])
    losses["loss"].backward()
    assert bool(losses["loss"].isfinite())


@grid("make", COMPRESSORS.values(), here=NAME, indirect=["device"])
def test_a_memory_goes_to_disk_and_a_compressor_is_evaluated(
    device: str, make: Callable[[], Any], tmp_path: Path
) -> None:
    compressor, rows = make().to(device).eval(), text()
    with torch.no_grad():
        memory = compressor.encode(rows)
        memory.save(tmp_path / "memory.gist")
        again = Memory.load(tmp_path / "memory.gist", device=device)
        found = [compressor.decode(its, "lm", rows[:, :3]) for its in (memory, again, again.to("cpu").to(device))]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    examples, losses = [Example(row, [40, 41, 42]) for row in rows.tolist()], []
    for its in (compressor, make().double().eval()):
        metrics = evaluate(its, examples, tasks=["lm"], progress=False).rows[0].metrics
        losses.append(next(value for name, value in metrics.items() if "loss" in name))
    # As close as their logits (see `close`), of which none is above 10.
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def trained(out: Path, make: Callable[[], Any], *, resume: bool = False) -> list[dict[str, Any]]:
    """Three steps on a GPU; the records without their times."""
    recipe = dataclasses.replace(train_worker.RECIPE, steps=3)
    options = {"progress": False, "eval_every": 3, "held_out": 4, "save_every": 1, "keep": 9}
    trainer = Trainer(make(), train_worker.make_batches(recipe), recipe, out, **options)
    trainer.train(resume=resume)
    assert all(parameter.device.type == "cuda" for _, parameter in trainer.compressor.trainable())
    return train_worker.numbers(read_metrics(out / "metrics.jsonl"))


@pytest.mark.slow
@gpu
@pytest.mark.parametrize("make", [*COMPRESSORS.values(), READERS["mixed"]])
def test_training_goes_on_bit_for_bit(make: Callable[[], Any], tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", make)
    losses = [record["loss"] for record in whole if "loss" in record]
    assert len(losses) == 3 and losses[2] != losses[0]
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "whole", again)
    for path in checkpoints.find(again)[1:]:
        shutil.rmtree(path)
    assert trained(again, make, resume=True) == whole
    start, *_, first = checkpoints.find(tmp_path / "whole")
    second = checkpoints.find(again)[-1]
    assert (first.name, _tensors(first)) == (second.name, _tensors(second)) and _tensors(first) != _tensors(start)


def _tensors(path: Path) -> bytes:
    """A checkpoint's weights behind their header, which holds times."""
    content = (path / checkpoints.WEIGHTS).read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


@pytest.mark.parametrize("make", READERS.values(), ids=READERS)
def test_reading_on(device: str, make: Callable[[], Any]) -> None:
    """Token by token as in one pass on the CPU in double precision."""
    reader, exact = make(), make()
    reader.compressor.to(device).eval()
    exact.compressor.double().eval()
    ids = text(tokens=20)
    if hasattr(reader, "calibrate"):
        exact.calibrate([ids])
        reader.compressor.threshold = exact.compressor.threshold
    with torch.no_grad():
        expected = exact.hidden(exact.rows(ids))
        stream = reader.start([row[:6].tolist() for row in ids])
        close(there(stream.last, device), expected[:, 6])
        for step in range(6, 20):
            close(stream.step(ids[:, step]), expected[:, step + 1])


@pytest.mark.nightly
def test_study(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = pytest.importorskip("gistkit_lab.cli.study", reason="./lab is not installed")
    if device == NAME:
        monkeypatch.setattr("gistkit_lab.cli.study.device", lambda name: name)
    out, parser = tmp_path / "epl", Parser()
    study.add(parser.add_subparsers(parser_class=LateParser))
    words = ["study", "epl", "--device", device, "--steps", "2", "--layouts", "epl", "--out", str(out)]
    options = parser.parse_args(words)
    assert options.run(options) == 0
    assert (out / "results.jsonl").exists() and "EPL" in capsys.readouterr().out


def test_what_is_pretended_refuses_what_a_gpu_does() -> None:
    with pretending() as name:
        a, b = torch.ones(3, device=name), torch.ones(3)
        with pytest.raises(RuntimeError, match="expected all tensors on one device, got pretend and cpu"):
            a + b
        with pytest.raises(TypeError, match="can't convert pretend:0 device type tensor to numpy"):
            a.numpy()
        with pytest.raises(RuntimeError, match="device type for generator"):
            torch.rand(3, device=name, generator=torch.Generator())
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            torch.nn.functional.embedding(torch.tensor([1]), torch.ones(3, 2, device=name))
        moved = b.to(name).requires_grad_()
        (moved * a).sum().backward()
        assert moved.grad is not None and moved.grad.device.type == name and moved.sum().item() == 3
        assert torch.equal((moved * 2).cpu(), torch.full((3,), 2.0)) and b[torch.arange(2)].device.type == "cpu"
