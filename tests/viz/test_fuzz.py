"""Hostile texts in pages: whatever tokens and titles hold, the page has the elements that it has of plain ones."""

from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit.layouts import causal
from gistkit.viz.page import Tokens, attention_page, layout_page

pytestmark = pytest.mark.fuzz

ANY = st.text(st.characters(), max_size=12)
WORST = [
    "<script>alert(1)</script>", "</script><script>", "</title>", "<!--", "-->", "]]>", "</style>",
    '"><img src=x onerror=a>', "' onmouseover='a", "&lt;", "&#60;", "{{ 7 * 7 }}", "{% raw %}",
    "${a}", "\\u003c/script",
    "\u2028", "\0", "javascript:a",
]  # fmt: skip
HOSTILE = st.one_of(st.sampled_from(WORST), ANY)


class Elements(HTMLParser):
    """The tags of a page with the names of their attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, *sorted(name for name, _ in attrs)))

    def handle_comment(self, data):
        self.found.append(("comment",))


def shape(page):
    """The elements, without the marks of invisible characters."""
    return [element for element in Elements(page).found if "aria-hidden" not in element]


# A page takes long to make.
@pytest.mark.slow
@settings(max_examples=max(2, settings.default.max_examples // 50))
@given(st.lists(HOSTILE, min_size=3, max_size=3), HOSTILE)
@example(WORST[:3], WORST[3])
def test_pages_of_matrices_add_no_elements(tokens, title):
    weights = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]
    pages = [
        (layout_page(causal(3), tokens=texts, title=name), attention_page(weights, queries=Tokens(texts), title=name))
        for texts, name in ((["a", "b", "c"], "title"), (tokens, title or "title"))
    ]
    for plain, page in zip(*pages, strict=True):
        assert shape(page) == shape(plain)
