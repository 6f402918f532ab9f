"""Memory: rows, joining, bytes, and files that are refused when they are not what they should be."""

import json
import warnings
from dataclasses import replace

import accelerate
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gistkit.compress import ICAE, FiveHundredX, Memory, Select, memory_files
from tests.helpers.models import TOLERANCE, tiny_llama

METHODS = [ICAE, FiveHundredX]


def build(method, model=None, **settings):
    return method(tiny_llama() if model is None else model, **{"chunk": 6, "ratio": 3, "lora": None, **settings})


def encode(compressor, contexts):
    with torch.no_grad():
        return compressor.encode(contexts)


def assert_same(a, b):
    for name in ("source", "lengths", "context_lengths", "starts", "rest", "fingerprint", "maker"):
        assert getattr(a, name) == getattr(b, name), name
    assert torch.equal(a.positions, b.positions)
    assert len(a.tensors) == len(b.tensors) and all(map(torch.equal, a.tensors, b.tensors))


WRONG = [{"chunk": 0}, {"chunk": "6"}, {"memory_tokens": 0}, {"layout": None}]
CONTEXTS = [list(range(1, 14)), list(range(20, 26)), list(range(30, 39))]


@pytest.mark.parametrize("method", METHODS)
def test_rows_stack_and_repeat(method):
    compressor = build(method)
    memory = encode(compressor, CONTEXTS)
    rows = [memory[row] for row in range(3)]
    for row, context in zip(rows, CONTEXTS, strict=True):
        alone = encode(compressor, [context])
        assert row.lengths == alone.lengths and row.num_tokens == alone.num_tokens
        torch.testing.assert_close(row.tensors, alone.tensors, **TOLERANCE)
    assert_same(memory[1:], memory[[1, 2]])
    stacked = Memory.stack(rows)
    assert stacked.lengths == memory.lengths
    assert torch.equal(compressor.generate(stacked, max_new_tokens=3), compressor.generate(memory, max_new_tokens=3))
    assert torch.equal(compressor.generate(rows[1].repeat(2), max_new_tokens=3)[1:],
                       compressor.generate(rows[1], max_new_tokens=3))  # fmt: skip
    with pytest.raises(ValueError, match="repeat: expected a memory of one row and count >= 1, got 3 rows"):
        memory.repeat(2)
    with pytest.raises(ValueError, match="rows: expected at least one of 3 rows, got none"):
        memory[3:]
    with pytest.raises(ValueError, match="stack: expected memories of one source"):
        Memory.stack([rows[0], encode(build(method, layout="dpl"), CONTEXTS)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", ["dpl", "upl", "epl", "cpl"])
def test_joined_documents_equal_chunks_of_one_context(method, scheme):
    compressor = build(method, layout=scheme)
    whole = encode(compressor, [list(range(12)) + list(range(20, 29))])
    parts = [encode(compressor, [list(range(12))]), encode(compressor, [list(range(20, 29))])]
    joined = compressor.join(parts)
    assert joined.starts == whole.starts and joined.context_lengths == whole.context_lengths
    assert torch.equal(joined.positions, whole.positions)
    torch.testing.assert_close(joined.tensors, whole.tensors, **TOLERANCE)
    ragged = compressor.join([encode(compressor, CONTEXTS), encode(compressor, CONTEXTS[::-1])])
    for row, (first, second) in enumerate(zip(CONTEXTS, CONTEXTS[::-1], strict=True)):
        alone = compressor.join([encode(compressor, [first]), encode(compressor, [second])])
        assert ragged[row].lengths == alone.lengths and torch.equal(ragged[row].positions, alone.positions)
        assert not ragged.positions[row, ragged.lengths[row] :].any()
        torch.testing.assert_close(ragged[row].tensors, alone.tensors, **TOLERANCE)
    with pytest.raises(ValueError, match="memories: expected at least one, got none"):
        compressor.join([])
    with pytest.raises(TypeError, match="memory: expected a Memory as encode returns, got str"):
        compressor.join([joined, "a text"])


def test_a_file_with_frequencies_of_its_keys_still_loads(tmp_path):
    memory = encode(build(FiveHundredX), CONTEXTS)
    tensors, header = memory_files.packed(memory)
    tensors |= {f"layers.{layer}.frequencies": torch.ones(3, 6) for layer in range(2)}
    header[memory_files.CHECKSUM] = memory_files._checksum(header["memory"], tensors)
    save_file(tensors, tmp_path / "m.gist", metadata=header)
    found = Memory.load(tmp_path / "m.gist")
    assert found.source == memory.source and all(map(torch.equal, found.tensors, memory.tensors))


def test_bytes_against_the_full_cache():
    compressor = build(FiveHundredX)
    memory = encode(compressor, CONTEXTS)
    # Two layers, keys and values, two heads of 12 numbers of 8 bytes.
    assert memory.nbytes == (6 + 2 + 4) * 2 * 2 * 2 * 12 * 8
    assert memory.full_cache_bytes == (13 + 6 + 9) * 2 * 2 * 2 * 12 * 8
    whole_chunks = encode(compressor, [list(range(12))])
    assert whole_chunks.full_cache_bytes == 3 * whole_chunks.nbytes


@pytest.mark.parametrize("method", METHODS)
def test_files_that_are_no_memory_are_refused(method, tmp_path):
    path = tmp_path / "m.gist"
    encode(build(method), CONTEXTS).save(path)
    whole = path.read_bytes()
    with pytest.raises(FileNotFoundError, match="expected a memory file, found none"):
        Memory.load(tmp_path / "none.gist")
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="expected a memory file, got one that is cut short or no safetensors"):
            Memory.load(path)
    path.write_bytes(b"PK\x03\x04" * 50)
    with pytest.raises(ValueError, match="expected a memory file"):
        Memory.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="expected a file of format gistkit-memory, got format None"):
        Memory.load(path)


