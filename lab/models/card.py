"""The card of a trained compressor: what it is, what it was trained on and how, and its figures, from its history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from text import OUT as TEXT

from gistkit.common.trained import DEFAULTS
from gistkit.evaluate.report import format_table
from gistkit_lab.presses import Comparison, presses_table

# Comparisons of `gistkit evaluate --against presses`.
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# Of the rows of `measure.rows`.
READ = {
    "none": "no context, the model without the adapter",
    "full": "full context, the model without the adapter",
    "adapter_none": "no context, with the adapter",
    "adapter_full": "full context, with the adapter",
    "kvzip": "KVzip, a selection without training, of as many bytes",
    "memory": "the memory",
}


def write_card(folder: Path, name: str, model: Any, sittings: Sequence[Any]) -> None:
    """Writes README.md into the folder of a `make.Model`."""
    found = json.loads((TEXT / "text.json").read_text())
    packages = ", ".join(f"{package} {version}" for package, version in found["packages"].items())
    settings = ", ".join(f"{key} {value}" for key, value in model.settings.items())
    rows = [["steps", "contexts a step", "tokens", "hours", "held-out loss in nats a token", "machine", "commit"]]
    for one in sittings:
        losses = ", ".join(f"{loss} {value:.3f}" for loss, value in one.held_out.items() if loss != "loss")
        cells = [f"{one.first} to {one.last}", str(one.batch), f"{one.tokens / 1e6:.2f}M", f"{one.seconds / 3600:.2f}"]
        where = "{processor}, {threads} threads, {instruction_set}".format_map(one.machine)
        rows.append([*cells, losses or "-", where, one.machine["commit"]])
    measured = next((one.measured for one in reversed(sittings) if one.measured), {})
    hours, tokens = (sum(getattr(one, key) for one in sittings) for key in ("seconds", "tokens"))
    option = "" if name in DEFAULTS.values() else f" --compressor {name}"
    done, reached = 0, []
    for stage in model.stages:
        if done < sittings[-1].last:
            reached.append(stage)
        done += stage.steps
    learned = {loss for stage in reached for loss in stage.losses}
    state = "" if "qa" in learned else "\n\n**It has not learned to answer questions yet.**"
    stages = "; ".join(
        f"{stage.steps} steps of {', '.join(f'{weight:g} x {loss}' for loss, weight in stage.losses.items())} on "
        f"contexts of {stage.shortest} to {stage.longest} tokens"
        for stage in model.stages
    )
    text = f"""# {name}

A compressor for SmolLM2-135M-Instruct: {model.method}, {settings}. Its adapter (rank {model.rank} on queries, keys,
values and outputs) and its memory tokens, if it has any, were trained; the model is unchanged. The weights are in
bfloat16.

    gistkit compress report.txt -o report.gist{option}
    gistkit ask report.gist "Who signed it?"

## Training

{tokens / 1e6:.1f} million tokens in {hours / 3600:.1f} hours of one process. Learning rate {model.learning_rate:g}
after {model.warmup} steps of warm-up, falling in the last {model.decay:.0%} of each session; {model.precision}
autocast. Stages: {stages}. The training is in stage {len(reached)} of {len(model.stages)}.{state}

{format_table(rows)}

{_figures(measured)}{beside(name)}## Data

Pages of Debian's documentation packages, as apt installs them ({sum(found["bytes"].values()) / 1e6:.0f} MB,
{sum(found["pages"].values())} pages): {packages}. A tenth of the pages is held out, and so is all of
homebank-data. Each context contains a made-up fact, and a question asks for it.

`python lab/models/make.py {name} --steps N` continues the training.
"""
    (folder / "README.md").write_text(text)


def beside(name: str) -> str:
    """What was read with the adapter of a model in the committed comparisons, if it is in some."""
    parts = []
    for path in sorted(RESULTS.glob("presses-*.jsonl")):
        found = Comparison.load(path)
        if own := [one for one in found.outcomes if one.entry.reader == name]:
            kinds = ", ".join(dict.fromkeys(found.sets))
            count = f"{len(found.sets)} questions ({kinds}) about {len(found.lengths)} contexts"
            table = presses_table(replace(found, outcomes=own))
            parts.append(f"{table}\n\n{count}, in {found.settings['dtype']}; in brackets 95% intervals.\n\n")
    return "".join(parts)


def _figures(measured: dict[str, dict[str, float]]) -> str:
    """The tables of passages, and that of the questions: one row for whatever is read, with the same prompt."""
    if not measured:
        return ""
    parts = ["## Figures"]
    names = {"manuals": "pages of the manuals", "other": "pages of another domain"}
    for domain, title in names.items():
        if found := measured.get(domain):
            rows = [[f"128 tokens of held-out {title}", "perplexity of what follows", "exact answers about facts, %"]]
            rows += [
                [read, f"{found[name]:.3g}", f"{found[f'{name}_facts']:.3g}"]
                for name, read in READ.items()
                if name in found
            ]
            kept = f"Reconstruction: BLEU-4 {found['bleu4']:.3g}, {found['accuracy']:.1%} of tokens right."
            if "way" in found:
                between = "both with the adapter" if "adapter_none" in found else "which no adapter reads"
                kept += f" In what follows it goes {found['way']:.2f} of the way from no to full context, {between}."
            parts += [format_table(rows), kept]
    if figures := measured.get("questions"):
        title = f"{figures['count']} questions written by hand, about 512 tokens of a held-out page"
        rows = [[title, "exact match, %", "contains the answer, %", "F1 of words, %"]]
        for name, read in READ.items():
            if name in figures:
                rows.append([read, *(f"{figures[f'{name}{kind}']:.3g}" for kind in ("", "_within", "_f1"))])
        parts.append(format_table(rows))
    return "\n\n".join(parts) + "\n\n"
