"""What users do to the model and the adapters around a compressor: it counts, or it is refused by name."""

import contextlib
import copy
import itertools
import json
import pickle
import warnings

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from gistkit import hf
from gistkit.compress import ICAE, AvgPool, Compressor, Dodo, FiveHundredX, Gist, GistPool, Memory
from gistkit.hf.cache import CACHE
from tests.compress.test_refused import state
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer, tiny, tiny_llama

IDS = torch.randint(2, 50, (1, 18), generator=torch.Generator().manual_seed(0))
CHUNKS, PLACES = {"chunk": 12, "ratio": 4}, {"ratio": 4, "bos_token": 1}
METHODS = {
    "icae": (ICAE, CHUNKS),
    "joint": (ICAE, CHUNKS | {"joint_head": True}),
    "x500": (FiveHundredX, CHUNKS),
    "gist": (Gist, PLACES),
    "gistpool": (GistPool, PLACES | {"separate": True}),
    "avgpool": (AvgPool, PLACES),
    "dodo": (Dodo, PLACES | {"layer": 1}),
}


def made(method, model, **options):
    kind, settings = METHODS[method]
    return kind(model, **settings, **options).eval()


def own_adapter(model):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config).double().eval()


def close(one, other):
    # A merged float32 weight is rounded.
    atol = 1e-4 if one.tensors[0].dtype == torch.float32 else 1e-9
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("change", ["losses", "folded", "merged", "double", "bfloat16", "float16"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_saved_after_a_change_is_read(method, change, tmp_path):
    has_head = method not in ("avgpool", "dodo")
    model = tiny_llama().float()
    own = own_adapter(model).float() if change == "merged" and method not in ("gistpool", "dodo") else None
    compressor = unsettle(made(method, model, lora=2, losses=("ae", "compression") if has_head else ("ae",)), 0.3)
    if change == "losses":
        compressor.set_losses(("qa",))
        assert not any(name.startswith("compression_head") for name, _ in compressor.trainable())
    elif own is not None:
        own.merge_adapter(["default"])
    elif hasattr(torch, change):
        compressor.to(getattr(torch, change))
    memory = compressor.encode(IDS)
    memory.save(tmp_path / "a.gist")
    if change == "folded":
        with compressor.folded():
            compressor.save_pretrained(tmp_path / "saved")
    else:
        compressor.save_pretrained(tmp_path / "saved")
    base = tiny_llama().float()
    if own is not None:
        own_adapter(base).float().merge_adapter(["default"])
    elif hasattr(torch, change):
        base.to(getattr(torch, change))
    again = Compressor.from_pretrained(tmp_path / "saved", base)
    assert not again.training and again.loss_weights == compressor.loss_weights
    # What was cast computes in another dtype with the same weights.
    assert again.fingerprints() == compressor.fingerprints()
    assert hasattr(torch, change) or close(again.encode(IDS), memory)
    again.check_readable(Memory.load(tmp_path / "a.gist"))
    head = again.compression_head
    assert (head is not None) is has_head
    if change == "losses" and has_head:
        assert torch.equal(head.projection.weight, compressor.compression_head.projection.weight)
        again.set_losses(("compression",))
        assert any(name.startswith("compression_head") for name, _ in again.trainable())


@pytest.mark.parametrize("saved", [torch.float32, torch.float16])
@pytest.mark.parametrize("read", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_of_a_model_in_other_dtypes_are_that_model(saved, read, tmp_path):
    # As most checkpoints are published.
    model, other = tiny_llama().bfloat16().float(), tiny_llama().bfloat16().float()
    compressor = made("x500", copy.deepcopy(model).to(saved), lora=2)
    memory = compressor.encode(IDS)
    compressor.save_pretrained(tmp_path)
    again = Compressor.from_pretrained(tmp_path, model.to(read))
    again.check_readable(memory)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="other weights"):
        Compressor.from_pretrained(tmp_path, other.to(read))


@pytest.mark.parametrize("method", ["x500", "avgpool"])
def test_an_adapter_counts_beside_one_that_is_merged(method):
    model = tiny_llama()
    own = own_adapter(model)
    compressor = unsettle(made(method, model, lora=2).double(), 0.3)
    plain, memory = own(IDS).logits, compressor.encode(IDS)
    states, answer = compressor.decode(memory, "lm", IDS[:, :3]), compressor.generate(memory, max_new_tokens=4)
    own.merge_adapter(["default"])
    merged = compressor.encode(IDS)
    assert close(merged, memory)
    torch.testing.assert_close(compressor.decode(merged, "lm", IDS[:, :3]), states)
    for context in (compressor.folded(), hf.attach(model)):
        with context:
            assert torch.equal(compressor.generate(merged, max_new_tokens=4), answer)
    torch.testing.assert_close(own(IDS).logits, plain)
    assert model.model.layers[0].self_attn.q_proj.merged
    own.unmerge_adapter()
    assert close(compressor.encode(IDS), memory)


def test_an_adapter_trains_on_after_a_user_switches_theirs():
    model = tiny_llama()
    own = own_adapter(model)
    compressor = made("x500", model, lora=2, losses=("ae",))
    names = [name for name, _ in compressor.trainable()]
    own.set_adapter("default")
    assert [name for name, _ in compressor.trainable()] == names
    with own.disable_adapter():
        pass
    compressor(IDS)["loss"].backward()
    assert all(parameter.grad is not None for name, parameter in compressor.trainable() if "lora_" in name)
    # Who freezes all of it means it.
    compressor.requires_grad_(False)
    assert not list(compressor.trainable())


def switched_before(names, method, **options):
    """A model with two adapters of a user's, these of them on, and a compressor made around it."""
    torch.manual_seed(0)
    own = own_adapter(tiny_llama())
    own.add_adapter("second", copy.deepcopy(own.peft_config["default"]))
    own.double().base_model.set_adapter(names)
    torch.manual_seed(0)
    with contextlib.nullcontext() if names else own.disable_adapter():
        return own, unsettle(made(method, own.get_base_model(), lora=2).double(), 0.3)


@pytest.mark.parametrize("first", [[], ["default"], ["second"]])
def test_a_users_adapters_count_as_they_are_now(first):
    own, compressor = switched_before(first, "x500")
    with own.disable_adapter():
        plain = own(IDS).logits
    for names in (["second"], [], ["default"], ["default", "second"]):
        own.base_model.set_adapter(names or ["default"])
        with contextlib.nullcontext() if names else own.disable_adapter():
            memory, logits = compressor.encode(IDS), own(IDS).logits
            assert torch.equal(logits, plain) is not bool(names)
        assert close(memory, switched_before(names, "x500")[1].encode(IDS))
        # The pass has left them as they were.
        assert {tuple(layer.active_adapters) for layer in own.base_model.modules() if hasattr(layer, "lora_A")} == {
            tuple(names or ["default"])
        }
        assert not torch.equal(own(IDS).logits, plain)


def test_a_users_adapter_is_on_where_it_is_added_after_a_compressor():
    model, other = tiny_llama(), tiny_llama()
    compressor = unsettle(made("x500", model, lora=2).double(), 0.3)
    plain, before = model(IDS).logits, compressor.encode(IDS)
    torch.manual_seed(0)
    own = own_adapter(model)
    torch.manual_seed(0)
    assert torch.equal(own(IDS).logits, own_adapter(other)(IDS).logits)
    assert not close(compressor.encode(IDS), before)
    with own.disable_adapter():
        assert torch.equal(own(IDS).logits, plain) and close(compressor.encode(IDS), before)
    # Without one, PEFT's switches leave the compressor's own off.
    alone = unsettle(made("x500", tiny_llama(), lora=2).double(), 0.3)
    with alone.adapters.peft.disable_adapter():
        alone.encode(IDS)
    assert torch.equal(alone.model(IDS).logits, plain)


@pytest.mark.parametrize(("method", "options"), [("gistpool", {}), ("icae", {"train_norms": True})])
def test_a_users_adapter_is_refused_beside_adapters_that_it_cannot_join(method, options):
    own = own_adapter(tiny_llama())
    with own.disable_adapter():
        compressor = made(method, own.get_base_model(), lora=2, **options)
        compressor.encode(IDS)
    with pytest.raises(ValueError, match=r"lora: expected no other active adapter beside .*, got default; switch it"):
        compressor.encode(IDS)
    own.set_adapter("default")
    with own.disable_adapter():
        compressor.encode(IDS)


@pytest.mark.parametrize("training", [False, True])
def test_dropout_follows_the_mode_of_the_model(training, tmp_path):
    made("x500", tiny_llama(), lora=LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)).save_pretrained(
        tmp_path
    )
    again = Compressor.from_pretrained(tmp_path, tiny_llama().train(training))
    assert {module.training for module in again.modules() if isinstance(module, torch.nn.Dropout)} == {training}


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_a_learned_prompt_of_the_base_is_refused(kind):
    model = get_peft_model(tiny_llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(TypeError, match=r"model: expected one without a learned prompt .* default of type P"):
        made("x500", model, lora=2)


def test_rows_added_to_the_embeddings_are_tokens():
    compressor = made("x500", tiny_llama(), lora=2)
    before = compressor.source
    compressor.model.resize_token_embeddings(60, mean_resizing=False)
    memory = compressor.encode(torch.full((1, 5), 55))
    assert compressor.vocabulary == 60 and memory.source == compressor.source != before
    assert compressor.generate(memory, torch.tensor([[58]]), max_new_tokens=2).shape == (1, 2)


def test_no_adapter_of_any_kind_is_part_of_a_fingerprint():
    from peft import IA3Config, LoHaConfig

    plain = hf.fingerprint(tiny_llama())
    rows = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5])
    every = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    for config in (rows, every, LoHaConfig(r=2, target_modules=["q_proj"])):
        model = tiny_llama()
        get_peft_model(model, config)
        assert hf.fingerprint(model) == plain


