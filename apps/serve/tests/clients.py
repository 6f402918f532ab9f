"""What a client of the server says and reads, and a worker without a server."""

import json
import queue
import time

import torch

from gistkit.ask import Turns
from gistkit.compress.tokens import QUESTION
from gistkit_serve.server import Limits, MemoryRepository
from gistkit_serve.server.worker import Question, Sampling, Text, Worker

GIGA = 10**9
TEXTS = [f"{number} {'word ' * (3 * number + 1)}" for number in range(6)]
LETTERS = "etaoin shr dlué m.\n界世"


class Letters:
    """A token a byte, and of every byte a letter or a space: random answers have words."""

    bos_token_id, eos_token_id = None, 256
    chat_template = None

    def __call__(self, text, **options):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **options):
        return "".join(LETTERS[token % len(LETTERS)] for token in ids if token != 256)


def added(client, text):
    """The id of a text's memory."""
    response = client.post("/v1/memories", json={"text": text})
    assert response.status_code == 201, response.text
    return response.json()["id"]


def asked(client, memory, *messages, **options):
    """The response to questions and answers in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(messages)]
    return client.post("/v1/chat/completions", json={"memory": memory, "messages": turns, "max_tokens": 8} | options)


def answer_of(response):
    """The text of an answer, whether it was streamed or not."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        return response.json()["choices"][0]["message"]["content"]
    return "".join(choice["delta"].get("content", "") for event in events(response) for choice in event["choices"])


def events(response):
    """The events of a stream."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def eventually(holds, seconds=30):
    """Waits until something holds; the lines of a failure show what."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"expected within {seconds} s what holds() says, got none"
        time.sleep(0.01)


class Serving:
    """A worker of a compressor, with the memories of texts, and another compressor of the same weights."""

    def __init__(self, make, folder, texts=TEXTS, dtype=None, ram_bytes=GIGA, **limits):
        compressor, self.same = make(), make()
        compressor.tokenizer = self.same.tokenizer = Letters()
        options = {"most": 99, "ram_bytes": ram_bytes, "disk_bytes": GIGA, "dtype": dtype}
        self.repository, self.texts = MemoryRepository(folder, compressor, **options), texts
        self.worker = Worker(compressor, self.repository, Turns(QUESTION, QUESTION), Limits(**limits))
        self.ids = [self.submit(Text, text).get(timeout=30).id for text in texts]

    def submit(self, job, *arguments):
        told = queue.Queue()
        self.worker.submit(job(told.put, *arguments))
        return told

    def ask(self, text, question, count, sampling=None):
        return self.submit(Question, [self.ids[text]], [question], count, sampling or Sampling(), ())

    def alone(self, text, question, count, sampling):
        options = {}
        if sampling.temperature:
            options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            options["generator"] = torch.Generator().manual_seed(sampling.seed)
        return self.same.ask(self.texts[text], question, max_new_tokens=count, **options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.worker.close()
        self.repository.close()
