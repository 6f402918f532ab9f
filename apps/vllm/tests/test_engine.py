"""The connector in vLLM's engine, without a server: the same tokens as gistkit, and errors that end one request."""

import pytest
from vllm_env import answers, exported, passages, smollm2_compressor, vllm_python, written

from gistkit_vllm import memory_files

pytestmark = pytest.mark.nightly
ASKED = "What is this about?"
NAMES = [f"part {number}" for number in range(16)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A served folder of 16 memories of AvgPool, what gistkit writes to each, and prompts with their placeholders."""
    vllm_python()
    place = tmp_path_factory.mktemp("engine")
    compressor = smollm2_compressor("smollm2-avgpool-2x")
    want, files = {}, []
    for name, ids in zip(NAMES, passages(compressor.tokenizer, len(NAMES)), strict=True):
        # Of several lengths, and none a multiple of a block's.
        memory = compressor.encode([ids[: 40 + 3 * len(files)]])
        files.append(place / f"{name}.gist")
        memory.save(files[-1])
        want[name] = written(compressor, memory, ASKED)
    exported("smollm2-avgpool-2x", "--out", place / "served", "--merged", "--memories", *files)
    store = place / "served" / memory_files.MEMORIES
    requests = {}
    for name, (prompt, _) in want.items():
        about, _ = memory_files.about(store, name)
        requests[name] = {"ids": [about.placeholder] * about.tokens + prompt, "memory": name}
    return place / "served", store, {name: tokens for name, (_, tokens) in want.items()}, requests


CASES = {
    "prefix cache": {},
    "blocks of 32, 16 tokens a pass": {"block_size": 32, "max_num_batched_tokens": 16, "max_num_seqs": 16},
    # Room for a few requests: others are put off and load their memory again.
    "preemption": {
        "enable_prefix_caching": False, "block_size": 32, "num_gpu_blocks_override": 16, "max_model_len": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_sixteen_memories_side_by_side_give_gistkits_own_tokens(world, case):
    folder, store, want, requests = world
    longer = [{**requests[name], "sampling": {"max_tokens": 100, "ignore_eos": True}} for name in NAMES[:4]]
    batches = [list(requests.values()), list(requests.values()), *([one] for one in longer), longer]
    got = answers(folder / "reader", store, batches, **CASES[case])
    for batch in got["answers"][:2]:
        assert [one["tokens"] for one in batch] == list(want.values())
    alone = [one["tokens"] for (one,) in got["answers"][2:6]]
    assert [one["tokens"] for one in got["answers"][6]] == alone
    assert (got["preemptions"] > 0) == (case == "preemption")


def test_what_cannot_be_read_fails_its_own_request(world):
    folder, store, want, requests = world
    first, others = requests[NAMES[0]], [requests[name] for name in NAMES[1:4]]
    path = memory_files.path_of(store, NAMES[0])
    # A header that is right, before values that are not; a file that ends too early; a memory of another reader.
    content = path.read_bytes()
    memory_files.path_of(store, "damaged").write_bytes(content[:-4] + bytes(4))
    memory_files.path_of(store, "short").write_bytes(content[: len(content) // 2])
    memory_files.path_of(store, "another's").write_bytes(
        content.replace(memory_files.reader_of(folder).encode(), b"0" * 50, 1)
    )
    bad = {
        "damaged": {**first, "memory": "damaged"},
        "short": {**first, "memory": "short"},
        "of another reader": {**first, "memory": "another's"},
        "missing": {**first, "memory": "nothing"},
        "a path": {**first, "memory": "../reader/model"},
        "no name": {**first, "memory": 7},
        "too few placeholders": {**first, "ids": first["ids"][1:]},
        "no prompt": {**first, "ids": first["ids"][: first["ids"].count(first["ids"][0])]},
        "one token": {**first, "memory": "nothing", "ids": [5]},
        "the prompt's logprobs": {**first, "sampling": {"prompt_logprobs": 1}},
    }
    plain = {"ids": first["ids"]}
    got = answers(folder / "reader", store, [[*others, one] for one in bad.values()] + [[first], [plain], [first]])
    for name, batch in zip(bad, got["answers"], strict=False):
        assert batch[-1]["reason"] == "error", name
        assert [one["tokens"] for one in batch[:3]] == [want[other] for other in NAMES[1:4]], name
    (before,), (placeholders,), (behind,) = got["answers"][-3:]
    assert before["tokens"] == behind["tokens"] == want[NAMES[0]]
    # The same ids without a memory find no block of one.
    assert placeholders["tokens"] != want[NAMES[0]]
