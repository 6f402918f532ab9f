"""`gistkit-vllm`: OpenAI's API on memories, against what `gistkit ask` writes."""

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_env import QUESTIONS, ROOT, exported, passages, served, smollm2_compressor, vllm_python

from gistkit_vllm import memory_files

pytestmark = pytest.mark.nightly


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def asked(client, memory, question, **more):
    body = {
        "model": more.pop("model", "smollm2-avgpool-2x"), "messages": [{"role": "user", "content": question}],
        "temperature": 0, "max_tokens": 24, "kv_transfer_params": {"memory": memory}, **more,
    }  # fmt: skip
    return client.post("/v1/chat/completions", json=body)


def content(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"].strip()


def texts(name, place, compressor, count=1):
    """Memories of the report and of passages, in files, and what `ask` answers to each question about the first."""
    report = compressor.compress((ROOT / "docs" / "report.txt").read_text())
    report.save(place / "report.gist")
    files, want = [place / "report.gist"], {}
    for number, ids in enumerate(passages(compressor.tokenizer, count)):
        memory = compressor.encode([ids])
        files.append(place / f"{name}-{number}.gist")
        memory.save(files[-1])
        want[f"{name}-{number}"] = compressor.ask(memory, "What is this about?", max_new_tokens=24)
    return files, [compressor.ask(report, question, max_new_tokens=24) for question in QUESTIONS], want


@pytest.fixture(scope="module")
def avgpool(tmp_path_factory):
    """A folder of AvgPool's merged reader and 17 memories, and what gistkit answers."""
    vllm_python()
    place = tmp_path_factory.mktemp("avgpool")
    compressor = smollm2_compressor("smollm2-avgpool-2x")
    files, report, want = texts("part", place, compressor, 16)
    exported("smollm2-avgpool-2x", "--out", place / "served", "--merged", "--memories", *files)
    return place, report, want


def test_a_server_answers_as_ask_does_and_again_after_a_kill(avgpool):
    """Questions one by one, streamed, 16 memories side by side, mistakes, a second engine, and a new start."""
    place, report, want = avgpool
    port, other = free_port(), free_port()
    with served(place / "served", place, port) as (process, client):
        assert [content(asked(client, "report", question)) for question in QUESTIONS] == report
        body = {"prompt": f"\n### Question:\n{QUESTIONS[1]}\n### Answer:\n", "model": "smollm2-avgpool-2x"}
        body |= {"temperature": 0, "max_tokens": 24, "kv_transfer_params": {"memory": "report"}}
        answer = client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"].strip() == report[1]

        streamed = asked(client, "report", QUESTIONS[0], stream=True).text
        events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        pieces = [choice["delta"].get("content") for event in events[:-1] for choice in json.loads(event)["choices"]]
        assert len([piece for piece in pieces if piece]) > 1
        assert "".join(piece or "" for piece in pieces).strip() == report[0]

        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda name: content(asked(client, name, "What is this about?")), want)
            assert dict(zip(want, answers, strict=True)) == want

        for name in ("nothing", "../reader/model", 7, None, "part-0\x00", "x" * 5000):
            refused = asked(client, name, "?")
            assert refused.status_code == 404, name
            assert refused.json()["error"]["code"] == "memory_not_found"
        assert content(asked(client, "report", QUESTIONS[0])) == report[0]

        # A second engine on the same folder, which has a memory more, written while both run.
        with served(place / "served", place, other) as (_, second):
            compressor = smollm2_compressor("smollm2-avgpool-2x")
            memory = compressor.compress("The gate code is 4471. Ask Olga Singh for the key.")
            memory.save(place / "late.gist")
            exported("smollm2-avgpool-2x", "--out", place / "served", "--merged", "--memories", place / "late.gist")
            late = compressor.ask(memory, "What is the gate code?", max_new_tokens=24)
            assert content(asked(client, "late", "What is the gate code?")) == late
            assert content(asked(second, "late", "What is the gate code?")) == late
            os.killpg(process.pid, signal.SIGKILL)
            assert content(asked(second, "report", QUESTIONS[1])) == report[1]
    with served(place / "served", place, port) as (_, client):
        assert content(asked(client, "late", "What is the gate code?")) == late


def test_an_adapter_reads_as_the_merged_model_does(avgpool, tmp_path):
    """By vLLM's own LoRA on the base model, which without the adapter refuses the memory, and saves its own."""
    place, report, _ = avgpool
    from gistkit.hf.smollm2 import load_smollm2

    model, tokenizer = load_smollm2()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    exported("smollm2-avgpool-2x", "--out", tmp_path / "lora", "--memories", place / "report.gist")
    words = ("--model", tmp_path / "base", "--served-model-name", "plain", "--api-key", "secret", "--save")
    with served(tmp_path / "lora", tmp_path, free_port(), *words) as (_, client):
        assert asked(client, "report", QUESTIONS[0]).status_code == 401
        assert asked(client, "nothing", QUESTIONS[0]).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        assert asked(client, "nothing", QUESTIONS[0]).status_code == 404
        assert [content(asked(client, "report", question)) for question in QUESTIONS] == report
        assert asked(client, "report", QUESTIONS[0], model="plain").status_code == 500
        assert content(asked(client, "report", QUESTIONS[0])) == report[0]

        # The base model saves the whole text, for itself.
        text = (ROOT / "docs" / "report.txt").read_text()
        body = {"model": "plain", "prompt": text, "temperature": 0, "max_tokens": 1}
        answer = client.post("/v1/completions", json=body | {"kv_transfer_params": {"save": "whole/report"}})
        assert answer.json()["kv_transfer_params"] == {"saved": "whole/report"}
        behind = f"\n### Question:\n{QUESTIONS[0]}\n### Answer:\n"
        answer = client.post("/v1/completions", json=body | {"prompt": text + behind, "max_tokens": 24})
        want = answer.json()["choices"][0]["text"].strip()
        assert content(asked(client, "whole/report", QUESTIONS[0], model="plain")) == want
        assert asked(client, "whole/report", QUESTIONS[0]).status_code == 500
        answer = client.post("/v1/completions", json=body | {"kv_transfer_params": {"save": "../report"}})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "memory_not_saved"
        answer = client.post(
            "/v1/completions", json=body | {"prompt": "?", "kv_transfer_params": {"save": "whole/report"}}
        )
        assert "expected a new name or the same prompt's" in answer.json()["kv_transfer_params"]["error"]


def test_methods_whose_reader_is_the_base_model_share_an_engine(tmp_path):
    """500xCompressor with its task token, a selection with other tokens in each head, and a memory of embeddings."""
    vllm_python()
    want = {}
    options = {
        "smollm2-x500-4x": ("smollm2-x500-4x",),
        "select": ("--method", "select", "--option", "by=snapkv"),
        "icae": ("--method", "icae", "--layout", "dpl", "--ratio", "5"),
    }
    for name, words in options.items():
        # No folder of a compressor's name, which would come before the compressor.
        place = tmp_path / f"memories-{name}"
        place.mkdir()
        compressor = smollm2_compressor(name)
        files, report, _ = texts(name, place, compressor)
        files[0] = files[0].rename(files[0].with_name(f"{name}.gist"))
        want[name] = report
        exported(*words, "--out", tmp_path / "served", "--merged", "--memories", files[0])
    with served(tmp_path / "served", tmp_path, free_port()) as (_, client):
        (model,) = [one["id"] for one in client.get("/v1/models").json()["data"]]
        for name, report in want.items():
            assert [content(asked(client, name, question, model=model)) for question in QUESTIONS] == report
    assert memory_files.reader_of(tmp_path / "served").startswith("base:")
