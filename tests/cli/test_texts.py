"""What commands read as a text."""

from gistkit.options.texts import read_text


def test_tags_of_a_page_are_read_with_a_warning(tmp_path, capsys):
    page, prose = tmp_path / "page.html", tmp_path / "prose.txt"
    page.write_text("\n<!DOCTYPE html><p>A text.</p>")
    prose.write_text("A text about <html>.")
    assert read_text(page) == page.read_text() and read_text(prose) == prose.read_text()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"gistkit: warning: {page}: the text is HTML, and its tags are read too")
