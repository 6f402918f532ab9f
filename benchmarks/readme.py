"""Writes the tables of README.md, docs/speed.md and benchmarks/results/README.md from the committed results; `--check`
only says whether they agree.

The markers of the tables of speed name the machine whose results they show, a folder of benchmarks/results.

example: python benchmarks/readme.py --machine amd-epyc-avx512
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import suites
from gpu_cases import OURS
from lengths import read_runs as lengths_runs
from masks import FEW
from roof import UNRATED, Roof

from gistkit.common.trained import DEFAULTS
from gistkit.compress.scores import SCORES
from gistkit.evaluate.report import format_table
from gistkit.train.presets import find_preset
from gistkit_lab.presses.comparison import FULL, PLAIN, Comparison, shown
from gistkit_lab.presses.report import pairs_table, parts_table, percent, presses_table, trained_names
from gistkit_lab.studies.pages import committed, machine_line, machines_line
from gistkit_lab.studies.registry import STUDIES, find

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Of `gistkit evaluate --against presses`.
PRESSES = sorted(RESULTS.glob("presses-*.jsonl"))
# Whose summary README.md has.
BY_HAND = RESULTS / "presses-smollm2-by-hand.jsonl"
Content = Mapping[str, Any]
"""A suite's figures."""


def lengths_table() -> str:
    """How reconstruction depends on a context's length, from `benchmarks/results/lengths`."""
    found = list(lengths_runs().values())
    lengths = [f"{one['length']} tokens" for one in found[0]["lengths"]]
    rows = [[run["title"], *(f"{one['bleu4']:.1f}" for one in run["lengths"])] for run in found]
    table = format_table([["BLEU-4", *lengths], *rows])
    training, contexts = found[0]["training"], found[0]["lengths"][0]["contexts"]
    batch = find_preset(training["preset"]).recipe.batch
    return (
        f"{table}\n\nSmolLM2-135M with LoRA, {training['steps']} steps of {batch} contexts of "
        f"{training['min_length'] // 2} to {training['max_length'] // 2} tokens"
        f"{' in bfloat16' if training.get('precision') == 'bf16' else ''}; {contexts} held-out ones a length. "
        f"{machines_line([run['machine'] for run in found])}."
    )


def presses_tables() -> str:
    """Trained compressors beside selections without training: rows, differences, kinds of questions, the picture."""
    parts = []
    for path in PRESSES:
        found = Comparison.load(path)
        chosen = lambda one, found=found: (  # noqa: E731
            one.entry.memory in (FULL, "kvzip", *trained_names(found)) and one.entry.ratio in (1, 2, 4, 8, 16)
        )
        parts += [presses_table(found), presses_note(found), pairs_table(found), parts_table(found, chosen)]
        if path.with_suffix(".png").exists():
            parts.append(f"![exact match against the share of tokens kept]({path.stem}.png)")
    return "\n\n".join(part for part in parts if part)


def presses_note(found: Comparison) -> str:
    """What the figures of a comparison are of."""
    short, long = min(found.lengths), max(found.lengths)
    kinds = ", ".join(dict.fromkeys(found.sets))
    said = f"{len(found.sets)} questions ({kinds}) about {len(found.lengths)} contexts of {short} to {long:,} tokens"
    given = found.settings
    machines = machines_line([given["machine"], *given.get("earlier", [])])
    return f"{given['model']} in {given['dtype']}; {said}; in brackets 95% intervals. {machines}."


