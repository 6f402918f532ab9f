"""Study `nuggets`: which tokens should stand for a text, and does learning to choose them pay?

Two tasks of the Dodo paper on one model: a context is reconstructed from its nuggets (Section 4), and a text is
continued from nuggets of its past and its recent tokens (Section 5, Table 1), beside other ways of keeping as many
states. All arms of a task have the same model, steps, batches and held-out text. The language model's scorer begins as
the reconstruction's ends (Section 2.2), and its threshold is found again as it changes.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, ClassVar

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from gistkit.compress import AvgPool, Compressive, Dodo, MixedResolution
from gistkit.compress.methods.in_place import InPlace
from gistkit.compress.reading.language import LanguageModel
from gistkit.evaluate import bleu4
from gistkit.evaluate.metrics import need
from gistkit.evaluate.report import format_table
from gistkit.hf import attach
from gistkit.hf.lora import lora_config
from gistkit.train.data import Corpus
from gistkit.train.stages import Stage, growing, selecting_at
from gistkit_lab.evaluate.reading import last_tokens
from gistkit_lab.studies import fitting, models
from gistkit_lab.studies.draws import generator_of, measured
from gistkit_lab.studies.fitting import Carried, Progress, Session, StudyRecipe, exclusively
from gistkit_lab.studies.pages import machine_caption, model_line
from gistkit_lab.studies.reconstruction import evaluate as reconstruct
from gistkit_lab.studies.rows import SEEDS, Rows, figure_of, name_of, of_split, spread, tabulate
from gistkit_lab.studies.study import Names, Pictures, SavedRun, Study, StudyPlan


@dataclass(frozen=True)
class Recipe(StudyRecipe):
    """Everything that determines a run except its arm and seed; adapters of rank `rank` train, and scorers.

    Args:
        model: "smollm2" (SmolLM2-135M), or "small" (a Llama of 0.6M parameters on bytes, trained before for
            `base_steps` steps as a language model; the arms of a seed share it).
        layer: whose hidden states are scored.
        context: tokens of a context that is reconstructed.
        length: tokens of a text for the language model; the loss of its last `asked` tokens is measured.
        lm_batch: rows of a step of the language model.
        ratio, tau, segment: of the language model; see `MixedResolution`.
        calibrate_every: steps between thresholds of the language model.
        random_steps, lower_ratios: the stages of a scorer that learns to reconstruct: steps with random nuggets, and
            ratios on the way to an arm's own; see `growing`.
        eval_texts: held-out contexts or texts at every evaluation.
        final_texts: held-out contexts or texts at the end, and as many test texts, on which no choice is based.
    """

    steps: int = 100
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.0
    eval_every: int = 25
    model: str = "smollm2"
    rank: int = 32
    base_steps: int = 0
    layer: int = 3
    context: int = 64
    length: int = 256
    asked: int = 32
    lm_batch: int = 2
    ratio: int = 8
    tau: int = 32
    segment: int = 8
    calibrate_every: int = 10
    random_steps: int = 0
    lower_ratios: tuple[int, ...] = ()
    eval_texts: int = 16
    final_texts: int = 96

    @property
    def budget(self) -> int:
        """Number of recent tokens equal to the average number of nuggets and recent tokens together."""
        recent = self.tau - (self.segment - 1) / 2
        return round(recent + (self.length - self.asked / 2 - recent) / self.ratio)

    def stages(self, arm: Arm) -> tuple[Stage, ...]:
        if (arm.task, arm.method) != ("ae", "learned"):
            return ()
        lower = [ratio for ratio in self.lower_ratios if ratio < arm.ratio]
        return growing(self.steps, self.random_steps, [*lower, arm.ratio])


PRESETS = {
    # A model trained from scratch: minutes for the base of a seed and for each of its arms.
    "quick": Recipe(
        model="small", steps=150, base_steps=900, batch=16, lm_batch=16, learning_rate=1e-3, rank=16, layer=1,
        context=80, length=192, asked=48, ratio=8, tau=16, segment=8, eval_every=50, eval_texts=64, final_texts=256,
    ),
    # Some minutes a run on two cores.
    "short": Recipe(),
    # The paper's sizes (320 compressed and 32 recent tokens; contexts of up to 512), for a GPU.
    "paper": Recipe(
        steps=20_000, batch=32, lm_batch=32, learning_rate=1e-4, warmup=2000, context=500, length=352, ratio=10, tau=40,
        segment=10, eval_every=500, eval_texts=128, final_texts=500,
    ),
}  # fmt: skip

SELECTIONS = ("learned", "strided", "random", "delimiters", "frozen")
# "full" reads everything, as a bound.
LM_ARMS = ("full", "sliding", "truncated", "none", "compressive", *SELECTIONS)
TASKS = ("ae", "lm")


@dataclass(frozen=True)
class Arm:
    """A task, a way of keeping states, and the compression ratio."""

    task: str
    method: str
    ratio: int

    @property
    def name(self) -> str:
        """Such as ae-learned-8x."""
        plain = self.method in ("full", "sliding", "truncated", "none")
        return f"{self.task}-{self.method}" + ("" if plain else f"-{self.ratio}x")


def arms(recipe: Recipe, tasks: Sequence[str], methods: Sequence[str], ratios: Sequence[int]) -> list[Arm]:
    """The arms of these methods: of reconstruction at each of the ratios, of the language model at the recipe's."""
    study_arms = []
    if "ae" in tasks:
        study_arms += [Arm("ae", method, ratio) for ratio in ratios for method in methods if method in SELECTIONS]
    if "lm" in tasks:
        study_arms += [Arm("lm", method, recipe.ratio) for method in methods if method in LM_ARMS]
    return study_arms


