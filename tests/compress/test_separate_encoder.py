"""SeparateEncoder against the two models' own forwards, a segment at a time."""

import json
from itertools import chain, pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from gistkit import hf
from gistkit.compress import ICAE, AvgPool, Compressor, Memory, SeparateEncoder
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import TOLERANCE, byte_tokenizer, double_angles, tiny, tiny_llama, tokens


def small(**changes):
    """An encoder of another width and depth than the reader, and of another family."""
    return tiny("gpt2", hidden_size=32, num_hidden_layers=1, **changes)


def made(encoder=None, model=None, **options):
    torch.manual_seed(0)
    settings = {"ratio": 4, "segment": 12, "lora": 2} | options
    compressor = SeparateEncoder(tiny_llama() if model is None else model, encoder=encoder, **settings)
    return unsettle(compressor.double())


def plain_memory(compressor, ids, pool, ratio=4, segment=12):
    """Embeddings [1, K, d] of ids [1, N]: a forward of the encoder for each segment, and the spans of its tokens."""
    encoder = compressor.model if compressor.encoder is None else compressor.encoder
    found, spans = [], []
    for start in range(0, ids.shape[1], segment):
        part = ids[:, start : start + segment]
        length = part.shape[1]
        count = -(-length // ratio)
        inputs = encoder.get_input_embeddings()(part)
        if pool == "tokens":
            inputs = torch.cat([inputs, compressor.memory_embeddings.expand(1, count, -1)], 1)
        if compressor.adapters is None:
            states = encoder.base_model(inputs_embeds=inputs).last_hidden_state
        else:
            with compressor.adapters.using("encoder"):
                states = encoder.get_decoder()(inputs_embeds=inputs).last_hidden_state
        for slot in range(count):
            first, last = slot * length // count, (slot + 1) * length // count
            found.append(states[:, length + slot] if pool == "tokens" else states[:, first:last].mean(1))
            spans.append((start + first, start + last))
    projector, states = compressor.projector, torch.stack(found, 1)
    inner = F.gelu(states @ projector.first.weight.T + projector.first.bias)
    out = inner @ projector.second.weight.T + projector.second.bias
    out = out / (out.square().mean(-1, keepdim=True) + torch.finfo(out.dtype).eps).sqrt()
    return out * projector.gain + projector.shift, spans


def plain_decode(compressor, ids, text, pool, layout, task="lm"):
    """Hidden states at the task token and each token of `text` [1, T], of the reader alone."""
    with double_angles(compressor.model):
        if compressor.encoder is None:
            embeddings, spans = plain_memory(compressor, ids, pool)
        else:
            with double_angles(compressor.encoder):
                embeddings, spans = plain_memory(compressor, ids, pool)
        embed = compressor.model.get_input_embeddings()
        inputs = torch.cat([embeddings, compressor.task_embeddings[task].double()[None], embed(text)], 1)
        count = len(spans)
        positions = torch.arange(inputs.shape[1])
        if layout == "epl":
            places = [(1 + first + last) / 2 for first, last in spans]
            positions[:count] = torch.tensor([round(place) for place in places])
            positions[count:] = (0 if task == "ae" else ids.shape[1]) + torch.arange(1 + text.shape[1])
        states = compressor.model.model(inputs_embeds=inputs, position_ids=positions[None]).last_hidden_state
    return states[:, count:], spans


CASES = [
    (None, "means", "epl", 2), (None, "tokens", "dpl", 2), ("small", "means", "dpl", 2), ("small", "tokens", "epl", 2),
    ("small", "means", "epl", None), ("small", "tokens", "dpl", None),
]  # fmt: skip


@pytest.mark.parametrize("length", [24, 16, 3])
@pytest.mark.parametrize(("encoder", "pool", "layout", "lora"), CASES)
def test_reading_equals_the_two_models_own_forwards(encoder, pool, layout, lora, length):
    compressor = made(encoder and small(), pool=pool, layout=layout, lora=lora)
    ids, text = tokens(1, length), tokens(1, 5)
    memory = compressor.encode(ids)
    for task in ("lm", "ae"):
        expected, spans = plain_decode(compressor, ids, text, pool, layout, task)
        torch.testing.assert_close(compressor.decode(memory, task, text), expected, **TOLERANCE)
    assert memory.lengths == (len(spans),) == (compressor.size(length),)
    assert compressor.context_spans(memory)[0].tolist() == [list(span) for span in spans]
    # The encoder trains and the reader does not.
    assert not any(p.requires_grad for name, p in compressor.model.named_parameters() if "lora_" not in name)
    parts = {"projector", "task_embeddings", "encoder" if encoder else "model"}
    parts |= {"memory_embeddings"} if pool == "tokens" else set()
    assert {name.split(".")[0] for name, _ in compressor.trainable()} == parts


@pytest.mark.parametrize("pool", ["means", "tokens"])
def test_segments_are_encoded_independently_and_join_in_any_order(pool):
    compressor, text = made(small(), pool=pool), tokens(1, 4)
    first, second, short = (tokens(length).tolist() for length in (24, 12, 7))
    one, two, three = (compressor.encode([part]) for part in (first, second, short))
    for parts, memories in [((first, second, short), (one, two, three)), ((second, first), (two, one))]:
        joined, together = compressor.join(memories), compressor.encode([[*chain(*parts)]])
        torch.testing.assert_close(joined.embeddings, together.embeddings, **TOLERANCE)
        assert torch.equal(joined.positions, together.positions) and joined.starts == together.starts
        read = [compressor.decode(memory, "qa", text) for memory in (joined, together)]
        torch.testing.assert_close(*read, **TOLERANCE)


def test_the_same_weights_compress_at_any_ratio():
    compressor, ids, text = made(small(), pool="tokens", train_ratios=(2, 3)), tokens(1, 30), tokens(1, 4)
    memory = compressor.encode(ids, ratio=6)
    assert memory.lengths == (5,) and compressor.encode(ids, budget=5).lengths == (5,)
    # Of each segment of 12 tokens one.
    assert compressor.encode(ids, budget=3).lengths == compressor.encode(ids, budget=4).lengths == (3,)
    with pytest.raises(ValueError, match=r"budget: expected at least 3, .*, got 2"):
        compressor.encode(ids, budget=2)
    at = made(compressor.encoder, compressor.model, pool="tokens", ratio=6, lora=2)
    assert at.ratio == 6 and compressor.context_spans(memory)[0].tolist()[-1] == [24, 30]
    with pytest.warns(UserWarning, match="memory: expected one that this compressor made"):
        at.decode(memory, "lm", text)
    assert torch.equal(compressor.decode(memory, "lm", text), compressor.at(6).decode(memory, "lm", text))
    drawn = {compressor.at(ratio).encode(ids).num_tokens for ratio in (2, 3)}
    assert drawn == {15, 10} and compressor(ids, continuation_ids=text)["loss"] > 0


def test_files_tell_both_models_and_others_are_refused(tmp_path):
    compressor, ids, text = made(small()), tokens(2, 17), tokens(2, 4)
    memory = compressor.encode(ids)
    memory.save(tmp_path / "memory.gist")
    compressor.save_pretrained(tmp_path / "two")
    loaded = Compressor.from_pretrained(tmp_path / "two", tiny_llama(), encoder=small())
    # Files have single precision.
    near = {"rtol": 1e-4, "atol": 1e-4}
    kept = Memory.load(tmp_path / "memory.gist")
    torch.testing.assert_close(loaded.encode(ids).embeddings, memory.embeddings, **near)
    torch.testing.assert_close(loaded.decode(kept, "lm", text), compressor.decode(memory, "lm", text), **near)
    assert loaded.settings == compressor.settings
    other = small()
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    for model, encoder, match in [
        (tiny_llama(), other, "encoder: expected the encoder of .*: other weights"),
        (tiny_llama(), tiny_llama(), "encoder: expected the encoder of .*: another architecture or size"),
        (tiny_llama(num_hidden_layers=1), small(), "model: expected the base model of .*: another architecture"),
        (None, small(), "model: expected the base model of .*, which does not hold one, got None"),
        (tiny_llama(), None, "encoder: .* was saved with .*, which is not on the hub; pass the model"),
    ]:
        with pytest.raises(ValueError, match=match):
            Compressor.from_pretrained(tmp_path / "two", model, encoder=encoder)
    # One folder names an encoder that nothing else describes; another has none.
    settings = json.loads((tmp_path / "two" / "compressor.json").read_text())
    (tmp_path / "two" / "compressor.json").write_text(json.dumps(settings | {"encoder": None}))
    with pytest.raises(ValueError, match="expected the identity of the encoder GPT2LMHeadModel, got none"):
        Compressor.from_pretrained(tmp_path / "two", tiny_llama())
    made().save_pretrained(tmp_path / "one")
    assert Compressor.from_pretrained(tmp_path / "one", tiny_llama()).encoder is None
    with pytest.raises(TypeError, match=r"encoder: expected none for .*, which has no second model"):
        Compressor.from_pretrained(tmp_path / "one", tiny_llama(), encoder=small())


def test_an_encoder_whose_own_weights_train_is_in_the_folder(tmp_path):
    compressor, ids, text = made(small(), lora=None, losses=("ae", "kl")), tokens(2, 17), tokens(2, 4)
    before = compressor.fingerprints()
    optimizer = torch.optim.Adam([parameter for _, parameter in compressor.trainable()], 1e-2)
    compressor(ids, question_ids=text, answer_ids=text)["loss"].backward()
    optimizer.step()
    base, own = compressor.fingerprints()
    assert base == before[0] and own != before[1], "the reader stays as it was"
    compressor.save_pretrained(tmp_path)
    given = small()
    for encoder in (None, given):
        loaded = Compressor.from_pretrained(tmp_path, tiny_llama(), encoder=encoder)
        torch.testing.assert_close(
            loaded.encode(ids).embeddings, compressor.encode(ids).embeddings, rtol=1e-4, atol=1e-4
        )
    assert loaded.encoder is given and loaded.shares_tokens
    with pytest.raises(ValueError, match=r"model: expected the base model of .*, which does not hold one, got None"):
        Compressor.from_pretrained(tmp_path)


def state(model):
    return {name: (weight.clone(), weight.requires_grad) for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("heads", "^encoder: .*another architecture or size"),
        ("reader", "^encoder: expected a model .* that shares none with the reader"),
        ("embedding", "^encoder: expected a model .* that shares none with the reader"),
        ("tensors", "expected the tensors of its compressor, got one .* for more"),
    ],
)
def test_a_given_encoder_is_unchanged_where_its_folder_is_refused(fault, message, tmp_path):
    alike = tiny_llama if fault in ("reader", "embedding") else small
    compressor = made(alike(), lora=None)
    with torch.no_grad():
        compressor.encoder.get_input_embeddings().weight.add_(1)
    compressor.save_pretrained(tmp_path)
    reader = tiny_llama()
    given = reader if fault == "reader" else alike(**({"num_attention_heads": 8} if fault == "heads" else {}))
    if fault == "embedding":
        given.set_input_embeddings(reader.get_input_embeddings())
    elif fault == "tensors":
        path = tmp_path / "compressor.safetensors"
        save_file(load_file(path) | {"more": torch.ones(1)}, path)
    before = [state(model) for model in (given, reader)]
    with pytest.raises(ValueError, match=message):
        Compressor.from_pretrained(tmp_path, reader, encoder=given)
    for model, weights in zip((given, reader), before, strict=True):
        for name, (weight, trains) in state(model).items():
            assert torch.equal(weight, weights[name][0]) and trains == weights[name][1], name


