"""Parquet files, as the Hugging Face hub keeps data sets: a row at a time, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gistkit.formats.files import undamaged

SUFFIX = ".parquet"
# Rows that are read at a time: a long text that the file has once may stand in every row.
ROWS = 32


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, {column: value}) of each row; structs are dicts, and lists lists."""
    with _opened(path) as file:
        for number, row in enumerate(row for batch in file.iter_batches(ROWS) for row in batch.to_pylist()):
            yield f"{path}, row {number}", row


def count(path: Path) -> int:
    with _opened(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with path.open("rb") as raw:
        try:
            from pyarrow.lib import ArrowException
            from pyarrow.parquet import ParquetFile
        except ModuleNotFoundError as error:
            raise ImportError(f"{path}: Parquet needs pyarrow; run pip install 'gistkit[parquet]'") from error
        with undamaged(path, "Parquet", OSError, ArrowException, UnicodeDecodeError):
            yield ParquetFile(raw)