@pytest.mark.parametrize("method", METHODS)
def test_contents_that_are_no_memory_are_refused(method):
    tensors, header = memory_files.packed(encode(build(method), CONTEXTS))
    content = json.loads(header["memory"])
    few = {"positions": tensors["positions"]}
    for broken, given in (
        ({key: value for key, value in content.items() if key != "starts"}, tensors),
        *((content | {"lengths": lengths}, tensors) for lengths in ([1, 2], [100, 1, 1])),
        *((content | {"layers": layers}, tensors) for layers in (9, 10**12)),
        *((content | {"starts": [start] * 3}, tensors) for start in (1e400, -1)),
        *((content | {"source": source}, tensors) for source in ({}, *(content["source"] | each for each in WRONG))),
        (content | {"layers": 0}, few),
    ):
        with pytest.raises(ValueError, match=r"m\.gist: expected the contents of a memory"):
            memory_files.unpacked(Memory, "m.gist", header | {"memory": json.dumps(broken)}, given, verify=False)
    with pytest.raises(ValueError, match="expected version 2 or 3 of gistkit-memory, got version 4"):
        memory_files.unpacked(Memory, "m.gist", header | {"version": "4"}, tensors, verify=False)


@pytest.mark.parametrize("method", METHODS)
def test_a_memory_of_another_kind_or_model_is_refused(method, tmp_path):
    memory = encode(build(method), CONTEXTS)
    readers = [build(next(other for other in METHODS if other is not method)), build(method, layout="dpl")]
    readers.append(build(method, tiny_llama(num_hidden_layers=1)))
    for reader in readers:
        with pytest.raises(ValueError, match=r"memory: expected one made with \w+ \S"):
            reader.generate(memory, max_new_tokens=2)
    other = build(method)
    with torch.no_grad():
        other.model.lm_head.weight.add_(1.0)
    with pytest.raises(
        ValueError, match=r"memory: expected one of the base model .*of the same shape with other weights"
    ):
        other.generate(memory, max_new_tokens=2)


@pytest.mark.parametrize("method", METHODS)
def test_a_memory_shares_nothing_with_the_next(method):
    compressor = build(method)
    memory = encode(compressor, CONTEXTS)
    expected = memory.positions.clone()
    memory.positions.zero_()
    assert torch.equal(encode(compressor, CONTEXTS).positions, expected)


def test_rows_that_are_not_there_are_named():
    memory = encode(build(ICAE), CONTEXTS)
    assert memory[np.int64(1)].lengths == memory.lengths[1:2]
    masks = ((torch.tensor(mask), TypeError) for mask in ([True, False, True], True))
    for rows, error in (
        (3, IndexError),
        ([0, 7], IndexError),
        (0.5, TypeError),
        ([True, False, True], TypeError),
        *masks,
    ):
        with pytest.raises(error, match="rows: expected some of 3 rows"):
            memory[rows]


