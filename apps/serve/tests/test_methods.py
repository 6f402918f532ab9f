"""Memories of every kind are answered together as each is alone: keys and embeddings, windows, several as one."""

import pytest
import torch
from clients import Serving

from gistkit.compress import ICAE, AvgPool, Dodo, FiveHundredX, Select
from gistkit.compress.generation import answering
from gistkit_serve.server import rows
from gistkit_serve.server.worker import Question, Sampling
from tests.helpers.families import tiny_of
from tests.helpers.models import tiny_llama

METHODS = {
    "icae": (ICAE, {"chunk": 8, "ratio": 2, "lora": 2}),
    "x500": (FiveHundredX, {"chunk": 6, "ratio": 3, "window": 20}),
    "select": (Select, {"ratio": 4, "by": "key_norm", "shares": "all", "fit": True, "bos_token": 256}),
    "avgpool": (AvgPool, {"ratio": 2, "bos_token": 256, "lora": 2}),
    "dodo": (Dodo, {"ratio": 4, "layer": 1, "bos_token": 256}),
}
# The window of x500 ends within the last one.
TEXTS = ["Olga has it", "The gate code is 4471, mind."]


@pytest.mark.parametrize("name", METHODS)
def test_memories_of_a_method_are_answered_together_as_each_is_alone(name, tmp_path, gate, sizes):
    method, settings = METHODS[name]

    def make():
        torch.manual_seed(1)
        return method(tiny_llama(vocab_size=257), **settings).float().eval()

    # No memory stays in RAM.
    with Serving(make, tmp_path, TEXTS, ram_bytes=0) as serving:
        memories = [serving.same.compress(text) for text in TEXTS]
        contexts = [*memories, serving.same.join(memories)]
        expected = [serving.same.ask(memory, "Who?", max_new_tokens=12) for memory in contexts]
        asked = [serving.ids[:1], *([one] for one in serving.ids), serving.ids]
        told = [serving.submit(Question, ids, ["Who?"], 12, Sampling(), ()) for ids in asked]
        assert gate.begun.wait(30)
        gate.set()
        answers = [one.get(timeout=30) for one in told]
    assert [answer.text for answer in answers] == [expected[0], *expected]
    assert [answer.memory_tokens for answer in answers[1:3]] == [
        memory.sizes[0] + len(memory.rest[0]) for memory in memories
    ]
    # They join one after another, and a short answer may end before the last comes.
    assert max(sizes) >= len(answers) - 1


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM"])
def test_prompts_and_answers_of_one_pass_have_the_logits_that_the_model_gives_each(name, monkeypatch):
    # Keys unlike values, a table of positions, one key head.
    monkeypatch.setattr(rows, "PART", 12)
    compressor = ICAE(tiny_of(name), chunk=6, ratio=3, lora=None).eval()
    lm, known = compressor.lm, {}
    with torch.no_grad(), answering(compressor, 4):
        block = rows.Rows(compressor, 4096)
        for length in (5, 9, 3, 14):
            prompt = torch.arange(3, 3 + length).tolist()
            row = rows.Row(compressor, None, prompt, 20)
            block.join(row)
            known[row] = prompt
            for own, logits in block.read({row: known[row][-1] for row in block.writing}, block.reading):
                plan = lm.causal_plan(len(known[own]))
                embedded = lm.embedded(compressor.reader, torch.tensor([known[own]]))
                alone = lm.run(compressor.reader, inputs_embeds=embedded, plan=plan).last_hidden_state
                torch.testing.assert_close(logits, lm.logits(alone[0, -1]), rtol=1e-4, atol=1e-4)
                known[own].append(int(logits.argmax()))
        assert len(block.writing) == 3 and len(block.reading) == 1