def test_a_tokenizer_that_no_folder_gives_back_is_not_saved_with_a_warning(tmp_path):
    from transformers import ByT5Tokenizer

    compressor = made("x500", tiny_llama(vocab_size=384), lora=2)
    compressor.tokenizer = ByT5Tokenizer()
    with pytest.warns(UserWarning, match=r"tokenizer: expected one with a tokenizer.json, .* got ByT5Tokenizer"):
        compressor.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer").exists()


def test_half_a_character_is_refused_with_its_place():
    compressor = made("x500", tiny_llama(vocab_size=257), lora=2)
    compressor.tokenizer = byte_tokenizer()
    with pytest.raises(
        ValueError, match=r"text: expected a text of whole characters, got half of one, '\\ud83d', at 2"
    ):
        compressor.compress(["a gate", "a \ud83d shed"])
    with pytest.raises(ValueError, match="question: expected a text of whole characters"):
        compressor.ask(compressor.compress("a gate"), "who \udbc0?")


@pytest.mark.parametrize("method", ["gist", "avgpool", "dodo"])
def test_a_cache_of_a_memory_is_read_as_the_compressor_reads_it_or_not_at_all(method):
    compressor = unsettle(made(method, tiny("mistral", sliding_window=16), lora=2).double(), 0.3)
    memory = compressor.encode(IDS[:, :9])
    cache, steps = compressor.to_cache(memory, "qa"), IDS[:, :8]
    places = compressor.ordinals(memory)[1][0]
    right = compressor.logits(compressor.decode(memory, "qa", steps)[:, 1:])
    with pytest.raises(ValueError, match=r"expected a pass inside `with compressor.using\(compressor.reader\)`"):
        compressor.model(steps[:, :2], **{CACHE: cache})
    with compressor.using(compressor.reader):
        for at in range(16 - places):
            logits = compressor.model(steps[:, at : at + 1], **{CACHE: cache}).logits
            torch.testing.assert_close(logits.float(), right[:, at : at + 1], rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=f"at most 16 tokens, the model's sliding window, got {places} compressed"):
            compressor.model(steps[:, :1], **{CACHE: cache})


