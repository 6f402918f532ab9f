"""Memory files on damaged disks: every flipped bit is found, files without a checksum say so, writers do not meet."""

import json
import random
import warnings
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gistkit.compress import (
    ICAE,
    SAC,
    AvgPool,
    Beacon,
    Dodo,
    FiveHundredX,
    Gist,
    GistPool,
    Memory,
    Select,
    SeparateEncoder,
)
from gistkit.compress.memory_files import _checksum
from tests.helpers.fuzz import rounds
from tests.helpers.hostile import changed_json, changed_tensors
from tests.helpers.models import tiny_llama

CONTEXTS = [list(range(1, 14)), list(range(20, 26))]
METHODS = {"embeddings": ICAE, "keys": FiveHundredX}


@pytest.fixture(scope="module", params=METHODS)
def compressor(request):
    return METHODS[request.param](tiny_llama(hidden_size=16), chunk=6, ratio=3, lora=None, window=12)


@pytest.fixture(scope="module")
def memory(compressor):
    return compressor.encode(CONTEXTS)


def parts(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def flipped(whole, bit):
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def refused(path, **options):
    """Whether the file is refused, with an error that names it."""
    try:
        Memory.load(path, **options)
    except ValueError as error:
        assert str(error).startswith(f"{path}: expected ")
        return True
    return False


def test_flipped_bits_of_a_sample_are_refused(memory, tmp_path):
    path = tmp_path / "m.gist"
    memory.save(path)
    whole = path.read_bytes()
    generator = random.Random(0)
    # The header's bits and the tensors' bits, whose share of the file depends on the memory.
    end = 8 + int.from_bytes(whole[:8], "little")
    bits = [generator.randrange(end * 8) for _ in range(120)]
    bits += [generator.randrange(end * 8, len(whole) * 8) for _ in range(120)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bit in bits:
            path.write_bytes(flipped(whole, bit))
            assert refused(path), bit
        path.write_bytes(whole)
        Memory.load(path)


def test_the_checksum_is_the_crc_of_what_the_file_holds(memory, tmp_path):
    """Recomputed from the file's bytes, by numpy."""
    path = tmp_path / "m.gist"
    memory.save(path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    listed = json.loads(whole[8:start])
    content = listed.pop("__metadata__")
    dtypes = {"I64": "torch.int64", "F64": "torch.float64", "F32": "torch.float32"}
    names = sorted(listed)
    kinds = [[name, dtypes[listed[name]["dtype"]], listed[name]["shape"]] for name in names]
    data = json.dumps([content["memory"], kinds]).encode()
    for name in names:
        begin, end = listed[name]["data_offsets"]
        data += np.frombuffer(whole[start + begin : start + end], np.uint8).tobytes()
    assert content["checksum"] == f"crc32:{zlib.crc32(data):08x}"


def test_a_swapped_tensor_and_changed_metadata_are_refused(memory, tmp_path):
    path = tmp_path / "m.gist"
    memory.save(path)
    header, tensors = parts(path)
    content = json.loads(header["memory"])
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() > 2]
    changes = {
        "a tensor": (header, tensors | {names[0]: tensors[names[0]] * 2}),
        "a dtype": (header, tensors | {names[0]: tensors[names[0]].view(torch.int64).view(torch.float64).float()}),
        "a name": (header, {f"{name}x" if name == names[-1] else name: t for name, t in tensors.items()}),
        "a number": (header | {"memory": json.dumps(content | {"starts": [9, 9]})}, tensors),
        "the checksum": (header | {"checksum": "crc32:00000000"}, tensors),
        "no checksum": ({k: v for k, v in header.items() if k != "checksum"}, tensors),
        "its name": ({"check": header["checksum"]} | {k: v for k, v in header.items() if k != "checksum"}, tensors),
    }
    for what, (new, changed) in changes.items():
        save_file(changed, path, metadata=new)
        with pytest.raises(ValueError, match=r"expected contents of the checksum .*the file is damaged; verify=False"):
            Memory.load(path)
        if what not in ("a dtype", "a name"):
            assert Memory.load(path, verify=False).lengths == memory.lengths, what


def test_a_memory_made_with_nan_is_the_users_own(memory, tmp_path):
    path = tmp_path / "m.gist"
    memory._with(lambda tensor: tensor * float("nan")).save(path)
    assert Memory.load(path).tensors[0].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_tokens": 10**9}, ".*chunk .* and memory_tok"),
        ({"chunk": 2**40}, ".*chunk .* and memory_tok"),
        *(({"documents": documents}, "(documents|rows)") for documents in (((1, 2), (3,)), ((0, 12), (6,)), ((12,),))),
    ],
)
def test_what_a_memory_cannot_have_is_refused(memory, change, message, tmp_path):
    path = tmp_path / "m.gist"
    changed = change if "documents" in change else {"source": replace(memory.source, **change)}
    replace(memory, **changed).save(path)
    with pytest.raises(ValueError, match=rf"m\.gist: expected the contents of a memory, got {message}"):
        Memory.load(path)


