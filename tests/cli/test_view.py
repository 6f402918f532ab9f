"""`gistkit view` and its pages, in a real browser."""

import inspect
import shutil
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

pytest.importorskip("bokeh", reason="the viz extra is not installed")

from gistkit import cli, layouts
from gistkit.cli.view_layout import BUILDERS
from gistkit.cli.view_page import LARGEST
from gistkit.layouts import Layout, Role
from gistkit.layouts.layout import physical_order
from gistkit.viz.layout import ROLE_COLOURS
from gistkit.viz.page import MOST_TOKENS, SHADES, Tokens, attention_page, layout_page

DRAWN = "document.getElementById('state').hidden"
FRAME = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
CELLS = "Array.from(Bokeh.documents[0].get_model_by_name('copy 1').data.image[0])"
DIGEST = """(async () => {
  const cells = Bokeh.documents[0].get_model_by_name("copy 1").data.image[0];
  return Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", cells)));
})()"""
# The rows of the hover box, read at one moment, as {name: text}, if it tells of the tokens `#query` and `#key` (of the
# key alone, where query is null); otherwise null.
TOLD = """([query, key]) => {
  const rows = [];
  const look = root => root.querySelectorAll("*").forEach(element => {
    if (element.shadowRoot) look(element.shadowRoot);
    if (element.matches(".bk-tooltip-content tr")) rows.push(element.innerText.split("\\t"));
  });
  look(document);
  const told = Object.fromEntries(rows.map(([name, ...text]) => [name, text.join("\\t")]));
  const begins = (text, token) => text !== undefined && text.split(" ")[0] === `#${token}`;
  const same = query === null ? told.query === undefined : begins(told.query, query);
  return same && begins(told.key, key) ? told : null;
}"""
# As if it were the page's own.
LOOP = """() => { for (let i = 0; i < 1e5; i++); }
//# sourceURL=file:///loop.js"""
PLOT = """(() => {
  const plot = Bokeh.documents[0].get_model_by_name("NAME"), view = Bokeh.index.find_one(plot);
  const page = view.el.getBoundingClientRect(), { x, y, width, height } = view.frame.bbox;
  const { x_range, y_range } = plot;
  return { left: page.x + x, top: page.y + y, width, height, columns: [x_range.start, x_range.end],
           rows: [y_range.start, y_range.end] };
})()"""


