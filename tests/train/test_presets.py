"""The papers' presets: what they say, and the numbers of parameters that the papers count, without weights."""

import json
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gistkit import cli
from gistkit.options.models import load_empty
from gistkit.train import PRESETS, notes
from gistkit.train.estimate import DryRun, activations, dry_run
from gistkit.train.prepare import prepare
from gistkit.train.presets import STUDIES, find_preset
from tests.helpers.models import FAMILIES, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
# LLaMA 7B and Llama 2 7B: 6.74 billion parameters in 32 layers.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a configuration alone."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def run(llama, preset, dtype="float16", **options) -> DryRun:
    return dry_run(load_empty(llama, dtype), preset=preset, **options)


def test_dodo_has_the_parameters_of_its_table_5(llama):
    found = run(llama, "dodo-ae")
    assert f"{found.frozen / 1e9:.2f}B" == "6.74B"
    counts = {name: f"{count / 1e6:.1f}M" for name, count in found.trained.items()}
    assert counts == {
        "LoRA of the text": "25.2M",
        "LoRA of the memory": "25.2M",
        "scorer": "16.8M",
        "task tokens": "0.0M",
    }
    assert found.trained["task tokens"] == 4096
    # float16 and Adam's two moments.
    trained = sum(found.trained.values())
    assert found.memory["weights"] >= 2 * found.frozen and found.memory["optimizer"] == 2 * found.memory["gradients"]
    assert 2 * trained <= found.memory["gradients"] <= 4 * trained
    assert found.tokens == (32 * 288, 32 * 512)
    page = str(found)
    for part in ("Dodo: Dynamic Contextual", "cosine after 2000 steps", "150,000, fewer where 5", "16,785,409"):
        assert part in page, page


def test_500x_has_lora_of_rank_128_on_queries_and_values(llama):
    """Position IDs Matter names the rank and the maps: 32 layers x 2 maps x (down and up) of 128 x 4096."""
    found = run(llama, "epl-pretrain-8b")
    assert found.trained == {
        "memory tokens": 102 * 4096, "LoRA of the encoder": 32 * 2 * 2 * 128 * 4096, "task tokens": 2 * 4096
    }  # fmt: skip
    assert found.tokens == (16 * 2295, 16 * 4080)
    # A quarter of the rows at a time keeps a quarter of the activations; running layers again keeps their inputs.
    parts = run(llama, "epl-pretrain-8b", accumulate=4).memory["activations"]
    assert 4 * parts == found.memory["activations"]
    assert run(llama, "epl-pretrain-8b", gradient_checkpointing=True).memory["activations"] < parts
    with pytest.raises(ValueError, match="batch: expected a multiple of 3 processes x 1 passes, got 16 rows"):
        run(llama, "epl-pretrain-8b", processes=3)


def test_gistpool_doubles_the_model(llama):
    """All weights train, and gists have a copy of the layers' maps: "the effective doubling of model size"."""
    found = run(llama, "gistpool-squad")
    maps = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert found.frozen == 0 and found.trained["maps of the gists"] == found.trained["the model's maps"] == maps
    assert found.trained["the model's embeddings"] == 2 * 32000 * 4096
    assert found.trained["the model's norms"] == 65 * 4096
    assert found.memory["optimizer"] < found.memory["weights"] / 100, "Adafactor keeps rows and columns"
    assert "2 epochs" in str(found) and find_preset("gistpool-drop").recipe.epochs == 3
    assert find_preset("gistpool-race").recipe.epochs == 1 and find_preset("gistpool-mixture").recipe.steps == 30_000


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_of_every_family_counts_what_a_compressor_trains(family, tmp_path):
    """Of a configuration alone, the parameters that the same compressor has with weights."""
    tiny(family).config.save_pretrained(tmp_path)
    # GPT-2's maps have no copies.
    separate = family != "gpt2"
    for preset, changes in (
        ("gistpool-squad", {"bos_token": 1, "separate": separate}),
        ("epl-pretrain", {"lora": 4, "embedding_lora": 2, "train_norms": True, "chunk": 8, "ratio": 4}),
    ):
        found = run(str(tmp_path), preset, "float32", compressor=changes)
        questions = "some" if preset.startswith("gistpool") else None
        made = prepare(tiny(family), preset=preset, compressor=changes, questions=questions).compressor
        trained = [parameter.numel() for parameter in made.parameters() if parameter.requires_grad]
        assert sum(found.trained.values()) == sum(trained) > 0
        assert found.operations > 0


