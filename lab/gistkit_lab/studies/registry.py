"""The studies by name, with their purposes and examples; a study's file is loaded when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gistkit_lab.studies.results import Line
    from gistkit_lab.studies.study import SavedRun, Study

# In the order of the commands: what each is for, and examples.
STUDIES: Mapping[str, tuple[str, str]] = {
    "compression-loss": (
        "pretrain an autoencoder with and without each loss and spread position IDs, then fine-tune each",
        """\
example: gistkit study compression-loss --settings without-cl,without-ae,without-ae-cl
         gistkit study compression-loss --seeds 3 --resume""",
    ),
    "epl": (
        "compare position layouts (DPL, UPL, EPL) on a small autoencoder",
        "example: gistkit study epl --text book.txt --layouts dpl,epl --resume",
    ),
    "smollm2": (
        "compare position layouts on SmolLM2-135M, frozen, with LoRA in the encoder",
        "example: gistkit study smollm2 --method icae --layouts dpl,epl --seeds 3",
    ),
    "in-place": (
        "compare Gist, AvgPool, GistPool and their variants on answers from a compressed context",
        """\
example: gistkit study in-place --preset quick --methods no,full,avgpool --ratios 2
         gistkit study in-place --preset paper --device cuda --seeds 3 --resume""",
    ),
    "pairs": (
        "look up keys and values in contexts that methods compress in place: does GistPool learn more than means?",
        """\
example: gistkit study pairs --methods avgpool,gistpool --ratios 5,10
         gistkit study pairs --preset varied --seeds 3 --resume""",
    ),
    "nuggets": (
        "compare Dodo's learned nuggets with other ways to keep the same number of states of a text",
        """\
example: gistkit study nuggets --preset quick --tasks lm --methods sliding,compressive,learned,strided
         gistkit study nuggets --preset paper --device cuda --seeds 3 --resume""",
    ),
    "facts": (
        "look up facts in filler when Dodo keeps one token in eight: does its scorer learn which?",
        """\
example: gistkit study facts --selections learned,random
         gistkit study facts --seeds 3 --resume""",
    ),
    "pooling": (
        "train one layer to average windows of its context, under the pool mask and the standard one",
        """\
example: gistkit study pooling --quick
example: gistkit study pooling --inputs sphere --heads 1/1,8/8,8/4 --ratios 1,2 --lengths 40 --resume
example: gistkit study pooling --paper --inputs sphere --device cuda --processes 8""",
    ),
    "greedy": (
        "swap Dodo's nuggets one by one for better ones: how many stay, and how much the loss falls",
        """\
example: gistkit study greedy --model smollm2 --compressor runs/dodo/compressor --texts book.txt --passages 4
example: gistkit study greedy --model ./llama --compressor runs/dodo/compressor --texts wiki/ --device cuda \
--passages 1000""",
    ),
    "length": (
        "compare SeqPE with other position encodings on texts longer than in training",
        """\
example: gistkit study length --preset quick --encodings rope-1e4,alibi,seqpe-bias
         gistkit study length --seeds 3 --resume
         gistkit study length --preset seqpe-wikitext --device cuda""",
    ),
    "retrieval": (
        "compare SeqPE with other position encodings on looking up facts in contexts longer than in training",
        """\
example: gistkit study retrieval --preset quick --encodings nope,rope-1e4,seqpe-bias
         gistkit study retrieval --seeds 3 --resume
         gistkit study retrieval --preset seqpe-squad --questions train-v2.0.json --test-questions dev-v2.0.json""",
    ),
    "resolution": (
        "compare SeqPE with other position encodings on images larger than in training",
        """\
example: gistkit study resolution --preset quick --encodings learned-2d,rope-2d-mix,seqpe-mul
         gistkit study resolution --data fashion-mnist --seeds 3 --resume
         gistkit study resolution --preset seqpe-imagenet --data imagenet/ --device cuda""",
    ),
    "voco": (
        "compare the position layouts of VoCo tokens on questions about where items are in an image",
        """\
example: gistkit study voco --preset quick --layouts dpl,epl --ratios 4.5
         gistkit study voco --preset short --seeds 3 --resume""",
    ),
}


def purpose(name: str) -> tuple[str, str]:
    """The purpose of a study, in a line, and examples of its command."""
    return STUDIES[name]


def find(name: str) -> Study:
    """The study of a name.

    Raises:
        ValueError: if there is none.
    """
    if name not in STUDIES:
        raise ValueError(f"study: expected one of {', '.join(STUDIES)}, got {name!r}")
    study: Study = import_module(f"gistkit_lab.studies.{name.replace('-', '_')}").STUDY
    return study


def decode_lines(path: Path | str, lines: list[Line]) -> tuple[Study, list[SavedRun]]:
    """The study of a results file's lines, and its runs.

    Raises:
        ValueError: if the lines belong to no study, or to several.
    """
    from gistkit_lab.studies.study import SavedRun

    if not lines:
        raise ValueError(f"{path}: expected at least one run, got none")
    name = lines[0]["study"]
    if name not in STUDIES:
        raise ValueError(f"{path}: expected results of one of the studies {', '.join(STUDIES)}, got study {name!r}")
    if other_names := {line["study"] for line in lines} - {name}:
        raise ValueError(f"{path}: expected results of the study {name} alone, got {other_names.pop()} too")
    study = find(name)
    try:
        runs = [
            SavedRun(
                study.run_of(line["run"]),
                study.recipe_of(line["recipe"]),
                line.get("machine", {}),
                line.get(study.kind, {}).get("name", ""),
            )
            for line in lines
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected results of the study {name}, got others: {error!r}") from error
    return study, runs


def read(path: Path | str) -> list[SavedRun]:
    """The runs of a study's results file, in its order.

    Raises:
        ValueError: if it holds something else.
    """
    from gistkit_lab.studies.results import load

    return decode_lines(path, load(Path(path)))[1]
