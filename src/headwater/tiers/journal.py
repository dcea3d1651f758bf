"""What is where on the disk, written down behind the node's back so that a restart need not look for it.

Theory of operation. The truth about slots is in the node's memory; the journal (SQLite in WAL mode) follows it. Calls
only note what changed last for each place; a thread writes the notes in batches, each a transaction. A crash loses the
last batch, a full or failing disk delays it. Neither can make a wrong read: a chunk that was stored but not written
down is lost, and one that is written down but not there is found out by its header.

The notes are bounded: by the number of places and, above PENDING_MAX of them, to "nothing is there".
"""

from __future__ import annotations

import logging
import sqlite3
import struct
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from headwater.types import KEY_BYTES, Identity, KVLayout, Namespace, Origin

log = logging.getLogger(__name__)

FORMAT = 1
BATCH, BATCH_S = 500, 0.2
REPLACE = 10_000
RETRY_S, RETRY_MAX_S = 0.2, 5.0
CLOSE_S = 5.0
PENDING_MAX = 1 << 16
WAL_PAGES = 256
_EPOCH_SHIFT = 40
_UNFINISHED = ""
_NO_PARENT = bytes(KEY_BYTES)
_about = struct.Struct("<QQIIQ16s16s")
ROW = np.dtype([
    ("place", "<u8"), ("age", "<u8"), ("origin", "<u4"), ("group", "<u4"), ("slot_bytes", "<u8"),
    ("key", "V16"), ("parent", "V16"),
])  # fmt: skip
"""One chunk at a place. What was stored later has a greater age; `origin` is a number in `Journal.origins`, `parent` is
zero at the start of a prompt."""
_digest = struct.Struct("<Q")
_origins: msgspec.msgpack.Decoder[tuple[Namespace, KVLayout, bytes]] = msgspec.msgpack.Decoder(
    tuple[Namespace, KVLayout, bytes]
)


class UnreadableError(Exception):
    """There is no journal, or it is damaged, or it is about other files than those that are there."""


