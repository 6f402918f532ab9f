"""run: a whole training run from plain arguments, as on the command line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from gistkit.common.messages import refuse
from gistkit.common.processes import launched
from gistkit.compress import Compressor, Dodo, VoCo, language_model
from gistkit.evaluate import Example, iter_questions
from gistkit.formats import question_sets
from gistkit.train.batches import Batches, Packed, Pretraining
from gistkit.train.conversations import ConversationQuestions, load_conversations
from gistkit.train.data import CACHE, Corpus, load_corpus
from gistkit.train.documents import Table, name_of
from gistkit.train.images import ImageQuestions
from gistkit.train.mixture import Mixture
from gistkit.train.prepare import prepare
from gistkit.train.questions import QuestionAnswering
from gistkit.train.recipe import Recipe
from gistkit.train.stages import Stage, growing
from gistkit.train.trainer import Result, Trainer
from gistkit.train.windows import Windows

Questions = str | Path | Table


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    out: str | Path,
    *,
    preset: str = "epl-pretrain",
    method: str | None = None,
    layout: str | None = None,
    recipe: Mapping[str, Any] | None = None,
    compressor: Mapping[str, Any] | None = None,
    start: str | Path | None = None,
    baseline: str | None = None,
    text: str | Path | None = None,
    dataset: str | Table | Mapping[str, Table] | None = None,
    packed: bool = False,
    longer_than: int | None = None,
    questions: Questions | Sequence[Questions] | None = None,
    split: str = "train",
    validation: Questions | Sequence[Questions] | None = None,
    weights: Sequence[float] | None = None,
    images: str | Path | None = None,
    limit: int | None = None,
    tau: int | None = None,
    segment: int | None = None,
    random_steps: int = 0,
    ratios: Sequence[int] = (),
    scorer_rests: bool = False,
    resume: bool = False,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Makes a compressor around `model`, trains it and saves it to `out`/compressor.

    Args:
        model: the base model; it gets the compressor's adapter.
        tokenizer: of the model; None: bytes. With `images`, the processor of a vision-language model.
        out: folder of the run.
        preset: the defaults of the recipe, the method and its arguments, of `gistkit.train.PRESETS`: a paper's
            experiment, such as "epl-pretrain" or "dodo-ae", or "smollm2-small".
        method: of `gistkit.compress.METHODS`, such as "x500" (500xCompressor), "icae" or "gistpool"; None: the
            preset's.
        layout: position layout of a method that has them, "dpl", "upl", "cpl" or "epl" (the default).
        recipe: changes to the preset's `Recipe`, by field, such as {"steps": 1000, "learning_rate": 3e-4}; steps take
            the place of its epochs.
        compressor: changes to the preset's arguments of the method, such as {"chunk": 128, "losses": ("ae",)};
            arguments of the preset that the method does not have are ignored. A "lora" may be the keyword arguments of
            a peft.LoraConfig.
        start: folder of a trained compressor to continue from; it determines method, layout and settings, except for
            the losses and the window.
        baseline: "none" or "full": instead of a compressor, the task tokens of the plain model that reads nothing of
            the context or all of it (`gistkit.evaluate.NoContext` and `FullContext`), as Position IDs Matter trains its
            baselines.
        text, dataset, limit: the corpus, see `load_corpus`; the standard library's documentation by default.
        packed: whether the corpus is cut into rows of the recipe's max_length, see `Packed`; False: `Pretraining`.
        longer_than: instead of that, one passage of the recipe's max_length from each document of more characters,
            see `Windows`; 0: from none, passages are at random places of the joined text. None: the preset's, if it has
            any, and the rows are neither packed nor of questions.
        questions: files or folders for the losses "qa", "kl", "reverse_kl" and "hidden", see
            `gistkit.evaluate.load_questions`, or their rows, such as a `datasets.Dataset` or `IterableDataset`; in
            place of a corpus. Several sets are one mixture.
        split: "train", "validation" or "test", of folders and names of questions that have several.
        validation: files, folders or rows of questions that are held out; their split "validation", where they have
            several. None: the last tenth of the contexts of each set.
        weights: the shares of several sets of questions, in their order, see `Mixture`; None: as many rows as each has.
        tau, segment: of the language model that reads with a compressor of the method, "dodo" or "avgpool", see
            `gistkit.compress.READERS`; it is trained to read on, instead of the losses. None: the preset's, if it has
            any. segment None: its default.
        random_steps, ratios, scorer_rests: stages of a "dodo" whose scorer learns, see `growing`: the steps with random
            nuggets, the ratios after them, the last of which is the compressor's, and whether the scorer rests at that
            one. They follow from the number of steps, so a resumed run has the same one.
        resume: whether to continue from the last checkpoint in `out`.
        progress: whether to show progress bars.
        options: keyword arguments of `Trainer`: accumulate, precision, cpu, gradient_checkpointing, eval_every,
            held_out, save_every, save_minutes, keep, track, callbacks, measure.

    Raises:
        ValueError, FileNotFoundError, ImportError: naming the argument, what was expected and what came.
    """
    sources, held_out_sources = _several("questions", questions), _several("validation", validation)
    asked = ", ".join(map(name_of, sources)) or None
    if packed:
        refuse("with packed rows", {"longer_than": longer_than or None})
    if asked is not None:
        table = None if dataset is None else name_of(dataset)
        of_text = {"text": text, "dataset": table, "packed": packed, "longer_than": longer_than, "limit": limit}
        refuse("with questions", {name: value or None for name, value in of_text.items()})
    if asked is None or images is not None:
        held_out = ", ".join(map(name_of, held_out_sources)) or None
        chosen = None if split == "train" else split
        refuse("without questions about texts", {"validation": held_out, "weights": weights, "split": chosen})
    made = prepare(
        model, tokenizer, preset=preset, method=method, layout=layout, recipe=recipe, compressor=compressor,
        start=start, baseline=baseline, tau=tau, segment=segment, questions=asked, images=images is not None,
    )  # fmt: skip
    schedule, new_compressor = made.recipe, made.compressor
    if isinstance(new_compressor, VoCo) != (images is not None):
        wanted = "a folder for voco" if images is None else f"none for {new_compressor.method}"
        raise ValueError(f"images: expected {wanted}, got {images}")
    if model.dtype == torch.float16:
        lost = "training has no loss scaling, so that small gradients become 0; bfloat16 keeps them"
        warnings.warn(f"dtype float16: {lost}", stacklevel=2)
    # Before the data is read, which may take long and may determine the steps.
    _stages(new_compressor, schedule.steps, random_steps, ratios, scorer_rests)
    trained = new_compressor if made.tau is None else language_model(new_compressor, made.tau, made.segment)
    # One progress bar for all processes.
    progress = progress and launched().local == 0
    batches: Batches
    if asked is None:
        cache = Path(out) / CACHE
        longer = made.preset.longer_than if longer_than is None else longer_than
        windows = Windows(longer, schedule.max_length, schedule.seed) if longer and not packed else None
        corpus = load_corpus(
            text, dataset=dataset, tokenizer=tokenizer, limit=limit, cache=cache, windows=windows, progress=progress
        )
        batches = _passages(corpus, schedule, packed or windows is not None)
    elif images is not None:
        batches = _image_questions(new_compressor, tokenizer, sources, images, schedule)
    else:
        batches = _questions(sources, split, held_out_sources, weights, tokenizer, schedule, progress)
    schedule = schedule.for_rows(batches.rows)
    stages = _stages(new_compressor, schedule.steps, random_steps, ratios, scorer_rests)
    trainer = Trainer(trained, batches, schedule, out, progress=progress, stages=stages, **options)
    return trainer.train(resume=resume)


