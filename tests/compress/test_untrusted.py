"""Compressor folders of anybody: each loads as a legal compressor, or is refused in a line, in bounded time and memory.

The long test changes 100 folders, or as many as `make fuzz` asks for.
"""

import json
import math
import re
import resource
import shutil
import signal
import warnings
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from gistkit.compress import (
    ICAE,
    SAC,
    AvgPool,
    Compressor,
    Dodo,
    FiveHundredX,
    GistPool,
    KVDistill,
    SeparateEncoder,
)
from gistkit.compress.folder import load_model
from tests.helpers.disks import limit
from tests.helpers.fuzz import rounds
from tests.helpers.hostile import changed
from tests.helpers.models import byte_tokenizer, tiny_llama

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 40}
LOSSES = {"ae": 1.0, "compression": 2.0}
KINDS = {
    "icae": lambda model: ICAE(model, chunk=6, ratio=3, lora=2, losses=LOSSES, window=12, match_embeddings=True),
    "x500, own weights": lambda model: trained(FiveHundredX(model, chunk=6, ratio=3, lora=None)),
    "avgpool, base weights": lambda model: AvgPool(model, ratio=3, lora=None, bos_token=1),
    "gistpool": lambda model: GistPool(model, ratio=3, lora=2, bos_token=1, gists=4, losses={"ae": 1.0, "qa": 0.5}),
    "avgpool": lambda model: AvgPool(model, ratio=3, lora=2, bos_token=1, soft_prompt=True, past="kv"),
    "dodo": lambda model: Dodo(model, ratio=3, lora=2, bos_token=1, layer=1, threshold=0.5),
    "kv_distill": lambda model: KVDistill(model, ratio=3, lora=2, bos_token=1, layer=1, train_ratios=(2, 4)),
    "sac": lambda model: SAC(model, chunk=6, ratio=3, lora=2),
    "separate_encoder": lambda model: SeparateEncoder(model, segment=6, ratio=3, lora=2),
}
HEADROOM = 2**29
SECONDS = 2.0


def model():
    return tiny_llama(**SIZES).float()


def trained(compressor):
    with torch.no_grad():
        compressor.model.lm_head.weight.mul_(2)
    return compressor


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved compressor of each kind."""
    root = tmp_path_factory.mktemp("compressors")
    for name, make in KINDS.items():
        torch.manual_seed(0)
        make(model()).save_pretrained(root / name)
    return {name: root / name for name in KINDS}


class TooSlow(BaseException):
    """Raised in the middle of whatever takes too long."""


def _stop(number, frame):
    raise TooSlow


class Limits:
    """A bound of the processor's time and of the address space, in which failing to get memory shows."""

    def __enter__(self):
        (pages,) = (int(line.split()[0]) for line in [Path("/proc/self/statm").read_text()])
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        self.handler = signal.signal(signal.SIGPROF, _stop)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, self.before[1]))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)

    def __exit__(self, *error):
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self.handler)
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def state_of(base):
    return {name: (tuple(p.shape), p.requires_grad) for name, p in base.named_parameters()}, hasattr(
        base, "peft_config"
    )


def is_int(value, low=0):
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_legal(settings):
    """The types and ranges of a compressor's settings, written a second time."""
    optional = lambda low: lambda value: value is None or is_int(value, low)  # noqa: E731
    flag = lambda value: isinstance(value, bool)  # noqa: E731
    rules = {
        "chunk": lambda value: is_int(value, 1),
        "ratio": lambda value: not isinstance(value, bool) and isinstance(value, int | float) and 1 <= value < 2**31,
        "train_ratios": lambda value: all(is_int(ratio, 1) for ratio in value),
        "layout": lambda value: value in ("dpl", "upl", "epl", "cpl"),
        "losses": lambda value: value and all(isinstance(w, float) and 0 < w < math.inf for w in value.values()),
        "window": optional(1),
        "part": optional(0),
        "end_token": lambda value: value is None or (is_int(value) and value < 40),
        "bos_token": lambda value: is_int(value) and value < 40,
        "gists": optional(1),
        "windows": optional(1),
        "layer": lambda value: value == 1,
        "pool": lambda value: value in ("hidden", "kv", "means", "tokens"),
        "segment": lambda value: is_int(value, 1),
        "encoder": lambda value: value is None,
        "past": lambda value: value in ("hidden", "kv", None),
        "selection": lambda value: value in ("learned", "strided", "random", "delimiters", "none"),
        "delimiters": lambda value: all(is_int(token) and token < 40 for token in value),
        "threshold": lambda value: value is None or (isinstance(value, float) and not math.isnan(value)),
    }
    for name, value in settings.items():
        assert rules.get(name, flag)(value), (name, value)