def test_a_compressor_with_norms_of_its_own_is_pickled():
    compressor = made("icae", tiny_llama(), lora=2, train_norms=True)
    copied = pickle.loads(pickle.dumps(compressor))
    assert close(copied.encode(IDS), compressor.encode(IDS))


def test_all_maps_of_a_model_with_an_adapter_leave_out_its_head():
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    names = [name for name, _ in made("avgpool", model, lora=2).trainable()]
    assert any("down_proj" in name for name in names) and not any("lm_head" in name for name in names)


@pytest.mark.parametrize("method", ["x500", "avgpool"])
def test_what_is_no_model_of_transformers_is_named(method):
    with pytest.raises(TypeError, match="model: expected a transformers model, got Linear"):
        made(method, torch.nn.Linear(2, 2), lora=None)


def foreign_map(model):
    # PEFT finds out after it has changed the maps of layers before.
    GistPool(model, **PLACES, separate=True, lora=LoraConfig(target_modules=["q_proj", "act_fn"], r=2))


def integer_map(model):
    maps = [module for name, module in model.named_modules() if name.endswith("down_proj")]
    weight = torch.ones(maps[-1].weight.shape, dtype=torch.int8)
    before, maps[-1].weight = maps[-1].weight, torch.nn.Parameter(weight, requires_grad=False)
    try:
        GistPool(model, **PLACES, separate=True, full_copy=True)
    finally:
        maps[-1].weight = before


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("fails", [foreign_map, integer_map])
def test_a_constructor_that_fails_leaves_the_model_as_it_was(fails, beside):
    model = tiny_llama()
    if beside:
        unsettle(made("x500", model, lora=2), 0.3)
    before = state(model)
    with torch.no_grad():
        logits = model(IDS).logits
    with pytest.raises((ValueError, TypeError)):
        fails(model)
    assert state(model) == before and made("avgpool", model, lora=2).adapters is not None
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)


