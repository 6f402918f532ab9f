"""Sources of an answer: what memory tokens stand for, attention computed densely, and the passages of a text."""

import weakref
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from gistkit.ask import Conversation, Passage, best_passages, context_attention, sources
from gistkit.compress import ICAE, SAC, FiveHundredX, Memory, NoContext, Select
from gistkit.hf.cache import CACHE
from gistkit.inspect import AttentionRecorder
from gistkit.layouts.positions import upl
from tests.ask.test_conversation import METHODS, encoded, ids, made
from tests.helpers.by_hand import attention_by_hand, hidden
from tests.helpers.models import tiny, tiny_llama


def spans(compressor, context):
    return compressor.context_spans(compressor.encode([context]))[0].tolist()


@pytest.mark.parametrize("name", ["icae", "x500", "x500 upl"])
def test_a_memory_token_has_the_span_of_its_part_of_its_chunk(name):
    compressor = made(name)
    # Chunks of 8 tokens with two memory tokens each, the last one of 3.
    assert spans(compressor, ids(19)) == [[0, 4], [4, 8], [8, 12], [12, 16], [16, 18], [17, 19]]
    assert spans(compressor, ids(1)) == [[0, 1], [0, 1]]
    # Behind the window of 20 tokens nothing is compressed.
    assert spans(compressor, ids(26)) == spans(compressor, ids(20))


@pytest.mark.parametrize(
    ("method", "layout"), [(ICAE, "dpl"), (ICAE, "epl"), (FiveHundredX, "dpl"), (FiveHundredX, "epl"), (SAC, "epl")]
)
def test_joined_documents_keep_their_own_parts(method, layout, tmp_path):
    compressor = method(tiny_llama(), chunk=12, ratio=4, lora=None, layout=layout)
    # As many chunks as one text of all tokens has, fewer, and more.
    rows = [[ids(5), ids(12), ids(3)], [ids(6), ids(14), ids(1)], [ids(24), ids(5), ids(2)]]
    parts = [compressor.encode([row[k] for row in rows]) for k in range(3)]
    joined = compressor.join([compressor.join(parts[:2]), parts[2]])
    joined.save(tmp_path / "joined.gist")
    for memory in (joined, Memory.load(tmp_path / "joined.gist"), Memory.stack([joined[1:], joined[0]])[[2, 0, 1]]):
        found = compressor.context_spans(memory)
        for row, texts in enumerate(rows):
            expected, before = [], 0
            for text in texts:
                expected += [[before + start, before + end] for start, end in spans(compressor, text)]
                before += len(text)
            assert found[row, : memory.lengths[row]].tolist() == expected
    with pytest.raises(ValueError, match=r"memory: expected \d+ memory tokens for its documents, got"):
        compressor.context_spans(replace(joined, documents=()))


@pytest.mark.parametrize("ratios", [(4, 4), (5, 3), (3, 5)])
def test_documents_of_different_ratios_have_their_own_windows(ratios):
    compressor = made("separate_encoder")
    memories = [compressor.encode([ids(count)], ratio=ratio) for count, ratio in zip((13, 19), ratios, strict=True)]
    conversation = Conversation(compressor, *memories)
    conversation.reply(ids(3), max_new_tokens=4, stop_tokens=())
    weights, expected = conversation.attention().tolist(), []
    for memory, count in zip(memories, (13, 19), strict=True):
        expected.append([0.0] * count)
        for start, end in compressor.context_spans(memory)[0].tolist():
            weight = weights.pop(0)
            for token in range(start, end):
                expected[-1][token] += weight / (end - start)
    for found, own in zip(context_attention(conversation), expected, strict=True):
        assert found.tolist() == pytest.approx(own)


@pytest.mark.parametrize("length", [1, 5, 7, 12])
def test_parts_hold_the_positions_of_epl(length):
    compressor = FiveHundredX(tiny_llama(), chunk=12, ratio=2.4, lora=None)
    found = spans(compressor, ids(length))
    for (start, end), position in zip(found, upl(1, length, 5).tolist(), strict=True):
        assert start + 1 <= position <= end
    assert found[0][0] == 0 and found[-1][1] == length


