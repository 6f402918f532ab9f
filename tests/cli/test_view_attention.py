"""`gistkit view attention` on a small random model: which weights, of which tokens."""

import json
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from transformers import AutoModelForCausalLM

from gistkit import cli, layouts
from gistkit.layouts import Role
from gistkit.options.models import new_compressor
from tests.cli.test_cli import saved, small_llama
from tests.helpers.models import byte_tokenizer, eager, tiny

TEXT = "Memory tokens stand\nfor the text before them."
COUNT = len(TEXT)
IDS = byte_tokenizer()(TEXT)["input_ids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a trained compressor around it, and a text."""
    root = saved(tmp_path_factory.mktemp("model"), small_llama(bos_token_id=256))
    icae = new_compressor(AutoModelForCausalLM.from_pretrained(root), "icae", chunk=16, ratio=4, lora=4)
    icae.save_pretrained(root / "icae")
    (root / "text.txt").write_text(TEXT)
    return root


@pytest.fixture
def view(folder, tmp_path, monkeypatch):
    """Runs the command with some words; returns the page's (title, {(layer, head): weights}, tokens)."""
    shown = []

    def page(weights, *, layers, heads, queries, title):
        assert weights.shape[:2] == (len(layers), len(heads))
        maps = dict(zip(product(layers, heads), weights.reshape(-1, *weights.shape[2:]), strict=True))
        shown.append((title, maps, queries))
        return "<html>"

    def call(*words):
        monkeypatch.setattr("gistkit.viz.page.attention_page", page)
        files = ["--text", str(folder / "text.txt"), "--model", str(folder), "-o", str(tmp_path / "view.html")]
        assert cli.main(["view", "attention", *files, *words]) == 0
        assert (tmp_path / "view.html").read_text() == "<html>"
        return shown[-1]

    return call


def eager_weights(folder):
    """[layers, heads, N, N] as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([IDS])
    with torch.no_grad(), eager(model):
        return torch.stack(model(ids, output_attentions=True).attentions)[:, 0].numpy()


def test_a_model_by_itself_shows_its_eager_weights(folder, view):
    expected = eager_weights(folder)
    title, maps, tokens = view("--plain", "--layer", "1,0", "--head", "1,0")
    assert title == f"{folder} reads {folder / 'text.txt'}" and list(tokens.texts) == list(TEXT)
    names = [(layer, head) for layer in (0, 1) for head in (0, 1)]
    assert list(maps) == [(str(layer), str(head)) for layer, head in names]
    for (layer, head), weights in zip(names, maps.values(), strict=True):
        np.testing.assert_allclose(weights, expected[layer, head], rtol=1e-4, atol=1e-6)
    assert set(tokens.roles) == {Role.TEXT} and tokens.positions.tolist() == list(range(COUNT))
    _, maps, _ = view("--plain")
    assert list(maps) == list(product("01", ["mean of 2", "0", "1"]))
    for layer in (0, 1):
        its = {"mean of 2": expected[layer].mean(0), "0": expected[layer, 0], "1": expected[layer, 1]}
        for head, weights in its.items():
            np.testing.assert_allclose(maps[str(layer), head], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("room", "words", "layers", "heads", "said"),
    [
        (2, [], "01", ["mean of 2"], "2 layers x 3 heads x {n} x {n} tokens are too many weights for a page"),
        (1, [], "1", ["mean of 2"], "the mean of all heads of the last layer"),
        (1, ["--layer", "0"], "0", ["mean of 2"], "the mean of all heads of the chosen layers"),
        (1, ["--layer", "0,1", "--head", "0,mean"], "01", ["mean of 2", "0"], ""),
    ],
)  # fmt: skip
def test_maps_that_nobody_chose_are_as_many_as_fit(room, words, layers, heads, said, view, monkeypatch, capsys):
    monkeypatch.setattr("gistkit.cli.view_attention.COMFORTABLE", room * COUNT**2)
    _, maps, _ = view("--plain", *words)
    assert list(maps) == list(product(layers, heads))
    out = capsys.readouterr().out
    assert said.format(n=COUNT) in out and ("too many weights" in out) == bool(said)


def fed(layout, *left_out):
    """The layout of what the encoder reads."""
    return layout.take(~np.isin(layout.roles, left_out))


CASES = {
    "gistpool": (("--ratio", "8"), fed(layouts.gistpool(COUNT, 8, 1, windows=5), Role.TEXT)),
    "gist": (("--ratio", "8"), fed(layouts.gist(COUNT, 8, 1), Role.TEXT)),
    "avgpool": (("--ratio", "8"), fed(layouts.avgpool(COUNT, 8, 1), Role.TEXT, Role.MEMORY)),
    "x500": (("--chunk", "16", "--ratio", "4"), layouts.icae_encoder(COUNT, 16, 4)),
    "no_context": ((), fed(layouts.no_context(1), Role.TEXT)),
}


@pytest.mark.parametrize("method", CASES)
def test_an_encoder_shows_what_its_layout_sees(method, view):
    words, layout = CASES[method]
    title, maps, tokens = view("--method", method, *words)
    weights = maps["1", "mean of 2"]
    assert " encodes " in title
    assert ((weights > 0) == layout.dense_mask()).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert (tokens.roles == layout.roles).all() and (tokens.positions == layout.positions).all()
    memory = layout.roles == Role.MEMORY
    texts = np.array(tokens.texts)
    assert texts[memory].tolist() == [f"[memory {slot}]" for slot in range(memory.sum())]
    assert "".join(texts[layout.roles == Role.CONTEXT]) in (TEXT, "")


def test_a_dodo_shows_its_encoder_and_its_nuggets(folder, view):
    """Its scorer runs a layer first; without adapters of its own the encoder is the base model."""
    _, maps, tokens = view("--method", "dodo", "--ratio", "8", "--head", "mean", "--option", "layer=1")
    model = AutoModelForCausalLM.from_pretrained(folder)
    compressor = new_compressor(model, "dodo", ratio=8, layer=1)
    with torch.no_grad():
        kept = compressor.encode([IDS]).positions[0].tolist()
    assert len(kept) > 3 and np.flatnonzero(tokens.roles == Role.MEMORY).tolist() == kept[1:]
    assert tokens.roles[0] == Role.BOS and list(tokens.texts[1:]) == list(TEXT)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad(), eager(model):
        expected = model(torch.tensor([[256, *IDS]]), output_attentions=True).attentions
    for weights, its in zip(maps.values(), expected, strict=True):
        np.testing.assert_allclose(weights, its[0].mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [[], ["shares=all", "fit=true"], ["by=key_norm"]])
def test_a_selection_shows_its_pass_over_the_text_and_what_most_heads_keep(options, folder, view):
    """KVzip's later passes, which repeat the text, are not shown. It is the default without a trained one."""
    _, maps, tokens = view("--head", "mean", *(word for option in options for word in ("--option", option)))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad(), eager(model):
        expected = model(torch.tensor([[256, *IDS]]), output_attentions=True).attentions
    for weights, its in zip(maps.values(), expected, strict=True):
        np.testing.assert_allclose(weights, its[0].mean(0), rtol=1e-4, atol=1e-6)
    settings = {
        name: json.loads(value) if value == "true" else value for name, value in (o.split("=") for o in options)
    }
    compressor = new_compressor(model, "select", **settings)
    compressor.tokenizer = byte_tokenizer()
    memory = compressor.encode([IDS])
    spans = compressor.context_spans(memory)[0]
    heads = [int(((spans[..., 1] == row) & (spans[..., 0] < row)).sum()) for row in range(COUNT + 1)]
    kept = np.flatnonzero(tokens.roles == Role.MEMORY)
    assert tokens.roles[0] == Role.BOS and list(tokens.texts[1:]) == list(TEXT) and len(kept) == memory.sizes[0] - 1
    others = np.flatnonzero(tokens.roles == Role.CONTEXT)
    assert min(heads[row] for row in kept) >= max(heads[row] for row in others)


@pytest.mark.parametrize(
    ("method", "bos", "options", "words"),
    [
        ("kv_distill", 1, {"ratio": 8, "layer": 1}, "--ratio 8 --option layer=1"),
        ("sac", 0, {"ratio": 4, "chunk": 16}, "--ratio 4 --chunk 16"),
    ],
)
def test_tokens_of_the_text_that_are_kept_are_marked_where_they_stand(method, bos, options, words, folder, view):
    _, maps, tokens = view("--method", method, "--head", "mean", *words.split())
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        memory = new_compressor(model, method, **options).encode([IDS])
    rows = np.arange(bos + COUNT)
    kept = memory.positions[0, bos:].numpy() - (1 - bos)
    assert len(kept) > 3 and np.flatnonzero(tokens.roles == Role.MEMORY).tolist() == kept.tolist()
    assert list(tokens.texts[bos:]) == list(TEXT) and (tokens.roles[:bos] == Role.BOS).all()
    weights = next(iter(maps.values()))
    seen = rows[:, None] >= rows if bos else rows[:, None] // 16 == rows // 16
    assert ((weights > 0) == seen).all()


def test_an_encoder_beside_the_model_shows_its_own_maps(folder, view, tmp_path):
    """Another number of layers and heads than the model's, and other tokens."""
    torch.manual_seed(1)
    encoder = tiny("gpt2", vocab_size=300, hidden_size=36, num_hidden_layers=3, num_attention_heads=3).float()
    encoder.save_pretrained(tmp_path / "encoder")
    other = byte_tokenizer()
    other.add_tokens(["text"])
    other.save_pretrained(tmp_path / "encoder")
    words = "--method separate_encoder --ratio 8 --option pool=tokens --layer 2 --head mean,2 --encoder"
    _, maps, tokens = view(*words.split(), str(tmp_path / "encoder"))
    assert list(maps) == [("2", "mean of 3"), ("2", "2")]
    before, after = TEXT.split("text")
    slots = [f"[memory {slot}]" for slot in range(-(-COUNT // 8))]
    assert list(tokens.texts) == [*before, "text", *after, *slots]


@pytest.mark.parametrize(
    "words",
    [
        ("--method", "gistpool", "--ratio", "4", "--option", "part=16"),
        ("--option", "part=16"),
        ("--method", "separate_encoder", "--ratio", "4", "--option", "segment=16"),
        ("--method", "x500", "--ratio", "4", "--chunk", "8"),
    ],
)
def test_a_text_that_is_read_in_parts_is_refused(words, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gistkit.compress.methods.icae.room", lambda device: 16)
    files = ["--text", str(folder / "text.txt"), "--model", str(folder), "-o", str(tmp_path / "no.html")]
    assert cli.main(["view", "attention", *files, *words]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("gistkit: --text: expected a text that ") and f"in one pass, got {COUNT} tokens" in told


def test_a_saved_compressor_is_loaded(folder, view, capsys):
    title, maps, tokens = view("--compressor", str(folder / "icae"))
    assert title.startswith("ICAE EPL 4x encodes") and "UNTRAINED" not in capsys.readouterr().err
    layout = layouts.icae_encoder(COUNT, 16, 4)
    assert ((maps["1", "mean of 2"] > 0) == layout.dense_mask()).all()
    assert (tokens.positions == layout.positions).all()


def test_the_compressor_of_gistkit_compress_is_shown_unless_the_model_is_asked_for(folder, view, monkeypatch):
    monkeypatch.setattr("gistkit.common.trained.default_for", lambda model: str(folder / "icae"))
    assert view()[0].startswith("ICAE EPL 4x encodes")
    assert view("--plain")[0].startswith(f"{folder} reads")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plain", "--encoder", "x"], "--plain: not allowed with --compressor or a compressor's options"),
        (["--layer", "2"], "--layer: expected less than 2, the number that the model has, got 2"),
        (["--head", "0,5"], "--head: expected less than 2, the number that the model has, got 5"),
        (["--method", "dodo", "--option", "layer=99"], "gistkit: --option layer: expected 1 to 2, got 99"),
        (["--text", "{folder}/none.txt"], "none.txt: no such file or folder"),
        (["--text", "{folder}/long.txt"], "--text: expected at most 4096 tokens, got 5000; show a part of it"),
    ],
)
def test_mistakes_are_one_line(words, message, folder, capsys, monkeypatch):
    (folder / "long.txt").write_text("a" * 5000)
    words = [word.replace("{folder}", str(folder)) for word in words]
    files = ["--text", str(folder / "text.txt"), "--model", str(folder)]
    monkeypatch.chdir(folder)
    assert cli.main(["view", "attention", *files, *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("gistkit: ") and message in lines[-1], lines
    assert not (folder / "view.html").exists()


def test_more_maps_than_a_page_holds_are_refused_before_they_are_made(folder, capsys, monkeypatch):
    monkeypatch.setattr("gistkit.viz.page.MOST_CELLS", 3 * COUNT**2)
    words = ["--text", str(folder / "text.txt"), "--model", str(folder), "--layer", "0,1", "--head", "0,1"]
    assert cli.main(["view", "attention", *words, "-o", str(folder / "no.html")]) == 2
    message = f"gistkit: --layer, --head: expected at most 2 maps of {COUNT + 1} tokens, got 4"
    assert capsys.readouterr().err.splitlines()[-1] == message
