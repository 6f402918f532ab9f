"""Runs of the study `nuggets`: trains and measures one arm and seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gistkit.compress import Dodo, MixedResolution
from gistkit.compress.methods.in_place import InPlace
from gistkit.compress.reading.language import LanguageModel
from gistkit.evaluate import bleu4
from gistkit.hf import attach
from gistkit.train.data import Corpus
from gistkit.train.stages import selecting_at
from gistkit_lab.evaluate.reading import last_tokens
from gistkit_lab.studies.fitting import Carried, Progress, exclusively, fit
from gistkit_lab.studies.nuggets.study import Arm, Recipe, build_compressor, build_reader, fresh_model
from gistkit_lab.studies.reconstruction import evaluate as reconstruct


@dataclass
class Run:
    """The results of one arm and seed; losses in nats a token.

    `held_out` and `test` hold the figures of the trained model: of reconstruction "loss", "accuracy" and "bleu", of the
    language model "loss" and "states", how many states a layer keeps for an asked token, on average. The test texts
    are read once, at the end. `curve` holds (step, loss, the second figure) over held-out texts.

    `chosen` tells what was selected: "rate", "threshold", "types" [(token, times selected, times there)] of the most
    frequent, and "text" [(token, score, selected)] of one held-out text.
    """

    task: str
    method: str
    ratio: int
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)


class TextPassages:
    """Passages of a corpus: training ones by seed and step, and two held-out splits (`Corpus.splits`).

    Args:
        corpus: where they come from.
        length: tokens of each.
        rows: of a step.
        seed: of the training passages.
        count: passages of each held-out split, fewer where the corpus has not so many.
        stride: tokens from one of these to the next; those asked for, so that each token is asked for once.
    """

    def __init__(self, corpus: Corpus, length: int, rows: int, seed: int, count: int, stride: int) -> None:
        self.corpus, self.length, self.rows, self.seed = corpus, length, rows, seed
        self.splits = {}
        for name, part in corpus.splits().items():
            if len(part) < length:
                raise ValueError(
                    f"corpus: expected at least {length} {corpus.unit} in the split {name!r}, got {len(part)}"
                )
            self.splits[name] = replace(corpus, held_out=part).chunks(length, stride=stride, count=count)

    def __call__(self, step: int) -> Tensor:
        """int64 [rows, length], the passages of step 0, 1, ..."""
        generator = torch.Generator().manual_seed(100_003 * (self.seed + 1) + step)
        return self.corpus.batch(self.rows, self.length, generator)


def continue_texts(
    reader: LanguageModel, recipe: Recipe, arm: Arm, texts: Tensor, batch: int = 8
) -> tuple[float, float]:
    """Loss of the last `asked` tokens of texts [n, length], and the mean number of states kept for each of them."""
    asked = recipe.asked
    if arm.method == "truncated":
        # A text that is cut to its last tokens is read again for every block, so that no layer sees further.
        before, asked = recipe.budget - recipe.segment // 2, recipe.segment
        ends = range(recipe.length - recipe.asked + asked, recipe.length + 1, asked)
        texts = torch.cat([texts[:, end - asked - before : end] for end in ends])
    return last_tokens(reader, texts, asked, batch_size=batch)[:2]


def train(
    recipe: Recipe,
    arm: Arm,
    seed: int,
    corpus: Corpus,
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    bar: Any,
) -> Run:
    """Trains and measures one arm and seed; `out` gets its state at every evaluation, from which it can resume.

    `out` also gets the seed's base model, if there is one, and the reconstruction run that a scorer comes from.
    """
    model = _base(recipe, seed, corpus, out, device, bar)
    torch.manual_seed(seed)
    compressor = build_compressor(recipe, arm, model).to(device)
    run = Run(arm.task, arm.method, arm.ratio, seed)
    run.parameters = sum(parameter.numel() for _, parameter in compressor.trainable())
    if arm.task == "ae":
        with exclusively(out / f"{arm.name}-{seed}.lock"):
            _train_reconstruction(recipe, arm, seed, corpus, out, compressor, run, device, resume, bar)
    else:
        if arm.method == "learned" and isinstance(compressor, Dodo):
            _take_scorer(recipe, arm, seed, corpus, out, compressor, device, bar)
        _train_reader(recipe, arm, seed, corpus, out, compressor, run, device, resume, bar)
    return run


def _train_reconstruction(
    recipe: Recipe, arm: Arm, seed: int, corpus: Corpus, out: Path, compressor: InPlace, run: Run, device: str,
    resume: bool, bar: Any,
) -> None:  # fmt: skip
    texts = TextPassages(corpus, recipe.context, recipe.batch, seed, recipe.final_texts, recipe.context)
    splits = {name: rows.to(device) for name, rows in texts.splits.items()}
    stages = recipe.stages(arm)

    def loss(step: int) -> Tensor:
        with selecting_at(compressor, stages, step):
            return compressor(texts(step).to(device))["loss"]

    progress = _fit(
        recipe, arm.name, seed, corpus, compressor, loss,
        lambda: reconstruct(compressor, splits["held_out"][: recipe.eval_texts], batch=16), out, resume, bar,
    )  # fmt: skip
    run.curve, run.seconds = progress.curve, progress.seconds
    compressor.eval()
    with attach(compressor.model):
        for name, figures in (("held_out", run.held_out), ("test", run.test)):
            figures["loss"], figures["accuracy"] = reconstruct(compressor, splits[name], batch=16)
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


def _train_reader(
    recipe: Recipe, arm: Arm, seed: int, corpus: Corpus, out: Path, compressor: Any, run: Run, device: str,
    resume: bool, bar: Any,
) -> None:  # fmt: skip
    reader = build_reader(recipe, arm, compressor)
    texts = TextPassages(corpus, recipe.length, recipe.lm_batch, seed, recipe.final_texts, recipe.asked)
    splits = {name: rows.to(device) for name, rows in texts.splits.items()}
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

    def resume_threshold(value: float) -> None:
        compressor.threshold = value

    carried = None if scored is None else Carried(lambda: compressor.threshold, resume_threshold)
    progress = _fit(recipe, arm.name, seed, corpus, compressor, loss, evaluate, out, resume, bar, carried)
    run.curve, run.seconds = progress.curve, progress.seconds
    compressor.eval()
    with attach(compressor.model):
        calibrate(0, 16)
        for name, figures in (("held_out", run.held_out), ("test", run.test)):
            figures["loss"], figures["states"] = continue_texts(reader, recipe, arm, splits[name])
        if mixed is not None and compressor.selection != "none":
            input_rows = mixed.rows(splits["held_out"])
            with torch.no_grad():
                scores = mixed.scores(input_rows)
            run.chosen = _description(
                corpus, input_rows.ids[:, 1:], scores[:, 1:], mixed.nuggets(input_rows, scores)[:, 1:]
            )
            run.chosen["threshold"] = compressor.threshold


def _pieces(recipe: Recipe, arm: Arm, texts: Tensor) -> Tensor:
    """Texts as an arm is trained on them: those that are read cut are cut, as many tokens in all."""
    if arm.method != "truncated":
        return texts
    length = recipe.budget + recipe.segment // 2
    count = recipe.length // length
    return texts[:, : count * length].unflatten(1, (count, length)).flatten(0, 1)


def _take_scorer(
    recipe: Recipe, arm: Arm, seed: int, corpus: Corpus, out: Path, compressor: Dodo, device: str, bar: Any
) -> None:
    """Gives the language model the scorer that learned to reconstruct, after training that if it does not exist yet."""
    source = Arm("ae", "learned", arm.ratio)
    model = _base(recipe, seed, corpus, out, device, bar)
    torch.manual_seed(seed)
    teacher = build_compressor(recipe, source, model).to(device)
    with exclusively(out / f"{source.name}-{seed}.lock"):
        _train_reconstruction(
            replace(recipe, final_texts=recipe.eval_texts), source, seed, corpus, out, teacher, Run("ae", "", 1, seed),
            device, True, bar,
        )  # fmt: skip
    if compressor.scorer is not None and isinstance(teacher, Dodo) and teacher.scorer is not None:
        compressor.scorer.load_state_dict(teacher.scorer.state_dict())


def _fit(
    recipe: Recipe, name: str, seed: int, corpus: Corpus, compressor: Any, loss: Any, figures: Any, out: Path,
    resume: bool, bar: Any, carried: Carried | None = None,
) -> Progress:  # fmt: skip
    def trained(step: int) -> Tensor:
        compressor.train()
        value: Tensor = loss(step)
        return value

    def measured() -> tuple[float, float]:
        compressor.eval()
        values: tuple[float, float] = figures()
        return values

    # The measurements at the end do not determine a run.
    decides = {key: value for key, value in asdict(recipe).items() if key != "final_texts"}
    identity = {"recipe": decides, "corpus": corpus.digest, "arm": name, "seed": seed}
    # Each run has its own seed, so that dropout, where a model has it, is the same for all arms.
    torch.manual_seed(seed)
    return fit(
        recipe, compressor, trained, measured, out / f"{name}-{seed}", identity, resume=resume, bar=bar,
        carried=carried,
    )  # fmt: skip


def _base(recipe: Recipe, seed: int, corpus: Corpus, out: Path, device: str, bar: Any) -> PreTrainedModel:
    """The model that the arms of a seed start from; each gets its own copy."""
    model = fresh_model(recipe, seed)
    if not recipe.base_steps:
        return model
    schedule = replace(recipe, steps=recipe.base_steps, eval_every=recipe.base_steps, base_steps=0, weight_decay=0.1)
    compressor = Dodo(model, ratio=1, selection="none", layer=recipe.layer, lora=None, separate=False).to(device)
    arm = Arm("lm", "full", 1)
    reader = build_reader(schedule, arm, compressor)
    texts = TextPassages(corpus, recipe.length, recipe.lm_batch, seed, recipe.eval_texts, recipe.asked)
    held_out = texts.splits["held_out"].to(device)
    with exclusively(out / f"base-{seed}.lock"):
        _fit(
            schedule, "base", seed, corpus, compressor, lambda step: reader(texts(step).to(device))["loss"],
            lambda: continue_texts(reader, schedule, arm, held_out), out, True, bar,
        )  # fmt: skip
    return model


def _description(corpus: Corpus, ids: Tensor, scores: Tensor, is_nugget: Tensor, most: int = 24) -> dict[str, Any]:
    """What was selected of texts [n, N]: the rate, the most frequent types, and the first text."""
    occurrences, selected = Counter(ids.flatten().tolist()), Counter(ids[is_nugget].tolist())
    piece = lambda token: corpus.text(torch.tensor([token]))  # noqa: E731
    first = zip(ids[0].tolist(), scores[0].tolist(), is_nugget[0].tolist(), strict=True)
    return {
        "rate": float(is_nugget.float().mean()),
        "types": [(piece(token), count, occurrences[token]) for token, count in selected.most_common(most)],
        "selected": sum(selected.values()),
        "tokens": ids.numel(),
        "text": [(piece(token), round(score, 4), nugget) for token, score, nugget in first],
    }
