"""Pages of layouts, attention and texts, in a real browser."""

from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

import gistkit as gk
from gistkit import layouts
from gistkit.inspect import AttentionRecorder
from gistkit.layouts import Layout, Role
from gistkit.layouts.layout import physical_order
from gistkit.viz.layout import ROLE_COLOURS
from gistkit.viz.page import SHADES, Tokens, attention_page, layout_page
from gistkit_lab.viz import text_page
from tests.helpers.browser import Page, a_browser, luminance

DIGEST = """(async () => {
  return Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", shown.moved)));
})()"""
# As if it were the page's own.
LOOP = """() => { for (let i = 0; i < 1e5; i++); }
//# sourceURL=file:///loop.js"""


@pytest.fixture(scope="module")
def chromium():
    """A headless browser."""
    with a_browser() as browser:
        yield browser


@pytest.fixture
def show(chromium, tmp_path):
    """Opens pages, and closes them at the end."""
    opened = []

    def open_page(html, **options):
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        opened.append(Page(chromium, path, **options))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()


@pytest.fixture(scope="module")
def recorded():
    """A layout, and the weights that the recorder has of two layers on it: [layers, heads, N, N] in logical order."""
    torch.manual_seed(0)
    layout = layouts.gistpool(20, 4, 6, windows=2)
    plan, order = layout.compile(), np.argsort(physical_order(layout))
    with AttentionRecorder() as recorder:
        for _ in range(2):
            query, key, value = 2 * torch.randn(3, 1, 3, len(layout), 8)
            gk.attention(query, key, value, plan)
    # The second one looks back more: in this order a page opens at its first layer.
    weights = np.stack([one.weights[0].numpy() for one in reversed(recorder.maps)])
    return layout, weights[:, :, order][:, :, :, order]


def page_of(recorded):
    layout, weights = recorded
    tokens = Tokens([f" word{place}" for place in range(len(layout))], layout.roles, layout.positions)
    maps = np.concatenate([weights.mean(1, keepdims=True), weights], 1)
    return attention_page(maps, layers=["4", "7"], heads=["mean of 3", "0", "1", "2"], queries=tokens)


def told_most(text):
    """{token: percent} of a sentence about the tokens that a token looks at most."""
    parts = text.split(" most ", 1)[1].removesuffix(".").split(", ")
    return {int(part.split("#")[1].split()[0]): float(part.split(" %")[0].split()[-1]) for part in parts}


def check_told(text, values):
    """The sentence names the five largest of the values, with the values."""
    told = told_most(text)
    largest = np.argsort(-values, kind="stable")[:5]
    largest = [int(place) for place in largest if values[place] > 0]
    # Values closer than a page tells apart may change places.
    assert len(told) == len(largest) and min(values[list(told)]) >= 0.93 * min(values[largest])
    for place, percent in told.items():
        assert percent == pytest.approx(100 * values[place], rel=0.1)


def check_colours(page, values, strip=0):
    """Tokens with a value have a colour, farther from the page's the higher the value."""
    colours = page.text_colours(strip)
    assert [colour is not None for colour in colours] == (values > 0).tolist()
    seen = [place for place in np.argsort(-values) if values[place] > 0]
    shades = [luminance(colours[place]) for place in seen]
    for (one, other), (dark, light) in zip(pairwise(values[seen]), pairwise(shades), strict=True):
        assert light >= dark - 1e-6 and (light > dark or one < 1.08 * other or one < 1.1e-4)


