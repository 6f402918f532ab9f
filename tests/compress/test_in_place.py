"""Gist, AvgPool and GistPool on Hugging Face models, against the same written out on transformers' own attention."""

import gc
import json
import warnings
import weakref
from dataclasses import make_dataclass

import pytest
import torch
from torch import nn

from gistkit import evaluate, hf, layouts
from gistkit.compress import METHODS, AvgPool, Beacon, Compressor, Gist, GistPool, NoContext
from gistkit.compress.methods.avgpool import AvgPoolConfig, NoContextConfig
from gistkit.compress.methods.gist import GistConfig, GistPoolConfig, GistsConfig
from gistkit.compress.methods.in_place import OnePass
from gistkit.compress.plans import check_text
from gistkit.layouts import Role
from tests.helpers.in_place_oracle import rotate, states, unsettle
from tests.helpers.models import TOLERANCE, eager, tiny, tiny_llama, tokens
from tests.helpers.tiers import slow, tiers

BOS = 1
# Each method with one compressed token a window, and its options.
VARIANTS = {name: (kind, {}) for name, kind in METHODS.items() if issubclass(kind, OnePass) and kind is not NoContext}
VARIANTS |= {
    "offset gist": (Gist, {"offset": True}),
    "separate gist": (Gist, {"separate": True}),
    "separate offset gist": (Gist, {"offset": True, "separate": True, "gists": 5}),
    "gist, own counter": (Gist, {"separate_positions": True}),
    "avgpool kv": (AvgPool, {"pool": "kv"}),
    "gistpool, copied": (GistPool, {"full_copy": True}),
    "gistpool, copied with norms": (GistPool, {"full_copy": True, "copy_norms": True, "offset": False}),
    "gistpool, one window": (GistPool, {"windows": 1, "memory_sees_bos": False, "separate": False}),
    "gistpool, all windows": (GistPool, {"windows": None, "memory_sees_memory": True, "offset": False}),
    "gistpool, seen": (GistPool, {"context_sees_memory": True, "memory_sees_itself": False, "windows": 2}),
    "beacon": (Beacon, {"segment": 7}),
}


PLAIN = {Gist: {}, GistPool: {"offset": False, "separate": False}}


def make(name, model=None, lora=2, ratio=3, **more):
    method, options = VARIANTS[name]
    model = tiny_llama() if model is None else model
    return unsettle(method(model, ratio=ratio, bos_token=BOS, lora=lora, **options, **more).double())


@pytest.mark.parametrize("name", tiers(VARIANTS, ["gist", "gist, own counter", "avgpool", "gistpool"]))
def test_documents_are_joined_behind_one_first_token(name):
    compressor = make(name)
    # Of which one begins with a first token of its own.
    documents = [[tokens(13).tolist(), tokens(4).tolist()], [tokens(7).tolist(), tokens(8).tolist()]]
    for rows in documents:
        rows[1] = [BOS, *rows[1]]
    first, second = memories = [compressor.encode(rows) for rows in documents]
    joined = compressor.join(memories)
    inv_freq = compressor.model.model.rotary_emb.inv_freq
    for row in range(2):
        n, m, behind = first.lengths[row], second.lengths[row] - 1, first.starts[row] - 1
        assert joined.lengths[row] == n + m and joined.starts[row] == behind + second.starts[row]
        expected = torch.cat([first.positions[row, :n], second.positions[row, 1 : m + 1] + behind])
        assert torch.equal(joined.positions[row, : n + m], expected)
        for (key, value), (own, own_value), (other, other_value) in zip(
            joined.layers, first.layers, second.layers, strict=True
        ):
            turned = rotate(other[row, :, 1 : m + 1], [behind], inv_freq)
            torch.testing.assert_close(key[row, :, : n + m], torch.cat([own[row, :, :n], turned], 1), **TOLERANCE)
            assert torch.equal(value[row, :, :n], own_value[row, :, :n])
            assert torch.equal(value[row, :, n : n + m], other_value[row, :, 1 : m + 1])
        spans = torch.cat([compressor.context_spans(first[row])[0], compressor.context_spans(second[row])[0, 1:]])
        spans[n:] += len(documents[0][row])
        assert torch.equal(compressor.context_spans(joined)[row, : n + m], spans)
    assert compressor.generate(joined, tokens(2, 3), max_new_tokens=2).shape == (2, 2)


