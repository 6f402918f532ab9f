"""Training of compressors: data, schedules, a loop that resumes, one device or many (`pip install gistkit[train]`).

    from gistkit import train

    recipe = train.Recipe(steps=1000, batch=4, min_length=128, max_length=512)
    corpus = train.load_corpus("book.txt", tokenizer=tokenizer)
    batches = train.Pretraining(corpus, recipe.batch, recipe.min_length, recipe.max_length, recipe.seed)
    train.Trainer(compressor, batches, recipe, "runs/first", precision="bf16").train(resume=True)

`run` does all that from plain arguments. A folder of a run holds metrics.jsonl (see `read_metrics`), the last
checkpoints and, at the end, `compressor/` for `Compressor.from_pretrained`. Ctrl-C and SIGTERM end a run after its
step, with a checkpoint; a second one ends it at once. In the compressor's place a `Trainer` takes a language model that
reads with one, as `gistkit.compress.MixedResolution(compressor, tau=128, segment=32)`.

`Trainer` is a `transformers.Trainer` with a recipe and batches instead of `TrainingArguments` and a dataset, which
`CompressorTrainer` takes. `track="tensorboard"` (or "wandb") has the figures too, and `callbacks` are transformers'.

Several devices: start the same script with `accelerate launch`, or on CPUs with `torchrun`, see docs/processes.md. The
batch of a step is the same however many processes share it, and a run may be resumed on another number of them. The
weights of a checkpoint go into a compressor (which needs a threshold too, with `MixedResolution.calibrate`):

    train.restore("runs/first/checkpoint-1000", compressor.trainable())
    compressor.save_pretrained("runs/first/compressor")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gistkit.train.arguments import RunOptions as RunOptions
    from gistkit.train.batches import Batches as Batches
    from gistkit.train.batches import Packed as Packed
    from gistkit.train.batches import Pretraining as Pretraining
    from gistkit.train.checkpoints import restore as restore
    from gistkit.train.command import run as run
    from gistkit.train.conversations import Conversation as Conversation
    from gistkit.train.conversations import ConversationQuestions as ConversationQuestions
    from gistkit.train.conversations import load_conversations as load_conversations
    from gistkit.train.data import Corpus as Corpus
    from gistkit.train.data import load_corpus as load_corpus
    from gistkit.train.estimate import DryRun as DryRun
    from gistkit.train.estimate import dry_run as dry_run
    from gistkit.train.images import ImageQuestion as ImageQuestion
    from gistkit.train.images import ImageQuestions as ImageQuestions
    from gistkit.train.metrics import read_metrics as read_metrics
    from gistkit.train.mixture import Mixture as Mixture
    from gistkit.train.presets import PRESETS as PRESETS
    from gistkit.train.presets import Preset as Preset
    from gistkit.train.presets import notes as notes
    from gistkit.train.questions import QuestionAnswering as QuestionAnswering
    from gistkit.train.recipe import Recipe as Recipe
    from gistkit.train.stages import Stage as Stage
    from gistkit.train.stages import growing as growing
    from gistkit.train.trainer import CompressorTrainer as CompressorTrainer
    from gistkit.train.trainer import Diverged as Diverged
    from gistkit.train.trainer import Result as Result
    from gistkit.train.trainer import Trainer as Trainer
    from gistkit.train.windows import Windows as Windows

# Torch takes seconds to import, and a command's options and presets do without it.
_HOMES = {
    "arguments": ("RunOptions",),
    "batches": ("Batches", "Packed", "Pretraining"),
    "checkpoints": ("restore",),
    "command": ("run",),
    "conversations": ("Conversation", "ConversationQuestions", "load_conversations"),
    "data": ("Corpus", "load_corpus"),
    "estimate": ("DryRun", "dry_run"),
    "images": ("ImageQuestion", "ImageQuestions"),
    "metrics": ("read_metrics",),
    "mixture": ("Mixture",),
    "presets": ("PRESETS", "Preset", "notes"),
    "questions": ("QuestionAnswering",),
    "recipe": ("Recipe",),
    "stages": ("Stage", "growing"),
    "trainer": ("CompressorTrainer", "Diverged", "Result", "Trainer"),
    "windows": ("Windows",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gistkit.train' has no attribute {name!r}")
    return getattr(import_module(f"gistkit.train.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