def test_chosen_tokens_colour_what_they_look_at(recorded, show):
    layout, weights = recorded
    mean = weights.mean(1)
    page = show(page_of(recorded))
    told = page.page.locator("#told")
    last = len(layout) - 1
    page.tokens().nth(last).click()
    assert page.chosen() == [last]
    check_told(told.inner_text(), mean[0, last])
    check_colours(page, mean[0, last])
    # By keys: to the left, two more with Shift, the first, and none.
    page.page.keyboard.press("ArrowLeft")
    assert page.chosen() == [last - 1]
    page.page.keyboard.press("Shift+ArrowLeft")
    page.page.keyboard.press("Shift+ArrowLeft")
    assert page.chosen() == [last - 3, last - 2, last - 1]
    check_told(told.inner_text(), mean[0, last - 3 : last].mean(0))
    check_colours(page, mean[0, last - 3 : last].mean(0))
    page.page.keyboard.press("Home")
    assert page.chosen() == [0]
    page.page.keyboard.press("ArrowDown")
    (below,) = page.chosen()
    boxes = [page.tokens().nth(place).bounding_box() for place in (0, below)]
    assert boxes[1]["y"] > boxes[0]["y"] and boxes[1]["x"] < boxes[0]["x"] + boxes[0]["width"]
    page.page.keyboard.press("Escape")
    assert page.chosen() == [] and told.inner_text() == "" and set(page.text_colours()) == {None}
    # By dragging, and by a click into the map.
    for place, act in ((2, page.page.mouse.down), (5, page.page.mouse.up)):
        # A token may begin on one line and end on the next.
        widest = "[...token.getClientRects()].sort((a, b) => b.width - a.width)[0].toJSON()"
        box = page.tokens().nth(place).evaluate(f"token => {widest}")
        page.page.mouse.move(box["x"] + 5, box["y"] + 5, steps=4)
        act()
    assert page.chosen() == [2, 3, 4, 5]
    page.page.mouse.click(*page.place(24, 3))
    assert page.chosen() == [24]
    check_colours(page, mean[0, 24])
    # By what looks at them.
    page.page.get_by_label("what looks at them").check()
    check_told(told.inner_text(), mean[0, :, 24])
    check_colours(page, mean[0, :, 24])


def test_sliders_show_each_layer_and_head(recorded, show):
    layout, weights = recorded
    count = len(layout)
    page = show(page_of(recorded))
    page.tokens().nth(count - 1).click()
    names = {"mean of 3": weights.mean(1), **{str(head): weights[:, head] for head in range(3)}}
    for layer, layer_name in enumerate(("4", "7")):
        page.page.get_by_label("Layer").fill(str(layer))
        page.page.get_by_label("Head").fill("0")
        page.page.get_by_label("Head").focus()
        for place, (name, maps) in enumerate(names.items()):
            if place:
                page.page.keyboard.press("ArrowRight")
            page.settle()
            page.page.wait_for_function(f"view.copies.length && shown.head === {place}")
            assert page.page.locator("#layer-name").inner_text() == layer_name
            assert page.page.locator("#head-name").inner_text() == name
            shown = page.cells(count, count)
            assert ((shown > 0) == layout.dense_mask()).all()
            drawn = np.where(shown, 2.0 ** ((shown - 255) / 12), 0)
            np.testing.assert_allclose(drawn, maps[layer], rtol=0.03, atol=5e-7)
            check_told(page.page.locator("#told").inner_text(), maps[layer, -1])
            told = page.hover(count - 1, 0)
            assert float(told["weight"]) == pytest.approx(maps[layer, -1, 0], rel=0.0345)


def test_a_page_opens_at_the_layer_that_looks_back(show):
    itself, first, back = np.eye(9), np.zeros((9, 9)), np.zeros((9, 9))
    first[:, 0] = 1
    back[np.arange(9), np.maximum(np.arange(9) - 4, 0)] = 1
    previous = np.eye(9, k=-1)
    previous[0, 0] = 1
    page = show(attention_page(np.stack([itself, first, 0.6 * first + 0.4 * back, previous])[:, None]))
    assert page.page.locator("#layer-name").inner_text() == page.page.get_by_label("Layer").input_value() == "2"


def test_queries_and_keys_of_their_own_are_two_texts(show):
    weights = np.random.default_rng(0).dirichlet(np.ones(9), 5)
    page = show(attention_page(weights, queries=Tokens(list("abcde"))))
    assert page.page.locator(".strip").count() == 2 and not page.page.locator("#direction").is_visible()
    page.tokens(0).nth(3).click()
    check_colours(page, weights[3], strip=1)
    assert set(page.text_colours(0)) == {None}
    page.tokens(1).nth(8).click()
    check_colours(page, weights[:, 8], strip=0)
    check_told(page.page.locator("#told").inner_text(), weights[:, 8])


