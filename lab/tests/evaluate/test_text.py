"""Coloured texts against what they are drawn from."""

import re
import unicodedata
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from gistkit_lab.viz import draw_text, text_html, text_page
from gistkit_lab.viz import text as coloured
from tests.helpers.browser import contrast
from tests.viz.test_fuzz import HOSTILE, WORST, shape

TOKENS = [
    "The", " <b>", "x", "&amp;", "\n", ' "it\'s"', ",\n\n", "", " $5", "_$", "\tna", "ïve", " 日本", "\ufffd", ".",
]  # fmt: skip
SCORES = [0.5, -2.0, 0.25, 3.0, 1.5, 0.0, 2.5, -1.0, 0.125, 0.75, -0.5, 1e6, 0.375, 1.0, 2.0]
NUGGETS = [token in ("&amp;", ",\n\n", "\ufffd", ".") for token in TOKENS]


class Page(HTMLParser):
    """The words of a fragment without what is hidden from readers, and its elements with a hint."""

    def __init__(self, html):
        super().__init__()
        self.open, self.words, self.hinted, self.seen = [], [], [], []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.open.append((tag, attrs))
        if "title" in attrs:
            self.hinted.append((tag, attrs["title"], attrs["style"]))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.seen.append(data)
        if any("title" in attrs for _, attrs in self.open) and not any(
            "aria-hidden" in attrs for _, attrs in self.open
        ):
            self.words.append(data)


def opacity(style):
    return float(re.search(r"rgba\(\d+,\d+,\d+,([\d.]+)\)", style)[1])


def test_html_holds_the_text_and_every_score():
    html = text_html(TOKENS, SCORES, NUGGETS, title="<Nuggets> & more")
    page = Page(html)
    assert "".join(page.words) == "".join(TOKENS)
    assert "white-space:pre-wrap" in html and "<b>" not in html and "<script" not in html
    assert "<Nuggets> & more" in page.seen
    assert [tag == "mark" for tag, *_ in page.hinted] == NUGGETS
    assert [float(re.match(r"score (\S+?),? ?(nugget)?$", hint)[1]) for _, hint, _ in page.hinted] == SCORES
    assert [hint.endswith(", nugget") for _, hint, _ in page.hinted] == NUGGETS
    assert page.seen.count("↵") == 3 and page.seen.count("∅") == 1
    assert "4 of 15 tokens" in page.seen[-2]
    assert "title" not in text_html(["a"], [1.0], [False]).replace('title="score 1"', "")


def test_html_shows_control_characters_and_leaves_letters_alone():
    page = Page(text_html(["a\x00\r\x1b[0m\ud800", "\u0928\u092e\u0938\u094d", "\u200d"], [1, 2, 3], [False] * 3))
    assert "".join(page.words) == "a\\x00\\r\\x1b[0m\\ud800\u0928\u092e\u0938\u094d\u200d"


def test_shades_follow_ranks():
    for nugget in (False, True):
        styles = [style for *_, style in Page(text_html(list("abcde"), [3, -1, 9, 3, 5], [nugget] * 5)).hinted]
        shades = [opacity(style) for style in styles]
        # Ranks 0, 1.5, 1.5, 3 and 4 of 4: equal scores share the mean of theirs.
        low, high = (0.25, 0.6) if nugget else (0, 0.6)
        assert shades == pytest.approx([low + (high - low) * rank / 4 for rank in (1.5, 0, 4, 1.5, 3)], abs=0.006)
        far = text_html(list("abcde"), [3, -np.inf, 1e9, 3, 5], [nugget] * 5)
        assert [opacity(style) for *_, style in Page(far).hinted] == shades
        assert all(("0,158,115" in style) == nugget for style in styles)
    assert len({style for *_, style in Page(text_html(list("abc"), [7] * 3, [False] * 3)).hinted}) == 1


