"""Options of a judge behind an OpenAI-compatible API."""

from __future__ import annotations

import argparse
import os
from typing import Any, TypeVar

from gistkit.options.arguments import existing, positive

Kind = TypeVar("Kind")
# The environment variable with its key.
KEY = "GISTKIT_JUDGE_KEY"


def add_judge(group: Any, does: str, fields: str) -> None:
    """Adds the options; the help says what the judge `does`, and which `fields` its prompt has."""
    group.add_argument(
        "--judge", metavar="URL",
        help=f"OpenAI-compatible API, such as http://localhost:8000/v1, whose model {does}; its key is read from the "
        f"environment variable {KEY}",
    )  # fmt: skip
    group.add_argument("--judge-model", metavar="NAME", help="model name at --judge")
    group.add_argument(
        "--judge-prompt", type=existing, metavar="FILE",
        help=f"file with its prompt, which contains {fields} (default: gistkit's own)",
    )  # fmt: skip
    group.add_argument("--judge-concurrency", type=positive, metavar="N", help="concurrent requests (default: 4)")


def chosen_judge(arguments: argparse.Namespace, kind: type[Kind]) -> Kind | None:
    """The judge, after one successful request; None without --judge, beside which its options are refused."""
    given = {name: getattr(arguments, f"judge_{name}") for name in ("model", "prompt", "concurrency")}
    if arguments.judge is None:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"--judge-{name}: not allowed without --judge, got {value}")
        return None
    if given["model"] is None:
        raise ValueError("--judge-model: expected the model's name with --judge, got none")
    settings: dict[str, Any] = {}
    if given["prompt"] is not None:
        settings["template"] = given["prompt"].read_text(encoding="utf-8")
    if given["concurrency"] is not None:
        settings["concurrency"] = given["concurrency"]
    judge: Any = kind(arguments.judge, given["model"], key=os.environ.get(KEY) or None, **settings)  # type: ignore[call-arg]
    judge.check()
    return judge  # type: ignore[no-any-return]