@pytest.fixture(scope="module")
def chromium():
    """A headless browser with no network."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on the PATH")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1000, "height": 1000}, offline=True)
        yield context
        browser.close()


class Page:
    """A page as it is in the browser, with all that it complained of or asked for."""

    def __init__(self, context, path):
        self.complaints, self.requests = [], []
        self.page = context.new_page()
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        # Pages wait for as long as a busy machine may take.
        self.page.set_default_timeout(120_000)
        self.page.goto(path.as_uri())
        self.page.wait_for_function(DRAWN)
        self.page.evaluate(FRAME)

    def cells(self, rows, width):
        """The matrix that is drawn."""
        return np.array(self.page.evaluate(CELLS)).reshape(rows, width)

    def plot(self, name="matrix"):
        """Where a plot is on the screen, and its ranges."""
        return self.page.evaluate(PLOT.replace("NAME", name))

    def place(self, query, key, name="matrix"):
        """Where the middle of a pair is on the screen."""
        plot = self.plot(name)
        (first, last), (bottom, top) = plot["columns"], plot["rows"]
        x = plot["left"] + (key - first) / (last - first) * plot["width"]
        return x, plot["top"] + (query - top) / (bottom - top) * plot["height"]

    def hover(self, query, key, name="matrix", order=None):
        """What the hover box says of a pair, or of a key's position id: {name: text}. order: tokens of the places."""
        tokens = [int(place if order is None else order[place]) for place in (query, key)] if name == "matrix" else None
        tokens = tokens or [None, int(key if order is None else order[key])]
        # The box of before stays until the browser has drawn the next one. What is drawn anew hides the box until the
        # mouse moves again, so it comes back ever later, for two minutes in all.
        for frames in (2**n for n in range(4, 13)):
            self.page.mouse.move(1, 1)
            self.page.mouse.move(*self.place(query, key, name))
            for _ in range(frames):
                self.page.evaluate(FRAME)
                if told := self.page.evaluate(TOLD, tokens):
                    return told
        raise AssertionError(f"the box of tokens {tokens} was never shown")

    def colour(self, x, y):
        """The colour of a place on the screen, "#RRGGBB"."""
        self.page.mouse.move(1, 1)
        self.page.evaluate(FRAME)
        png = self.page.screenshot(clip={"x": round(x), "y": round(y), "width": 1, "height": 1})
        return to_hex(imread(BytesIO(png))[0, 0, :3]).upper()

    def moved(self, act, sign):
        """Acts, and waits until the plot's first column is farther to the right (1) or left (-1), and drawn."""
        first = self.plot()["columns"][0]
        act()
        moved = f"([first, sign]) => sign * ({PLOT.replace('NAME', 'matrix')}.columns[0] - first) > 0"
        self.page.wait_for_function(moved, arg=[first, sign])
        self.page.evaluate(FRAME)

    def longest_loop(self, act):
        """How often the browser runs the piece of the page's script that it runs most often during `act`."""
        profiler = self.page.context.new_cdp_session(self.page)
        profiler.send("Profiler.enable")
        profiler.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})
        act()
        scripts = profiler.send("Profiler.takePreciseCoverage")["result"]
        profiler.detach()
        # What these tests evaluate has no file.
        own = [script for script in scripts if script["url"].startswith("file:")]
        functions = [function for script in own for function in script["functions"]]
        return max(piece["count"] for function in functions for piece in function["ranges"])

    def close(self):
        """Closes it; nothing may have gone wrong, and nothing been asked for but the file and its own script."""
        self.page.close()
        assert not self.complaints
        assert all(url.startswith(("file:", "blob:")) for url in self.requests), self.requests


@pytest.fixture
def show(chromium, tmp_path):
    """Opens pages, and closes them at the end."""
    shown = []

    def open_page(html):
        path = tmp_path / f"{len(shown)}.html"
        path.write_text(html, encoding="utf-8")
        shown.append(Page(chromium, path))
        return shown[-1]

    yield open_page
    for page in shown:
        page.close()


def test_a_layout_is_drawn_as_it_is_and_told_on_hover(show):
    layout = layouts.gistpool(48, 8, 9, windows=2)
    count = len(layout)
    tokens = [f" word{place}\n" for place in range(count)]
    page = show(layout_page(layout, tokens=tokens))
    assert page.page.title() == "GistPool 8x"
    plot = page.plot()
    left, bottom = plot["left"], plot["top"] + plot["height"]
    for button, order in (("Logical", np.arange(count)), ("Physical", physical_order(layout))):
        page.page.get_by_text(button).click()
        page.page.evaluate(FRAME)
        mask = layout.dense_mask(button.lower())
        cells = page.cells(count, count)
        assert ((cells > 0) == mask).all()
        assert (cells == np.where(mask, SHADES * (layout.roles[order] + 1), 0)).all()
        seen = np.argwhere(mask)[::149]
        for query, key in [*seen, (0, count - 1)]:
            told = [
                f"#{its} “ word{its}↵” {Role(layout.roles[its]).name} position {layout.positions[its]}"
                for its in (order[query], order[key])
            ]
            answer = "yes" if mask[query, key] else "no"
            assert page.hover(query, key, order=order) == {"query": told[0], "key": told[1], "seen": answer}
            colour = ROLE_COLOURS[Role(layout.roles[order[key]])] if mask[query, key] else "#FFFFFF"
            x, y = page.place(query, key)
            assert page.colour(x, y) == colour
            strips = [page.colour(left - 10, y), page.colour(x, bottom + 10)]
            assert strips == [ROLE_COLOURS[Role(layout.roles[order[its]])] for its in (query, key)]
        at_key = page.hover(layout.positions[order[9]], 9, "positions", order)
        assert at_key == {"key": page.hover(0, 9, order=order)["key"]}


