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
    method = PRESETS[name].method
    kind = "images" if method == "voco" else "text"
    assert cli.main(["train", "--model", kind, "--preset", name, "--dry-run"]) == 0
    shown, complaints = capsys.readouterr()
    assert files(folder) == before and complaints == ""
    head, page = shown.split("\n\n")
    assert head == notes(name) and all(point in head for point in (PRESETS[name].follows, *PRESETS[name].open))
    found = re.findall(r"^( *\S.*?) +([\d,]+)$", page, re.MULTILINE)
    counts = {line: int(count.replace(",", "")) for line, count in found}
    groups = {line.strip(): count for line, count in counts.items() if line.startswith("  ")}
    assert ("scorer" if method == "dodo" else "memory tokens") in groups and min(groups.values()) > 0
    assert counts["trained"] == sum(groups.values()) and (counts["frozen"] == 0) == (method == "gistpool")
    assert counts["rows a step"] == PRESETS[name].recipe.batch
