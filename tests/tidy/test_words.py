"""No file says what it may not, and each forbidden word is caught."""

import pytest

from tests.tidy.source import ROOT
from tests.tidy.words import RULES, check_words, repository_files

BAD = [
    ("note to self", "# TODO: later"),
    ("note to self", "x = 1  # FIXME"),
    ("machine path", "cd /work/main"),
    ("machine path", "see `/tmp/lab/venv`"),
    ("machine path", "open('/root/.cache')"),
    ("machine path", "--find-links=/opt/wheels"),
    ("machine path", "file:///opt/pypi/simple".replace("file://", "")),
    ("registry host", "pip install --index-url https://pypi.org/simple x"),
    ("registry host", "from download.pytorch.org"),
    ("process", "as issue #3 asks"),
    ("process", "fixed in issue 12"),
    ("process", "see design.md, section 7"),
    ("process", "see reference/limits.md"),
]

GOOD = [
    "src/headwater/workload.py",
    "/workload and a/work/b",
    "https://example.org/work-in-progress",
    "the issue: 3 of 4 failed",
    "docs/design.md",
    "todo list",
    "/dev/shm and /tmp/headwater.sock",
    "the root of a chain; ~/work",
]


def test_the_repository_is_clean() -> None:
    files = repository_files()
    assert len(files) > 20
    findings = [
        str(finding)
        for path in files
        for finding in check_words(path.relative_to(ROOT).as_posix(), path.read_text("utf-8", "strict"))
    ]
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(("rule", "line"), BAD)
def test_a_breach_is_caught(rule: str, line: str) -> None:
    assert [finding.rule for finding in check_words("docs/x.md", f"fine\n{line}\n")] == [rule]


@pytest.mark.parametrize("line", GOOD)
def test_good_text_passes(line: str) -> None:
    assert not list(check_words("docs/x.md", line))


def test_every_rule_has_a_breach_that_it_catches() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)
