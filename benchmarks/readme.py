"""Writes the README's tables from the committed results; `--check` only says whether they agree.

example: python benchmarks/readme.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from gistkit.studies.report import format_table, read_json, table_rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def machine_line(machine: dict[str, object]) -> str:
    """One line that says what the figures were made on."""
    return (
        f"{machine['processor']}, {machine['threads']} threads, {machine['instruction_set']}, "
        f"torch {machine['torch']}, commit {machine['commit']}"
    )


def demo_table() -> str:
    """The demo's table, from `benchmarks/results/demo.json`."""
    path = RESULTS / "demo.json"
    runs, recipe = read_json(path)
    machine = json.loads(path.read_text())["machine"]
    seeds = len({run.seed for run in runs})
    return (
        f"{format_table(table_rows(runs))}\n\n"
        f"Held-out, {recipe.steps} steps, {seeds} seeds: mean (lowest-highest). {machine_line(machine)}."
    )


def timing_table(suite: str, title: str, cases: str) -> str:
    """Median milliseconds from `benchmarks/results/SUITE.json`: a column a form, a row a case that `cases` matches.

    The pattern's groups, joined, are what a row is called.
    """
    content = json.loads((RESULTS / f"{suite}.json").read_text())
    rows: dict[str, dict[str, float]] = {}
    for timing in content["milliseconds"]:
        if match := re.fullmatch(cases, timing["case"]):
            rows.setdefault(", ".join(match.groups()), {})[timing["form"]] = timing["median"]
    forms = list(dict.fromkeys(form for row in rows.values() for form in row))
    cells = [[case, *(f"{row[form]:.3g}" if form in row else "-" for form in forms)] for case, row in rows.items()]
    return f"{format_table([[title, *forms], *cells])}\n\nMedian milliseconds. {machine_line(content['machine'])}."


def speed_table() -> str:
    """Attention on three masks, and rope on Llama's long heads."""
    size = ", N 4096, B1 H8/8 D64 float32"
    masks = f"(causal|GistPool 8x|Dodo 10x, tau 128){size}, (.*)"
    attention = timing_table("attention", f"attention{size}", masks)
    return (
        attention + "\n\n" + timing_table("rope", "rope, N 4096, D128, 32+8 heads", r"(long), 32\+8 heads, (forward.*)")
    )


TABLES = {"demo": demo_table, "speed": speed_table}


def updated(readme: str) -> str:
    """The README with each table between its markers made anew."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name} table -->\n).*?(<!-- end of {name} table -->)"
        if not re.search(pattern, readme, re.DOTALL):
            raise ValueError(f"README.md: expected the markers of the {name} table, found none")
        readme = re.sub(pattern, lambda m, make=make: f"{m[1]}\n{make()}\n\n{m[2]}", readme, flags=re.DOTALL)
    return readme


def main() -> int:
    """Updates or checks README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README is out of date")
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    before = path.read_text()
    after = updated(before)
    if arguments.check:
        return int(before != after)
    path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