# In one pass that one has too few gists.
MOST = [name for name in VARIANTS if name != "separate offset gist"]


@pytest.mark.parametrize("name", tiers(MOST, ["gist", "gist, own counter", "avgpool"]))
def test_long_contexts_are_read_in_parts(name):
    compressor = make(name, part=10)
    # At most 9 tokens each, of whole windows: 6, 9 and 8.
    context = tokens(23).tolist()
    memory = compressor.encode([[BOS, *context], context[:4]])
    expected = compressor.join([compressor.encode([part]) for part in (context[:6], context[6:15], context[15:])])
    assert memory.lengths == (9, 3) and memory.starts[0] == expected.starts[0]
    for one, other in zip(memory[0].tensors, expected.tensors, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    whole = compressor.changed(part=0)
    assert compressor.size(23) == whole.size(23) == 8
    alone = whole.encode([[BOS, *context]])
    assert memory[0].documents == alone.documents and memory[0].starts == alone.starts
    assert torch.equal(compressor.context_spans(memory)[:1], compressor.context_spans(alone))
    assert not torch.allclose(memory[0].layers[1][1], alone.layers[1][1])
    # What training reads is one pass, and so is a part.
    compressor.train()
    assert whole.training and torch.equal(compressor.encode([[BOS, *context]]).layers[1][1], alone.layers[1][1])


@pytest.mark.parametrize("name", VARIANTS)
def test_places_are_known_without_a_layout(name):
    options = make(name).options
    for context in range(1, 20):
        layout = options.layout(context)
        assert options.start(context) == layout.positions[-1]
        if options.has_gists:
            gists = layout.ordinals[layout.roles == Role.MEMORY].tolist()
            assert options.gist_ordinals(context).tolist() == gists
            assert layout.ordinals[-1] == 1 + context + len(gists)


@pytest.mark.parametrize("rope", [None, "dynamic"])
def test_answers_of_one_token_or_none_have_losses(rope):
    model = (
        tiny_llama()
        if rope is None
        else tiny_llama(rope_parameters={"rope_type": rope, "factor": 2.0, "rope_theta": 1e4})
    )
    compressor = make("gist", model, losses=("qa", "kl", "hidden"))
    contexts = [[3, 4, 5], [6, 7, 8, 9]]
    one = compressor(contexts, question_ids=[[], []], answer_ids=[[5], [6]])
    assert one["hidden"] == 0 and one["qa"] > 0
    more = compressor(contexts, question_ids=[[], [7]], answer_ids=[[5], [6, 8]])
    alone = compressor(contexts[1:], question_ids=[[7]], answer_ids=[[6, 8]])
    torch.testing.assert_close(more["hidden"], alone["hidden"])
    nothing = torch.full((2, 3), -100)
    assert compressor(contexts, question_ids=nothing, answer_ids=nothing)["hidden"] == 0


@pytest.mark.parametrize("name", tiers([*MOST, "dodo", "kv_distill"], ["gist", "avgpool", "dodo"]))
@pytest.mark.parametrize("own", [[], [BOS]])
def test_a_part_that_begins_with_the_first_token_keeps_it(name, own):
    settings = {"ratio": 3, "bos_token": BOS, "lora": 2, "part": 9}
    compressor = make(name, part=9) if name in VARIANTS else METHODS[name](tiny_llama(), layer=1, **settings)
    compressor.eval()
    # As separators of documents are.
    context = tokens(19).tolist()
    context[6] = context[12] = BOS
    memory, whole = (one.encode([own + context]) for one in (compressor, compressor.changed(part=0)))
    for field in ("lengths", "starts", "context_lengths", "documents"):
        assert getattr(memory, field) == getattr(whole, field)
    if name in VARIANTS:
        assert torch.equal(compressor.context_spans(memory), compressor.context_spans(whole))
    parts = [compressor.encode([part]) for part in (own + context[:6], [BOS, *context[6:12]], [BOS, *context[12:]])]
    values = [part.layers[1][1][:, :, int(index > 0) :] for index, part in enumerate(parts)]
    torch.testing.assert_close(memory.layers[1][1], torch.cat(values, 2), **TOLERANCE)


@pytest.mark.parametrize("name", ["avgpool", "gist, own counter", "gistpool"])
def test_documents_of_different_ratios_or_of_which_some_have_a_first_token_are_not_joined(name):
    compressor, ids = make(name), tokens(20).tolist()
    memory = compressor.encode([ids])
    with pytest.raises(ValueError, match=r"memories: expected the same ratio in each, got 3 and 5$"):
        compressor.join([memory, compressor.encode([ids], ratio=5)])
    begun = compressor.encode([[BOS, *ids]])
    for memories in ([begun, memory], [memory, memory, begun]):
        with pytest.raises(ValueError, match="memories: expected documents that all begin with the first token, or"):
            compressor.join(memories)


def test_a_selection_of_nuggets_joins_memories_of_different_ratios():
    compressor = METHODS["dodo"](tiny_llama(), bos_token=BOS, ratio=3, lora=2, layer=1).eval()
    first, second = (compressor.encode(tokens(1, 20), ratio=ratio) for ratio in (3, 5))
    spans = compressor.context_spans(compressor.join([first, second]))[0]
    own = compressor.context_spans(second)[0, 1:] + 20
    assert torch.equal(spans, torch.cat([compressor.context_spans(first)[0], own]))


def test_a_baseline_without_context_has_no_parts():
    with pytest.raises(TypeError, match="part: expected none for no_context, got part"):
        NoContext(tiny_llama(), bos_token=BOS, lora=None).changed(part=4)


def test_the_parts_of_a_trained_compressor_are_as_long_as_what_it_was_trained_on():
    compressor = make("avgpool").eval()
    context = tokens(1, 20)
    whole = compressor.encode(context)
    compressor.trained_length = 12
    with pytest.warns(UserWarning, match="expected at most 12 tokens, .* got 20, which are read in 2 parts: answers"):
        memory = compressor.encode(context)
    with pytest.warns(UserWarning, match="read in 3 parts"):
        assert not torch.allclose(compressor.changed(part=9).encode(context).layers[1][1], memory.layers[1][1])
    assert not torch.allclose(memory.layers[1][1], whole.layers[1][1]) and memory.lengths == whole.lengths
    compressor.trained_parts = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compressor.encode(context)
    for part, least, parts in ((9, 24, ", which are read in 3 parts"), (0, 12, "")):
        with pytest.warns(UserWarning, match=f"expected at most {least} tokens, .* got 20{parts}: answers"):
            compressor.changed(part=part).encode(context)
    # A table of positions has no keys to move.
    compressor = make("gist", tiny("gpt2")).eval()
    compressor.trained_length = 12
    with pytest.warns(UserWarning, match="got 20: answers"):
        compressor.encode(context)
    with pytest.raises(TypeError, match="model: expected"):
        compressor.changed(part=12)


@pytest.mark.parametrize("name", ["gist", "avgpool", "gistpool, seen"])
def test_a_context_shorter_than_the_ratio_becomes_one_token(name):
    compressor = make(name, ratio=4)
    contexts, text = [tokens(3).tolist(), tokens(9).tolist(), tokens(1).tolist()], tokens(1, 5)
    memory = compressor.encode(contexts)
    assert memory.lengths == (2, 4, 2)
    for row, context in enumerate(contexts):
        ours = compressor.decode(memory[row], "lm", text)[0]
        torch.testing.assert_close(ours, states(compressor, context, text[0].tolist()), **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "pool"),
    [("llama", "hidden"), ("gemma3", "kv"), *slow(("gemma2", "hidden"))],
)
def test_avgpool_at_ratio_1_is_the_model_that_reads_the_whole_context(family, pool):
    model = tiny(family)
    ids, text = tokens(2, 12), tokens(2, 7)
    with eager(model):
        whole = torch.cat([torch.full((2, 1), BOS), ids, text], 1)
        expected = model(whole, use_cache=False).logits[:, 12:]
    compressor = AvgPool(model, ratio=1, pool=pool, bos_token=BOS, lora=4)
    ours = compressor.logits(compressor.decode(compressor.encode(ids), "lm", text))
    torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-5)


