"""Answers join and leave a running batch at any token, and each is what `Compressor.generate` writes for it alone."""

import os
import queue
import random
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch
from clients import TEXTS, Letters, Serving

from gistkit import hf
from gistkit.compress import AvgPool, Dodo, Select
from gistkit.compress.generation import answering
from gistkit.compress.tokens import QUESTION
from gistkit_serve.server import Refused, rows
from gistkit_serve.server import worker as workers
from gistkit_serve.server.worker import Question, Sampling, Text
from tests.helpers.models import tiny, tiny_llama
from tests.helpers.stores import make_compressor


def windowed():
    """A model whose window of 12 tokens is shorter than the texts."""
    torch.manual_seed(3)
    return Dodo(tiny("mistral", vocab_size=257, sliding_window=12), ratio=2, layer=1, bos_token=256).float().eval()


def adapted():
    torch.manual_seed(2)
    return AvgPool(tiny_llama(vocab_size=257), ratio=2, bos_token=256, lora=2).float().eval()


def shared():
    """Memories whose heads keep different numbers of tokens."""
    torch.manual_seed(2)
    model = tiny_llama(vocab_size=257)
    return Select(model, ratio=3, by="key_norm", shares="all", bos_token=256).float().eval()


def shared_with_windows():
    """The same where half of the layers have a window shorter than the texts."""
    torch.manual_seed(2)
    model = tiny("gemma3", vocab_size=257, sliding_window=9)
    return Select(model, ratio=3, by="key_diff", shares="all", bos_token=256).float().eval()


