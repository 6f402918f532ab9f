"""What commands read as a text."""

import pytest

from gistkit.options.texts import read_text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"%PDF-1.4\nwords", "a PDF; convert it with pdftotext first"),
        (b"%PDF-1.4\n\xff", "a PDF; convert it with pdftotext first"),
        (b"PK\3\4\x14\0", "an archive, such as a .docx; convert it with pandoc -t plain"),
        (b"\xe8\0\0\0\0\0\0\0{}", "a memory file"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_the_remedy(content, told, tmp_path):
    (tmp_path / "paper").write_bytes(content)
    with pytest.raises(ValueError, match=f"paper: expected a text, got {told}$"):
        read_text(tmp_path / "paper")


def test_tags_of_a_page_are_read_with_a_warning(tmp_path, capsys):
    page, prose = tmp_path / "page.html", tmp_path / "prose.txt"
    page.write_text("\n<!DOCTYPE html><p>A text.</p>")
    prose.write_text("A text about <html>.")
    assert read_text(page) == page.read_text() and read_text(prose) == prose.read_text()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"gistkit: warning: {page}: the text is HTML, and its tags are read too")
