"""What every method promises: rows are as alone, training works, checkpointing changes nothing, files lose nothing."""

import pytest
import torch

from gistkit.compress import METHODS, Compressor, Memory
from gistkit.compress.methods.in_place import InPlace
from gistkit.compress.training import TAUGHT
from tests.helpers.models import TOLERANCE, checkpoint, same_under_checkpointing, tiny, tiny_llama, tokens
from tests.helpers.tiers import tiers

BOS = 1
PARTS = {"embedding_lora": 5, "train_norms": True}
# Settings that make a method small, by their names.
SMALL = {"chunk": 6, "ratio": 3, "segment": 7, "layer": 1, "lora": 2, "bos_token": BOS}


def case(method, **more):
    """A method and settings of it."""
    return method, {name: value for name, value in SMALL.items() if name in METHODS[method].config_class.names()} | more


# Images have their own tests, and a baseline without its context has nothing to keep.
CASES = {method: case(method) for method in METHODS if method not in ("voco", "no_context")}
CASES |= {
    "icae": case("icae", match_embeddings=True, end_token=9),
    "icae, own weights": case("icae", lora=None, layout="dpl"),
    "icae, embeddings and norms": case("icae", **PARTS),
    "x500, own weights": case("x500", lora=None, layout="dpl"),
    "separate_encoder": case("separate_encoder", ratio=4, segment=12),
    "gist, own counter": case("gist", separate_positions=True),
    "separate offset gist": case("gist", offset=True, separate=True, gists=5),
    "avgpool, own weights": case("avgpool", lora=None, pool="kv"),
    "gistpool, copied": case("gistpool", full_copy=True),
    "gistpool, own weights": case("gistpool", lora=None, copy_norms=True),
    "gistpool, embeddings and norms": case("gistpool", **PARTS),
    "dodo": case("dodo", threshold=0.25),
    "dodo, own weights": case("dodo", lora=None),
    "dodo, embeddings and norms": case("dodo", **PARTS),
    "select": case("select", by="key_norm"),
}
FIELDS = ("source", "lengths", "context_lengths", "starts", "documents", "rest", "fingerprint", "maker", "model")
QUICK = ["icae", "x500, own weights", "separate_encoder", "gistpool", "dodo", "kv_distill"]


def make(name, **more):
    """Trained-like: each parameter that trains differs from what it began as, by numbers of single precision."""
    method, settings = CASES[name]
    if method == "separate_encoder":
        more["encoder"] = tiny("gpt2", hidden_size=32, num_hidden_layers=1)
    torch.manual_seed(0)
    compressor = METHODS[method](tiny_llama(), **settings | more).double()
    with torch.no_grad():
        for _, parameter in compressor.trainable():
            parameter.add_(0.1 * torch.randn(parameter.shape) * (0.1 if CASES[name][1]["lora"] is None else 1))
            parameter.copy_(parameter.float())
    return compressor


def all_losses(name):
    """Settings with all losses that a method can have, and what they are of."""
    method, settings = CASES[name]
    losses = METHODS[method].config_class.allowed_losses
    given = {"losses": [loss for loss in losses if settings["lora"] or loss not in TAUGHT]}
    texts = {"continuation_ids": tokens(2, 4), "question_ids": tokens(2, 3), "answer_ids": tokens(2, 2)}
    return given, {"input_ids": tokens(2, 11), **texts}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_as_they_are_alone(name):
    compressor = make(name).eval()
    contexts = [tokens(length).tolist() for length in (13, 3, 7, 12)]
    contexts[2] = [BOS, *contexts[2]]
    texts = [tokens(length).tolist() for length in (2, 5, 1, 0)]
    memory = compressor.encode(contexts)
    for left in (False, True):
        ids, mask = torch.zeros(2, 4, 13, dtype=torch.long)
        for row, context in enumerate(contexts):
            place = slice(13 - len(context), None) if left else slice(len(context))
            ids[row, place], mask[row, place] = torch.tensor(context), 1
        for found in (compressor.encode(ids, mask), compressor.encode({"input_ids": ids, "attention_mask": mask})):
            assert found.lengths == memory.lengths and all(map(torch.equal, found.tensors, memory.tensors))
    together = {task: compressor.decode(memory, task, texts) for task in ("ae", "lm", "qa")}
    before = [tensor.clone() for tensor in memory.tensors]
    answers = compressor.generate(memory, texts, task="qa", max_new_tokens=4)
    assert torch.equal(compressor.generate(memory, texts, task="qa", max_new_tokens=4), answers)
    assert all(map(torch.equal, before, memory.tensors))
    has_bos = isinstance(compressor, InPlace)
    for row, (context, text) in enumerate(zip(contexts, texts, strict=True)):
        alone = compressor.encode([context])
        # A selection may keep BOS among the others.
        size = has_bos + compressor.size(len(context) - has_bos * (row == 2))
        assert alone.lengths[0] == memory.lengths[row] and (size == alone.lengths[0] or name == "select")
        assert torch.equal(memory[row].positions, alone.positions) and memory.starts[row] == alone.starts[0]
        assert not memory.positions[row, memory.lengths[row] :].any()
        for task, states in together.items():
            own = compressor.decode(alone, task, [text])[0]
            torch.testing.assert_close(states[row, : len(own)], own, **TOLERANCE)
        read = list(text)
        for _ in range(4):
            read.append(int(compressor.logits(compressor.decode(alone, "qa", [read])[:, -1]).argmax(-1)))
        assert answers[row].tolist() == read[len(text) :]


