"""Pages in a real browser: what they show, and all that they complain of."""

import re
import shutil
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

DRAWN = "document.getElementById('state')?.hidden ?? true"
FRAME = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
# The box beside the mouse as {name: text}, or null.
TOLD = """() => {
  const box = document.getElementById("box");
  const told = [...box.rows].map(row => [...row.cells].map(cell => cell.textContent));
  return box.hidden ? null : Object.fromEntries(told);
}"""
PLOT = """(id => {
  const page = document.getElementById(id).getBoundingClientRect(), { left, top, width, height } = view.frame;
  return { left: page.x + left, top: page.y + top, width, height, columns: view.columns, rows: view.lines };
})"""
# Each piece of text that is seen, with its colour, and the backgrounds from its element's outwards.
INK = """() => {
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].filter(node => node.nodeType === 3 && node.data.trim());
    if (!own.length || !element.checkVisibility() || element.closest("script") || element.disabled) continue;
    const grounds = [];
    for (let at = element; at; at = at.parentElement) grounds.push(getComputedStyle(at).backgroundColor);
    found.push([own[0].data.trim(), getComputedStyle(element).color, grounds]);
  }
  return found;
}"""


@contextmanager
def a_browser():
    """A headless chromium; the test is skipped where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on the PATH")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A page as it is in the browser, without a network, with all that it complained of or asked for."""

    def __init__(self, browser, path, width=1000, scheme="light"):
        self.complaints, self.requests = [], []
        self.context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme, offline=True)
        self.page = self.context.new_page()
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        # Pages wait for as long as a busy machine may take.
        self.page.set_default_timeout(120_000)
        self.page.goto(path.as_uri())
        self.settle()

    def settle(self):
        """Waits until the page is drawn."""
        self.page.wait_for_function(DRAWN)
        self.page.evaluate(FRAME)

    def cells(self, rows, width):
        """The map that is drawn, in the order of the page."""
        return np.array(self.page.evaluate("Array.from(shown.moved)")).reshape(rows, width)

    def plot(self, name="matrix"):
        """Where a plot is on the screen, and what part of the map it shows."""
        return self.page.evaluate(f"{PLOT}('{name}')")

    def place(self, query, key, name="matrix"):
        """Where the middle of a pair is on the screen."""
        plot = self.plot(name)
        (first, last), (upper, lower) = plot["columns"], plot["rows"]
        x = plot["left"] + (key + 0.5 - first) / (last - first) * plot["width"]
        return x, plot["top"] + (query + 0.5 - upper) / (lower - upper) * plot["height"]

    def point(self, x, y):
        """What the box says when the mouse comes to a place."""
        self.page.mouse.move(x, y)
        self.page.evaluate(FRAME)
        return self.page.evaluate(TOLD)

    def hover(self, query, key):
        """What the box says of a pair."""
        return self.point(*self.place(query, key))

    def colour(self, x, y):
        """The colour of a place on the screen, "#RRGGBB"."""
        self.page.mouse.move(1, 1)
        self.page.evaluate(FRAME)
        png = self.page.screenshot(clip={"x": round(x), "y": round(y), "width": 1, "height": 1})
        return to_hex(imread(BytesIO(png))[0, 0, :3]).upper()

    def tokens(self, strip=0):
        """The tokens of a text, to click."""
        return self.page.locator(".strip").nth(strip).locator("[role=option]")

    def chosen(self):
        """The numbers of the tokens that are chosen."""
        return self.page.evaluate(
            "[...document.querySelectorAll('.strip')].flatMap(strip => [...strip.querySelectorAll('[role=option]')]"
            ".flatMap((token, place) => token.ariaSelected === 'true' ? [place] : []))"
        )

    def text_colours(self, strip=0):
        """The background of each token, as red, green and blue from 0 to 1, or None."""
        colours = self.tokens(strip).evaluate_all("all => all.map(token => token.style.background)")
        return [channels(colour)[:3] if colour else None for colour in colours]

    def contrasts(self):
        """{text: its contrast with what is behind it}, from 1 to 21."""
        found = {}
        for text, ink, grounds in self.page.evaluate(INK):
            behind = np.ones(3)
            for ground in reversed(grounds):
                *colour, opacity = channels(ground)
                behind = opacity * np.array(colour) + (1 - opacity) * behind
            found[text] = min(found.get(text, 21), contrast(channels(ink)[:3], behind))
        return found

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
        return max((piece["count"] for function in functions for piece in function["ranges"]), default=0)

    def close(self):
        """Closes it; nothing may have gone wrong, and nothing been asked for but the file."""
        self.context.close()
        assert not self.complaints
        assert all(url.startswith("file:") for url in self.requests), self.requests


def channels(colour):
    """Red, green, blue and opacity, 0 to 1, of "rgb(...)" or "rgba(...)"."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour)]
    return [*(number / 255 for number in numbers[:3]), *(numbers[3:] or [1.0])]


def luminance(colour):
    """As in the Web Content Accessibility Guidelines 2.2, of red, green and blue from 0 to 1."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one, other):
    """From 1, the same, to 21, black on white."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
