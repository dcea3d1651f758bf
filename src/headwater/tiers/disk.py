"""The DISK tier: chunks in slots of slab files, each a header page and the stored payload.

Which slot a chunk is in, and who leaves when all are taken, is decided by a `core.cache.Cache` over a `core.pool.Pool`
of `segments_bytes`; here are the bytes. Nothing is synced but what was cleared: what a crash tears is found out by its
checksum.

    slot    | header page | stored payload, padded to pages |       written by one call, past the page cache
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from headwater.errors import ConfigError, ResourceError, UnavailableError
from headwater.ports import Bytes, Piece
from headwater.tiers import direct_io
from headwater.tiers.checked_copy import copy_from_buffer, copy_to_buffer
from headwater.tiers.codec import Codec, Plain, bring_back
from headwater.tiers.direct_io import Buffers
from headwater.tiers.header import (
    Encoded,
    Header,
    Unreadable,
    check_payload,
    payload_checksum,
    read_header,
    write_header,
)
from headwater.tiers.journal import FORMAT, Journal, UnreadableError, remove
from headwater.tiers.private_directory import PrivateDirectory
from headwater.tiers.recovery import Recovered, consistent, parents_first, recovered, scan
from headwater.tiers.retired import Retired
from headwater.tiers.slab_files import SEGMENT_BYTES, SlabFiles
from headwater.types import ABSENT, PAGE_BYTES, Identity, Origin, Outcome, Usage, align

log = logging.getLogger(__name__)

JOURNAL_BYTES, JOURNAL_SHARE = 2 << 20, 1 / 256
PROBE = "probe"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DAMAGED = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN)
"""What a medium says of one place; if it says so of the probe too, of all."""
_PLAIN = Plain()
Result = TypeVar("Result")


class DiskTier:
    """See `ports.LowerTier`; every piece has a place. `direct` says whether the page cache is bypassed, `epoch` how
    often the directory has been opened, `journal` is what must be told of chunks that are READY or gone, `retired` the
    names of namespaces that are not recovered any more."""

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        slab_bytes: int,
        codec: Codec = _PLAIN,
        reserve_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Own `directory` and give it its files, at most `size_bytes` with the journal; `reserve_bytes` is left free
        on the file system (None: 1 GiB, or 1 % if that is more).

        Raises ConfigError (not a directory of ours alone, another owner, a codec without fixed sizes) and
        ResourceError (no room).
        """
        if not codec.fixed:
            raise ConfigError(f"disk: codec {codec.name!r} has no fixed size, which slots need; use none or another")
        self._codec, self.slab_bytes = codec, slab_bytes
        self._buffers = Buffers()
        self._recovered: list[Recovered] = []
        self._directory = PrivateDirectory(directory, "disk")
        self.epoch = self._directory.epoch
        try:
            room = size_bytes - max(JOURNAL_BYTES, int(size_bytes * JOURNAL_SHARE))
            self.retired = Retired(self._directory)
            self._files = SlabFiles(self._directory, room, slab_bytes, reserve_bytes, segment_bytes)
            try:
                self._open_journal()
            except BaseException:
                self._files.close()
                raise
        except OSError as error:
            self._directory.close()
            raise ResourceError(f"disk={directory}: cannot be opened: {error}") from error
        except BaseException:
            self._directory.close()
            raise

    @property
    def segments_bytes(self) -> tuple[int, ...]:
        """The sizes of the segments that a `core.pool.Pool` may use."""
        return self._files.sizes

    @property
    def direct(self) -> bool:
        """Whether chunks bypass the page cache."""
        return self._files.direct

    def slot_bytes(self, identity: Identity) -> int:
        """The size of the slot that a chunk needs; may be more than a slab has."""
        return PAGE_BYTES + align(self._codec.stored_bytes(identity))

    # ---- LowerTier -----------------------------------------------------------------------------------

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `ports.LowerTier`."""
        return self._each(self._read, pieces, until_s)

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `ports.LowerTier`."""
        return self._each(self._write, pieces, until_s)

    def holds(self, identities: Sequence[Identity], until_s: float) -> list[bool]:
        """See `ports.LowerTier`; slow, by the journal and the headers: who owns the index knows without asking."""
        self._check_time(until_s)
        places = self._find(identities)
        return [place is not None and self._names(place, it) for place, it in zip(places, identities, strict=True)]

    def delete(self, identities: Sequence[Identity], until_s: float) -> None:
        """See `ports.LowerTier`; as slow as `holds`."""
        self._check_time(until_s)
        found = zip(self._find(identities), identities, strict=True)
        self._wipe([(place, it) for place, it in found if place is not None])

    def clear(self, origin: Origin, until_s: float) -> int:
        """See `ports.LowerTier`; what the journal has of it."""
        self._check_time(until_s)
        those = [(it.place, it.identity) for it in self._rows() if it.identity.origin == origin]
        self._wipe(those)
        return len(those)

    def usage(self, until_s: float) -> Usage:
        """See `ports.LowerTier`: writes and reads a page beside the slabs. What is used only the index knows."""
        self._check_time(until_s)
        self._probe()
        return Usage(self._files.capacity_bytes, None)

    def _probe(self) -> None:
        with self._buffers.borrow(2 * PAGE_BYTES) as buffer:
            sent, received = buffer[:PAGE_BYTES], buffer[PAGE_BYTES : 2 * PAGE_BYTES]
            sent[:] = bytearray(os.urandom(PAGE_BYTES))
            try:
                descriptor, _ = direct_io.open_direct(self._directory.descriptor, PROBE)
                try:
                    direct_io.write(descriptor, [sent], 0)
                    same = direct_io.read(descriptor, [received], 0) == PAGE_BYTES and bytes(sent) == bytes(received)
                finally:
                    os.close(descriptor)
            except OSError as error:
                if error.errno not in _FULL:
                    raise UnavailableError(f"disk={self._directory.path}: {error}") from error
                same = True  # a full file system keeps what it has
        if not same:
            raise UnavailableError(f"disk={self._directory.path}: what was written is not what is read")

    def close(self) -> None:
        """See `ports.LowerTier`; the journal is written to its end, and the directory is free for another owner."""
        self.journal.close()
        self._files.close()
        self._buffers.close()
        self._directory.close()

    # ---- after a restart -----------------------------------------------------------------------------

    def recover(self) -> Iterator[Recovered]:
        """What an earlier owner left, parents before children, otherwise oldest first; to be called once, at first.

        Chunks whose parent is lost come last. Whoever does not take one in says `journal.removed` of its place.
        """
        found, self._recovered = self._recovered, []
        return parents_first(found)

    def _open_journal(self) -> None:
        path = self._directory.path / f"journal-{FORMAT}.db"
        about = f"slabs of {self.slab_bytes} bytes, codec {self._codec.name}"
        for suffix in ("", "-wal", "-journal"):
            self._directory.regular(path.name + suffix)
        try:
            if not path.exists():
                raise UnreadableError(f"{path} is not there")
            self.journal = Journal(path, about, create=False)
            try:
                rows = self.journal.rows()
            except UnreadableError:
                self.journal.close()
                raise
        except UnreadableError as error:
            self._rebuild_journal(path, about, str(error))
            return
        found, wrong = consistent(rows, self.journal.origins, self._files, self.slot_bytes)
        self._recovered = self._not_retired(found)
        cleared = [it.place for it in found if it.identity.origin.root in self.retired]
        self.journal.removed([*wrong, *cleared])
        self.journal.keep_origins(set(np.unique(rows["origin"]).tolist()))

    def _not_retired(self, found: Sequence[Recovered]) -> list[Recovered]:
        return [it for it in found if it.identity.origin.root not in self.retired]

    def _rebuild_journal(self, path: Path, about: str, why: str) -> None:
        """Make a new journal from what the slots say of themselves."""
        begun_s = time.monotonic()
        found = scan(self._files, self._codec.name, self.slot_bytes) if any(self._files.kept) else []
        self._recovered = self._not_retired(found)
        if any(self._files.kept):
            log.warning(
                "disk=%s: no journal (%s); found %d chunks by looking at every slot, in %.1f s",
                self._directory.path, why, len(self._recovered), time.monotonic() - begun_s,
            )  # fmt: skip
        try:
            remove(path)
            self._directory.create(path.name)
            self.journal = Journal(path, about, create=True)
            try:
                self.journal.replace([(it.place, it.slot_bytes, it.identity) for it in self._recovered])
            except sqlite3.Error:
                self.journal.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise ResourceError(f"disk={self._directory.path}: cannot write a journal: {error}") from error

    # ---- one piece -----------------------------------------------------------------------------------

    def _each(self, move: Callable[[Piece, Bytes], Outcome], pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """Move the pieces one after another; raises UnavailableError if the device failed for all it was asked for, or
        at one place and at the probe too."""
        outcomes: list[Outcome] = []
        failure: OSError | None = None
        answers = 0
        with self._buffers.borrow(max((self.slot_bytes(it.identity) for it in pieces), default=0)) as buffer:
            for piece in pieces:
                assert piece.place != ABSENT, f"{piece.identity.key.hex()} has no place"
                assert len(piece.memory) == piece.identity.length_bytes, f"{len(piece.memory)} bytes of memory"
                if time.monotonic() >= until_s:
                    outcomes.append(Outcome.FAILED)
                    continue
                try:
                    outcomes.append(move(piece, buffer))
                    answers += 1
                except OSError as error:
                    outcomes.append(_outcome(error))
                    answers += outcomes[-1] is not Outcome.FAILED
                    failure = error
        if Outcome.DAMAGED in outcomes:
            self._probe()
        if failure is not None and not answers:
            raise UnavailableError(f"disk={self._directory.path}: {failure}") from failure
        return outcomes

    def _write(self, piece: Piece, buffer: Bytes) -> Outcome:
        identity, slot_bytes = piece.identity, self.slot_bytes(piece.identity)
        if self._codec.in_place:
            encoded = Encoded(len(piece.memory), self._codec.name)
            checksum = copy_to_buffer(piece.memory, buffer[PAGE_BYTES:])
        else:
            sealed = self._codec.encode(identity, piece.memory, buffer[PAGE_BYTES:slot_bytes])
            if sealed is None:
                return Outcome.REFUSED
            encoded = sealed
            checksum = payload_checksum(buffer[PAGE_BYTES : PAGE_BYTES + encoded.stored_bytes])
        buffer[PAGE_BYTES + encoded.stored_bytes : slot_bytes] = 0
        write_header(buffer[:PAGE_BYTES].data, identity, encoded, checksum, slot_bytes)
        self._files.write(piece.place, [buffer[:slot_bytes]])
        return Outcome.DONE

    def _read(self, piece: Piece, buffer: Bytes) -> Outcome:
        slot_bytes = self.slot_bytes(piece.identity)
        got = self._files.read(piece.place, [buffer[:slot_bytes]])
        header = self._header(buffer, got, piece.identity)
        if isinstance(header, Outcome):
            return header
        stored = buffer[PAGE_BYTES : min(PAGE_BYTES + header.encoded.stored_bytes, got)]
        if len(stored) != header.encoded.stored_bytes:
            return Outcome.CORRUPT
        if self._codec.in_place:
            whole = len(stored) == len(piece.memory) and copy_from_buffer(stored, piece.memory) == header.checksum
            return Outcome.DONE if whole else Outcome.CORRUPT
        if check_payload(header, stored) is not Outcome.DONE:
            return Outcome.CORRUPT
        return bring_back(self._codec, piece.identity, header.encoded, stored, piece.memory)

    def _header(self, buffer: Bytes, got: int, identity: Identity) -> Header | Outcome:
        """The header of that very chunk at the start of `got` bytes that were read, or why it is not there."""
        if got < PAGE_BYTES or not buffer[:PAGE_BYTES].any():
            return Outcome.MISSING
        header = read_header(buffer[:PAGE_BYTES].data)
        if isinstance(header, Unreadable):
            return header.value
        ours = header.encoded.codec == self._codec.name and header.names(identity)
        return header if ours else Outcome.FOREIGN

    def _wipe(self, chunks: Sequence[tuple[int, Identity]]) -> None:
        """Overwrite the headers of chunks that are still where they were, so that no scan finds them again."""
        with self._buffers.borrow(PAGE_BYTES) as buffer:
            empty = buffer[:PAGE_BYTES]
            for place, identity in chunks:
                if self._names(place, identity):
                    empty[:] = 0
                    self._call(self._files.write, place, [empty])
        self.journal.removed([place for place, _ in chunks])

    def _names(self, place: int, identity: Identity) -> bool:
        with self._buffers.borrow(PAGE_BYTES) as buffer:
            got = self._call(self._files.read, place, [buffer[:PAGE_BYTES]])
            return isinstance(self._header(buffer, got, identity), Header)

    def _find(self, identities: Sequence[Identity]) -> list[int | None]:
        """Where the journal has these chunks."""
        places = {it.identity: it.place for it in self._rows()}
        return [places.get(it) for it in identities]

    def _rows(self) -> list[Recovered]:
        self.journal.flush()
        try:
            rows = self.journal.rows()
        except UnreadableError as error:
            raise UnavailableError(str(error)) from error
        return recovered(rows[np.isin(rows["origin"], list(self.journal.origins))], self.journal.origins)

    def _check_time(self, until_s: float) -> None:
        if time.monotonic() >= until_s:
            raise UnavailableError(f"disk={self._directory.path}: no time is left")

    def _call(self, call: Callable[[int, Sequence[Bytes]], Result], place: int, views: Sequence[Bytes]) -> Result:
        try:
            return call(place, views)
        except OSError as error:
            raise UnavailableError(f"disk={self._directory.path}: {error}") from error


def _outcome(error: OSError) -> Outcome:
    """What a failed call says of the one piece that it was for."""
    if error.errno in _FULL:
        return Outcome.FULL
    return Outcome.DAMAGED if error.errno in _DAMAGED else Outcome.FAILED
