"""The public names of gistkit, and which of them a word in a docstring or an annotation stands for."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import gistkit

OTHERS = ("gistkit_lab.tables", "gistkit_lab.viz", "gistkit_serve.server", "gistkit_serve.store")
PACKAGES = (*(f"gistkit.{name}" for name in gistkit._PACKAGES), *OTHERS)
ROOTS = ("gistkit", "gistkit_lab", "gistkit_serve")


@cache
def public() -> dict[str, Any]:
    """Each public object by its full name; one that several packages have is named in the one that defines it."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = import_module(package)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not inspect.ismodule(value) and home(package, name) == package:
                found[f"{package}.{name}"] = value
    return found


def home(package: str, name: str) -> str:
    """The package in whose page a public name of `package` is described."""
    value = getattr(import_module(package), name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return package
    defined = ".".join(value.__module__.split(".")[:2])
    return defined if defined in PACKAGES and hasattr(import_module(defined), name) else package


def resolve(word: str, package: str, *closer: str) -> str | None:
    """The full name of what `word` stands for in a package's text; None: nothing.

    Args:
        word: a name, which may have dots.
        package: as "gistkit.layouts"; words may begin at it, at gistkit, or at a class of any package.
        closer: full names at which a word begins rather, such as the class and the module that a text is in.
    """
    candidates = [*(f"{name}.{word}" for name in closer), f"{package}.{word}", f"gistkit.{word}", word]
    first, _, rest = word.partition(".")
    if first[:1].isupper():
        classes = [name for name in public() if name.endswith(f".{first}")]
        candidates += [f"{name}.{rest}".rstrip(".") for name in classes[:1]]
    for candidate in candidates:
        if candidate.partition(".")[0] in ROOTS and "." in candidate and (value := find(candidate)) is not None:
            return full_name(candidate, value)
    return None


def full_name(name: str, value: Any) -> str:
    """The name under which an object is described, whatever file it is defined in."""
    same = [public_name for public_name, other in public().items() if other is value]
    if same:
        return same[0]
    if inspect.isclass(value) and value.__module__.partition(".")[0] in ROOTS:
        return f"{value.__module__}.{value.__qualname__}"
    parent, _, last = name.rpartition(".")
    owner = find(parent)
    return f"{full_name(parent, owner)}.{last}" if inspect.isclass(owner) else name


@cache
def find(name: str) -> Any | None:
    """The object of a full name; None if there is none. A method is what its class holds, not bound."""
    words = name.split(".")
    if words[0] not in ROOTS or not all(word.isidentifier() for word in words):
        return None
    # From the package on, or from a module that a function of its name hides.
    for length in range(1, len(words) + 1):
        try:
            value: Any = import_module(".".join(words[:length]))
        except ImportError:
            return None
        for word in words[length:]:
            value = inspect.getattr_static(value, word, None) if inspect.isclass(value) else getattr(value, word, None)
            if value is None:
                break
        else:
            return value
    return None
