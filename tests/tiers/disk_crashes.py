"""The crash loop of the DISK tier: `python -m tests.tiers.disk_crashes ROUNDS SEED DIRECTORY`.

Each round forks a child that stores and removes chunks and is killed with -9: when it has said a number of things, or
by itself at a named point. Then this process opens the disk, as a restarted node would, and compares with what the
child had said: whatever it reads must be whole and right, and what was flushed and not removed must be there.
A process of its own, because it forks and must have no other threads.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.core.pool import Pool
from headwater.ports import Piece
from headwater.tiers import direct_io
from headwater.tiers.disk import DiskTier
from headwater.tiers.journal import Journal
from headwater.tiers.recovery import Recovered
from headwater.tiers.retired import Retired
from headwater.types import Identity, Origin, Outcome
from tests.tiers.disks import LARGE, SLAB_BYTES, SMALL, chunk, content, empty, soon

JOURNAL_BYTES = 2 << 20
SLABS, FEWER_SLABS, SEGMENT_SLABS = 10, 5, 4
NAMES = 60
STEPS = 60
POINTS = (
    "write: before", "write: half", "write: after", "journal: before", "journal: inside", "journal: after",
    "open", "allocate", "truncate", "read", "unlink", "close", "retire: before", "retire: inside", "retire: after",
)  # fmt: skip


RETIRING = ("retire: before", "retire: inside", "retire: after")
RESIZING = ("allocate", "truncate", "unlink")


class Killer:
    """Ends this process when it comes to a named point for the n-th time."""

    def __init__(self, point: str, times: int) -> None:
        self._point, self._times = point, times

    def at(self, point: str) -> None:
        """This process is at a point."""
        if point == self._point:
            self._times -= 1
            if self._times <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Pass by the points whenever the tier makes a system call or a transaction."""
        write, journal_write, run_execute = direct_io.write, Journal._write, self.at

        def torn(descriptor: int, views: Any, offset_bytes: int) -> None:
            self.at("write: before")
            view = views[0]
            half = len(view) // 2 // 4096 * 4096
            if half:
                write(descriptor, [view[:half]], offset_bytes)
                self.at("write: half")
            write(descriptor, views, offset_bytes)
            self.at("write: after")

        def journalled(journal: Journal, batch: Any) -> None:
            self.at("journal: before")
            if not isinstance(journal._database, Watched):
                journal._database = Watched(journal._database, run_execute)
            journal_write(journal, batch)
            self.at("journal: after")

        direct_io.write, Journal._write = torn, journalled
        sync, add = direct_io.sync, Retired.add

        def synced(descriptor: int) -> None:
            self.at("retire: inside")
            sync(descriptor)
            self.at("retire: inside")

        def retired(names: Retired, root: bytes) -> None:
            self.at("retire: before")
            add(names, root)
            self.at("retire: after")

        direct_io.sync, Retired.add = synced, retired  # type: ignore[method-assign]
        for name, point in (("open_at", "open"), ("allocate", "allocate"), ("truncate", "truncate"), ("read", "read"),
                            ("unlink_at", "unlink")):  # fmt: skip
            setattr(direct_io, name, self._passing(getattr(direct_io, name), point))

    def _passing(self, call: Callable[..., Any], point: str) -> Callable[..., Any]:
        def passing(*arguments: Any) -> Any:
            self.at(point)
            return call(*arguments)

        return passing


class Watched:
    """A database connection that passes by a point between the statements of a transaction."""

    def __init__(self, database: Any, at: Callable[[str], None]) -> None:
        self._database, self._at = database, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def execute(self, *arguments: Any) -> Any:
        """Run a statement."""
        self._at("journal: inside")
        return self._database.execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        """Run a statement many times."""
        self._at("journal: inside")
        return self._database.executemany(*arguments)


