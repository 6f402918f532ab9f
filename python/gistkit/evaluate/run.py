"""run: one compressor beside the baselines, as in the command `gistkit evaluate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gistkit.compress import Compressor
from gistkit.evaluate.baselines import BASELINES, FullContext, NoContextBaseline
from gistkit.evaluate.data import TASKS, Example
from gistkit.evaluate.evaluation import compare, method_name
from gistkit.evaluate.report import Report


def run(
    compressor: Compressor,
    tokenizer: Any | None,
    examples: Sequence[Example],
    *,
    baselines: Sequence[str] = ("none", "full"),
    tasks: Sequence[str] | None = None,
    method: str | None = None,
    others: Mapping[str, Compressor] | None = None,
    **settings: Any,
) -> Report:
    """A report on a compressor beside the plain model without the context and with all of it.

    Args:
        compressor: the compressor; the baselines run on its model, without its LoRA adapter.
        tokenizer: of transformers, or None if the examples are token ids.
        examples: contexts with their tasks.
        baselines: some of "none" and "full", or none of them.
        tasks: some of "ae", "lm" and "qa"; None: those that some example has.
        method: the name of the compressor's row; None: its class, layout and ratio.
        others: more methods by the names of their rows, after the compressor's.
        settings: batch_size, max_new_tokens, stop_tokens, progress and processes, as in `compare`.

    Raises:
        ValueError: if an argument is out of range, two rows have one name, or as in `compare`.
    """
    if isinstance(baselines, str) or not set(baselines) <= set(BASELINES):
        raise ValueError(f"baselines: expected some of {', '.join(BASELINES)}, got {baselines!r}")
    if tasks is None:
        has_data = {
            "ae": True,
            "lm": any(getattr(example, "continuation", None) is not None for example in examples),
            "qa": any(getattr(example, "question", None) is not None for example in examples),
        }
        tasks = [task for task in TASKS if has_data[task]]
    rows: list[tuple[str, Compressor]] = []
    if "none" in baselines:
        starts = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
        start_token = next((token for token in starts if token is not None), None)
        rows.append(("NoContext", NoContextBaseline(compressor.model, start_token=start_token)))
    rows += [(method or method_name(compressor), compressor), *(others or {}).items()]
    if "full" in baselines:
        rows.append(("FullContext", FullContext(compressor.model)))
    if taken := [name for name, count in Counter(name for name, _ in rows).items() if count > 1]:
        which = "others" if taken[0] in (others or {}) else "method"
        raise ValueError(f"{which}: expected a name that no other row has, got {taken[0]!r}")
    return compare(dict(rows), examples, tokenizer=tokenizer, tasks=tasks, **settings)
