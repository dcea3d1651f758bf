"""What no file of the repository says: notes to self, places on one person's machine, hosts of package indexes."""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.tidy.source import ROOT, Finding

FOLDERS = ("src", "tests", "scripts", "docs", "examples", "benchmarks", "requirements", ".ci")
SUFFIXES = {"", ".py", ".pyi", ".c", ".h", ".md", ".toml", ".lock", ".json", ".txt", ".in", ".sh", ".html", ".js"}
# These two spell out what they forbid.
SPARED = {"tests/tidy/words.py", "tests/tidy/test_words.py"}

RULES: dict[str, re.Pattern[str]] = {
    "note to self": re.compile(r"\b(TODO|FIXME|XXX)\b"),
    "machine path": re.compile(r"(?<![\w./~-])(/work|/tmp/lab|/opt/pypi|/opt/wheels|/root|/home/\w+)(?![\w-])"),
    "registry host": re.compile(r"\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.org)\b"),
    "process": re.compile(
        r"\bissues? #?\d+\b|\bissues show\b|\bBRIEF\.md\b|(?<!/)\bdesign\.md\b"
        r"|\breference/(vllm|limits|baselines|reliability|style|peers|lmcache|mooncake)\.md\b|\bsub-?agents?\b"
    ),
}


def repository_files() -> list[Path]:
    """Every text file that is part of the repository, generated and ignored ones left out."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    generated = ("__pycache__", ".egg-info")
    return sorted(
        path for path in found if path.suffix in SUFFIXES and not any(mark in path.as_posix() for mark in generated)
    )


def check_words(path: str, text: str) -> Iterable[Finding]:
    """Every line that says what it may not."""
    if path in SPARED:
        return
    for number, line in enumerate(text.splitlines(), 1):
        for rule, pattern in RULES.items():
            found = pattern.search(line)
            if found:
                yield Finding(rule, path, number, found.group(0))
