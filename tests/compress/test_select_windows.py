"""Heads that share what they keep beside sliding windows: transformers' own pass with a mask of each layer and head."""

import pytest
import torch

from gistkit.compress import Memory, Select
from tests.compress.test_select import (
    BOS,
    IDS,
    cached,
    chosen_first,
    heads_of,
    key_diff,
    layers,
    rotated,
    shared,
)
from tests.helpers.by_hand import attention_by_hand, hidden
from tests.helpers.models import byte_tokenizer, double_angles, tiny
from tests.helpers.tiers import slow

WINDOW, SHARES = 16, ("heads", "all", "pyramid")
TEXT = [3, 4, 5, 6, *range(90, 110)]
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "gemma3": KINDS | {"sliding_window": WINDOW},
    "qwen2": KINDS | {"sliding_window": WINDOW, "max_window_layers": 4},
    "mistral": {"sliding_window": WINDOW},
    # Three layers with a window to one without.
    "gemma3-4b": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 40},
}


def model_of(family="gemma3", **changes):
    settings = {"vocab_size": 258, "bos_token_id": BOS, "num_hidden_layers": 4} | FAMILIES[family]
    return tiny(family.partition("-")[0], **settings | changes)


def made(model, by="key_diff", **settings):
    torch.manual_seed(0)
    compressor = Select(model, ratio=2, by=by, **settings).eval()
    compressor.tokenizer = byte_tokenizer(start=True)
    return compressor


def width_of(model, layer):
    """The window of a layer; None where it sees everything."""
    own = layers(model)[layer].self_attn
    return own.sliding_window if hasattr(own, "sliding_window") else own.config.sliding_window


