"""The DISK tier keeps the contract of lower tiers, and what is special about it: slots, headers, codecs, restarts."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.core.pool import Pool
from headwater.errors import ConfigError, UnavailableError
from headwater.ports import Bytes, LowerTier, Piece
from headwater.tiers import direct_io
from headwater.tiers.codec import Plain
from headwater.tiers.direct_io import HUGE_BYTES, Buffers, aligned_buffer
from headwater.tiers.disk import DiskTier
from headwater.tiers.header import Encoded
from headwater.tiers.host import create_memory
from headwater.types import PAGE_BYTES, HitRule, Identity, Outcome
from tests.conformance.lower_tier import LowerTierSuite
from tests.tiers.disks import (
    LARGE,
    MIB,
    SIZE_BYTES,
    SLAB_BYTES,
    SMALL,
    Slots,
    chain,
    chunk,
    content,
    descriptors,
    empty,
    opened,
    origin,
    read_back,
    soon,
    tmpfs,
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test closes its files and ends its threads."""
    gc.collect()  # what earlier tests left to it
    before = descriptors()
    yield
    assert descriptors() == before
    assert not [it.name for it in threading.enumerate() if it.name.startswith("headwater-journal")]


class Journalled(DiskTier):
    """A disk whose owner journals what was written."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 128 * MIB, 4 * MIB, reserve_bytes=0)
        self.lock = threading.Lock()
        self.slots = Pool(self.segments_bytes, self.slab_bytes)
        self.places: dict[Identity, int] = {}

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        outcomes = super().write(pieces, until_s)
        done = [it for it, outcome in zip(pieces, outcomes, strict=True) if outcome is Outcome.DONE]
        self.journal.stored([(it.place, self.slot_bytes(it.identity), it.identity) for it in done])
        return outcomes


class TestContract(LowerTierSuite):
    TORN = Outcome.CORRUPT
    """A slot has one writer at a time, so a mixture may be found; it is never taken for the chunk."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[LowerTier]:
        tier = Journalled(tmp_path / "kv")
        yield tier
        tier.close()

    def piece(self, tier: LowerTier, it: Identity, memory: Bytes) -> Piece:
        assert isinstance(tier, Journalled)
        with tier.lock:
            if it not in tier.places:
                place = tier.slots.allocate(tier.slot_bytes(it), 0)
                assert place is not None
                tier.places[it] = place
            return Piece(it, memory, tier.places[it])


# ---- slots -------------------------------------------------------------------------------------------------


