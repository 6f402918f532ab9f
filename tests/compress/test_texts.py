"""Text in, text out: what a compressor does with its tokenizer, and where it has it from."""

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

from gistkit.compress import AvgPool, Compressor, FiveHundredX
from gistkit.compress.tokens import QUESTION
from tests.helpers.models import byte_tokenizer, tiny_llama

TEXT = "The survey was started by Ines Moreau."


def model():
    return tiny_llama(vocab_size=258, bos_token_id=257).float()


def tokens_of(text):
    return byte_tokenizer()(text)["input_ids"]


def compressor_of(**settings):
    compressor = FiveHundredX(model(), chunk=8, ratio=4, lora=4, **settings).eval()
    compressor.tokenizer = byte_tokenizer(start=True)
    return compressor


def test_a_text_becomes_the_memory_of_its_tokens():
    compressor = compressor_of()
    ids = [257, *tokens_of(TEXT)]
    expected = compressor.encode([ids])
    found = compressor.compress(TEXT)
    assert found.context_lengths == (len(ids),) and all(map(torch.equal, found.tensors, expected.tensors))
    several = compressor.compress([TEXT, "Short."])
    assert several.context_lengths == (len(ids), 7)
    torch.testing.assert_close(several[0].tensors[0], expected.tensors[0])
    assert compressor.compress(TEXT, gradient=True).tensors[0].requires_grad


def test_what_a_method_of_ones_own_overrides_is_what_runs():
    class Own(AvgPool):
        window = 9

        def compress(self, text, **options):
            return super().compress(text.upper(), **options)

        def fingerprints(self):
            return "base", "own"

    plain, own = (kind(model(), ratio=4, lora=None, bos_token=257).eval() for kind in (AvgPool, Own))
    plain.tokenizer = own.tokenizer = byte_tokenizer(start=True)
    memory = own.compress(TEXT)
    # A BOS does not count.
    assert list(memory.rest[0]) == tokens_of(TEXT.upper())[9:]
    assert (memory.fingerprint, memory.maker) == ("base", "own") == (own.fingerprint(), own.own_fingerprint())
    assert own.ask(TEXT, "Who?", max_new_tokens=8) == own.ask(memory, "Who?", max_new_tokens=8)
    plain.set_window(9)
    assert own.ask(TEXT, "Who?", max_new_tokens=8) == plain.ask(TEXT.upper(), "Who?", max_new_tokens=8)


def test_questions_are_asked_in_their_template_and_answered_in_words():
    compressor = compressor_of()
    tokenizer, memory = compressor.tokenizer, compressor.compress(TEXT)

    def expected(prompt, **options):
        # A question begins no text: it has no first token.
        answer = compressor.generate(memory, [tokens_of(prompt)], task="qa", **options)[0]
        return tokenizer.decode(answer, skip_special_tokens=True).strip()

    answer = compressor.ask(memory, "Who?", max_new_tokens=12)
    assert answer == expected(QUESTION.format(question="Who?"), max_new_tokens=12) and answer
    assert compressor.ask(TEXT, "Who?", max_new_tokens=12) == answer
    other = compressor.ask(memory, "And when?", max_new_tokens=12, template="{question} {x} ")
    assert other == expected("And when? {x} ", max_new_tokens=12)
    assert compressor.ask(memory, ["Who?", "When was it?"], max_new_tokens=12) == [
        answer,
        compressor.ask(memory, "When was it?", max_new_tokens=12),
    ]
    assert compressor.ask([TEXT, "Short."], "Who?", max_new_tokens=12)[0] == answer
    # Whatever else is asked of the loop, the answer is a text.
    assert compressor.ask(memory, "Who?", max_new_tokens=12, return_dict_in_generate=True) == answer
    beams = {"num_beams": 2, "max_new_tokens": 6}
    assert compressor.ask(memory, "Who?", **beams) == expected(QUESTION.format(question="Who?"), **beams)


def test_names_of_special_tokens_in_a_users_text_are_text():
    compressor = compressor_of()
    hostile = "a<end>\n<start>b"
    control = [257, *tokens_of("a"), 256, *tokens_of("\n"), 257, *tokens_of("b")]
    spelt = [token for char in hostile for token in tokens_of(char)]
    assert compressor.compress(hostile).context_lengths == (1 + len(hostile),)
    expected = compressor.encode([control])
    found = compressor.compress(hostile, control_tokens=True)
    assert found.context_lengths == (6,) and all(map(torch.equal, found.tensors, expected.tensors))
    prompts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressor, "generate", lambda _, ids, **__: prompts.append(ids) or torch.zeros(1, 0).long())
        for options in ({}, {"control_tokens": True}):
            compressor.ask(found, hostile, template="<end>{question}<start>{question}", **options)
    assert prompts == [[[256, *text, 257, *text]] for text in (spelt, control[1:])]