@pytest.mark.parametrize("make", [make_compressor, adapted, windowed, shared, shared_with_windows])
@pytest.mark.parametrize("part", [rows.PART, 7])
def test_answers_that_join_at_random_times_are_those_that_each_gets_alone(make, part, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PART", part)
    draw, cases = random.Random(part), []
    with Serving(make, tmp_path, batch=5) as serving:
        for number in range(40):
            question = "what " * draw.randrange(1, 20)
            sampling = (
                Sampling() if number % 2 else Sampling(draw.choice([0.7, 1.0, 1.5]), draw.choice([0.8, 1]), number)
            )
            case = draw.randrange(len(TEXTS)), question, draw.randrange(1, 40), sampling
            cases.append((case, serving.ask(*case)))
            time.sleep(draw.choice([0, 0, 0.02]))
        told = [answer.get(timeout=30) for _, answer in cases]
        assert [answer.text for answer in told] == [serving.alone(*case) for case, _ in cases]
    assert len({answer.text for answer in told}) > 20


def test_a_question_joins_those_that_run_and_leaves_before_they_end(tmp_path, sizes):
    with Serving(make_compressor, tmp_path) as serving:
        long = serving.ask(0, "Who?", 300)
        while not sizes:
            time.sleep(0.001)
        short = serving.ask(1, "When?", 3)
        assert short.get(timeout=30).new_tokens == 3
        assert long.empty() and long.get(timeout=30).new_tokens == 300
    assert sorted({*sizes}) == [1, 2] and sizes.count(2) == 2


def test_a_cancelled_question_that_waits_for_room_keeps_no_other_waiting(tmp_path):
    with Serving(make_compressor, tmp_path, batch_tokens=600) as serving:
        long, waits = serving.ask(0, "Who?", 200), Question(print, [serving.ids[1]], ["Who?"], 400, Sampling(), ())
        serving.worker.submit(waits)
        while waits not in serving.worker.running:
            time.sleep(0.001)
        waits.cancelled = True
        assert serving.ask(2, "When?", 3).get(timeout=30).new_tokens == 3
        assert long.empty() and waits not in serving.worker.running


def test_a_packed_memory_counts_once_for_all_questions_about_it(tmp_path, gate, sizes):
    size, width = 27, len(QUESTION.format(question="Who?")) + 20
    # Room for three questions about one memory.
    with Serving(shared, tmp_path, batch_tokens=size + 3 * width) as serving:
        assert serving.repository.get(serving.ids[5]).sizes[0] == size
        told = [serving.ask(5, "Who?", 20) for _ in range(4)]
        assert gate.begun.wait(30)
        gate.set()
        assert {answer.get(timeout=30).text for answer in told} == {serving.alone(5, "Who?", 20, Sampling())}
    assert max(sizes) == 3


def test_prompts_that_wait_are_read_in_one_pass_with_the_next_token_of_an_answer(tmp_path, gate, monkeypatch):
    passes, read = [], rows.Rows.read
    cases = [(number, "Who? " * number, 20 + number, Sampling()) for number in (1, 2, 3, 4)]

    def counted(self, tokens, reading):
        passes.append((len(tokens), len(reading)))
        return read(self, tokens, reading)

    monkeypatch.setattr(rows.Rows, "read", counted)
    with Serving(make_compressor, tmp_path) as serving:
        first = serving.ask(0, "Who?", 60)
        assert gate.begun.wait(30)
        answers = [serving.ask(*case) for case in cases]
        gate.set()
        told = [answer.get(timeout=30).text for answer in [first, *answers]]
        assert told == [serving.alone(*case) for case in [(0, "Who?", 60, Sampling()), *cases]]
    assert passes[:3] == [(0, 1), (1, 4), (5, 0)]


def test_a_long_prompt_keeps_neither_running_answers_nor_shorter_prompts_waiting(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(rows, "PART", 128)
    told, read, longest = queue.Queue(), rows.Rows.read, []
    cases = {"runs": (0, "Who?", 60), "long": (1, "what " * 60, 3), "short": (2, "When?", 3)}

    def measured(self, tokens, reading):
        longest.append(sum(min(row.unread, rows.PART // len(reading)) for row in reading))
        return read(self, tokens, reading)

    monkeypatch.setattr(rows.Rows, "read", measured)
    with Serving(make_compressor, tmp_path) as serving:
        for name, (text, question, count) in cases.items():
            tell = lambda answer, name=name: told.put((name, answer.text))  # noqa: E731
            serving.worker.submit(Question(tell, [serving.ids[text]], [question], count, Sampling(), ()))
            if name == "runs":
                assert gate.begun.wait(30)
        gate.set()
        order = [told.get(timeout=30) for _ in cases]
        assert dict(order) == {name: serving.alone(*case, Sampling()) for name, case in cases.items()}
    assert [name for name, _ in order] == ["short", "long", "runs"] and max(longest) == rows.PART


@pytest.mark.parametrize("fails", ["as it joins", "in a pass"])
def test_a_question_that_fails_fails_by_itself(fails, tmp_path, gate, monkeypatch, logged):
    begin, read, failing = rows.Row.__init__, rows.Rows.read, set()
    cases = [(number, "Who? " * number, 20 + number, Sampling()) for number in (1, 2, 3, 4)]
    bad = len(QUESTION.format(question=cases[2][1]))

    def begun(self, compressor, memory, prompt, count):
        if len(prompt) == bad:
            assert fails == "in a pass"
            failing.add(self)
        begin(self, compressor, memory, prompt, count)

    def reads(self, tokens, reading):
        assert failing.isdisjoint(reading)
        return read(self, tokens, reading)

    monkeypatch.setattr(rows.Row, "__init__", begun)
    monkeypatch.setattr(rows.Rows, "read", reads)
    with Serving(make_compressor, tmp_path) as serving:
        first = serving.ask(0, "Who?", 60)
        assert gate.begun.wait(30)
        answers = [serving.ask(*case) for case in cases]
        gate.set()
        told = [answer.get(timeout=30) for answer in answers]
        failed = told.pop(2)
        assert isinstance(failed, Refused) and str(failed) == "the server failed: AssertionError"
        assert "AssertionError" in logged.text
        del cases[2]
        assert [one.text for one in told] == [serving.alone(*case) for case in cases]
        assert first.get(timeout=30).text == serving.alone(0, "Who?", 60, Sampling())


@pytest.mark.parametrize("make", [make_compressor, windowed])
def test_questions_of_many_lengths_without_a_memory_get_the_answers_that_each_gets_alone(make, tmp_path, gate):
    turns = ["a", "what is it? " * 3, "who knows the thing " * 9, "z" * 300]
    with Serving(make, tmp_path) as serving:
        ask = lambda turn: serving.submit(Question, [], [turn], 30, Sampling(), (), False, True)  # noqa: E731
        gate.set()
        alone = [ask(turn).get(timeout=30).text for turn in turns]
        gate.clear()
        gate.begun.clear()
        answers = [ask("hello")]
        assert gate.begun.wait(30)
        answers += [ask(turn) for turn in turns]
        gate.set()
        assert [answer.get(timeout=30).text for answer in answers][1:] == alone and len({*alone}) == len(turns)


def step(block):
    """One more token of each row that writes; the logits of those that follow."""
    return torch.stack([logits for _, logits in block.read(dict.fromkeys(block.writing, 5), [])])


@contextmanager
def joining(tokens, compressor=None):
    """Rows of a compressor, and a function that has a question of some tokens join them."""
    compressor = compressor or make_compressor()
    with torch.no_grad(), answering(compressor, 64):
        block = rows.Rows(compressor, tokens)

        def join(length, count, memory=None):
            row = rows.Row(compressor, memory, [5] * length, count)
            block.join(row)
            while row in block.reading:
                block.read({}, [row])
            return row

        yield block, join


def test_a_block_that_one_long_answer_made_is_no_longer_than_the_next_need():
    with joining(2048) as (block, join):
        block.leave(join(20, 7000))
        for _ in range(9):
            join(20, 180)
        held = [layer.keys.untyped_storage().nbytes() / layer.keys[0, :, 0].nbytes for layer in block._layers]
        assert max(held) <= 2048
        assert step(block).isfinite().all()


def test_packed_memories_that_nobody_reads_are_counted_and_go_once_they_are_most():
    compressor = shared()
    compressor.tokenizer = Letters()
    memories = [compressor.compress("word " * count) for count in (8, 9, 40)]
    sizes = [memory.sizes[0] for memory in memories]
    with joining(2048, compressor) as (block, join):

        def held():
            step(block)
            keys = block._layers[0].keys
            beside = keys.untyped_storage().nbytes() // keys.element_size() - keys.numel()
            return beside, block.packed

        def expected(*indices):
            return sum(memories[index].layers[0][0].numel() for index in indices), sum(sizes[i] for i in indices)

        joined = [join(3, 20, memories[index]) for index in (2, 0, 1, 2)]
        assert held() == expected(2, 0, 1)
        for row in joined[1:]:
            block.leave(row)
        # The long one is most of it, and a short one that comes again is still there.
        last = join(3, 20, memories[0])
        assert held() == expected(2, 0, 1)
        block.leave(joined[0])
        assert block.packed == sizes[0] and held() == expected(0)
        block.leave(last)
        assert not block.packed
        join(3, 20)
        assert held() == (0, 0)


def test_plans_over_a_memory_that_rows_write_and_read_with_are_made_once_a_pass(monkeypatch):
    compressor, made, plan = shared(), [], hf.packed.Plan
    compressor.tokenizer = Letters()
    memory = compressor.compress("word " * 9)
    with joining(2048, compressor) as (block, join):
        join(3, 20, memory)
        waits = rows.Row(compressor, memory, [5] * 300, 20)
        block.join(waits)
        monkeypatch.setattr(hf.packed, "Plan", lambda *arguments: made.append(arguments) or plan(*arguments))
        block.read(dict.fromkeys(block.writing, 5), [waits])
    assert len(made) == 2 * compressor.config.num_hidden_layers


def test_questions_about_a_memory_of_another_dtype_read_the_same_tensors(tmp_path, gate, monkeypatch):
    seen, read = [], rows.Rows._memory

    def recorded(self, reading):
        packed = read(self, reading)
        seen.append((len(reading), packed.rows, len(packed.layers[0][0])))
        return packed

    monkeypatch.setattr(rows.Rows, "_memory", recorded)
    with Serving(shared, tmp_path, dtype=torch.bfloat16) as serving:
        told = [serving.ask(5, "Who?", 20) for _ in range(3)]
        assert gate.begun.wait(30)
        gate.set()
        assert len({answer.get(timeout=30).text for answer in told}) == 1
        kept = len(serving.repository.get(serving.ids[5]).layers[0][0])
    # Rows that all read one memory are one row of it.
    assert max(seen) == (3, 1, kept) and {size for *_, size in seen} == {kept}


def test_a_packed_memory_for_which_there_is_no_room_fails_its_own_question(tmp_path, gate, monkeypatch):
    together, failed = rows._together, []

    def fails(memories):
        # The passes after that of all have the room that it took. (The log of a test keeps the other's error.)
        assert not failed or failed[0]() is None
        if len(memories) > 1:
            part = torch.zeros(9)
            failed.append(weakref.ref(part))
            raise MemoryError("out of memory")
        return together(memories)

    monkeypatch.setattr(rows, "_together", fails)
    cases = [(5, "Who?", 60, Sampling()), (4, "When?", 9, Sampling()), (5, "Where?", 20, Sampling())]
    with Serving(shared, tmp_path) as serving:
        answers = [serving.ask(*cases[0])]
        assert gate.begun.wait(30)
        answers += [serving.ask(*case) for case in cases[1:]]
        gate.set()
        first, none, last = (answer.get(timeout=30) for answer in answers)
        assert isinstance(none, Refused) and str(none) == "the server failed: MemoryError"
        assert [first.text, last.text] == [serving.alone(*cases[0]), serving.alone(*cases[2])]
    # Together, and then the one question.
    assert len(failed) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_for_which_there_is_no_memory_leaves_room_for_the_next(packed, monkeypatch):
    compressor, calls = shared() if packed else make_compressor(), []
    compressor.tokenizer = Letters()
    memory = compressor.compress("word " * 9) if packed else None
    place, name = (hf.PackedLayers, "room") if packed else (rows, "_alone")
    room = getattr(place, name)

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return room(*arguments)

    with joining(2**16, compressor) as (block, join):
        for _ in range(2):
            join(20, 20, memory)
        before = step(block)
        row = rows.Row(compressor, memory, [5] * 20, 20)
        monkeypatch.setattr(place, name, fails)
        with pytest.raises(MemoryError):
            block.join(row)
        monkeypatch.undo()
        join(20, 20, memory)
        assert len(block) == 3
        # Rows whose layers have moved or not read on, and the new one reads as they did.
        torch.testing.assert_close(step(block)[2], before[0])


def test_questions_are_answered_while_a_text_is_compressed(tmp_path, monkeypatch):
    begun, go_on, nice = threading.Event(), threading.Event(), []
    with Serving(make_compressor, tmp_path) as serving:
        kind = type(serving.same)
        encode_rows = kind.encode_rows

        def slow(self, given):
            nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            begun.set()
            assert go_on.wait(30)
            return encode_rows(self, given)

        monkeypatch.setattr(kind, "encode_rows", slow)
        text = serving.submit(Text, TEXTS[1])
        assert begun.wait(30)
        answer = serving.ask(0, "Who?", 9).get(timeout=30)
        assert text.empty()
        go_on.set()
        serving.ids[1] = text.get(timeout=30).id
        assert answer.text == serving.alone(0, "Who?", 9, Sampling())
        assert serving.ask(1, "Who?", 9).get(timeout=30).text == serving.alone(1, "Who?", 9, Sampling())
        # And it gives way to them.
        answering = serving.worker._threads[0].native_id
        assert nice[0] == min(19, os.getpriority(os.PRIO_PROCESS, answering) + 5)


def test_a_text_that_is_being_compressed_does_not_keep_a_server_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_GRACE", 0.1)
    begun, go_on = threading.Event(), threading.Event()
    with Serving(make_compressor, tmp_path) as serving:
        slow = lambda *_: begun.set() or go_on.wait(30)  # noqa: E731
        monkeypatch.setattr(type(serving.same), "encode_rows", slow)
        text = serving.submit(Text, TEXTS[1])
        assert begun.wait(30)
        begin = time.monotonic()
        serving.worker.close()
        assert time.monotonic() - begin < 10 and text.get(timeout=10).code == "shutting_down"
        go_on.set()


def test_a_thread_gives_way_only_where_the_system_takes_its_number(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(workers.os, "setpriority", lambda *arguments: given.append(arguments))
    for system in ("linux", "darwin"):
        monkeypatch.setattr(workers.sys, "platform", system)
        with Serving(make_compressor, tmp_path / system):
            assert len(given) == 1


def test_a_compressor_of_texts_has_the_weights_of_the_one_that_answers(tmp_path, monkeypatch):
    seen = []
    with Serving(adapted, tmp_path) as serving:
        kind = type(serving.same)
        encode_rows = kind.encode_rows
        monkeypatch.setattr(kind, "encode_rows", lambda self, given: seen.append(self) or encode_rows(self, given))
        serving.submit(Text, TEXTS[1]).get(timeout=30)
        (twin,), own = seen, serving.worker.compressor
        assert twin is not own
        for name, weight in own.named_parameters():
            assert twin.get_parameter(name) is weight
        # RoPE's frequencies of a pass are written in place.
        assert {*map(id, twin.buffers())}.isdisjoint(map(id, own.buffers())) and [*own.buffers()]
