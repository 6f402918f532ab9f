"""Compressors on the Hugging Face hub, whose uploads are caught and whose downloads are in a cache made here."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from gistkit.compress import AvgPool, Compressor, FiveHundredX, GistPool, files
from gistkit.hf import attach
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer, tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model():
    return tiny_llama(vocab_size=258, bos_token_id=257).float()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Catches what is uploaded, and puts it where the hub's own functions find what they have fetched."""
    calls = []

    def create_repo(api, repo_id, **options):
        calls.append(("create", repo_id, api.token, options))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(api, *, repo_id, folder_path, **options):
        calls.append(("upload", repo_id, api.token, options))
        home = tmp_path / "hub" / f"models--{repo_id.replace('/', '--')}"
        shutil.rmtree(home, ignore_errors=True)
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(COMMIT)
        # As the hub's cache is: links to blobs.
        shutil.copytree(folder_path, home / "snapshots" / COMMIT)
        (home / "blobs").mkdir()
        for index, path in enumerate(sorted((home / "snapshots").rglob("*"))):
            if path.is_file():
                path.rename(home / "blobs" / str(index))
                path.symlink_to(home / "blobs" / str(index))

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    return calls, {"cache_dir": tmp_path / "hub", "local_files_only": True}


def test_what_is_pushed_is_read_by_its_name(hub):
    calls, where = hub
    compressor = unsettle(FiveHundredX(model(), chunk=8, ratio=4, lora=4), 0.05, [""]).eval()
    compressor.tokenizer = byte_tokenizer(start=True)
    address = compressor.push_to_hub("user/report-x500", private=True, token="key", commit_message="Trained")
    assert address == "https://huggingface.co/user/report-x500"
    assert calls == [
        ("create", "user/report-x500", "key", {"private": True, "exist_ok": True}),
        ("upload", "user/report-x500", "key", {"commit_message": "Trained"}),
    ]
    found = Compressor.from_pretrained("user/report-x500", model(), **where).eval()
    text = "The survey was started by Ines Moreau."
    assert found.ask(text, "Who?", max_new_tokens=8) == compressor.ask(text, "Who?", max_new_tokens=8)
    assert isinstance(found.tokenizer, PreTrainedTokenizerBase)


def test_what_a_class_of_ones_own_saves_is_what_is_pushed(hub):
    class Own(FiveHundredX):
        def save_pretrained(self, folder):
            super().save_pretrained(folder)
            (Path(folder) / "notes.json").write_text("{}")

    Own(model(), chunk=8, ratio=4, lora=4).push_to_hub("user/own")
    assert [*hub[1]["cache_dir"].rglob("notes.json")]


def test_the_card_is_the_folders_or_a_minimal_one(hub, tmp_path):
    _, where = hub
    base = model()
    base.name_or_path = base.config._name_or_path = "someone/small-llama"
    compressor = FiveHundredX(base, chunk=8, ratio=4, lora=4)
    compressor.push_to_hub("user/one")
    place = tmp_path / "hub" / "models--user--one" / "snapshots" / COMMIT
    card = huggingface_hub.ModelCard.load(place / "README.md")
    assert card.data.base_model == "someone/small-llama" and card.data.library_name == "gistkit"
    assert card.data.tags == ["context-compression", "x500"]
    assert 'Compressor.from_pretrained("user/one", model)' in card.text and compressor.title in card.text
    # A place on a disk is nobody else's business.
    base.name_or_path = base.config._name_or_path = "/home/me/model"
    compressor.push_to_hub("user/two")
    assert "/home/me" not in (place.parents[2] / "models--user--two" / "snapshots" / COMMIT / "README.md").read_text()

    compressor.save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "README.md").write_text("What it was trained on.\n")
    Compressor.from_pretrained(tmp_path / "mine", model()).push_to_hub("user/three")
    again = Compressor.from_pretrained("user/three", model(), **where)
    again.push_to_hub("user/four")
    home = tmp_path / "hub" / "models--user--four" / "snapshots" / COMMIT
    assert (home / "README.md").read_text() == "What it was trained on.\n"