@pytest.mark.parametrize("lengths", [(2**33,), (1,)])
def test_heads_of_different_lengths_have_that_of_the_longest(lengths, tmp_path):
    compressor = Select(tiny_llama(hidden_size=16), ratio=3, by="key_norm", shares="all", bos_token=1)
    memory = compressor.encode(CONTEXTS[:1])
    replace(memory, lengths=lengths).save(tmp_path / "m.gist")
    assert refused(tmp_path / "m.gist") and memory.lengths != lengths


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"chunk": 6}) for kind in (ICAE, FiveHundredX, SAC)),
        (SeparateEncoder, {"segment": 6}),
        *((kind, {"bos_token": 1, "separate_positions": own}) for kind in (Gist, GistPool) for own in (False, True)),
        *((kind, {"bos_token": 1}) for kind in (AvgPool, Beacon)),
        (Dodo, {"bos_token": 1, "layer": 1, "selection": "strided"}),
    ],
)
def test_a_context_that_a_file_only_claims_costs_nothing(kind, options):
    compressor = kind(tiny_llama(hidden_size=16), ratio=3, lora=2, **options)
    memory = compressor.encode(CONTEXTS[:1])
    for size in range(1, 30):
        assert compressor.size(size) == compressor.encode([[2] * size]).lengths[0] - compressor.shared_columns
    # Of any number of tokens for each memory token, if the method has any.
    claimed, ratio = 2**31 - 1, 2**30 if compressor.options.any_ratio else 3
    source = replace(memory.source, chunk=ratio) if compressor.options.any_ratio else memory.source
    forged = replace(memory, source=source, context_lengths=(claimed,), documents=((claimed,),))
    if hasattr(compressor, "start_behind"):
        forged = replace(forged, starts=(compressor.start_behind(forged, claimed),))
    if kind is not Dodo:
        with pytest.raises(ValueError, match=r"memory: expected \d+ memory tokens for its documents, got \d"):
            compressor.context_spans(forged)
    if kind in (Gist, GistPool) and compressor.options.separate_positions:
        with pytest.raises(ValueError, match="memory: expected 2 memory tokens for its documents, got 4"):
            compressor.decode(forged, "lm", [[2]])
    else:
        assert compressor.rotated_over(forged) and compressor.join([forged, forged]).batch_size == 1
    if kind is Dodo:
        for wrong in ({"lengths": (1,)}, {"lengths": (0,)}, {"positions": memory.positions[..., None]}):
            with pytest.raises(ValueError, match="memory: expected positions of BOS and of a nugget for each of 1 doc"):
                compressor.context_spans(replace(memory, **wrong))
    if kind in (Dodo, SAC):
        # Without the padding of other rows.
        ragged = compressor.encode(CONTEXTS[::-1])
        assert compressor.kept_tokens(ragged) == compressor.kept_tokens(ragged[0])


def is_whole(value):
    return isinstance(value, int) and 0 <= value < 2**31


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
def test_changed_files_are_refused_or_bounded(memory, compressor, tmp_path):
    path, loaded = tmp_path / "m.gist", 0
    for seed in rounds(50):
        memory.save(path)
        what = changed_tensors(path, random.Random(seed))
        # The checksum would hide from most changes what is behind it.
        if refused(path, verify=seed % 8 == 0):
            continue
        loaded += 1
        found = Memory.load(path, verify=False)
        assert sum(tensor.nbytes for tensor in found.tensors) <= path.stat().st_size, (seed, what)
        # What loads is read, or refused in the same way.
        try:
            compressor.generate(found, max_new_tokens=1)
        except ValueError as error:
            assert "expected" in str(error), (seed, what, error)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    assert 0 < loaded < seed / 2


@pytest.mark.fuzz
def test_forged_contents_are_refused_or_a_legal_memory(memory, tmp_path):
    """With the checksum of what was forged."""
    path, content = tmp_path / "m.gist", tmp_path / "content.json"
    memory.save(path)
    header, tensors = parts(path)
    loaded = 0
    for seed in rounds(60):
        content.write_text(header["memory"])
        what = changed_json(content, random.Random(seed))
        forged = content.read_bytes().decode("utf-8", "replace")
        save_file(tensors, path, metadata=header | {"memory": forged, "checksum": _checksum(forged, tensors)})
        try:
            found = Memory.load(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: expected ") and len(str(error)) < 1000, what
            assert "\n" not in str(error), what
            continue
        loaded += 1
        assert len(repr(found)) < 300 and found.batch_size == memory.batch_size, what
        assert all(map(is_whole, (*found.lengths, *found.context_lengths, *found.starts))), what
        assert [sum(row) for row in found.documents] == [*found.context_lengths], what
        assert all(map(is_whole, (token for row in found.rest for token in row))), what
        assert all(value is None or isinstance(value, str) for value in (found.fingerprint, found.maker)), what
    assert 0 < loaded < seed / 2


def test_positions_of_another_kind_are_refused(memory, compressor, tmp_path):
    three_axes = replace(memory, positions=memory.positions[..., None].expand(-1, -1, 3).contiguous())
    cases = [(three_axes, "positions of shape")]
    if memory.embeddings is not None:
        floats = replace(memory, positions=memory.positions.double())
        cases.append((floats, r"positions of dtype int64, got torch\.float64"))
    else:
        flat = replace(memory, key_bias=torch.zeros(memory.positions.shape))
        cases.append((flat, "key_bias of shape"))
    for wrong, message in cases:
        with pytest.raises(ValueError, match=f"memory: expected {message}"):
            compressor.decode(wrong, "lm", [[1], [2]])
    replace(memory, positions=three_axes.positions[..., :0]).save(tmp_path / "m.gist")
    assert refused(tmp_path / "m.gist")