def test_a_window_leaves_the_rest_as_tokens():
    compressor, ids, text = make("gistpool", window=9), tokens(1, 14), tokens(1, 4)
    ours = compressor.decode(compressor.encode(ids), "lm", text)[0]
    rest = states(compressor, ids[0, :9].tolist(), [*ids[0, 9:].tolist(), *text[0].tolist()])
    torch.testing.assert_close(ours, rest[5:], **TOLERANCE)


def test_losses_are_of_the_answers_tokens():
    compressor = make("gistpool", losses=("qa", "kl", "compression"))
    ids, question, answer = tokens(2, 9), [[5, 6], [7]], [[8, 9, 10], [11]]
    pad = lambda rows: torch.tensor([row + [-100] * (3 - len(row)) for row in rows])  # noqa: E731
    losses = compressor(ids, question_ids=pad(question), answer_ids=pad(answer))
    memory, nats, divergence = compressor.encode(ids), [], []
    for row in range(2):
        text = question[row] + answer[row]
        first = len(question[row])
        found = compressor.logits(compressor.decode(memory[row], "qa", [text]))[0].log_softmax(-1)
        whole = torch.tensor([[BOS, *ids[row].tolist(), *text]])
        with compressor.using(None):
            wanted = compressor.model(whole, use_cache=False).logits[0, 9:].float().log_softmax(-1)
        nats += [-found[at, token] for at, token in enumerate(text) if at >= first]
        divergence += [(w.exp() * (w - f)).sum() for f, w in list(zip(found, wanted, strict=True))[first:-1]]
    torch.testing.assert_close(losses["qa"], torch.stack(nats).mean())
    torch.testing.assert_close(losses["kl"], torch.stack(divergence).mean())
    assert losses["compression"] > 0


