"""The names that a disk must not know any more: for good once they are said, whatever becomes of the file's end."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.tiers import direct_io
from headwater.tiers.private_directory import PrivateDirectory
from headwater.tiers.retired import FILE, Retired
from tests.tiers.disks import LARGE, SMALL, Slots, chain
from tests.tiers.disks import opened as disk

ROOTS = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
RECORD = 48


@contextmanager
def opened(path: Path) -> Iterator[Retired]:
    directory = PrivateDirectory(path, "disk")
    try:
        yield Retired(directory)
    finally:
        directory.close()


def test_names_follow_each_other_and_lead_back(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as names:
        assert [names.current(ROOTS[0]), names.base(ROOTS[0]), len(names)] == [ROOTS[0], ROOTS[0], 0]
        seen = [ROOTS[0]]
        for _ in range(5):
            names.add(names.current(ROOTS[0]))
            names.add(seen[-1])  # twice is once
            seen.append(names.current(ROOTS[0]))
        assert len(set(seen)) == 6
    assert (tmp_path / "kv" / FILE).stat().st_size == 5 * RECORD
    with opened(tmp_path / "kv") as names:
        assert names.current(ROOTS[0]) == seen[-1]
        assert [names.base(it) for it in seen] == [ROOTS[0]] * 6
        assert [it in names for it in seen] == [True] * 5 + [False]
        assert names.base(ROOTS[1]) == names.current(ROOTS[1]) == ROOTS[1]
    assert seen[1] == hashlib.sha256(b"headwater.cleared" + ROOTS[0]).digest(), "the names on disks never change"


@pytest.mark.parametrize("cut", [1, 20, RECORD - 1])
def test_an_end_that_was_cut_off_is_written_over(tmp_path: Path, cut: int) -> None:
    with opened(tmp_path / "kv") as names:
        for root in ROOTS[:3]:
            names.add(root)
    os.truncate(tmp_path / "kv" / FILE, 3 * RECORD - cut)
    with opened(tmp_path / "kv") as names:
        assert [it in names for it in ROOTS] == [True, True, False, False]
        names.add(ROOTS[3])
    with opened(tmp_path / "kv") as names:
        assert [it in names for it in ROOTS] == [True, True, False, True]


def test_a_record_that_is_none_of_ours_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "kv") as names:
        for root in ROOTS[:3]:
            names.add(root)
    with (tmp_path / "kv" / FILE).open("r+b") as file:
        file.seek(RECORD)
        file.write(b"HWRTIR2\n")
        file.seek(2 * RECORD + 10)
        file.write(b"?")
    with caplog.at_level(logging.WARNING), opened(tmp_path / "kv") as names:
        assert [it in names for it in ROOTS] == [True, False, False, False]
        names.add(ROOTS[1])
    assert "2 records are damaged or of a newer headwater" in caplog.text
    with opened(tmp_path / "kv") as names:
        assert [it in names for it in ROOTS] == [True, True, False, False]


def test_a_name_is_synced_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = direct_io.sync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(direct_io, "sync", watched)
    with opened(tmp_path / "kv") as names:
        names.add(ROOTS[0])
        names.add(ROOTS[1])
    assert synced == [FILE, "kv", FILE]


def test_what_could_not_be_synced_is_not_retired_and_can_be_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    with opened(tmp_path / "kv") as names:
        with monkeypatch.context() as patch:
            patch.setattr(direct_io, "sync", broken)
            with pytest.raises(OSError, match="No space"):
                names.add(ROOTS[0])
        assert names.current(ROOTS[0]) == ROOTS[0]
        names.add(ROOTS[0])
        names.add(ROOTS[1])
    with opened(tmp_path / "kv") as names:
        assert [it in names for it in ROOTS] == [True, True, False, False]


def test_a_record_that_was_not_written_whole_is_not_retired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is full may take a part without an error."""
    with opened(tmp_path / "kv") as names:
        with monkeypatch.context() as full:
            write = os.pwrite
            full.setattr(os, "pwrite", lambda file, record, offset: write(file, record[:20], offset))
            with pytest.raises(OSError, match="No space left"):
                names.add(ROOTS[0])
        assert names.current(ROOTS[0]) == ROOTS[0]
        names.add(ROOTS[0])
    with opened(tmp_path / "kv") as names:
        assert names.current(ROOTS[0]) != ROOTS[0]


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "kv"):
        pass
    (tmp_path / "kv" / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="retired in it is not a file of ours"), opened(tmp_path / "kv"):
        pass


def test_a_disk_that_is_cleared_every_day_stays_small(tmp_path: Path) -> None:
    """What a clear leaves in the journal is gone after the next start but one."""
    for life in range(4):
        with disk(tmp_path) as tier:
            assert [it.identity for it in tier.recover()] == [], f"life {life}"
            for _ in range(5):
                of = replace(SMALL, root=tier.retired.current(SMALL.root))
                Slots(tier).store(chain(3, of))
                tier.journal.flush()
                tier.retired.add(of.root)
            assert len(tier.journal.origins) <= 6
    with disk(tmp_path) as tier:
        chunks = [*chain(2, replace(SMALL, root=tier.retired.current(SMALL.root))), *chain(2, LARGE)]
        Slots(tier).store(chunks)
    with disk(tmp_path) as tier:
        assert [it.identity for it in tier.recover()] == chunks
        assert len(tier.journal.origins) == 2
