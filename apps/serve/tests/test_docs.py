"""docs/serve.md: its routes and fields are those of the server, and OpenAI's client asks as it shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from clients import added, answer_of, asked

from gistkit.cli import parser
from gistkit.common.trained import default_for
from gistkit.compress import Compressor
from gistkit.hf.smollm2 import load_smollm2
from gistkit_serve.cli.serve import EXAMPLE
from gistkit_serve.server.app import _NEW_TOKENS, LOOPBACK
from gistkit_serve.server.requests import _IDLE, _NEUTRAL, ChatBody
from gistkit_serve.server.worker import Limits

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "serve.md").read_text()


def test_its_routes_are_those_of_the_server(client):
    shown = set(re.findall(r"`(GET|POST|DELETE) (/[\w/.]+)", PAGE.split("## Routes")[1].split("\n\n")[1]))
    paths = client.get("/openapi.json").json()["paths"]
    found = {(method.upper(), path.replace("{memory}", "ID")) for path, methods in paths.items() for method in methods}
    # These two are no part of it.
    about = {("GET", "/docs"), ("GET", "/openapi.json")}
    assert shown == found | about and all(client.get(path).status_code == 200 for _, path in about)


def test_its_fields_are_those_of_the_server():
    sentence = PAGE.split("A chat completion takes ")[1].split("`stop` takes at most")[0]
    named = set(re.findall(r"`(\w+)`", sentence))
    assert {"user"} <= _IDLE
    assert named == {*ChatBody.model_fields, "max_completion_tokens"}
    assert f"`max_completion_tokens`; {_NEW_TOKENS} or" in sentence
    assert ChatBody.model_fields["temperature"].default == 0
    assert not (_IDLE | _NEUTRAL.keys()) & named and {"tools", "n", "logprobs"} <= _NEUTRAL.keys()


@pytest.mark.slow
def test_its_first_question_is_answered(cached_smollm2):
    compressor = Compressor.from_pretrained(default_for("smollm2"), load_smollm2()[0]).eval()
    assert f"text='{EXAMPLE}'" in PAGE and '"content": "What is the gate code?"' in PAGE
    assert compressor.ask(EXAMPLE, "What is the gate code?") == "4471"


def test_its_options_are_those_of_the_command():
    options = vars(parser().parse_args(["serve"]))
    # What pip takes is none of them.
    named = set(re.findall(r"--([a-z][a-z-]+)", PAGE)) - {"help", "no-build-isolation", "no-deps"}
    assert {name.replace("-", "_") for name in named} <= options.keys()
    limits = Limits()
    assert [options[name] for name in ("batch", "batch_tokens", "queue", "max_new_tokens")] == [
        *(limits.batch, limits.batch_tokens, limits.queue, limits.new_tokens)
    ]


def test_its_client_needs_no_more_than_its_lines_install():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    installed = {word for line in re.findall(r"pip install ([^`&\n]+)", PAGE) for word in line.split()}
    modules = {match for match in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)}
    assert modules and modules <= installed


def test_its_proxy_stays_within_the_limits_of_the_command():
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    options = vars(parser().parse_args(["serve"]))
    assert block.count("{") == block.count("}") and f"127.0.0.1:{options['port']};" in block
    assert int(re.search(r"client_max_body_size (\d+)m", block)[1]) * 2**20 == options["max_body"]
    assert int(re.search(r"proxy_read_timeout (\d+)s", block)[1]) > options["timeout"]
    assert re.search(r"proxy_set_header Host (\S+);", block)[1] in LOOPBACK
    for line in re.sub(r"#.*", "", block).splitlines():
        assert not line.strip() or line.rstrip()[-1] in "{};", line


def test_the_client_of_openai_asks_as_it_shows(live, same, monkeypatch):
    pytest.importorskip("openai", reason="openai is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(ROOT)
    with live() as client:
        code = code.replace("http://127.0.0.1:8000", str(client.base_url).rstrip("/")).replace(
            "smollm2-select-4x", "tiny"
        )
        text = "The gate code is 4471."
        code = code.replace('open("docs/report.txt").read()', repr(text))
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(code, {})
        expected = answer_of(asked(client, added(client, text), "Who started the survey?", max_tokens=256))
    assert shown.getvalue() == expected == same.ask(text, "Who started the survey?", max_new_tokens=256)
