"""Fitted values and biases, against the same regressions written out in double precision, key by key."""

import copy
import gc
import math

import pytest
import torch

from gistkit.compress import Memory, Select, refine, selection
from gistkit.compress.matching import BIAS_RIDGE, RIDGE, References, matched
from gistkit.compress.memory_files import packed, unpacked
from gistkit.compress.tokens import pad
from tests.compress.test_select import BOS, IDS, cached, layers, made, model_of, rotated
from tests.helpers.models import by_hand, byte_tokenizer, double_angles, tiny


def solved(matrix, rows):
    """The solution of a square system, by Gaussian elimination; `matrix` is positive definite."""
    matrix, rows = [list(row) for row in matrix], [list(row) for row in rows]
    for i in range(len(matrix)):
        for j in range(i + 1, len(matrix)):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    for i in reversed(range(len(matrix))):
        for j in range(i + 1, len(matrix)):
            rows[i] = [a - matrix[i][j] * b for a, b in zip(rows[i], rows[j], strict=True)]
        rows[i] = [a / matrix[i][i] for a in rows[i]]
    return torch.tensor(rows, dtype=torch.float64)


def weights_of(query, key, scale):
    """exp(q k) over the sum of all keys, and that sum; each query by itself."""
    exponentials = [[math.exp(float(q @ k) * scale) for k in key] for q in query]
    return [[e / sum(row) for e in row] for row in exponentials], [sum(row) for row in exponentials]


def bias_loss(seen, part, factor):
    """What the biases make small: how far a query's mass is from that of all keys, and the factors from 1."""
    away = [p * (sum(s * f for s, f in zip(row, factor, strict=True)) - 1) for row, p in zip(seen, part, strict=True)]
    return sum(a * a for a in away) + BIAS_RIDGE * sum((f - 1) ** 2 for f in factor)


def best_factor(seen, part):
    """The least `bias_loss` of positive factors, by projected gradient descent."""
    seen, part = torch.tensor(seen).double(), torch.tensor(part).double()
    gram, target = seen.T @ (seen * part[:, None] ** 2), seen.T @ part**2
    step, factor = 1 / (float(gram.trace()) + BIAS_RIDGE), torch.ones(seen.shape[1]).double()
    for _ in range(5000):
        factor = (factor - step * (gram @ factor - target + BIAS_RIDGE * (factor - 1))).clamp(min=0)
    return factor.tolist()


def check_by_hand(bias, values, query, behind, key, value, kept, scale):
    """That biases are nearly the best ones, and values those of the normal equations with them."""
    whole, mass = weights_of(query, key, scale)
    part = [m / (m + math.exp(float(b))) for m, b in zip(mass, behind, strict=True)]
    seen = [[row[place] for place in kept] for row in whole]
    least = bias_loss(seen, part, best_factor(seen, part))
    unbiased = bias_loss(seen, part, [1.0] * len(kept))
    assert bias_loss(seen, part, bias.exp().tolist()) - least < 0.05 * (unbiased - least)
    factors = [[s * math.exp(float(b)) for s, b in zip(row, bias, strict=True)] for row in seen]
    rows = torch.tensor([[p * f / sum(row) for f in row] for row, p in zip(factors, part, strict=True)]).double()
    wanted = torch.tensor(part)[:, None].double() * (torch.tensor(whole).double() @ value.double())
    gram = (rows.T @ rows + RIDGE * torch.eye(len(kept))).tolist()
    right = (rows.T @ wanted + RIDGE * value[kept].double()).tolist()
    torch.testing.assert_close(values.double(), solved(gram, right), rtol=1e-5, atol=1e-5)


def fitted(query, behind, key, value, kept):
    """`matched` of one head."""
    found = matched(References(query[None], behind[None], 0.4), slice(1), key[None], value[None], kept[None])
    return (each[0] for each in found)


def case(queries, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(24, 6, generator=draw, dtype=dtype) for _ in range(2))
    query = 2 * torch.randn(queries, 6, generator=draw, dtype=dtype)
    return query, torch.randn(queries, generator=draw, dtype=dtype), key, value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("queries", [40, 3])
