"""Requests that save their prompts: another engine on the folder answers from them as behind the text itself."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_env import answers, exported, passages, smollm2_compressor, vllm_python

from gistkit_vllm import memory_files

pytestmark = pytest.mark.nightly
QUESTION = "\n### Question:\nWhat is this about?\n### Answer:\n"
ONE = {"sampling": {"max_tokens": 1}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The plain model in a folder, texts' token ids, a question's, and the folder of AvgPool's readers and a memory."""
    vllm_python()
    place = tmp_path_factory.mktemp("save")
    compressor = smollm2_compressor("smollm2-avgpool-2x")
    tokenizer = compressor.tokenizer
    texts = passages(tokenizer, 6, 150)
    compressor.encode([texts[0]]).save(place / "first.gist")
    for name, words in {"merged": ["--merged"], "lora": []}.items():
        exported("smollm2-avgpool-2x", "--out", place / name, *words, "--memories", place / "first.gist")
    from gistkit.hf.smollm2 import load_smollm2

    model, _ = load_smollm2()
    for saved in (model, tokenizer):
        saved.save_pretrained(place / "base")
    return place, texts, tokenizer(QUESTION, add_special_tokens=False)["input_ids"], model


def behind(store, name, ids, **more):
    """A request that reads a memory."""
    about, _ = memory_files.about(store, name)
    return {"ids": [about.placeholder] * about.tokens + ids, "memory": name, **more}


def tokens(batch):
    assert all(one["reason"] != "error" for one in batch)
    return [one["tokens"] for one in batch]


CASES = {
    "prefix cache": {},
    "blocks of 32, 16 tokens a pass": {"block_size": 32, "max_num_batched_tokens": 16, "max_num_seqs": 16},
    "preemption": {
        "enable_prefix_caching": False, "block_size": 32, "num_gpu_blocks_override": 20, "max_model_len": 320,
        "max_num_batched_tokens": 64, "max_num_seqs": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_second_engine_answers_behind_saved_texts_as_behind_the_texts(world, tmp_path, case):
    place, texts, question, model = world
    # Of several lengths; the first begins with what the cache has, and one is as long as whole blocks.
    texts = [ids[: 128 + 5 * number] for number, ids in enumerate(texts)]
    names = [f"texts/{number}" for number in range(len(texts))]
    longer = {"sampling": {"max_tokens": 100, "ignore_eos": True}}
    saves = [{"ids": ids, "save": name, **longer} for name, ids in zip(names, texts, strict=True)]
    plain = [{"ids": ids + question} for ids in texts]
    taken = {"ids": texts[1], "save": names[0], **ONE}
    batches = [[{"ids": texts[0][:100], **ONE}], saves, plain, [saves[0], taken], plain[:1]]
    got = answers(place / "base", tmp_path, batches, save=True, **CASES[case])
    _, saved, want, (again, refused), alive = got["answers"]
    assert [one["params"] for one in saved] == [{"saved": name} for name in names]
    assert (saved[0]["cached"] > 0) == (case.startswith("blocks"))
    assert (got["preemptions"] > 0) == (case == "preemption")
    assert again["params"] == {"saved": names[0]}
    assert "expected a new name or the same prompt's" in refused["params"]["error"] and len(refused["tokens"]) == 1
    assert alive[0]["tokens"] == want[0]["tokens"]
    for name, ids in zip(names, texts, strict=True):
        about, _ = memory_files.about(tmp_path, name)
        assert (about.tokens, about.context_tokens) == (len(ids), len(ids)) and about.reader.startswith("files:")
        with torch.no_grad():
            cache = model(torch.tensor([ids]), use_cache=True).past_key_values
        own = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]).transpose(2, 3)
        torch.testing.assert_close(memory_files.values(tmp_path, name, about.digest), own, atol=2e-3, rtol=2e-3)

    files = sorted(tmp_path.iterdir())
    reads = [behind(tmp_path, name, question) for name in names]
    only = {"ids": texts[0], "save": "another", **ONE}
    got = answers(place / "base", tmp_path, [reads, reads[::-1], [only]], **CASES[case])
    first, second, ((refused),) = got["answers"]
    assert tokens(first) == tokens(second)[::-1] == tokens(want)
    assert [one["cached"] for one in first] == [len(ids) for ids in texts]
    assert "expected an engine that saves, got one that only reads" in refused["params"]["error"]
    assert sorted(tmp_path.iterdir()) == files