def test_no_context_is_loaded_beside_the_baseline_of_that_name(tmp_path):
    assert evaluate.NoContext.method == NoContext.method
    NoContext(tiny_llama(), bos_token=BOS, lora=2).save_pretrained(tmp_path)
    assert type(Compressor.from_pretrained(tmp_path, tiny_llama())) is NoContext


def test_copies_say_that_the_model_was_moved_alone():
    compressor = make("gistpool", lora=None)
    compressor.model.float()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"model: expected torch.float64 on cpu, as the gists' copies"):
            compressor.encode(tokens(1, 9))
    assert not any("forward" in vars(module) for module in compressor.model.modules())


def test_beside_a_full_copy_the_text_alone_has_an_adapter(tmp_path):
    compressor = make("gistpool, copied")
    assert list(compressor.adapters.names) == ["text"]
    assert {path.replace("/", ".") for path in compressor.copies.maps} == {
        name for name, module in tiny_llama().model.named_modules() if isinstance(module, nn.Linear)
    }
    trained = {name: parameter for name, parameter in compressor.trainable()}
    assert not any(name.startswith("model.") and "lora_" not in name for name in trained)
    own = [parameter for name, parameter in trained.items() if compressor.of_gists(name)]
    assert sum(p.numel() for p in own) == sum(p.numel() for p in compressor.copies.parameters()) + 48
    compressor.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*/adapter_config.json"))) == 1


@pytest.mark.parametrize("family", tiers(["llama", "gemma2"], ("llama",)))
def test_gists_share_no_parameter_of_the_layers_with_the_text(family):
    model = tiny(family)
    compressor = unsettle(GistPool(model, ratio=3, bos_token=BOS, lora=None, copy_norms=True).double())
    decoder = model.get_decoder()
    embedding = model.get_input_embeddings()
    with_weights = {name for name, each in decoder.named_modules() if each._parameters and each is not embedding}
    assert {path.replace("/", ".") for path in compressor.copies.maps} == with_weights
    ids, text = tokens(1, 11), tokens(1, 4)
    found = compressor.decode(compressor.encode(ids), "lm", text)[0]
    # As in a model all of whose layers and norms are the gists' where gists are.
    torch.testing.assert_close(found, states(compressor, ids[0].tolist(), text[0].tolist()), **TOLERANCE)
    norms = [name for name, _ in compressor.named_parameters() if name.startswith("copies.") and "norm" in name]
    assert norms and all(map(compressor.of_gists, norms))