def pages(recorded):
    layout, weights = recorded
    long = [f"word{place} " for place in range(300)]
    return {
        "attention": page_of(recorded),
        "layout": layout_page(layouts.gist(280, 8, 64), title="a" * 300),
        "keys": attention_page(weights[0, 0][:9], keys=Tokens(positions=layout.positions)),
        "text": text_page(long, np.arange(300), np.arange(300) % 7 == 0),
    }


# Each comes to the other width and the other colours.
@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (1400, "dark")])
def test_pages_fill_the_window_and_are_legible(width, scheme, recorded, show):
    for name, html in pages(recorded).items():
        page = show(html, width=width, scheme=scheme)
        browser = page.page
        if name != "text":
            page.tokens().nth(5).click()
            page.hover(5, 2)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
        contrasts = page.contrasts()
        assert len(contrasts) > 10 and min(contrasts.values()) >= 4.5, (
            name,
            sorted(contrasts.items(), key=lambda x: x[1])[:5],
        )
        boxes = [box.bounding_box() for box in browser.locator("body > :is(main, div, header, form)").all()]
        assert min(box["x"] for box in boxes) <= 24, name
        assert max(box["x"] + box["width"] for box in boxes) >= width - 24, name
        if name != "text":
            matrix = browser.locator("#matrix").bounding_box()
            assert matrix["x"] + matrix["width"] >= width - 24 and matrix["width"] >= min(380, width / 2)
        # The other colours, and the other width.
        dark = {"dark": "light", "light": "dark"}[scheme]
        before = body_luminance(browser)
        assert (before < 0.1) == (scheme == "dark")
        browser.get_by_label(dark, exact=True).check()
        assert (body_luminance(browser) < 0.1) == (dark == "dark"), name
        if name != "text":
            # A pair that is not seen has the page's colour.
            browser.locator("#matrix").scroll_into_view_if_needed()
            corner = page.place(0, 8)
            assert (luminance(hex_channels(page.colour(*corner))) < 0.1) == (dark == "dark") or name == "keys"
        assert min(page.contrasts().values()) >= 4.5, name
        browser.set_viewport_size({"width": 1820 - width, "height": 1000})
        page.settle()
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1820 - width, name
        if name != "text":
            assert browser.evaluate("view.canvas.width === view.canvas.clientWidth")


def body_luminance(browser):
    red, green, blue = browser.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255)"
    )
    return luminance([red, green, blue])


def hex_channels(colour):
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def test_a_layout_is_drawn_as_it_is_and_told_on_hover(show):
    layout = layouts.gistpool(48, 8, 9, windows=2)
    count = len(layout)
    page = show(layout_page(layout, tokens=[f" word{place}\n" for place in range(count)]))
    assert page.page.title() == "GistPool 8x"
    for button, name, order in (
        ("as read", "logical", np.arange(count)),
        ("grouped by role", "physical", physical_order(layout)),
    ):
        page.page.get_by_label(button).check()
        page.page.evaluate("scrollTo(0, 0)")
        page.settle()
        plot = page.plot()
        left, bottom = plot["left"], plot["top"] + plot["height"]
        mask = layout.dense_mask(name)
        cells = page.cells(count, count)
        assert (cells == np.where(mask, SHADES * (layout.roles[order] + 1), 0)).all()
        for query, key in [*np.argwhere(mask)[::149], (0, count - 1)]:
            told = [
                f"#{its} “ word{its}↵” {Role(layout.roles[its]).name} position {layout.positions[its]}"
                for its in (order[query], order[key])
            ]
            answer = "yes" if mask[query, key] else "no"
            assert page.hover(query, key) == {"query": told[0], "key": told[1], "seen": answer}
            colour = ROLE_COLOURS[Role(layout.roles[order[key]])] if mask[query, key] else "#FFFFFF"
            x, y = page.place(query, key)
            assert page.colour(x, y) == colour
            strips = [page.colour(left - 7, y), page.colour(x, bottom + 7)]
            assert strips == [ROLE_COLOURS[Role(layout.roles[order[its]])] for its in (query, key)]
        key_told = page.hover(0, 9)["key"]
        page.page.locator("#positions").scroll_into_view_if_needed()
        # A scroll event, which comes with the next frame, hides the box.
        page.settle()
        marks = page.page.evaluate(
            "marksOf(view, byId('positions'), keys.positions, columnOrder).marks.map(({x, y}) => [x, y])"
        )
        box = page.page.locator("#positions").bounding_box()
        assert page.point(box["x"] + marks[9][0], box["y"] + marks[9][1]) == {"key": key_told}