def load(folder, base):
    """The compressor, or None where the folder is refused as it should be; the model is as it was, then."""
    before = state_of(base)
    try:
        with Limits(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Compressor.from_pretrained(folder, base)
    except (ValueError, OSError) as error:
        text = str(error)
        assert "\n" not in text and len(text) < 2000, text[:3000]
        assert str(folder) in text, text
        assert not re.search("[Aa]llocat|out of memory", text), text
        assert state_of(base) == before
        return None


def attack(folders, tmp_path, seeds):
    """Loads a changed folder for each seed; how many were loaded, and how many refused."""
    # One model for all of a kind: each must leave it as it was.
    bases, loaded, refused = {name: model() for name in KINDS}, 0, 0
    for seed in seeds:
        name = list(KINDS)[seed % len(KINDS)]
        folder = tmp_path / "case" / "folder"
        shutil.copytree(folders[name], folder)
        what = changed(folder, seed)
        # Seen where a test fails.
        print(seed, name, what)
        compressor = load(folder, bases[name])
        refused += compressor is None
        if compressor is not None:
            loaded += 1
            check_legal(compressor.settings)
            with Limits():
                try:
                    compressor.encode([list(range(2, 11))])
                except ValueError as error:
                    assert "expected" in str(error), error
            if compressor.adapters is not None:
                compressor.adapters.remove()
        shutil.rmtree(tmp_path / "case")
    return loaded, refused


def test_changed_folders_are_refused_or_legal(folders, tmp_path):
    assert min(attack(folders, tmp_path, range(40))) > 5


@pytest.mark.slow
@pytest.mark.fuzz
def test_many_changed_folders_are_refused_or_legal(folders, tmp_path):
    assert all(attack(folders, tmp_path, (40 + seed for seed in rounds(100, seconds=10))))


def test_unchanged_folders_load_and_leave_no_trace_when_removed(folders):
    for name, folder in folders.items():
        base = model()
        before = state_of(base)
        compressor = load(folder, base)
        check_legal(compressor.settings)
        if compressor.adapters is not None:
            compressor.adapters.remove()
            assert state_of(base) == before, name


def edited(folder, tmp_path, file, **changes):
    """A copy of a folder with some fields of a JSON file changed."""
    copied = tmp_path / "edited"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    content = json.loads((copied / file).read_text())
    inner = (
        content["settings"] if file == "compressor.json" and changes.keys() <= content["settings"].keys() else content
    )
    inner |= changes
    (copied / file).write_text(json.dumps(content))
    return copied


def refused(folder, message, base=None, **options):
    with Limits(), pytest.raises((ValueError, OSError), match=message) as caught:
        Compressor.from_pretrained(folder, base or model(), **options)
    assert not re.search("[Aa]llocat|out of memory", str(caught.value)) and "\n" not in str(caught.value)


ADAPTER = "gistkit_0_encoder/adapter_config.json"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (ADAPTER, {"r": 20_000_000}, r"adapter_model\.safetensors: expected weights of the rank \[20000000\]"),
        (ADAPTER, {"rank_pattern": {"q_proj": 20_000_000}}, r"expected weights of the rank \[2, 20000000\]"),
        ("compressor.json", {"chunk": 10**9, "ratio": 1}, r"memory_embeddings of shape \(1000000000, 16\), as the set"),
        ("compressor.json", {"chunk": 10**9, "ratio": 5e8}, r"expected compression_head.* of shape \(8000000000, 16\)"),
        ("compressor.json", {"chunk": 10**9 + 7}, "ratio: expected one that divides chunk 1000000007 into whole"),
        ("compressor.json", {"chunk": 0}, "chunk: expected a whole number >= 1"),
        ("compressor.json", {"settings": 3}, "expected settings to be arguments by name, got 3"),
        ("compressor.json", {"settings": {"ratio": 2}}, "got none for chunk"),
        (
            "compressor.json",
            {"settings": {"chunk": 4, "ratio": 2, "chunks": 4}},
            "one that it does not have for chunks",
        ),
        ("compressor.json", {"adapters": {"encoder": "other"}}, "expected the adapter other in it"),
        ("compressor.json", {"adapters": None, "fingerprint": None}, "trained model of a compressor without LoRA"),
        ("compressor.json", {"chunk": 10**40}, "chunk: expected a whole number >= 1 and < 2147483648"),
        (ADAPTER, {"target_modules": "(a+)+$"}, "expected target_modules to be .*need allow_regex=True"),
        (ADAPTER, {"exclude_modules": "(a+)+$"}, "expected exclude_modules to be .*need allow_regex=True"),
        (ADAPTER, {"alpha_pattern": {"(a+)+$": 1}}, "expected alpha_pattern to be .*need allow_regex=True"),
        (ADAPTER, {"layers_pattern": "(a+)+$", "layers_to_transform": 0}, "expected layers_pattern .*allow_regex=True"),
        (ADAPTER, {"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "plain LoRA, got megatron_config"),
        (ADAPTER, {"layer_replication": [[0, 10**6]]}, "expected plain LoRA, got layer_replication"),
        (ADAPTER, {"peft_type": "PREFIX_TUNING"}, "expected peft_type LORA, got PREFIX_TUNING"),
        (ADAPTER, {"a" * 9000: 1}, r"expected plain LoRA, got .{1,80}=1$"),
    ],
)
def test_what_a_folder_claims_is_checked_before_it_is_built(file, changes, message, folders, tmp_path):
    refused(edited(folders["icae"], tmp_path, file, **changes), message)


def test_what_are_no_settings_is_refused(folders, tmp_path):
    folder = edited(folders["icae"], tmp_path, "compressor.json")
    settings = json.loads((folder / "compressor.json").read_text())
    del settings["method"]
    for content, message in ([1], "expected settings by name, got list"), (settings, "got none for method"):
        (folder / "compressor.json").write_text(json.dumps(content))
        refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10**9}, r"config\.json: expected weights of a model with \d+ numbers in its files, got \d+"),
        ({"num_hidden_layers": 10**9}, r"config\.json: expected at most \d+ layers, as its files have tensors, got 1"),
        ({"hidden_size": 64}, r"config\.json: expected (weights of|a model that)"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, r"config\.json: expected no auto_map"),
        ({"_attn_implementation": "someone/kernel"}, r"config\.json: expected no _attn_implementation"),
        ({"transformers_weights": "../other.safetensors"}, r"config\.json: expected no transformers_weights"),
        ({"model_type": "none"}, r"config\.json: expected a model that transformers loads"),
        ({"hidden_act": "none"}, r"config\.json: expected a model that transformers loads"),
    ],
)
def test_what_a_model_in_a_folder_claims_is_checked_before_it_is_built(changes, message, folders, tmp_path):
    folder = edited(folders["x500, own weights"], tmp_path, "model/config.json", **changes)
    for base in (model(), None):
        with Limits(), pytest.raises(ValueError, match=message):
            Compressor.from_pretrained(folder, base)