def test_readers_save_for_each_other_and_other_weights_are_refused(world, tmp_path):
    """A merged reader's memories for the adapter on its base model, and back; one that goes on from a memory."""
    place, texts, question, _ = world
    store = tmp_path / "store"
    shutil.copytree(place / "merged" / memory_files.MEMORIES, store)
    text, more = texts[1], texts[2][:40]
    batches = [
        [{"ids": text, "save": "text", **ONE}, behind(store, "first", more, save="first and more", **ONE)],
        [{"ids": text + question}, behind(store, "first", more + question)],
    ]
    got = answers(place / "merged" / "reader", store, batches, save=True)
    assert [one["params"] for one in got["answers"][0]] == [{"saved": "text"}, {"saved": "first and more"}]
    want = tokens(got["answers"][1])
    first, both = (memory_files.about(store, name)[0] for name in ("first", "first and more"))
    assert both.tokens == first.tokens + 40 and both.context_tokens == first.context_tokens + 40
    assert both.reader == first.reader == memory_files.reader_of(place / "merged" / "reader")

    # The same adapter without what gistkit export says of it is another's.
    shutil.copytree(place / "lora" / "adapter", tmp_path / "another's")
    (tmp_path / "another's" / memory_files.SETTINGS).unlink()
    folders = {"an adapter": place / "lora" / "adapter", "another": tmp_path / "another's"}
    weights = {name: {"lora": str(folder)} for name, folder in folders.items()} | {"the base": {}}
    reads = [behind(store, name, question) for name in ("text", "first and more")]
    batches = [
        [{**one, **weights["an adapter"]} for one in reads],
        [{"ids": text, "save": f"by {name}", **ONE, **own} for name, own in weights.items()],
        [*reads, *({**one, **weights["another"]} for one in reads)],
    ]
    # The last slot stays empty, see gistkit_vllm.launch.
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64}
    got = answers(place / "base", store, batches, save=True, **options)
    assert tokens(got["answers"][0]) == want
    assert [one["params"] for one in got["answers"][1]] == [{"saved": f"by {name}"} for name in weights]
    assert [one["reason"] for one in got["answers"][2]] == ["error"] * 4
    found = [memory_files.about(store, f"by {name}")[0].reader for name in weights]
    assert found[0] == first.reader and found[1].startswith(f"{found[2]}:") and found[2].startswith("files:")

    reads = [behind(store, name, question) for name in ("by an adapter", "by the base")]
    adapted, plain = answers(place / "merged" / "reader", store, [reads])["answers"][0]
    assert adapted["tokens"] == want[0] and plain["reason"] == "error"
    # Another model, of which gistkit export says nothing either.
    shutil.copytree(place / "base", tmp_path / "changed")
    values = load_file(tmp_path / "changed" / "model.safetensors")
    save_file({name: value * 1.01 for name, value in values.items()}, tmp_path / "changed" / "model.safetensors")
    (changed,) = answers(tmp_path / "changed", store, [reads[1:]])["answers"][0]
    assert changed["reason"] == "error"


def test_what_cannot_be_saved_is_told_in_its_answer(world, tmp_path):
    place, texts, question, _ = world
    shutil.copytree(place / "merged" / memory_files.MEMORIES, tmp_path, dirs_exist_ok=True)
    damaged = behind(tmp_path, "first", question, save="after a damaged one")
    path = memory_files.path_of(tmp_path, "first")
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))
    files = sorted(tmp_path.iterdir())
    plain = {"ids": texts[0] + question}
    bad = ["../x", "/x", "a//b", ".", "", 7, None, "x" * 300, "a\nb"]
    batch = [plain, damaged, *({**plain, "save": name} for name in bad)]
    answered = answers(place / "merged" / "reader", tmp_path, [batch, [plain]], save=True)["answers"]
    (want, failed, *got), (alive,) = answered
    assert failed["reason"] == "error" and alive["tokens"] == want["tokens"]
    for name, one in zip(bad, got, strict=True):
        assert one["params"]["error"].startswith("save: expected a name"), name
        assert one["tokens"] == want["tokens"], name
    assert sorted(tmp_path.iterdir()) == files


def test_a_folder_that_takes_no_file_ends_no_request(world):
    """As a full disk or one's rights, but for root too."""
    place, texts, question, _ = world
    plain = {"ids": texts[0] + question}
    batches = [[plain, {**plain, "save": "text"}], [plain]]
    (want, got), (alive,) = answers(place / "base", "/proc", batches, save=True)["answers"]
    assert got["params"] == {"error": "save 'text': not written; the server's log has the reason"}
    assert got["tokens"] == want["tokens"] == alive["tokens"]
