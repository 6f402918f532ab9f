"""Hostile texts in coloured texts: whatever they hold, the page has the elements that it has of plain ones."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit_lab.viz import text_html, text_page
from tests.viz.test_fuzz import HOSTILE, WORST, shape

pytestmark = pytest.mark.fuzz


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(HOSTILE, min_size=3, max_size=3), HOSTILE, HOSTILE)
@example(WORST[:3], WORST[3], WORST[7])
def test_texts_add_no_elements(tokens, label, title):
    for function in (text_html, text_page):
        plain = function(["a", "b", "c"], [1, 2, 3], [True, False, True], label="label", title="title")
        page = function(tokens, [1, 2, 3], [True, False, True], label=label, title=title or "title")
        assert shape(page) == shape(plain)
        if function is text_page:
            page.encode("utf-8")
