"""How much of a file system the DISK tier takes: never more than allowed, never the reserve."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import ResourceError
from headwater.ports import Piece
from headwater.tiers import direct_io
from headwater.tiers.direct_io import free_bytes
from headwater.tiers.disk import DiskTier
from headwater.tiers.private_directory import PrivateDirectory
from headwater.tiers.slab_files import RESERVE_BYTES, SlabFiles
from headwater.types import Outcome
from tests.tiers.disks import (
    KIB,
    MIB,
    SIZE_BYTES,
    SLAB_BYTES,
    Slots,
    chain,
    content,
    descriptors,
    opened,
    read_back,
    segment_file,
    tmpfs,
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test closes its files."""
    before = descriptors()
    yield
    assert descriptors() == before


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[PrivateDirectory]:
    it = PrivateDirectory(tmp_path / "kv", "disk")
    yield it
    it.close()


def taken(path: Path) -> int:
    """What the files of a directory take of their file system."""
    return sum(it.stat().st_blocks * 512 for it in path.iterdir())


def sizes(directory: PrivateDirectory, size_bytes: int, reserve_bytes: int | None = 0) -> tuple[int, ...]:
    """The segments that are given; of at most four slabs each."""
    files = SlabFiles(directory, size_bytes, SLAB_BYTES, reserve_bytes, segment_bytes=4 * SLAB_BYTES)
    files.close()
    on_disk = sorted(it for it in directory.path.iterdir() if it.name.startswith(f"slabs-1-{SLAB_BYTES}"))
    assert [it.stat().st_size for it in on_disk] == list(files.sizes)
    assert [it.stat().st_mode & 0o7777 for it in on_disk] == [0o600] * len(on_disk)
    return files.sizes


def test_room_is_whole_slabs_in_segments_and_really_there(directory: PrivateDirectory) -> None:
    four = 4 * SLAB_BYTES
    assert sizes(directory, 9 * SLAB_BYTES + 17) == (four, four, SLAB_BYTES)
    assert 9 * SLAB_BYTES <= taken(directory.path) <= 9 * SLAB_BYTES + 32 * KIB


@pytest.mark.parametrize("slabs", [1, 3, 4, 5, 9, 20])
def test_growing_and_shrinking_keep_what_still_fits(directory: PrivateDirectory, slabs: int) -> None:
    files = SlabFiles(directory, 9 * SLAB_BYTES, SLAB_BYTES, 0, segment_bytes=4 * SLAB_BYTES)
    assert files.kept == (0, 0, 0)
    files.close()
    files = SlabFiles(directory, slabs * SLAB_BYTES, SLAB_BYTES, 0, segment_bytes=4 * SLAB_BYTES)
    assert sum(files.sizes) == slabs * SLAB_BYTES
    assert sum(files.kept) == min(slabs, 9) * SLAB_BYTES
    assert taken(directory.path) <= slabs * SLAB_BYTES + 32 * KIB
    files.close()


def test_chunks_beyond_a_smaller_size_are_gone_and_the_others_stay(tmp_path: Path) -> None:
    chunks = chain(40)
    with opened(tmp_path) as tier:
        places = {it.identity: it.place for it in Slots(tier).store(chunks)}
    with opened(tmp_path, 2 * MIB + 3 * SLAB_BYTES) as tier:
        found = list(tier.recover())
        assert [it.identity for it in found] == [it for it in chunks if places[it] < 3 * SLAB_BYTES]
        assert len(found) == 15
        pieces = [Piece(it.identity, content(it.identity), it.place) for it in found]
        assert read_back(tier, pieces) == [Outcome.DONE] * 15
    with opened(tmp_path) as tier:
        assert [it.identity for it in tier.recover()] == chunks[:15], "what was cut off does not come back"
    assert taken(tmp_path) <= SIZE_BYTES


def test_slabs_of_another_size_are_given_up_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as tier:
        Slots(tier).store(chain(5))
    with opened(tmp_path, slab_bytes=2 * SLAB_BYTES) as tier:
        assert list(tier.recover()) == []
        assert read_back(tier, Slots(tier).store(chain(5))) == [Outcome.DONE] * 5
    assert f"had slabs of another size than {2 * SLAB_BYTES} bytes; what they held is gone" in caplog.text
    assert not segment_file(tmp_path).exists()
    assert taken(tmp_path) <= SIZE_BYTES