def presses_summary() -> str:
    """Of questions by hand: SmolLM2's default, then fitted selections under the first adapter, and the plain model."""
    found = Comparison.load(BY_HAND)
    rows = [["SmolLM2-135M reads", "tokens kept", "exact match, %", "contains the answer, %"]]
    default, *others = sorted(
        {one.entry.reader for one in found.outcomes} - {PLAIN}, key=lambda name: (name not in DEFAULTS.values(), name)
    )
    for reader in (default, *others, PLAIN):
        ours = [one for one in found.outcomes if one.entry.reader == reader]
        chosen = [one for one in ours if one.entry.memory in (FULL, *trained_names(found))]
        for ratio in (4, 8, 16):
            selected = [one for one in ours if one.entry.ratio == ratio and one.entry.memory in SCORES]
            unasked = [one for one in selected if not one.entry.aware and one.entry.fit == (reader != PLAIN)]
            chosen += sorted(unasked, key=lambda one: -sum(one.exact))[:1]
        for one in chosen:
            its = f"{default} at {one.entry.ratio:g}x" if reader == default and one.entry.fit else shown(one.entry)
            # What has a compressor's own name is read with its own adapter.
            plain = one.entry.memory in trained_names(found) or reader == default
            whose = "" if plain else ", no adapter" if reader == PLAIN else ", first adapter"
            kept = sum(one.tokens[owner] for owner in found.contexts) / len(found.contexts)
            exact, within = (percent(found, values) for values in (one.exact, one.within))
            cells = [f"{each.mean:.0f} ({each.low:.0f}-{each.high:.0f})" for each in (exact, within)]
            # No equal shares are fitted.
            rows.append([its.replace(", heads share", "") + whose, f"{kept:.0f}", *cells])
    return f"{format_table(rows)}\n\n{presses_note(found)}"


def by_form(title: str, cells: Iterable[tuple[str, str, str]]) -> str:
    """A table of (case, form, text): a row a case, a column a form, in the order in which they come."""
    rows: dict[str, dict[str, str]] = {}
    forms: dict[str, None] = {}
    for case, form, text in cells:
        rows.setdefault(case, {})[form] = text
        forms[form] = None
    return format_table(
        [[title, *forms], *([case, *(row.get(form, "-") for form in forms)] for case, row in rows.items())]
    )