def build_compressor(recipe: Recipe, arm: Arm, model: PreTrainedModel) -> Dodo | AvgPool:
    """The untrained compressor of an arm around `model`."""
    lora = adapter(recipe, model)
    if arm.method == "compressive":
        return AvgPool(model, ratio=arm.ratio, pool="hidden", soft_prompt=True, lora=lora)
    options: dict[str, Any] = {"ratio": arm.ratio, "layer": recipe.layer, "lora": lora}
    if arm.method == "delimiters":
        options["delimiters"] = delimiters(recipe)
    if arm.method in ("learned", "frozen"):
        return Dodo(model, train_scorer=arm.method == "learned", **options)
    rule: Any = "none" if arm.method in ("full", "sliding", "truncated") else arm.method
    return Dodo(model, selection=rule, **options)


def build_reader(recipe: Recipe, arm: Arm, compressor: Dodo | AvgPool) -> LanguageModel:
    """The language model of an arm."""
    if isinstance(compressor, AvgPool):
        return Compressive(compressor, tau=recipe.tau, segment=recipe.segment)
    if arm.method in ("full", "truncated"):
        return MixedResolution(compressor, tau=recipe.length + 1, segment=1)
    if arm.method == "sliding":
        return MixedResolution(compressor, tau=recipe.budget, segment=1)
    return MixedResolution(compressor, tau=recipe.tau, segment=recipe.segment)


def adapter(recipe: Recipe, model: PreTrainedModel) -> LoraConfig:
    """The LoRA configuration of every arm: the paper's maps of a large model, and all maps of a small one."""
    return lora_config(model, recipe.rank, "query_key_value" if recipe.model == "smollm2" else "all")


def delimiters(recipe: Recipe) -> list[int]:
    """Tokens that end a clause: punctuation marks and line ends (Section 4.3)."""
    recipe_tokenizer = models.tokenizer(recipe)
    if recipe_tokenizer is None:
        return sorted(b".,;:!?\n")
    ends = re.compile(r"[.,;:!?)\"']*[.,;:!?][\"')]*\s*|\s*\n\s*")
    return [token for token in range(len(recipe_tokenizer)) if ends.fullmatch(recipe_tokenizer.decode([token]))]


def fresh_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    """A copy of the pretrained model, or a small one with the random weights of a seed."""
    return models.fresh_model(recipe, seed, initializer_range=0.05, rope_theta=1e4)


@dataclass
class Run(fitting.Run):
    """`held_out` and `test` hold of reconstruction "loss", "accuracy" and, the second, "bleu", of the language model
    "loss" and "states", how many states a layer keeps for an asked token, on average; `curve` the first two.

    `chosen` tells what was selected: "rate", "threshold", "types" [(token, times selected, times there)] of the most
    frequent, and "text" [(token, score, selected)] of one held-out text.
    """

    task: str
    method: str
    ratio: int
    chosen: dict[str, Any] = field(default_factory=dict)