def test_a_trained_encoder_keeps_its_dtype(tmp_path):
    compressor = SeparateEncoder(tiny_llama().bfloat16(), encoder=small().float(), lora=None)
    compressor.save_pretrained(tmp_path)
    loaded = Compressor.from_pretrained(tmp_path, compressor.model)
    for name, weight in compressor.encoder.named_parameters():
        assert weight.dtype == torch.float32 and torch.equal(weight, loaded.encoder.get_parameter(name)), name


def test_an_encoder_by_the_name_of_its_folder(tmp_path):
    small().save_pretrained(tmp_path / "small")
    compressor = made(str(tmp_path / "small"))
    assert compressor.settings["encoder"] == "small" and compressor.encoder.dtype == torch.float64
    compressor.shares_tokens = True
    compressor.save_pretrained(tmp_path / "two")
    loaded = Compressor.from_pretrained(tmp_path / "two", tiny_llama(), encoder=str(tmp_path / "small"))
    ids = tokens(1, 17)
    torch.testing.assert_close(loaded.encode(ids).embeddings, compressor.encode(ids).embeddings, rtol=1e-4, atol=1e-4)


def halves():
    """A tokenizer of other ids: two letters a token where they are both lower case."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [a + b for a in letters for b in letters]
    vocabulary = {text: index for index, text in enumerate([*" .,?é", *letters, *pairs])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]{1,2}|."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")


def test_an_encoder_with_another_tokenizer_reads_the_text_of_each_segment(tmp_path):
    model, encoder = tiny_llama(vocab_size=257), small(vocab_size=800, bos_token_id=5)
    compressor = made(encoder, model)
    with pytest.raises(ValueError, match=r"encoder_tokenizer: expected the model's own, .* set compressor.encoder_tok"):
        compressor.tokenizer = byte_tokenizer()
        compressor.compress("a text")
    compressor.encoder_tokenizer = halves()
    text = "the reader has bytes, an encoder pairs."
    memory = compressor.compress(text)
    segments = [text[start : start + 12] for start in range(0, len(text), 12)]
    with torch.no_grad(), double_angles(encoder), compressor.adapters.using("encoder"):
        for number, part in enumerate(segments):
            ids = torch.tensor([compressor.encoder_tokenizer(part)["input_ids"]])
            assert ids.shape[1] < len(part)
            count = -(-len(part) // 4)
            states = encoder.transformer(ids).last_hidden_state[0]
            edges = [slot * len(states) // count for slot in range(count + 1)]
            means = [states[first:last].mean(0) for first, last in pairwise(edges)]
            expected = compressor.projector(torch.stack(means))
            torch.testing.assert_close(memory.embeddings[0, 3 * number :][:count], expected, **TOLERANCE)
    # A segment of special tokens has no text, and a character may be cut.
    assert compressor.encode([[256] * 3]).lengths == (1,)
    assert compressor.compress("a" * 11 + "é").lengths == (4,)
    compressor.save_pretrained(tmp_path / "two")
    loaded = Compressor.from_pretrained(tmp_path / "two", model, encoder=encoder)
    assert not loaded.shares_tokens and loaded.encoder_tokenizer.get_vocab() == compressor.encoder_tokenizer.get_vocab()
    torch.testing.assert_close(loaded.compress(text).embeddings, memory.embeddings, rtol=1e-4, atol=1e-4)


def test_models_of_one_tokenizer_may_have_embeddings_of_different_lengths():
    compressor = made(small(vocab_size=260), tiny_llama(vocab_size=300))
    compressor.tokenizer = compressor.encoder_tokenizer = byte_tokenizer()
    assert compressor.encode([[250, 251]]).lengths == (1,)
    with pytest.raises(ValueError, match=r"encoder: expected one that embeds all tokens .*of 260 and token 280"):
        compressor.encode([[5, 280]])


def test_another_tokenizer_of_the_reader_is_compared_anew():
    compressor = made(small(vocab_size=800), tiny_llama(vocab_size=800))
    compressor.tokenizer = compressor.encoder_tokenizer = byte_tokenizer()
    text = "a text"
    memory = compressor.compress(text)
    assert compressor.shares_tokens
    compressor.tokenizer = halves()
    other = compressor.compress(text)
    # The encoder reads the same text as before, of fewer tokens of the reader.
    assert not compressor.shares_tokens and other.num_tokens < memory.num_tokens
    compressor.tokenizer = byte_tokenizer()
    assert torch.equal(compressor.compress(text).embeddings, memory.embeddings) and compressor.shares_tokens


def test_an_encoder_tokenizer_that_leads_out_of_the_folder_is_named(tmp_path):
    compressor = made(small(vocab_size=300), tiny_llama(vocab_size=300))
    compressor.tokenizer = compressor.encoder_tokenizer = byte_tokenizer()
    compressor.save_pretrained(tmp_path / "two")
    (tmp_path / "two" / "encoder_tokenizer").rename(tmp_path / "outside")
    (tmp_path / "two" / "encoder_tokenizer").symlink_to(tmp_path / "outside")
    loaded = Compressor.from_pretrained(tmp_path / "two", compressor.model, encoder=compressor.encoder)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/two/encoder_tokenizer/.*: expected a file inside"):
        loaded.encoder_tokenizer  # noqa: B018


def test_an_encoder_follows_the_readers_mode():
    for mode in (False, True):
        encoder = small(attn_pdrop=0.5, resid_pdrop=0.5).train(not mode)
        compressor = SeparateEncoder(tiny_llama().train(mode), encoder=encoder, lora=2)
        assert all(module.training == mode for module in compressor.encoder.modules())
        if not mode:
            ids = tokens(1, 20)
            assert torch.equal(compressor.encode(ids).embeddings, compressor.encode(ids).embeddings)


@pytest.mark.parametrize("pool", ["means", "tokens"])
def test_a_segments_frequencies_are_those_of_its_own_length(pool):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    compressor = made(tiny_llama(rope_parameters=rope, max_position_embeddings=8), pool=pool)
    ids = tokens(1, 34)
    parts = [ids[:, :12], ids[:, 12:24], ids[:, 24:]]
    alone = [compressor.encode(part) for part in reversed(parts)][::-1]
    torch.testing.assert_close(
        compressor.encode(ids).embeddings, torch.cat([memory.embeddings for memory in alone], 1), **TOLERANCE
    )
    batch = compressor.encode([part[0].tolist() for part in parts])
    for row, memory in enumerate(alone):
        torch.testing.assert_close(batch[row].embeddings, memory.embeddings, **TOLERANCE)


@pytest.mark.parametrize("make", [
    lambda **o: made(small(), **o), lambda **o: ICAE(tiny_llama(), chunk=8, ratio=4, lora=2, **o).double(),
    lambda **o: AvgPool(tiny_llama(), ratio=4, lora=2, bos_token=1, **o).double(),
], ids=["separate", "icae", "avgpool"])  # fmt: skip
def test_the_loss_of_hidden_states_is_that_of_every_layer_in_the_teachers_deviations(make):
    torch.manual_seed(0)
    compressor = make(losses={"hidden": 1.0})
    contexts, questions, answers = tokens(2, 11), tokens(2, 3), tokens(2, 4)
    ours = compressor(contexts, question_ids=questions, answer_ids=answers)["hidden"]
    text = torch.cat([questions, answers], 1)
    model, memory = compressor.model, compressor.encode(contexts)
    bos = torch.full((2, 1), 1) if isinstance(compressor, AvgPool) else torch.zeros(2, 0, dtype=torch.int64)
    norm = model.model.norm
    with torch.no_grad():
        students = layer_by_layer(compressor, memory, text[:, :-1])
        # transformers gives the last layer's states after the norm.
        model.model.norm = nn.Identity()
        with double_angles(model):
            whole = torch.cat([bos, contexts, text[:, :-1]], 1)
            teachers = model.model(whole, output_hidden_states=True).hidden_states[1:]
        model.model.norm = norm
    losses = []
    for student, teacher in zip(students, teachers, strict=True):
        # The states that predict the answer: from the question's last token on.
        goal, own = teacher[:, -4:], student[:, -4:]
        scale = goal.std()
        difference = ((own - goal) / scale).abs()
        losses.append(torch.where(difference < 1, difference.square() / 2, difference - 0.5).mean())
    torch.testing.assert_close(ours, torch.stack(losses).mean().float(), rtol=1e-4, atol=1e-5)


def layer_by_layer(compressor, memory, text):
    """The reader's states [B, T, d] at a text after each layer: by a model that ends there, without its norm."""
    empty, rows = (compressor.rows("text", ids) for ids in ([[]] * len(text), text))
    plan = compressor.reading_plan(memory, "qa", (empty, rows))
    before = [] if memory.embeddings is None else [memory.embeddings]
    embedded = compressor.lm.embedded(compressor.reader, text)
    inputs = torch.cat([*before, compressor.task_embedding("qa", memory), embedded], 1)
    found = []
    for count in (1, 2):
        with hf.first_layers(compressor.model, count, norm=False):
            out = compressor.lm.run(compressor.reader, inputs_embeds=inputs, plan=plan, memory=memory.layers)
        found.append(out.last_hidden_state[:, -text.shape[1] :])
    return found
