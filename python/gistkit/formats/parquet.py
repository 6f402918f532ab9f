"""Parquet files, as the Hugging Face hub keeps data sets: a row at a time, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIX = ".parquet"
# Rows that are read at a time, and those of them that are Python's objects.
ROWS, FEW = 1024, 8


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, {column: value}) of each row; structs are dicts, and lists lists.

    Raises:
        OSError: if there is no such file, or it cannot be read.
        ImportError: if pyarrow is missing.
        ValueError: if the file is not whole Parquet, here or while it is read.
    """
    number = 0
    with _opened(path) as file:
        nested = any("." in name for name in _texts(file))
        for batch in file.iter_batches(FEW if nested else ROWS):
            # A few at a time: a value that the file has once may stand in every row.
            for start in range(0, batch.num_rows, FEW):
                for row in batch.slice(start, FEW).to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1


def _texts(file: Any) -> list[str]:
    """The paths of a file's columns of texts."""
    columns = map(file.schema.column, range(len(file.schema)))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


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
            raise ImportError(f"{path}: Parquet needs pyarrow; run pip install 'gistkit[parquet]'") from error
        try:
            about = ParquetFile(raw)
            # Texts stay as the file has them, each once and with numbers that stand for it; pyarrow does so in columns
            # that are no lists and structs.
            flat = [name for name in _texts(about) if "." not in name]
            yield ParquetFile(raw, metadata=about.metadata, read_dictionary=flat)
        except (OSError, ArrowException, UnicodeDecodeError) as error:
            # Damaged pages are errors of input and output too, without a number.
            if getattr(error, "errno", None) is not None:
                raise
            raise ValueError(f"{path}: expected a whole Parquet file, got damaged data ({error})") from error
