"""Options of models behind an OpenAI-compatible API: judges of answers, and writers of summaries."""

from __future__ import annotations

import argparse
import os
from typing import Any, TypeVar

from gistkit.options.arguments import existing, positive

Kind = TypeVar("Kind")


def key_of(role: str) -> str:
    """The environment variable with the key of a role's endpoint."""
    return f"GISTKIT_{role.upper()}_KEY"


def add_endpoint(group: Any, role: str, does: str, fields: str = "") -> None:
    """Adds --ROLE, --ROLE-model, --ROLE-concurrency, and, if a prompt has `fields`, --ROLE-prompt.

    `does` says in the help what the model does.
    """
    group.add_argument(
        f"--{role}", metavar="URL",
        help=f"OpenAI-compatible API, such as http://localhost:8000/v1, whose model {does}; its key is read "
        f"from the environment variable {key_of(role)}",
    )  # fmt: skip
    group.add_argument(f"--{role}-model", metavar="NAME", help=f"model name at --{role}")
    if fields:
        group.add_argument(
            f"--{role}-prompt",
            type=existing,
            metavar="FILE",
            help=f"file with its prompt, which contains {fields} (default: gistkit's own)",
        )
    group.add_argument(f"--{role}-concurrency", type=positive, metavar="N", help="concurrent requests (default: 4)")


def chosen_endpoint(arguments: argparse.Namespace, role: str, kind: type[Kind]) -> Kind | None:
    """The endpoint, after one successful request; None without --ROLE.

    Raises:
        ValueError: if the other options are given without --ROLE, or --ROLE without a model.
        OSError: if the endpoint does not answer correctly.
    """
    url, model = getattr(arguments, role), getattr(arguments, f"{role}_model")
    if url is None:
        for name in ("model", "prompt", "concurrency"):
            if (value := getattr(arguments, f"{role}_{name}", None)) is not None:
                raise ValueError(f"--{role}-{name}: not allowed without --{role}, got {value}")
        return None
    if model is None:
        raise ValueError(f"--{role}-model: expected the model's name with --{role}, got none")
    settings: dict[str, Any] = {}
    if (prompt := getattr(arguments, f"{role}_prompt", None)) is not None:
        settings["template"] = prompt.read_text(encoding="utf-8")
    if (concurrency := getattr(arguments, f"{role}_concurrency")) is not None:
        settings["concurrency"] = concurrency
    endpoint: Any = kind(url, model, key=os.environ.get(key_of(role)) or None, **settings)  # type: ignore[call-arg]
    endpoint.check()
    return endpoint  # type: ignore[no-any-return]
