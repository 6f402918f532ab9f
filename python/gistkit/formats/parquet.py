"""Parquet files, as the Hugging Face hub keeps data sets: a row at a time, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIX = ".parquet"
# Rows that are in memory at a time.
ROWS = 1024


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, {column: value}) of each row; structs are dicts, and lists lists.

    Raises:
        OSError: if there is no such file, or it cannot be read.
        ImportError: if pyarrow is missing.
        ValueError: if the file is not whole Parquet, here or while it is read.
    """
    number = 0
    with _opened(path) as file:
        for batch in file.iter_batches(ROWS):
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1


def count(path: Path) -> int:
    """The number of rows; errors as in `rows`."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with path.open("rb") as raw:
        try:
            from pyarrow.lib import ArrowException
            from pyarrow.parquet import ParquetFile
        except ModuleNotFoundError as error:
            raise ImportError(f"{path}: Parquet needs pyarrow; pip install 'gistkit[parquet]' brings it") from error
        try:
            yield ParquetFile(raw)
        except (OSError, ArrowException, UnicodeDecodeError) as error:
            # Damaged pages are errors of input and output too, without a number.
            if getattr(error, "errno", None) is not None:
                raise
            raise ValueError(f"{path}: expected a whole Parquet file, got damaged data ({error})") from error
