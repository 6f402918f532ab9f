"""Every preset on the command line, on a configuration alone: what it says, what would train, and nothing written."""

import json
import re

import pytest

from gistkit import cli
from gistkit.train import PRESETS, Trainer, notes
from tests.helpers.vision import TEXT, TOWER

pytestmark = pytest.mark.usefixtures("one_thread")
LLAMA = TEXT | {"model_type": "llama", "num_hidden_layers": 4}
CLIP = TOWER | {"model_type": "clip_vision_model", "image_size": 12, "patch_size": 4}
LLAVA = {"model_type": "llava", "text_config": LLAMA, "vision_config": CLIP, "image_token_id": 55}
# What trains, by the method of a preset.
GROUPS = {
    "x500": {"memory tokens", "task tokens", "LoRA of the encoder"},
    "icae": {
        "memory tokens", "task tokens", "LoRA of the encoder", "LoRA of the encoder, embeddings",
        "norms of the encoder", "compression head",
    },
    "dodo": {"task tokens", "scorer", "LoRA of the text", "LoRA of the memory"},
    "gistpool": {"memory tokens", "task tokens", "maps of the gists", "the model's maps", "the model's embeddings",
                 "the model's norms"},
    "voco": {"memory tokens", "projector", "the model's maps", "the model's embeddings", "the model's norms"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Configurations, in a working directory without anything else."""
    for name, config in (("text", LLAMA), ("images", LLAVA)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def files(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))


# The first of each method.
FIRST = {preset.method: name for name, preset in reversed(PRESETS.items())}.values()


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_a_dry_run_tells_of_a_preset_and_leaves_nothing(name, folder, monkeypatch, capsys):
    def train(*arguments, **options):
        raise AssertionError("it trains")

    monkeypatch.setattr(Trainer, "train", train)
    before = files(folder)
    kind = "images" if PRESETS[name].method == "voco" else "text"
    assert cli.main(["train", "--model", kind, "--preset", name, "--dry-run"]) == 0
    shown, complaints = capsys.readouterr()
    assert files(folder) == before and complaints == ""
    head, page = shown.split("\n\n")
    assert head == notes(name) and all(point in head for point in (PRESETS[name].follows, *PRESETS[name].open))
    found = re.findall(r"^( *\S.*?) +([\d,]+)$", page, re.MULTILINE)
    counts = {line: int(count.replace(",", "")) for line, count in found}
    groups = {line.strip(): count for line, count in counts.items() if line.startswith("  ")}
    assert set(groups) == GROUPS[PRESETS[name].method]
    assert counts["trained"] == sum(groups.values()) and min(groups.values()) > 0
    assert (counts["frozen"] == 0) == (PRESETS[name].method == "gistpool")
    assert counts["rows a step"] == PRESETS[name].recipe.batch
