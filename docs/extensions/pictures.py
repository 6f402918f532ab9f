"""The directive `picture`: code that leaves a matplotlib `figure`, which is drawn when the site is built."""

from __future__ import annotations

import hashlib
from pathlib import Path

import matplotlib
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# Letters become paths, and names of parts are the same in every build.
STYLE = {"svg.fonttype": "path", "svg.hashsalt": "gistkit"}


class Picture(SphinxDirective):
    """Runs its content and shows `figure`, with `:alt:` as its description; the code can be unfolded below.

    The file is beside the doctrees, which have to be in the folder of sources: Sphinx takes pictures from there alone.
    """

    has_content = True
    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        code = "\n".join(self.content)
        path = Path(self.env.doctreedir) / "pictures" / f"{hashlib.sha256(code.encode()).hexdigest()[:16]}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(code, path)
        source = f"/{path.relative_to(self.env.srcdir)}"
        image = nodes.image(uri=source, alt=self.options["alt"], classes=["picture"])
        figure = nodes.figure("", image)
        self.set_source_info(image)
        folded = "<details><summary>How it is drawn</summary>", "</details>"
        before, after = (nodes.raw("", tag, format="html") for tag in folded)
        return [figure, before, nodes.literal_block(code, code, language="python"), after]


def draw(code: str, path: Path) -> None:
    """Runs code and saves the `figure` that it leaves."""
    names: dict = {}
    with matplotlib.rc_context(STYLE):
        exec(compile(code, "picture", "exec"), names)
        names["figure"].savefig(path, metadata={"Date": None}, bbox_inches="tight", pad_inches=0.15)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
