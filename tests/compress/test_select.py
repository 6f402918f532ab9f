"""Select keeps what its scores say, counted key by key with plain torch, and the model reads it as its own cache."""

import math
import warnings
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
import torch
from transformers import DynamicCache

from gistkit import hf
from gistkit.compress import Memory, Select
from gistkit.compress.config import draw_like
from gistkit.compress.memory_files import packed, unpacked
from gistkit.compress.scores import SCORES, ExpectedAttention, Heads, KVzip, Score, SnapKV, Streaming
from gistkit.compress.tokens import QUESTION
from gistkit.hf import CACHE
from tests.helpers.by_hand import attention_by_hand, hidden
from tests.helpers.models import byte_tokenizer, double_angles, tiny, tiny_llama
from tests.helpers.tiers import tiers

# No token twice: equal keys would be chosen among by rounding.
IDS = (2 + torch.randperm(248, generator=torch.Generator().manual_seed(0))[:90]).tolist()
BOS = 257


def model_of(**changes):
    return tiny_llama(vocab_size=258, bos_token_id=BOS, **changes)


def made(by, model=None, **settings):
    torch.manual_seed(0)
    compressor = Select(model_of() if model is None else model, ratio=3, by=by, **settings).eval()
    compressor.tokenizer = byte_tokenizer(start=True)
    return compressor


def cached(model, ids):
    """What transformers itself makes of tokens in each layer: queries before rotation, keys and values after it."""
    queries = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda *call: queries.append(call[2])) for layer in layers(model)
    ]
    with torch.no_grad(), double_angles(model):
        cache = model(torch.tensor([ids]), **{CACHE: DynamicCache()}).past_key_values
    for hook in hooks:
        hook.remove()
    heads = [query[0].unflatten(-1, (-1, layers(model)[0].self_attn.head_dim)).transpose(0, 1) for query in queries]
    return [(query, layer.keys[0], layer.values[0]) for query, layer in zip(heads, cache.layers, strict=True)]


def layers(model):
    return model.model.layers


def rotated(vector, position, inv_freq):
    """One vector [D] at a position, written out."""
    out, half = vector.clone(), len(inv_freq)
    for i, frequency in enumerate(inv_freq.double().tolist()):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[i] = vector[i] * cos - vector[i + half] * sin
        out[i + half] = vector[i + half] * cos + vector[i] * sin
    return out


def key_norm(model, layer, query, key, value, ids):
    return [[-(sum(x * x for x in k) ** 0.5) for k in head] for head in key.tolist()]


def key_diff(model, layer, query, key, value, ids):
    scores = []
    for head in key:
        mean = sum(k / k.norm() for k in head) / len(head)
        scores.append([-float(k @ mean / (k.norm() * mean.norm())) for k in head])
    return scores