def test_a_slot_is_a_header_page_and_the_payload_in_pages(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert [tier.slot_bytes(chunk(0, it)) for it in (SMALL, LARGE)] == [3 * PAGE_BYTES, 6 * PAGE_BYTES]
        assert sum(tier.segments_bytes) == SIZE_BYTES - 2 * MIB
        assert Pool(tier.segments_bytes, SLAB_BYTES).capacity_bytes == sum(tier.segments_bytes)
        (piece,) = Slots(tier).store([chunk("x")])
        raw = (tmp_path / f"slabs-1-{SLAB_BYTES}-0000").read_bytes()[piece.place :][: 3 * PAGE_BYTES]
        assert raw[:8] == b"headwatr"
        assert raw[PAGE_BYTES:] == bytes(content(piece.identity))


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    chunks = [*chain(9), *chain(5, LARGE)]
    with opened(tmp_path) as tier:
        assert list(tier.recover()) == []
        places = [it.place for it in Slots(tier).store(chunks)]
    with opened(tmp_path) as tier:
        found = list(tier.recover())
        assert [(it.identity, it.place) for it in found] == list(zip(chunks, places, strict=True))
        assert [it.identity.parent for it in found] == [it.parent for it in chunks]
        assert read_back(tier, [Piece(it.identity, content(it.identity), it.place) for it in found]) == [
            Outcome.DONE
        ] * len(chunks)
        assert not any("secret" in it.identity.origin.namespace.salt for it in found)


def test_without_its_journal_it_looks_at_every_slot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chunks = [*chain(9), *chain(5, LARGE), *[chunk("s", origin(1, rules=(HitRule.LAST, HitRule.ALL)), group=1)]]
    with opened(tmp_path) as tier:
        places = {it.identity: it.place for it in Slots(tier).store(chunks)}
    for path in tmp_path.glob("journal-*"):
        path.unlink()
    with caplog.at_level(logging.WARNING), opened(tmp_path) as tier:
        found = list(tier.recover())
        assert {it.identity: it.place for it in found} == places
        assert sorted(it.identity.parent for it in found) == sorted(it.parent for it in chunks)
    assert f"found {len(chunks)} chunks by looking at every slot" in caplog.text
    with opened(tmp_path) as tier:  # and has a journal again
        assert {it.identity: it.place for it in tier.recover()} == places


def test_a_scan_finds_slabs_whose_first_header_is_damaged(tmp_path: Path) -> None:
    chunks = chain(12)
    with opened(tmp_path) as tier:
        pieces = Slots(tier).store(chunks)
        firsts = [it for it in pieces if it.place % SLAB_BYTES == 0]
        assert len(firsts) == 3
        tier._files.write(firsts[1].place, [aligned_buffer(PAGE_BYTES)])
    (tmp_path / "journal-1.db").unlink()
    with opened(tmp_path) as tier:
        assert {it.identity for it in tier.recover()} == {*chunks} - {firsts[1].identity}


def test_what_was_cleared_is_not_found_by_a_scan(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        Slots(tier).store([*chain(4), *chain(3, LARGE)])
        assert tier.clear(LARGE, soon()) == 3
        tier.delete(chain(4)[3:], soon())
    (tmp_path / "journal-1.db").unlink()
    with opened(tmp_path) as tier:
        assert [it.identity for it in tier.recover()] == chain(3)


def test_deleting_does_not_hurt_who_has_the_slot_now(tmp_path: Path) -> None:
    """The owner gave the slot away and its note is still under way: then the header is somebody else's."""
    with opened(tmp_path) as tier:
        (old,) = Slots(tier).store([chunk("old")])
        new = Piece(chunk("new"), content(chunk("new")), old.place)
        tier.write([new], soon())
        tier.delete([old.identity], soon())
        assert read_back(tier, [new, old]) == [Outcome.DONE, Outcome.FOREIGN]


# ---- outcomes ----------------------------------------------------------------------------------------------


def test_every_way_in_which_a_chunk_is_not_there(tmp_path: Path) -> None:
    other_layout = origin(2, "x")
    with opened(tmp_path) as tier:
        slots = Slots(tier)
        (piece,) = slots.store([chunk("here")])
        (never,) = slots.pieces([chunk("never")])
        assert read_back(tier, [never]) == [Outcome.MISSING]
        for it in (chunk("other"), chunk("here", other_layout), chunk("here", LARGE)):
            assert read_back(tier, [Piece(it, content(it), piece.place)]) == [Outcome.FOREIGN]
        assert read_back(tier, [piece]) == [Outcome.DONE]


def test_the_end_of_time_stands_between_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        pieces = Slots(tier).pieces(chain(3))
        ticks = iter([1.0, 2.0, 3.0] * 2)
        monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
        assert tier.write(pieces, 2.5) == [Outcome.DONE, Outcome.DONE, Outcome.FAILED]
        assert tier.read([empty(it) for it in pieces], 1.5) == [Outcome.DONE, Outcome.FAILED, Outcome.FAILED]
        monkeypatch.undo()


def test_host_memory_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    """Steps of the checksum, and memory that is a memfd's and no buffer's."""
    big = origin(1100)  # 4.3 MiB
    memory = create_memory(16 * MIB, "memfd", lock=False)
    it = chunk("big", big)
    view = np.frombuffer(memory.view(0, it.length_bytes), np.uint8)
    view[:] = content(it)
    with opened(tmp_path, 32 * MIB, 8 * MIB) as tier:
        assert tier.write([Piece(it, view, 8 * MIB)], soon()) == [Outcome.DONE]
        view[:] = 0
        assert tier.read([Piece(it, view, 8 * MIB)], soon()) == [Outcome.DONE]
        assert bytes(view) == bytes(content(it))
    del view
    memory.close()


def test_many_threads_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as tier, ThreadPoolExecutor(8) as pool:
        pieces = Slots(tier).pieces(chain(100))

        def life(number: int) -> list[Outcome]:
            mine = pieces[number::8]
            assert tier.write(mine, soon()) == [Outcome.DONE] * len(mine)
            return read_back(tier, mine)

        for outcomes in pool.map(life, range(8)):
            assert set(outcomes) == {Outcome.DONE}
        assert len(tier._buffers._idle) <= 8, "as many buffers as calls at a time"


# ---- codecs ------------------------------------------------------------------------------------------------


class Mirrored(Plain):
    """Stores the payload backwards, with one byte of its own in front."""

    name, in_place = "mirrored", False
    keyless = False

    def stored_bytes(self, identity: Identity) -> int:
        return identity.length_bytes + 1

    def encode(self, identity: Identity, payload: Bytes, target: Bytes) -> Encoded | None:
        if self.keyless:
            return None
        target[0], target[1 : len(payload) + 1] = 0x5A, payload[::-1]
        return Encoded(len(payload) + 1, self.name, "k1", bytes(64))

    def decode(self, identity: Identity, encoded: Encoded, stored: Bytes, target: Bytes) -> bool:
        target[:] = stored[:0:-1]
        return not self.keyless and encoded.key_id == "k1" and stored[0] == 0x5A

    def has_key(self, identity: Identity, key_id: str) -> bool:
        return not self.keyless


def test_a_codec_that_makes_chunks_longer(tmp_path: Path) -> None:
    codec = Mirrored()
    with opened(tmp_path) as plain:
        Slots(plain).store([chunk("plain")])
    tier = DiskTier(tmp_path, SIZE_BYTES, SLAB_BYTES, codec, reserve_bytes=0)
    assert list(tier.recover()) == [], "what another codec wrote is gone"
    assert tier.slot_bytes(chunk("x")) == 4 * PAGE_BYTES
    pieces = Slots(tier).store([chunk("x")])
    assert read_back(tier, pieces) == [Outcome.DONE]
    codec.keyless = True
    assert read_back(tier, pieces) == [Outcome.REFUSED]
    assert tier.write(pieces, soon()) == [Outcome.REFUSED]
    codec.keyless = False
    tier.close()
    tier = DiskTier(tmp_path, SIZE_BYTES, SLAB_BYTES, codec, reserve_bytes=0)
    assert [it.identity for it in tier.recover()] == [chunk("x")]
    tier.close()
    with opened(tmp_path) as plain:
        assert list(plain.recover()) == []
        assert read_back(plain, [Piece(chunk("x"), content(chunk("x")), pieces[0].place)]) == [Outcome.FOREIGN]


def test_a_codec_of_no_fixed_size_is_refused(tmp_path: Path) -> None:
    codec = Plain()
    codec.fixed = False
    with pytest.raises(ConfigError, match=r"codec 'none' has no fixed size"):
        DiskTier(tmp_path / "kv", SIZE_BYTES, SLAB_BYTES, codec)
    assert not (tmp_path / "kv").exists()


# ---- buffers and the probe ---------------------------------------------------------------------------------


def test_buffers_are_reused_and_grow_together() -> None:
    buffers = Buffers()
    with buffers.borrow(PAGE_BYTES) as small:
        assert small.ctypes.data % HUGE_BYTES == 0
        with buffers.borrow(3 * PAGE_BYTES) as second:
            assert len(second) >= 3 * PAGE_BYTES
    with buffers.borrow(PAGE_BYTES) as again:
        assert again is small or again is second
    with buffers.borrow(10 * PAGE_BYTES) as grown:
        assert len(grown) >= 10 * PAGE_BYTES
    assert len(buffers._idle) <= 2
    buffers.close()


@pytest.mark.parametrize("failure", ["write", "read", "lies"])
def test_the_probe_notices_a_device_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    with opened(tmp_path) as tier:
        assert tier.usage(soon()).capacity_bytes == sum(tier.segments_bytes)
        replacement: Callable[..., int] = fail if failure != "lies" else lambda *_: PAGE_BYTES
        monkeypatch.setattr(direct_io, "read" if failure == "lies" else failure, replacement)
        with pytest.raises(UnavailableError):
            tier.usage(soon())
        monkeypatch.undo()
        tier.usage(soon())


def test_where_there_is_no_o_direct_the_page_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, dir_fd=dir_fd)

    forgotten: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(direct_io, "forget_cached", lambda _, start, length: forgotten.append((start, length)))
    with opened(tmp_path) as tier:
        assert not tier.direct
        pieces = Slots(tier).store(chain(3))
        assert read_back(tier, pieces) == [Outcome.DONE] * 3
        assert forgotten == [(it.place, 3 * PAGE_BYTES) for it in pieces] * 2, "which need not keep them"
    assert "has no O_DIRECT" in caplog.text
    monkeypatch.undo()
    with opened(tmp_path) as tier:
        assert tier.direct
        assert len(list(tier.recover())) == 3


def test_on_tmpfs() -> None:
    with tmpfs(16) as place, opened(place, 8 * MIB) as tier:
        assert read_back(tier, Slots(tier).store(chain(3))) == [Outcome.DONE] * 3


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.lists(st.integers(1, 15), min_size=1, max_size=4), loses=st.booleans())
def test_any_mix_of_sizes_comes_back(tmp_path_factory: pytest.TempPathFactory, layers: list[int], loses: bool) -> None:
    directory = tmp_path_factory.mktemp("kv")
    directory.chmod(0o700)
    chunks = [it for number, count in enumerate(layers) for it in chain(3, origin(count, f"t{number}"), f"{number}")]
    with opened(directory) as tier:
        places = {it.identity: it.place for it in Slots(tier).store(chunks)}
    if loses:
        (directory / "journal-1.db").unlink()
    with opened(directory) as tier:
        found = list(tier.recover())
        assert {it.identity: it.place for it in found} == places
        pieces = [Piece(it.identity, content(it.identity), it.place) for it in found]
        assert read_back(tier, pieces) == [Outcome.DONE] * len(chunks)