def _several(name: str, sources: Questions | Sequence[Questions] | None) -> tuple[Questions, ...]:
    """The sets of questions: files, folders, or rows, which a list of objects and any table are."""
    if isinstance(sources, Mapping):
        expected = f"rows, such as {name}[{next(iter(sources), 'train')!r}]"
        raise ValueError(f"{name}: expected {expected}, got splits or sets by name: {', '.join(map(str, sources))}")
    if sources is None:
        return ()
    if isinstance(sources, list | tuple) and not any(isinstance(each, Mapping) for each in sources):
        return tuple(sources)
    return (cast(Questions, sources),)


def _examples(name: str, sources: Sequence[Questions], split: str) -> dict[str, Iterator[Example]]:
    """The examples of each set by its name; rows have the argument's, with their number where sets are several."""
    found: dict[str, Iterator[Example]] = {}
    paths = [source for source in sources if isinstance(source, str | Path)]
    for each in question_sets(paths, split):
        found[each.name] = iter_questions(each.path, split=split)
    for index, source in enumerate(sources):
        if not isinstance(source, str | Path):
            found[f"{name}[{index}]" if len(sources) > 1 else name] = iter_questions(source)
    return found


def _stages(
    compressor: Compressor, steps: int, random_steps: int, ratios: Sequence[int], scorer_rests: bool
) -> tuple[Stage, ...]:
    """The stages of a Dodo whose scorer learns; none where none are asked for."""
    if not (random_steps or ratios or scorer_rests):
        return ()
    joined = ",".join(map(str, ratios))
    given = {"random_steps": random_steps, "ratios": joined, "scorer_rests": scorer_rests}
    name, value = next((name, value) for name, value in given.items() if value)
    if not isinstance(compressor, Dodo) or compressor.scorer is None:
        title = compressor.title if isinstance(compressor, Dodo) else compressor.method
        raise ValueError(f"{name}: expected none but for a dodo with learned nuggets, got {value} with {title}")
    if ratios and ratios[-1] != compressor.chunk:
        raise ValueError(f"ratios: expected the compressor's, {compressor.chunk}, as the last one, got {joined}")
    return growing(steps, random_steps, ratios, scorer_rests=scorer_rests)


