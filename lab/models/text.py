"""The text that the trained compressors learn from: manuals of Debian's packages as pages of plain text.

Nothing of it is kept in this repository. The packages' HTML is read where apt has put it, and every page with enough
text becomes a file. The pages of packages of other domains are in folders of their own, and no training reads them.

example: python lab/models/text.py --packages   # for apt-get install --no-install-recommends; then without it
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inscriptis import Inscriptis
from lxml import html
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "runs" / "models" / "text"
# Debian's package, and which of its files are pages of the manual in English.
PACKAGES = {
    "aptitude-doc-en": r".*\.html",
    "debian-faq": r".*\.en\.html",
    "debian-handbook": r".*/en-US/.*\.html",
    "debian-policy": r".*\.html",
    "debian-reference-en": r".*\.en\.html",
    "debmake-doc": r".*\.en\.html",
    "developers-reference": r".*\.html",
    "exim4-doc-html": r".*\.html",
    "gimp-help-en": r".*\.html",
    "git-doc": r".*\.html",
    "gnucash-docs": r".*/gnucash-(?:guide|help)-en/.*\.html",
    "postgresql-doc-15": r".*\.html",
    "python-django-doc": r".*\.html",
    "python3.11-doc": r".*/(?:faq|howto|tutorial|library|using|distutils|extending|reference|whatsnew)/.*\.html",
    "sphinx-doc": r".*\.html",
    "sqlite3-doc": r".*\.html",
}
# A manual of another subject, by other authors.
OTHER = {"homebank-data": r".*\.html"}
# How peoples see the sky: essays and stories, for questions about long texts.
SKY = {"stellarium-data": r".*/skycultures/[^/]+/description\.en\.utf8"}
KINDS = {"manuals": PACKAGES, "other": OTHER, "sky": SKY}
# Lists of names rather than prose.
INDEX = re.compile(r"(?:gen|py-mod)?index(?:-.*)?\.html|search\.html|.*(?:toc|changelog|contents|keyword_index)\.html")
# Where a page's own text is, by the generators that made it.
BODY = ("//main", "//*[@role='main']", "//div[@class='body']", "//body")
ASIDE = "//script|//style|//nav|//header|//footer|//*[contains(@class,'navigation') or contains(@class,'navheader') or "
ASIDE += "contains(@class,'navfooter') or contains(@class,'headerlink') or contains(@class,'sidebar')]"
# Characters of a page that is worth reading, and the greatest share of its words that may not be words of letters.
LEAST = 1500
MOST_SIGNS = 0.35


def pages(package: str, pattern: str) -> Iterator[tuple[str, str]]:
    """The path and the text of each page of a package, in the order of paths.

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    listed = subprocess.run(["dpkg-query", "-L", package], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise FileNotFoundError(f"{package}: expected Debian's package, got none; run apt-get install {package}")
    for name in sorted(listed.stdout.splitlines()):
        path = Path(name)
        plain = name.removesuffix(".gz")
        if not re.fullmatch(pattern, plain) or INDEX.fullmatch(Path(plain).name) or not path.is_file():
            continue
        content = path.read_bytes()
        if text := page_text(gzip.decompress(content) if name.endswith(".gz") else content):
            yield name, text


def page_text(content: bytes) -> str:
    """The text of an HTML page without what surrounds it; "" if it is too short, or hardly made of words."""
    if not content.strip():
        return ""
    tree = html.fromstring(content)
    for element in tree.xpath(ASIDE):
        element.drop_tree()
    body = next(found for path in (*BODY, "/*") if len(found := tree.xpath(path)))
    lines = [
        re.sub(r"(?<=\S)[ \t]+", " ", line.replace("¶", "").rstrip())
        for line in Inscriptis(body[0]).get_text().splitlines()
    ]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    words = text.split()
    signs = sum(not any(map(str.isalpha, word)) for word in words)
    return text + "\n" if len(text) >= LEAST and signs <= MOST_SIGNS * len(words) else ""


def versions() -> dict[str, str]:
    """The installed version of each package."""
    format_ = "-f=${Package} ${Version}\\n"
    names = [name for packages in KINDS.values() for name in packages]
    listed = subprocess.run(["dpkg-query", "-W", format_, *names], capture_output=True, text=True, check=True)
    return dict(sorted(line.split() for line in listed.stdout.splitlines()))


def write(out: Path = OUT) -> dict[str, Any]:
    """Writes the pages to out/manuals, out/other and out/sky, without a page that repeats another; what there is."""
    found: dict[str, Any] = {"packages": versions(), "pages": {}, "bytes": {}}
    seen: set[str] = set()
    for kind, packages in KINDS.items():
        for package, pattern in tqdm(packages.items(), desc=kind, unit="package"):
            folder = out / kind / package
            folder.mkdir(parents=True, exist_ok=True)
            sizes = []
            for path, text in pages(package, pattern):
                if text in seen:
                    continue
                seen.add(text)
                # Files of the sky's cultures differ in their folders.
                own = Path(path).parent if package in SKY else Path(path)
                name = f"{len(sizes):04}-{re.sub(r'[^A-Za-z0-9]+', '-', own.name.partition('.html')[0])}.txt"
                (folder / name).write_text(text)
                sizes.append(len(text.encode()))
            found["pages"][package], found["bytes"][package] = len(sizes), sum(sizes)
    (out / "text.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> int:
    """Writes the pages, or says which packages they are of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="store_true", help="print the names of Debian's packages and stop")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the pages (default: %(default)s)")
    options = parser.parse_args()
    if options.packages:
        print(" ".join(name for packages in KINDS.values() for name in packages))
        return 0
    found = write(options.out)
    for package, count in found["pages"].items():
        print(f"{package:24} {count:5} pages {found['bytes'][package] / 1e6:7.2f} MB")
    print(f"{'all':24} {sum(found['pages'].values()):5} pages {sum(found['bytes'].values()) / 1e6:7.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
