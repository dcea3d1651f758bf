"""What the documents point at must be there: files, headings, make targets."""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.tidy.source import ROOT, Finding

LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)
MAKE = re.compile(r"(?:`|^\s*(?:\$ )?)make ([a-z][a-z-]*)", re.MULTILINE)
# A link's target is left to check_links.
IN_THE_TREE = re.compile(r"(?<![\w./-])(?<!\]\()((?:src|tests|docs|scripts|examples|requirements)/[\w./-]+\w)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def markdown_files(root: Path = ROOT) -> list[Path]:
    """The documents that a reader sees."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")])


def anchor(heading: str) -> str:
    """The fragment by which a rendered heading is linked."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """Everything in a document that a link can name."""
    return {anchor(heading) for heading in HEADING.findall(path.read_text("utf-8"))}


def check_links(path: Path, root: Path = ROOT) -> Iterable[Finding]:
    """Relative links, with or without a fragment, to what is not there."""
    text = FENCE.sub(lambda fence: "\n" * fence.group(0).count("\n"), path.read_text("utf-8"))
    name = path.relative_to(root).as_posix()
    for link in LINK.finditer(text):
        target, line = link.group(1), text.count("\n", 0, link.start()) + 1
        if re.match(r"[a-z]+:", target):
            continue
        place, _, fragment = target.partition("#")
        file = (path.parent / place) if place else path
        if not file.exists():
            yield Finding("link", name, line, f"{target} is not there")
        elif fragment and file.suffix == ".md" and fragment not in anchors(file):
            yield Finding("link", name, line, f"{target}: no such heading")


def check_names(path: Path, root: Path = ROOT) -> Iterable[Finding]:
    """Paths of the repository and make targets named in a document that are not there."""
    text = path.read_text("utf-8")
    name = path.relative_to(root).as_posix()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (root / "Makefile").read_text("utf-8"), re.MULTILINE))
    for found in MAKE.finditer(text):
        if found.group(1) not in targets:
            yield Finding("make", name, text.count("\n", 0, found.start()) + 1, f"make {found.group(1)} does not exist")
    for found in IN_THE_TREE.finditer(text):
        if not (root / found.group(1)).exists():
            yield Finding("path", name, text.count("\n", 0, found.start()) + 1, f"{found.group(1)} is not there")