def test_a_folder_without_a_model_needs_the_base_that_it_names(folders, tmp_path):
    refused(
        edited(folders["avgpool, base weights"], tmp_path, "compressor.json", fingerprint=None),
        "expected the trained model of a",
    )
    other = trained(AvgPool(model(), lora=None, bos_token=1)).model
    refused(folders["avgpool, base weights"], "expected the base model of .*: other weights", other)
    # What lies beside is not opened.
    folder = edited(folders["avgpool, base weights"], tmp_path, "compressor.json")
    shutil.copytree(folders["x500, own weights"] / "model", folder / "model")
    found = Compressor.from_pretrained(folder, model()).model
    assert torch.equal(found.lm_head.weight, model().lm_head.weight)
    with pytest.raises(ValueError, match=r"model: expected the base model of .*, which does not hold one, got None"):
        Compressor.from_pretrained(folder)


def test_a_pickle_or_another_adapter_in_a_folder_is_not_opened(folders, tmp_path):
    folder = edited(folders["x500, own weights"], tmp_path, "model/config.json")
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")
    refused(folder, "expected the weights of a model as safetensors, found none")
    folder = edited(folders["x500, own weights"], tmp_path, "model/config.json")
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    refused(folder, r"expected only a model, got adapter_config\.json")


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A compressor's folder that names its encoder on the hub, and the files of that name."""
    home = tmp_path / "hub" / "snapshots" / "0"
    encoder = tiny_llama(**SIZES | {"hidden_size": 8}).float()
    encoder.save_pretrained(home)
    encoder.name_or_path = "stranger/encoder"
    SeparateEncoder(model(), encoder=encoder, segment=6, ratio=3, lora=2).save_pretrained(tmp_path / "compressor")
    for module in ("files", "texts"):
        monkeypatch.setattr(f"gistkit.compress.{module}.snapshot_download", lambda name, **_: home)
    return tmp_path / "compressor", home


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "code.Model"}}, r"config\.json: expected no auto_map"),
        ("config.json", {"attn_implementation": "stranger/kernels"}, r"config\.json: expected no attn_implementation"),
        ("config.json", {"quantization_config": {"quant_method": "bitsandbytes"}}, "expected no quantization_config"),
        ("adapter_config.json", {"base_model_name_or_path": "/elsewhere"}, "expected only a model, got adapter_config"),
        ("config.json", {"vocab_size": 10**9}, r"config\.json: expected weights of a model with"),
    ],
)
def test_an_encoder_that_a_folder_names_is_read_as_a_model_in_it(file, changes, message, named):
    folder, home = named
    assert Compressor.from_pretrained(folder, model()).encoder.name_or_path == "stranger/encoder"
    path = home / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    refused(folder, f"encoder: stranger/encoder, the encoder of .*compressor, .*{message}")


