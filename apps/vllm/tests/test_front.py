"""The front: what vLLM's routes receive for a request that names a memory, and who is told that there is none."""

import asyncio
import errno
import json
import os
import tracemalloc
from types import SimpleNamespace

import pytest
import torch

from gistkit_vllm import front, memory_files

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


VALUES = torch.rand(2, 2, 3, 1, 4)
OTHER = {"context_tokens": 9, "placeholder": 7, "text": "<x>", "reader": "r", "tokens": 3}


@pytest.fixture
def store(tmp_path):
    memory_files.add(tmp_path, "2026/märz", VALUES, **OTHER)
    memory_files.add(tmp_path, "embedded", torch.rand(2, 4), **OTHER)
    memory_files.add(tmp_path, "more", VALUES, **OTHER | {"tokens": 10**9})
    with pytest.MonkeyPatch.context() as later:
        later.setattr(memory_files, "asdict", lambda about: vars(about) | {"x": 1})
        memory_files.add(tmp_path, "later", VALUES, **OTHER)
    memory_files.path_of(tmp_path, "cut").write_bytes(memory_files.path_of(tmp_path, "2026/märz").read_bytes()[:100])
    return tmp_path


def call(store, path, body, status=200, method="POST", chunk=7, save=True):
    """Sends a request through the front: what the application behind it received, and what the client did."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = [body[start : start + chunk] for start in range(0, len(body), chunk)] or [b""]
    received, sent = [], []

    async def application(scope, receive, send):
        got = bytearray()
        while True:
            part = await receive()
            got += part["body"]
            if not part["more_body"]:
                break
        received.append((dict(scope["headers"]), bytes(got)))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"vllm"})

    async def receive():
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(part):
        sent.append(part)

    config = SimpleNamespace(
        get_from_extra_config=lambda name, default: {"store": str(store), "save": save}.get(name, default)
    )
    state = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config))
    headers = [(b"Content-Length", str(len(body)).encode()), (b"x-key", b"1")]
    scope = {
        "type": "http", "method": method, "path": path, "headers": headers, "app": SimpleNamespace(state=state),
    }  # fmt: skip
    asyncio.run(front.Front(application)(scope, receive, send))
    return received, sent


def passed(store, path, body):
    ((headers, content),), sent = call(store, path, body)
    assert sent[1]["body"] == b"vllm"
    lengths = [value for name, value in headers.items() if name.lower() == b"content-length"]
    assert lengths == [str(len(content)).encode()] and headers[b"x-key"] == b"1"
    return json.loads(content)


def test_placeholders_stand_before_prompts_of_every_kind(store):
    named = {"kv_transfer_params": {"memory": "2026/märz"}, "max_tokens": 5}
    for prompt, want in (
        ("Who?", "<x><x><x>Who?"), ([1, 2], [7, 7, 7, 1, 2]), (["a", [3]], ["<x><x><x>a", [7, 7, 7, 3]]),
    ):  # fmt: skip
        got = passed(store, COMPLETIONS, {"prompt": prompt, "add_special_tokens": True, **named})
        assert got == {"prompt": want, "add_special_tokens": False, **named}
    got = passed(store, CHAT, {"messages": [], "chat_template_kwargs": {"a": 1}, **named})
    assert got["chat_template_kwargs"] == {"a": 1, "memory_tokens": 3, "memory_text": "<x>"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {"do_remote_prefill": 1}}'],
)
def test_other_requests_pass_as_they_are(store, body):
    (received,), sent = call(store, CHAT, body)
    assert received[1] == body and sent[1]["body"] == b"vllm"


def test_other_routes_are_not_read(store):
    body = {"kv_transfer_params": {"memory": "nothing"}}
    for path, method in (("/v1/models", "POST"), (CHAT, "GET")):
        (received,), sent = call(store, path, body, method=method)
        assert json.loads(received[1]) == body and sent[1]["body"] == b"vllm"


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("nothing", 404, "memory_not_found"), ("../2026", 404, "memory_not_found"), (7, 404, "memory_not_found"),
        ("", 404, "memory_not_found"), ("x" * 9999, 404, "memory_not_found"), ("\ud800", 404, "memory_not_found"),
        *((name, 400, "memory_not_read") for name in ("cut", "embedded", "more", "later")),
    ],
)  # fmt: skip
def test_a_memory_that_cannot_be_read_is_told_without_the_engine(store, name, status, code):
    body = {"prompt": "?", "kv_transfer_params": {"memory": name}}
    (received,), sent = call(store, COMPLETIONS, body, status=422)
    assert received[1] == b"{}"
    assert sent[0]["status"] == status
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == code and error["param"] == "kv_transfer_params" and "memory" in error["message"]


def test_a_prompt_to_save_passes_as_it_is_and_behind_a_memory(store):
    body = {"prompt": "A text", "kv_transfer_params": {"save": "2026/text"}}
    assert passed(store, COMPLETIONS, body) == body
    body["kv_transfer_params"]["memory"] = "2026/märz"
    assert passed(store, COMPLETIONS, body)["prompt"] == "<x><x><x>A text"
    _, sent = call(store, COMPLETIONS, body | {"kv_transfer_params": {"memory": "nothing", "save": "text"}})
    assert sent[0]["status"] == 404


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        *((name, {}, "without parts that are empty, . or ..") for name in ("../x", "/x", "a/", "", ".", 7, None)),
        *((name, {}, "of characters that can be printed") for name in ("\ud800", "\0")),
        *((name, {}, "of 1 to 200 characters, counted as in a URL") for name in ("x" * 999, "文" * 23)),
        ("text", {"prompt": ["one", "two"]}, "expected one prompt, got 2"),
        ("text", {"save": False}, "expected a server that was started with --save, got one that only reads"),
    ],
)
def test_what_cannot_be_saved_is_told_without_the_engine(store, name, more, told):
    body = {"prompt": more.get("prompt", "?"), "kv_transfer_params": {"save": name}}
    (received,), sent = call(store, COMPLETIONS, body, status=422, save=more.get("save", True))
    error = json.loads(sent[1]["body"])["error"]
    assert received[1] == b"{}" and sent[0]["status"] == 400 and error["code"] == "memory_not_saved"
    assert error["message"].startswith("save: ") and told in error["message"]


def test_who_has_no_key_is_told_nothing(store):
    body = {"prompt": "?", "kv_transfer_params": {"memory": "nothing"}}
    _, sent = call(store, COMPLETIONS, body, status=401)
    assert [sent[0]["status"], sent[1]["body"]] == [401, b"vllm"]


@pytest.mark.parametrize("chunk", [7, 200])
def test_long_bodies_pass_as_they_are(store, monkeypatch, chunk):
    """Such as those with images; no more than the limit is read for who may have no key."""
    monkeypatch.setattr(front, "LONGEST", 100)
    body = b'{"messages": [], "image": "' + b"x" * 100 + b'"}'
    ((headers, content),), sent = call(store, CHAT, body, chunk=chunk)
    assert content == body and headers[b"Content-Length"] == str(len(body)).encode() and sent[1]["body"] == b"vllm"


@pytest.mark.parametrize("named", [{"memory": "2026/märz"}, {"save": "text"}, {"memory": "2026/märz", "save": "text"}])
def test_beams_of_which_no_connector_hears_are_refused(store, named):
    body = {"prompt": "?", "kv_transfer_params": named, "use_beam_search": True}
    (received,), sent = call(store, COMPLETIONS, body)
    error = json.loads(sent[1]["body"])["error"]
    assert received[1] == b"{}" and sent[0]["status"] == 400
    assert error["message"] == f"use_beam_search: expected false with a {' or '.join(named)}, got true"
    assert error["code"] == ("memory_not_saved" if "save" in named else "memory_not_read")
    assert passed(store, COMPLETIONS, body | {"use_beam_search": False})["kv_transfer_params"] == named
    assert passed(store, COMPLETIONS, body | {"kv_transfer_params": {}})["use_beam_search"]


@pytest.mark.parametrize("given", [[1], "a", 7])
def test_settings_of_the_template_that_are_none_are_refused(store, given):
    body = {"messages": [], "chat_template_kwargs": given, "kv_transfer_params": {"memory": "2026/märz"}}
    _, sent = call(store, CHAT, body)
    assert sent[0]["status"] == 400 and b"chat_template_kwargs: expected settings by name, got" in sent[1]["body"]


@pytest.mark.parametrize("prompt", [None, 7, [], {}, [[]], [["a"]], ["a", [[1]]]])
def test_prompts_of_no_kind_are_refused(store, prompt):
    _, sent = call(store, COMPLETIONS, {"prompt": prompt, "kv_transfer_params": {"memory": "2026/märz"}})
    assert sent[0]["status"] == 400 and b"prompt: expected a text or token ids" in sent[1]["body"]


@pytest.mark.parametrize("links", [True, False])
def test_a_memory_that_is_not_to_be_replaced_stays(store, monkeypatch, links):
    """On disks without links too."""

    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(memory_files.os, "link", link)
    memory_files.add(store, "new", VALUES, replace=False, **OTHER)
    about, files = memory_files.about(store, "new")[0], sorted(store.iterdir())
    with pytest.raises(FileExistsError):
        memory_files.add(store, "new", VALUES + 1, replace=False, **OTHER)
    assert memory_files.about(store, "new")[0] == about and sorted(store.iterdir()) == files


def test_names_of_memories_fit_into_those_of_files(store):
    memory_files.add(store, "文" * 22, VALUES, **OTHER)
    assert memory_files.about(store, "文" * 22)[1] == VALUES.shape
    with pytest.raises(ValueError, match=r"memory: expected a name of 1 to 200 characters, counted as in a URL"):
        memory_files.add(store, "文" * 23, VALUES, **OTHER)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_damaged_memory_is_replaced_by_one_of_its_name(store, content):
    memory_files.path_of(store, "cut").write_bytes(content)
    with pytest.raises(memory_files.Damaged, match="got a damaged one"):
        memory_files.about(store, "cut")
    memory_files.add(store, "cut", VALUES, replace=False, **OTHER)
    assert memory_files.about(store, "cut")[0].tokens == 3


def test_a_memory_is_on_the_disk_before_it_has_its_name_and_never_twice_in_memory(store, monkeypatch):
    steps, values = [], torch.rand(2, 2, 4096, 1, 64)
    for name in ("fsync", "link"):
        plain = getattr(memory_files.os, name)
        monkeypatch.setattr(
            memory_files.os, name, lambda *given, name=name, plain=plain: steps.append(name) or plain(*given)
        )
    tracemalloc.start()
    memory_files.add(store, "new", values, replace=False, **OTHER)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == ["fsync", "link"] and peak < values.nbytes / 8
    (store / "plain").touch()
    assert memory_files.path_of(store, "new").stat().st_mode == (store / "plain").stat().st_mode


def test_a_full_disk_is_told_by_the_file_that_it_has_no_space_for(store, monkeypatch):
    def full(*_):
        raise memory_files.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(memory_files, "save_file", full)
    with pytest.raises(OSError, match=r"new.safetensors: expected a file that can be written, got .* No space left"):
        memory_files.add(store, "new", VALUES, **OTHER)
    assert not list(store.glob(".*"))


def test_what_killed_engines_left_goes_and_what_others_write_stays(store):
    kept = sorted(store.iterdir())
    (store / ".file.partial").touch()
    (store / ".folder.partial").mkdir()
    (store / ".folder.partial" / "values").touch()
    memory_files.remove_partials(store)
    assert len(list(store.iterdir())) == len(kept) + 2
    for left in store.glob(".*"):
        os.utime(left, (0, 0))
    memory_files.remove_partials(store)
    assert sorted(store.iterdir()) == kept


def test_files_of_weights_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match="model: expected weights in safetensors files, got none in"):
        memory_files.weights_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    found = [memory_files.weights_of(tmp_path)]
    (tmp_path / "gistkit.json").write_text("{}")
    assert memory_files.weights_of(tmp_path) == found[0]
    for name, content in (("config.json", b"{1}"), ("model.safetensors", bytes(99_999)), ("b.safetensors", b"")):
        (tmp_path / name).write_bytes(content)
        found.append(memory_files.weights_of(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\1" * 99_999)
    assert len({*found, memory_files.weights_of(tmp_path)}) == 5


def test_a_file_that_changed_or_is_another_is_refused(store):
    about, _ = memory_files.about(store, "2026/märz")
    path = memory_files.path_of(store, "2026/märz")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected values of digest \w+, got others: changed or damaged"):
        memory_files.values(store, "2026/märz", about.digest)
    from safetensors.torch import save_file

    save_file({"values": torch.zeros(1)}, memory_files.path_of(store, "foreign"))
    with pytest.raises(ValueError, match=r"expected a file of gistkit export, version 1, got another"):
        memory_files.about(store, "foreign")