def test_a_fit_is_that_of_the_normal_equations(queries, dtype):
    query, behind, key, value = case(queries, dtype=dtype)
    kept = torch.tensor([0, 3, 4, 9, 15, 20, 23])
    bias, values = fitted(query, behind, key, value, kept)
    assert bias.dtype == values.dtype == dtype
    check_by_hand(bias, values, query, behind, key, value, kept.tolist(), 0.4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_heads_with_different_numbers_of_keys_are_fitted_together_as_each_alone(dtype, monkeypatch):
    heads = [case(30, seed, dtype) for seed in range(4)]
    query, behind, key, value = (torch.stack(each) for each in zip(*heads, strict=True))
    kept = [[0, 3, 4, 9, 15, 20, 23], [7, 8], [], [*range(24)]]
    index = torch.tensor([[*places, *[-1] * (24 - len(places))] for places in kept])
    one = selection._fitted(References(query, behind, 0.4), key, value, index)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    together = selection._fitted(References(query, behind, 0.4), key, value, index)
    for alone, found in zip(one, together, strict=True):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    for head, places in enumerate(kept[:2]):
        bias, values = fitted(*heads[head], torch.tensor(places))
        count = len(places)
        torch.testing.assert_close(together[0][head, :count], bias, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(together[1][head, :count] + value[head, places], values, rtol=1e-5, atol=1e-5)
        assert not together[0][head, count:].any() and not together[1][head, count:].any()
    # Heads without keys, and with all of them.
    assert not together[0][2:].any() and not together[1][2:].any()


def outputs(query, behind, key, value, bias, scale=0.4):
    """What attention over keys, and over something behind them whose value is 0, gives."""
    logits = query @ key.T * scale + bias
    return torch.cat([logits, behind[:, None]], 1).softmax(-1)[:, :-1] @ value


def test_other_queries_get_more_of_all_keys():
    query, behind, key, value = case(400)
    kept = torch.tensor([0, 3, 4, 9, 15, 20, 23])
    bias, values = fitted(query[:200], behind[:200], key, value, kept)
    query, behind = query[200:], behind[200:]
    whole = outputs(query, behind, key, value, torch.zeros(24))
    away = [
        float((outputs(query, behind, key[kept], own, added) - whole).square().mean())
        for own, added in ((value[kept], torch.zeros(7)), (values, torch.zeros(7)), (values, bias))
    ]
    assert away[2] < away[1] and away[2] < 0.5 * away[0]


def references(model, ids, layer):
    """Queries [Hk, R, D] of the repetition of a text, and what each reads behind the text, by transformers itself."""
    again = byte_tokenizer()("\n\nRepeat the previous context exactly.\n")["input_ids"] + ids
    queries, keys, _ = cached(model, ids + again)[layer]
    n, group = len(ids), len(queries) // len(keys)
    found = [[], []]
    for head, own in enumerate(queries):
        turned = [rotated(own[n + place], n + place, model.model.rotary_emb.inv_freq) for place in range(len(again))]
        logits = [(keys[head // group, n : n + 1 + i] @ q) / q.shape[0] ** 0.5 for i, q in enumerate(turned)]
        found[0].append(torch.stack(turned))
        found[1].append(torch.stack([row.exp().sum().log() for row in logits]))
    return [torch.stack(each).unflatten(0, (len(keys), group)).flatten(1, 2) for each in found]


def in_columns(memory, values):
    """[layer, head, K] of what a memory of one row has."""
    wide = values if memory.counts is None else memory.in_columns(values)
    return wide[0].mT.unflatten(0, (2, 2))


@pytest.mark.parametrize(("by", "shares"), [("kvzip", "equal"), ("kvzip", "all"), ("key_norm", "pyramid")])
def test_a_memory_has_what_is_fitted_to_the_repetition(by, shares):
    model = model_of()
    plain, compressor = (made(by, model, shares=shares, fit=fit) for fit in (False, True))
    before, memory = plain.encode([IDS]), compressor.encode([IDS])
    assert before.key_bias is None and torch.equal(memory.positions, before.positions)
    assert compressor.title == plain.title + ", fitted"
    places, biases = (in_columns(memory, whole) for whole in (memory.positions, memory.key_bias))
    for layer, ((key, value), (old_key, old_value)) in enumerate(zip(memory.layers, before.layers, strict=True)):
        assert torch.equal(key, old_key) and not torch.allclose(value, old_value)
        heads = value[0] if memory.counts is None else value.split(memory.counts[layer][0].tolist())
        query, behind = references(model, [BOS, *IDS], layer)
        _, keys, values = cached(model, [BOS, *IDS])[layer]
        for head in range(2):
            own = places[layer, head]
            kept = (own[own > 0] - 1).tolist()
            bias, fitted = biases[layer, head, : len(kept)], heads[head]
            assert not biases[layer, head, len(kept) :].any() and len(fitted) == len(kept)
            check_by_hand(bias, fitted, query[head], behind[head], keys[head], values[head], kept, 12**-0.5)


def test_a_head_that_keeps_everything_stays_as_it_is():
    model = model_of()
    before, memory = (made("kvzip", model, budget=91, fit=fit).encode([IDS, IDS[:9]]) for fit in (False, True))
    assert all(map(torch.equal, before.tensors, memory.tensors)) and not memory.key_bias.any()


def test_text_reads_values_with_their_biases(tmp_path):
    model = model_of()
    compressor = made("kvzip", model, shares="all", fit=True)
    memory = compressor.encode([IDS, IDS[:20]])
    found = compressor.logits(compressor.decode(memory, "lm", [[3, 4, 5, 6]] * 2))[:1, 1:].double()
    expected = by_hand_with_biases(model, memory[0], [[3, 4, 5, 6]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    answer = compressor.generate(memory, [[3, 4], [7, 8]], max_new_tokens=9)
    # A file, rows by themselves, and a reader that fits nothing itself.
    reader = made("kvzip", model, shares="all")
    for row in range(2):
        memory[row].save(tmp_path / "m.gist")
        again = Memory.load(tmp_path / "m.gist")
        assert torch.equal(again.key_bias, memory[row].key_bias) and again.nbytes == memory[row].nbytes
        assert torch.equal(reader.generate(again, [[[3, 4], [7, 8]][row]], max_new_tokens=9)[0], answer[row])
    stacked = Memory.stack([memory[1], memory[0]])
    assert torch.equal(reader.generate(stacked, [[7, 8], [3, 4]], max_new_tokens=9), answer.flip(0))
    assert torch.equal(reader.generate(memory[0].repeat(2), [[3, 4]] * 2, max_new_tokens=9)[1], answer[0])


def by_hand_with_biases(model, memory, text):
    """Logits of a text by transformers, each head with its own keys and the biases added to their logits."""
    held, biases = in_columns(memory, memory.positions) > 0, in_columns(memory, memory.key_bias)

    def attend(module, query, key, value, mask, scaling, **kwargs):
        layer, group, out = module.layer_idx, query.shape[1] // key.shape[1], []
        for head in range(query.shape[1]):
            own = held[layer, head // group]
            old = [part.split(memory.counts[layer][0].tolist())[head // group] for part in memory.layers[layer]]
            keys, values = (torch.cat([a, b[0, head // group]]) for a, b in zip(old, (key, value), strict=True))
            count = int(own.sum())
            logits = query[0, head] @ keys.mT * scaling
            logits[:, :count] += biases[layer, head // group, own]
            hidden = torch.ones(logits.shape, dtype=torch.bool).triu(count + 1)
            out.append(logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
        return torch.stack(out, 1)[None], None

    with torch.no_grad(), double_angles(model), by_hand(model, attend):
        return model(torch.tensor(text), position_ids=memory.starts[0] + torch.arange(4)[None]).logits


def test_files_with_biases_are_of_a_version_that_older_releases_refuse():
    memory = made("kvzip", fit=True).encode([IDS])
    tensors, header = packed(memory)
    assert header["version"] == "3" and packed(made("kvzip").encode([IDS]))[1]["version"] == "2"
    for wrong in (tensors["key_bias"][:, :2], tensors["key_bias"] * math.inf, tensors["key_bias"].long()):
        with pytest.raises(ValueError, match=r"m\.gist: expected the contents of a memory, got key_bias"):
            unpacked(Memory, "m.gist", header, tensors | {"key_bias": wrong}, verify=False)


@pytest.mark.parametrize("positions", ["kept", "closed"])
def test_parts_and_joined_texts_have_their_own_biases(positions):
    model, parts = model_of(), [IDS[:45], IDS[45:]]
    compressor = made("kvzip", model, part=45, positions=positions, fit=True)
    # A quarter of the first part's 15 may be kept for their places, none of the second's.
    places = zip(parts, (15 // 4, 0), strict=True)
    with torch.no_grad():
        alone = [compressor.encode_rows(pad([part], "cpu"), sinks=sinks)[0] for part, sinks in places]
    memory = compressor.encode([IDS])
    assert torch.equal(memory.key_bias, torch.cat([one.key_bias for one in alone], 1))
    for layer, (_, value) in enumerate(memory.layers):
        assert torch.equal(value, torch.cat([one.layers[layer][1] for one in alone], 2))
    if positions == "closed":
        # Where tokens stand is nothing to the fit.
        kept = made("kvzip", model, part=45, fit=True).encode([IDS])
        assert torch.equal(kept.key_bias, memory.key_bias) and torch.equal(kept.tensors[1], memory.tensors[1])
    unfitted = made("kvzip", model, positions=positions)
    joined = unfitted.join([alone[0], unfitted.encode([parts[1]])])
    assert torch.equal(joined.key_bias[:, :15], alone[0].key_bias) and not joined.key_bias[:, 15:].any()


def test_a_fitted_memory_is_refined_with_its_biases():
    compressor = made("kvzip", fit=True)
    memory = compressor.encode([IDS])
    found = refine(compressor, memory, IDS, steps=4)
    assert torch.equal(found.memory.key_bias, memory.key_bias) and found.after < found.before


def test_layers_with_a_sliding_window_are_left_as_they_are():
    model = tiny("gemma3", bos_token_id=1)
    ids = torch.randint(3, 50, (1, 20), generator=torch.Generator().manual_seed(1))
    before, memory = (_of(model, fit).encode(ids) for fit in (False, True))
    for layer, ((_, old), (_, new)) in enumerate(zip(before.layers, memory.layers, strict=True)):
        slides = layers(model)[layer].self_attn.sliding_window is not None
        assert torch.equal(old, new) == slides
        assert bool(memory.key_bias[0].mT.unflatten(0, (2, 2))[layer].any()) != slides


def _of(model, fit):
    compressor = Select(model, ratio=2, by="even", fit=fit).eval()
    compressor.tokenizer = _Short()
    return compressor


class _Short:
    """A tokenizer of few tokens, with as much of transformers' as a repetition needs."""

    chat_template = None

    def __call__(self, text, **options):
        return {"input_ids": [3 + ord(letter) % 40 for letter in text[:9]]}


def test_what_cannot_be_fitted_or_read_is_named(monkeypatch):
    with pytest.raises(ValueError, match="fit: expected a model without an attention softcap"):
        Select(tiny("gemma2", bos_token_id=1), fit=True)
    # A wrapper's configuration has its text model's.
    wrapper = tiny("llama", bos_token_id=1)
    text = copy.copy(wrapper.config)
    text.attn_logit_softcapping = 50.0
    monkeypatch.setattr(type(wrapper.config), "get_text_config", lambda *_, **__: text)
    with pytest.raises(ValueError, match="fit: expected a model without an attention softcap"):
        Select(wrapper, fit=True)
    monkeypatch.undo()
    compressor = made("kvzip", fit=True)
    with pytest.raises(ValueError, match="got fitted biases; use generate, which takes any"):
        compressor.to_cache(compressor.encode([IDS]))


@pytest.mark.parametrize("shares", ["equal", "all"])
def test_the_references_of_one_row_are_alive_at_a_time(monkeypatch, shares):
    alive = []

    def counted(*arguments):
        alive.append(sum(isinstance(one, References) for one in gc.get_objects()))
        return matched(*arguments)

    monkeypatch.setattr(selection, "matched", counted)
    compressor = made("kvzip", fit=True, shares=shares)
    compressor.encode([IDS[:30], IDS[20:60], IDS[:9]])
    assert set(alive) == {compressor.config.num_hidden_layers}


def test_a_fit_that_has_no_room_to_read_again_names_itself():
    model = tiny("gpt2", vocab_size=258, bos_token_id=BOS, max_position_embeddings=100)
    with pytest.raises(ValueError, match=r"^fit: it reads the text twice: expected "):
        made("key_norm", model, fit=True).encode([IDS])