def test_weights_are_told_to_three_per_cent(show):
    rng = np.random.default_rng(0)
    weights = np.exp(-18 * rng.random((9, 14)))
    weights[:, 3] = [0, 1e-9, 1, 1.005, 0.5, 4.5e-7, 4.3e-7, 1e-5, 1]
    keys = Tokens(positions=np.arange(28).reshape(2, 14) / 2)
    page = show(attention_page({"one": weights, "two": weights[::-1] / 2}, keys=keys, title="<i>$$x$$"))
    assert page.page.title() == page.page.locator("h1").inner_text() == "<i>$$x$$"
    for name, expected in (("one", weights), ("two", weights[::-1] / 2)):
        page.page.locator("select").select_option(name)
        page.page.evaluate(FRAME)
        for query, key in np.ndindex(9, 14):
            if key not in (0, 3):
                continue
            told = page.hover(query, key)
            assert told["query"] == f"#{query}" and told["key"] == f"#{key} position {key / 2:g}, {7 + key / 2:g}"
            weight = expected[query, key]
            if weight == 0:
                assert told["weight"] == "0"
            elif weight < 4.36e-7:
                assert told["weight"] == "below 4.4e-07"
            else:
                assert float(told["weight"]) == pytest.approx(min(weight, 1), rel=0.0345)
    assert not page.page.get_by_text("Physical order").is_visible()


def test_texts_and_titles_are_harmless(show):
    nasty = [
        '</script><b id="b">',
        "<img src=x onerror=alert(1)>",
        "@{label} $x {{ 1 }}",
        "&amp;",
        "\u202e",
        "$$x$$",
        "",
    ]
    shown = [*nasty[:4], "\\u202e", "$$x$$", "∅"]
    layout = layouts.causal(len(nasty))
    page = show(layout_page(layout, tokens=nasty, title="</title><script>alert(2)</script>{{ 3 }}"))
    assert page.page.locator("h1").inner_text() == "</title><script>alert(2)</script>{{ 3 }}"
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
    page.hover(2000, 1000)
    mouse, loops = page.page.mouse, {}
    for step in range(3):
        key = 1100 + step
        loops[f"zoom {step}"] = page.longest_loop(lambda: page.moved(lambda: mouse.wheel(0, -100), 1))
        loops[f"hover {step}"] = page.longest_loop(lambda key=key: page.hover(2100, key))
        assert page.hover(2100, key)["key"] == f"#{key} {Role(layout.roles[key]).name} position {key}"
        mouse.down()
        pan = lambda step=step: page.moved(lambda: mouse.move(500 + step, 500), -1)  # noqa: E731
        loops[f"pan {step}"] = page.longest_loop(pan)
        mouse.up()
    assert max(loops.values()) < 16 * 4096, loops
    assert page.longest_loop(lambda: page.page.evaluate(LOOP)) >= 1e5
    assert np.diff(page.plot()["columns"]) < 4000
    cells = np.where(layout.dense_mask(), SHADES * (layout.roles + 1), 0).astype(np.uint8)
    assert bytes(page.page.evaluate(DIGEST)) == sha256(cells.tobytes()).digest()


