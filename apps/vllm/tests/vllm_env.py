"""vLLM in an environment of its own, and what gistkit itself writes, for tests against the real thing."""

import argparse
import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from gistkit_vllm import export
from tests.helpers.smollm2 import ROOT, skip_without_smollm2

QUESTIONS = [
    "Who started the survey?",
    "Which pile is the worst?",
    "Who keeps the key of the tool shed?",
    "What is the access code of the harbor office?",
]
NEW_TOKENS = 24
# Seconds: an engine starts in half a minute on two cores that have nothing else to do, and in many on busy ones.
LONG = 1800


def vllm_python():
    """The Python that has vLLM; the test is skipped where there is none."""
    python = Path(os.environ.get("GISTKIT_VLLM") or ROOT / "build" / "vllm" / "bin" / "python")
    if not python.is_file():
        pytest.skip(f"no vLLM at {python}: make vllm installs it")
    return python


def environment():
    """Of a process that has vLLM, this checkout's connector and no network."""
    own = {"PYTHONPATH": str(ROOT / "apps" / "vllm"), "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


def exported(*words):
    """Runs `gistkit export`."""
    parser = argparse.ArgumentParser()
    export.add(parser.add_subparsers())
    arguments = parser.parse_args(["export", *map(str, words)])
    assert arguments.run(arguments) == 0


def passages(tokenizer, count, size=96):
    """Token ids of so many different passages of this repository's prose."""
    text = "\n".join((ROOT / "docs" / name).read_text() for name in ("report.txt", "guide.md"))
    ids = tokenizer(text, verbose=False)["input_ids"]
    assert len(ids) >= count * size
    return [ids[start : start + size] for start in range(0, count * size, size)]


def smollm2_compressor(name):
    """A compressor of SmolLM2 in float32, with its tokenizer; the test is skipped without either."""
    skip_without_smollm2()
    from gistkit.compress import Compressor
    from gistkit.hf.smollm2 import load_smollm2
    from gistkit.options.models import new_compressor

    model, tokenizer = load_smollm2()
    untrained = {"select": {"by": "snapkv"}, "icae": {"layout": "dpl", "ratio": 5}}
    compressor = (
        new_compressor(model, name, **untrained[name]) if name in untrained else Compressor.from_pretrained(name, model)
    )
    compressor.eval().tokenizer = tokenizer
    return compressor


def written(compressor, memory, question, new_tokens=NEW_TOKENS):
    """The greedy tokens that gistkit writes to a question, as `ask` does, with the end."""
    from gistkit.compress.tokens import QUESTION

    tokenizer = compressor.tokenizer
    prompt = tokenizer(QUESTION.replace("{question}", question), add_special_tokens=False)["input_ids"]
    ends = tokenizer.eos_token_id
    rows = compressor.generate(memory, [prompt], task="qa", max_new_tokens=new_tokens, stop_tokens=ends)
    return prompt, rows[0].tolist()


def answers(model, store, batches, save=False, **options):
    """What an engine with the connector answers to batches of requests, see `engine.py`."""
    given = {"model": str(model), "store": str(store), "save": save, "options": options, "batches": batches}
    # The engine is a process of its group, which would outlive a script that is killed.
    script = Path(__file__).with_name("engine.py")
    process = subprocess.Popen(
        [vllm_python(), script], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(json.dumps(given), LONG)
        assert process.returncode == 0, errors[-3000:]
        # vLLM's processes may write to the same output.
        (line,) = (line for line in out.splitlines() if line.startswith('{"answers"'))
        return json.loads(line)
    finally:
        end(process)


def end(process):
    """Ends a process with all of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(30)


@contextmanager
def served(folder, place, port, *words):
    """`gistkit-vllm FOLDER` on a port: the process, and a client once it listens."""
    with (place / f"server-{port}.log").open("wb") as log:
        options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--port", str(port), *words)
        process = subprocess.Popen(
            [vllm_python(), "-m", "gistkit_vllm", str(folder), *map(str, options)], stdout=log, stderr=log,
            env=environment(), start_new_session=True,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG) as client:
            _wait(process, client, place / f"server-{port}.log")
            yield process, client
    finally:
        end(process)


def _wait(process, client, log):
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(f"expected a server in {LONG} s, got none: {log.read_text()[-3000:]}")