class TextPassages:
    """Passages of a corpus: training ones by seed and step, and two held-out splits (`Corpus.splits`).

    `rows` a step and at most `count` a split, of so many tokens; `stride` is from one held-out passage to the next,
    which are the tokens asked for, so that each is asked for once.
    """

    def __init__(self, corpus: Corpus, length: int, rows: int, seed: int, count: int, stride: int) -> None:
        self.corpus, self.length, self.rows, self.seed = corpus, length, rows, seed
        splits = measured(corpus, length).items()
        self.splits = {name: split.chunks(length, stride=stride, count=count) for name, split in splits}

    def __call__(self, step: int) -> Tensor:
        """int64 [rows, length], the passages of step 0, 1, ..."""
        return self.corpus.batch(self.rows, self.length, generator_of(self.seed, step))


def continue_texts(
    reader: LanguageModel, recipe: Recipe, arm: Arm, texts: Tensor, batch: int = 8
) -> tuple[float, float]:
    """Loss of the last `asked` tokens of texts [n, length], and the mean number of states kept for each of them."""
    if arm.method != "truncated":
        return last_tokens(reader, texts, recipe.asked, batch_size=batch)[:2]
    # A text that is cut to its last tokens is read again for every block, so that no layer sees further.
    before = recipe.budget - recipe.segment // 2
    loss = states = 0.0
    for first in range(recipe.length - recipe.asked, recipe.length, recipe.segment):
        count = min(recipe.segment, recipe.length - first)
        block = last_tokens(reader, texts[:, first - before : first + count], count, batch_size=batch)
        loss, states = loss + block[0] * count, states + block[1] * count
    return loss / recipe.asked, states / recipe.asked


def train(session: Session) -> Run:
    """Trains and measures one arm and seed.

    The seed's runs share their first model, if one is trained; a language model's scorer comes from the run that
    learned to reconstruct, which is made if it is not there yet.
    """
    arm, compressor = session.arm, _fresh(session)
    if arm.task == "ae":
        with exclusively(session.out / f"{arm.name}-{session.seed}.lock"):
            return _train_reconstruction(session, compressor)
    if arm.method == "learned" and isinstance(compressor, Dodo):
        source = replace(session, arm=Arm("ae", "learned", arm.ratio))
        teacher = _fresh(source)
        with source.shared(source.arm, final_texts=session.recipe.eval_texts) as shared:
            _train_reconstruction(shared, teacher)
        if compressor.scorer is not None and isinstance(teacher, Dodo) and teacher.scorer is not None:
            compressor.scorer.load_state_dict(teacher.scorer.state_dict())
    return _train_reader(session, compressor)


def _fresh(session: Session) -> Any:
    """The untrained compressor of an arm and seed, around a copy of the seed's model."""
    model = _base(session)
    torch.manual_seed(session.seed)
    return build_compressor(session.recipe, session.arm, model).to(session.device)


def _passages(session: Session, *sizes: int) -> tuple[TextPassages, dict[str, Tensor]]:
    """Texts of a length, so many a step, as many measured, at this distance; and those of the splits on the device."""
    length, rows, count, stride = sizes
    texts = TextPassages(session.source, length, rows, session.seed, count, stride)
    return texts, {name: part.to(session.device) for name, part in texts.splits.items()}


def _train_reconstruction(session: Session, compressor: InPlace) -> Run:
    recipe, corpus, device = session.recipe, session.source, session.device
    texts, splits = _passages(session, recipe.context, recipe.batch, recipe.final_texts, recipe.context)
    stages = recipe.stages(session.arm)

    def loss(step: int) -> Tensor:
        with selecting_at(compressor, stages, step):
            return compressor(texts(step).to(device))["loss"]

    progress = _fit(
        session, compressor, loss, lambda: reconstruct(compressor, splits["held_out"][: recipe.eval_texts], batch=16)
    )
    with attach(compressor.model):
        figures = lambda split: _named("accuracy", reconstruct(compressor, splits[split], batch=16))  # noqa: E731
        run: Run = session.run(Run, vars(session.arm), progress, compressor.trainable(), figures)
        written: list[str] = []
        for rows in splits["test"].split(16):
            answer = compressor.generate(
                compressor.encode(rows), task="ae", max_new_tokens=rows.shape[1], stop_tokens=()
            )
            written += [corpus.text(row) for row in answer.cpu()]
        run.test["bleu"] = bleu4(written, [corpus.text(row) for row in splits["test"].cpu()])
        if isinstance(compressor, Dodo) and compressor.selection != "none":
            input_rows = compressor.with_bos(compressor.contexts(splits["held_out"]))
            scores = compressor.whole_scores(input_rows)
            is_nugget = torch.zeros_like(scores, dtype=torch.bool)
            is_nugget.scatter_(1, compressor.nuggets(input_rows, scores).index, True)
            run.chosen = _description(corpus, input_rows.ids[:, 1:], scores[:, 1:], is_nugget[:, 1:])
    return run