def test_texts_longer_than_any_in_training_are_told(tmp_path):
    compressor = made("x500", tiny_llama(), lora=2, losses=("ae",)).train()
    compressor(IDS[:, :9])["loss"].backward()
    compressor([IDS[0, :14].tolist(), IDS[0, :3].tolist()])
    compressor.eval()(IDS)
    compressor.save_pretrained(tmp_path)
    read = Compressor.from_pretrained(tmp_path, tiny_llama()).eval()
    assert read.trained_length == compressor.trained_length == 14
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read.encode(IDS[:, :14])
        made("x500", tiny_llama(), lora=2).encode(IDS)
        with pytest.raises(
            UserWarning, match=r"input_ids: expected at most 14 tokens, the longest context .* got 15: answers"
        ):
            read.encode(IDS[:, :15])
    settings = json.loads((tmp_path / "compressor.json").read_text())
    for name, length in itertools.product(("trained_length", "trained_parts"), ("long" * 1000, 0, 1.5, True, 10**30)):
        (tmp_path / "compressor.json").write_text(json.dumps(settings | {name: length}))
        with pytest.raises(ValueError, match=rf"expected {name} to be a whole number >= 1, got .{{1,80}}$"):
            Compressor.from_pretrained(tmp_path, tiny_llama())


PROSE = "The survey of the quay was begun in May, and it is the city that pays for the repair of the piles in it. " * 2
TABLE = "name,berth,width,depth\n" + "Halvorsen,ferry,forty,eleven\nMoreau,crane,ninety,seven\n" * 12
DEUTSCH = "Die Stadt bezahlt die Arbeiten am Kai, und die Reederei bezahlt alles, was dort noch gebaut wird. " * 6
RUSSIAN, JAPANESE = "Городу принадлежит набережная. " * 9, "港の調査は三月に始まった" * 13
# Terse English has few common words: a recipe, a ticker.
RECIPE = (
    "Preheat oven 180 C. Grease two round tins. Cream butter, sugar until pale, fluffy. Beat eggs one by one, add "
    "vanilla extract. Fold flour, baking powder, salt. Divide mixture between tins, bake twenty five minutes."
)
NEWS = (
    "Storm Babet batters Scotland: hundreds evacuated, roads closed, trains cancelled. Police Scotland confirmed two "
    "deaths Thursday near Forfar, Angus. Met Office issued second red warning Friday. Brechin residents refused "
    "evacuation orders; council staff knocked doors overnight."
)
TALK = "What did he say? He said yes. Really? I think so. We went home. She called me. I told her about our plan. " * 6


@pytest.mark.parametrize("method", ["avgpool", "x500"])
def test_texts_unlike_those_of_training_are_told(method, tmp_path):
    sizes = {"vocab_size": 257, "bos_token_id": 1, "eos_token_id": 256, "max_position_embeddings": 1024}
    compressor = made(method, tiny_llama(**sizes), lora=2)
    compressor.languages, compressor.tokenizer = ("en",), byte_tokenizer()
    compressor.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "compressor.json").read_text())
    read = Compressor.from_pretrained(tmp_path, tiny_llama(**sizes), tokenizer=byte_tokenizer()).eval()
    assert read.languages == ("en",) and settings["languages"] == ["en"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A few words may be of any language.
        for text in (PROSE, PROSE * 3, TABLE[:60], DEUTSCH[:90], RECIPE, NEWS, TALK):
            read.compress(text)
        for text in (TABLE, DEUTSCH, [PROSE, DEUTSCH], RUSSIAN, JAPANESE):
            with pytest.raises(
                UserWarning, match="input_ids: expected prose in en, which the compressor was trained on"
            ):
                read.compress(text)
        for tag in ("en-GB", "EN"):
            read.languages = (tag,)
            read.compress(PROSE * 3)
            with pytest.raises(UserWarning, match=f"expected prose in {tag}"):
                read.compress(DEUTSCH)
        # Of others nothing is known, nor without a tokenizer.
        read.languages = ("en", "nn")
        read.compress(DEUTSCH)
        bare = made(method, tiny_llama(**sizes), lora=2)
        bare.languages = ("en",)
        bare.encode([byte_tokenizer()(DEUTSCH)["input_ids"]])
    for languages in ("en", [], [3], ["english language"], [""]):
        (tmp_path / "compressor.json").write_text(json.dumps(settings | {"languages": languages}))
        with pytest.raises(ValueError, match=r"expected languages to be a list such as \[\"en\"\], got"):
            Compressor.from_pretrained(tmp_path, tiny_llama(**sizes))