def test_a_saved_folder_has_our_card_and_no_place_on_this_disk(hub, tmp_path):
    base = model()
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    own = {
        "adapters": FiveHundredX(base, chunk=8, ratio=4, lora=4),
        "whole": unsettle(AvgPool(model(), ratio=2, lora=None), 0.05, [""]),
    }
    for name, compressor in own.items():
        compressor.save_pretrained(tmp_path / name)
        card = (tmp_path / name / "README.md").read_text()
        assert compressor.title in card and "[More Information Needed]" not in card
        for path in (tmp_path / name).rglob("*"):
            assert path.suffix == ".safetensors" or path.is_dir() or str(tmp_path) not in path.read_text()
    # A folder of an earlier release has PEFT's form; a card of one's own stays when the folder is written again.
    (tmp_path / "adapters" / "README.md").write_text("# Model Card for Model ID\n[More Information Needed]\n")
    (tmp_path / "whole" / "README.md").write_text("Mine.\n")
    Compressor.from_pretrained(tmp_path / "adapters", model()).push_to_hub("user/filled")
    pushed = tmp_path / "hub" / "models--user--filled" / "snapshots" / COMMIT / "README.md"
    assert pushed.read_text().count("user/filled") == 2
    own["whole"].save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "README.md").read_text() == "Mine.\n"
    # The name in a card that save_pretrained wrote becomes the repository's.
    own["adapters"].save_pretrained(tmp_path / "named")
    Compressor.from_pretrained(tmp_path / "named", model()).push_to_hub("user/renamed")
    pushed = tmp_path / "hub" / "models--user--renamed" / "snapshots" / COMMIT / "README.md"
    assert pushed.read_text().count("user/renamed") == 2
    # A model of its own needs no base.
    own["whole"].push_to_hub("user/whole")
    found = Compressor.from_pretrained("user/whole", **hub[1]).eval()
    assert all(map(torch.equal, found.encode([[3, 4, 5]]).tensors, own["whole"].eval().encode([[3, 4, 5]]).tensors))


def test_the_hub_is_not_asked_for_what_another_endpoint_has(monkeypatch):
    told = []
    monkeypatch.setattr(files, "hub_or_cache", lambda name: pytest.fail(f"asked for {name}"))
    monkeypatch.setattr(files, "snapshot_download", lambda name, **options: told.append(options["endpoint"]) or "here")
    assert files.download("owner/name", endpoint="https://mirror") == Path("here") and told == ["https://mirror"]


def test_names_that_lead_nowhere_are_told(hub, tmp_path):
    _, where = hub
    with pytest.raises(FileNotFoundError, match=r"user/none: expected a folder with compressor.json, or such a repos"):
        Compressor.from_pretrained("user/none", model(), **where)
    # What can be no repository is not asked for.
    for name in ("./user/none", "none", "a/b/none", str(tmp_path / "none")):
        with pytest.raises(FileNotFoundError, match=r"none: expected a folder with compressor.json, found none"):
            Compressor.from_pretrained(name, model())
    compressor = FiveHundredX(model(), chunk=8, ratio=4, lora=4)
    compressor.save_pretrained("runs/x500")
    assert Compressor.from_pretrained("runs/x500", model()).method == "x500"
    with pytest.raises(TypeError, match="revision: expected no such argument for runs/x500, which is no repository"):
        Compressor.from_pretrained("runs/x500", model(), revision="main")


@pytest.mark.parametrize("method", ["x500", "gistpool"])
def test_peft_reads_the_adapters_by_itself(method, tmp_path):
    make = {
        "x500": lambda base: FiveHundredX(base, chunk=8, ratio=4, lora=4),
        "gistpool": lambda base: GistPool(base, ratio=4, lora=4),
    }
    compressor = unsettle(make[method](model()), 0.05, [""]).eval()
    compressor.save_pretrained(tmp_path)
    ids = torch.randint(3, 250, (2, 9))
    for role, name in compressor.adapters.names.items():
        adapted = PeftModel.from_pretrained(model(), tmp_path / name).eval()
        with torch.no_grad(), attach(adapted):
            found = adapted(ids).logits
        with torch.no_grad(), compressor.using(role):
            expected = compressor.model(ids).logits
        torch.testing.assert_close(found, expected)
        with torch.no_grad(), compressor.using(None):
            assert (compressor.model(ids).logits - expected).abs().max() > 1e-3