class Journal:
    """The journal of one directory, which the caller owns. Thread-safe; `stored` and `removed` never wait for a disk.

    `forgotten` counts chunks that were stored and not written down, `failures` batches that had to be tried again.
    """

    def __init__(self, path: Path, about: str, *, create: bool) -> None:
        """Open what is at `path`, or make a new journal of an empty file there; `about` names the files it speaks of.

        Raises UnreadableError, unless `create`, if what is there cannot be used; sqlite3.Error if nothing can.
        """
        self._path, self._about = path, about
        self.forgotten = self.failures = 0
        self.broken = False
        self._pending: dict[int, tuple[int, int, Identity] | None] = {}
        self._changed = threading.Condition()
        self._flushing = self._closing = self._busy = False
        self._using = threading.Lock()
        try:
            self._database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as error:
            if create:
                raise
            raise UnreadableError(f"{path}: {error}") from error
        try:
            self._age = self._prepare(about, create=create) << _EPOCH_SHIFT
            self.origins = self._read_origins()
        except BaseException:
            self._database.close()
            raise
        self._numbers: dict[bytes, list[tuple[KVLayout, int]]] = {}
        for number, origin in self.origins.items():
            self._numbers.setdefault(origin.root, []).append((origin.layout, number))
        self._next_number = max(self.origins, default=0) + 1
        self._thread = threading.Thread(target=self._run, name="headwater-journal", daemon=True)
        self._thread.start()

    # ---- what the node says --------------------------------------------------------------------------

    def stored(self, rows: Sequence[tuple[int, int, Identity]]) -> None:
        """Chunks became READY: (place, slot_bytes, identity) of each."""
        with self._changed:
            before = len(self._pending)
            for place, slot_bytes, identity in rows:
                if len(self._pending) >= PENDING_MAX and self._pending.get(place) is None:
                    self._pending[place] = None
                    self.forgotten += 1
                else:
                    self._age += 1
                    self._pending[place] = (self._age, slot_bytes, identity)
            self._noted(before)

    def removed(self, places: Iterable[int]) -> None:
        """What was at these places left."""
        with self._changed:
            before = len(self._pending)
            self._pending.update(dict.fromkeys(places))
            self._noted(before)

    def flush(self, within_s: float = CLOSE_S) -> bool:
        """Wait until all that was said is written; whether it is."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._pending and not self._busy, within_s)
            self._flushing = False
            return done and not self.broken

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write what is left, unless the disk refuses; then close."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.error("%s: the disk does not answer; the last %d notes are lost", self._path, len(self._pending))
            return  # the thread still has the database
        with suppress(sqlite3.Error):
            self._database.close()

    # ---- what was written ----------------------------------------------------------------------------

    def rows(self) -> npt.NDArray[np.void]:
        """All that is written down, a record of ROW each, oldest first; raises UnreadableError."""
        try:
            with self._using:
                found = self._database.execute("SELECT about FROM chunks").fetchall()
            packed = b"".join([about for (about,) in found])
            if len(packed) != len(found) * ROW.itemsize:
                raise UnreadableError(f"{self._path}: rows of another size than {ROW.itemsize} bytes")
        except (sqlite3.Error, TypeError) as error:
            raise UnreadableError(f"{self._path}: {error}") from error
        rows = np.frombuffer(packed, ROW)
        return rows[np.argsort(rows["age"], kind="stable")]

    def keep_origins(self, numbers: Collection[int]) -> None:
        """Forget the origins that no row speaks of any more: each clear leaves one. Before anything is stored."""
        gone = [number for number in self.origins if number not in numbers]
        with self._using:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany("DELETE FROM origins WHERE number = ?", [(number,) for number in gone])
                self._database.execute("COMMIT")
            except sqlite3.DatabaseError as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                log.info("%s: origins that nobody needs stay: %s", self._path, error)
                return
            for number in gone:
                origin = self.origins.pop(number)
                self._numbers[origin.root].remove((origin.layout, number))

    def replace(self, chunks: Sequence[tuple[int, int, Identity]]) -> None:
        """Write down these chunks at once, oldest first; raises sqlite3.Error. Once for a new journal, which until then
        will not be opened again."""
        with self._changed:
            first, self._age = self._age + 1, self._age + len(chunks)
        noted = [(place, (first + i, slot, it)) for i, (place, slot, it) in enumerate(chunks)]
        for start in range(0, len(noted), REPLACE):  # small transactions keep the write-ahead log small
            with self._using:
                self._write(dict(noted[start : start + REPLACE]))
        with self._using:
            self._database.execute("UPDATE opened SET about = ?", (self._about,))

    # ---- inside --------------------------------------------------------------------------------------

    def _prepare(self, about: str, *, create: bool) -> int:
        """Make or check the tables; how often this journal has been opened."""
        run = self._database.execute
        try:
            run("PRAGMA locking_mode=EXCLUSIVE")  # the directory is ours; and needs no shared-memory file
            run("PRAGMA journal_mode=WAL")
            run("PRAGMA synchronous=NORMAL")
            run(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
            run(f"PRAGMA journal_size_limit={WAL_PAGES * 4096}")
            run("BEGIN IMMEDIATE")
            if create:  # the caller has put an empty file there
                run(f"PRAGMA user_version={FORMAT}")
                run("CREATE TABLE opened (times INTEGER, about TEXT)")
                run("CREATE TABLE origins (number INTEGER PRIMARY KEY, about BLOB)")
                run("CREATE TABLE chunks (place INTEGER PRIMARY KEY, about BLOB)")
                run("INSERT INTO opened VALUES (0, ?)", (_UNFINISHED,))
            if run("PRAGMA user_version").fetchone() != (FORMAT,):
                raise UnreadableError(f"{self._path} is not a journal of format {FORMAT}")
            times, whose = run("SELECT times, about FROM opened").fetchone() or (0, "")
            if whose != (_UNFINISHED if create else about) or not isinstance(times, int) or not 0 <= times < 1 << 23:
                raise UnreadableError(f"{self._path} is about {whose!r}, not about {about!r}")
            run("UPDATE opened SET times = times + 1")
            run("COMMIT")
        except sqlite3.DatabaseError as error:
            if create:
                raise
            raise UnreadableError(f"{self._path}: {error}") from error
        return times + 1

    def _read_origins(self) -> dict[int, Origin]:
        """The origins by number; those that are damaged are left out, and their chunks with them."""
        try:
            found = self._database.execute("SELECT number, about FROM origins").fetchall()
        except sqlite3.DatabaseError as error:
            raise UnreadableError(f"{self._path}: {error}") from error
        origins = {}
        for number, about in found:
            try:
                if _digest.unpack_from(about)[0] != xxhash.xxh3_64_intdigest(about[_digest.size :]):
                    continue
                namespace, layout, root = _origins.decode(about[_digest.size :])
            except (struct.error, TypeError, msgspec.DecodeError, msgspec.ValidationError):
                continue
            origins[number] = Origin(namespace, layout, root)
        return origins

    def _noted(self, before: int) -> None:
        # Not for every note: the thread would wake up as often.
        if self._pending and (not before or before < BATCH <= len(self._pending)):
            self._changed.notify_all()

    def _run(self) -> None:
        patience_s = RETRY_S
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pending or self._closing)
                self._changed.wait_for(lambda: len(self._pending) >= BATCH or self._flushing or self._closing, BATCH_S)
                batch, self._pending = self._pending, {}
                self._busy = bool(batch)
                closing = self._closing
            if not batch:
                if closing:
                    return
                continue
            if self._commit(batch) or self.broken:
                patience_s = RETRY_S
                continue
            with self._changed:
                self._pending = batch | self._pending
                if closing:
                    return
                self._changed.wait_for(lambda: self._closing, patience_s)
            patience_s = min(patience_s * 2, RETRY_MAX_S)

    def _commit(self, batch: dict[int, tuple[int, int, Identity] | None]) -> bool:
        if self.broken:
            return False
        try:
            with self._using:
                self._write(batch)
        except sqlite3.OperationalError as error:  # full, or the device fails: perhaps not for ever
            if not self.failures:
                log.warning("%s: cannot write: %s; will try again", self._path, error)
            self.failures += 1
            return False
        except sqlite3.DatabaseError as error:
            log.error("%s is damaged: %s; the next start looks at every slot instead", self._path, error)
            self.broken = True
            with suppress(OSError):
                remove(self._path)
            return False
        return True

    def _write(self, batch: dict[int, tuple[int, int, Identity] | None]) -> None:
        run, many = self._database.execute, self._database.executemany
        new: dict[int, Origin] = {}
        rows = [
            (place, _about.pack(place, it[0], self._number(it[2].origin, new), it[2].group, it[1], it[2].key,
                                it[2].parent or _NO_PARENT))
            for place, it in batch.items() if it is not None
        ]  # fmt: skip
        gone = [(place,) for place, it in batch.items() if it is None]
        try:
            run("BEGIN IMMEDIATE")
            many("INSERT OR REPLACE INTO origins VALUES (?, ?)", [(n, _packed(it)) for n, it in new.items()])
            many("INSERT OR REPLACE INTO chunks VALUES (?, ?)", rows)
            many("DELETE FROM chunks WHERE place = ?", gone)
            run("COMMIT")
            self.origins |= new
        except sqlite3.DatabaseError:
            for number, origin in new.items():  # not written after all
                self._numbers[origin.root].remove((origin.layout, number))
            with suppress(sqlite3.DatabaseError):
                run("ROLLBACK")
            raise

    def _number(self, origin: Origin, new: dict[int, Origin]) -> int:
        known = self._numbers.setdefault(origin.root, [])
        for layout, number in known:
            if layout is origin.layout or layout == origin.layout:
                return number
        number, self._next_number = self._next_number, self._next_number + 1
        known.append((origin.layout, number))
        new[number] = origin
        return number


def _packed(origin: Origin) -> bytes:
    about = msgspec.msgpack.encode((origin.namespace, origin.layout, origin.root))
    return _digest.pack(xxhash.xxh3_64_intdigest(about)) + about


def remove(path: Path) -> None:
    """Remove a journal's files."""
    for suffix in ("", "-wal", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


assert ROW.itemsize == _about.size, f"rows of {ROW.itemsize} bytes are written with {_about.size}"
