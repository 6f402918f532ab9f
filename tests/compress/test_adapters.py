"""LoRA on for the encoder and off for the decoder, gradient checkpointing, and compressors on disk."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gistkit.compress import ICAE, AvgPool, Compressor, FiveHundredX, Select, language_model
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import tiny_llama

METHODS = [ICAE, FiveHundredX]
IDS = torch.arange(2 * 13).view(2, 13) % 50


def build(method, model=None, **settings):
    return method(tiny_llama() if model is None else model, **{"chunk": 6, "ratio": 3, "lora": 4, **settings})


def test_the_parameters_that_train_are_counted(capsys):
    compressor = build(ICAE)
    compressor.print_trainable_parameters()
    trained = sum(p.numel() for p in compressor.parameters() if p.requires_grad)
    total = sum(p.numel() for p in compressor.parameters())
    share = f"{trained / total:.4%}".rstrip("%")
    assert capsys.readouterr().out == f"trainable params: {trained:,} || all params: {total:,} || trainable%: {share}\n"


@pytest.mark.parametrize("method", METHODS)
def test_only_adapter_and_new_embeddings_train(method):
    compressor = build(method, losses=("ae", "lm", "compression"))
    names = [name for name, _ in compressor.trainable()]
    assert all(
        "lora_" in n or n.split(".")[0] in ("memory_embeddings", "task_embeddings", "compression_head") for n in names
    )
    unsettle(compressor, 0.3)(IDS, continuation_ids=IDS)["loss"].backward()
    for name, parameter in compressor.named_parameters():
        got = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        # Nothing reads the last layer's queries of a memory of keys, but the compression loss reads its output.
        assert got == (name in names), name


def test_a_lora_config_says_which_modules():
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["up_proj", "embed_tokens"])
    compressor = unsettle(build(ICAE, lora=config, losses=("lm",)), 0.3)
    compressor(IDS, continuation_ids=IDS)["loss"].backward()
    trained = {name: parameter for name, parameter in compressor.trainable() if "lora" in name}
    assert {part for name in trained for part in name.split(".")} >= {"up_proj", "lora_embedding_A", "lora_embedding_B"}
    assert not any("q_proj" in name for name in trained)
    assert all(parameter.grad is not None for parameter in trained.values())


def test_a_pass_keeps_no_wider_copies_of_what_its_adapters_read():
    def wide(*targets):
        lora = LoraConfig(r=4, target_modules=[*targets])
        compressor = unsettle(FiveHundredX(tiny_llama().bfloat16(), chunk=6, ratio=3, lora=lora, losses=("ae",)), 0.3)
        assert {p.dtype for name, p in compressor.trainable() if "lora" in name} == {torch.float32}
        factors = {p.data_ptr() for p in compressor.parameters()}
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            compressor(IDS)
        return sum(t.dtype == torch.float32 and t.numel() > 1000 and t.data_ptr() not in factors for t in saved)

    # Those of norms and losses.
    assert wide("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj") == wide("v_proj")


def test_folders_that_are_no_compressor_are_refused(tmp_path):
    compressor = build(ICAE)
    with pytest.raises(FileNotFoundError, match=r"expected a folder with compressor.json, found none"):
        Compressor.from_pretrained(tmp_path, compressor.model)
    compressor.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a compressor of method x500, got icae"):
        FiveHundredX.from_pretrained(tmp_path, tiny_llama())
    settings = json.loads((tmp_path / "compressor.json").read_text())
    (tmp_path / "compressor.json").write_text(json.dumps(settings | {"version": 7}))
    with pytest.raises(
        ValueError, match="expected format gistkit-compressor, version 2, got gistkit-compressor, version 7"
    ):
        Compressor.from_pretrained(tmp_path, tiny_llama())


WITHOUT_ADAPTERS = {
    "select": lambda: Select(tiny_llama().bfloat16().float(), ratio=2, by="key_norm", bos_token=1),
    "avgpool": lambda: AvgPool(tiny_llama().bfloat16().float(), ratio=2, bos_token=1, lora=None),
}


@pytest.mark.parametrize("name", WITHOUT_ADAPTERS)
def test_a_model_that_nothing_has_changed_is_not_saved(name, tmp_path):
    compressor, base = WITHOUT_ADAPTERS[name]().eval(), tiny_llama().bfloat16().float()
    memory = compressor.encode(IDS)
    answer = compressor.generate(memory, max_new_tokens=6)
    compressor.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model").exists()
    assert '("saved", model)' in (tmp_path / "saved" / "README.md").read_text()
    loaded = Compressor.from_pretrained(tmp_path / "saved", base)
    again = loaded.encode(IDS)
    assert again.maker == memory.maker and all(map(torch.equal, again.tensors, memory.tensors))
    assert torch.equal(loaded.generate(memory, max_new_tokens=6), answer)
    with pytest.raises(ValueError, match=r"model: expected the base model of .*, which does not hold one, got None"):
        Compressor.from_pretrained(tmp_path / "saved")
    # Also in another dtype, before or after it is saved.
    for dtype in (torch.bfloat16, torch.float16):
        Compressor.from_pretrained(tmp_path / "saved", copy.deepcopy(base).to(dtype)).check_readable(memory)
        loaded.to(dtype).save_pretrained(tmp_path / "moved")
        assert not (tmp_path / "moved" / "model").exists()
        Compressor.from_pretrained(tmp_path / "moved", tiny_llama().bfloat16().float()).check_readable(memory)
    with torch.no_grad():
        base.lm_head.weight.add_(1.0)
    with pytest.raises(ValueError, match=r"expected the base model of .* other weights"):
        Compressor.from_pretrained(tmp_path / "saved", base)


@pytest.mark.parametrize("change", ["none", "added after", "trained"])
def test_a_users_adapter_is_no_change_of_the_model(change, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = tiny_llama().float()
    made = lambda: Select(model, ratio=2, by="key_norm", bos_token=1).eval()  # noqa: E731
    if change == "added after":
        compressor, adapted = made(), get_peft_model(model, config)
    else:
        adapted = model = get_peft_model(model, config)
        compressor = made()
    if change == "trained":
        adapted(IDS, labels=IDS).loss.backward()
        torch.optim.AdamW(adapted.parameters(), lr=0.1).step()
    memory = compressor.encode(IDS)
    compressor.save_pretrained(tmp_path)
    assert not (tmp_path / "model").exists()
    again = Compressor.from_pretrained(tmp_path, model).encode(IDS)
    assert again.maker == memory.maker and all(map(torch.equal, again.tensors, memory.tensors))
    with torch.no_grad():
        adapted.get_base_model().lm_head.weight.add_(1)
    with pytest.raises(ValueError, match="model: expected no adapters in a model with its own weights trained, got"):
        compressor.save_pretrained(tmp_path)


def step(compressor, loss, **options):
    optimizer = torch.optim.AdamW(compressor.parameters(), lr=1e-3, **options)
    loss().backward()
    optimizer.step()


def replaced(compressor):
    head = compressor.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


CHANGES = {
    "step": lambda compressor: step(compressor.train(), lambda: compressor(IDS, continuation_ids=IDS)["loss"]),
    "fused step of the model": lambda compressor: step(
        compressor, lambda: compressor.model(IDS, labels=IDS).loss, fused=True
    ),
    "in place": lambda compressor: compressor.model.lm_head.weight.requires_grad_(False)[3].mul_(2),
    "replaced": replaced,
    "another checkpoint": lambda compressor: compressor.model.load_state_dict(tiny_llama().state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", WITHOUT_ADAPTERS)
def test_a_model_that_may_have_changed_is_saved(name, change, tmp_path):
    compressor = WITHOUT_ADAPTERS[name]()
    compressor.set_losses(("lm",))
    CHANGES[change](compressor)
    for place in ("first", "second"):
        compressor.save_pretrained(tmp_path / place)
        assert (tmp_path / place / "model" / "model.safetensors").is_file()
        assert '("' + place + '")' in (tmp_path / place / "README.md").read_text()
        loaded = Compressor.from_pretrained(tmp_path / place)
        ours, theirs = (dict(one.named_parameters()) for one in (compressor, loaded))
        assert all(torch.equal(theirs[key], weight) for key, weight in ours.items())
        # What the folder held is in no other place.
        compressor = loaded
    around = Compressor.from_pretrained(tmp_path / place, tiny_llama().float())
    around.save_pretrained(tmp_path / "third")
    assert (tmp_path / "third" / "model").is_dir()


def test_a_model_that_trained_within_another_compressor_is_saved(tmp_path):
    trained = WITHOUT_ADAPTERS["avgpool"]()
    trained.set_losses(("lm",))
    CHANGES["step"](trained)
    trained.save_pretrained(tmp_path / "trained")
    for model in (trained.model, Compressor.from_pretrained(tmp_path / "trained").model):
        Select(model, ratio=2, by="key_norm", bos_token=1).save_pretrained(tmp_path / "around")
        assert (tmp_path / "around" / "model").is_dir()
        shutil.rmtree(tmp_path / "around")


def test_one_row_that_a_language_model_trains_is_saved(tmp_path):
    compressor = WITHOUT_ADAPTERS["avgpool"]().train()
    compressor.requires_grad_(False)
    compressor.embed.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([compressor.embed.weight], weight_decay=0.0, fused=True)
    language_model(compressor, tau=4, segment=2)(torch.tensor([[3, 3, 3, 3, 3, 3, 3, 3]]))["loss"].backward()
    optimizer.step()
    compressor.save_pretrained(tmp_path)
    assert (tmp_path / "model").is_dir()


def trained(**settings):
    """One whose model has trained, or whose adapters have."""
    compressor = AvgPool(tiny_llama().bfloat16().float(), ratio=2, bos_token=1, **{"lora": None, **settings})
    compressor.set_losses(("lm",))
    step(compressor.train(), lambda: compressor(IDS, continuation_ids=IDS)["loss"])
    return compressor.eval()


def test_a_save_removes_the_models_of_the_one_before_and_nothing_else(tmp_path):
    names = lambda: {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}  # noqa: E731
    WITHOUT_ADAPTERS["avgpool"]().save_pretrained(tmp_path)
    plain = names()
    assert plain == {"README.md", "compressor.json", "compressor.safetensors"}
    (tmp_path / "notes.txt").write_text("mine")
    for compressor in (trained(), trained(lora=2)):
        (folder,) = ["model"] if compressor.adapters is None else compressor.adapters.names.values()
        compressor.save_pretrained(tmp_path)
        assert {path.partition("/")[0] for path in names() - plain} == {"notes.txt", folder}
        # Of an earlier save, of more files.
        shutil.copy(next((tmp_path / folder).glob("*.safetensors")), tmp_path / folder / "more.safetensors")
        compressor.save_pretrained(tmp_path)
        assert not (tmp_path / folder / "more.safetensors").exists()
        WITHOUT_ADAPTERS["avgpool"]().save_pretrained(tmp_path)
        assert names() == plain | {"notes.txt"} and not (tmp_path / folder).exists()
    # What its settings do not claim is somebody's own, and so is what no save writes.
    for place, before in (("model/config.json", WITHOUT_ADAPTERS["avgpool"]()), ("model/notes.txt", trained())):
        before.save_pretrained(tmp_path)
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("{}")
        WITHOUT_ADAPTERS["avgpool"]().save_pretrained(tmp_path)
        assert names() == plain | {"notes.txt", place}
        (tmp_path / place).unlink()


def stopping(call, left):
    """A function that is interrupted once there are no calls left."""

    def called(*given, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return call(*given, **options)

    return called


@pytest.mark.parametrize("lora", [None, 2])
def test_a_folder_whose_save_was_interrupted_loads_as_before_or_is_refused(lora, tmp_path, monkeypatch):
    old, new = trained(lora=lora), trained(lora=None if lora else 2)
    memories = [one.encode(IDS) for one in (old, new)]
    outcomes = set()
    old.save_pretrained(tmp_path / "old")
    for calls in range(100):
        folder, left = tmp_path / str(calls), [calls]
        shutil.copytree(tmp_path / "old", folder)
        with monkeypatch.context() as patch:
            for place, name in ((os, "replace"), (Path, "unlink")):
                patch.setattr(place, name, stopping(getattr(place, name), left))
            try:
                new.save_pretrained(folder)
            except KeyboardInterrupt:
                pass
            else:
                break
        try:
            found = Compressor.from_pretrained(folder, tiny_llama().bfloat16().float()).eval().encode(IDS)
        except FileNotFoundError as error:
            assert str(error) == f"{folder}: expected a folder with compressor.json, found none"
            outcomes.add("refused")
        else:
            assert all(map(torch.equal, found.tensors, memories[0].tensors))
            outcomes.add("as before")
    assert outcomes == {"refused", "as before"}
    found = Compressor.from_pretrained(folder, tiny_llama().bfloat16().float()).eval().encode(IDS)
    assert all(map(torch.equal, found.tensors, memories[1].tensors))


@pytest.mark.parametrize("lora", [None, 4])
def test_a_refused_model_stays_as_it_was(lora, tmp_path):
    FiveHundredX(tiny_llama(), chunk=4, ratio=2, lora=lora).save_pretrained(tmp_path)
    wrong = tiny_llama(hidden_size=16) if lora is None else tiny_llama()
    torch.nn.init.normal_(wrong.lm_head.weight)
    before = {name: weight.clone() for name, weight in wrong.state_dict().items()}
    with pytest.raises(ValueError, match=r"model: expected the base model of .*: (another architecture|other weights)"):
        Compressor.from_pretrained(tmp_path, wrong)
    assert all(torch.equal(weight, before[name]) for name, weight in wrong.state_dict().items())
    assert all(parameter.requires_grad for parameter in wrong.parameters())