def test_text_is_legible_on_every_shade():
    marked, plain = [False] * 3 + [True] * 3, None
    styles = [
        style
        for selected in (marked, plain)
        for *_, style in Page(text_html(list("abcdef"), [0, 1, 2, 0, 1, 2], selected)).hinted
    ]
    for page, ink in (("#FFFFFF", "#000000"), ("#FFFFFF", "#222222"), ("#111111", "#DDDDDD"), ("#000000", "#FFFFFF")):
        for style in styles:
            assert "color:inherit" in style
            shade = np.array([int(part) for part in re.search(r"rgba\((\d+),(\d+),(\d+)", style).groups()]) / 255
            ground = opacity(style) * shade + (1 - opacity(style)) * np.array(to_rgb(page))
            assert contrast(ground, to_rgb(ink)) >= 4.5
    for shades in (coloured.SHADES, coloured.NUGGET_SHADES, coloured.PLAIN_SHADES):
        colours = shades(np.linspace(0, 1, 33))[:, :3]
        grey = colours @ (0.299, 0.587, 0.114)
        assert (np.diff(grey) < 0).all() and grey[0] - grey[-1] > 0.3
        assert all(contrast(colour, (0, 0, 0)) >= 4.5 for colour in colours)


def boxes(figure):
    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


def pieces(figure):
    """(line, column, text) of a drawn text."""
    return [
        (int(text.get_position()[1]), int(text.get_position()[0]), text.get_text()) for text in figure.axes[0].texts
    ]


def test_words_flow_in_lines():
    tokens = ["Brook", "lyn", " Nets", " have", " built", " up", ",", " so", "\n", "\n"]
    tokens += ["x" * 45, " to", "day", "'s news"]
    figure = draw_text(tokens, np.arange(14), [True] * 14, columns=20)
    assert pieces(figure) == [
        (0, 0, "Brook"), (0, 5, "lyn"), (0, 8, " Nets"), (0, 13, " have"),
        (1, 0, " built"), (1, 6, " up"), (1, 9, ","), (1, 10, " so"), (1, 13, "↵"),
        (2, 0, "↵"),
        (3, 0, "x" * 20), (4, 0, "x" * 20), (5, 0, "x" * 5), (5, 5, " to"), (5, 8, "day"), (5, 11, "'s news"),
    ]  # fmt: skip
    # A word moves to the next line whole, with the punctuation on it; one longer than a line breaks between tokens.
    assert pieces(draw_text(["a" * 12, " b", "c" * 7, "."], range(4), [True] * 4, columns=20)) == [
        (0, 0, "a" * 12), (1, 0, " b"), (1, 2, "c" * 7), (1, 9, "."),
    ]  # fmt: skip
    assert pieces(draw_text(["a" * 12, "b" * 12], range(2), [True] * 2, columns=20)) == [
        (0, 0, "a" * 12), (1, 0, "b" * 12),
    ]  # fmt: skip
    # A word longer than a line begins where it comes.
    assert pieces(draw_text(["a", " b", "c" * 10, "d" * 12], range(4), [True] * 4, columns=20)) == [
        (0, 0, "a"), (0, 1, " b"), (0, 3, "c" * 10), (1, 0, "d" * 12),
    ]  # fmt: skip
    # A line break's mark stays with the token that it ends.
    assert pieces(draw_text(["a" * 19, ",\n", "b"], range(3), [True] * 3, columns=20)) == [
        (0, 0, "a" * 19), (1, 0, ",↵"), (2, 0, "b"),
    ]  # fmt: skip
    assert pieces(draw_text([" a" * 9, " b", "\n", "c"], range(4), [True] * 4, columns=20)) == [
        (0, 0, " a" * 9), (0, 18, " b"), (1, 0, "↵"), (2, 0, "c"),
    ]  # fmt: skip


def test_all_tokens_are_drawn_in_boxes_that_do_not_overlap():
    rng = np.random.default_rng(0)
    tokens = [TOKENS[i] for i in rng.integers(len(TOKENS), size=400)]
    figure = draw_text(tokens, rng.normal(size=400), rng.random(400) < 0.1, columns=33)
    drawn = pieces(figure)
    shown = {"\n": "↵", "\t": "⇥"}
    wanted = "".join("".join(shown.get(char, char) for char in token) or "∅" for token in tokens)
    assert "".join(text for *_, text in drawn) == wanted
    taken = Counter()
    for (line, column, text), box in zip(drawn, boxes(figure), strict=True):
        wide = sum(2 if unicodedata.east_asian_width(char) == "W" else 1 for char in text)
        assert (box.get_x(), box.get_width()) == (column, wide) and line < box.get_y() < line + 1
        assert column + wide <= 33
        taken.update((line, column + i) for i in range(wide))
    assert max(taken.values()) == 1


