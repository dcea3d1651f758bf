"""Whatever happens to its files and its device: the DISK tier may forget a chunk, and never gives wrong bytes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash

from headwater.errors import ConfigError, HeadwaterError, ResourceError, UnavailableError
from headwater.ports import Piece
from headwater.tiers import direct_io, private_directory, slab_files
from headwater.tiers.direct_io import aligned_buffer
from headwater.tiers.disk import DiskTier
from headwater.tiers.journal import Journal, UnreadableError
from headwater.types import PAGE_BYTES, Outcome
from tests.tiers.disks import (
    LARGE,
    MIB,
    SLAB_BYTES,
    Slots,
    chain,
    chunk,
    content,
    descriptors,
    empty,
    opened,
    read_back,
    segment_file,
    soon,
    tmpfs,
)

ROUNDS = int(os.environ.get("HEADWATER_TEST_SOAK_ROUNDS", "120"))
SLOT = 3 * PAGE_BYTES
FEW_SLABS_BYTES = 2 * MIB + 4 * SLAB_BYTES


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test closes its files, whatever failed."""
    before = descriptors()
    yield
    assert descriptors() == before


# ---- bytes that changed ------------------------------------------------------------------------------------


def flips(rng: random.Random) -> list[tuple[str, int]]:
    """Bits to flip, by region: all of the fields, and samples of what is large."""
    fields = [("field", bit) for bit in range(8 * 240)]
    origin = [("origin", bit) for bit in rng.sample(range(8 * 240, 8 * 480), 600)]
    filler = [("filler", bit) for bit in rng.sample(range(8 * 480, 8 * (PAGE_BYTES - 8)), 1200)]
    checksum = [("checksum", bit) for bit in range(8 * (PAGE_BYTES - 8), 8 * PAGE_BYTES)]
    payload = [("payload", bit) for bit in sorted(rng.sample(range(8 * PAGE_BYTES, 8 * SLOT), 1600))]
    return fields + origin + filler + checksum + payload