@pytest.mark.parametrize("name", ["gistpool", "avgpool"])
def test_a_gist_has_the_span_of_its_window_and_bos_none(name):
    compressor = made(name)
    assert spans(compressor, ids(9)) == [[0, 0], [0, 4], [4, 8], [8, 9]]
    # A BOS of the context's own is its first token.
    assert spans(compressor, [1, *ids(9)]) == [[0, 0], [1, 5], [5, 9], [9, 10]]


def test_without_context_there_are_no_spans():
    assert spans(NoContext(tiny_llama(), bos_token=1, lora=None), ids(9)) == [[0, 0]]


def test_a_nugget_has_the_span_since_the_one_before():
    compressor = made("dodo")
    memory = compressor.encode([ids(9)])
    # Position IDs count BOS.
    nuggets = [position - 1 for position in memory.positions[0].tolist()[1:]]
    found = spans(compressor, ids(9))
    assert found[0] == [0, 0] and [end - 1 for _, end in found[1:]] == nuggets
    assert [start for start, _ in found[1:]] == [0, *(nugget + 1 for nugget in nuggets[:-1])] and found[-1][1] == 9
    assert [[a + 1, b + 1] for a, b in found[1:]] == spans(compressor, [1, *ids(9)])[1:]


def test_padding_has_no_span():
    for name in METHODS:
        compressor = made(name)
        memory = compressor.encode([ids(3), ids(19)])
        found = compressor.context_spans(memory)
        for row, count in enumerate((3, 19)):
            assert found[row, : memory.lengths[row]].tolist() == spans(compressor, ids(count))
            assert not found[row, memory.lengths[row] :].any()


def dense(compressor, memory, prompt, answer):
    """Attention [layers, heads, keys] of the rows before answer tokens, by transformers' own eager attention."""
    model = compressor.model
    text = [*memory.rest[0], *prompt, *answer[:-1]]
    lead = compressor.task_embedding("qa", memory)
    inputs = torch.cat([lead, compressor.embed(torch.tensor([text]))], 1)
    cache = None
    positions = memory.starts[0] + torch.arange(inputs.shape[1])
    if memory.layers is None:
        inputs = torch.cat([memory.embeddings, inputs], 1)
        positions = torch.cat([memory.positions[0], positions])
    else:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(memory.layers):
            cache.update(key.clone(), value.clone(), layer)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model.model(inputs_embeds=inputs, position_ids=positions[None], output_attentions=True, **{CACHE: cache})
    model.set_attn_implementation("sdpa")
    return torch.stack(out.attentions)[:, 0, :, -len(answer) :].sum(2)


@pytest.mark.parametrize(("name", "context"), [("icae", 17), ("x500", 26)])
def test_attention_is_that_of_a_dense_computation(name, context, monkeypatch):
    monkeypatch.setattr("gistkit.ask.conversation.ROWS", 3)
    compressor = made(name)
    memory = encoded(compressor, context)
    conversation = Conversation(compressor, memory)
    first = conversation.reply(ids(4), max_new_tokens=3).tolist()
    answer = conversation.reply(ids(5, seed=1), max_new_tokens=7).tolist()
    expected = dense(compressor, memory, ids(4) + first + ids(5, seed=1), answer).mean((0, 1))
    found = conversation.attention()
    # Eager attention has its softmax in single precision.
    torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-5, atol=1e-6)
    assert float(found.sum()) == pytest.approx(7, abs=1e-6) and not found[len(expected) :].any()

    # By hand: each memory token's share over the tokens it stands for, and what is behind the window as it is.
    weights = torch.zeros(context, dtype=torch.float64)
    for (start, end), share in zip(compressor.context_spans(memory)[0].tolist(), expected.tolist(), strict=False):
        for token in range(start, end):
            weights[token] += share / (end - start)
    rest = memory.num_tokens + 1
    weights[memory.context_lengths[0] :] = expected[rest : rest + len(memory.rest[0])]
    (by_token,) = context_attention(conversation)
    torch.testing.assert_close(by_token, weights, rtol=1e-5, atol=1e-6)
    passages = sources(conversation, count=2, length=5)
    sums = [float(weights[start : start + 5].sum()) for start in range(context - 4)]
    assert passages[0].start == max(range(len(sums)), key=sums.__getitem__)
    assert passages[0].share == pytest.approx(max(sums) / float(weights.sum()), abs=1e-5)