def test_boxes_are_shaded_by_rank_and_nuggets_are_bold_on_green():
    tokens, scores = [" a", " b", " c", " d", " e", " f"], [1.0, 5.0, 2.0, 1.0, 1e9, -4.0]
    chosen = np.array([False, True, False, True, False, True])
    figure = draw_text(tokens, scores, chosen, title="A $title")
    colours = np.array([box.get_facecolor()[:3] for box in boxes(figure)])
    light = colours.sum(1)
    assert light[0] > light[2] > light[4] and light[5] > light[3] > light[1]
    assert (np.ptp(colours, axis=1) == 0).tolist() == (~chosen).tolist()
    assert (colours[chosen].argmax(1) == 1).all()
    assert [text.get_weight() == "bold" for text in figure.axes[0].texts] == chosen.tolist()
    assert [text.get_text() for text in figure.texts] == ["A $title"]
    near = draw_text(tokens, [1.0, 5.0, 2.0, 1.0, 6.0, 0.0], chosen)
    assert [box.get_facecolor() for box in boxes(near)] == [box.get_facecolor() for box in boxes(figure)]
    ticks = [label.get_text() for label in near.axes[1].get_xticklabels()]
    assert (ticks[0], ticks[-1]) == ("0", "6") and [float(tick) for tick in ticks] == sorted(map(float, ticks))


def test_the_figure_fits_its_text(tmp_path):
    line = ["wide"] * 22
    few, many = (draw_text([*line, "\n"] * count, range(23 * count), [False] * 23 * count) for count in (2, 40))
    assert few.get_figwidth() == many.get_figwidth()
    assert many.get_figheight() - few.get_figheight() == pytest.approx((80 - 4) * coloured.LINE)
    few.savefig(tmp_path / "few.png")
    draw_text(["$x_$"], [1.0], [True], title="$x_$").savefig(tmp_path / "dollars.png")
    for box, text in zip(boxes(few), few.axes[0].texts, strict=True):
        inner, outer = text.get_window_extent(), box.get_window_extent()
        assert outer.x0 - 1 <= inner.x0 and inner.x1 <= outer.x1 + 1
        assert outer.y0 - 1 <= inner.y0 and inner.y1 <= outer.y1 + 1
    for axes in few.axes:
        area = axes.get_tightbbox()
        assert area.x0 >= 0 and area.y0 >= 0 and area.x1 <= few.bbox.width and area.y1 <= few.bbox.height
    with pytest.raises(ValueError, match="draw_text: expected a text of at most 1000 lines, got 1001"):
        draw_text(["\n"] * 1001, range(1001), [False] * 1001)
    with pytest.raises(ValueError, match="draw_text: expected columns >= 20, got 19"):
        draw_text(["a"], [1.0], [False], columns=19)


@pytest.mark.parametrize("function", [text_html, draw_text])
@pytest.mark.parametrize(
    ("tokens", "scores", "selected", "message"),
    [
        ("abc", [1.0] * 3, [True] * 3, "expected tokens to be a sequence of strings"),
        ([1, 2], [1.0] * 2, [True] * 2, "expected tokens to be a sequence of strings"),
        ([], [], [], "expected at least one token, got none"),
        (["a", "b"], [1.0] * 3, [True] * 2, r"expected scores of shape \[2\], one a token, got \[3\]"),
        (["a", "b"], [1.0, np.nan], [True] * 2, "expected scores to be numbers, got NaN at token 1"),
        (["a", "b"], [1.0] * 2, [True], r"expected selected of shape \[2\], one a token, got \[1\]"),
        (["a", "b"], [1.0] * 2, [1, 0], "expected selected of dtype bool, got int64"),
    ],
)
def test_texts_that_do_not_fit_their_scores_are_refused(function, tokens, scores, selected, message):
    with pytest.raises((TypeError, ValueError), match=f"{function.__name__}: {message}"):
        function(tokens, scores, selected)


