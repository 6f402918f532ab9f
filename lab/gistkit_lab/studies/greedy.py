"""Study `greedy`: how near a Dodo's nuggets are to the best ones that swapping them one by one finds.

Every nugget but the last token is tried at all other places, and a swap that lowers the loss of what is read behind the
memory stays (Dodo, Section 7.1 and Algorithm 1 of Appendix A).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm

from gistkit.common.checks import check_int
from gistkit.common.text_ids import text_ids
from gistkit.compress import Dodo
from gistkit.compress.losses import LOGITS
from gistkit.compress.tokens import Rows as TokenRows
from gistkit.evaluate import perplexity
from gistkit.evaluate.runner import evaluating
from gistkit.nn import Nuggets
from gistkit.options.arguments import device, positive, typed
from gistkit.options.models import add_dtype, add_model_name, load_compressor, load_model, trained_folder
from gistkit.options.texts import read_contents
from gistkit.train.presets import find_preset
from gistkit_lab import digests
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.pages import machine_caption, runs
from gistkit_lab.studies.rows import Rows
from gistkit_lab.studies.study import Job, SavedRun, Study, StudyPlan

BATCH = 32


@dataclass(frozen=True)
class Recipe:
    """What every text of the study is cut into; the paper's numbers.

    Args:
        context: tokens that are compressed.
        read: tokens after them that are read uncompressed and not asked for.
        asked: tokens after these, whose loss is measured.
        rounds: see `improve`.
    """

    context: int = 128
    read: int = 64
    asked: int = 64
    rounds: int = 1

    def __post_init__(self) -> None:
        for name in ("context", "asked", "rounds"):
            check_int(name, getattr(self, name))
        check_int("read", self.read, 0)

    @property
    def length(self) -> int:
        """Tokens of a text."""
        return self.context + self.read + self.asked


@dataclass(frozen=True)
class SwapSearch:
    """The nuggets of one context as the compressor selects them, and after the search.

    Args:
        before, after: their places in the context behind BOS, which is 0, ascending; as `Nuggets` and `Memory` count.
        loss_before, loss_after: nats a token, means over the tokens asked.
        tried: swaps whose loss was measured.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    loss_before: float
    loss_after: float
    tried: int

    @property
    def overlap(self) -> float:
        """Share of the compressor's nuggets that stayed, 0..1; the last token is one that always does."""
        return len(set(self.before) & set(self.after)) / len(self.before)

    @property
    def overlap_but_last(self) -> float | None:
        """The same of those that a swap could replace; None where the last token is the only nugget."""
        count = len(self.before) - 1
        return (len(set(self.before) & set(self.after)) - 1) / count if count else None


@dataclass
class Run:
    """What was found for one compressor in each text; how it was trained, and its digest, where these are known."""

    title: str
    settings: dict[str, Any]
    texts: list[SwapSearch]
    training: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


