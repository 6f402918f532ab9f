"""Fields of a dataclass that are options of a command too: default, limits and purpose from one declaration."""

from __future__ import annotations

from dataclasses import field, fields
from inspect import cleandoc
from math import inf
from numbers import Integral, Real
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type[Any])


def declared(
    default: Any, purpose: str, *, least: float | None = None, above: float | None = None, most: float = inf,
    among: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """A field.

    Args:
        default: its value if none is given; one that is None, or whose type says so, may be None.
        purpose: of the option and in the class's documentation.
        least, above, most: limits of a number, which is finite.
        among: the values that it may have.
    """
    limits = {"least": least, "above": above, "most": most, "among": among}
    return field(default=default, metadata={"purpose": purpose, **limits})


def documented(kind: Kind) -> Kind:
    """Adds the fields to a class's documentation."""
    lines = [f"    {each.name}: {each.metadata['purpose']}." for each in fields(kind) if each.metadata]
    kind.__doc__ = "\n".join([cleandoc(kind.__doc__ or ""), "", "Args:", *lines])
    return kind


def check(values: Any) -> None:
    """Refuses values of a dataclass that are not as declared.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """
    for each in fields(values):
        value, rules = getattr(values, each.name), each.metadata
        if not rules or (value is None and "None" in str(each.type)):
            continue
        least, above, most = rules["least"], rules["above"], rules["most"]
        if isinstance(each.default, bool):
            fits, expected = isinstance(value, bool), "True or False"
        elif rules["among"]:
            fits, expected = value in rules["among"], f"one of {', '.join(rules['among'])}"
        elif least is None and above is None:
            continue
        else:
            kind, expected = (Integral, "a whole number") if str(each.type).startswith("int") else (Real, "a number")
            fits = isinstance(value, kind) and not isinstance(value, bool)
            if fits:
                fits = value < inf and value <= most and (value >= least if above is None else value > above)
                expected = f"at least {least:g}" if above is None else f"a number above {above:g}"
                if most < inf:
                    expected = f"a share above {above:g}, at most {most:g}"
        if not fits:
            raise ValueError(f"{each.name}: expected {expected}, got {value!r}")