def test_every_bit_that_flips_is_noticed(tmp_path: Path, seed: int) -> None:
    """On the device, and read from there."""
    bits = flips(random.Random(seed))
    assert len(bits) >= 5000
    with opened(tmp_path) as tier:
        (piece,) = Slots(tier).store([chunk("x")])
        raw = aligned_buffer(SLOT)
        assert tier._files.read(piece.place, [raw]) == SLOT
        target = empty(piece)
        undetected = []
        before = 0
        for region, bit in bits:
            page = bit // 8 // PAGE_BYTES * PAGE_BYTES
            if page != before:
                tier._files.write(piece.place + before, [raw[before : before + PAGE_BYTES]])
            before = page
            raw[bit // 8] ^= 1 << bit % 8
            tier._files.write(piece.place + page, [raw[page : page + PAGE_BYTES]])
            outcome = tier.read([target], soon())[0]
            if outcome not in (Outcome.CORRUPT, Outcome.MISSING, Outcome.FOREIGN, Outcome.NEWER):
                undetected.append((region, bit, outcome))
            raw[bit // 8] ^= 1 << bit % 8
        assert not undetected, f"seed {seed}: {undetected[:5]} of {len(undetected)}"
        tier._files.write(piece.place, [raw])
        assert read_back(tier, [piece]) == [Outcome.DONE]


def test_a_header_of_an_older_version_is_not_believed(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        (piece,) = Slots(tier).store([chunk("x")])
        page = aligned_buffer(PAGE_BYTES)
        tier._files.read(piece.place, [page])
        page[8] = 0
        page[-8:] = np.frombuffer(_checksum(page), np.uint8)
        tier._files.write(piece.place, [page])
        assert read_back(tier, [piece]) == [Outcome.CORRUPT]


def test_a_newer_header_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        (piece,) = Slots(tier).store([chunk("x")])
        page = aligned_buffer(PAGE_BYTES)
        tier._files.read(piece.place, [page])
        page[8] = 2
        page[-8:] = np.frombuffer(_checksum(page), np.uint8)
        tier._files.write(piece.place, [page])
        assert read_back(tier, [piece]) == [Outcome.NEWER]
        assert tier.holds([piece.identity], soon()) == [False]
        tier.delete([piece.identity], soon())
        after = aligned_buffer(PAGE_BYTES)
        tier._files.read(piece.place, [after])
        assert bytes(after) == bytes(page)


def _checksum(page: Any) -> bytes:
    return xxhash.xxh3_64_intdigest(page[:-8]).to_bytes(8, "little")


# ---- files that changed ------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, SLAB_BYTES + PAGE_BYTES + 100)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap_slots(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[:SLOT], raw[SLOT : 2 * SLOT] = raw[SLOT : 2 * SLOT], raw[:SLOT]
    path.write_bytes(raw)


def reverse_pages(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(b"".join(raw[at : at + PAGE_BYTES] for at in range(len(raw) - PAGE_BYTES, -1, -PAGE_BYTES)))


def delete(path: Path) -> None:
    path.unlink()


def move_aside(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/null")


DAMAGES = [truncate, cut_to_nothing, fill_with_zeros, swap_slots, reverse_pages, delete, move_aside]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("journal", ["kept", "lost", "noise", "cut"])
def test_damage_between_restarts(tmp_path: Path, damage: Callable[[Path], None], journal: str) -> None:
    with opened(tmp_path) as tier:
        Slots(tier).store([*chain(8), *chain(3, LARGE)])
    damage(segment_file(tmp_path))
    path = tmp_path / "journal-1.db"
    if journal == "lost":
        path.unlink()
    elif journal == "noise":
        path.write_bytes(random.Random(1).randbytes(40_000))
    elif journal == "cut":
        os.truncate(path, path.stat().st_size // 2)
    with opened(tmp_path) as tier:
        found = list(tier.recover())
        assert len({it.identity for it in found}) == len(found)
        read_back(tier, [Piece(it.identity, content(it.identity), it.place) for it in found])
        pieces = Slots(tier).store(chain(8))
        assert read_back(tier, pieces) == [Outcome.DONE] * 8


@pytest.mark.parametrize("damage", [*DAMAGES, replace_by_directory, replace_by_link])
def test_damage_while_it_runs(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with opened(tmp_path) as tier:
        pieces = Slots(tier).store([*chain(8), *chain(3, LARGE)])
        damage(segment_file(tmp_path))
        outcomes = read_back(tier, pieces)
        if damage in (cut_to_nothing, fill_with_zeros):
            assert set(outcomes) == {Outcome.MISSING}
        elif damage is swap_slots:
            assert outcomes == [Outcome.FOREIGN] * 2 + [Outcome.DONE] * 9
        elif damage is truncate:
            assert Outcome.DONE in outcomes and Outcome.MISSING in outcomes and Outcome.CORRUPT in outcomes
        assert tier.write(pieces, soon()) == [Outcome.DONE] * len(pieces)
        assert read_back(tier, pieces) == [Outcome.DONE] * len(pieces)


def test_files_that_changed_places(tmp_path: Path) -> None:
    """Two segments, swapped: every chunk is foreign where it is looked for."""
    arguments = (2 * MIB + 8 * SLAB_BYTES, SLAB_BYTES)
    tier = DiskTier(tmp_path, *arguments, reserve_bytes=0, segment_bytes=4 * SLAB_BYTES)
    assert tier.segments_bytes == (4 * SLAB_BYTES, 4 * SLAB_BYTES)
    pieces = Slots(tier).store(chain(30))
    assert {it.place >> 40 for it in pieces} == {0, 1}
    tier.close()
    one, two = segment_file(tmp_path, 0), segment_file(tmp_path, 1)
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    tier = DiskTier(tmp_path, *arguments, reserve_bytes=0, segment_bytes=4 * SLAB_BYTES)
    found = list(tier.recover())
    assert len(found) == 30
    outcomes = read_back(tier, [Piece(it.identity, content(it.identity), it.place) for it in found])
    assert set(outcomes) <= {Outcome.FOREIGN, Outcome.MISSING}
    tier.close()
    (tmp_path / "journal-1.db").unlink()
    tier = DiskTier(tmp_path, *arguments, reserve_bytes=0, segment_bytes=4 * SLAB_BYTES)
    found = list(tier.recover())
    assert read_back(tier, [Piece(it.identity, content(it.identity), it.place) for it in found]) == [Outcome.DONE] * 30
    tier.close()


@pytest.mark.parametrize("name", [segment_file(Path()).name, "journal-1.db", "journal-1.db-wal", "owner"])
@pytest.mark.parametrize("kind", ["link", "directory"])
def test_what_has_the_name_of_a_file_but_is_none_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    directory = tmp_path / "kv"
    with opened(directory) as tier:
        Slots(tier).store(chain(2))
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"precious")
    (directory / name).unlink(missing_ok=True)
    if kind == "link":
        (directory / name).symlink_to(foreign)
    else:
        (directory / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} in it is not a file of ours alone"):
        DiskTier(directory, 4 * MIB, SLAB_BYTES, reserve_bytes=0)
    assert foreign.read_bytes() == b"precious"


def test_foreign_files_stay(tmp_path: Path) -> None:
    names = ["notes.txt", "slabs", "slabs-x", "journal", "slabs-1-65536-00001.bak", "lost+found"]
    with opened(tmp_path):
        pass
    for name in names:
        (tmp_path / name).write_text(name)
    with opened(tmp_path) as tier:
        Slots(tier).store(chain(2))
    with opened(tmp_path, slab_bytes=2 * SLAB_BYTES):
        pass
    assert {it.name: it.read_text() for it in tmp_path.iterdir() if it.name in names} == {it: it for it in names}


def test_a_journal_that_opens_and_cannot_be_read_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Journal) -> None:
        raise UnreadableError("malformed")

    with opened(tmp_path) as tier:
        Slots(tier).store(chain(4))
    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "rows", fail)
        with opened(tmp_path) as tier:
            assert threading.active_count() == threads + 1
            assert [it.identity for it in tier.recover()] == chain(4)
    with opened(tmp_path) as tier:
        assert [it.identity for it in tier.recover()] == chain(4)


def test_a_journal_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Journal, chunks: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with opened(tmp_path) as tier:
        Slots(tier).store(chain(4))
    (tmp_path / "journal-1.db").unlink()
    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "replace", fail)
        with pytest.raises(ResourceError, match="cannot write a journal: database or disk is full"):
            DiskTier(tmp_path, 4 * MIB, SLAB_BYTES, reserve_bytes=0)
    assert threading.active_count() == threads
    with opened(tmp_path) as tier:
        assert len(list(tier.recover())) == 4, "an unfinished journal is not taken for an empty one"


# ---- calls that fail ---------------------------------------------------------------------------------------

CALLS = (
    "open", "stat", "fstat", "fstatvfs", "listdir", "pread", "pwrite", "preadv", "pwritev", "ftruncate", "fchmod",
    "unlink", "posix_fadvise",
)  # fmt: skip


class Failing:
    """The module `os`, whose n-th call of those that touch files fails; as it is for all others."""

    def __init__(self, nth: int, error: int) -> None:
        self.left, self._error = nth, error

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(self._error, os.strerror(self._error))
            return real(*arguments, **named)

        return call


def life(directory: Path) -> None:
    """Open, take in, store, read, probe, close; whatever it meets is one of our own errors or an outcome."""
    tier = DiskTier(directory, FEW_SLABS_BYTES, SLAB_BYTES, reserve_bytes=0)
    try:
        found = list(tier.recover())
        read_back(tier, [Piece(it.identity, content(it.identity), it.place) for it in found])
        pieces = Slots(tier).pieces(chain(3, LARGE))
        outcomes = tier.write(pieces, soon())
        done = [it for it, outcome in zip(pieces, outcomes, strict=True) if outcome is Outcome.DONE]
        tier.journal.stored([(it.place, tier.slot_bytes(it.identity), it.identity) for it in done])
        for it in done:
            read_back(tier, [it])
        tier.usage(soon())
    finally:
        tier.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_the_nth_call_fails_for_all_n(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, journal: str
) -> None:
    template = tmp_path / "template"
    with opened(template, FEW_SLABS_BYTES) as tier:
        Slots(tier).store(chain(4))
    if journal == "lost":
        (template / "journal-1.db").unlink()
    failed = 0
    for nth in range(1, 1000):
        directory = tmp_path / "kv"
        shutil.copytree(template, directory)
        failing = Failing(nth, error)
        modules: list[ModuleType] = [direct_io, private_directory, slab_files]
        before = descriptors()
        with monkeypatch.context() as patch:
            for module in modules:
                patch.setattr(module, "os", failing)
            try:
                life(directory)
            except HeadwaterError:
                failed += 1
        assert descriptors() == before, f"call {nth} left something open"
        life(directory)  # and afterwards it works
        shutil.rmtree(directory)
        if failing.left > 0:
            break
    assert nth > 30, "the calls are not seen"
    assert failed > 5
    assert failing.left > 0, "it does not end"


def test_a_piece_that_cannot_be_read_is_its_own_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = direct_io.read

    def fail_at_some(descriptor: int, views: Any, offset: int) -> int:
        if offset in bad:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, views, offset)

    with opened(tmp_path) as tier:
        pieces = Slots(tier).store(chain(4))
        bad = {pieces[1].place, pieces[2].place}
        monkeypatch.setattr(direct_io, "read", fail_at_some)
        expected = [Outcome.DONE, Outcome.DAMAGED, Outcome.DAMAGED, Outcome.DONE]
        assert read_back(tier, pieces) == expected
        assert read_back(tier, pieces[1:3]) == expected[1:3], "the probe says that it is these places alone"
        bad.add(0)  # where the probe is, among others
        with pytest.raises(UnavailableError, match="Input/output error"):
            read_back(tier, pieces[1:3])
        monkeypatch.undo()
        assert read_back(tier, pieces) == [Outcome.DONE] * 4


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev
    with opened(tmp_path) as tier:
        pieces = Slots(tier).pieces(chain(3))
        monkeypatch.setattr(os, "pwritev", lambda it, views, at: write(it, [views[0][:PAGE_BYTES]], at))
        monkeypatch.setattr(os, "preadv", lambda it, views, at: read(it, [views[0][:PAGE_BYTES]], at))
        assert tier.write(pieces, soon()) == [Outcome.DONE] * 3
        assert read_back(tier, pieces) == [Outcome.DONE] * 3
        monkeypatch.setattr(os, "pwritev", lambda it, views, at: 0)
        assert tier.write(pieces, soon()) == [Outcome.FULL] * 3
        monkeypatch.setattr(os, "preadv", lambda it, views, at: min(read(it, views, at), 100))
        assert read_back(tier, pieces) == [Outcome.MISSING] * 3
        monkeypatch.undo()
        assert read_back(tier, pieces) == [Outcome.DONE] * 3


def test_a_disk_that_fills_up_under_a_sparse_file_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(descriptor: int, size_bytes: int) -> bool:
        os.ftruncate(descriptor, size_bytes)
        return False

    monkeypatch.setattr(direct_io, "allocate", unknown)
    with tmpfs(64) as place, opened(place, 32 * MIB) as tier:
        slots = Slots(tier)
        kept = slots.store(chain(3))
        fill(place / "foreign")
        pieces = slots.pieces(chain(200, name="later"))
        outcomes = tier.write(pieces, soon())
        assert set(outcomes) == {Outcome.FULL}, "every one is, and none is an error"
        assert tier.usage(soon()).capacity_bytes == sum(tier.segments_bytes)
        assert read_back(tier, kept) == [Outcome.DONE] * 3
        (place / "foreign").unlink()
        assert tier.write(pieces, soon()) == [Outcome.DONE] * 200
        assert read_back(tier, pieces) == [Outcome.DONE] * 200


def fill(path: Path) -> None:
    """Leave nothing free on the file system."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, PAGE_BYTES):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def test_a_full_disk_does_not_hurt_what_was_reserved() -> None:
    with tmpfs(64) as place, opened(place, 32 * MIB) as tier:
        slots = Slots(tier)
        fill(place / "foreign")
        pieces = slots.store(chain(200))
        assert read_back(tier, pieces) == [Outcome.DONE] * 200
        for number in range(20):
            tier.journal.stored([(it.place, SLOT, chunk(f"{number}/{it.place}")) for it in pieces])
        tier.journal.flush(0.3)
        assert read_back(tier, pieces) == [Outcome.DONE] * 200


# ---- processes that die ------------------------------------------------------------------------------------


@pytest.mark.timeout(120 + ROUNDS)
def test_crashes(tmp_path: Path, seed: int) -> None:
    """Only whole and right chunks after any kill, and those that were flushed; see `disk_crashes`."""
    command = [sys.executable, "-m", "tests.tiers.disk_crashes", str(ROUNDS), str(seed), str(tmp_path / "kv")]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(Path(direct_io.__file__).parents[2])])
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-4000:]}"
    counts = json.loads(done.stdout)
    killed = {it.removeprefix("killed at "): count for it, count in counts.items() if it.startswith("killed at")}
    assert sum(killed.values()) >= ROUNDS // 2, counts
    assert len(killed) >= 10, f"some points were never met: {counts}"
    assert counts["done"] > ROUNDS, counts
