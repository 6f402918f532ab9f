"""What a start costs: which packages `import gistkit` and `gistkit --help` load, and the time beside torch's."""

import os
import subprocess
import sys
from statistics import median

import pytest

from gistkit import train

COMMANDS = ("study", "train", "evaluate", "compress", "ask", "serve", "export", "view", "info")
# Every package that is loaded and came neither with Python nor at its start (a .pth file may load some).
LOADED = """
import sys
before = set(sys.modules)
{code}
tops = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("loaded:", *sorted(tops - set(sys.stdlib_module_names)))
"""
HELP = """
from gistkit.cli import main
try:
    main({words})
except SystemExit as end:
    assert end.code == 0
"""


def loaded(code: str) -> list[str]:
    shown = subprocess.run([sys.executable, "-c", LOADED.format(code=code)], capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()[-1].split()[1:]


def test_the_import_and_the_version_load_no_other_package_and_no_metadata_of_packages() -> None:
    code = "import gistkit; assert gistkit.__version__; dir(gistkit); assert 'importlib.metadata' not in sys.modules"
    assert loaded(code) == ["gistkit"]


def test_what_is_loaded_late_is_listed_all_the_same() -> None:
    assert set(dir(train)) == set(train.__all__)


def test_help_loads_no_other_package() -> None:
    every = [["--help"], *([command, "--help"] for command in COMMANDS)]
    found = loaded("".join(HELP.format(words=words) for words in every))
    assert found == ["gistkit", "gistkit_lab", "gistkit_serve", "gistkit_vllm"]


def test_texts_are_read_without_transformers() -> None:
    assert "transformers" not in loaded("from gistkit.train import load_corpus")


@pytest.mark.slow
def test_what_needs_torch_alone_loads_neither_its_compiler_nor_transformers() -> None:
    packages = loaded(
        # A layout draws itself when asked.
        "import gistkit.layouts; assert not {'gistkit.viz', 'gistkit.nn'} & set(sys.modules)\n"
        "import gistkit.ops, gistkit.nn, gistkit.inspect; assert 'torch._dynamo' not in sys.modules\n"
        "from gistkit import *"
    )
    assert {"gistkit", "numpy", "torch"} <= set(packages)
    assert not {"transformers", "safetensors", "peft", "matplotlib"} & set(packages)


def seconds(*words: str) -> float:
    """Processor time of a process of Python, which says more than the clock on a machine that others use too."""
    before = os.times()
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.nightly
def test_a_start_takes_less_time_than_that_of_torch() -> None:
    words = {
        "torch": ("-c", "import torch"),
        "gistkit": ("-c", "import gistkit"),
        "ops": ("-c", "import gistkit; gistkit.attention; gistkit.Plan"),
        "help": ("-m", "gistkit.cli", "--help"),
    }
    # In turn, so that a busy minute meets all of them.
    taken = [{name: seconds(*code) for name, code in words.items()} for _ in range(3)]
    times = {name: median(run[name] for run in taken) for name in words}
    assert times["gistkit"] < times["torch"] + 0.03, times
    # Torch itself, and a tenth for the op library and what registers its gradients.
    assert times["ops"] < 1.1 * times["torch"] + 0.1, times
    assert times["help"] < max(0.3, times["torch"] / 3), times