def improve(
    compressor: Dodo,
    context: Any,
    text: Any,
    asked: int,
    *,
    batch_size: int = BATCH,
    rounds: int = 1,
    progress: bool = True,
) -> SwapSearch:
    """Swaps the nuggets of one context, one by one, for those of the lowest loss (Dodo, Algorithm 1).

    For each nugget in the order of the text, all tokens that are none are tried in its place, first to last; the first
    that is better than the best so far takes it, until a better one does. The last token stays a nugget. The context is
    encoded once: what stands for a selection is a gather of the keys and values of all its tokens.

    Args:
        compressor: runs in eval mode, and is left in the mode it has.
        context: token ids of one row, as `Compressor.encode` takes them; beyond the compressor's window they are read
            as they are.
        text: token ids of one row, read behind the memory.
        asked: of how many tokens at the text's end the mean loss is to fall.
        batch_size: selections read at a time; rounding apart, the result is the same for all.
        rounds: times that all nuggets are gone through; ends before where none was swapped. The paper's is 1.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if not isinstance(compressor, Dodo):
        raise TypeError(f"compressor: expected a Dodo, got {type(compressor).__name__}")
    check_int("batch_size", batch_size)
    check_int("rounds", rounds)
    rows = _one_row(compressor, "context", context)
    if compressor.with_bos(rows).lengths[0] < 2:
        raise ValueError("context: expected at least 1 token beside the first token, got none")
    text_rows = _one_row(compressor, "text", text)
    check_int("asked", asked)
    if asked > text_rows.lengths[0]:
        raise ValueError(f"asked: expected at most the {text_rows.lengths[0]} tokens of the text, got {asked}")
    with evaluating(compressor):
        return _search(_Selections(compressor, rows, text_rows, asked), batch_size, rounds, progress)


def study(
    compressor: Dodo,
    texts: Sequence[Sequence[int]],
    recipe: Recipe,
    *,
    batch_size: int = BATCH,
    progress: bool = True,
) -> list[SwapSearch]:
    """What `improve` finds in each text, token ids, of which the recipe's first ones are taken."""
    if not len(texts):
        raise ValueError("texts: expected at least one, got none")
    for index, text in enumerate(texts):
        if len(text) < recipe.length:
            raise ValueError(f"texts: expected at least {recipe.length} tokens, got {len(text)} in text {index}")
    options: Any = {"batch_size": batch_size, "rounds": recipe.rounds, "progress": progress}
    return [
        improve(compressor, text[: recipe.context], text[recipe.context : recipe.length], recipe.asked, **options)
        for text in tqdm(texts, desc="texts", unit="text", dynamic_ncols=True, disable=not progress)
    ]


def passages(texts: Sequence[Sequence[int]], length: int, count: int | None = None) -> list[list[int]]:
    """Consecutive passages of so many tokens of texts, at most `count`, in a fixed shuffled order; no rest at ends."""
    chunks = [list(text[at : at + length]) for text in texts for at in range(0, len(text) - length + 1, length)]
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(7)).tolist()
    return [chunks[index] for index in order[:count]]