def test_a_full_copy_is_of_all_that_the_text_reads_with():
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="full_copy: expected a model without other active adapters, got default"):
        make("gistpool, copied", model)
    plain = "lora: expected plain LoRA on linear maps and embeddings, .* and no other active adapter"
    with pytest.raises(ValueError, match=plain):
        make("gistpool", model)
    saving = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["down_proj"])
    with pytest.raises(ValueError, match=r"lora: expected no modules_to_save of linear maps .*, got \['down_proj'\]"):
        make("gistpool, copied", lora=saving)


@pytest.mark.parametrize(
    ("method", "added", "options"),
    [
        ("gistpool", {"full_copy": False}, {}),
        ("avgpool", {"past": "kv", "soft_prompt": False}, {}),
        ("dodo", {"scorer_norm": True}, {"layer": 1}),
    ],
)
def test_compressors_that_are_older_than_a_setting_load(method, added, options, tmp_path):
    compressor = METHODS[method](tiny_llama(), ratio=3, bos_token=1, **options)
    compressor.save_pretrained(tmp_path)
    path = tmp_path / "compressor.json"
    saved = json.loads(path.read_text())
    for name in added:
        del saved["settings"][name]
    path.write_text(json.dumps(saved))
    loaded = Compressor.from_pretrained(tmp_path, tiny_llama())
    # Either reads the other's memories.
    assert loaded.settings == compressor.settings | added and loaded.source == compressor.source
    assert not added.keys() & loaded.source.options.keys()


def test_gists_have_a_learning_rate_of_their_own():
    compressor = make("gistpool")
    text, own = compressor.parameter_groups(1e-3, 4.0)
    assert text["lr"] == 1e-3 and own["lr"] == 4e-3
    names = {id(parameter): name for name, parameter in compressor.trainable()}
    assert {names[id(p)].split(".")[-2] for p in own["params"] if "lora" in names[id(p)]} == {
        compressor.adapters.names["memory"]
    }
    assert len(text["params"]) + len(own["params"]) == len(names)
    assert any("memory_embeddings" in names[id(p)] for p in own["params"])
    copied = make("gistpool", lora=None)
    assert sum(p.numel() for p in copied.parameter_groups(1.0)[1]["params"]) > 10_000


def test_a_layout_whose_text_reads_other_than_decoding_is_refused():
    seen = r"\{'BOS': '1 of 1', 'CONTEXT': '6 of 6', 'TEXT': '1 of 1'\}"
    with pytest.raises(ValueError, match=f"own: expected a layout whose text sees BOS, all memory .* sees {seen}"):
        check_text("own", layouts.full_context(6, 1))
    for config in (GistConfig(), AvgPoolConfig(), GistPoolConfig(windows=3), NoContextConfig()):
        check_text(config.method, config.layout(12))


def test_odd_models_and_contexts_say_what_was_expected():
    with pytest.raises(TypeError, match="model: expected one whose linear maps gists can have copies of"):
        GistPool(tiny("gpt2"), bos_token=BOS)
    compressor = make("gistpool", gists=2)
    with pytest.raises(ValueError, match="input_ids: expected at least 1 token after the first one, got 0"):
        compressor.encode([[BOS]])
    with pytest.raises(ValueError, match=r"input_ids: expected contexts of at most 2 gists x 3 tokens, got 3 gists"):
        compressor.encode(tokens(1, 7))
    memory = compressor.encode(tokens(1, 6))
    with pytest.raises(ValueError, match="memory: expected one made with"):
        make("gistpool, one window").decode(memory, "qa", tokens(1, 2))


def test_a_layout_of_a_users_own_is_no_choice_for_a_title():
    own = make_dataclass("Own", [("layout", str, "own")], bases=(AvgPoolConfig,), frozen=True, kw_only=True)
    assert own().title == "AvgPool 5x"


def test_gist_needs_no_rope_without_offset():
    compressor = Gist(tiny("gpt2"), ratio=2, bos_token=BOS, lora=None)
    text = tokens(2, 3)
    assert compressor.decode(compressor.encode(tokens(2, 8)), "qa", text).isfinite().all()