def test_a_text_without_nuggets_is_shaded_by_any_number():
    tokens, values = ["a", " <i>", "$x_$"], [0.0, 0.5, 2.0]
    html = text_html(tokens, values, label="<b>\"nats\" & 'co'", scale="linear", title="<u>")
    page = Page(html)
    assert [tag for tag, *_ in page.hinted] == ["span"] * 3 and "<mark" not in html
    assert [hint for _, hint, _ in page.hinted] == [f"<b>\"nats\" & 'co' {value}" for value in ("0", "0.5", "2")]
    assert "".join(page.words) == "".join(tokens)
    assert not any(raw in html for raw in ("<b>", "<i>", "<u>", "nugget", "rank"))
    assert [opacity(style) for *_, style in page.hinted] == pytest.approx([0, 0.7 / 4, 0.7], abs=0.006)
    ranked = text_html(tokens, [1.0, 3.0, 1e9])
    assert [opacity(style) for *_, style in Page(ranked).hinted] == [0, 0.35, 0.7] and "shaded by rank" in ranked

    figure = draw_text(tokens, values, label="loss $ (nats)", scale="linear", title="$t")
    wanted = [coloured.PLAIN_SHADES(share) for share in (0.0, 0.25, 1.0)]
    assert [box.get_facecolor() for box in boxes(figure)] == wanted
    bars = figure.axes[1]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["0", "0.5", "1", "1.5", "2"]
    assert bars.get_xlabel() == "loss $ (nats)" and not len(bars.get_yticks())
    assert len(bars.images[0].get_array()) == 1 and figure._repr_png_().startswith(b"\x89PNG")


def test_linear_shades_of_nuggets_and_of_nothing():
    page = Page(text_html(["a", "b"], [1.0, 4.0], [False, True], scale="linear", label="attention"))
    assert [opacity(style) for *_, style in page.hinted] == [0.15, 0.6]
    assert [hint for _, hint, _ in page.hinted] == ["attention 1", "attention 4, nugget"]
    assert [opacity(style) for *_, style in Page(text_html(["a", "b"], [0.0, 0.0], scale="linear")).hinted] == [0, 0]
    for function in (text_html, draw_text):
        name = function.__name__
        for bad, shown in ((-0.5, "-0.5"), (np.inf, "inf")):
            with pytest.raises(ValueError, match=f"{name}: expected finite scores >= 0 .*, got {shown} at token 1"):
                function(["a", "b"], [1.0, bad], scale="linear")
        with pytest.raises(ValueError, match=f"{name}: expected scale to be one of"):
            function(["a"], [1.0], scale="log")


def test_the_page_is_a_whole_document():
    title = "</title><script>alert(1)</script> \ud800 & co"
    page = text_page(["<script>", "</body>", "日本", "é"], [1, 2, 3, 4], [True, False, False, True], title=title)
    assert page.startswith("<!DOCTYPE html>\n<html>") and page.endswith("</body>\n</html>\n")
    assert page.index('<meta charset="utf-8">') < page.index("<title>") < page.index("<body>")
    assert page.count("<title>") == page.count("</title>") == page.count("</body>") == 1 and "<script" not in page
    assert "<title>&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt; \\ud800 &amp; co</title>" in page
    # Written as its charset says, it is what was drawn; nothing is loaded from elsewhere.
    assert "日本" in page.encode("utf-8").decode("utf-8") and not re.search(r"(?:src|href)=|url\(|https?:", page)
    assert "default-src 'none'" in page


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(HOSTILE, min_size=3, max_size=3), HOSTILE, HOSTILE)
@example(WORST[:3], WORST[3], WORST[7])
def test_hostile_texts_add_no_elements(tokens, label, title):
    for function in (text_html, text_page):
        plain = function(["a", "b", "c"], [1, 2, 3], [True, False, True], label="label", title="title")
        page = function(tokens, [1, 2, 3], [True, False, True], label=label, title=title or "title")
        assert shape(page) == shape(plain)
        if function is text_page:
            page.encode("utf-8")
