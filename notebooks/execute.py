"""Runs notebooks in place and keeps their outputs, without cell times and metadata.

example: python notebooks/execute.py notebooks/01_layouts.ipynb
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

METADATA = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}


def execute(path: Path) -> None:
    """Runs a notebook in its folder and writes it back."""
    notebook = nbformat.read(path, as_version=4)
    # A progress bar is one stream of text that ends as its last line.
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = METADATA
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{index:02}", {}
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = {}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def main() -> None:
    """Runs the notebooks that the command line names, or all."""
    kept = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kept)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all here")
    # Without ipywidgets tqdm warns that its bars are text, as every viewer needs.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    for path in parser.parse_args().notebooks or sorted(
        Path(__file__).parent.glob("*.ipynb")
    ):
        start, before = (
            time.perf_counter(),
            resource.getrusage(resource.RUSAGE_CHILDREN),
        )
        execute(path.resolve())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        size = path.stat().st_size / 1024
        seconds = time.perf_counter() - start
        print(
            f"{path.name}: {seconds:.0f} s, {busy:.0f} s of a core, {size:.0f} KiB"
        )


if __name__ == "__main__":
    main()