def test_each_head_attends_to_the_tokens_that_it_kept():
    compressor = Select(tiny_llama(), ratio=3, by="expected_attention", bos_token=1).eval()
    memory = compressor.encode([ids(30)])
    conversation = Conversation(compressor, memory)
    answer = conversation.reply(ids(4), max_new_tokens=5).tolist()
    with torch.no_grad():
        whole = compressor.model(torch.tensor([[1, *ids(30)]]), **{CACHE: DynamicCache()}).past_key_values
    weights, chosen = torch.zeros(31, dtype=torch.float64), set()
    for layer, shares in enumerate(dense(compressor, memory, ids(4), answer)):
        for head, share in enumerate(shares):
            group = head // (len(shares) // memory.layers[layer][0].shape[1])
            # Whose keys they are says where they come from.
            places = torch.cdist(memory.layers[layer][0][0, group], whole.layers[layer].keys[0, group]).argmin(1)
            weights[places] += share[: len(places)].double() / len(shares) / 2
            chosen.add(tuple(places.tolist()))
    assert len(chosen) > 2
    (found,) = context_attention(conversation)
    torch.testing.assert_close(found, weights[1:], rtol=1e-5, atol=1e-6)
    # Two texts, each with its own tokens.
    conversation = Conversation(compressor, memory, compressor.encode([ids(12, seed=1)]))
    conversation.reply(ids(4), max_new_tokens=5)
    assert [len(part) for part in context_attention(conversation)] == [30, 12]


def test_columns_that_fill_up_a_head_are_not_attended_to():
    compressor = Select(tiny_llama().float(), ratio=3, by="key_norm", shares="all", bos_token=1).eval()
    memory = compressor.encode([ids(30)])
    conversation = Conversation(compressor, memory)
    conversation.reply(ids(4), max_new_tokens=5)
    attention, empty = conversation.attention(by_head=True), memory.in_columns(memory.positions)[0] == 0
    assert empty.any() and not attention[: len(empty)][empty].any() and attention[: len(empty)][~empty].all()
    assert float(attention.sum()) == pytest.approx(5, abs=1e-6) and len(context_attention(conversation)[0]) == 30
    # In another dtype than that of the keys that an answer left.
    conversation.reply(ids(4), max_new_tokens=5)
    with torch.autocast("cpu", torch.bfloat16):
        assert float(conversation.attention().sum()) == pytest.approx(5, abs=1e-4)


