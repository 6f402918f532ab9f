"""The routes: answers are those of the compressor, limits hold, and nothing a request says reaches another file."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from clients import added, answer_of, asked, events, eventually

from gistkit_serve.server import Limits, app, running

TEXT, QUESTION = "The gate code is 4471.", "What is the code?"


def error_of(response, status):
    """What is wrong, in OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_that_of_the_compressor_itself(client, same, stream):
    memory = added(client, TEXT)
    for count in (1, 9, 40):
        response = asked(client, memory, QUESTION, max_tokens=count, stream=stream)
        assert answer_of(response) == same.ask(TEXT, QUESTION, max_new_tokens=count)


def test_a_stream_has_the_chunks_of_openai_in_whole_words(client):
    memory = added(client, TEXT)
    whole = asked(client, memory, QUESTION, max_tokens=40).json()
    response = asked(client, memory, QUESTION, max_tokens=40, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len(chunks) > 5
    assert len({(chunk["id"], chunk["model"]) for chunk in (*chunks, last)}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last["choices"] == [] and last["usage"] == whole["usage"]


def test_the_numbers_of_a_memory_and_of_an_answer(client, same):
    memory = same.compress(TEXT)
    body = client.post("/v1/memories", json={"text": TEXT}).json()
    assert body == {
        **{"id": body["id"], "object": "memory", "used": body["used"], "in_ram": True},
        **{"tokens": 22, "memory_tokens": memory.lengths[0], "uncompressed_tokens": 0, "bytes": memory.nbytes},
        "removed": [],
    }
    usage = asked(client, body["id"], QUESTION, max_tokens=7).json()["usage"]
    prompt = len(f"\n### Question:\n{QUESTION}\n### Answer:\n")
    assert usage == {
        **{"prompt_tokens": memory.lengths[0] + prompt, "completion_tokens": 7},
        **{"total_tokens": memory.lengths[0] + prompt + 7},
        "prompt_tokens_details": {"cached_tokens": memory.lengths[0]},
    }
    health = client.get("/health").json()
    assert (health["status"], health["memories"], health["ram_bytes"]) == ("ok", 1, memory.nbytes)
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_memories_are_listed_shown_and_removed(client):
    names = [added(client, f"{TEXT} {number}") for number in range(3)]
    assert [one["id"] for one in client.get("/v1/memories").json()["data"]] == names[::-1]
    assert client.get(f"/v1/memories/{names[1]}").json()["id"] == names[1]
    assert client.delete(f"/v1/memories/{names[1]}").json()["deleted"]
    for response in (client.get(f"/v1/memories/{names[1]}"), client.delete(f"/v1/memories/{names[1]}")):
        assert error_of(response, 404) == f"memory: expected the id of a memory, got {names[1]!r}"
    assert names[1] in error_of(asked(client, names[1], QUESTION), 404)
    assert answer_of(asked(client, names[0], QUESTION))


def test_later_turns_are_read_as_a_conversation_whose_answers_ended(client, same):
    memory, turns, read = added(client, TEXT), [], []
    for question in ("Who?", "When?", "Where?"):
        turns.append(question)
        read += f"\n### Question:\n{question}\n### Answer:\n".encode()
        tokens = same.generate(same.compress(TEXT), [read], task="qa", max_new_tokens=12)[0]
        answer = answer_of(asked(client, memory, *turns, max_tokens=12))
        assert answer == same.tokenizer.decode(tokens.tolist()).strip()
        turns.append("it is so")
        read += [*b"it is so", 256]


def test_several_memories_are_one_context(client, same):
    texts = [TEXT, "The key is with Olga."]
    names = [added(client, text) for text in texts]
    joined = same.join([same.compress(text) for text in texts])
    expected = same.ask(joined, QUESTION, max_new_tokens=20)
    assert answer_of(asked(client, names, QUESTION, max_tokens=20)) == expected
    assert expected != answer_of(asked(client, names[::-1], QUESTION, max_tokens=20))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_an_answer_and_is_no_part_of_it(client, same, stream):
    memory = added(client, TEXT)
    whole = same.ask(TEXT, QUESTION, max_new_tokens=40)
    stop = whole[len(whole) // 2 :][:2]
    response = asked(client, memory, QUESTION, max_tokens=40, stop=stop, stream=stream)
    assert answer_of(response) == whole[: whole.index(stop)].strip()
    choice = events(response)[-1]["choices"][0] if stream else response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"


def test_samples_are_those_of_their_seed(client):
    memory = added(client, TEXT)
    ask = lambda **options: answer_of(asked(client, memory, QUESTION, max_tokens=30, temperature=1.5, **options))  # noqa: E731
    assert ask(seed=3) == ask(seed=3) != ask(seed=4)
    assert len({ask(top_p=0.9) for _ in range(3)}) == 3


def test_an_answer_that_ignores_its_end_goes_on_to_its_length(client, same):
    memory = added(client, TEXT)
    ids = same.generate(
        same.compress(TEXT), [list(f"\n### Question:\n{QUESTION}\n### Answer:\n".encode())], task="qa",
        max_new_tokens=40, stop_tokens=(),
    )[0].tolist()  # fmt: skip
    # Its fifth token ends an answer.
    client.state.worker._ends = {ids[4]}
    short = asked(client, memory, QUESTION, max_tokens=40).json()
    assert short["usage"]["completion_tokens"] == ids.index(ids[4]) + 1
    long = asked(client, memory, QUESTION, max_tokens=40, ignore_eos=True).json()
    assert long["usage"]["completion_tokens"] == 40 and long["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("most", "count"), [(100, 100), (1024, 256)])
def test_an_answer_of_no_stated_length_keeps_to_the_servers_limit(serving, most, count):
    with serving(limits=Limits(new_tokens=most)) as client:
        memory = added(client, TEXT)
        answer = asked(client, memory, QUESTION, max_tokens=None, ignore_eos=True)
        assert answer_of(answer) and answer.json()["usage"]["completion_tokens"] == count
        message = f"max_tokens: expected at most {most}, got {most + 1}"
        assert error_of(asked(client, memory, QUESTION, max_tokens=most + 1), 400) == message


def test_a_temperature_next_to_0_is_greedy(client, same):
    memory = added(client, TEXT)
    answer = answer_of(asked(client, memory, QUESTION, temperature=1e-300, max_tokens=20))
    assert answer == same.ask(TEXT, QUESTION, max_new_tokens=20)


def test_the_name_of_a_special_token_is_text_wherever_it_stands(client):
    def usage(word):
        memory = client.post("/v1/memories", json={"text": TEXT + word}).json()
        return memory["tokens"], asked(client, memory["id"], *[word] * 3).json()["usage"]["prompt_tokens"]

    assert usage("<end>") == usage("words")


def test_content_may_be_in_parts_and_fields_that_change_nothing_are_taken(client, same):
    memory = added(client, TEXT)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " the code?"}]
    body = {
        **{"model": "tiny", "memory": memory, "max_completion_tokens": 9, "n": 1, "user": "me", "tools": []},
        **{"messages": [{"role": "user", "content": parts, "name": None}], "response_format": {"type": "text"}},
        **{"presence_penalty": 0.0, "logprobs": False, "seed": None, "temperature": 0},
        **{"prediction": {"type": "content", "content": "x"}, "verbosity": "medium", "top_k": -1, "min_p": 0.0},
    }
    assert answer_of(client.post("/v1/chat/completions", json=body)) == same.ask(TEXT, QUESTION, max_new_tokens=9)


REFUSED = [
    ({"n": 2}, 400, "n: expected 1 or none, other values are not supported"),
    ({"tools": [{"type": "function"}]}, 400, "tools: expected [] or none, other values are not supported"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty: expected 0 or none, other values are not supported"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format: expected"),
    ({"best_of": 3}, 400, "best_of: Extra inputs are not permitted"),
    ({"temperature": -1}, 400, "temperature: "),
    ({"temperature": float("nan")}, 400, "temperature: "),
    ({"temperature": "1"}, 400, "temperature: "),
    ({"top_p": 0}, 400, "top_p: "),
    ({"max_tokens": 0}, 400, "max_tokens: "),
    ({"max_tokens": 1025}, 400, "max_tokens: expected at most 1024, got 1025"),
    ({"max_tokens": 500}, 400, "messages: expected memory, messages and answer within the model's 512 positions"),
    ({"stop": ["a"] * 5}, 400, "stop: "),
    ({"model": "gpt-4"}, 404, "model: expected tiny, got 'gpt-4'"),
    ({"messages": []}, 400, "messages: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role: "),
    ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages: expected system messages, then user and"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages: expected system messages, then user and"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content: Input should be a valid string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content: "),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages.0.content: "),
    ({"messages[0]": "x"}, 400, "messages[0]: Extra inputs are not permitted"),
    ({"memory": ["0"] * 65}, 400, "memory: List should have at most 64 items"),
    ({"stop": "a" * 1001}, 400, "stop.0: String should have at most 1000 characters"),
    ({"memory": 3}, 400, "memory: Input should be a valid list"),
    ({"memory": "0" * 32}, 404, "memory: expected the id of a memory"),
    ({"\ud800": 1}, 400, ""),
]


def test_what_cannot_be_answered_is_refused_with_its_field(client):
    question = {"messages": [{"role": "user", "content": QUESTION}], "memory": added(client, TEXT)}
    for change, status, message in REFUSED:
        # httpx sends neither NaN nor halves of characters.
        body = json.dumps(question | change)
        response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert error_of(response, status).startswith(message), change


def test_what_is_refused_of_a_stream_before_it_begins_has_its_status(client):
    memory = added(client, TEXT)
    assert error_of(asked(client, "0" * 32, QUESTION, stream=True), 404)
    assert error_of(asked(client, memory, QUESTION, stream=True, max_tokens=500), 400)


def test_a_body_that_is_no_request_is_refused(client):
    for path in ("/v1/memories", "/v1/chat/completions"):
        for content in (b"", b"{", b"[" * 100_000, b"\xff", b'{"text": ' + b"9" * 5000 + b"}", b"[]", b"3"):
            assert error_of(client.post(path, content=content, headers={"content-type": "application/json"}), 400)


def test_a_text_without_tokens_and_one_of_another_kind_are_refused(client):
    assert error_of(client.post("/v1/memories", json={"text": ""}), 400) == "text: expected 1 to 8192 tokens, got 0"
    assert error_of(client.post("/v1/memories", json={"text": 3}), 400).startswith("text: ")
    assert error_of(client.post("/v1/memories", json={"text": TEXT, "path": "/etc"}), 400).startswith("path: ")
    assert answer_of(asked(client, added(client, "\0"), "\0"))


def test_a_form_that_any_web_page_may_send_is_no_request(client):
    body = json.dumps({"text": TEXT})
    for kind, got in (({"content-type": "text/plain; charset=utf-8"}, "text/plain"), ({}, "none")):
        error = error_of(client.post("/v1/memories", content=body, headers=kind), 400)
        assert error == f"content-type: expected application/json, got {got}"
    assert len(client.repository) == 0


def test_sizes_are_limited(serving):
    with serving(limits=Limits(text_tokens=20), body_bytes=1000) as client:
        assert error_of(client.post("/v1/memories", json={"text": TEXT}), 413) == (
            "text: expected 1 to 20 tokens, got 22"
        )
        message = "body: expected at most 1,000 bytes, got more"
        assert error_of(client.post("/v1/memories", json={"text": "a" * 1000}), 413) == message
        # Without a length it is counted.
        parts = (b"a" * 100 for _ in range(20))
        assert error_of(client.post("/v1/memories", content=parts), 413) == message
        assert added(client, "short")
    with serving(disk_bytes=1000) as client:
        assert "expected a memory of at most 1,000 bytes" in error_of(
            client.post("/v1/memories", json={"text": TEXT}), 400
        )


def test_memories_beyond_the_models_positions_are_refused_before_any_is_read(client, monkeypatch):
    memory, read = added(client, "a" * 400), []
    monkeypatch.setattr(client.repository, "get", read.append)
    most = client.state.worker._positions
    held = 64 * client.repository.entry(memory).memory_tokens
    assert held > most
    message = f"memory: expected memories of at most {most} tokens in all, got {held}"
    assert error_of(asked(client, [memory] * 64, QUESTION), 400) == message and not read


HOSTILE = ["../report", "..%2freport", "%2e%2e%2freport", "%00", "a" * 5000, "..", "*", "%E2%80%AE", "..%5creport"]


def test_a_name_of_a_request_reaches_no_file(client, tmp_path):
    memory = added(client, TEXT)
    outside = tmp_path / "report.gist"
    outside.write_bytes((tmp_path / "memories" / f"{memory}.gist").read_bytes())
    for name in HOSTILE:
        for method in ("GET", "DELETE"):
            assert client.request(method, f"/v1/memories/{name}").status_code in (404, 405), name
        error_of(asked(client, name, QUESTION), 404)
        error_of(asked(client, [memory, name], QUESTION), 404)
        assert outside.exists() and answer_of(asked(client, memory, QUESTION, max_tokens=3)), name


def test_paths_and_methods_that_are_not_there_are_refused_in_the_same_shape(client):
    assert error_of(client.get("/v1/nothing"), 404)
    assert error_of(client.put("/v1/memories"), 405)


def test_a_system_message_begins_the_first_question(client, same):
    memory = added(client, TEXT)
    messages = [{"role": role, "content": role} for role in ("system", "developer", "user", "assistant", "user")]
    body = {"memory": memory, "messages": messages, "max_tokens": 9}
    told = [{"role": "user", "content": "system\n\ndeveloper\n\nuser"}, *messages[3:]]
    answer = answer_of(client.post("/v1/chat/completions", json=body))
    assert answer == answer_of(client.post("/v1/chat/completions", json={**body, "messages": told}))
    assert answer != answer_of(client.post("/v1/chat/completions", json={**body, "messages": messages[2:]}))


@pytest.mark.parametrize("memory", [None, []])
def test_without_a_memory_the_model_reads_the_question_by_itself(client, same, memory):
    answer = answer_of(asked(client, memory, QUESTION, max_tokens=20))
    prompt = torch.tensor([list(f"\n### Question:\n{QUESTION}\n### Answer:\n".encode())])
    with same.using(same.reader), torch.no_grad():
        for _ in range(20):
            logits = same.model(prompt).logits[:, -1]
            prompt = torch.cat([prompt, logits.argmax(-1, keepdim=True)], 1)
    assert answer == same.tokenizer.decode(prompt[0, -20:].tolist()).strip()


def test_the_model_has_the_names_that_it_was_given(serving):
    with serving(names=["tiny", "gpt-4o"]) as client:
        memory = added(client, TEXT)
        response = asked(client, memory, QUESTION, model="gpt-4o")
        assert answer_of(response) and response.json()["model"] == "tiny"
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny", "gpt-4o"]
        assert error_of(asked(client, memory, QUESTION, model="o1"), 404) == "model: expected tiny or gpt-4o, got 'o1'"


def test_a_server_of_this_machine_is_called_by_its_names_alone(client):
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert client.get("/health", headers={"host": host}).status_code == 200, host
    begins_as_ours = ("[::1].evil.com", "[::1", "localhost:x", "localhost:99:99", "127.0.0.1.evil.com")
    for host in ("evil.example", "", *begins_as_ours):
        told = error_of(client.get("/health", headers={"host": host}), 403)
        assert told.startswith("Host: expected one of 127.0.0.1, [::1], localhost, got "), host


def test_a_server_for_others_is_called_by_any_name(serving):
    with serving(hosts=None) as client:
        assert client.get("/health", headers={"host": "gist.example"}).status_code == 200


def test_sixteen_clients_at_once_get_the_answers_that_each_gets_alone(live, same):
    texts = [f"{TEXT} {'more ' * number}" for number in range(4)]
    with live() as client, ThreadPoolExecutor(16) as pool:
        names = list(pool.map(lambda text: added(client, text), texts))

        def ask(number):
            options = {"max_tokens": 5 + number, "stream": number % 3 == 0} | ({} if number % 5 else {"stop": "e"})
            return answer_of(asked(client, names[number % 4], f"{QUESTION}{number}", **options))

        alone = [same.ask(texts[number % 4], f"{QUESTION}{number}", max_new_tokens=5 + number) for number in range(16)]
        alone[::5] = [text.split("e")[0] for text in alone[::5]]
        assert list(pool.map(ask, range(16), timeout=60)) == alone


# A memory of 8 tokens, a prompt of 45 and an answer of 40.
@pytest.mark.parametrize(("limit", "most"), [({"batch": 3}, 3), ({"batch_tokens": 250}, 2)])
def test_no_more_than_a_batch_are_answered_together(live, gate, sizes, limit, most):
    with live(limits=Limits(**limit)) as client, ThreadPoolExecutor(8) as pool:
        memory = added(client, TEXT)
        waiting = [pool.submit(asked, client, memory, QUESTION, max_tokens=40) for _ in range(5)]
        assert gate.begun.wait(10)
        eventually(lambda: client.state.worker.waiting + len(client.state.worker.running) == 5)
        gate.set()
        assert len({answer_of(one.result()) for one in waiting}) == 1
    assert max(sizes) == most


def test_a_full_queue_refuses_and_says_when_to_come_again(live, gate):
    with live(limits=Limits(queue=2)) as client, ThreadPoolExecutor(4) as pool:
        memory = added(client, TEXT)
        first = pool.submit(asked, client, memory, QUESTION)
        assert gate.begun.wait(10)
        waiting = [pool.submit(asked, client, memory, QUESTION) for _ in range(2)]
        eventually(lambda: client.get("/health").json()["waiting"] == 2)
        refused = asked(client, memory, QUESTION)
        assert error_of(refused, 503) == "the queue is full, 2 requests are waiting"
        assert refused.headers["retry-after"] == "1"
        # Texts have a queue of their own.
        assert added(client, TEXT)
        gate.set()
        assert all(answer_of(one.result()) for one in (first, *waiting))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_refused_and_frees_the_worker(live, gate, stream):
    with live(seconds=1) as client:
        memory = added(client, TEXT)
        response = asked(client, memory, QUESTION, stream=stream)
        assert error_of(response, 504) == "expected an answer within 1 s, got none"
        gate.set()
        eventually(lambda: client.get("/health").json()["running"] == 0)
        assert answer_of(asked(client, memory, QUESTION, max_tokens=3))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_the_worker(live, compressor, monkeypatch, stream):
    """Of an answer of 400 tokens, the first ones are written; the next token after that is its last."""
    written, go_on = [], threading.Event()
    decode = compressor.tokenizer.decode

    def slow(tokens, **options):
        written.append(len(tokens))
        if len(tokens) > 40:
            assert go_on.wait(10)
        return decode(tokens, **options)

    with live() as client:
        memory = added(client, TEXT)
        monkeypatch.setattr(compressor.tokenizer, "decode", slow)
        turn = {"memory": memory, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400, "stop": "@"}
        # A connection of its own, which ends.
        with httpx.Client(base_url=client.base_url, timeout=30 if stream else 1) as going:
            if stream:
                with going.stream("POST", "/v1/chat/completions", json={**turn, "stream": True}) as response:
                    assert next(response.iter_lines()).startswith("data: ")
            else:
                with pytest.raises(httpx.ReadTimeout):
                    going.post("/v1/chat/completions", json=turn)
        eventually(lambda: all(job.cancelled for job in client.state.worker.running))
        go_on.set()
        eventually(lambda: client.get("/health").json()["running"] == 0)
        assert max(written) < 60


def test_a_client_that_goes_before_the_first_event_of_its_stream_frees_the_worker(client, monkeypatch):
    memory = added(client, TEXT)
    monkeypatch.setattr(app, "StreamingResponse", lambda *_, **__: app.Response())
    asked(client, memory, QUESTION, max_tokens=400, stream=True)
    eventually(lambda: client.get("/health").json()["running"] == 0)
    assert client.state.worker.tokens < 400


def test_who_goes_while_waiting_is_never_answered_and_makes_room(live, gate):
    with live(limits=Limits(queue=1)) as client, ThreadPoolExecutor(4) as pool:
        memory = added(client, TEXT)
        first = pool.submit(asked, client, memory, QUESTION, max_tokens=3)
        assert gate.begun.wait(10)
        with httpx.Client(base_url=client.base_url, timeout=0.3) as going, pytest.raises(httpx.ReadTimeout):
            asked(going, memory, QUESTION)
        eventually(lambda: all(job.cancelled for job in client.state.worker._questions))
        later = pool.submit(asked, client, memory, QUESTION, max_tokens=3)
        eventually(lambda: not any(job.cancelled for job in client.state.worker._questions))
        gate.set()
        assert answer_of(first.result()) == answer_of(later.result())
        eventually(lambda: client.get("/health").json()["done"] == 3)


def test_at_its_end_a_server_refuses_what_waits(serving, gate):
    with ThreadPoolExecutor(4) as pool, serving() as client:
        memory = added(client, TEXT)
        answers = [pool.submit(asked, client, memory, QUESTION)]
        assert gate.begun.wait(10)
        answers.append(pool.submit(asked, client, memory, QUESTION))
        eventually(lambda: client.state.worker.waiting == 1)
        closing = pool.submit(client.state.worker.close)
        assert [error_of(one.result(), 503) for one in answers] == ["the server is shutting down"] * 2
        assert error_of(asked(client, memory, QUESTION), 503) == "the server is shutting down"
        gate.set()
        closing.result()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_runs_when_a_server_ends_has_its_time_and_then_an_error(live, compressor, monkeypatch, stream):
    monkeypatch.setattr(running, "GRACE", 0.2)
    begun, go_on, decode = threading.Event(), threading.Event(), compressor.tokenizer.decode

    def slow(tokens, **options):
        if len(tokens) == 40:
            begun.set()
            assert go_on.wait(10)
        return decode(tokens, **options)

    with live() as client, ThreadPoolExecutor(1) as pool:
        memory = added(client, TEXT)
        monkeypatch.setattr(compressor.tokenizer, "decode", slow)
        answering = pool.submit(asked, client, memory, QUESTION, max_tokens=400, stop="@", stream=stream)
        assert begun.wait(10)
        client.server.should_exit = True
        response = answering.result(timeout=10)
        error = events(response)[-1] if stream else response.json()
        assert error["error"]["code"] == "shutting_down" and response.status_code == (200 if stream else 503)
        go_on.set()