@pytest.mark.parametrize("method", METHODS)
def test_tensors_and_tokens_that_a_model_cannot_read_are_refused(method):
    compressor = build(method)
    memory = encode(compressor, CONTEXTS)
    short = memory._with(lambda tensor: tensor[..., :-1])
    other = next(kind for kind in METHODS if kind is not method)
    swapped = encode(build(other), CONTEXTS)
    for wrong in (short, replace(memory, embeddings=swapped.embeddings, layers=swapped.layers)):
        with pytest.raises(ValueError, match=r"memory: expected .* tensors"):
            compressor.generate(wrong, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"memory: expected token ids in \[0, 50\), got 50"):
        compressor.generate(replace(memory, rest=((50,), (), ())), max_new_tokens=2)


def test_only_like_memories_are_put_together():
    compressor = build(FiveHundredX)
    memory = encode(compressor, CONTEXTS)
    with pytest.raises(ValueError, match=r"stack: expected memories of one device and dtype, got .*use memory\.to"):
        Memory.stack([memory, memory.to(dtype=torch.float16)])
    with pytest.raises(ValueError, match=r"stack: expected memories of one base model, got .* and .*: other weights"):
        Memory.stack([memory, replace(memory, fingerprint="other")])
    with pytest.raises(ValueError, match=r"memories: expected torch\.float64 in each, got one of torch\.float16"):
        compressor.join([memory, memory.to(dtype=torch.float16)])


def test_a_memory_says_which_weights_made_it(tmp_path):
    compressor, ids = build(FiveHundredX), torch.randint(0, 50, (1, 8))
    memory = compressor.encode(ids)
    assert memory.maker == compressor.own_fingerprint() == build(FiveHundredX).own_fingerprint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compressor.decode(memory, "lm", ids)
    with torch.no_grad():
        compressor.memory_embeddings.mul_(2)
    assert compressor.own_fingerprint() != memory.maker
    with pytest.warns(UserWarning, match="memory: expected one that this compressor made"):
        compressor.decode(memory, "lm", ids)
    with pytest.raises(ValueError, match="stack: expected memories of one compressor"):
        Memory.stack([memory, compressor.encode(ids)])


def test_a_weight_that_another_takes_the_place_of_counts():
    compressor = build(ICAE)
    before, own = compressor.fingerprint(), compressor.own_fingerprint()
    layer = compressor.model.model.layers[1].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.detach() + 1)
    changed = compressor.fingerprint()
    assert changed != before and compressor.own_fingerprint() == own
    layer.down_proj = torch.nn.Linear(layer.down_proj.in_features, layer.down_proj.out_features, bias=False).double()
    assert compressor.fingerprint() not in (before, changed)
    compressor.memory_embeddings = torch.nn.Parameter(compressor.memory_embeddings.detach() + 1)
    assert compressor.own_fingerprint() != own


@pytest.mark.parametrize("change", ["data", "fused"])
def test_weights_that_change_without_a_new_version_count(change):
    # Neither `.data` nor torch's fused optimizers raise a tensor's version.
    compressor = build(FiveHundredX)
    ids = torch.randint(0, 50, (1, 12))
    memory = encode(compressor, ids)
    weights = list(compressor.parameters())
    if change == "data":
        for weight in weights:
            weight.data.mul_(1.5)
    else:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(weights, fused=True).step()
    assert compressor.fingerprint() != memory.fingerprint and compressor.own_fingerprint() != memory.maker
    with pytest.raises(ValueError, match=r"memory: expected one of the base model .* with other weights"):
        compressor.decode(memory, "lm", ids)


def test_layers_elsewhere_are_refused():
    model = tiny_llama()
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="model: expected all weights on one device for a selection, got cpu, meta"):
        Select(model)
    model = tiny_llama()
    accelerate.cpu_offload(model.model.layers[1], "cpu")
    with pytest.raises(ValueError, match=r"model: expected weights that stay on a device, got some on device meta"):
        build(FiveHundredX, model=model)
    compressor = build(FiveHundredX)
    accelerate.cpu_offload(compressor.model, "cpu")
    for refused in (lambda: build(FiveHundredX, model=compressor.model), lambda: compressor.encode(CONTEXTS)):
        with pytest.raises(ValueError, match=r"model: expected weights that stay .*accelerate\.cpu_offload"):
            refused()
