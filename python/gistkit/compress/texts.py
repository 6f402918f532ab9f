"""Texts instead of token ids: a compressor's tokenizer, and what it compresses and answers with it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gistkit.common.files import read_json
from gistkit.common.hub import hub_or_cache
from gistkit.common.messages import one_line, shown
from gistkit.common.text_ids import filled_ids, text_ids
from gistkit.compress.folder import ENCODER_TOKENIZER, TOKENIZER, inside
from gistkit.compress.generation import stop_ids
from gistkit.compress.memory import Memory, check_memory
from gistkit.compress.tokens import QUESTION, texts_of
from gistkit.hf import smollm2
from gistkit.hf.attach import pretrained

# Of a repository, those of a tokenizer.
_FILES = ["*.json", "*.jinja"]


def tokenizer(compressor: Any) -> Any:
    """The model's own tokenizer, for `compress` and `ask`; it may be set.

    The default is the tokenizer in the folder that the compressor was loaded from, or else the base model's, if the
    model records where it was loaded from.

    Raises:
        ValueError: if there is none.
    """
    if compressor._tokenizer is None:
        lm = compressor.lm
        if lm.tokenizer is None:
            lm.tokenizer = load_tokenizer(compressor._home, compressor.model)
        compressor._tokenizer = lm.tokenizer
    return compressor._tokenizer


def set_tokenizer(compressor: Any, tokenizer: Any) -> None:
    """See `tokenizer`."""
    # An encoder's tokens are compared again with those of another tokenizer.
    compressor._tokenizer, compressor.shares_tokens = tokenizer, None


def encoder_tokenizer(compressor: Any) -> Any:
    """The encoder's own tokenizer; it may be set.

    The default is the one in the folder that the compressor was loaded from, or else the encoder's, if the encoder
    records where it was loaded from.
    """
    if compressor._encoder_tokenizer is None:
        compressor._encoder_tokenizer = load_tokenizer(
            compressor._home, compressor.encoder, ENCODER_TOKENIZER, checked=compressor.named_by_folder
        )
    return compressor._encoder_tokenizer


def set_encoder_tokenizer(compressor: Any, tokenizer: Any) -> None:
    """See `encoder_tokenizer`."""
    compressor._encoder_tokenizer, compressor.shares_tokens = tokenizer, None


def encoder_ids(compressor: Any, parts: Sequence[list[int]]) -> Sequence[list[int]]:
    """Token ids of the model that reads as those of the encoder beside it."""
    if compressor.shares_tokens is None:
        compressor.shares_tokens = _share_tokens(compressor)
    if compressor.shares_tokens:
        return parts
    # Tokenizers keep what they do with control tokens, which another thread may want otherwise.
    with compressor.lm.turn():
        decoded = [compressor.tokenizer.decode(part, skip_special_tokens=True) for part in parts]
        made = [text_ids(text, compressor.encoder_tokenizer, special_tokens=False) for text in decoded]
    # A part may consist of special tokens.
    return [ids or [compressor.encoder_lm.first_token("encoder", None)] for ids in made]


def _share_tokens(compressor: Any) -> bool:
    if compressor.encoder is None:
        return True
    names = [pretrained(each).name_or_path for each in (compressor.model, compressor.encoder)]
    alike = names[0] == names[1] and compressor.encoder_lm.vocabulary == compressor.vocabulary
    if alike and compressor._encoder_tokenizer is None:
        return True
    return bool(compressor.encoder_tokenizer.get_vocab() == compressor.tokenizer.get_vocab())


def compress(
    compressor: Any,
    text: str | Sequence[str],
    *,
    ratio: int | None = None,
    budget: int | None = None,
    gradient: bool = False,
    control_tokens: bool = False,
) -> Memory:
    """Compresses a text, or several as rows, with `tokenizer`, as `gistkit compress` does; see `encode`.

    Args:
        ratio, budget, gradient: as in `encode`.
        control_tokens: read the name of a special token in the text, such as <|im_end|>, as that token. False: read it
            as plain text.

    Raises:
        ValueError: if there is no tokenizer, or a text has no tokens.
    """
    texts = texts_of("text", text)
    for one in texts:
        # Path.is_file raises errors for long texts.
        if os.path.isfile(one):
            warnings.warn(f"text: {one!r} is the name of a file; to compress the file, pass its text", stacklevel=2)
    # Tokenizers keep what they do with control tokens, which another thread may want otherwise.
    with compressor.lm.turn():
        rows = [text_ids(one, compressor.tokenizer, control_tokens=control_tokens) for one in texts]
    if [] in rows:
        raise ValueError(f"text: expected at least 1 token, got 0 in row {rows.index([])}")
    return compressor.encode(rows, ratio=ratio, budget=budget, gradient=gradient)  # type: ignore[no-any-return]


def ask(
    compressor: Any,
    memory: Memory | str | Sequence[str],
    question: str | Sequence[str],
    *,
    template: str = QUESTION,
    control_tokens: bool = False,
    tokenizer: Any = None,
    stop_tokens: int | Iterable[int] | None = None,
    **options: Any,
) -> str | list[str]:
    """Answers questions about a memory, or about texts that it compresses first, as `gistkit ask` does.

    Args:
        memory: one row for any number of questions, or one row for each question.
        question: a text, asked about every row; or several texts.
        template: the text around a {question}, as in training. It may contain names of special tokens.
        control_tokens: also read names of special tokens in questions and texts as these tokens.
        tokenizer: of questions and answers; None: the compressor's.
        stop_tokens, options: as in `gistkit.compress.generation.generate`. Answers also stop at the tokenizer's end
            token.

    Returns:
        A text for one question and one row, otherwise a list of texts; stripped.

    Raises:
        ValueError: if there is no tokenizer.
    """
    if not isinstance(memory, Memory):
        memory = cast(Memory, compressor.compress(memory, control_tokens=control_tokens))
    if "{question}" not in template:
        raise ValueError(f"template: expected a text with {{question}} in it, got {template!r}")
    check_memory(memory)
    tokenizer = tokenizer or compressor.tokenizer
    alone = isinstance(question, str)
    questions = texts_of("question", question) * (memory.batch_size if alone else 1)
    with compressor.lm.turn():
        prompts = [
            filled_ids(template, "{question}", text, tokenizer, control_tokens=control_tokens) for text in questions
        ]
    if stop_tokens is None:
        config = options.get("generation_config")
        given = options.pop("eos_token_id", None)
        stop_tokens = getattr(config, "eos_token_id", None) if given is None else given
    if stop_tokens is None:
        stop_tokens = {*stop_ids(compressor.lm, None), tokenizer.eos_token_id} - {None}
    ends = stop_ids(compressor.lm, stop_tokens)
    # transformers finds the ends of stop_strings by the tokenizer.
    options |= {"task": "qa", "stop_tokens": ends, "tokenizer": tokenizer, "return_dict_in_generate": False}
    rows = compressor.generate(memory, prompts, **options).tolist()
    # What fills a row after its end is no part of the answer.
    rows = [row[: next((place + 1 for place, token in enumerate(row) if token in ends), None)] for row in rows]
    answers = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
    return answers[0] if alone and len(answers) == 1 else answers


def load_tokenizer(folder: Path | None, model: Any, own: str = TOKENIZER, checked: bool = False) -> Any:
    """The tokenizer `own` in a compressor's folder, or else that of the model, see `Compressor.tokenizer`.

    Args:
        checked: read the model's as carefully as one in the folder.
    """
    if folder is not None and (folder / own).is_dir():
        return _read(folder, own)
    name = pretrained(model).name_or_path
    reason = f"the base model was loaded from {name!r}" if name else "the base model was not loaded from anywhere"
    if name == smollm2.NAME:
        return smollm2.load_smollm2_tokenizer()
    try:
        if name:
            with hub_or_cache(name):
                if checked:
                    place = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=_FILES)
                    return _read(Path(place), ".")
                # A folder's settings may have named the model.
                return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason += f", which has none that loads ({one_line(error)})"
    raise ValueError(f"{own}: expected the model's own, for texts, got none: {reason}; set compressor.{own}")


def _read(folder: Path, own: str) -> Any:
    """The tokenizer in a folder of a compressor's, or of the hub's cache."""
    _check_tokenizer(folder, own)
    try:
        # Not AutoTokenizer: this class reads only JSON, whatever the files ask for.
        return PreTrainedTokenizerFast.from_pretrained(str(folder / own), local_files_only=True)
    # The library raises errors of all kinds on broken files.
    except Exception as error:
        raise ValueError(f"{folder / own}: expected a tokenizer's files, got {one_line(error)}") from error


def _check_tokenizer(folder: Path, own: str) -> None:
    """Refuses a tokenizer's folder that leads out of a compressor's: by links at any depth, or by names of files."""
    place = folder / own
    for path in place.rglob("*"):
        inside(folder, *path.relative_to(folder).parts)
    config = inside(folder, own, "tokenizer_config.json")
    if not config.exists():
        return
    for field, value in read_json(config, "a tokenizer's settings").items():
        # Such as fast_tokenizer_files, of which transformers chooses by its version.
        if value is not None and field.endswith(("_file", "_files")):
            raise ValueError(
                f"{config}: expected no {shown(field)}, as a tokenizer's files have names, got {shown(value)}"
            )
