"""Who may ask, and what is noted of it: keys, ids of requests, the log, metrics and the page of documentation."""

import logging
import re
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from clients import added, answer_of, asked
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from gistkit_serve.server import Limits, running

TEXT = "The gate code is 4471."


def numbers(client, **options):
    """The samples of /metrics by name and labels."""
    text = client.get("/metrics", **options).text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def called(app, address):
    """A client at another address."""

    async def sent(scope, receive, send):
        await app({**scope, "client": (address, 1)}, receive, send)

    return TestClient(sent, base_url="http://127.0.0.1")


def test_without_the_key_nothing_but_health_and_documentation_is_told(serving):
    with serving(key="secret") as client:
        wrong = [{"authorization": given} for given in ("Bearer other", "Basic secret")]
        for headers in ({}, {"api-key": "secret"}, *wrong):
            response = client.get("/v1/memories", headers=headers)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert client.post("/v1/memories", json={"text": TEXT}, headers=headers).status_code == 401
            assert client.get("/metrics", headers=headers).status_code == 401
        for path in ("/health", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        client.headers["authorization"] = "bearer secret"
        assert answer_of(asked(client, added(client, TEXT), "Who?"))


def test_a_request_has_an_id_in_its_answer_and_in_the_log(client, caplog):
    caplog.set_level(logging.INFO, "gistkit_serve.access")
    response = client.get("/v1/memories/a%0ab", headers={"x-request-id": "from-a.proxy:1"})
    assert response.headers["x-request-id"] == "from-a.proxy:1"
    drawn = client.get("/health", headers={"x-request-id": "two words"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", drawn)
    # Refused before any route, too.
    assert client.get("/health", headers={"host": "evil.example"}).headers["x-request-id"]
    lines = [record.getMessage() for record in caplog.records if record.name == "gistkit_serve.access"]
    expected = ["from-a.proxy:1 - GET /v1/memories/a%0ab 404", f"{drawn} - GET /health 200"]
    assert [line.rsplit(" ", 2)[0] for line in lines[:2]] == expected and len(lines) == 3


def test_a_key_is_taken_without_the_spaces_around_it_and_an_empty_one_is_refused(serving):
    with serving(key="secret\n") as client:
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    with pytest.raises(ValueError, match="key: expected one or None"), serving(key=" "):
        pass


@pytest.mark.parametrize(
    ("address", "shown"),
    [("203.0.113.7", "203.0.113.7"), ("2001:DB8::1%\x1b[2J", "2001:db8::1"), ("10.0.0.9 GET / 200", "-"), ("", "-")],
)
def test_what_is_no_address_is_not_in_the_log(client, caplog, address, shown):
    caplog.set_level(logging.INFO, "gistkit_serve.access")
    called(client.app, address).get("/health")
    assert caplog.messages[-1].split()[1:4] == [shown, "GET", "/health"]


def test_methods_that_are_made_up_make_one_metric(client):
    for number in range(3):
        client.request(f"MADE{number}", "/health")
    found = numbers(client)
    assert sum("other" in name for name in found if name[0] == "gistkit_request_seconds_count") == 1
    assert not any("MADE" in label for sample in found for label in sample)


def test_metrics_count_requests_tokens_and_what_was_evicted(serving):
    with serving(most=2) as client:
        names = [added(client, f"{TEXT} {number}") for number in range(3)]
        asked(client, names[2], "Who?", max_tokens=7)
        asked(client, names[0], "Who?")
        found = numbers(client)
        assert found["gistkit_memories",] == 2 and found["gistkit_evicted_total",] == 1
        assert found["gistkit_tokens_total",] == 7 and found["gistkit_waiting",] == 0
        assert found["gistkit_disk_bytes",] == client.repository.disk_bytes > 0
        assert found["gistkit_request_seconds_count", "/v1/memories", "201", "POST"] == 3
        assert found["gistkit_request_seconds_count", "/v1/chat/completions", "200", "POST"] == 1
        assert found["gistkit_request_seconds_count", "/v1/chat/completions", "404", "POST"] == 1
        # A name that somebody made up is none of a metric's.
        client.get("/v1/memories/made-up")
        client.get("/made-up")
        assert not any("made-up" in label for sample in numbers(client) for label in sample)


def test_the_page_of_documentation_shows_every_route_and_loads_nothing(client):
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in page.text
    assert not re.search(r"<script|src=|href=|http", page.text)


def test_what_is_beyond_all_limits_hears_when_to_come_again(live, gate):
    with live(requests=1) as client, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(asked, client, None, "Who?", max_tokens=2)
        assert gate.begun.wait(10)
        response = client.get("/v1/models")
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "requests_full"
        # Whoever watches a server would start it again.
        assert client.get("/health").status_code == 200
        gate.set()
        assert busy.result().status_code == 200


def test_bodies_that_come_slowly_take_nobodys_place(live):
    with live(requests=1, body_bytes=100) as client:
        slow = [socket.create_connection((client.base_url.host, client.base_url.port)) for _ in range(3)]
        for one in slow:
            one.sendall(b"POST /v1/memories HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\n{")
        assert client.get("/health").status_code == 200
        # All of them have room for the bodies of as many requests as there may be.
        for one in slow[:2]:
            one.sendall(b" " * 60)
        # Whichever came second.
        answered, _, _ = select.select(slow[:2], [], [], 10)
        assert [one.recv(2000)[:12] for one in answered] == [b"HTTP/1.1 503"]
        for one in slow:
            one.close()


@pytest.mark.parametrize("between", [False, True], ids=["first", "later"])
def test_headers_have_their_time(live, monkeypatch, between):
    monkeypatch.setattr(running, "HEADERS", 0.3)
    with live() as client:
        one = socket.create_connection((client.base_url.host, client.base_url.port))
        if between:
            one.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert one.recv(2000).startswith(b"HTTP/1.1 200")
        with pytest.raises(OSError):
            for _ in range(100):
                one.sendall(b"G")
                one.settimeout(0.05)
                try:
                    if one.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    pass
        one.close()


def test_one_other_machine_does_not_take_all_places(serving, gate):
    with serving(peer=1, limits=Limits(queue=8)) as client:
        one, other = (called(client.app, f"10.0.0.{number}") for number in (1, 2))
        first = threading.Thread(target=lambda: asked(one, None, "Who?", max_tokens=2))
        first.start()
        assert gate.begun.wait(10)
        refused = one.get("/health")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "peer_limit"
        assert refused.headers["retry-after"] == "1"
        assert other.get("/health").status_code == 200
        gate.set()
        first.join(30)
        assert one.get("/health").status_code == 200