@pytest.mark.parametrize("name", QUICK)
def test_settings_stay_and_unknown_arguments_are_refused(name):
    compressor = make(name)
    for setting in ("title", "settings", "chunk"):
        value = getattr(compressor, setting)
        with pytest.raises(AttributeError):
            setattr(compressor, setting, 3)
        assert getattr(compressor, setting) == value
    with pytest.raises(TypeError, match=r"forward\(\) got an unexpected keyword argument 'continuaton_ids'"):
        compressor(tokens(2, 8), continuaton_ids=tokens(2, 3))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = compressor.nonsense


@pytest.mark.parametrize("name", tiers(CASES, QUICK))
def test_gradient_checkpointing_gives_the_same_gradients(name):
    losses, batch = all_losses(name)
    compressor = make(name, **losses)
    gradients = same_under_checkpointing(compressor, lambda: compressor(**batch)["loss"], **TOLERANCE)
    reached = {parameter for parameter, gradient in gradients.items() if gradient.any()}
    # The last layer's queries may reach nothing.
    missing = {parameter for parameter, _ in compressor.trainable() if "layers.1" not in parameter} - reached
    assert all("layers/1" in parameter for parameter in missing), missing


@pytest.mark.parametrize("name", QUICK)
def test_gradient_checkpointing_by_the_model_alone_is_refused(name):
    losses, batch = all_losses(name)
    compressor = make(name, **losses).train()
    checkpoint(compressor.model)
    with pytest.raises(ValueError, match="model: expected gradient checkpointing to be off, or enabled by the compr"):
        compressor(**batch)
    compressor.gradient_checkpointing_enable()
    assert compressor(**batch)["loss"].isfinite()
    compressor.gradient_checkpointing_disable()
    assert compressor(**batch)["loss"].isfinite()


@pytest.mark.parametrize("name", tiers(CASES, QUICK))
def test_training_lowers_the_loss(name):
    compressor, ids = make(name, lora=CASES[name][1]["lora"] and 8).train(), tokens(4, 12)
    text = {"continuation_ids": ids[:, :6], "question_ids": ids[:, :2], "answer_ids": tokens(4, 6)}
    optimizer, found = torch.optim.Adam(compressor.parameter_groups(2e-2)), []
    while len(found) < 40 and (not found or found[-1] > found[0] / 2):
        loss = compressor(ids, **text)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    assert found[-1] < found[0] / 2, found


@pytest.mark.parametrize("name", CASES)
def test_files_of_compressor_and_memory_lose_nothing(name, tmp_path):
    losses, batch = all_losses(name)
    window = {} if name == "separate_encoder" else {"window": 12}
    compressor = make(name, **losses, **window).eval()
    compressor.trained_length, compressor.trained_parts = 99, 7
    compressor.save_pretrained(tmp_path / "compressor")
    more = {"encoder": compressor.encoder} if name == "separate_encoder" else {}
    loaded = Compressor.from_pretrained(tmp_path / "compressor", tiny_llama(), **more).double().eval()
    assert type(loaded) is type(compressor) and (loaded.trained_length, loaded.trained_parts) == (99, 7)
    assert loaded.settings == compressor.settings and loaded.source == compressor.source
    ours, theirs = (dict(each.named_parameters()) for each in (compressor, loaded))
    assert {n for n in ours if "base_layer" not in n and "gistkit_" not in n} <= theirs.keys()
    contexts = [tokens(length).tolist() for length in (17, 5, 1)]
    memory = compressor.encode(contexts)
    assert memory.context_lengths == (12 if window else 17, 5, 1)
    assert memory.rest == (tuple(contexts[0][12:] if window else ()), (), ())
    path = tmp_path / "folder" / "report.gist"
    memory.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["report.gist"]
    found = Memory.load(path)
    for field in FIELDS:
        assert getattr(found, field) == getattr(memory, field), field
    assert torch.equal(found.positions, memory.positions) and found.nbytes == memory.nbytes
    assert all(map(torch.equal, found.tensors, memory.tensors))
    assert Memory.load(path, dtype=torch.float32).dtype == torch.float32
    text = [[5, 6], [7], []]
    expected = compressor.decode(memory, "lm", text)
    torch.testing.assert_close(loaded.decode(found, "lm", text), expected, **TOLERANCE)
    torch.testing.assert_close(compressor(**batch)["loss"], loaded(**batch)["loss"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if "copied" not in name and name != "gistpool, own weights"])
def test_learned_tokens_follow_the_model_to_its_device(name):
    compressor = make(name).eval()
    memory = compressor.encode(tokens(1, 13))

    def stop(*_):
        raise InterruptedError("the decoder has its embeddings")

    # The meta device has no values: a pass over it ends where it begins.
    for lm in {compressor.lm, compressor.encoder_lm}:
        lm.model.to("meta")
        lm.decoder.register_forward_pre_hook(stop)
    assert {compressor.task_embedding(task, memory).device.type for task in ("ae", "lm")} == {"meta"}
    with pytest.raises(InterruptedError):
        compressor.encode_rows(compressor.contexts(tokens(1, 13)))
