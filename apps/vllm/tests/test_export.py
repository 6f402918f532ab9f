"""`gistkit export`: what transformers' own attention reads from its files is what the compressor reads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm_env import exported

from gistkit.ask.turns import Turns, chat_turns
from gistkit.common.text_ids import filled_ids
from gistkit.compress import ICAE, AvgPool, FiveHundredX, Select
from gistkit.compress.tokens import QUESTION
from gistkit.hf import CACHE
from gistkit_serve.store import Document, compress_documents
from gistkit_vllm import export, launch, memory_files
from gistkit_vllm.template import chat_template
from tests.helpers.models import byte_tokenizer, tiny_llama

TEXT = "The gate code is 4471, and Olga keeps the key."
METHODS = {
    "avgpool": lambda model: AvgPool(model, ratio=3),
    "x500": lambda model: FiveHundredX(model, chunk=12, ratio=3),
    "x500, all weights": lambda model: FiveHundredX(model, chunk=12, ratio=3, lora=None),
    "icae": lambda model: ICAE(model, chunk=12, ratio=3, layout="dpl"),
    "select": lambda model: Select(model, ratio=3, by="streaming"),
}


def tokenizer_with_turns():
    """A token a byte, with control tokens and a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<spare>", "<turn>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    return tokenizer


def noisy(compressor):
    """Adapters start as nothing: a change to the model that a test can see."""
    torch.manual_seed(1)
    with torch.no_grad():
        for _, parameter in compressor.trainable():
            parameter += 0.05 * torch.randn_like(parameter)
    return compressor.float().eval()


@pytest.fixture
def made(tmp_path, request):
    """A compressor of a method, its folder and its model's, and the memory of a text in a file."""
    model = tiny_llama(vocab_size=260, eos_token_id=256).float()
    tokenizer = tokenizer_with_turns()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    # As commands make one that needs no training.
    torch.manual_seed(0)
    compressor = METHODS[request.param](model)
    if request.param != "select":
        noisy(compressor).save_pretrained(tmp_path / "compressor")
    compressor.tokenizer = tokenizer
    memory = compressor.compress(TEXT)
    memory.save(tmp_path / "text.gist")
    return compressor, memory, tmp_path


def words_of(compressor, place):
    chosen = ("--method", "select", "--ratio", "3", "--option", "by=streaming")
    chosen = chosen if compressor.method == "select" else (place / "compressor",)
    return (*chosen, "--model", place / "model", "--out", place / "out")


def file_of(place, name):
    """What an exported memory says of itself, and its values."""
    about, shape = memory_files.about(place / "out" / "memories", name)
    values = memory_files.values(place / "out" / "memories", name, about.digest)
    assert shape == values.shape
    return about, values


def read_on(model, ids, values, tokens=8):
    """Greedy tokens of transformers' own model behind keys and values at positions 0 on."""
    cache, found = DynamicCache(config=model.config), []
    first = model.get_input_embeddings()(torch.tensor([ids]))
    count = values.shape[2]
    for layer, pair in enumerate(values.transpose(2, 3)):
        cache.update(pair[0][None], pair[1][None], layer)
    with torch.no_grad():
        for _ in range(tokens):
            places = count + torch.arange(first.shape[1])[None]
            out = model(inputs_embeds=first, position_ids=places, use_cache=True, **{CACHE: cache})
            count += first.shape[1]
            found.append(int(out.logits[0, -1].argmax()))
            first = model.get_input_embeddings()(torch.tensor([found[-1:]]))
    return found


@pytest.mark.parametrize("made", METHODS, indirect=True)
def test_the_merged_model_reads_the_file_as_the_compressor_does(made, capsys):
    compressor, memory, place = made
    prompt = filled_ids(QUESTION, "{question}", "Who keeps the key?", compressor.tokenizer)
    want = compressor.generate(memory, [prompt], task="qa", max_new_tokens=8, stop_tokens=()).tolist()[0]
    exported(*words_of(compressor, place), "--merged", "--memories", place / "text.gist")
    told = capsys.readouterr()
    assert "1 memory in " in told.out and "deprecated" not in told.err
    reader, (about, values) = place / "out" / "reader", file_of(place, "text")
    assert about.tokens == values.shape[2]
    assert about.reader == memory_files.reader_of(reader)
    assert about.context_tokens == len(TEXT)
    plain = AutoModelForCausalLM.from_pretrained(reader)
    assert read_on(plain, prompt, values) == want
    assert AutoTokenizer.from_pretrained(reader)(about.text, add_special_tokens=False)["input_ids"] == [
        about.placeholder
    ]
    assert about.text == "<spare>"