class Store:
    """A node's disk without the node: which chunk is in which slot, the oldest leaves first."""

    def __init__(self, directory: Path, slabs: int = SLABS) -> None:
        size_bytes = JOURNAL_BYTES + slabs * SLAB_BYTES
        self.tier = DiskTier(
            directory, size_bytes, SLAB_BYTES, reserve_bytes=0, segment_bytes=SEGMENT_SLABS * SLAB_BYTES
        )
        self.found = list(self.tier.recover())
        self.pool = Pool(self.tier.segments_bytes, SLAB_BYTES)
        took = self.pool.restore([(it.place, it.slot_bytes) for it in self.found], 0)
        assert all(took), "recovered slots overlap"
        self.held = {it.identity: it.place for it in self.found}

    def origin(self, small: bool) -> Origin:
        """One of two namespaces, as it is called by now."""
        origin = SMALL if small else LARGE
        return replace(origin, root=self.tier.retired.current(origin.root))

    def remove(self, identity: Identity) -> None:
        """Forget a chunk."""
        place = self.held.pop(identity)
        self.pool.free(place)
        self.tier.journal.removed([place])

    def allocate(self, identity: Identity, evicted: Callable[[Identity], None]) -> int:
        """A slot, by evicting the oldest as long as there is none."""
        while (place := self.pool.allocate(self.tier.slot_bytes(identity), 0)) is None:
            oldest = next(iter(self.held))
            evicted(oldest)
            self.remove(oldest)
        return place


def name_of(identity: Identity) -> str:
    """How a chunk is called between child and parent: by what its namespace is called on this disk, and its key."""
    return f"{identity.origin.root.hex()}/{identity.key.hex()}"


def child(directory: Path, slabs: int, rng: random.Random, say: Callable[[str], None], killer: Killer) -> None:
    """Store, remove and clear; say what happened: `-` before a removal, `+` after a store, `=` after a flush, `~`
    before a namespace is cleared, and `!` once it is."""
    killer.install()
    store = Store(directory, slabs)
    say("o")
    for _ in range(STEPS):
        step = rng.random()
        if step < 0.7:
            number = rng.randrange(NAMES)
            of = store.origin(number % 3 > 0)
            identity = chunk(number, of, chunk(number - 3, of) if number > 3 else None)
            if identity in store.held:
                continue
            place = store.allocate(identity, lambda it: say("-" + name_of(it)))
            target = empty(Piece(identity, content(identity), place))
            target.memory[:] = content(identity)
            if store.tier.write([target], soon()) != [Outcome.DONE]:
                store.pool.free(place)
                continue
            store.held[identity] = place
            store.tier.journal.stored([(place, store.tier.slot_bytes(identity), identity)])
            say("+" + name_of(identity))
        elif step < 0.8 and store.held:
            identity, place = rng.choice(list(store.held.items()))
            store.tier.read([empty(Piece(identity, content(identity), place))], soon())
        elif step < 0.9 and store.held:
            identity = rng.choice(list(store.held))
            say("-" + name_of(identity))
            store.remove(identity)
        elif step < 0.92:
            root = store.origin(rng.random() < 0.5).root
            say("~" + root.hex())
            store.tier.retired.add(root)
            say("!" + root.hex())
            for identity in [it for it in store.held if it.origin.root == root]:
                store.remove(identity)
        elif store.tier.journal.flush():
            say("=")
    killer.at("close")
    store.tier.close()
    say("=")
    say("c")


def promised(said: list[str], before: set[str]) -> set[str]:
    """What must be there: flushed, and not removed afterwards."""
    kept, flushed = set(before), set(before)
    for it in said:
        if it.startswith("+"):
            kept.add(it[1:])
        elif it.startswith("-"):
            kept.discard(it[1:])
            flushed.discard(it[1:])
        elif it.startswith("~"):
            kept = {name for name in kept if not name.startswith(it[1:])}
            flushed &= kept
        elif it == "=":
            flushed = set(kept)
    return flushed