def numbers(model, length, count):
    """How many tokens of a row the layers with a window keep, and a head of the others on average: the same numbers."""
    windows = [width_of(model, layer) for layer in range(4)]
    full, seen = windows.count(None), min(length, windows[0] - 1)
    if not full:
        return min(count, seen), 0
    last = count * seen // length
    most = min(length, (4 * count - (4 - full) * last) // full)
    while most == length and last < seen and full * length + (4 - full) * (last + 1) <= 4 * count:
        last += 1
    return last, most


def kept_of(model, ids, count, shares):
    """[layer][head] of the places that are kept of a text, by KeyDiff's scores."""
    last, most = numbers(model, len(ids), count)
    keys = [key for _, key, _ in cached(model, ids)]
    scores = [key_diff(model, layer, None, key, None, ids) for layer, key in enumerate(keys)]
    places = [[list(range(len(ids) - last, len(ids)))] * len(keys[0]) for _ in keys]
    full = [layer for layer in range(4) if width_of(model, layer) is None]
    own = [scores[layer] for layer in full]
    if shares == "all":
        found = shared(own, most, 0) if full else []
    elif shares == "heads":
        found = [shared([one], most, most // 5)[0] for one in own]
    else:
        top, bottom = most / 20, 2 * most - most / 20
        if bottom >= len(ids) - 1:
            bottom, top = len(ids) - 1, 2 * most - len(ids) + 1
        sizes = [round(bottom), round(top)] if top >= 1 and len(full) > 1 else [most] * len(full)
        found = [[sorted(o[:size]) for o in chosen_first(one)] for size, one in zip(sizes, own, strict=False)]
    for layer, one in zip(full, found, strict=True):
        places[layer] = one
    return places


def read(model, documents, kept, text, start=None):
    """Logits of a text that reads, of documents which were read by themselves, what each layer and head keeps of them.

    Args:
        documents: token ids.
        kept: of each document [layer][head], places in it.
        start: position of the text where what is kept of one document moves together; else it stays where it was.
    """
    ids = [token for document in documents for token in document] + text
    owner = [index for index, document in enumerate(documents) for _ in document]
    first = [sum(map(len, documents[:index])) for index in range(len(documents))]
    context = len(owner)
    positions = torch.tensor([*range(context), *range(start or context, (start or context) + len(text))])

    def read(layer, head, key, value):
        window = width_of(model, layer) or 10**9
        held = [first[index] + place for index, one in enumerate(kept) for place in one[layer][head]]
        places, moved = positions.tolist(), key.clone()
        if start is not None:
            kind = "sliding_attention" if window < 10**9 else "full_attention"
            inv_freq = getattr(model.model.rotary_emb, f"{kind}_inv_freq", None)
            inv_freq = model.model.rotary_emb.inv_freq if inv_freq is None else inv_freq
            for new, old in enumerate(held, start - len(held) if window < 10**9 else 0):
                places[old], moved[old] = new, rotated(key[old], new - old, inv_freq)
        # The keys as their documents read them, and then as the text does.
        added = torch.full((len(ids), 2 * len(ids)), -torch.inf, dtype=torch.float64)
        for row in range(context):
            added[row, [j for j in range(row + 1) if owner[j] == owner[row] and row - j < window]] = 0
        for row in range(context, len(ids)):
            seen = [j for j in [*held, *range(context, row + 1)] if positions[row] - places[j] < window]
            added[row, torch.tensor(seen) + len(ids)] = 0
        return torch.cat([key, moved]), torch.cat([value, value]), added

    with attention_by_hand(model, read):
        # With a mask transformers does not take position IDs with gaps for packed sequences.
        mask = torch.ones(1, len(ids), dtype=torch.long)
        logits = model(torch.tensor([ids]), position_ids=positions[None], attention_mask=mask, use_cache=False).logits
    return logits[:, context:]


def logits_of(compressor, memory, text):
    with torch.no_grad():
        return compressor.logits(compressor.decode(memory, "lm", [text]))[:, 1:].double()


def check_answers(compressor, memory, prompts, count=12):
    """Answers by a cache are those of passes over all of their tokens, each row by itself."""
    answers = compressor.generate(memory, prompts, max_new_tokens=count, stop_tokens=())
    for row, prompt in enumerate(prompts):
        text = [*prompt, *answers[row].tolist()]
        one = memory[row] if memory.batch_size > 1 else memory
        greedy = logits_of(compressor, one, text)[0].argmax(-1)
        assert torch.equal(greedy[len(prompt) - 1 : -1], answers[row])
    return answers


@pytest.mark.parametrize(
    ("family", "shares"),
    [
        *[("gemma3", shares) for shares in SHARES],
        ("mistral", "all"),
        ("gemma3-4b", "all"),
        *slow(("qwen2", "all"), ("qwen2", "pyramid"), ("mistral", "heads"), ("mistral", "pyramid")),
    ],
)
@pytest.mark.parametrize("positions", ["kept", "closed"])
@pytest.mark.parametrize("length", [90, 13])
def test_a_text_reads_what_each_head_keeps_and_sees(family, shares, positions, length):
    # Of 13 tokens layers with a window see all, and of 90 the others of gemma3-4b keep all.
    model, ids = model_of(family), [BOS, *IDS[:length]]
    compressor, count = made(model, shares=shares, positions=positions), (length + 1) // 2
    memory = compressor.encode([ids[1:]])
    kept = kept_of(model, ids, count, shares)
    sizes = [[len(own) for own in heads] for heads in kept]
    assert [own[0].tolist() for own in memory.counts] == sizes
    start = len(ids) if positions == "kept" else max(map(max, sizes))
    assert memory.starts == (start,) and memory.lengths == (max(map(max, sizes)),)
    # The bytes of equal shares, to a token of each head; less where all layers have a window and keep nothing unseen.
    equal = made(model).encode([ids[1:]]).nbytes
    token = equal // (count * 8)
    assert equal - 8 * token < memory.nbytes <= equal or family == "mistral"
    assert memory.nbytes == token * sum(map(sum, sizes))
    # Text shorter and longer than the window.
    expected = read(model, [ids], [kept], TEXT, None if positions == "kept" else start)
    torch.testing.assert_close(logits_of(compressor, memory, TEXT), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(compressor, memory, TEXT[:2]), expected[:, :2], rtol=1e-5, atol=1e-5)
    check_answers(compressor, memory, [TEXT[:2]], 24)


@pytest.mark.parametrize("family", ["gemma3", *slow(("qwen2",), ("mistral",))])
@pytest.mark.parametrize("shares", SHARES)
def test_all_tokens_are_the_full_text(family, shares):
    model = model_of(family)
    compressor = made(model, shares=shares).at(1)
    memory = compressor.encode([IDS])
    with torch.no_grad(), double_angles(model):
        expected = model(torch.tensor([[BOS, *IDS, *TEXT]])).logits[:, len(IDS) + 1 :]
    torch.testing.assert_close(logits_of(compressor, memory, TEXT), expected, rtol=1e-5, atol=1e-5)
    prompt = torch.tensor([[BOS, *IDS, *TEXT]])
    greedy = model.generate(prompt, max_new_tokens=12, pad_token_id=0)[:, prompt.shape[1] :]
    assert torch.equal(compressor.generate(memory, [TEXT], max_new_tokens=12), greedy)
    # What is not seen in layers with a window is left out.
    assert memory.nbytes < made(model).at(1).encode([IDS]).nbytes


@pytest.mark.parametrize("shares", SHARES)
def test_rows_stacks_and_files_are_read_as_each_memory_alone(shares, tmp_path):
    model, texts = model_of(), [IDS, IDS[:7], IDS[20:60]]
    compressor = made(model, shares=shares, lora=4)
    prompts = [TEXT, TEXT[:1], TEXT[3:7]]
    alone = [compressor.encode([text]) for text in texts]
    answers = [check_answers(compressor, memory, [prompt]) for memory, prompt in zip(alone, prompts, strict=True)]
    together = compressor.encode(texts)
    for memory in (together, Memory.stack(alone), Memory.stack([together[[2, 1]], alone[0]])[[2, 1, 0]]):
        found = compressor.generate(memory, prompts, max_new_tokens=12, stop_tokens=())
        assert torch.equal(found, torch.cat(answers))
        memory.save(tmp_path / "m.gist")
        again = Memory.load(tmp_path / "m.gist")
        assert torch.equal(again.ordinals, memory.ordinals) and all(map(torch.equal, again.tensors, memory.tensors))
        assert torch.equal(compressor.generate(again, prompts, max_new_tokens=12, stop_tokens=()), found)
    # Rows that share one memory, beams among them.
    thrice = alone[0].repeat(3)
    found = check_answers(compressor, thrice, prompts)
    assert torch.equal(found[:1], answers[0])
    beams = compressor.generate(together, prompts, max_new_tokens=5, num_beams=3)
    for row, (memory, prompt) in enumerate(zip(alone, prompts, strict=True)):
        assert torch.equal(compressor.generate(memory, [prompt], max_new_tokens=5, num_beams=3)[0], beams[row])


@pytest.mark.parametrize("positions", ["kept", "closed"])
@pytest.mark.parametrize("lengths", [(90, 40), (30, 8, 2)])
def test_joined_texts_are_seen_where_they_stand(lengths, positions, tmp_path):
    # Of the second list layers with a window keep tokens of all three, with gaps between them.
    model = model_of()
    compressor, rows = made(model, shares="all", positions=positions), [IDS[:n] for n in lengths]
    memories = [compressor.encode([row]) for row in rows]
    memory = compressor.join(memories)
    assert memory.starts == (sum(one.starts[0] for one in memories),)
    assert memory.nbytes == sum(one.nbytes for one in memories)
    texts = [[BOS, *row] for row in rows]
    kept = [kept_of(model, text, len(text) // 2, "all") for text in texts]
    found = logits_of(compressor, memory, TEXT)
    if positions == "kept":
        torch.testing.assert_close(found, read(model, texts, kept, TEXT), rtol=1e-5, atol=1e-5)
    else:
        # Where documents end.
        ends = torch.tensor([one.starts[0] for one in memories]).cumsum(0).tolist()
        sizes = [len(own[0][0]) for own in kept]
        expected = [place for end, size in zip(ends, sizes, strict=True) for place in range(end - size, end)]
        assert (
            memory.ordinals[0, : len(expected)].tolist() == expected and not memory.ordinals[0, len(expected) :].any()
        )
    check_answers(compressor, memory, [TEXT])
    memory.save(tmp_path / "m.gist")
    assert torch.equal(logits_of(compressor, Memory.load(tmp_path / "m.gist"), TEXT), found)
    # With rows of other texts.
    other = compressor.join([compressor.encode([row, row[::-1]]) for row in rows])
    torch.testing.assert_close(logits_of(compressor, other[0], TEXT), found)
    # A joined memory is joined like any other.
    again = compressor.join([compressor.join(memories[:-1]), memories[-1]])
    assert torch.equal(again.ordinals, memory.ordinals) and all(map(torch.equal, again.tensors, memory.tensors))


@pytest.mark.parametrize("shares", SHARES)
def test_parts_of_a_text_are_joined(shares):
    model = model_of()
    compressor = made(model, shares=shares, part=40)
    parts = [IDS[:30], IDS[30:60], IDS[60:]]
    memory = compressor.encode([IDS])
    texts = [[BOS, *part] for part in parts]
    kept = [kept_of(model, text, len(text) // 2, shares) for text in texts]
    expected = read(model, texts, kept, TEXT)
    torch.testing.assert_close(logits_of(compressor, memory, TEXT), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", ["kvzip", "snapkv", "expected_attention", "even"])
@pytest.mark.parametrize("shares", SHARES)
def test_each_score_and_a_question_share_the_same_bytes(by, shares):
    model = model_of()
    asked = {"question": "Who?"} if by in ("kvzip", "snapkv") else {}
    compressor, equal = (made(model, by, shares=own, **asked) for own in (shares, "equal"))
    memory, whole = compressor.encode([IDS, IDS[:20]]), equal.encode([IDS, IDS[:20]])
    assert memory.sizes == whole.sizes
    for row, text in enumerate([IDS, IDS[:20]]):
        last, _ = numbers(model, len(text) + 1, whole.lengths[row])
        assert [int(own[row].sum()) for own in memory.counts[::2]] == [2 * last] * 2
        for layer in (0, 2):
            rows, size = memory.layers[layer][0].split(memory.counts[layer].sum(1).tolist()), whole.lengths[row]
            kept = whole.layers[layer][0][row, :, size - last : size]
            torch.testing.assert_close(rows[row].view(2, last, -1), kept, rtol=1e-9, atol=1e-9)
        check_answers(compressor, memory[row], [text[:3]])


@pytest.mark.parametrize("shares", SHARES)
def test_evenly_spaced_tokens_are_so_where_layers_with_a_window_leave_more(shares):
    memory = made(model_of(), "even", shares=shares).at(4).encode([IDS])
    for places in memory.in_columns(memory.positions)[0].mT[2:4]:
        places = places[places > 0] - 1
        thirds = places.bincount(minlength=91).split([30, 31, 30])
        assert len(places) > 91 // 4 and max(map(sum, thirds)) - min(map(sum, thirds)) <= 2


def test_fits_leave_layers_with_a_window_as_they_are():
    model = model_of()
    plain, compressor = (made(model, "kvzip", shares="all", fit=fit) for fit in (False, True))
    before, memory = plain.encode([IDS]), compressor.encode([IDS])
    places = memory.in_columns(memory.positions)[0].mT.unflatten(0, (4, 2)).long() - 1
    biases = memory.in_columns(memory.key_bias)[0].mT.unflatten(0, (4, 2))
    for layer, (old, new) in enumerate(zip(before.layers, memory.layers, strict=True)):
        assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1]) == (layer % 2 == 0)
        assert biases[layer].any() == (layer % 2 == 1)

    text = 91 + torch.arange(len(TEXT))

    def read(layer, head, *own):
        keys, values = (torch.cat([old[head], new]) for old, new in zip(heads_of(memory, layer), own, strict=True))
        count = len(keys) - len(TEXT)
        at = torch.cat([places[layer, head, :count], text])
        bias = torch.nn.functional.pad(biases[layer, head, :count], (0, len(TEXT)))
        return keys, values, bias + hidden(len(TEXT), len(keys), width_of(model, layer), at)

    with attention_by_hand(model, read):
        expected = model(torch.tensor([TEXT]), position_ids=text[None]).logits
    torch.testing.assert_close(logits_of(compressor, memory, TEXT), expected, rtol=1e-5, atol=1e-5)
    check_answers(compressor, memory, [TEXT[:2]])


def test_gradients_are_those_of_equal_shares_where_all_is_kept():
    found, rows = [], [TEXT, TEXT[::-1]]
    for shares in ("all", "equal"):
        torch.manual_seed(1)
        compressor = made(model_of(), shares=shares, lora=4).at(1).double()
        with torch.no_grad():
            for name, parameter in compressor.trainable():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
            memory = compressor.encode([IDS, IDS[:30]])
            expected = compressor.decode(memory, "lm", rows)
            with compressor.folded():
                torch.testing.assert_close(compressor.decode(memory, "lm", rows), expected)
        memory, _ = compressor.encode_contexts(compressor.contexts([IDS, IDS[:30]]))
        hidden_states = compressor.decode(memory, "lm", rows)
        torch.testing.assert_close(hidden_states, expected)
        weights = torch.randn(hidden_states.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (hidden_states * weights).sum().backward()
        found.append([hidden_states, *(own.grad for _, own in compressor.trainable() if own.grad is not None)])
    assert len(found[0]) > 50
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