@pytest.mark.parametrize("made", ["select"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"shares": "all", "by": "key_diff"}, "whose heads keep different numbers"),
        ({"fit": True}, "with fitted biases"),
    ],
)
def test_selections_that_no_cache_holds_are_refused_with_the_way_out(made, settings, got, capsys):
    compressor, _, place = made
    shared = compressor.changed(**settings)
    shared.compress(TEXT).save(place / "shared.gist")
    words = (*words_of(compressor, place), "--memories", place / "shared.gist")
    with pytest.raises(ValueError, match=f"shared: expected a memory whose heads keep as many .* got one {got}: "):
        exported(*words)
    with pytest.raises(ValueError, match=r"make it with compressor.changed\(shares='equal', fit=False\)"):
        shared.to_cache(shared.compress(TEXT))
    # As the message says; the options need not be repeated to export what was made with them.
    recipe = shared.changed(shares="equal", fit=False)
    recipe.compress(TEXT).save(place / "equal.gist")
    exported(*words[:-1], place / "equal.gist")
    _, values = file_of(place, "equal")
    layers = recipe.to_cache(recipe.compress(TEXT)).held
    torch.testing.assert_close(values[:, 1].transpose(1, 2), torch.stack([value[0] for _, value in layers]))


@pytest.mark.parametrize("made", ["avgpool"], indirect=True)
def test_an_adapter_is_a_folder_that_peft_reads(made):
    from peft import PeftModel

    compressor, memory, place = made
    exported(*words_of(compressor, place), "--memories", place / "text.gist")
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    adapted = PeftModel.from_pretrained(base, place / "out" / "adapter").merge_and_unload()
    about, values = file_of(place, "text")
    want = compressor.generate(memory, [[65, 66]], max_new_tokens=8, stop_tokens=()).tolist()[0]
    got = read_on(adapted, [65, 66], values)
    assert got == want
    assert read_on(AutoModelForCausalLM.from_pretrained(place / "model"), [65, 66], values) != want
    assert about.reader == memory_files.reader_of(place / "out" / "adapter")
    assert not (place / "out" / "reader").exists() and not (place / "out" / ".adapter").exists()


@pytest.mark.parametrize("made", ["avgpool"], indirect=True)
def test_stores_keep_their_names_and_other_readers_are_refused(made):
    compressor, _, place = made
    compress_documents(
        compressor, compressor.tokenizer, [Document("2026/märz.md", len(TEXT), lambda: TEXT)], place / "notes.store"
    )
    words = words_of(compressor, place)
    exported(*words, "--memories", place / "text.gist", place / "notes.store")
    read = [memory_files.about(place / "out" / "memories", name) for name in ("text", "2026/märz.md")]
    assert read[0] == read[1]
    with pytest.raises(ValueError, match=r"--memories: expected names that differ, got text twice"):
        exported(*words, "--memories", place / "text.gist", place / "text.gist")
    other = noisy(METHODS["avgpool"](tiny_llama(vocab_size=260, eos_token_id=256).float()))
    with torch.no_grad():
        next(iter(other.trainable()))[1].add_(1)
    other.save_pretrained(place / "compressor")
    with pytest.raises(ValueError, match=r"--out: expected a new folder or one of the reader \S+, got the reader \S+"):
        exported(*words)
    (place / "else").mkdir()
    (place / "else" / "file").touch()
    with pytest.raises(ValueError, match=r"got other files"):
        exported(*words[:-1], place / "else")


def files(folder):
    """What changes if a file is written again, in place or by a move."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("merged", [[], ["--merged"]])
@pytest.mark.parametrize("made", ["avgpool"], indirect=True)
def test_a_reader_that_servers_may_have_open_is_written_once_and_whole(made, merged, monkeypatch):
    compressor, memory, place = made
    words, out = words_of(compressor, place), place / "out"
    reader = out / ("reader" if merged else "adapter")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(type(out), "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            exported(*words, *merged)
    assert not reader.exists() and not (out / ".adapter").exists()
    # As a command that was interrupted left it.
    reader.mkdir()
    (reader / "model.safetensors").touch()
    exported(*words, *merged)
    before = files(reader)
    assert memory_files.reader_of(reader) == memory_files.reader_of(out) and len(before) > 2
    memory.save(place / "late.gist")
    exported(*words, *merged, "--memories", place / "late.gist")
    assert files(reader) == before and memory_files.about(out / "memories", "late")


@pytest.mark.parametrize("made", ["avgpool"], indirect=True)
def test_a_command_that_failed_at_a_memory_can_be_corrected(made):
    compressor, memory, place = made
    memory.save(place / ("文" * 23))
    words = words_of(compressor, place)
    with pytest.raises(ValueError, match="--memories: expected names that differ"):
        exported(*words, "--memories", place / "text.gist", place / "text.gist")
    with pytest.raises(ValueError, match="memory: expected a name of 1 to 200 characters"):
        exported(*words, "--memories", place / ("文" * 23))
    exported(*words, "--memories", place / "text.gist")
    assert [path.name for path in (place / "out" / "memories").iterdir()] == ["text.safetensors"]


@pytest.mark.parametrize("chat", [False, True])
def test_the_chat_template_writes_what_ask_does(chat):
    """Behind a memory; elsewhere it is the tokenizer's own."""
    tokenizer = tokenizer_with_turns()
    turns = chat_turns(tokenizer) if chat else Turns(QUESTION, QUESTION)
    messages = [
        {"role": "user", "content": "Who {question} it?"}, {"role": "assistant", "content": "Olga."},
        {"role": "user", "content": "When?"},
    ]  # fmt: skip
    own = {"add_generation_prompt": True, "tokenize": False}
    plain = tokenizer.apply_chat_template(messages, **own)
    written = chat_template(tokenizer, None, chat)
    ids = turns.ids(tokenizer, messages[0]["content"], None)
    ids += tokenizer("Olga.")["input_ids"] + [tokenizer.eos_token_id]
    ids += turns.ids(tokenizer, "When?", ids[-1])
    spare = tokenizer.convert_tokens_to_ids("<spare>")
    # vLLM gives parts of a content to a model whose own template loops over them.
    parts = [{**m, "content": [{"type": "text", "text": piece} for piece in m["content"]]} for m in messages]
    for given in (messages, parts):
        got = tokenizer.apply_chat_template(given, **own, chat_template=written, memory_tokens=3)
        assert tokenizer(got, add_special_tokens=False)["input_ids"] == [spare] * 3 + ids
    assert tokenizer.apply_chat_template(messages, **own, chat_template=written) == plain
    with pytest.raises(Exception, match="expected roles user and assistant after a memory"):
        system = [{"role": "system", "content": "Obey."}, *messages]
        tokenizer.apply_chat_template(system, chat_template=written, memory_tokens=1, tokenize=False)


