"""Study `in-place`: a decoder answers from a context that each method compresses in place, at several ratios.

The context is real text with codes between its sentences. A question asks for a code, or for the continuation of a
passage. All arms have the same model, steps, batches and held-out questions (Long Context In-Context Compression by
Getting to the Gist of Gisting (GistPool), Figure 2 and Table 3; there the model is Gemma2 2B and the questions are
SQuAD's and others).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from gistkit import compress
from gistkit.compress import GistPool, start_as_means
from gistkit.compress.methods.in_place import InPlace
from gistkit.hf import attach
from gistkit.train import checkpoints
from gistkit.train.batches import Batch
from gistkit.train.recipe import adamw
from gistkit_lab.studies import fitting, models
from gistkit_lab.studies.draws import generator_of
from gistkit_lab.studies.fitting import Progress, Session, StudyRecipe
from gistkit_lab.studies.needles import Needles, Question, as_batch, evaluate
from gistkit_lab.studies.pages import machine_caption, model_line
from gistkit_lab.studies.rows import SEEDS, Cell, Rows, name_of, of_split, tabulate
from gistkit_lab.studies.study import Names, Pictures, SavedRun, Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Recipe(StudyRecipe):
    """Everything that determines a run except its arm and seed.

    Args:
        model: "smollm2" (SmolLM2-135M, with LoRA of rank `rank`) or "small" (a Llama of 0.6M parameters on bytes, all
            of whose weights train, after `base_steps` steps that the arms of a seed share: answers from the full
            context, as a language model every token of context, question and answer, and random bytes that come again).
        min_length, max_length, lines, cue, answer: of the questions, see `Needles`.
        memory_factor, copy_factor: the learning rate of what memory tokens alone have, in `learning_rate`; the second
            of whole maps beside LoRA.
        start_gists: fewest gists that `start_as_means` fits, for the arm whose gists start as means.
        eval_questions: held-out questions of each kind at every evaluation.
        final_questions: questions of each kind at the end, held-out ones and as many of the test split.
    """

    steps: int = 100
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.0
    model: str = "smollm2"
    rank: int = 64
    base_steps: int = 0
    min_length: int = 96
    max_length: int = 128
    lines: int = 3
    cue: int = 8
    answer: int = 8
    memory_factor: float = 3.0
    copy_factor: float = 0.1
    start_gists: int = 5000
    eval_questions: int = 16
    final_questions: int = 48


QUICK = Recipe(
    model="small", steps=300, base_steps=3000, batch=16, learning_rate=2e-3, warmup=30, weight_decay=0.1,
    min_length=40, max_length=80, lines=0, cue=6, eval_every=50, eval_questions=64, final_questions=256,
)  # fmt: skip
PRESETS = {
    # A model trained from scratch: minutes for the base of a seed and for each of its arms.
    "quick": QUICK,
    # The same with enough steps for gists to learn to pool; some ten minutes of a core an arm.
    "long": replace(QUICK, steps=4000, eval_every=250),
    # A few minutes a run on two cores.
    "short": Recipe(),
    # Contexts of SQuAD's size, for a GPU.
    "paper": Recipe(
        steps=10_000, batch=16, learning_rate=2e-4, warmup=300, rank=128, min_length=128, max_length=512, lines=8,
        eval_every=500, eval_questions=256, final_questions=1000,
    ),
}  # fmt: skip

# The methods of the paper's Figure 2, and GistPool with gists that start as means; then the others of its Table 3.
METHODS = ("no", "full", "gist", "offset-gist", "sep-offset-gist", "avgpool", "gistpool", "gistpool-means")
OTHER_METHODS = ("sep-gist", "gist-pool", "sep-gist-pool", "offset-gist-pool")
RATIOS = (1, 2, 5, 10)
NAMES_OF_RATIOS = tuple(map(str, RATIOS))


@dataclass(frozen=True)
class Arm:
    """A method at a compression ratio; 1 for full context, and for no context, which has none."""

    method: str
    ratio: int = 1

    @property
    def name(self) -> str:
        """Such as gistpool-5x."""
        return self.method if self.method in ("no", "full") else f"{self.method}-{self.ratio}x"


def arms(methods: Sequence[str] = METHODS, ratios: Sequence[int] = RATIOS) -> list[Arm]:
    """The arms of these methods; AvgPool at 1x is full context and left out."""
    return [
        Arm(method, ratio)
        for method in methods
        for ratio in ((1,) if method in ("no", "full") else ratios)
        if (method, ratio) != ("avgpool", 1)
    ]


# The class and the options of each method: GistPool is Gist with a pool mask, an offset and parameters of its own.
CLASSES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "no": (compress.NoContext, {}),
    "full": (compress.AvgPool, {}),
    "avgpool": (compress.AvgPool, {}),
    "gist": (compress.Gist, {}),
    "offset-gist": (compress.Gist, {"offset": True}),
    "sep-gist": (compress.Gist, {"separate": True}),
    "sep-offset-gist": (compress.Gist, {"offset": True, "separate": True}),
    "gistpool": (compress.GistPool, {}),
    "gistpool-means": (compress.GistPool, {"windows": 1, "full_copy": True}),
    "gist-pool": (compress.GistPool, {"offset": False, "separate": False}),
    "sep-gist-pool": (compress.GistPool, {"offset": False}),
    "offset-gist-pool": (compress.GistPool, {"separate": False}),
}


def build_compressor(recipe: Recipe, arm: Arm, model: PreTrainedModel) -> InPlace:
    """The untrained compressor of an arm of a recipe around `model`."""
    return arm_compressor(arm, model, recipe.rank if recipe.model == "smollm2" else None)


def arm_compressor(arm: Arm, model: PreTrainedModel, lora: int | None) -> InPlace:
    """The untrained compressor of an arm around `model`, with LoRA of a rank, or None: all weights train."""
    if arm.method not in CLASSES:
        raise ValueError(f"method: expected one of {', '.join(METHODS + OTHER_METHODS)}, got {arm.method!r}")
    kind, options = CLASSES[arm.method]
    ratio = {} if arm.method == "no" else {"ratio": arm.ratio}
    compressor: InPlace = kind(model, lora=lora, losses=("qa",), **ratio, **options)
    return compressor


def fresh_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    """A copy of the pretrained model, or a small one with the random weights of a seed."""
    # These decide whether so small a model learns to look things up.
    return models.fresh_model(recipe, seed, initializer_range=0.09, rope_theta=1e3)


@dataclass
class Run(fitting.Run):
    """Losses are in nats an answer token, and `exact` is the share of answers without an error.

    `held_out` and `test` hold {"loss", "exact"} for each kind of question, and their mean as "all", which `curve` has
    after the step. `examples` are held-out questions with the answers given.
    """

    method: str
    ratio: int
    examples: list[dict[str, str]] = field(default_factory=list)


def questions(session: Session) -> Needles:
    """The questions of a seed; the held-out ones are the same for all."""
    recipe: Recipe = session.recipe
    return Needles(
        session.source, models.tokenizer(recipe), recipe.batch, recipe.min_length, recipe.max_length,
        lines=recipe.lines, cue=recipe.cue, answer=recipe.answer, seed=session.seed,
    )  # fmt: skip


@torch.no_grad()
def answers(compressor: InPlace, group: Sequence[Question], device: str = "cpu") -> list[tuple[int, ...]]:
    """Greedy answers, as long as the right ones."""
    memory = compressor.encode(as_batch(group)["input_ids"].to(device))
    longest = max(len(question.answer) for question in group)
    prompts = [list(question.question) for question in group]
    generated = compressor.generate(memory, prompts, max_new_tokens=longest, stop_tokens=())
    return [tuple(row[: len(question.answer)]) for row, question in zip(generated.tolist(), group, strict=True)]


def start(recipe: Recipe, compressor: InPlace, data: Needles) -> list[float]:
    """Starts a GistPool's gists as means over contexts of the first steps; see `start_as_means`."""
    contexts: list[list[int]] = []
    while sum(len(context) for context in contexts) < recipe.start_gists * compressor.chunk:
        contexts += data(len(contexts) // recipe.batch)["input_ids"].tolist()
    return start_as_means(cast(GistPool, compressor), contexts)


def memory_factor(recipe: Recipe, compressor: InPlace) -> float:
    """The learning rate of the memory tokens' own parameters, as a factor of the recipe's."""
    copies_beside_lora = compressor.copies is not None and compressor.adapters is not None
    return recipe.copy_factor if copies_beside_lora else recipe.memory_factor


def train(session: Session) -> Run:
    """Trains and measures one arm and seed. With `base_steps`, the seed's runs share their first model."""
    recipe, arm, device, data = session.recipe, session.arm, session.device, questions(session)
    model = base(session, data)
    torch.manual_seed(session.seed)
    compressor = build_compressor(recipe, arm, model).to(device)
    if arm.method == "gistpool-means" and not (session.resume and checkpoints.find(session.state)):
        start(recipe, compressor, data)
    progress = _fit(session, compressor, data)
    with attach(compressor.model):
        figures = lambda split: evaluate(compressor, data, split, recipe.final_questions, device)  # noqa: E731
        run: Run = session.run(Run, vars(arm), progress, compressor.trainable(), figures)
        group = data.groups("held_out", 4)[0]
        for question, answer in zip(group, answers(compressor, group, device), strict=True):
            run.examples.append(
                {"question": _text(recipe, question.question), "answer": _text(recipe, question.answer),
                 "given": _text(recipe, answer)}
            )  # fmt: skip
    return run


def base(session: Session, data: Needles) -> PreTrainedModel:
    """The model that the arms of a seed start from; each gets its own copy."""
    recipe: Recipe = session.recipe
    model = fresh_model(recipe, session.seed)
    if recipe.base_steps:
        with session.shared("base", steps=recipe.base_steps, base_steps=0) as shared:
            _fit(shared, build_compressor(shared.recipe, Arm("full"), model).to(session.device), data, True)
    return model


def _fit(session: Session, compressor: InPlace, data: Needles, base: bool = False) -> Progress:
    """Trains on the answers; the base model of the arms also as a language model, and on repetitions."""
    recipe, device = session.recipe, session.device
    groups = compressor.parameter_groups(recipe.learning_rate, memory_factor=memory_factor(recipe, compressor))
    optimizer = adamw(groups, recipe.learning_rate, recipe.weight_decay)

    def loss(step: int) -> torch.Tensor:
        batch = {name: tensor.to(device) for name, tensor in data(step).items()}
        total = compressor(**batch)["loss"]
        if base:
            total = total + language_loss(compressor, batch)
            total = total + repetition_loss(compressor, batch, generator_of(session.seed, step))
        return total

    def figures() -> tuple[float, float]:
        held_out = evaluate(compressor, data, "held_out", recipe.eval_questions, device)["all"]
        return held_out["loss"], held_out["exact"]

    # Each run has its own seed, so that dropout, where a model has it, is the same for all arms.
    torch.manual_seed(session.seed)
    identity = session.decides(questions=data.identity)
    if base:
        identity["losses"] = ["answers", "text", "repetition"]
    return session.fit(compressor, loss, figures, identity, optimizer=optimizer)


def language_loss(compressor: InPlace, batch: Batch) -> torch.Tensor:
    """Mean loss of every token of [BOS][context][question][answer]; questions of one length, so that none is padded."""
    bos = torch.full_like(batch["input_ids"][:, :1], compressor.bos_token)
    input_ids = torch.cat([bos, batch["input_ids"], batch["question_ids"], batch["answer_ids"]], 1)
    logits = compressor.model(input_ids=input_ids[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def repetition_loss(compressor: InPlace, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """Mean loss of random bytes that occur in the text a second time, in texts like the contexts in number and length.

    Real text can be guessed without looking back; from random bytes so small a model soon learns to look things up.
    """
    device, shape = batch["input_ids"].device, batch["input_ids"].shape
    random_ids = torch.randint(32, 127, shape, generator=generator).to(device)
    begin = int(torch.randint(shape[1] // 2, (), generator=generator))
    bos = torch.full_like(random_ids[:, :1], compressor.bos_token)
    input_ids = torch.cat([bos, random_ids, random_ids[:, begin:]], 1)
    # Which byte comes again first cannot be known.
    logits = compressor.model(input_ids=input_ids[:, :-1]).logits[:, 1 + shape[1] :]
    return cross_entropy(logits.flatten(0, 1), input_ids[:, 2 + shape[1] :].flatten())


def _text(recipe: Recipe, ids: Sequence[int]) -> str:
    recipe_tokenizer = models.tokenizer(recipe)
    if recipe_tokenizer is None:
        return bytes(min(token, 255) for token in ids).decode("utf-8", "replace")
    return recipe_tokenizer.decode(list(ids))


TITLES = {
    "no": "No context",
    "full": "Full context",
    "gist": "Gist",
    "offset-gist": "OffsetGist",
    "sep-offset-gist": "SepOffsetGist",
    "avgpool": "AvgPool",
    "gistpool": "GistPool",
    "gistpool-means": "GistPool from means",
    "sep-gist": "SepGist",
    "gist-pool": "Gist with pool mask",
    "sep-gist-pool": "SepGist with pool mask",
    "offset-gist-pool": "OffsetGist with pool mask",
    # Of the study of pairs.
    "icae": "ICAE",
    "separate-encoder": "SeparateEncoder",
    "x500": "500xCompressor",
    "sac": "SAC",
    "dodo": "Dodo",
    "kv-distill": "KV-Distill",
    "beacon": "Beacon",
}
# GistPool, Table 3: evaluation loss on SQuAD with Gemma2 2B.
PAPER = {
    "no": {1: 2.139},
    "full": {1: 0.270},
    "gist": {1: 0.512, 2: 0.619, 5: 0.783, 10: 0.925},
    "offset-gist": {1: 0.501, 2: 0.619, 5: 0.739, 10: 0.890},
    "sep-offset-gist": {1: 0.493, 2: 0.547, 5: 0.636, 10: 0.786},
    "avgpool": {2: 0.352, 5: 0.495, 10: 0.702},
    "gistpool": {1: 0.340, 2: 0.357, 5: 0.408, 10: 0.545},
    # Ours: the paper's gists learn to pool by training alone.
    "gistpool-means": {},
    "sep-gist": {1: 0.505, 2: 0.592, 5: 0.732, 10: 0.764},
    "gist-pool": {1: 0.306, 2: 0.337, 5: 0.433, 10: 0.630},
    "sep-gist-pool": {1: 0.355, 2: 0.365, 5: 0.425, 10: 0.547},
    "offset-gist-pool": {1: 0.312, 2: 0.332, 5: 0.453, 10: 0.670},
}


class InPlaceStudy(Study):
    """Answering from a context that each method compresses in place."""

    name = "in-place"
    run_type = Run
    recipe_type: ClassVar[Any] = Recipe
    arm_type = Arm
    presets: ClassVar[Mapping[str, Any]] = PRESETS
    sizes = models.sizes(PRESETS)
    lists: ClassVar[Mapping[str, Names]] = {
        "methods": Names(
            METHODS + OTHER_METHODS, METHODS, "; gistpool-means is GistPool with gists that begin as means of their "
            f"windows, and there are {', '.join(OTHER_METHODS)}",
        ),
        "ratios": Names(NAMES_OF_RATIOS, NAMES_OF_RATIOS),
    }  # fmt: skip
    text = "text file to ask about"
    measured = "Held-out questions", "Questions that no choice was made on"
    train = staticmethod(train)

    def arms(self, options: argparse.Namespace, recipe: Any) -> Sequence[Arm]:
        return arms(options.methods, [int(ratio) for ratio in options.ratios])

    def about(self, recipe: Any, arms: Sequence[Arm], source: Any) -> str:
        return (
            f"Answering from contexts of {recipe.min_length} to {recipe.max_length} tokens, {len(arms)} arms of "
            f"{recipe.steps} steps of {recipe.batch}; text {source.name}, {source.digest}"
        )

    def order(self, run: Run) -> tuple[int, int]:
        return list(TITLES).index(run.method), run.ratio

    def rows(self, runs: Sequence[Run], recipe: Any, split: str = "test") -> Rows:
        kinds = [kind for kind in getattr(runs[0], split) if kind != "all"]
        columns: dict[str, Cell] = {
            "method": name_of(lambda arm: TITLES[arm.method]),
            "ratio": name_of(lambda arm: "-" if arm.method == "no" else f"{arm.ratio}x"),
        }
        for kind in ["all", *(kinds if len(kinds) > 1 else [])]:
            for figure in ("loss", "exact"):
                columns[figure if kind == "all" else f"{kind}: {figure}"] = of_split(split, kind, figure)
        columns["seeds"] = SEEDS
        paper = lambda arm: PAPER.get(arm.method, {}).get(arm.ratio)  # noqa: E731
        columns["paper: SQuAD loss"] = name_of(lambda arm: f"{loss:.3f}" if (loss := paper(arm)) else "-")
        return tabulate(self.by_arm(runs), columns)

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        report = super().report(runs, plan)
        if not any(run.examples for run in runs):
            return report
        return f"{report}\n\nHeld-out questions, as they were answered:\n{self.examples(runs)}"

    def examples(self, runs: Sequence[Run]) -> str:
        """The answers to one held-out question of each kind, as each method gives them at about 5x (first seed)."""
        arms = {arm: own[0] for arm, own in self.by_arm(runs).items() if own[0].examples}
        nearest = min((arm.ratio for arm in arms if arm.ratio > 1), key=lambda ratio: abs(ratio - 5), default=1)
        first = {arm.method: run for arm, run in arms.items() if arm.ratio in (1, nearest)}
        lines = []
        for index, example in enumerate(next(iter(first.values())).examples[:2]):
            lines.append(f"  {example['question'].strip()!r} -> {example['answer']!r}")
            lines += [f"  {TITLES[method]:>14}  {run.examples[index]['given']!r}" for method, run in first.items()]
        return "\n".join(lines)

    def captions(self, group: Sequence[SavedRun]) -> Sequence[str]:
        recipe = group[0].recipe
        return [
            f"{model_line(recipe)}; test split, on which nothing was chosen; {recipe.steps} steps of {recipe.batch} "
            f"contexts of {recipe.min_length} to {recipe.max_length} tokens. {machine_caption(group)}."
        ]

    def figures(self, runs: Sequence[Run], recipe: Any) -> Pictures:
        """Losses and exact answers against the ratio, and curves of the training."""
        arms = self.by_arm(runs)
        by_ratio: dict[str, dict[str, dict[int, list[float]]]] = {"loss": {}, "exact": {}}
        for arm, arm_runs in arms.items():
            for figure, methods in by_ratio.items():
                values = [run.held_out["all"][figure] for run in arm_runs]
                methods.setdefault(TITLES[arm.method], {})[arm.ratio] = values
        paper = {TITLES[name]: {ratio: [loss] for ratio, loss in PAPER.get(name, {}).items()} for name in TITLES}
        panels = {
            "held-out loss (nats a token)": by_ratio["loss"],
            "answers without a wrong token": by_ratio["exact"],
            "paper: loss on SQuAD, Gemma2 2B": {title: paper[title] for title in by_ratio["loss"] if paper[title]},
        }
        curves = {(TITLES[arm.method], arm.ratio): [run.curve for run in arm_runs] for arm, arm_runs in arms.items()}
        return {"ratios": draw_ratios(panels), "curves": draw_curves(curves)}


STYLE = {
    "No context": ("grey", ":", ""), "Full context": ("black", ":", ""), "Gist": ("red", "--", "s"),
    "OffsetGist": ("orange", "--", "D"), "SepOffsetGist": ("purple", "-.", "v"), "AvgPool": ("green", "-", "^"),
    "GistPool": ("blue", "-", "o"), "GistPool from means": ("sky", "-", "P"), "SepGist": ("red", "-.", "<"),
    "Gist with pool mask": ("red", "-", "s"), "SepGist with pool mask": ("purple", "-", "<"),
    "OffsetGist with pool mask": ("orange", "-", "D"), "ICAE": ("grey", "--", "x"),
    "SeparateEncoder": ("grey", "-", "x"), "500xCompressor": ("sky", "--", "p"), "SAC": ("sky", "-", "p"),
    "Dodo": ("purple", "--", "*"), "KV-Distill": ("purple", "-", "*"), "Beacon": ("red", ":", "h"),
}  # fmt: skip
# Methods without a ratio are level lines.
LEVEL = ("No context", "Full context")


def draw_ratios(panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> Figure:
    """A panel a figure: its mean over seeds against the ratio, a line a method, with bars from lowest to highest.

    `panels` are {name of the figure: {method: {ratio: the seeds' values}}}, methods as in `TITLES`.
    """
    from gistkit.viz.style import Picture, tidy
    from gistkit_lab.viz.lines import draw_bars, styles

    figure, style = Picture(figsize=(1.4 + 3.3 * len(panels), 3.9), layout="constrained"), styles(STYLE)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, methods) in zip(grid, panels.items(), strict=True):
        ratios = sorted({ratio for method, values in methods.items() if method not in LEVEL for ratio in values} or {1})
        for method, values in methods.items():
            if method in LEVEL:
                level = sum(values[1]) / len(values[1])
                axes.axhline(level, label=method, **{**style[method], "linewidth": 1.2})
            else:
                draw_bars(axes, values, label=method, markersize=5, linewidth=1.4, **style[method])
        axes.set(xlabel="compression ratio", xscale="log", ylim=(0, None))
        axes.set_xticks(ratios, [f"{ratio}x" for ratio in ratios], minor=False)
        axes.minorticks_off()
        axes.set_title(name, loc="left", fontsize=10)
        tidy(axes)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle("Answering from a compressed context", x=0.01, ha="left")
    return figure


def draw_curves(curves: Mapping[tuple[str, int], Sequence[Sequence[tuple[int, float, float]]]]) -> Figure:
    """A panel a ratio: held-out loss against training steps, a line a method, with a band from lowest to highest.

    `curves` are {(method, ratio): the seeds'}; methods without a ratio stand in every panel.
    """
    from gistkit.viz.style import Picture, tidy
    from gistkit_lab.viz.lines import draw_band, styles

    ratios = sorted({ratio for method, ratio in curves if method not in LEVEL} or {1})
    figure, style = Picture(figsize=(1.6 + 2.7 * len(ratios), 3.7), layout="constrained"), styles(STYLE)
    grid = figure.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
    lines: dict[str, Any] = {}
    # Before the first step losses may be so large that the others could not be told apart.
    later = [loss for seeds in curves.values() for curve in seeds for _, loss, _ in curve[1:] or curve]
    for axes, ratio in zip(grid, ratios, strict=True):
        for (method, arm_ratio), seeds in curves.items():
            if method in LEVEL or arm_ratio == ratio:
                lines[method] = draw_band(axes, seeds, alpha=0.15, markersize=4, linewidth=1.4, **style[method])
        axes.set(xlabel="training step", ylim=(0, 1.1 * max(later, default=1.0)))
        axes.set_title(f"{ratio}x", loc="left")
        tidy(axes)
    grid[0].set_ylabel("held-out loss (nats a token)")
    methods = [method for method in style if method in lines]
    figure.legend([lines[method] for method in methods], methods, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle("Learning to answer from a compressed context", x=0.01, ha="left")
    return figure


STUDY = InPlaceStudy()