def _named(second: str, figures: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("loss", second), figures, strict=True))


def _train_reader(session: Session, compressor: Any) -> Run:
    recipe, arm, corpus, device = session.recipe, session.arm, session.source, session.device
    reader = build_reader(recipe, arm, compressor)
    texts, splits = _passages(session, recipe.length, recipe.lm_batch, recipe.final_texts, recipe.asked)
    mixed = reader if isinstance(reader, MixedResolution) else None
    scored = mixed if arm.method in ("learned", "frozen", "delimiters") else None

    def calibrate(step: int, batches: int = 2) -> None:
        if scored is not None:
            # Training texts that no step uses.
            scored.calibrate([texts(1_000_000 + batches * step + at).to(device) for at in range(batches)])

    def loss(step: int) -> Tensor:
        if step % recipe.calibrate_every == 0:
            calibrate(step)
        return reader(_pieces(recipe, arm, texts(step)).to(device))["loss"]

    def evaluate() -> tuple[float, float]:
        calibrate(0, 8)
        return continue_texts(reader, recipe, arm, splits["held_out"][: recipe.eval_texts])

    threshold = Carried(lambda: compressor.threshold, lambda value: setattr(compressor, "threshold", value))
    carried = None if scored is None else threshold
    progress = _fit(session, compressor, loss, evaluate, carried)
    with attach(compressor.model):
        calibrate(0, 16)
        figures = lambda split: _named("states", continue_texts(reader, recipe, arm, splits[split]))  # noqa: E731
        run: Run = session.run(Run, vars(arm), progress, compressor.trainable(), figures)
        if mixed is not None and compressor.selection != "none":
            input_rows = mixed.rows(splits["held_out"])
            with torch.no_grad():
                scores = mixed.scores(input_rows)
            run.chosen = _description(
                corpus, input_rows.ids[:, 1:], scores[:, 1:], mixed.nuggets(input_rows, scores)[:, 1:]
            )
            run.chosen["threshold"] = compressor.threshold
    return run


def _pieces(recipe: Recipe, arm: Arm, texts: Tensor) -> Tensor:
    """Texts as an arm is trained on them: those that are read cut are cut, as many tokens in all."""
    if arm.method != "truncated":
        return texts
    length = recipe.budget + recipe.segment // 2
    count = recipe.length // length
    return texts[:, : count * length].unflatten(1, (count, length)).flatten(0, 1)


def _fit(session: Session, compressor: Any, loss: Any, figures: Any, carried: Carried | None = None) -> Progress:
    # Each run has its own seed, so that dropout, where a model has it, is the same for all arms.
    torch.manual_seed(session.seed)
    identity = session.decides("final_texts", corpus=session.source.digest)
    return session.fit(compressor, loss, figures, identity, carried=carried)


def _base(session: Session) -> PreTrainedModel:
    """The model that the arms of a seed start from; each gets its own copy."""
    recipe, device = session.recipe, session.device
    model = fresh_model(recipe, session.seed)
    if not recipe.base_steps:
        return model
    compressor = Dodo(model, ratio=1, selection="none", layer=recipe.layer, lora=None, separate=False).to(device)
    arm = Arm("lm", "full", 1)
    reader = build_reader(recipe, arm, compressor)
    texts, splits = _passages(session, recipe.length, recipe.lm_batch, recipe.eval_texts, recipe.asked)
    with session.shared("base", steps=recipe.base_steps, base_steps=0, weight_decay=0.1) as shared:
        _fit(
            shared, compressor, lambda step: reader(texts(step).to(device))["loss"],
            lambda: continue_texts(reader, recipe, arm, splits["held_out"]),
        )  # fmt: skip
    return model