class _Selections:
    """The losses of one text behind any selection of its context's tokens, all of whose keys are there."""

    def __init__(self, compressor: Dodo, context: TokenRows, text: TokenRows, asked: int) -> None:
        selected_memory, _, compressed = compressor.compress_rows(context)
        self.own: list[int] = selected_memory.positions[0, 1:].tolist()
        self.last = compressor.with_bos(compressed).lengths[0] - 1
        all_tokens = Nuggets(torch.arange(1, self.last + 1, device=compressor.device)[None], (self.last,))
        memory, _ = compressor.encode_nuggets(compressed, all_tokens)
        self.memory = replace(memory, rest=selected_memory.rest)
        self.compressor, self.text, self.asked = compressor, text, asked

    def losses(self, selections: Sequence[Sequence[int]]) -> list[float]:
        """Nats a token asked behind each of some selections, all of one size."""
        count, compressor = len(selections), self.compressor
        # BOS is kept whatever the nuggets are.
        index = F.pad(torch.tensor(selections).sort(1).values, (1, 0))
        columns = index.to(compressor.device)[:, None, :, None]
        repeated = self.memory.repeat(count)
        memory = replace(
            repeated,
            lengths=(index.shape[1],) * count,
            positions=index,
            layers=tuple(
                (k.take_along_dim(columns, 2), v.take_along_dim(columns, 2)) for k, v in repeated.layers or ()
            ),
        )
        ids = self.text.ids
        text = TokenRows(ids[:, :-1].expand(count, -1), (ids.shape[1] - 1,) * count)
        hidden_states = compressor.read(memory, "lm", text)[:, -self.asked :].flatten(0, 1)
        targets = ids[0, -self.asked :].repeat(count)
        size = max(1, LOGITS // compressor.vocabulary)
        nats = [
            F.cross_entropy(compressor.logits(part), labels, reduction="none").double()
            for part, labels in zip(hidden_states.split(size), targets.split(size), strict=True)
        ]
        return torch.cat(nats).view(count, -1).mean(1).tolist()  # type: ignore[no-any-return]


def _search(selections: _Selections, batch_size: int, rounds: int, progress: bool) -> SwapSearch:
    """Algorithm 1, a batch of selections at a time."""
    selection, last = list(selections.own), selections.last
    nuggets_before = tuple(selection)
    first = best = selections.losses([selection])[0]
    if not math.isfinite(first):
        raise ValueError(f"compressor: expected one that gives the text a finite loss, got {first}")
    tried, total = 0, rounds * (len(selection) - 1) * (last - len(selection))
    with tqdm(total=total, unit="swap", leave=False, dynamic_ncols=True, disable=not progress) as bar:
        for _ in range(rounds):
            selection.sort()
            round_start = best
            for slot in range(len(selection) - 1):
                # The others stay while a slot is searched: a batch can be read before it is known which of it wins.
                fixed = selection[:slot] + selection[slot + 1 :]
                candidates = sorted(set(range(1, last + 1)) - set(selection))
                for start in range(0, len(candidates), batch_size):
                    batch = candidates[start : start + batch_size]
                    for candidate, loss in zip(batch, selections.losses([[*fixed, p] for p in batch]), strict=True):
                        if loss < best:
                            best, selection[slot] = loss, candidate
                    tried += len(batch)
                    bar.set_postfix_str(f"perplexity {perplexity(first):.2f} -> {perplexity(best):.2f}", refresh=False)
                    bar.update(len(batch))
            if best == round_start:
                break
    return SwapSearch(nuggets_before, tuple(sorted(selection)), first, best, tried)


def _one_row(compressor: Dodo, name: str, ids: Any) -> TokenRows:
    rows = compressor.rows(name, ids, shortest=1)
    if rows.batch_size != 1:
        raise ValueError(f"{name}: expected one row, got {rows.batch_size}")
    return rows


class Search(NamedTuple):
    """The arm: the title and digest of a trained Dodo, and what `study` is called with."""

    name: str
    compressor: Dodo
    texts: Sequence[Sequence[int]]
    batch_size: int


class Passages(NamedTuple):
    """What was read."""

    name: str
    digest: str


# Dodo, Section 7.1 and Appendix A: Llama-2-7B at 10x, 1000 documents of WikiText-103's test set. There the last token
# may be swapped too.
PAPER = {"overlap": 0.753, "perplexity_before": 7.74, "perplexity_after": 7.13, "texts": 1000}
CAPTION = (
    "Stayed: share of the compressor's nuggets that no swap replaced, mean over texts; in brackets without the last "
    "token,\nwhich always stays. Perplexity of the tokens asked in all texts, behind its own nuggets and those found."
)


class GreedyStudy(Study):
    """How near a Dodo's nuggets are to the best that a greedy search finds; nothing is trained."""

    name = "greedy"
    run_type = Run
    recipe_type = Recipe
    measured = ()
    legend = CAPTION

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--compressor", type=trained_folder, required=True, metavar="FOLDER", help="trained Dodo")
        add_model_name(parser)
        add_dtype(parser)
        parser.add_argument(
            "--texts", type=typed, nargs="+", required=True, metavar="TEXT",
            help="text file, folder, or - for standard input",
        )  # fmt: skip
        parser.add_argument("--glob", default="**/*.txt", help="which files of a folder (default: %(default)s)")
        parser.add_argument(
            "--passages", type=positive, default=16, metavar="N",
            help="of the texts, at most; each is read some thousand times (default: %(default)s; the paper: 1000)",
        )  # fmt: skip
        for name, default, purpose in (
            ("--context", Recipe.context, "tokens compressed"),
            ("--read", Recipe.read, "tokens after them, uncompressed"),
            ("--asked", Recipe.asked, "tokens after these, predicted"),
            ("--rounds", Recipe.rounds, "times through all nuggets"),
            ("--batch-size", BATCH, "selections read at a time"),
        ):
            parser.add_argument(
                name, type=positive, default=default, metavar="N", help=f"{purpose} (default: %(default)s)"
            )

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        contents = read_contents(options.texts, options.glob)
        recipe = Recipe(options.context, options.read, options.asked, options.rounds)
        model, tokenizer = load_model(options.model, options.dtype, device(options.device))
        compressor = load_compressor(options.compressor, model)
        if not isinstance(compressor, Dodo):
            raise ValueError(f"--compressor: expected a Dodo, got a {type(compressor).__name__}, {options.compressor}")
        texts = [text_ids(content, tokenizer, special_tokens=False) for content in contents]
        text_passages = passages(texts, recipe.length, options.passages)
        if not text_passages:
            raise ValueError(
                f"--texts: expected one of at least {recipe.length} tokens, those of --context, --read and --asked, "
                f"got at most {max(map(len, texts))}"
            )
        about = (
            f"{compressor.title}: {len(text_passages)} passages, {recipe.context} tokens compressed, "
            f"{recipe.read} read, {recipe.asked} asked"
        )
        source = Passages(", ".join(options.texts), digests.of_values(text_passages))
        name = f"{compressor.title} {digests.of_compressor(compressor)}"
        search = Search(name, compressor, text_passages, options.batch_size)
        return StudyPlan(recipe, [Job(search, 0)], about, source)

    def train(self, session: Session) -> Run:
        search: Search = session.arm
        results = study(search.compressor, search.texts, session.recipe, batch_size=search.batch_size)
        digest = search.name.rpartition(" ")[2]
        return Run(search.compressor.title, search.compressor.settings, results, digest=digest)

    def arm_name(self, run: Run) -> str:
        return f"{run.title} {run.digest}"

    def seed(self, run: Run) -> int:
        return 0

    def small(self, recipe: Recipe) -> bool:
        return False

    def run_of(self, values: dict[str, Any]) -> Run:
        names = ("before", "after")
        texts = [SwapSearch(**text | {name: tuple(text[name]) for name in names}) for text in values["texts"]]
        return Run(**values | {"texts": texts})

    def rows(self, runs: Sequence[Run], recipe: Any, split: str = "test") -> Rows:
        """Header, a row a compressor by its title, and the paper's."""
        header = ["", "stayed", "perplexity", "of the best found", "lower by", "texts"]
        return [header, *(_row(run.title, summary(run.texts)) for run in runs), _row("paper: Dodo 10x", PAPER)]

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        (group,) = groups
        recipe, training = group[0].recipe, group[0].run.training
        preset = find_preset(training["preset"]).recipe
        return (
            f"{self.table(runs(group), recipe)}\n{recipe.context} tokens compressed, {recipe.read} read, "
            f"{recipe.asked} asked, after {training['steps']} steps of {preset.batch} passages of "
            f"{preset.max_length} tokens. {machine_caption(group)}."
        )


def summary(results: Sequence[SwapSearch]) -> dict[str, float]:
    """The figures of `PAPER`, the swaps tried, and overlap_but_last where some context has more than one nugget."""
    figures = {
        "overlap": fmean(result.overlap for result in results),
        "perplexity_before": perplexity(fmean(result.loss_before for result in results)),
        "perplexity_after": perplexity(fmean(result.loss_after for result in results)),
        "texts": len(results),
        "tried": sum(result.tried for result in results),
    }
    but_last = [result.overlap_but_last for result in results if result.overlap_but_last is not None]
    return figures | ({"overlap_but_last": fmean(but_last)} if but_last else {})


def _row(name: str, figures: Mapping[str, float]) -> list[str]:
    stayed = f"{figures['overlap']:.1%}"
    if "overlap_but_last" in figures:
        stayed += f" ({figures['overlap_but_last']:.1%})"
    before, after = figures["perplexity_before"], figures["perplexity_after"]
    return [name, stayed, f"{before:.2f}", f"{after:.2f}", f"{1 - after / before:.1%}", f"{figures['texts']:.0f}"]


STUDY = GreedyStudy()
