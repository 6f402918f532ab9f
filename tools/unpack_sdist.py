"""Unpacks an sdist into a folder that stays. Files with the same bytes keep their times, so a build continues there.

example: python tools/unpack_sdist.py dist/gistkit-0.1.0.tar.gz build/sdist
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

# Of the build, not of the sdist.
BUILD = "build"


def unpack(sdist: Path, folder: Path) -> None:
    """Makes `folder` hold the files of the sdist and those of its build."""
    with tarfile.open(sdist) as archive:
        members = [(member, archive.extractfile(member)) for member in archive if member.isfile()]
        # The first part of each name is the sdist's own folder.
        wanted = {Path(*Path(member.name).parts[1:]): file.read() for member, file in members if file is not None}
    if any(path.is_absolute() or ".." in path.parts for path in wanted):
        raise ValueError(f"{sdist}: expected names inside its folder, got others")
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if path.is_file() and inside.parts[0] != BUILD and inside not in wanted:
            path.unlink()
    for inside, content in wanted.items():
        path = folder / inside
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
