"""What pages are made of in a browser: their frame, styles and scripts."""

from __future__ import annotations

from pathlib import Path


def file_of(name: str) -> str:
    """The text of a file of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
