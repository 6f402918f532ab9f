"""The Hugging Face hub, which may be out of reach."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 5
# "name" or "owner/name"; anything else is a place on a disk.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@contextmanager
def hub_or_cache(name: str) -> Iterator[None]:
    """Inside, if the hub does not answer, a name that is no folder is looked for only in the hub's cache.

    The hub's client would try again for a minute for each file.
    """
    from huggingface_hub import constants

    may_ask = not constants.HF_HUB_OFFLINE and _NAME.fullmatch(name) and not Path(name).is_dir()
    if not may_ask or _answers(constants.ENDPOINT):
        yield
        return
    cache = constants.HF_HUB_CACHE
    warnings.warn(
        f"{constants.ENDPOINT} does not answer within {SECONDS} s: looking for {name} only in {cache}", stacklevel=3
    )
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def check_name(option: str, name: str) -> None:
    """Refuses a path that is no folder; all other names may be those of the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.is_file() or name.startswith(("/", "./", "../", "~"))):
        raise FileNotFoundError(f"{option}: expected a folder with a model, found none at {name}")


@contextmanager
def loading(option: str, expected: str, name: str, *more: type[Exception]) -> Iterator[str]:
    """Inside, the value of an option loads by the name that it gives; errors, `more` among them, name the option."""
    errors: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, *more)
    try:
        with hub_or_cache(name):
            yield str(Path(name).expanduser())
    except errors as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise ValueError(f"{option}: expected {expected}, got {name!r}: {reason[0]}") from error


def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    # Of whichever library the hub's client is made; also an answer that is no HTTP, or an address that is none.
    except Exception:
        return False
    return True