def test_pixels_of_many_pairs_show_how_many_are_seen(show):
    """Every fourth key is seen by all: from afar neither a full area nor nothing."""
    roles = np.where(np.arange(1024) % 4 == 0, Role.MEMORY, Role.CONTEXT)
    layout = Layout(roles=roles, sees={role: {Role.MEMORY: layouts.ALL} for role in (Role.MEMORY, Role.CONTEXT)})
    page = show(layout_page(layout))
    copies = page.page.evaluate("[1, 2].map(n => Bokeh.documents[0].get_model_by_name(`copy ${n}`).data.image[0])")
    fine, coarse = (np.array(list(copy.values()) if isinstance(copy, dict) else copy) for copy in copies)
    assert set(fine.tolist()) == {0, 3 * SHADES}
    assert set(coarse.tolist()) == {0, 2 * SHADES + SHADES // 2}


@pytest.mark.parametrize("method", BUILDERS)
def test_every_builder_has_a_command(method, tmp_path, capsys, monkeypatch):
    _, needed, optional, example = BUILDERS[method]
    taken = set(needed.split()) | set(optional.split())
    its = set(inspect.signature(getattr(layouts, method)).parameters)
    # Position ids of several axes have no page.
    assert taken == {"dodo": its - {"selected"} | {"context", "ratio"}, "voco": its - {"ids"}}.get(method, its)
    laid = []
    monkeypatch.setattr("gistkit.viz.page.layout_page", lambda layout: laid.append(layout) or "<html>")
    path = tmp_path / "view.html"
    words = ["view", "layout", method.replace("_", "-"), *example.split(), "-o", str(path)]
    assert cli.main(words) == 0
    assert path.read_text() == "<html>" and f"Written: {path}, 6 B; open it in a browser" in capsys.readouterr().out
    assert len(laid[0]) <= 4096


def test_the_limit_is_that_of_the_page():
    assert LARGEST == MOST_TOKENS


def test_a_command_gives_its_arguments_on(tmp_path, monkeypatch):
    laid = []
    monkeypatch.setattr("gistkit.viz.page.layout_page", lambda layout: laid.append(layout) or "")
    monkeypatch.chdir(tmp_path)
    words = "--context 20 --ratio 4 --text 3 --windows all --memory-sees-memory --no-memory-sees-bos"
    assert cli.main(["view", "layout", "gistpool", *words.split()]) == 0
    expected = layouts.gistpool(20, 4, 3, windows=None, memory_sees_memory=True, memory_sees_bos=False)
    assert (laid[0].dense_mask() == expected.dense_mask()).all() and Path("view.html").exists()
    assert cli.main(["view", "layout", "gist", "--context", "20", "--ratio", "2.5"]) == 0
    assert (laid[1].roles == layouts.gist(20, 2.5).roles).all()
    assert cli.main(["view", "layout", "dodo", "--context", "9", "--ratio", "4", "--tau", "2", "--bos"]) == 0
    assert np.flatnonzero(laid[2].roles == Role.MEMORY).tolist() == [3, 7] and laid[2].roles[0] == Role.BOS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gistpool --context 64 --ratio 2.5", "gistkit: gistpool: expected ratio to be an int, got float"),
        ("avgpool --context 9 --ratio 0", "gistkit: avgpool: expected ratio >= 1, got 0"),
        ("gist --context 4000 --ratio 4", "layout_page: expected a layout of at most 4096 tokens, got 5001"),
        ("dodo --context 9 --ratio 1.5 --tau 2", "dodo: expected ratio to be a whole number of at least 1, got 1.5"),
        ("causal --length 5000", "argument --length: expected a whole number from 0 to 4096, got '5000'"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    try:
        status = cli.main(["view", "layout", *words.split(), "-o", "/nonexistent/view.html"])
    except SystemExit as stop:
        status = stop.code
    lines = capsys.readouterr().err.splitlines()
    assert status == 2 and message in lines[-1], lines


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
    for weights in (np.zeros(3), np.zeros((0, 3)), {}, {"a": square, "b": np.zeros((2, 3))}):
        with pytest.raises(
            ValueError, match=r"attention_page: expected weights \[Nq, Nk\], all of one shape, got shapes"
        ):
            attention_page(weights)
    for wrong in (-0.1, 1.02, np.nan):
        with pytest.raises(ValueError, match=r"attention_page: expected weights from 0 to 1, got"):
            attention_page(np.full((2, 2), wrong))
    with pytest.raises(ValueError, match=r"attention_page: expected weights of at most 4096 tokens, got 4097"):
        attention_page(np.zeros((1, 4097)))
    with pytest.raises(
        ValueError, match=r"attention_page: expected at most 67108864 weights, got 5 maps of 4096 x 4096"
    ):
        attention_page(dict.fromkeys("abcde", np.zeros((4096, 4096), np.float32)))
    with pytest.raises(ValueError, match=r"attention_page: expected roles of keys, \[2\] values of Role, got \[1, 9\]"):
        attention_page(square, keys=Tokens(roles=[1, 9]))
    with pytest.raises(ValueError, match=r"attention_page: expected positions of queries, \[2\], got shape \[1, 3\]"):
        attention_page(square, queries=Tokens(positions=[1, 2, 3]))