def run_child(directory: Path, slabs: int, rng: random.Random, point: str, times: int, patience: int) -> list[str]:
    """One life: until it has said `patience` things, or comes to its point, or is through."""
    seed = rng.randrange(1 << 30)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            child(directory, slabs, random.Random(seed), lambda it: _say(writer, it), Killer(point, times))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    said: list[str] = []
    rest = b""
    while part := os.read(reader, 4096):
        *lines, rest = (rest + part).split(b"\n")
        said += [line.decode() for line in lines]
        if patience and len(said) >= patience:
            os.kill(pid, signal.SIGKILL)
            patience = 0
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    ended = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert ended or os.waitstatus_to_exitcode(status) == 0, f"the child failed: {status}"
    return said


def _say(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode() + b"\n")


def verify(
    directory: Path,
    must: set[str],
    counts: collections.Counter[str],
    slabs: int = SLABS,
    *,
    scans: bool = False,
    cleared: Collection[str] = (),
) -> set[str]:
    """Open the disk as a restarted node would; what is there afterwards."""
    store = Store(directory, slabs)
    found = {name_of(it.identity) for it in store.found}
    back = [name for name in found if name.partition("/")[0] in cleared]
    assert not back, f"{len(back)} chunks are back that were cleared: {back[:3]}"
    assert len(found) == len(store.found), "a chunk was recovered twice"
    _check_order(store.found)
    good = set()
    for it in store.found:
        target = empty(Piece(it.identity, content(it.identity), it.place))
        outcome = store.tier.read([target], soon())[0]
        counts[outcome.value] += 1
        if outcome is Outcome.DONE:
            assert bytes(target.memory) == bytes(content(it.identity)), f"wrong bytes for {name_of(it.identity)}"
            good.add(name_of(it.identity))
        else:
            store.remove(it.identity)
    if scans:
        counts["not found by a scan"] += len(must - good)
        must &= good
    assert must <= good, f"{len(must - good)} of {len(must)} flushed chunks are gone: {sorted(must - good)[:3]}"
    store.tier.close()
    return good


def _check_order(found: list[Recovered]) -> None:
    keys = {it.identity.key for it in found}
    seen: set[bytes] = set()
    for it in found:
        parent = it.identity.parent
        assert not parent or parent in seen or parent not in keys, f"{name_of(it.identity)} comes before its parent"
        seen.add(it.identity.key)


def main(rounds: int, seed: int, directory: Path) -> None:
    """Run the loop; prints what happened as JSON."""
    rng = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    held: set[str] = set()
    cleared: set[str] = set()
    for number in range(rounds):
        point = POINTS[number // 2 % len(POINTS)] if number % 2 else "nowhere"
        times = rng.randrange(
            1,
            {"open": 5, "read": 5, **dict.fromkeys(RESIZING, 3), **dict.fromkeys(RETIRING, 3), "close": 2}.get(
                point, 20
            ),
        )
        slabs = FEWER_SLABS if point in ("truncate", "unlink") else SLABS
        if point == "allocate":
            verify(directory, set(), counts, FEWER_SLABS)
        said = run_child(directory, slabs, rng, point, times, 0 if number % 2 else rng.randrange(1, 70))
        counts["through" if "c" in said else f"killed at {point}"] += 1
        scans = number % 7 == 6
        if scans:  # the journal is lost as well
            for path in directory.glob("journal-*"):
                path.unlink()
            counts["scans"] += 1
        try:
            cleared |= {it[1:] for it in said if it.startswith("!")}
            must = set() if point in RESIZING else promised(said, held)
            held = verify(directory, must, counts, scans=scans, cleared=cleared)
        except AssertionError:
            print(f"round {number}, seed {seed}, point {point} ({times}), said {said}", file=sys.stderr)
            raise
    # A removal that was not journalled, and then a journal that is lost: a slab may be taken for one of the other size.
    assert counts["not found by a scan"] * 50 <= counts["scans"] * 5 * SLABS, f"seed {seed}: {counts}"
    print(json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