def test_reading_on_and_changes(llama):
    found = run(llama, "dodo-lm", recipe={"steps": 9})
    assert "streaming, the last 128 tokens in full" in found.method and found.tokens == (32 * 1440, 32 * 1440)
    changed = run(llama, "epl-pretrain", method="icae", compressor={"ratio": 10, "lora": 8}, recipe={"batch": 2})
    assert changed.trained["memory tokens"] == 51 * 4096 and changed.trained["LoRA of the encoder"] == 64 * 2 * 8 * 4096
    dropping = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj"]}
    found = run(llama, "epl-pretrain", compressor={"lora": dropping})
    assert found.trained["LoRA of the encoder"] == 32 * 2 * 4 * 4096
    for choices, message in [
        ({"compressor": {"lora": {"rank": 4}}}, "lora: expected arguments of peft.LoraConfig, got .*rank"),
        ({"recipe": {"epochs": 1, "steps": 2}}, "epochs: not allowed with steps, 2, got 1"),
        ({"recipe": {"context_share": 1.0}}, "context_share: expected a continuation of every passage"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(llama, "epl-pretrain", **choices)


def test_every_preset_says_what_it_follows():
    for name, preset in PRESETS.items():
        text = notes(name)
        assert text.startswith(f"{name} follows {preset.follows}") and text.count("\n  - ") == len(preset.open)
        assert preset.open or name == "smollm2-small"
    with pytest.raises(ValueError, match="seqpe-wikitext; SeqPE's are gistkit study length --preset seqpe-wikitext"):
        find_preset("seqpe-wikitext")


@pytest.mark.parametrize(("study", "preset"), re.findall(r"study (\S+) --preset ([\w-]+)", STUDIES))
def test_the_studies_that_are_named_have_these_presets(study, preset, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["study", study, "--help"])
    assert ended.value.code == 0 and preset in capsys.readouterr().out


def test_the_compression_loss_trains_maps_embeddings_and_norms(llama):
    """Ranks 16 and 128 and 65 norms of Llama's layers, Section 3, and its head of a map for each of 15 offsets."""
    found = run(llama, "cl-llama2")
    maps = 4 * (4096 + 4096) + 3 * (4096 + 11008)
    assert found.trained == {
        "memory tokens": 34 * 4096, "LoRA of the encoder, embeddings": 128 * (32000 + 4096),
        "LoRA of the encoder": 32 * 16 * maps, "norms of the encoder": 65 * 4096,
        "compression head": 15 * 4096**2, "task tokens": 2 * 4096,
    }  # fmt: skip
    assert found.tokens == (32 * 1020, 32 * 1020)
    # The released code's decoder has the same LoRA.
    assert run(llama, "cl-llama2", compressor={"shared_lora": True}).trained == found.trained


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A folder with the configuration of LLaVA 1.5 7B alone."""
    folder = tmp_path_factory.mktemp("llava")
    tower = {
        "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
    }  # fmt: skip
    config = {"model_type": "llava", "text_config": LLAMA | {"vocab_size": 32064}, "vision_config": tower}
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": 32000}))
    return str(folder)


def test_voco_trains_the_language_model_and_the_projector(llava, llama):
    """As LLaVA 1.5 is fine-tuned: Vicuna with 64 more tokens, and two maps from CLIP's width of 1024."""
    found = dry_run(load_empty(llava, "float16", images=True), preset="voco-llama")
    maps = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert found.trained == {
        "memory tokens": 128 * 4096, "projector": 4096 * 1025 + 4096 * 4097, "the model's maps": maps,
        "the model's embeddings": 2 * 32064 * 4096, "the model's norms": 65 * 4096,
    }  # fmt: skip
    assert 3.0e8 < found.frozen < 3.1e8, "CLIP's tower"
    assert found.method == "voco, 128 VoCo tokens an image in layout epl, losses qa"
    assert found.tokens == (None, 128 * 2048) and "those of 2 epochs" in str(found)
    few = dry_run(
        load_empty(llava, "float16", images=True), preset="voco-llama", layout="dpl",
        compressor={"memory_tokens": 2, "lora": 8, "train_vision": True},
    )  # fmt: skip
    assert few.trained["memory tokens"] == 2 * 4096 and "2 VoCo tokens an image in layout dpl" in few.method
    assert set(few.trained) == {"memory tokens", "projector", "vision tower", "LoRA of the text"}
    with pytest.raises(ValueError, match=r"--model: expected a vision-language model for images of .*, of type llama"):
        load_empty(llama, "float16", images=True)
    with pytest.raises(ValueError, match=r"--model: expected a decoder model of transformers, got .*, of type llava"):
        load_empty(llava, "float16")


def test_activations_are_about_what_a_pass_keeps():
    """Within a third of what autograd keeps in the layers of a Llama, but for attention's own matrices."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.zeros(2, 96, dtype=torch.int64), use_cache=False)
    found = sum(size for _, size in kept.values())
    assert activations(2 * 96, 64, 4, 4, gradient_checkpointing=False) == pytest.approx(found, rel=1 / 3)