@pytest.mark.parametrize(("family", "method"), [("mistral", Gist), ("gemma2", GistPool)])
def test_gists_with_a_counter_of_their_own_keep_their_place_for_sliding_windows(family, method):
    model = tiny(family)
    compressor = method(model, ratio=3, bos_token=BOS, lora=None, separate_positions=True, **PLAIN[method]).double()
    ids, text = tokens(2, 11), tokens(2, 4)
    layout = compressor.options.layout(11)
    full = getattr(layouts, compressor.method)(11, 3, 4, separate_positions=True)
    assert len(full) == len(layout) + 3
    parts = [torch.full((2, 1), BOS), ids]
    inputs = torch.zeros(2, len(full), 48, dtype=torch.float64)
    with torch.no_grad():
        for role, value in zip((Role.BOS, Role.CONTEXT, Role.TEXT), (*parts, text), strict=True):
            inputs[:, full.roles == role] = compressor.embed(value)
        inputs[:, full.roles == Role.MEMORY] = compressor.memory_embeddings.double()
    inputs.requires_grad_()
    orders = []
    for grouped in (False, True):
        plan = full.compile(grouped=grouped, windows=(model.config.sliding_window,))
        with hf.attach(model):
            out = model.get_decoder()(inputs_embeds=plan.arrange(inputs), plan=plan, use_cache=False).last_hidden_state
        orders.append(plan.restore(out))
    torch.testing.assert_close(*orders, **TOLERANCE)
    gradients = (torch.autograd.grad(order.sin().sum(), inputs)[0] for order in orders)
    torch.testing.assert_close(*gradients, **TOLERANCE)
    expected = orders[1][:, full.roles == Role.TEXT]
    ours = compressor.decode(compressor.encode(ids), "lm", text)[:, 1:]
    torch.testing.assert_close(ours, expected, **TOLERANCE)


def test_the_models_own_weights_train_beside_no_adapters(tmp_path):
    model = tiny_llama()
    first = AvgPool(model, ratio=2, bos_token=BOS, lora=None)
    names = [name for name, _ in first.trainable()]
    second = AvgPool(model, ratio=2, bos_token=BOS, lora=2)
    assert not any("lora" in name for name, _ in first.trainable()) and len(names) > 10
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with pytest.raises(ValueError, match="model: expected no adapters in a model with its own weights trained"):
        first.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lora: expected a model without adapters for lora=None"):
        GistPool(model, ratio=2, bos_token=BOS, lora=None)
    second.save_pretrained(tmp_path)
    frozen = tiny_llama().requires_grad_(False)
    own = GistPool(frozen, ratio=2, bos_token=BOS, lora=None)
    assert any(name.startswith("copies.") for name, _ in own.trainable())


@pytest.mark.parametrize("losses", [("qa",), *slow((("compression",),))])
def test_a_step_under_checkpointing_holds_nothing_afterwards(losses, monkeypatch):
    compressor = make("gistpool" if "qa" in losses else "gist", losses=losses).train()
    compressor.gradient_checkpointing_enable()
    keepers, kept = [], GistsConfig.kept

    def watched(*arguments):
        keeper = kept(*arguments)
        keepers.append(weakref.ref(keeper))
        return keeper

    monkeypatch.setattr(GistsConfig, "kept", watched)
    batch = {"question_ids": tokens(2, 3), "answer_ids": tokens(2, 2)} if "qa" in losses else {}
    for _ in range(3):
        compressor(tokens(2, 9), **batch)["loss"].backward()
    del batch
    gc.collect()
    assert len(keepers) == 3 and not any(keeper() for keeper in keepers)


def test_a_users_own_forward_is_called_and_comes_back():
    compressor, ids = make("gistpool", lora=None), tokens(1, 9)
    plain = compressor.encode(ids)
    module = compressor.model.model.layers[0].self_attn.q_proj
    module.forward = lambda x: 2 * nn.Linear.forward(module, x)
    patched, mine = compressor.encode(ids), module.forward
    assert vars(module)["forward"] is mine
    assert not torch.equal(plain.layers[1][0], patched.layers[1][0])