def test_the_tokenizer_of_such_an_encoder_is_read_as_one_in_the_folder(named):
    folder, home = named
    byte_tokenizer().save_pretrained(home)
    compressor = Compressor.from_pretrained(folder, model())
    assert compressor.encoder_tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    path = home / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_file": "/etc/passwd"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: expected no vocab_file"):
        _ = Compressor.from_pretrained(folder, model()).encoder_tokenizer


def test_a_wheel_holds_an_adapter_of_several_compressors_once(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("gistkit.common.trained.PLACES", (tmp_path,))
    for name in ("one", "two"):
        shutil.copytree(folders["avgpool"], tmp_path / name)
    adapter = tmp_path / "two" / "gistkit_0_text"
    weights = adapter / "adapter_model.safetensors"
    named = {"compressor": "one", "adapter": "gistkit_0_text", "sha256": sha256(weights.read_bytes()).hexdigest()}
    weights.unlink()
    same = adapter / "adapter_model.same.json"
    same.write_text(json.dumps(named))
    first, second = (dict(Compressor.from_pretrained(name, model()).trainable()) for name in ("one", "two"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    for other in ("none", "../one", 7):
        same.write_text(json.dumps(named | {"compressor": other}))
        refused(tmp_path / "two", r"adapter_model\.same\.json: expected (one of the compressors one, two|compressor)")
    for digest in ({"sha256": "0" * 64}, {"sha256": None}):
        same.write_text(json.dumps(named | digest))
        refused(tmp_path / "two", r"adapter_model\.same\.json: expected .*one/.* to have the SHA-256")
    same.write_text(json.dumps(named))
    shutil.copytree(tmp_path / "two", tmp_path / "elsewhere" / "two")
    refused(tmp_path / "elsewhere" / "two", r"same\.json: expected adapter_model\.safetensors in its place")


def test_an_encoders_name_is_a_text(named, tmp_path):
    refused(edited(named[0], tmp_path / "edited", "compressor.json", encoder=7), r"compressor\.json: expected settings")


@pytest.mark.parametrize("name", ["../outside", "/outside", "..", "", "a/../../outside", "a\x00b", "x" * 300])
def test_an_adapter_is_a_folder_of_the_folder(name, folders, tmp_path):
    shutil.copytree(folders["icae"] / "gistkit_0_encoder", tmp_path / "outside")
    folder = edited(folders["icae"], tmp_path, "compressor.json", adapters={"encoder": name})
    refused(folder, r"compressor\.json: expected adapters\.encoder to name a folder beside the file, got")


@pytest.mark.parametrize(
    "path", ["gistkit_0_encoder", ADAPTER, "gistkit_0_encoder/adapter_model.safetensors", "compressor.safetensors"]
)
def test_links_out_of_a_folder_are_refused_and_those_of_a_hub_cache_followed(path, folders, tmp_path):
    folder = edited(folders["icae"], tmp_path, "compressor.json")
    shutil.move(folder / path, tmp_path / "outside")
    (folder / path).symlink_to(tmp_path / "outside")
    refused(folder, "expected a file inside .*, got a link to .*outside")
    # As huggingface_hub keeps a download.
    (folder / path).unlink()
    repository = tmp_path / "models--someone--compressor"
    (repository / "blobs").mkdir(parents=True)
    shutil.move(tmp_path / "outside", repository / "blobs" / "abc")
    (folder / path).symlink_to(repository / "blobs" / "abc")
    shutil.move(folder, repository / "snapshots" / "main")
    assert load(repository / "snapshots" / "main", model()) is not None


@pytest.fixture
def with_tokenizer(folders, tmp_path):
    """A compressor's folder with a tokenizer of 40 letters, and a secret beside it."""
    compressor = load(folders["icae"], model())
    compressor.tokenizer = byte_tokenizer()
    compressor.save_pretrained(tmp_path / "compressor")
    (tmp_path / "secret").write_text("TOP SECRET")
    return tmp_path / "compressor"


@pytest.mark.parametrize("place", ["additional_chat_templates/leak.jinja", "chat_template.jinja", "a/b/c"])
def test_a_tokenizers_links_out_of_the_folder_are_refused_at_any_depth(place, with_tokenizer):
    """transformers would read it, and save_pretrained publish it."""
    link = with_tokenizer / "tokenizer" / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(with_tokenizer.parent / "secret")
    with pytest.raises(ValueError, match=r"expected a file inside .*, got a link to .*secret"):
        load(with_tokenizer, model()).tokenizer  # noqa: B018


def test_a_tokenizer_is_of_files_that_have_its_names(with_tokenizer, tmp_path):
    """Of fast_tokenizer_files transformers reads any path that has a version in its name."""
    path = with_tokenizer / "tokenizer" / "tokenizer_config.json"
    shutil.copy(with_tokenizer / "tokenizer" / "tokenizer.json", tmp_path / "tokenizer.5.0.json")
    settings = json.loads(path.read_text())
    assert load(with_tokenizer, model()).tokenizer("a")["input_ids"]
    path.write_text(json.dumps(settings | {"fast_tokenizer_files": ["../../tokenizer.5.0.json"]}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: expected no fast_tokenizer_files"):
        load(with_tokenizer, model()).tokenizer  # noqa: B018


def test_a_regular_expression_is_taken_where_it_is_asked_for(folders, tmp_path):
    folder = edited(folders["icae"], tmp_path, ADAPTER, target_modules=r".*\.(q|v)_proj")
    loaded = Compressor.from_pretrained(folder, model(), allow_regex=True)
    plain = Compressor.from_pretrained(folders["icae"], model())
    ids = [list(range(2, 14))]
    assert all(map(torch.equal, loaded.encode(ids).tensors, plain.encode(ids).tensors))


@pytest.mark.parametrize("shape", [(20_000_000, 0), (2, 17), (3, 16)])
def test_an_adapters_weights_fit_the_model_and_their_rank(shape, folders, tmp_path):
    folder = edited(folders["icae"], tmp_path, ADAPTER, r=shape[0])
    path = folder / "gistkit_0_encoder" / "adapter_model.safetensors"
    weights = load_file(path)
    name = min(name for name in weights if "lora_A" in name)
    save_file(weights | {name: torch.zeros(shape)}, path)
    refused(folder, r"adapter_model\.safetensors: expected (tensors with values|.* to fit a map|weights of the rank)")


def test_a_missing_weight_of_an_adapter_is_named(folders, tmp_path):
    folder = edited(folders["icae"], tmp_path, ADAPTER)
    path = folder / "gistkit_0_encoder" / "adapter_model.safetensors"
    weights = load_file(path)
    weights.pop(max(weights))
    save_file(weights, path)
    base = model()
    before = state_of(base)
    refused(folder, r"adapter_model\.safetensors: expected the tensors of its compressor, got none for ", base)
    assert state_of(base) == before
    assert Compressor.from_pretrained(folders["icae"], base).adapters.names == {"encoder": "gistkit_0_encoder"}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear", "use_rslora": True},
        {"modules_to_save": ["norm"], "lora_bias": True},
        {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 5}},
        {"layers_to_transform": [0], "layers_pattern": "layers", "exclude_modules": ["q_proj"]},
        {"init_lora_weights": "eva", "ensure_weight_tying": True},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=lambda options: " ".join(options),
)
def test_forms_of_plain_lora_are_saved_and_loaded(options, tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(**({"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]} | options))
    compressor = ICAE(model(), chunk=6, ratio=3, lora=config)
    with torch.no_grad():
        for _, parameter in compressor.trainable():
            parameter.add_(0.3 * torch.randn_like(parameter))
    compressor.save_pretrained(tmp_path)
    loaded = Compressor.from_pretrained(tmp_path, model())
    ids = [list(range(2, 14))]
    assert all(map(torch.equal, loaded.encode(ids).tensors, compressor.encode(ids).tensors))


VISION = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "image_token_id": 9,
    "text_config": {
        "model_type": "qwen2_vl_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (VISION | {"vision_config": {"depth": 10**6, "embed_dim": 1, "num_heads": 1}}, "expected at most 1056 modules"),
        ({"model_type": "llava", "vision_config": {"model_type": "timm_wrapper"}}, "expected no model_type, got timm"),
        ({"model_type": "llava", "vision_config": {"model_args": {"a": 1}}}, "expected no model_args"),
        ({"model_type": "blip-2", "vision_config": {}}, "expected a model of text or one of llava"),
    ],
)
def test_models_that_see_are_of_few_families_and_as_large_as_their_files(config, message, tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Limits(), pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_folder_that_cannot_be_saved_again_stays_as_it_was(folders, tmp_path):
    folder = tmp_path / "icae"
    shutil.copytree(folders["icae"], folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    compressor = load(folder, model())
    with torch.no_grad():
        for _, parameter in compressor.trainable():
            parameter.add_(1)
    # The first file has space, a later one has not.
    with limit(2000), pytest.raises(OSError, match=rf"^{re.escape(str(folder))}: expected .* of space to write it"):
        compressor.save_pretrained(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