def test_a_client_writes_placeholders_alone_and_no_more_than_a_prompt_has():
    """Of a request without a memory, whose keywords for the template are the client's."""
    tokenizer = tokenizer_with_turns()
    own = {"tokenize": False, "chat_template": chat_template(tokenizer, None, False)}
    messages = [{"role": "user", "content": "Who?"}]
    got = tokenizer.apply_chat_template(messages, **own, memory_tokens=2**21, memory_text="anything")
    assert got == "<spare>" * 2**20 + QUESTION.replace("{question}", "Who?")


def test_templates_with_any_words_and_characters_are_kept():
    tokenizer = tokenizer_with_turns()
    tokenizer.chat_template = "<FIRST>{% for m in messages %}{{ m['content'] }}<|END_OF_TURN|>LATER MEMORY{% endfor %}"
    messages = [{"role": "user", "content": "PLAIN"}]
    plain = tokenizer.apply_chat_template(messages, tokenize=False)
    written = chat_template(tokenizer, "END 😀 {question} CONTENT\n", False)
    assert tokenizer.apply_chat_template(messages, tokenize=False, chat_template=written) == plain
    got = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=written, memory_tokens=1)
    assert got == "<spare>END 😀 PLAIN CONTENT\n"
    tokenizer.chat_template = {"rag": "other", "default": tokenizer.chat_template}
    assert chat_template(tokenizer, "END 😀 {question} CONTENT\n", False) == written
    del tokenizer.chat_template["default"]
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template named default, got rag"):
        chat_template(tokenizer, None, False)
    tokenizer.chat_template = None
    written = chat_template(tokenizer, None, False)
    got = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=written)
    assert got == QUESTION.replace("{question}", "PLAIN")


def test_settings_are_json_that_the_launcher_reads(tmp_path, capsys):
    (tmp_path / "reader").mkdir()
    (tmp_path / "gistkit.json").write_text(json.dumps({"name": "tiny", "base": "x", "reader": "r"}))
    assert launch.main([str(tmp_path), "--print", "--port", "99"]) == 0
    shown = capsys.readouterr().out
    assert f"--model {tmp_path / 'reader'} --served-model-name tiny --port 99" in shown
    assert '"save": false' in shown
    assert launch.main([str(tmp_path), "--print", "--save"]) == 0
    assert '"save": true' in capsys.readouterr().out
    (tmp_path / "reader").rename(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 17}))
    assert launch.main([str(tmp_path), "--print"]) == 2
    assert "gistkit-vllm: --model: expected that of x" in capsys.readouterr().err
    assert launch.main([str(tmp_path), "--print", "--model", "x"]) == 0
    assert "--max-loras 2 --max-lora-rank 32 --model x" in capsys.readouterr().out
    more = ["--port", "99", "--lora-modules", "a=b", '{"name": "c"}', "--model", "x", "--lora_modules=d=e", "--seed=1"]
    words = launch.command(tmp_path, more)
    start = words.index("--lora-modules")
    assert words[start + 1 : start + 5] == [f"tiny={tmp_path / 'adapter'}", "a=b", '{"name": "c"}', "d=e"]
    assert words[start + 5 :] == (
        ["--max-loras", "5", "--max-lora-rank", "32", "--port", "99", "--model", "x", "--seed=1"]
    )


def test_a_selection_of_a_model_that_has_trained_is_read_by_no_other():
    select = Select(tiny_llama(), ratio=2, by="even", bos_token=1)
    assert export._reader(select).startswith("base:")
    with torch.no_grad():
        select.model.lm_head.weight.add_(1.0)
    assert not export._reader(select).startswith("base:")
