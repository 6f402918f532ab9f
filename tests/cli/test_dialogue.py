"""`gistkit ask` in a terminal: a conversation, what interrupts it, its commands and its sources."""

import builtins
import re
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from gistkit import cli
from gistkit.ask import Conversation, Turns, sources
from gistkit.cli.answers import Answers
from gistkit.cli.dialogue import converse
from gistkit.common.messages import plain
from gistkit.common.signals import Interrupted
from gistkit.evaluate.data import QUESTION
from gistkit.options.models import new_compressor
from tests.cli import test_cli
from tests.cli.test_cli import TEXT, load, small_llama
from tests.helpers.models import byte_tokenizer
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.usefixtures("one_thread")
folder, run = test_cli.folder, test_cli.run
CHAT = (
    "{% if messages[0].role != 'system' %}<s>be brief</s>{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def memory(folder, tmp_path_factory):
    """A memory beside its text, report.txt, and a text of which none was made, other.txt."""
    place = tmp_path_factory.mktemp("memory")
    (place / "report.txt").write_text(TEXT)
    (place / "other.txt").write_text("short")
    assert cli.main(["compress", f"{place}/report.txt", "--model", f"{folder}", "--compressor", f"{folder}/x500"]) == 0
    return place / "report.gist"


def prompt(question):
    return QUESTION.replace("{question}", question)


def generated(folder, questions, tokens, shape=prompt):
    """The answers to questions of one conversation, as the Python API gives them with all of it as the prompt."""
    compressor, tokenizer = load(folder)
    memory = compressor.encode([tokenizer(TEXT)["input_ids"]])
    text, answers = [], []
    for question in questions:
        text += tokenizer(shape(question))["input_ids"]
        made = compressor.generate(memory, [text], task="qa", max_new_tokens=tokens, stop_tokens=[256])[0].tolist()
        text += made
        answers.append(tokenizer.decode(made, skip_special_tokens=True) + "\n")
    return answers


def shown_sources(folder, question, tokens=6, text=None):
    """The lines that show the sources of one answer."""
    compressor, tokenizer = load(folder)
    conversation = Conversation(compressor, compressor.encode([tokenizer(TEXT)["input_ids"]]))
    conversation.reply(tokenizer(prompt(question))["input_ids"], max_new_tokens=tokens, stop_tokens=[256])
    lines = []
    for passage in sources(conversation):
        words = "" if text is None else f": {' '.join(text[passage.start : passage.end].split())}"
        place = f"tokens {passage.start} to {passage.end} of {len(TEXT)}, {passage.share:.0%}"
        lines.append(f"  [{place}]{words}\n")
    assert lines
    return "".join(lines)


@pytest.mark.slow
def test_a_conversation_in_a_terminal(folder, memory):
    answers = [plain(answer) for answer in generated(folder, ["Who?", "When?"], 6)]
    words = ("--model", folder, "--compressor", folder / "x500", "--max-new-tokens", 6)
    with Terminal("-m", "gistkit.cli", "ask", memory, *words) as terminal:

        def answer():
            """What is shown behind the line of a question, to the next prompt."""
            return terminal.until("\n> ").partition("\n")[2] + "\n"

        assert "One question a line; /help lists commands, Ctrl-D quits." in terminal.until("> ")
        # Lines are edited: the letter before the cursor is taken back.
        terminal.send("Whyx\x7f\x7fo?\n")
        assert answer() == answers[0]
        # Ctrl-C drops a line that is half written.
        terminal.send("half")
        terminal.until("half")
        terminal.rest()
        terminal.send("\x03")
        terminal.until("\n> ")
        terminal.send("When?\n")
        assert answer() == answers[1]
        terminal.send("/new\n")
        assert "A new conversation on the same memory." in terminal.until("\n> ")
        terminal.send("/sources on\n")
        terminal.until("> ")
        terminal.send("Who?\n")
        assert answer() == answers[0] + shown_sources(folder, "Who?")
        terminal.send("\x04")
        assert terminal.status() == 0


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that ends no answer, and a memory."""
    root = tmp_path_factory.mktemp("endless")
    model, tokenizer = small_llama(max_position_embeddings=10**6), byte_tokenizer()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    torch.nn.init.zeros_(model.lm_head.weight)
    tokenizer.eos_token = None
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    compressor = new_compressor(AutoModelForCausalLM.from_pretrained(root), "x500", chunk=20, ratio=5, lora=4)
    compressor.save_pretrained(root / "x500")
    compressor.encode([tokenizer(TEXT)["input_ids"]]).save(root / "a.gist")
    return root


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_conversation_and_sigterm_both(endless):
    words = ("--model", endless, "--compressor", endless / "x500", "--max-new-tokens", 200_000, "--temperature", 1)
    with Terminal("-m", "gistkit.cli", "ask", endless / "a.gist", *words) as terminal:
        terminal.until("> ")
        for end in ("\x03", "\x03", None):
            terminal.send("Who?\n")
            terminal.until("Who?")
            # Words come while the answer is written: each is followed by a space.
            for _ in range(3):
                terminal.until(" ")
            if end:
                terminal.send(end)
                terminal.until("\n> ")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.status() == 143 and "gistkit: terminated" in terminal.shown


class Lines:
    """Stands for `input`: gives lines, or raises what is no line."""

    def __init__(self, *lines):
        self.lines = iter(lines)

    def __call__(self, _):
        line = next(self.lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def talk(folder, monkeypatch, capsys):
    """A conversation of lines: (standard output, standard error, what answered)."""

    def call(*lines, limit=None, turns=None, **settings):
        compressor, tokenizer = load(folder)
        if limit is not None:
            compressor.model.config.max_position_embeddings = limit
        conversation = Conversation(compressor, compressor.encode([tokenizer(TEXT)["input_ids"]]))
        turns = turns or Turns(QUESTION, QUESTION)
        ids = lambda question, before: turns.ids(tokenizer, question, before)  # noqa: E731
        settings = {"max_new_tokens": 6, "stop_tokens": [256]} | settings
        answers = Answers(conversation, tokenizer, ids, settings, ["report.gist"])
        monkeypatch.setattr(builtins, "input", Lines(*lines))
        converse(answers)
        shown = capsys.readouterr()
        return shown.out, shown.err.partition("Ctrl-D quits.\n")[2], answers

    return call


def test_commands(talk):
    shown, told, answers = talk(
        "/help", "/sources", "/sources on", "/sources", "", "/wrong", "/sources no", "/quit", "Who?"
    )
    lines = told.splitlines()
    assert shown == "" and answers.sources and answers.conversation.turns == 0
    assert [line.split()[0] for line in lines[1:5]] == ["/sources", "/new", "/help", "/quit"]
    assert lines[6:] == [
        "Sources are off.",
        "Sources are on.",
        "gistkit: unknown command '/wrong'; /help lists all",
        "gistkit: unknown command '/sources no'; /help lists all",
    ]
    # What only begins with a slash is a question.
    assert talk("/etc/passwd is what?", "/exit")[2].conversation.turns == 1


def test_mistakes_are_told_and_the_conversation_goes_on(talk, folder):
    wrong = UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "invalid")
    shown, told, answers = talk("\udcff", wrong, KeyboardInterrupt(), "Who?")
    lines = told.splitlines()
    assert lines[0] == "gistkit: QUESTION: expected UTF-8 text, got '\\udcff'" and len(lines) == 2
    assert lines[1].startswith("gistkit: QUESTION: not text in the terminal's encoding: ")
    assert shown == f"\n{generated(folder, ['Who?'], 6)[0]}\n" and answers.conversation.turns == 1
    with pytest.raises(Interrupted):
        talk(Interrupted(signal.SIGTERM))


def test_turns_that_go_are_told(talk):
    limit = len(TEXT) + 1 + 2 * (len(prompt("Who?")) + 6)
    _, told, answers = talk(*["Who?"] * 3, limit=limit)
    assert told == "The context window is full: dropped the oldest turn.\n" and answers.conversation.turns == 2
    _, told, answers = talk("Who?", "Who?", "Who wrote all of this?", limit=limit)
    assert told == "The context window is full: dropped the oldest 2 turns.\n" and answers.conversation.turns == 1


def test_a_question_without_a_turn_before_it_is_a_first_one(talk, folder):
    limit, turns = len(TEXT) + 1 + 30, Turns("first {question}", "later {question}")
    said = lambda answers: load(folder)[1].decode(answers.conversation.text)  # noqa: E731
    answers = talk("Who?", "When?", limit=limit, turns=turns)[2]
    assert answers.conversation.turns == 1 and said(answers).startswith("first When?")
    # Broken off, it leaves the turn that went for it.
    broken = []

    def stop():
        broken.append(0)
        if len(broken) == 3:
            raise KeyboardInterrupt

    kept = said(answers)
    with pytest.raises(KeyboardInterrupt):
        answers.answer("Where?", stop)
    assert answers.conversation.turns == 1 and said(answers) == kept


def test_sources_of_one_question(folder, memory, run, tmp_path):
    report = memory.with_suffix(".txt")
    words = ("--compressor", folder / "x500", "--max-new-tokens", 6)
    answer = generated(folder, ["Who?"], 6)[0]
    status, shown, _ = run("ask", memory, "Who?", *words, "--sources")
    assert status == 0 and shown == answer + shown_sources(folder, "Who?")
    status, shown, _ = run("ask", memory, "Who?", *words, "--sources", "--text", report)
    assert status == 0 and shown == answer + shown_sources(folder, "Who?", text=TEXT)
    # Of several memories each is named, and questions on lines have their own sources.
    (tmp_path / "b.txt").write_text("\x1b[31mred\x1b[0m " * 9)
    run("compress", tmp_path / "b.txt", *words[:2])
    both = ("--with", tmp_path / "b.gist", "--text", report, "--text", tmp_path / "b.txt")
    status, shown, _ = run("ask", memory, *words, *both, "--sources", stdin="Who?\nWhen?")
    places = re.findall(r"^  \[(\S+), tokens (\d+) to (\d+) of (\d+), \d+%\]: ", shown, re.M)
    assert status == 0 and 4 <= len(places) <= 6 and "\x1b" not in shown.replace(answer, "")
    assert {name for name, *_ in places} == {str(memory), str(tmp_path / "b.gist")}


def test_a_message_of_the_chat_template_goes_on_behind_the_memory(folder, memory, tmp_path, run, capsys):
    chatty = tmp_path / "chatty"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(chatty)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(chatty)
    words = ["--compressor", folder / "x500", "--max-new-tokens", 6, "--chat"]
    status = cli.main([str(word) for word in ("ask", memory, "Who?", *words, "--model", chatty)])
    shape = lambda question: f"\n{question}<end>\n<assistant>"  # noqa: E731
    answer = generated(folder, ["Who?"], 6, shape)[0]
    assert status == 0 and capsys.readouterr().out == answer != generated(folder, ["Who?"], 6)[0]
    status, _, complaints = run("ask", memory, "Who?", *words)
    told = "gistkit: --chat: tokenizer: expected one with a chat template, got "
    assert status == 2 and complaints.splitlines()[-1].startswith(told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "ae", "--sources"], "--sources: expected none with --task ae, which has no question"),
        (["Who?", "--text", "{place}/other.txt"], "--text: expected --sources with it, got none"),
        (["Who?", "--sources", "--text", "{place}/none.txt"], "none.txt: no such file or folder"),
        (
            ["Who?", "--sources", "--text", "{place}/other.txt"],
            f"--text: expected the text that {{place}}/report.gist was made from, {len(TEXT)} tokens, got "
            "{place}/other.txt, 5 tokens",
        ),
        (
            ["Who?", "--sources", "--text", "{place}/other.txt", "--text", "{place}/other.txt"],
            "--text: expected the text of each of 1 memories, got 2",
        ),
        (["Who?", "--sources", "--text", "{place}"], "{place}: expected a text file, got a folder"),
        (["Who?", "--encoder", "x"], "encoder: expected none for "),
    ],
)
def test_mistakes_in_options(words, message, folder, memory, run):
    words = [word.replace("{place}", str(memory.parent)) for word in words]
    status, shown, complaints = run("ask", memory, *words, "--compressor", folder / "x500")
    assert status == 2 and not shown and message.replace("{place}", str(memory.parent)) in complaints.splitlines()[-1]