def expected_attention(model, layer, query, key, value, ids):
    inv_freq, n, width = model.model.rotary_emb.inv_freq, key.shape[1], key.shape[2]
    turns = [torch.stack([rotated(e, n + i, inv_freq) for e in torch.eye(width).double()], 1) for i in range(40)]
    turn = sum(turns) / 40
    group, scores = len(query) // len(key), torch.zeros(key.shape[:2]).double()
    for head, own in enumerate(query):
        mean, spread = own[4:].mean(0), torch.cov(own[4:].T, correction=0)
        mean, spread = turn @ mean, turn @ spread @ turn.T
        keys = key[head // group, 4:]
        logits = torch.stack([k @ mean / width**0.5 + k @ spread @ k / width / 2 for k in keys])
        scores[head // group, 4:] += logits.softmax(0) * value[head // group, 4:].norm(dim=-1) / group
    scores[:, :4] = math.inf
    return scores.tolist()


def weights_of(keys, query, place, inv_freq):
    """How a query at a place, before rotation, attends to keys."""
    return (keys @ rotated(query, place, inv_freq) / len(query) ** 0.5).softmax(0)


def snapkv(model, layer, query, key, value, ids, asked=0):
    """By a text's last 8 queries, which are kept, or by those of `asked` tokens behind it."""
    n, group = key.shape[1] - asked, len(query) // len(key)
    end, places = (n, range(n, n + asked)) if asked else (n - 8, range(n - 8, n))
    scores = torch.zeros(len(key), n).double()
    for head, own in enumerate(query):
        seen = torch.zeros(end).double()
        for place in places:
            weights = weights_of(key[head // group, : place + 1], own[place], place, model.model.rotary_emb.inv_freq)
            seen += weights[:end] / len(places)
        scores[head // group, :end] += torch.stack([sum(seen[max(i - 2, 0) : i + 3]) / 5 for i in range(end)]) / group
    scores[:, end:] = math.inf
    return scores.tolist()


def streaming(model, layer, query, key, value, ids):
    n = key.shape[1]
    return [[math.inf if i < 4 else i for i in range(n)]] * len(key)


def kvzip(model, layer, query, key, value, ids, chunk=2048):
    n, scores = len(ids), torch.zeros(key.shape[:2]).double()
    inv_freq, group = model.model.rotary_emb.inv_freq, len(query) // len(key)
    words = [
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with",
    ]
    for start in range(0, n, chunk):
        part = ids[start : start + chunk]
        request = byte_tokenizer()(words[start > 0])["input_ids"] + ids[max(start - 8, 0) : start]
        again = request + byte_tokenizer()("\n")["input_ids"] + part
        queries, keys, _ = cached(model, ids + again)[layer]
        for head in range(len(queries)):
            own = keys[head // group]
            for place in range(n, n + len(again)):
                sinks = own[: min(4, start)]
                seen = torch.cat([sinks, own[start : start + len(part)], own[n : place + 1]])
                weights = weights_of(seen, queries[head, place], place, inv_freq)[len(sinks) :][: len(part)]
                best = scores[head // group, start : start + len(part)]
                best.copy_(torch.maximum(best, weights))
    scores[:, :4] = math.inf
    return scores.tolist()


def chosen(scores, count):
    """The places of the highest scores, in order; of equal ones the first."""
    return [sorted(sorted(range(len(head)), key=lambda i: (-head[i], i))[:count]) for head in scores]


ORACLES = {f.__name__: f for f in (kvzip, expected_attention, snapkv, key_diff, key_norm, streaming)}


@pytest.mark.parametrize("by", ORACLES)
def test_the_kept_keys_are_those_of_the_highest_scores(by):
    small = {"snapkv": SnapKV(window=8), "expected_attention": ExpectedAttention(future=40)}
    compressor, ids = made(small.get(by, by)), [BOS, *IDS]
    memory = compressor.encode([IDS])
    assert memory.lengths == (len(ids) // 3,) and memory.starts == (len(ids),) and memory.context_lengths == (len(IDS),)
    for layer, (query, key, value) in enumerate(cached(compressor.model, ids)):
        places = chosen(ORACLES[by](compressor.model, layer, query, key, value, ids), len(ids) // 3)
        assert len({*map(tuple, places)}) > 1 or by == "streaming"
        for head, own in enumerate(places):
            for kept, whole in zip(memory.layers[layer], (key, value), strict=True):
                torch.testing.assert_close(kept[0, head], whole[head, own], rtol=1e-9, atol=1e-9)


def shared(scores, count, least):
    """[layers][heads] of the places of the highest scores among all of them, `count` a head on average."""
    kept = [[set(places[:least]) for places in chosen_first(layer)] for layer in scores]
    free = [
        (-score, layer, head, place)
        for layer, heads in enumerate(scores)
        for head, own in enumerate(heads)
        for place, score in enumerate(own)
        if place not in kept[layer][head]
    ]
    heads = sum(map(len, scores))
    for _, layer, head, place in sorted(free)[: (count - least) * heads]:
        kept[layer][head].add(place)
    return [[sorted(places) for places in heads] for heads in kept]


def chosen_first(scores):
    return [sorted(range(len(head)), key=lambda i: (-head[i], i)) for head in scores]


@pytest.mark.parametrize("shares", ["equal", "heads"])
def test_a_memory_made_in_inference_mode_is_read_with_gradients_and_without_text(shares):
    compressor = made("key_norm", lora=2, shares=shares)
    with torch.inference_mode():
        memory = compressor.encode([IDS[:20]])
    text = torch.tensor([IDS[30:34]])
    hidden_states = compressor.decode(memory, "lm", text)
    hidden_states.sum().backward()
    assert any(parameter.grad is not None for parameter in compressor.lm.model.parameters())
    empty = compressor.decode(memory, "lm", [[]])
    torch.testing.assert_close(empty, hidden_states[:, :1])
    with torch.no_grad():
        assert compressor.generate(memory, max_new_tokens=1).shape == (1, 1)


@pytest.mark.parametrize(
    ("by", "shares"),
    [
        ("key_norm", "heads"),
        ("key_norm", "all"),
        ("kvzip", "all"),
        ("key_norm", "pyramid"),
        ("kvzip", "pyramid"),
    ],
)
def test_heads_share_what_they_keep(by, shares, tmp_path):
    model = model_of()
    compressor, ids, count = made(by, model, shares=shares), [BOS, *IDS], 91 // 3
    memory = compressor.encode([IDS, IDS[:20]])
    whole = cached(model, ids)
    scores = [ORACLES[by](model, layer, *whole[layer], ids) for layer in range(2)]
    if shares == "pyramid":
        # From 58.5 at the bottom to a twentieth of 30 at the top.
        places = [[sorted(own[:n]) for own in chosen_first(heads)] for n, heads in zip((58, 2), scores, strict=True)]
    else:
        places = (
            shared(scores, count, 0) if shares == "all" else [shared([own], count, count // 5)[0] for own in scores]
        )
    sizes = [len(own) for layer in places for own in layer]
    assert sum(sizes) == count * 4 and len({*sizes}) > 1 and memory.lengths[0] == max(sizes)
    for layer, heads in enumerate(places):
        for head, own in enumerate(heads):
            for kept, all_ in zip(heads_of(memory, layer), whole[layer][1:], strict=True):
                torch.testing.assert_close(kept[head], all_[head, own], rtol=1e-9, atol=1e-9)
    # Transformers' own attention over what each head has, layer by layer.
    text = [[3, 4, 5, 6]]
    found = compressor.logits(compressor.decode(memory[0], "lm", text))[:, 1:].double()
    torch.testing.assert_close(found, dense_reading(model, memory, text), rtol=1e-5, atol=1e-5)
    answer = compressor.generate(memory, [text[0], [7, 8]], max_new_tokens=9)
    for row in range(2):
        memory[row].save(tmp_path / "m.gist")
        again = Memory.load(tmp_path / "m.gist")
        assert all(map(torch.equal, again.tensors, memory[row].tensors))
        assert torch.equal(again.positions, memory[row].positions) and again.lengths == memory[row].lengths
        own = compressor.generate(again, [text[0], [7, 8]][row : row + 1], max_new_tokens=9)
        assert torch.equal(own[0], answer[row])
    assert memory.sizes == (count, 7)
    numbers = 2 * 12 * sum(sizes)
    assert memory[0].nbytes == numbers * memory.tensors[0].element_size()
    memory[0].save(tmp_path / "m.gist")
    assert (tmp_path / "m.gist").stat().st_size < memory[0].nbytes + 4 * sum(sizes) + 4000
    tensors, header = packed(memory[0])
    tensors["layers.1.counts"][0, 0] = 2**40
    with pytest.raises(ValueError, match=r"m\.gist: expected the contents of a memory, got .* rows for heads of"):
        unpacked(Memory, "m.gist", header, tensors, verify=False)
    with pytest.raises(ValueError, match="memory: expected the same number of tokens in each head"):
        compressor.to_cache(memory[0])


def heads_of(memory, layer):
    """Keys and values of each head of the first row, and then of those of the next rows."""
    return [part.split(memory.counts[layer].flatten().tolist()) for part in memory.layers[layer]]


def dense_reading(model, memory, text):
    """Logits of a text that reads of each layer and key head what it keeps of the first row, by transformers itself."""

    def read(layer, head, *own):
        keys, values = (torch.cat([old[head], new]) for old, new in zip(heads_of(memory, layer), own, strict=True))
        return keys, values, hidden(len(own[0]), len(keys))

    with attention_by_hand(model, read):
        return model(torch.tensor(text), position_ids=memory.starts[0] + torch.arange(4)[None]).logits


def test_a_question_decides_what_is_kept(tmp_path):
    question, model = "Who?", model_of()
    compressor = made("snapkv", model, question=question)
    assert compressor.title == "Select snapkv 3x, for a question"
    whole = [BOS, *IDS, *byte_tokenizer()(QUESTION.format(question=question))["input_ids"]]
    assert len(whole) == len(IDS) + 1 + 32
    memory = compressor.encode([IDS, IDS[:9]])
    assert memory.lengths == (30, 3) and memory.starts == (91, 10)
    for layer, (query, key, value) in enumerate(cached(model, whole)):
        for head, own in enumerate(chosen(snapkv(model, layer, query, key, value, whole, 32), 30)):
            torch.testing.assert_close(memory.layers[layer][0][0, head], key[head, own], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(memory.layers[layer][1][0, head], value[head, own], rtol=1e-9, atol=1e-9)
    # Another compressor reads it only if it is for that question.
    memory.save(tmp_path / "m.gist")
    again = made("snapkv", model, question=question)
    assert torch.equal(again.generate(Memory.load(tmp_path / "m.gist"), max_new_tokens=3),
                       compressor.generate(memory, max_new_tokens=3))  # fmt: skip
    with pytest.raises(ValueError, match="memory: expected one made with"):
        made("snapkv", model).generate(memory)


@pytest.mark.parametrize("fit", [False, True])
def test_kvzip_keeps_what_a_question_and_its_answer_read(fit):
    question, model = "Who?", model_of()
    compressor = made(None, model, question=question, fit=fit)
    assert compressor.title == f"Select kvzip 3x{', fitted' * fit}, for a question"
    ids, words = [BOS, *IDS], byte_tokenizer()(QUESTION.format(question=question))["input_ids"]
    # What the model answers with all of the text, by transformers.
    said = list(words)
    for _ in range(32):
        token = int(model(torch.tensor([ids + said])).logits[0, -1].argmax())
        if token == model.config.eos_token_id or "\n" in byte_tokenizer().decode([token]):
            break
        said.append(token)
    else:
        said.pop()
    memory = compressor.encode([IDS])
    n, inv_freq = len(ids), model.model.rotary_emb.inv_freq
    for layer, (query, key, value) in enumerate(cached(model, ids + said)):
        scores, group = torch.zeros(len(key), n).double(), len(query) // len(key)
        for head, own in enumerate(query):
            for place in range(n, n + len(said)):
                weights = weights_of(key[head // group, : place + 1], own[place], place, inv_freq)[:n]
                scores[head // group] = torch.maximum(scores[head // group], weights)
        scores[:, :4] = math.inf
        for head, own in enumerate(chosen(scores.tolist(), n // 3)):
            torch.testing.assert_close(memory.layers[layer][0][0, head], key[head, own], rtol=1e-9, atol=1e-9)
            same = torch.allclose(memory.layers[layer][1][0, head], value[head, own])
            assert same != fit
    assert compressor.generate(memory, [words], task="qa", max_new_tokens=2).shape == (1, 2)


def test_kvzip_repeats_long_texts_in_parts():
    compressor, ids = made(KVzip(chunk=40)), [BOS, *IDS]
    memory = compressor.encode([IDS])
    query, key, value = cached(compressor.model, ids)[1]
    places = chosen(kvzip(compressor.model, 1, query, key, value, ids, chunk=40), len(ids) // 3)
    torch.testing.assert_close(memory.layers[1][0][0], torch.stack([key[h, own] for h, own in enumerate(places)]))


@pytest.mark.parametrize(("by", "expected"), [("even", [0, 3, 6, 9]), (Streaming(sinks=1), [0, 7, 8, 9])])
def test_controls_keep_the_places_that_they_name(by, expected):
    compressor = made(by, budget=4)
    memory = compressor.encode([IDS[:9]])
    _, key, _ = cached(compressor.model, [BOS, *IDS[:9]])[0]
    torch.testing.assert_close(memory.layers[0][0][0], key[:, expected])


def test_random_keeps_other_tokens_in_each_head_and_the_same_ones_again():
    compressor = made("random")
    one, two, other = (c.encode([IDS]) for c in (compressor, compressor, made({"name": "random", "seed": 1})))
    assert all(map(torch.equal, one.tensors, two.tensors)) and not torch.equal(one.tensors[0], other.tensors[0])


@pytest.mark.parametrize("positions", ["kept", "closed"])
@pytest.mark.parametrize("by", ["expected_attention", "kvzip"])
def test_transformers_reads_the_memory_as_its_cache(by, positions):
    compressor = made(by, positions=positions)
    model, memory, text = compressor.model, compressor.encode([IDS]), [[3, 4, 5, 6]]
    kept = memory.lengths[0]
    if positions == "closed":
        # As if the kept tokens had been 0, 1, .. from the start.
        inv_freq = model.model.rotary_emb.inv_freq
        for closed, apart in zip(memory.layers, made(by, model).encode([IDS]).layers, strict=True):
            for place in range(0, kept, 7):
                angles = [rotated(apart[0][0, 0, place], p, inv_freq) for p in range(-len(IDS) - 1, len(IDS))]
                assert min((angle - closed[0][0, 0, place]).abs().max() for angle in angles) < 1e-9
    cache = DynamicCache()
    for layer, (key, value) in enumerate(memory.layers):
        cache.update(key, value, layer)
    start = len(IDS) + 1 if positions == "kept" else kept
    with torch.no_grad(), double_angles(model):
        expected = model(torch.tensor(text), **{CACHE: cache}, position_ids=start + torch.arange(4)[None]).logits
    found = compressor.logits(compressor.decode(memory, "lm", text))
    torch.testing.assert_close(found[:, 1:].double(), expected, rtol=1e-5, atol=1e-5)
    prompt = torch.tensor(text)
    behind = model.generate(prompt, **{CACHE: compressor.to_cache(memory)}, max_new_tokens=6, pad_token_id=0)
    assert torch.equal(behind[:, 4:], compressor.generate(memory, prompt, max_new_tokens=6))


@pytest.mark.parametrize("by", SCORES)
def test_each_row_is_as_alone_and_a_file_brings_it_back(by, tmp_path):
    compressor, rows = made(by), [IDS, IDS[:7], IDS[5:40]]
    batch = compressor.encode(rows)
    for index, row in enumerate(rows):
        alone = compressor.encode([row])
        assert batch[index].lengths == alone.lengths and torch.equal(batch[index].positions, alone.positions)
        for one, other in zip(batch[index].tensors, alone.tensors, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    batch.save(tmp_path / "m.gist")
    again = Memory.load(tmp_path / "m.gist")
    assert torch.equal(compressor.generate(again, max_new_tokens=4), compressor.generate(batch, max_new_tokens=4))
    compressor.save_pretrained(tmp_path / "folder")
    read = Select.from_pretrained(tmp_path / "folder", model_of(), tokenizer=compressor.tokenizer)
    assert read.settings == compressor.settings and read.score == compressor.score


@pytest.mark.parametrize("family", tiers(["mistral", "gemma3", "qwen2", "gemma2"], ["gemma3"]))
def test_layers_with_a_sliding_window_keep_what_is_seen_there(family):
    model = tiny(family, bos_token_id=1)
    compressor = Select(model, ratio=2, by="even").eval()
    ids = torch.randint(3, 50, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    memory = compressor.encode([ids])
    for layer, ((kept, _), (_, key, _)) in enumerate(zip(memory.layers, cached(model, [1, *ids]), strict=True)):
        slides = family == "mistral" or layers(model)[layer].self_attn.sliding_window is not None
        places = [*range(11, 21)] if slides else torch.linspace(0, 20, 10).round().long().tolist()
        torch.testing.assert_close(kept[0], key[:, places], rtol=1e-6, atol=1e-6)
    if family == "mistral":
        # All its layers slide, over fewer tokens than are kept: nothing is lost.
        whole = torch.tensor([[1, *ids, 7, 8]])
        expected = model.generate(whole, max_new_tokens=8, pad_token_id=0)[:, whole.shape[1] :]
        assert torch.equal(compressor.generate(memory, [[7, 8]], max_new_tokens=8), expected)


def test_questions_are_read_with_an_adapter_of_their_own(tmp_path):
    from peft import PeftModel

    compressor = made("key_norm", lora=2, own_reader=True, shares="all")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in compressor.trainable():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    memory, question = compressor.encode([IDS]), torch.tensor([[3, 4, 5]])
    compressor.save_pretrained(tmp_path)
    loaded = Select.from_pretrained(tmp_path, model_of()).eval()
    assert (loaded.reader, sorted(loaded.adapters.names)) == ("reader", ["reader", "text"])
    hidden = loaded.decode(loaded.encode([IDS]), "qa", question)
    torch.testing.assert_close(hidden, compressor.decode(memory, "qa", question))

    # With all tokens kept the text's adapter makes transformers' own cache, and the reader's reads it.
    under = lambda role: PeftModel.from_pretrained(model_of(), tmp_path / f"gistkit_0_{role}").merge_and_unload()  # noqa: E731
    with torch.no_grad():
        cache = under("text")(torch.tensor([[BOS, *IDS]]), **{CACHE: DynamicCache()}).past_key_values
        expected, other = (
            under(role)(question, **{CACHE: deepcopy(cache)}).logits.float() for role in ("reader", "text")
        )
    whole = loaded.at(1)
    found = whole.logits(whole.decode(whole.encode([IDS]), "qa", question))[:, 1:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (other - expected).abs().max() > 0.01

    # What is trained of the reader leaves memories as they are.
    with torch.no_grad():
        for name, parameter in loaded.trainable():
            if loaded.adapters.names["reader"] in name.split("."):
                parameter.add_(0.1)
    again = loaded.encode([IDS])
    assert all(map(torch.equal, again.tensors, compressor.encode([IDS]).tensors))
    assert (loaded.decode(again, "qa", question) - hidden).abs().max() > 0.01


def test_a_users_adapter_stays_active():
    from peft import LoraConfig, get_peft_model

    plain = made("key_norm").encode([IDS])
    model = get_peft_model(model_of(), LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    memory = made("key_norm", model).encode([IDS])
    assert not torch.allclose(memory.tensors[0].float(), plain.tensors[0].float(), atol=1e-3)
    assert made("key_norm", model).adapters is None


def test_wrong_scores_are_named():
    for wrong, message in (
        (lambda: SnapKV(kernel=4), "kernel: expected an odd number, got 4"),
        (lambda: ExpectedAttention(future=0), "future: expected"),
        (lambda: made("expected_attention", tiny("gpt2", bos_token_id=1)), "model: expected"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()


def of_places(compressor, ids, start=0):
    """The kept keys of each layer and head of a text, as transformers makes them from position `start` on."""
    memory = compressor.encode([ids])
    with torch.no_grad(), double_angles(compressor.model):
        whole = compressor.model(
            torch.tensor([[BOS, *ids]]),
            position_ids=start + torch.arange(len(ids) + 1)[None],
            **{CACHE: DynamicCache()},
        ).past_key_values
    places = memory.positions[0].mT.unflatten(0, (2, -1)) - 1
    kept = [
        layer.keys[0].take_along_dim(index[..., None], 1) for layer, index in zip(whole.layers, places, strict=True)
    ]
    return memory, kept


def test_joined_texts_are_read_one_behind_the_other(tmp_path):
    compressor = made("expected_attention")
    first, kept = of_places(compressor, IDS)
    second, later = of_places(compressor, IDS[::-1][:40], len(IDS) + 1)
    memory = compressor.join([first, second])
    for layer, (key, value) in enumerate(memory.layers):
        torch.testing.assert_close(key[0], torch.cat([kept[layer], later[layer]], 1), rtol=1e-6, atol=1e-6)
        assert torch.equal(value, torch.cat([first.layers[layer][1], second.layers[layer][1]], 2))
    assert memory.starts == (91 + 41,) and memory.context_lengths == (130,)
    assert memory.ordinals.tolist() == [[*range(61, 91), *range(91 + 28, 91 + 41)]]
    # All tokens but BOS, which is none of a text's, count from the first text on.
    memory.save(tmp_path / "m.gist")
    spans = compressor.context_spans(Memory.load(tmp_path / "m.gist"))[0]
    own = compressor.context_spans(second)[0]
    assert torch.equal(spans[30:], (own + 90).where(own[..., 1:] > 0, 0)) and (own[0] == 0).any()
    closed = made("expected_attention", positions="closed")
    memory = closed.join([closed.encode([IDS]), closed.encode([IDS[:40]])])
    assert memory.starts == memory.lengths == (43,) and memory.ordinals.tolist() == [[*range(43)]]


@pytest.mark.parametrize("positions", ["kept", "closed"])
def test_long_contexts_are_read_in_parts(positions):
    model = model_of()
    compressor = made("snapkv", model, part=40, positions=positions)
    parts = [IDS[:30], IDS[30:60], IDS[60:]]
    expected = compressor.join([compressor.encode([part]) for part in parts])
    memory = compressor.encode([IDS, IDS[:7]])
    for one, other in zip(memory[0].tensors, expected.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert memory.starts == (expected.starts[0], 8 if positions == "kept" else 2)
    assert made("expected_attention", model, part=40, budget=20).encode([IDS]).lengths == (20,)
    # What a trained adapter has not seen is no window by itself, as a part is.
    trained = made("snapkv", model, positions=positions)
    trained.trained_length = 40
    with pytest.warns(UserWarning, match="input_ids: expected at most 40 tokens"):
        assert torch.equal(trained.encode([IDS]).tensors[1], expected.tensors[1])


def test_a_context_beyond_the_models_positions_closes_up():
    model = model_of(max_position_embeddings=200)
    compressor = made("key_norm", model, positions="closed")
    assert compressor.reach == 175 and made("kvzip", model).reach == 87
    memory = compressor.encode([IDS * 3])
    assert memory.context_lengths == (270,) and memory.starts == memory.lengths == (90,)
    # No warning: all positions are the model's own.
    assert compressor.generate(memory, [[3, 4]], max_new_tokens=3).shape == (1, 3)


def test_models_whose_keys_cannot_move_refuse_to_join():
    compressor = made("key_norm", tiny("gpt2", bos_token_id=1))
    with pytest.raises(TypeError, match="model: expected"):
        compressor.join([compressor.encode([[3, 4, 5, 6]])] * 2)


def test_a_score_of_ones_own():
    @dataclass(frozen=True)
    class Near(Score):
        name = "near"
        place: int

        def __call__(self, heads):
            return -(torch.arange(heads.key.shape[1]) - self.place).abs().float().expand(heads.key.shape[0], -1)

    class Last(Score):
        name = "last"

        def __call__(self, heads):
            return torch.arange(heads.key.shape[1]).expand(heads.key.shape[0], -1).float()

    assert made(Last()).settings["by"] == "last" and made(Near(40)).settings["by"] == {"name": "near", "place": 40}
    assert made(MappingProxyType({"name": "snapkv", "window": 3})).score == SnapKV(3)
    compressor = made(Last())
    _, key, _ = cached(compressor.model, [BOS, *IDS])[1]
    torch.testing.assert_close(compressor.encode([IDS]).layers[1][0][0], key[:, -30:])


def test_selections_of_a_model_without_adapters_are_one_compressor(tmp_path):
    model = model_of()
    one, other = (Select(model, ratio=3, by="key_norm", **more).eval() for more in ({}, {"fit": True}))
    other.tokenizer = byte_tokenizer(start=True)
    # As commands have drawn it before, of files and stores that are there.
    torch.manual_seed(0)
    drawn = draw_like(model.get_input_embeddings(), 1)
    assert one.own_fingerprint() == other.own_fingerprint() == hf.digest([("task_embeddings.ae", drawn)])
    joined = one.join([one.encode([IDS[:30]]), other.encode([IDS[30:]])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.decode(joined, "lm", torch.tensor([[5]]))
    trained = Select(model_of(), ratio=3, lora=2)
    assert trained.own_fingerprint() != Select(trained.model, ratio=3, lora=2).own_fingerprint()


@pytest.mark.parametrize("by", ["kvzip", "expected_attention", "streaming"])
@pytest.mark.parametrize("shares", ["equal", "all"])
@pytest.mark.parametrize("budget", [20, 40])
def test_first_tokens_of_parts_leave_room_for_others(by, shares, budget):
    model = model_of()
    kept = made(by, model, part=9, shares=shares, budget=budget).encode([IDS]).positions.flatten() - 2
    # Of each part the first three tokens, and a BOS.
    first = (kept[kept >= -1] % 9 < 3) | (kept[kept >= -1] < 0)
    assert first.float().mean() < 0.6
    # The first part keeps one at least, however little it keeps.
    few = made(by, model, part=9, shares=shares, budget=18).encode([IDS]).positions
    assert (few.flatten() - 1 == 0).sum() >= 1
    # A single part keeps them.
    whole = made(by, model, part=90, budget=budget).encode([IDS])
    assert (whole.positions[0, :4].mT - 1 == torch.arange(4)).all()


def test_expected_attention_of_first_tokens_has_a_bound():
    score, key = ExpectedAttention(future=4, sinks=1), torch.zeros(1, 6, 4)
    key[:, 0] = 100.0
    value = torch.ones(1, 6, 4)
    value[:, 0] = 0.0
    query = torch.full((1, 6, 4), 30.0)
    found = score(Heads(0, query, key, value, 0.5, torch.ones(2) * 1e-6, 3))
    assert found.isfinite().all() and found[0, 0] == 0


def test_positions_of_a_file_without_their_heads_are_refused():
    compressor = made("even")
    memory = compressor.encode([IDS])
    flat = replace(memory, positions=memory.positions[:, :, 0], ordinals=memory.positions[:, :, 0].long())
    with pytest.raises(ValueError, match="memory: expected positions"):
        compressor.context_spans(flat)


def test_a_budget_counts_parts_alike_with_a_first_token_of_the_contexts_own():
    compressor = made("key_norm", part=10, budget=2)
    for ids in (IDS[:20], [BOS, *IDS[:20]]):
        assert compressor.encode([ids]).sizes == (2,) and compressor.size(20) == 2


def test_a_question_leaves_room_for_itself_and_its_answer():
    model = tiny("gpt2", vocab_size=258, max_position_embeddings=128, bos_token_id=BOS)
    compressor = made(None, model, question="Who?")
    words = len(byte_tokenizer()(QUESTION.format(question="Who?"))["input_ids"])
    # With BOS; an answer is cut at the last position, or there is none.
    for length in (110 - words, 126 - words, 127 - words):
        assert compressor.encode([(IDS + IDS)[:length]]).context_lengths == (length,)
    with pytest.raises(ValueError, match=r"^question: it and its answer are read after the text: expected"):
        compressor.encode([(IDS + IDS)[: 128 - words]])
    long = made(None, tiny_llama(vocab_size=258, bos_token_id=BOS, max_position_embeddings=256), question="W" * 100)
    asked = len(byte_tokenizer()(QUESTION.format(question="W" * 100))["input_ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert long.reach == (256 - asked - 32) // 2 and long.encode([IDS]).context_lengths == (90,)


def test_an_untrained_selection_has_the_same_weights_at_each_draw():
    """Those of the embeddings as the first layer reads them: memories made before name their maker by them."""
    for family in ("llama", "gemma3"):
        model = tiny(family, bos_token_id=1)
        with torch.no_grad():
            read = model.get_input_embeddings()(torch.arange(model.config.vocab_size)).float()
        drawn = torch.randn(1, read.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        found = Select(model).task_embeddings["ae"]
        torch.testing.assert_close(found, read.mean(0) + read.std() * drawn, rtol=1e-5, atol=1e-6)
        assert torch.equal(found, Select(model).task_embeddings["ae"])