def in_milliseconds(value: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def timing_table(content: Content, title: str, cases: str, leave_out: str = "(?!)") -> str:
    """Median milliseconds of a suite: a column a form, a row a case that the pattern `cases` matches.

    The pattern's groups, joined, are what a row is called. Forms in which `leave_out` is found have no column. Where
    the suite measured the roof, a last column says how much of it the first form reaches that does not multiply
    bfloat16 as it is: of the multiply-add peak, or of the reading speed where a case has no work but traffic.
    """
    found = {case["name"]: case for case in content.get("cases", [])}
    cells, shares = [], dict[str, str]()
    rated = ""
    for timing in content["milliseconds"]:
        match = re.fullmatch(cases, timing["case"])
        if match is None or re.search(leave_out, timing["form"]):
            continue
        row = ", ".join(match.groups())
        cells.append((row, timing["form"], in_milliseconds(timing["median"])))
        isa = timing["form"].rsplit(" ", 1)[-1]
        if "roof" in content and row not in shares and isa not in UNRATED:
            rated = rated or timing["form"]
            roof, case = Roof(**content["roof"]), found[timing["case"]]
            peak, done = (
                (roof.peak(timing["form"]), case["work"]) if case["work"] else (roof.read_gbps, case["traffic"])
            )
            shares[row] = f"{done / timing['median'] * 1e-6 / peak:.0%}"
    cells += [(row, "of the roof", share) for row, share in shares.items()]
    unit = f"Median milliseconds{f'; of the roof: {rated}' if rated else ''}."
    return f"{by_form(title, cells)}\n\n{unit} {machine_line(content['machine'])}."


def memory_table(content: Content, title: str = "attention, peak memory", above: str = "inputs and results") -> str:
    """Peak memory of a case in every form, MiB above what there was."""
    table = by_form(title, ((one["case"], one["form"], f"{one['mib']:.0f}") for one in content["mebibytes"]))
    return f"{table}\n\nMiB above {above}. {machine_line(content['machine'])}."


def encode_table(content: Content) -> str:
    """Peak memory of compressing a long context, beside the bytes of its memory and those of one chunk."""
    cells = [
        [row["case"], *(f"{row[name]:.0f}" for name in ("mib", "result", "chunk")), f"{row['ratio']:.2f} x"]
        for row in content["mebibytes"]
    ]
    table = format_table([["compressing, SmolLM2-135M", "peak", "its memory", "a chunk", "peak to both"], *cells])
    return f"{table}\n\nMiB above the loaded model. {machine_line(content['machine'])}."


def streaming_table(content: Content) -> str:
    """What a token takes after so many others, milliseconds and MiB of cache, and the last against the first."""
    rows = content["milliseconds"]
    times = "{} ms, {:.0f} MiB".format
    cells = [(f"after {row['tokens']}", row["form"], times(in_milliseconds(row["mean"]), row["mib"])) for row in rows]
    tokens = {row["tokens"] for row in rows}
    first, last = min(tokens), max(tokens)
    cells += [(f"{last} to {first}", row["form"], f"{row['growth']:.2f} x") for row in rows if row["tokens"] == last]
    # Figures of before there was a choice have neither.
    dtype, memories = content.get("dtype", "float32"), content.get("memory_ratio")
    title = "a token more, SmolLM2-135M" + ("" if dtype == "float32" else f" {dtype}")
    table = by_form(title, cells)
    others = f", means and memories {memories}x" if memories else ""
    setting = f"nuggets {content['ratio']}x{others}, tau {content['tau']}, segment {content['segment']}, untrained"
    floor = f", of which products with the weights take {content['floor']:.3g} ms" if "floor" in content else ""
    return (
        f"{table}\n\nMean of {content['window']} tokens around each length{floor}; {setting}. "
        f"{machine_line(content['machine'])}."
    )


def asking_table(content: Content) -> str:
    """Questions about a long document: seconds, what is kept of it, and right answers, a row a contender."""
    head = ["first answer", "an answer after it", "a token of it", "kept", "right", "right one within"]
    cells = [
        [
            row["form"], f"{row['first']:.1f} s", f"{row['later']:.2f} s", f"{row['token']:.0f} ms",
            f"{row['mib']:.0f} MiB", f"{row['exact']:.0f}%", f"{row['within']:.0f}%",
        ]
        for row in content["rows"]
    ]  # fmt: skip
    title = f"{len(content['facts'])} questions about {content['tokens']} tokens, SmolLM2-135M {content['dtype']}"
    table = format_table([[title, *head], *cells])
    rounds = "One round" if content["rounds"] == 1 else f"Medians of {content['rounds']} rounds"
    return f"{table}\n\n{rounds}. {machine_line(content['machine'])}."


def serving_table(content: Content) -> str:
    """Many clients at once: seconds of an answer, rates, errors and resident memory, a row a server."""
    head = ["an answer, p50", "p95", "answers/s", "tokens/s", "answers", "errors", "right one within", "memory, peak"]
    cells = [
        [
            row["form"], f"{row['p50']:.1f} s", f"{row['p95']:.1f} s", f"{row['rate']:.2f}", f"{row['tokens']:.1f}",
            f"{row['requests']}", f"{row['errors']}", f"{row['right']:.0f}%",
            f"{row['rss']:.0f} MiB ({row['first']:.0f}, then {row['second']:.0f})",
        ]
        for row in content["rows"]
    ]  # fmt: skip
    title = f"{content['clients']} clients, documents of {content['tokens']} tokens, SmolLM2-135M"
    table = format_table([[title, *head], *cells])
    together = f"Questions begin within {content['seconds']:.0f} s; gistkit answers up to {content['batch']} together."
    memory = "In brackets: memory in the first and the second half."
    return f"{table}\n\n{together} {memory} {machine_line(content['machine'])}."


def of_any(machine: str, suite: str) -> tuple[str, Content] | None:
    """The machine, or the first other one, that has the suite, and its figures."""
    return next(of_all(machine, suite), None)


def of_all(machine: str, suite: str) -> Iterator[tuple[str, Content]]:
    """The machines that have the suite, this one first, and their figures."""
    others = sorted(path.parent.name for path in RESULTS.glob(f"*/{suites.NAME}"))
    for name in dict.fromkeys((machine, *others)):
        if suite in (found := of(name)):
            yield name, found[suite]


def of(machine: str) -> dict[str, Content]:
    """A machine's suites."""
    return suites.read(RESULTS / machine / suites.NAME)


def attention_table(machine: str) -> str:
    """A machine's figures of attention: the base point, half precision, decoding."""
    attention = of(machine)["attention"]
    size = ", N 4096, B1 H8/8 D64 float32"
    masks = f"({'|'.join(FEW)}){size}, (.*)"
    others = "plain torch|mask creation"
    tables = [timing_table(attention, f"attention{size}", masks, others)]
    if narrow := of(machine).get("attention-torch-avx2"):
        tables.append(timing_table(narrow, "the same, gistkit and torch limited to AVX2", masks, others))
    halves = rf"({'|'.join(FEW)}), N 4096, B1 H8/8 D64 (b?float16), (.*)"
    tables.append(timing_table(attention, "attention in half precision", halves, others))
    cases = r"decoding, (\d+ \w+, \d+ keys), H32/8 D128 (\w+)"
    tables.append(timing_table(attention, "decoding, H32/8 D128 (roof: reading)", cases))
    return "\n\n".join(tables)


def speed_table(machine: str) -> str:
    """A machine's figures: attention, rope on long texts, and of other suites what is there or on another machine."""
    found = of(machine)
    tables = [attention_table(machine)]
    cases = r"(Llama \w+), N 4096, B1 H32/8 D\d+ float32, (forward.*)"
    tables.append(timing_table(found["rope"], "rope, N 4096, B1 H32/8", cases))
    if memory := found.get("memory"):
        tables.append(memory_table(memory))
    if gistpool := found.get("attention-gistpool"):
        cases = r"(GistPool \d+x, N (?:2048|8192)), B1 H8/8 D64 float32, (.*)"
        tables.append(timing_table(gistpool, "attention under GistPool's mask", cases, "creation alone"))
    if dodo := found.get("attention-dodo"):
        cases = r"(Dodo 10x.*, N (?:4096|8192)), B1 H8/8 D64 float32, (.*)"
        tables.append(timing_table(dodo, "attention under Dodo's mask", cases, "creation alone"))
    if calls := of_any(machine, "calls"):
        tables.append(timing_table(calls[1], "single calls, Llama 8B's heads", "(.*)"))
    streaming = [of_any(machine, name) for name in ("streaming", "streaming-bfloat16")]
    tables += [streaming_table(suite[1]) for suite in streaming if suite]
    if serving := of_any(machine, "serving"):
        tables.append(serving_table(serving[1]))
    if asking := of_any(machine, "asking"):
        tables.append(asking_table(asking[1]))
        tables.append(f"![seconds after each answer]({asking[0]}/asking.png)")
    if pool := found.get("pool"):
        cases = r"(pool (?:2|10)x), N 16384, B1 H8 D128 (\w+), (.*)"
        tables.append(timing_table(pool, "window_pool, keys and values, N 16384, H8 D128", cases))
    if seqpe := found.get("seqpe"):
        encoder = r"seqpe (\d.*), d 768 float32, (.*)"
        tables.append(timing_table(seqpe, "SeqPE's encoder, 2 layers, d 768", encoder))
    if frozen := of_any(machine, "seqpe-frozen"):
        tables.append(timing_table(frozen[1], "SeqPE frozen, d 768: look-ups", r"seqpe frozen, (.*), d 768 float32"))
    if seqpe_memory := found.get("seqpe-memory"):
        tables.append(memory_table(seqpe_memory, "SeqPE's encoder, one forward + backward", "the encoder"))
    for suite in ("training", "training-bfloat16"):
        for _, training in of_all(machine, suite):
            tables.append(timing_table(training, "a training step, SmolLM2-135M", "(.*)"))
    if training_memory := of_any(machine, "training-memory"):
        tables.append(memory_table(training_memory[1], "a training step, peak memory", "the loaded model"))
    if encode_memory := of_any(machine, "encode-memory"):
        tables.append(encode_table(encode_memory[1]))
    if compressor := found.get("compressor"):
        tables.append(timing_table(compressor, "500xCompressor 5x, SmolLM2-135M", "(.*)"))
    if (picture := RESULTS / machine / "attention.png").exists():
        tables.append(f"![time against visible area]({picture.relative_to(RESULTS)})")
    return "\n\n".join(tables)


# The cases of the README: suite, name in its results, name in the table.
SUMMARY = (
    ("attention", "causal, N 4096, B1 H8/8 D64 float32", "attention, causal"),
    ("attention", "GistPool 8x, N 4096, B1 H8/8 D64 float32", "attention, GistPool 8x"),
    ("attention", "Dodo 10x, tau 128, N 4096, B1 H8/8 D64 float32", "attention, Dodo 10x, tau 128"),
    ("rope", "Llama 8B, N 4096, B1 H32/8 D128 float32", "rope, heads of Llama 8B"),
    ("seqpe", "seqpe 0..16383, d 768 float32", "SeqPE's encoder, 16384 positions"),
)
# Forms that do something else than what is compared.
APART = "creation|in place|copy|embedding"
# The cases of the README on a GPU.
GPU_SUMMARY = r"^attention.* N 8192, .* D128|^rope.* N 32768"


def summary_rows(machine: str) -> list[list[str]]:
    """Rows of `SUMMARY`: gistkit against the best of the others in the same run, forward and with backward."""
    rows = []
    for suite, case, name in SUMMARY:
        content = of(machine)[suite]
        for each in ("forward", "forward + backward"):
            times = {
                timing["form"]: timing["median"]
                for timing in content["milliseconds"]
                if timing["case"] == f"{case}, {each}" and not re.search(APART, timing["form"])
            }
            ours = next(form for form in times if form.startswith("gistkit"))
            other = min((form for form in times if not form.startswith("gistkit")), key=lambda form: times[form])
            cells = [duration(times[ours]), duration(times[other]), other, f"{times[other] / times[ours]:.1f}x"]
            rows.append([name, each, *cells])
    return rows


def summary_table(machine: str) -> str:
    """`summary_rows` and where they were measured."""
    rows = [["float32, 2 threads", "pass", "gistkit", "best other", "", "ratio"], *summary_rows(machine)]
    machines = [of(machine)[suite]["machine"] for suite, _, _ in SUMMARY]
    note = "Medians; the other is the fastest of what was measured in the same run"
    return f"{format_table(rows)}\n\n{note}. {machines_line(machines)}."


# The rows of the README: its name, and what the summary and the GPU's table call it.
OVERVIEW = (
    ("attention, causal", "attention, causal", "attention, causal,"),
    ("attention, GistPool 8x", "attention, GistPool 8x", "attention, GistPool 8x,"),
    ("attention, Dodo 10x", "attention, Dodo 10x, tau 128", "attention, Dodo 10x, tau 128,"),
)
BOTH = "forward + backward"


def overview_table(machine: str) -> str:
    """Attention's forward and backward passes on a CPU and a GPU, each beside the best other form of the same run."""
    found = [json.loads(line) for line in next(RESULTS.glob("*/gpu.jsonl")).read_text().splitlines()]
    summary, gpu = summary_rows(machine), gpu_rows(found, GPU_SUMMARY)
    rows = [["forward and backward", "CPU", "", "GPU", ""]]
    for name, case, start in OVERVIEW:
        cpu = next(row for row in summary if row[:2] == [case, BOTH])
        device = next(row for row in gpu if row[0].startswith(start) and row[0].endswith(BOTH))
        rows.append([name, cpu[2], f"{cpu[5]} of {cpu[4]}", device[1], f"{device[5]} of {device[4]}"])
    one = found[0]
    return (
        f"{format_table(rows)}\n\nSpeed beside the fastest other form. "
        f"CPU: float32, {machine_line(of(machine)['attention']['machine'])}. "
        f"GPU: bfloat16, {one['gpu']}, torch {one['torch']}, commit {one['commit']}."
    )


def gpu_table(only: str = "") -> str:
    """gistkit on GPUs against the best of the others in the same run; of cases whose names match the pattern `only`."""
    return "\n\n".join(gpu_times(path, only) for path in sorted(RESULTS.glob("*/gpu.jsonl")))


def gpu_rows(found: list[Content], only: str) -> list[list[str]]:
    """A row for each case of a GPU's results whose name matches `only`."""
    cases: dict[str, dict[str, Content]] = {}
    for row in found:
        if "ms" in row and re.search(only, row["case"]):
            cases.setdefault(row["case"], {})[row["form"]] = row
    rows = []
    for case, forms in cases.items():
        ours = forms[OURS]
        others = [row for form, row in forms.items() if form != OURS and not re.search(APART, form)]
        best = min(others, key=lambda row: row["ms"], default=None)
        against = ["-", "-", "-"]
        if best is not None:
            against = [duration(best["ms"]), best["form"], f"{best['ms'] / ours['ms']:.2f}x"]
        rows.append([case, duration(ours["ms"]), f"{ours['share']:.0%}" if "share" in ours else "-", *against])
    return rows


def gpu_times(path: Path, only: str) -> str:
    """The table of one GPU, with what it was, and what shares of its limits are of."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [["on a GPU", "gistkit", "of the chip", "best other", "", "ratio"], *gpu_rows(found, only)]
    one = found[0]
    limits = (
        f"a product of large bfloat16 matrices ({one['product_tflops']:.0f} TF/s) or a copy ({one['copy_tbps']} TB/s)"
    )
    versions = f"driver {one['driver']}, CUDA {one['cuda']}, torch {one['torch']}, commit {one['commit']}"
    return (
        f"{format_table(rows)}\n\nMedians of the GPU's time, caches flushed; of the chip: the share of what {limits} "
        f"reaches. {one['gpu']}, {versions}."
    )


def duration(milliseconds: float) -> str:
    """Three digits, in seconds where there are many milliseconds."""
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def pages() -> dict[Path, dict[str, Callable[[str], str]]]:
    """The makers of each page's tables by name; they are given the machine that a marker names, or nothing."""
    tables: dict[str, Callable[[str], str]] = {
        "speed": speed_table, "attention": attention_table, "gpu": lambda _: gpu_table()
    }  # fmt: skip
    for name in STUDIES:
        if (groups := committed(RESULTS, name)) and name != "epl":
            tables[name] = lambda _, name=name, groups=groups: find(name).page(groups)
    if PRESSES:
        tables["presses"] = lambda _: presses_tables()
    if lengths_runs():
        tables["lengths"] = lambda _: lengths_table()
    tables["demo"] = lambda _: find("epl").page(committed(RESULTS, "epl"))
    readme: dict[str, Callable[[str], str]] = {"overview": overview_table}
    if BY_HAND.exists():
        readme["presses"] = lambda _: presses_summary()
    speed: dict[str, Callable[[str], str]] = {"summary": summary_table, "gpu": lambda _: gpu_table(GPU_SUMMARY)}
    return {
        ROOT / "README.md": readme,
        ROOT / "docs" / "speed.md": speed,
        RESULTS / "README.md": tables,
    }


def updated(page: str, tables: dict[str, Callable[[str], str]], name: str) -> str:
    """A page with each table between its markers made anew; a marker "speed table of NAME" names the machine."""
    for table, make in tables.items():
        start = rf"(?P<start><!-- {table} table(?: of (?P<machine>[a-z0-9-]+))? -->\n)"
        pattern = rf"{start}.*?(?P<end><!-- end of {table} table -->)"
        if not re.search(pattern, page, re.DOTALL):
            raise ValueError(f"{name}: expected the markers of the {table} table, found none")
        insert = lambda m, make=make: f"{m['start']}\n{make(m['machine'] or '')}\n\n{m['end']}"  # noqa: E731
        page = re.sub(pattern, insert, page, flags=re.DOTALL)
    return page


def main() -> int:
    """Updates or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machines = [
        path.parent.name for path in sorted(RESULTS.glob(f"*/{suites.NAME}")) if "attention" in suites.read(path)
    ]
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    parser.add_argument("--machine", choices=machines, help="show this machine's results from now on")
    arguments = parser.parse_args()
    stale = False
    for path, tables in pages().items():
        before = path.read_text()
        chosen = rf"\1 table of {arguments.machine} -->"
        after = (
            re.sub(r"(speed|summary|overview) table of [a-z0-9-]+ -->", chosen, before) if arguments.machine else before
        )
        after = updated(after, tables, str(path.relative_to(ROOT)))
        stale |= before != after
        if not arguments.check:
            path.write_text(after)
    return int(stale and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