@pytest.mark.parametrize(
    ("largest", "family", "texts"),
    [(2**28, "llama", (30, 12)), (700, "llama", (30, 12)), (2**28, "gemma3", (42,))],
)
def test_attention_to_heads_of_different_lengths_is_that_of_a_dense_computation(largest, family, texts, monkeypatch):
    monkeypatch.setattr("gistkit.ask.conversation.ROWS", 3)
    for module in ("gistkit.ask.conversation", "gistkit.inspect.recorder"):
        monkeypatch.setattr(f"{module}.LARGEST_MAP", largest, raising=False)
    maps, alive, record = [], [], AttentionRecorder._record

    def recorded(*arguments):
        found = record(*arguments)
        maps.append(weakref.ref(found))
        alive.append(sum(one() is not None for one in maps))
        return found

    monkeypatch.setattr(AttentionRecorder, "_record", recorded)
    model = tiny(family, **({"sliding_window": 20} if family == "gemma3" else {}))
    compressor = Select(model, ratio=3, by="key_diff", shares="all", bos_token=1).eval()
    conversation = Conversation(compressor, *(compressor.encode([ids(n, seed=n)]) for n in texts))
    answer = conversation.reply(ids(4), max_new_tokens=18 if family == "gemma3" else 5).tolist()
    memory, expected = conversation.memory, torch.zeros(2 + 30 + 12, dtype=torch.float64)
    counts = torch.cat(memory.counts, 1)[0].tolist()
    places, text = memory.positions.long().split(counts), torch.tensor([ids(4) + answer[:-1]])
    positions = memory.starts[0] + torch.arange(text.shape[1])

    def read(layer, head, *own):
        kept = (part.split(memory.counts[layer][0].tolist())[head] for part in memory.layers[layer])
        keys, values = (torch.cat(pair) for pair in zip(kept, own, strict=True))
        # Of one text a position is 1 more than the place.
        at = torch.cat([places[2 * layer + head] - 1, positions])
        window = getattr(model.model.layers[layer].self_attn, "sliding_window", None)
        return keys, values, hidden(len(positions), len(keys), window, at)

    def look(layer, head, weights):
        own = places[2 * layer + head]
        expected.index_add_(0, own, weights[-len(answer) :, : len(own)].double().sum(0))

    with attention_by_hand(model, read, look):
        model.model(text, position_ids=positions[None])
    assert len({*counts}) > 2
    parts = context_attention(conversation)
    # 1 is the place of each text's BOS.
    expected = expected[2:] / compressor.config.num_hidden_layers / compressor.config.num_attention_heads
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)
    assert tuple(map(len, parts)) == texts
    # A layer's at a time.
    assert max(alive) == 1


def test_a_stop_token_does_not_count():
    compressor = made("x500")
    memory = encoded(compressor)
    conversation = Conversation(compressor, memory)
    free = conversation.reply(ids(4), max_new_tokens=6).tolist()
    stop = next(token for token in free if token != free[0])
    end = free.index(stop)
    conversation.new()
    conversation.reply(ids(4), max_new_tokens=6, stop_tokens=stop)
    assert float(conversation.attention().sum()) == pytest.approx(end, abs=1e-9)


def one_minded(**settings):
    """A compressor whose queries all ask for the same thing, in the slowest pair of rotated dimensions of each head."""
    torch.manual_seed(0)
    model = tiny_llama(attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.view(4, 12)[:, [5, 11]] = 30.0
    return FiveHundredX(model, chunk=12, ratio=6, lora=None, **settings).eval()


def planted(memory, token):
    """The memory with keys at `token` that such queries match."""
    for key, _ in memory.layers:
        key[:, :, token] = 0
        key[:, :, token, [5, 11]] = 30.0
    return memory


@pytest.mark.parametrize("token", [0, 3, 5])
@pytest.mark.parametrize("before", [0, 1])
def test_a_planted_key_is_the_source(token, before):
    compressor = one_minded(layout="dpl" if before else "epl")
    documents = [encoded(compressor, 15)] * before + [planted(encoded(compressor, 36, seed=1), token)]
    conversation = Conversation(compressor, *documents)
    conversation.reply(ids(4), max_new_tokens=5)
    assert [len(weights) for weights in context_attention(conversation)] == [15] * before + [36]
    first = sources(conversation, length=6)[0]
    assert (first.document, first.start, first.end) == (before, 6 * token, 6 * token + 6) and first.share > 0.95


def test_passages_are_the_heaviest_windows_without_overlap():
    weights = torch.tensor([0, 1, 4, 4, 1, 0, 0, 2, 0, 0.0])
    assert best_passages([weights], 3, 2) == [
        Passage(0, 2, 4, 8 / 12),
        Passage(0, 6, 8, 2 / 12),
        Passage(0, 0, 2, 1 / 12),
    ]
    # A passage is of one document, and a short document is one.
    assert best_passages([torch.tensor([3.0]), torch.tensor([2, 0, 0, 2.0])], 9, 3) == [
        Passage(0, 0, 1, 3 / 7),
        Passage(1, 0, 3, 2 / 7),
    ]
    assert best_passages([torch.zeros(4)]) == best_passages([]) == []
    for settings in ({"count": 0}, {"length": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected a whole number >= 1, got 0"):
            best_passages([weights], **settings)