def _passages(corpus: Corpus, recipe: Recipe, packed: bool) -> Batches:
    if packed:
        return Packed(corpus, recipe.batch, recipe.max_length, recipe.seed, context_share=recipe.context_share)
    lengths = recipe.min_length, recipe.max_length
    return Pretraining(corpus, recipe.batch, *lengths, recipe.seed, context_share=recipe.context_share)


def _questions(
    sources: Sequence[Questions],
    split: str,
    validation: Sequence[Questions],
    weights: Sequence[float] | None,
    tokenizer: Any,
    recipe: Recipe,
    progress: bool,
) -> Batches:
    """The questions of one or more sets: all of them, or sets with shares of their own."""
    sets = _examples("questions", sources, split)
    options: dict[str, Any] = {"max_context": recipe.max_length, "progress": progress}
    if weights is None:
        held_out = _examples("validation", validation, "validation")
        return QuestionAnswering(sets, tokenizer, recipe.batch, recipe.seed, validation=held_out or None, **options)
    if len(sets) < 2 or len(weights) != len(sets):
        raise ValueError(
            f"weights: expected one for each of several sets of questions, got {len(weights)} for {len(sets)}"
        )
    if validation:
        raise ValueError("validation: not allowed with weights, with which the last tenth of each set is held out")
    parts = {name: QuestionAnswering(each, tokenizer, 1, recipe.seed, **options) for name, each in sets.items()}
    return Mixture(parts, recipe.batch, dict(zip(parts, weights, strict=True)), recipe.seed)


def _image_questions(
    compressor: Any, processor: Any, sources: Sequence[Questions], images: str | Path, recipe: Recipe
) -> ImageQuestions:
    if len(sources) > 1:
        raise ValueError(f"questions: expected one file with images, got {len(sources)}")
    (source,) = sources
    if not isinstance(source, str | Path):
        raise ValueError(f"questions: expected a file with images, got {name_of(source)}")
    examples = ConversationQuestions(load_conversations(source, images), compressor, processor)
    return ImageQuestions(examples, recipe.batch, examples.digest, recipe.seed, examples.held_out)
