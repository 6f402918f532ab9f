"""What a few bytes of a compressed file, or one cell of another, may claim: a limit, and no more memory than it."""

import csv
import gzip
import json
import re
import tracemalloc

import pytest

from gistkit.formats import files
from tests.helpers.disks import zstd
from tests.helpers.programs import printed

ROW = b'{"text": "%s"}\n'


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(files, "MOST", 1000)
    monkeypatch.setattr(files, "PARTS", 100)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize(
    ("content", "read", "message"),
    [
        (ROW % b"a" * 2 + ROW % (b"a" * 1000), files.json_lines, "line 3: expected a line of at most 1000 bytes"),
        (b'[{"a": 1}, {"a": "' + b"a" * 200_000, files.members, "expected members of at most 1000 characters"),
        (b"[[" + b"{}," * 200, files.members, "expected members of at most 100 objects and arrays"),
        (b"[" + b"{}," * 200, files.json_lines, "line 1: expected at most 100 objects and arrays"),
        (b"a,b\n1,2\n" + b"3" * 2000 + b",4\n", files.rows, "line 3: expected a line of at most 1000 bytes"),
        (b'a,b\n"' + b"x\n" * 2000, files.rows, "expected cells of CSV, got others: field larger than field limit"),
    ],
    ids=["a line", "a value", "objects", "objects of a line", "a line of CSV", "a cell"],
)
def test_a_longer_one_is_refused(tmp_path, compress, content, read, message):
    path = tmp_path / "data"
    path.write_bytes(compress(content))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        list(read(path))


def test_what_fits_is_read_whole(tmp_path):
    path, text = tmp_path / "data", "a" * 980
    path.write_text(json.dumps({"text": text}) + "\n")
    assert [row["text"] for _, row in files.json_lines(path)] == [text]
    path.write_text(" " * 5000 + json.dumps([text] * 9))
    assert [row for _, row in files.members(path)] == [text] * 9
    with path.open("w") as file:
        csv.writer(file).writerows([["a"], *[[text]] * 3])
    assert [row["a"] for _, row in files.rows(path)] == [text] * 3


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_csv_end_as_on_any_system(end, tmp_path):
    path = tmp_path / "ends.csv"
    path.write_bytes(end.join(["a,b", '1,"x', 'y"', "2,z", ""]).encode())
    assert [row for _, row in files.rows(path)] == [{"a": "1", "b": f"x{end}y"}, {"a": "2", "b": "z"}]
    path.write_bytes(end.join(["a,b", "1,2", "3"]).encode())
    with pytest.raises(ValueError, match="line 3: expected 2 cells as in the header, got 1"):
        list(files.rows(path))


@pytest.mark.parametrize("inside", [None, "data"])
def test_a_document_is_read_as_json_reads_it_wherever_a_chunk_ends(tmp_path, inside, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 1)
    path = tmp_path / "data"
    values = [1, -0.5e-12, 10**20, True, None, 'é\u2028"}]', [], {}, {"a": [{"b": "☃"}, 2.5]}, 12]
    for value in (values, [], {str(i): each for i, each in enumerate(values)}, {}):
        document = value if inside is None else {"before": [1, {}], "data": value, "after": 12}
        for indent in (None, 1):
            path.write_text("\ufeff" + json.dumps(document, indent=indent, ensure_ascii=indent is None))
            expected = list(value.items() if isinstance(value, dict) else enumerate(value))
            assert list(files.members(path, inside)) == expected
            whole = path.read_text()
            for cut in (whole[:-1], whole + "]", whole[:-1] + "," + whole[-1]):
                path.write_text(cut)
                with pytest.raises(ValueError, match=r"line \d+: expected JSON, got text that is not"):
                    list(files.members(path, inside))


def test_a_long_array_takes_the_memory_of_a_member(tmp_path, monkeypatch):
    monkeypatch.undo()
    path = tmp_path / "data.json"
    path.write_bytes(gzip.compress(b"[" + b"{}," * 60_000 + b"{}]"))
    tracemalloc.start()
    assert sum(1 for _ in files.members(path)) == 60_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("read", [files.records, files.members, files.json_lines])
def test_a_number_of_thousands_of_digits_names_its_line(tmp_path, read, monkeypatch):
    path = tmp_path / "data"
    monkeypatch.setattr(files, "MOST", 1 << 20)
    path.write_text(("[{}, " if read is files.members else "") + '{"a": ' + "9" * 9000 + "}")
    with pytest.raises(ValueError, match="line 1: expected"):
        list(read(path))


@pytest.mark.slow
def test_a_parquet_file_takes_the_memory_of_what_it_holds_once(tmp_path):
    """A text of 2 MB, once in the file, in each of 1,000 rows."""
    pytest.importorskip("pyarrow")
    code = """
import pyarrow, pyarrow.parquet
from pathlib import Path
from gistkit.formats import parquet
from tests.helpers.memory import peak_bytes
text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), ["a" * 2_000_000])
pyarrow.parquet.write_table(pyarrow.table({"text": text}), "b.parquet", compression="zstd")
del text
def read():
    assert sum(len(row["text"]) for _, row in parquet.rows(Path("b.parquet"))) == 2_000_000_000
print(peak_bytes(read), Path("b.parquet").stat().st_size)
"""
    peak, size = map(int, printed(code).split())
    assert size < 1000 and peak < 100_000_000
