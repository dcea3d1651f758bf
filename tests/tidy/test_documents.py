"""What the documents name is there, and the one version is written the same everywhere."""

import tomllib
from pathlib import Path

import pytest

import headwater
from tests.tidy.documents import anchor, check_links, check_names, markdown_files
from tests.tidy.source import ROOT


def test_the_documents_point_at_what_is_there() -> None:
    files = markdown_files()
    assert files
    findings = [str(it) for path in files for check in (check_links, check_names) for it in check(path)]
    assert not findings, "\n" + "\n".join(findings)


@pytest.fixture
def little_root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "Makefile").write_text("test: setup\nsetup:\n")
    (tmp_path / "docs" / "there.md").write_text("# Some `code`, and a word\n\n## Second\n")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "[x](docs/gone.md)",
        "(docs/gone.md) is in brackets but not a link",
        "![picture](docs/gone.svg)",
        "[x](docs/there.md#third)",
        "[x](#nowhere)",
        "`make nonsense`",
        "```\nmake nonsense\n```",
        "see `src/headwater/gone.py`",
        "see tests/gone/",
    ],
)
def test_a_breach_is_caught(little_root: Path, text: str) -> None:
    (little_root / "README.md").write_text(text)
    found = [it for path in markdown_files(little_root) for check in (check_links, check_names)
             for it in check(path, little_root)]  # fmt: skip
    assert len(found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[x](docs/there.md) [y](docs/there.md#second) [z](https://example.org/gone.md) [m](mailto:a@b)",
        "[x](docs/there.md#some-code-and-a-word)",
        "# Here\n[x](#here)",
        "`make test` and make sense; `make setup`",
        "`docs/there.md`, and /usr/src/gone.py",
        "```\n[x](gone.md)\n```",
    ],
)
def test_good_text_passes(little_root: Path, text: str) -> None:
    (little_root / "README.md").write_text(text)
    found = [*check_links(little_root / "README.md", little_root), *check_names(little_root / "README.md", little_root)]
    assert found == []


def test_headings_become_anchors() -> None:
    assert anchor("A `b` & C-d, (e)") == "a-b--c-d-e"


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert headwater.__version__ == project["version"]
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()