def test_a_chosen_token_of_a_layout_shows_what_it_sees(show):
    layout = layouts.gistpool(48, 8, 9, windows=2)
    mask = layout.dense_mask()
    page = show(layout_page(layout))
    for token in (0, 9, 30, len(layout) - 1):
        page.tokens().nth(token).click()
        assert page.page.locator("#told").inner_text() == f"#{token} sees {mask[token].sum()} of {len(layout)} tokens."
        colours = page.text_colours()
        for key in range(len(layout)):
            expected = hex_channels(ROLE_COLOURS[Role(layout.roles[key])]) if mask[token, key] else None
            assert colours[key] == (expected if expected is None else pytest.approx(expected, abs=1e-6))


def test_weights_are_told_to_three_per_cent(show):
    rng = np.random.default_rng(0)
    weights = np.exp(-18 * rng.random((9, 14)))
    weights[:, 3] = [0, 1e-9, 1, 1.005, 0.5, 4.5e-7, 4.3e-7, 1e-5, 1]
    keys = Tokens(positions=np.arange(28).reshape(2, 14) / 2)
    page = show(attention_page(weights, keys=keys, title="<i>$$x$$"))
    assert page.page.title() == page.page.locator("h1").inner_text() == "<i>$$x$$"
    assert not page.page.get_by_label("Layer").is_visible() and not page.page.get_by_label("Head").is_visible()
    for query, key in np.ndindex(9, 14):
        if key not in (0, 3):
            continue
        told = page.hover(query, key)
        assert told["query"] == f"#{query}" and told["key"] == f"#{key} position {key / 2:g}, {7 + key / 2:g}"
        weight = weights[query, key]
        if weight == 0:
            assert told["weight"] == "0"
        elif weight < 4.36e-7:
            assert told["weight"] == "below 4.4e-7"
        else:
            assert float(told["weight"]) == pytest.approx(min(weight, 1), rel=0.0345)
    assert not page.page.get_by_text("grouped by role").is_visible()


def test_texts_and_titles_are_harmless(show):
    nasty = [
        '</script><b id="b">',
        "<img src=x onerror=alert(1)>",
        "{{title}} {{ 1 }}",
        "&amp;",
        "\u202e",
        "\ud800",
        "",
    ]
    shown = [*nasty[:4], "\\u202e", "\\ud800", "∅"]
    page = show(
        layout_page(layouts.causal(len(nasty)), tokens=nasty, title="</title><script>alert(2)</script>{{data}}")
    )
    assert page.page.locator("h1").inner_text() == "</title><script>alert(2)</script>{{data}}"
    assert page.tokens().all_inner_texts() == shown
    for place, text in enumerate(shown):
        assert page.hover(place, place)["key"] == f"#{place} “{text}” TEXT position {place}"
    assert page.page.locator("#b, img").count() == 0