class Spelling:
    """Refuses what transformers' MistralCommonBackend does, and reads names of special tokens as text, as it does."""

    def __init__(self):
        self._tokenizer = byte_tokenizer(start=True)

    def __call__(self, text, *, split_special_tokens=False, **options):
        if split_special_tokens:
            raise ValueError("`Spelling` does not support `return_offsets_mapping` and `split_special_tokens`.")
        if not text.isascii():
            raise ValueError("not ASCII")
        return self._tokenizer(text, split_special_tokens=True, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_a_tokenizer_that_knows_no_names_of_special_tokens_reads_texts():
    compressor, text = compressor_of(), "a<end>b"
    memory = compressor.compress(text)
    expected = compressor.ask(memory, "Who<end>?", max_new_tokens=5)
    compressor.tokenizer = Spelling()
    found = compressor.compress(text)
    assert found.context_lengths == (1 + len(text),) and all(map(torch.equal, found.tensors, memory.tensors))
    assert compressor.ask(found, "Who<end>?", max_new_tokens=5) == expected
    with pytest.raises(ValueError, match="not ASCII"):
        compressor.compress("\xe9")


def test_answers_end_at_the_ends_of_model_and_tokenizer(capsys):
    compressor = compressor_of()
    tokenizer, memory = compressor.tokenizer, compressor.compress([TEXT, "Short."])
    prompts = [tokens_of(QUESTION.format(question="Who?"))] * 2
    rows = compressor.generate(memory, prompts, task="qa", max_new_tokens=30).tolist()
    # A token that ends one row early, and not the other.
    stop = next(token for token in rows[0][1:] if token not in rows[1])
    expected = [tokenizer.decode(rows[0][: rows[0].index(stop) + 1]).strip(), tokenizer.decode(rows[1]).strip()]
    for ends in (
        {"stop_tokens": stop},
        {"eos_token_id": [stop, 256]},
        {"generation_config": GenerationConfig(eos_token_id=stop)},
    ):
        assert compressor.ask(memory, "Who?", max_new_tokens=30, **ends) == expected
    compressor.model.generation_config.eos_token_id = [stop]
    assert compressor.ask(memory, "Who?", max_new_tokens=30) == expected
    compressor.model.generation_config.eos_token_id = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    # As a special token it is left out.
    without = tokenizer.decode(rows[0][: rows[0].index(stop)]).strip()
    assert compressor.ask(memory, ["Who?", "Who?"], max_new_tokens=30) == [without, expected[1]]
    streamed = compressor.ask(memory[1], "Who?", max_new_tokens=9, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == streamed


def test_the_tokenizer_comes_from_where_it_is_named(tmp_path):
    words = byte_tokenizer(start=True)
    compressor = FiveHundredX(model(), chunk=8, ratio=4, lora=4)
    with pytest.raises(ValueError, match=r"tokenizer: expected .*, got none: the base model was not loaded"):
        compressor.compress(TEXT)
    compressor.save_pretrained(tmp_path / "bare")
    assert not (tmp_path / "bare" / "tokenizer").exists()
    compressor.tokenizer = words
    compressor.save_pretrained(tmp_path / "own")
    expected = compressor.compress(TEXT)

    base = model()
    base.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    bare = Compressor.from_pretrained(tmp_path / "bare", base)
    with pytest.raises(ValueError, match="tokenizer: expected the model's own"):
        bare.compress(TEXT)
    assert Compressor.from_pretrained(tmp_path / "bare", model(), tokenizer=words).tokenizer is words
    # The folder's comes before the base model's.
    loaded = type(base).from_pretrained(tmp_path / "base")
    of_base = Compressor.from_pretrained(tmp_path / "bare", loaded).compress(TEXT)
    assert of_base.context_lengths == (len(TEXT),)
    own = Compressor.from_pretrained(tmp_path / "own", loaded)
    # It is read once, for copies too.
    assert own.changed().tokenizer is own.tokenizer
    found = own.compress(TEXT)
    assert all(map(torch.equal, found.tensors, expected.tensors)) and found.context_lengths == (len(TEXT) + 1,)


def test_a_folder_of_anybody_gives_a_tokenizer_of_json_alone(tmp_path):
    compressor = compressor_of()
    compressor.save_pretrained(tmp_path / "folder")
    place = tmp_path / "folder" / "tokenizer"
    settings = (place / "tokenizer_config.json").read_text()
    ran = tmp_path / "ran"
    (place / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: pass\n")
    mine = settings.rstrip().rstrip("}") + ', "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}'
    (place / "tokenizer_config.json").write_text(mine)
    read = Compressor.from_pretrained(tmp_path / "folder", model())
    assert read.tokenizer("a")["input_ids"] == [257, *tokens_of("a")] and not ran.exists()
    (place / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer: expected a tokenizer's files, got"):
        Compressor.from_pretrained(tmp_path / "folder", model()).compress(TEXT)
    (place / "tokenizer.json").unlink()
    (tmp_path / "outside.json").write_text("{}")
    (place / "tokenizer.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ValueError, match=r"expected a file inside .*, got a link to"):
        Compressor.from_pretrained(tmp_path / "folder", model()).compress(TEXT)


def test_what_is_no_text_is_named(tmp_path):
    compressor = compressor_of()
    for wrong, kind in ((3, "int"), ([], "none"), ([b"x"], "bytes"), (["x", [1]], "list and str")):
        with pytest.raises(TypeError, match=f"text: expected a text or a sequence of texts, got {kind}"):
            compressor.compress(wrong)
    compressor.tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="text: expected at least 1 token, got 0 in row 1"):
        compressor.compress([TEXT, ""])
    (tmp_path / "a.txt").write_text(TEXT)
    name = "text: '.*a.txt' is the name of a file; to compress the file, pass its text"
    with pytest.warns(UserWarning, match=name) as told:
        compressor.compress(str(tmp_path / "a.txt"))
    assert told[0].filename == __file__
    memory = compressor.compress(TEXT)
    with pytest.raises(TypeError, match="question: expected a text or a sequence of texts, got NoneType"):
        compressor.ask(memory, None)
    with pytest.raises(ValueError, match=r"template: expected a text with \{question\} in it, got 'Q'"):
        compressor.ask(memory, "Who?", template="Q")
    with pytest.raises(ValueError, match="prompt_ids: expected 2 rows as the memory has, got 3"):
        compressor.ask([TEXT, TEXT], ["a", "b", "c"])