def test_a_newer_versions_files_stay_and_count(tmp_path: Path) -> None:
    newer = {"slabs-2-65536-0000": 3 * SLAB_BYTES, "slabs-99-4096-0123.new": SLAB_BYTES, "journal-2.db": 8192}
    tmp_path.chmod(0o700)
    PrivateDirectory(tmp_path, "disk").close()
    for name, size in newer.items():
        (tmp_path / name).write_bytes(b"\x5a" * size)
    with opened(tmp_path, 2 * MIB + 10 * SLAB_BYTES) as tier:
        assert sum(tier.segments_bytes) == 5 * SLAB_BYTES
    with pytest.raises(ResourceError, match=rf"of which {4 * SLAB_BYTES + 8192} are held by a newer version"):
        DiskTier(tmp_path, 2 * MIB + 4 * SLAB_BYTES, SLAB_BYTES, reserve_bytes=0)
    for name, size in newer.items():
        assert (tmp_path / name).read_bytes() == b"\x5a" * size


@pytest.mark.parametrize("size", [0, SLAB_BYTES, 2 * MIB + SLAB_BYTES - 1])
def test_less_than_a_slab_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ResourceError, match=rf"a slab of {SLAB_BYTES} bytes does not fit"):
        DiskTier(tmp_path, size, SLAB_BYTES, reserve_bytes=0)
    with opened(tmp_path, 2 * MIB + SLAB_BYTES) as tier:
        assert tier.segments_bytes == (SLAB_BYTES,)


# ---- a file system that is small ---------------------------------------------------------------------------


def test_the_reserve_stays_free(caplog: pytest.LogCaptureFixture) -> None:
    with tmpfs(64) as place, caplog.at_level(logging.WARNING), opened(place, 1 << 40, MIB, 24 * MIB) as tier:
        free = os.statvfs(place)
        assert 20 * MIB <= free.f_bavail * free.f_frsize <= 25 * MIB
        assert 39 * MIB <= sum(tier.segments_bytes) <= 40 * MIB
        assert "the file system has room for" in caplog.text
        assert str(24 * MIB) in caplog.text


def test_what_is_ours_already_counts_as_free_for_us() -> None:
    with tmpfs(64) as place:
        for _ in range(3):
            with opened(place, 48 * MIB, MIB, 8 * MIB) as tier:
                assert sum(tier.segments_bytes) == 46 * MIB
        (place / "foreign").write_bytes(bytes(12 * MIB))
        with opened(place, 48 * MIB, MIB, 8 * MIB) as tier:
            assert 42 * MIB <= sum(tier.segments_bytes) < 46 * MIB, "others came: we give way"


def test_the_usual_reserve_is_a_gibibyte() -> None:
    with tmpfs(64) as place:
        with pytest.raises(ResourceError, match=rf"{RESERVE_BYTES} kept in reserve; free some"):
            DiskTier(place, 32 * MIB, MIB)
        assert sorted(it.name for it in place.iterdir()) == ["owner"]


def test_room_that_goes_away_while_it_is_claimed(directory: PrivateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes at the same time: with less than was counted on, count again."""
    real, limit = direct_io.allocate, [5 * SLAB_BYTES]

    def short(descriptor: int, size_bytes: int) -> bool:
        others = sum(it.stat().st_size for it in directory.path.glob("slabs*")) - os.fstat(descriptor).st_size
        if others + size_bytes > limit[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, size_bytes)

    monkeypatch.setattr(direct_io, "allocate", short)
    monkeypatch.setattr(direct_io, "free_bytes", lambda _: (9 * SLAB_BYTES, MIB))
    assert sizes(directory, 3 * SLAB_BYTES) == (3 * SLAB_BYTES,)
    limit[0] = 3 * SLAB_BYTES
    assert sizes(directory, 5 * SLAB_BYTES) == (3 * SLAB_BYTES,), "what was there before is not lost"
    limit[0] = 5 * SLAB_BYTES
    assert sizes(directory, 6 * SLAB_BYTES) == (4 * SLAB_BYTES, SLAB_BYTES)
    limit[0] = 0
    for path in directory.path.glob("slabs*"):
        path.unlink()
    with pytest.raises(ResourceError, match=f"cannot reserve {5 * SLAB_BYTES} bytes: .*No space left"):
        sizes(directory, 5 * SLAB_BYTES)


def test_a_file_system_that_cannot_reserve_gets_sparse_files(
    directory: PrivateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unable:
        @staticmethod
        def fallocate(*arguments: object) -> int:
            direct_io.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(direct_io, "_libc", Unable)
    assert sizes(directory, 4 * SLAB_BYTES) == (4 * SLAB_BYTES,)
    assert taken(directory.path) < 4 * SLAB_BYTES
    monkeypatch.undo()
    assert sizes(directory, 4 * SLAB_BYTES) == (4 * SLAB_BYTES,)
    assert taken(directory.path) >= 4 * SLAB_BYTES, "and real ones where it can"


def test_free_bytes_are_those_of_the_file_system(directory: PrivateDirectory) -> None:
    found = os.statvfs(directory.path)
    free, total = free_bytes(directory.descriptor)
    assert total == found.f_blocks * found.f_frsize
    assert 0 < free < total