def _description(corpus: Corpus, ids: Tensor, scores: Tensor, is_nugget: Tensor) -> dict[str, Any]:
    """What was selected of texts [n, N]: the rate, the most frequent types, and the first text."""
    occurrences, selected = Counter(ids.flatten().tolist()), Counter(ids[is_nugget].tolist())
    piece = lambda token: corpus.text(torch.tensor([token]))  # noqa: E731
    first = zip(ids[0].tolist(), scores[0].tolist(), is_nugget[0].tolist(), strict=True)
    return {
        "rate": float(is_nugget.float().mean()),
        "types": [(piece(token), count, occurrences[token]) for token, count in selected.most_common(24)],
        "selected": sum(selected.values()),
        "tokens": ids.numel(),
        "text": [(piece(token), round(score, 4), nugget) for token, score, nugget in first],
    }


TITLES = {
    "full": "Full (all)",
    "sliding": "Full (sliding)",
    "truncated": "Full (truncated)",
    "none": "No nuggets",
    "compressive": "Compressive",
    "learned": "Dodo learned",
    "strided": "Dodo strided",
    "random": "Dodo random",
    "delimiters": "Dodo delimiters",
    "frozen": "Dodo frozen scorer",
}
# Dodo, Table 1: perplexity a subword on WikiText-103 at 64, 128 and 256 states, Llama-2 7B, 10x.
PAPER_LM = {"truncated": (7.95, 6.87, 6.39), "compressive": (7.64, 7.09, 6.88), "learned": (6.91, 6.58, 6.30)}

# Section 4.2, LLaMA-7B.
PAPER_BLEU = {"learned": "near 98 at 20x"}

PAPER = (
    "The paper's perplexity is of WikiText-103, Llama-2 7B, 10x (Dodo, Table 1); its reconstruction is LLaMA-7B's "
    "(Section 4.2).\nThere ten token types, mostly those that end a clause, are 95% of the nuggets."
)


