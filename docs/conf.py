"""The site of documentation, which `make docs` builds from the repository as it is: its root is Sphinx's source folder.

So README, guide, notebooks and results are pages where they stand, and their links are links of the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import gistkit

project = "gistkit"
version = release = gistkit.__version__
project_copyright = "the gistkit developers, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
extensions += ["api", "contents", "docstrings", "methods", "pictures", "results"]

root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs/*.md", "docs/methods/*.md", "docs/api/*.rst", "notebooks/*.ipynb"),
    *("benchmarks/README.md", "benchmarks/results/README.md"),
    *(
        "csrc/README.md",
        "csrc/cuda/README.md",
        "models/README.md",
        "models/*/README.md",
        "examples/README.md",
        "lab/README.md",
    ),
]
exclude_patterns = ["docs/contents.md", "build", "dist", "runs", "python", "tests", ".*", "**/.*"]

# A heading is a target, as on a forge, and a notebook's outputs are those that are committed.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"
nb_merge_streams = True

# Quotation marks are part of values.
smartquotes = False
nitpicky = True
# Without a network there is no index of other projects' names.
nitpick_ignore_regex = [(r"py:.*", r"(?!gistkit).*")]
add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"ArrayLike": "numpy.typing.ArrayLike"}
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"gistkit {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to-front-page.html"}
templates_path = ["_templates"]
html_show_sourcelink = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