def test_a_page_of_4096_tokens_stays_responsive(show):
    """Zooming, panning and hovering may look at each token a few times, and never at each of the 16 million pairs."""
    rng = np.random.default_rng(0)
    layout = layouts.dodo(rng.random(4096) < 0.1, 512)
    html = layout_page(layout)
    assert len(html) < 4e6
    page = show(html)
    mouse, loops = page.page.mouse, {}
    page.hover(2000, 1000)
    for step in range(3):
        key, before = 1100 + step, page.plot()["columns"]
        loops[f"zoom {step}"] = page.longest_loop(lambda: (mouse.wheel(0, -100), page.page.wait_for_timeout(100)))
        zoomed = page.plot()["columns"]
        assert zoomed[0] > before[0] and np.diff(zoomed) < np.diff(before)
        loops[f"hover {step}"] = page.longest_loop(lambda key=key: page.hover(2100, key))
        assert page.hover(2100, key)["key"] == f"#{key} {Role(layout.roles[key]).name} position {key}"
        mouse.down()
        x, y = page.place(2100, key)
        loops[f"pan {step}"] = page.longest_loop(lambda x=x, y=y: mouse.move(x + 50, y))
        mouse.up()
        assert page.plot()["columns"][0] < zoomed[0]
    assert max(loops.values()) < 16 * 4096, loops
    assert page.longest_loop(lambda: page.page.evaluate(LOOP)) >= 1e5
    page.page.get_by_role("button", name="Show all").click()
    assert page.plot()["columns"] == [0, 4096] and page.chosen() == []
    cells = np.where(layout.dense_mask(), SHADES * (layout.roles + 1), 0).astype(np.uint8)
    assert bytes(page.page.evaluate(DIGEST)) == sha256(cells.tobytes()).digest()


def test_pixels_of_many_pairs_show_how_many_are_seen(show):
    """Every fourth key is seen by all: from afar neither a full area nor nothing."""
    roles = np.where(np.arange(1024) % 4 == 0, Role.MEMORY, Role.CONTEXT)
    layout = Layout(roles=roles, sees={role: {Role.MEMORY: layouts.ALL} for role in (Role.MEMORY, Role.CONTEXT)})
    page = show(layout_page(layout))
    fine, coarse = page.page.evaluate("view.copies.slice(0, 2).map(copy => [...new Set(copy.cells)])")
    assert set(fine) == {0, 3 * SHADES}
    assert set(coarse) == {0, 2 * SHADES + SHADES // 2}


def test_what_pages_refuse():
    layout = layouts.causal(3)
    with pytest.raises(ValueError, match=r"layout_page: expected a layout of at most 4096 tokens, got 4097"):
        layout_page(layouts.causal(4097))
    with pytest.raises(ValueError, match=r"layout_page: expected 3 tokens, got 2"):
        layout_page(layout, tokens=["a", "b"])
    for tokens in ("abc", ["a", "b", 3]):
        with pytest.raises(TypeError, match=r"layout_page: expected tokens to hold strings, one a token"):
            layout_page(layout, tokens=tokens)
    square = np.full((2, 2), 0.5)
    for weights in (np.zeros(3), np.zeros((0, 3)), np.zeros((2, 3, 4))):
        expected = r"attention_page: expected weights \[Nq, Nk\] or \[layers, heads, Nq, Nk\], got shape \["
        with pytest.raises(ValueError, match=expected):
            attention_page(weights)
    with pytest.raises(ValueError, match=r"attention_page: expected 1 names of heads, got 2"):
        attention_page(square, heads=["0", "1"])
    for wrong in (-0.1, 1.02, np.nan):
        with pytest.raises(ValueError, match=r"attention_page: expected weights from 0 to 1, got"):
            attention_page(np.full((2, 2), wrong))
    with pytest.raises(ValueError, match=r"attention_page: expected weights of at most 4096 tokens, got 4097"):
        attention_page(np.zeros((1, 4097)))
    with pytest.raises(
        ValueError, match=r"attention_page: expected at most 67108864 weights, got 1 layers x 5 heads of 4096 x 4096"
    ):
        attention_page(np.broadcast_to(np.float32(0), (1, 5, 4096, 4096)))
    with pytest.raises(ValueError, match=r"attention_page: expected roles of keys, \[2\] values of Role, got \[1, 9\]"):
        attention_page(square, keys=Tokens(roles=[1, 9]))
    with pytest.raises(ValueError, match=r"attention_page: expected positions of queries, \[2\], got shape \[1, 3\]"):
        attention_page(square, queries=Tokens(positions=[1, 2, 3]))
