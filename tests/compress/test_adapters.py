"""LoRA on for the encoder and off for the decoder, gradient checkpointing, and compressors on disk."""

import copy
import json

import pytest
import torch
from peft import LoraConfig

from gistkit.compress import ICAE, Compressor, FiveHundredX
from tests.helpers.models import checkpoint, tiny_llama

METHODS = [ICAE, FiveHundredX]
IDS = torch.arange(2 * 13).view(2, 13) % 50


def build(method, model=None, **settings):
    return method(tiny_llama() if model is None else model, **{"chunk": 6, "ratio": 3, "lora": 4, **settings})


def randomise(compressor):
    """LoRA starts as nothing: its second factor is zero."""
    with torch.no_grad():
        for name, parameter in compressor.trainable():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return compressor


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
    randomise(compressor)(IDS, continuation_ids=IDS)["loss"].backward()
    for name, parameter in compressor.named_parameters():
        got = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        # Nothing reads the last layer's queries of a memory of keys, but the compression loss reads its output.
        assert got == (name in names), name


def test_a_lora_config_says_which_modules():
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["up_proj", "embed_tokens"])
    compressor = randomise(build(ICAE, lora=config, losses=("lm",)))
    compressor(IDS, continuation_ids=IDS)["loss"].backward()
    trained = {name: parameter for name, parameter in compressor.trainable() if "lora" in name}
    assert {part for name in trained for part in name.split(".")} >= {"up_proj", "lora_embedding_A", "lora_embedding_B"}
    assert not any("q_proj" in name for name in trained)
    assert all(parameter.grad is not None for parameter in trained.values())


def test_a_pass_keeps_no_wider_copies_of_what_its_adapters_read():
    def wide(*targets):
        lora = LoraConfig(r=4, target_modules=[*targets])
        compressor = randomise(FiveHundredX(tiny_llama().bfloat16(), chunk=6, ratio=3, lora=lora, losses=("ae",)))
        assert {p.dtype for name, p in compressor.trainable() if "lora" in name} == {torch.float32}
        factors = {p.data_ptr() for p in compressor.parameters()}
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            compressor(IDS)
        return sum(t.dtype == torch.float32 and t.numel() > 1000 and t.data_ptr() not in factors for t in saved)

    # Those of norms and losses.
    assert wide("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj") == wide("v_proj")


def test_checkpointing_by_the_model_alone_is_refused():
    compressor = build(ICAE).train()
    checkpoint(compressor.model)
    with pytest.raises(ValueError, match="model: expected gradient checkpointing to be off, or enabled by the comp"):
        compressor(IDS, continuation_ids=IDS)
    compressor.gradient_checkpointing_enable()
    assert compressor(IDS, continuation_ids=IDS)["loss"].isfinite()
    compressor.gradient_checkpointing_disable()
    assert compressor(IDS, continuation_ids=IDS)["loss"].isfinite()


def test_folders_that_are_no_compressor_are_refused(tmp_path):
    compressor = build(ICAE)
    with pytest.raises(FileNotFoundError, match=r"expected a folder with compressor.json, found none"):
        Compressor.from_pretrained(tmp_path, compressor.model)
    compressor.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a compressor of method x500, got icae"):
        FiveHundredX.from_pretrained(tmp_path, tiny_llama())
    with pytest.raises(ValueError, match=r"expected the base model of .* another architecture or size"):
        Compressor.from_pretrained(tmp_path, tiny_llama(num_hidden_layers=1))
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    with pytest.raises(ValueError, match=r"expected the base model of .* other weights"):
        Compressor.from_pretrained(tmp_path, other)
    with pytest.raises(ValueError, match=r"model: expected the base model of .*, which does not hold one, got None"):
        Compressor.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "compressor.json").read_text())
    (tmp_path / "compressor.json").write_text(json.dumps(settings | {"version": 7}))
    with pytest.raises(
        ValueError, match="expected format gistkit-compressor, version 2, got gistkit-compressor, version 7"
    ):
        Compressor.from_pretrained(tmp_path, tiny_llama())


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


def test_odd_settings_files_are_refused(tmp_path):
    model = tiny_llama()
    FiveHundredX(model, chunk=4, ratio=2, lora=4).save_pretrained(tmp_path)
    path = tmp_path / "compressor.json"
    settings = json.loads(path.read_text())

    def with_own(**changes):
        own = settings["settings"] | changes
        return settings | {
            "settings": {name: value for name, value in own.items() if value is not None or name != "chunk"}
        }

    for odd, error, message in [
        ([1], ValueError, "expected settings by name, got list"),
        ({key: value for key, value in settings.items() if key != "method"}, ValueError, "got none for method"),
        (with_own(chunk=None), ValueError, "got none for chunk"),
        (with_own(chunks=4), ValueError, "got one that it does not have for chunks"),
        (with_own(chunk=0), ValueError, "chunk: expected a whole number >= 1"),
        (settings | {"settings": 3}, ValueError, "expected settings and adapters by name, got 3"),
        (settings | {"adapters": {"encoder": "other"}}, FileNotFoundError, "expected the adapter other in it"),
        (settings | {"adapters": None}, FileNotFoundError, "expected the trained model of a compressor without LoRA"),
    ]:
        path.write_text(json.dumps(odd))
        with pytest.raises(error, match=message):
            Compressor.from_pretrained(tmp_path, copy.deepcopy(model))