class NuggetsStudy(Study):
    """Learned nuggets beside other ways of keeping as many states."""

    name = "nuggets"
    run_type = Run
    recipe_type = Recipe
    arm_type = Arm
    presets = PRESETS
    sizes = models.sizes(PRESETS, ", at the paper's sizes")
    lists: ClassVar[Mapping[str, Names]] = {
        "tasks": Names(TASKS, TASKS, "; ae: reconstruct a context; lm: read on"),
        "methods": Names(LM_ARMS, LM_ARMS),
        "ratios": Names(("2", "4", "8", "10", "16", "20"), ("4", "8"), ", of ae"),
    }
    text = "text file to train on"
    changes: ClassVar[Mapping[str, str]] = {
        "random_steps": "steps of ae with random nuggets before the scorer learns (default: 0)",
        "lower_ratios": "ratios of ae on the way to the arm's, as with gistkit train --ratios (default: none)",
    }
    train = staticmethod(train)
    tokenizer = staticmethod(models.tokenizer)

    def arms(self, options: argparse.Namespace, recipe: Recipe) -> Sequence[Arm]:
        need("sacrebleu")
        study_arms = arms(recipe, options.tasks, options.methods, [int(ratio) for ratio in options.ratios])
        if not study_arms:
            raise ValueError(f"--methods: expected some of {', '.join(SELECTIONS)} for the task ae, got others")
        for arm in study_arms:
            # Stages that do not fit the steps are a mistake before the first run.
            recipe.stages(arm)
        return study_arms

    def about(self, recipe: Recipe, arms: Sequence[Arm], source: Corpus) -> str:
        return (
            f"Nuggets of contexts of {recipe.context} and texts of {recipe.length} {source.unit}, {len(arms)} arms of "
            f"{recipe.steps} steps; text {source.name}, {source.digest}"
        )

    def order(self, run: Run) -> tuple[int, int]:
        return run.ratio, (SELECTIONS if run.task == "ae" else LM_ARMS).index(run.method)

    def of_task(self, runs: Sequence[Run], task: str) -> dict[Arm, list[Run]]:
        """The runs of each arm of a task, in the order of ratios and methods."""
        return self.by_arm([run for run in runs if run.task == task])

    def rows(self, runs: Sequence[Run], recipe: Recipe, split: str = "test") -> Rows:
        """Of the language model: measured states and perplexity."""

        def nuggets(arm: Arm, runs: Sequence[Run]) -> str:
            rate = [run.chosen["rate"] for run in runs if run.chosen]
            return spread(rate) if rate else "-"

        perplexity = lambda split: figure_of(lambda run: math.exp(getattr(run, split)["loss"]), "{:.2f}")  # noqa: E731
        paper = lambda arm: " / ".join(f"{value:.2f}" for value in PAPER_LM.get(arm.method, ())) or "-"  # noqa: E731
        return tabulate(
            self.of_task(runs, "lm"),
            {
                "states kept": name_of(lambda arm: TITLES[arm.method]),
                "held-out states": of_split("held_out", "states", form="{:.1f}"),
                "held-out perplexity": perplexity("held_out"),
                "test states": of_split("test", "states", form="{:.1f}"),
                "test perplexity": perplexity("test"),
                "nuggets": nuggets,
                "seeds": SEEDS,
                "paper: at 64 / 128 / 256 states": name_of(paper),
            },
        )

    def more_rows(self, runs: Sequence[Run], recipe: Recipe) -> Sequence[Rows]:
        """Of the arms that reconstruct."""
        columns = {
            "selection": name_of(lambda arm: TITLES[arm.method]),
            "ratio": name_of(lambda arm: f"{arm.ratio}x"),
            "held-out loss": of_split("held_out", "loss"),
            "test loss": of_split("test", "loss"),
            "token accuracy": of_split("test", "accuracy"),
            "BLEU-4": of_split("test", "bleu", form="{:.1f}"),
            "nuggets": figure_of(lambda run: run.chosen.get("rate", math.nan)),
            "seeds": SEEDS,
            "paper: BLEU": name_of(lambda arm: PAPER_BLEU.get(arm.method, "-")),
        }
        return [tabulate(self.of_task(runs, "ae"), columns)]

    def type_rows(self, runs: Sequence[Run], task: str) -> Rows:
        """Header and the token types that the learned scorer selects most (first seed, highest ratio)."""
        run = self._learned(runs, task)
        rows = [["token", "share of nuggets", "share of text"]]
        if run is not None:
            selected, tokens = run.chosen["selected"], run.chosen["tokens"]
            for token, times, occurrences in run.chosen["types"][:10]:
                rows.append([repr(token), f"{times / max(selected, 1):.3f}", f"{occurrences / tokens:.3f}"])
        return rows

    def _learned(self, runs: Sequence[Run], task: str) -> Run | None:
        learned = [of_arm[0] for arm, of_arm in self.of_task(runs, task).items() if arm.method == "learned"]
        return learned[-1] if learned else None

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        tables = {
            "A context, reconstructed from its nuggets": self.more_rows(runs, plan.recipe)[0],
            "A text, continued from as many states": self.rows(runs, plan.recipe),
            "What the scorer that learned to reconstruct selects": self.type_rows(runs, "ae"),
            "What the scorer that learned to read on selects": self.type_rows(runs, "lm"),
        }
        parts = [f"{title}:\n{format_table(rows)}" for title, rows in tables.items() if len(rows) > 1]
        return "\n\n".join([*parts, PAPER])

    def captions(self, group: Sequence[SavedRun]) -> Sequence[str]:
        recipe = group[0].recipe
        texts = f"{recipe.lm_batch} texts of {recipe.length} tokens, of which the last {recipe.asked} are asked for"
        contexts = f"{recipe.batch} contexts of {recipe.context} tokens"
        caption = f"{model_line(recipe)}, {recipe.steps} steps of {{}}. {machine_caption(group)}."
        return [caption.format(texts), caption.format(contexts)]

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Pictures:
        """Perplexity by states, and of the learned scorer the token types and a text."""
        from gistkit_lab.viz import draw_perplexity, draw_text, draw_token_types

        pictures: dict[str, Any] = {}
        series = {
            TITLES[arm.method]: [(mean(run.test["states"] for run in group), [math.exp(x.test["loss"]) for x in group])]
            for arm, group in self.of_task(runs, "lm").items()
            if arm.method != "full"
        }
        if series:
            pictures["perplexity"] = draw_perplexity(series, title="Perplexity of test text by states kept a layer")
        for task, purpose in (("ae", "to reconstruct"), ("lm", "to read on")):
            learned = self._learned(runs, task)
            if learned is not None and learned.chosen.get("types"):
                selected, tokens = learned.chosen["selected"], learned.chosen["tokens"]
                types = [(token, times / selected, found / tokens) for token, times, found in learned.chosen["types"]]
                title = f"Nuggets learned {purpose}, {learned.ratio}x"
                pictures[f"{task}-types"] = draw_token_types(types, title=title)
                pieces, scores, is_nugget = zip(*learned.chosen["text"], strict=True)
                pictures[f"{task}-text"] = draw_text(pieces, scores, is_nugget, title=title)
        return pictures


STUDY = NuggetsStudy()
