"""What is below HOST in a simulated world, and outlives a node: slots of a disk with its journal, stores of remotes.

Bytes are whose they are, page by page, as in `memory`. What a header and a checksum find out in reality is found out
here; what they cannot find out, bytes that were wrong before they were written, is handed to the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater.sim.memory import Content
from headwater.types import PAGE_BYTES, ChunkKey, Outcome

Name = tuple[int, int, ChunkKey]
"""A chunk's part: namespace, group, key."""
Bytes = list[Content | str | None]
HEADER_PAGES = 1
SPACE_BITS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """What the journal says of a place."""

    name: Name
    parent: bytes
    slot_bytes: int


class Disk:
    """The slots of a disk. `unsure` are the places whose bytes somebody damaged, or that only a journal vouches for."""

    def __init__(self) -> None:
        self.unsure: set[int] = set()
        self.refused: set[int] = set()
        """Places whose key is gone: until they are written anew nobody can bring back what is there."""
        self.broken: set[int] = set()
        """Places that cannot be read or written, for good."""
        self.journal: dict[int, Row] = {}
        self.retired: dict[int, int] = {}
        """How often a namespace was given another name."""
        self._notes: list[tuple[int, Row | None]] = []
        self._pages: dict[int, object] = {}

    def named(self, name: Name) -> Name:
        """What a part is called here now."""
        space, group, key = name
        return space + (self.retired.get(space, 0) << SPACE_BITS), group, key

    def begin_write(self, place: int, slot_bytes: int, writer: int) -> None:
        """From now on the slot is torn."""
        for page in self._slot(place, slot_bytes):
            self._pages[page] = writer

    def end_write(self, place: int, name: Name, content: Bytes, writer: int) -> None:
        """Header and bytes are there, unless somebody else wrote in between."""
        slot = self._slot(place, (len(content) + HEADER_PAGES) * PAGE_BYTES)
        if all(self._pages.get(page) == writer for page in slot):
            for page, it in zip(slot, [("header", name), *content], strict=True):
                self._pages[page] = it
            self.unsure.discard(place)
            self.refused.discard(place)

    def read(self, place: int, name: Name, slot_bytes: int) -> tuple[Outcome, Bytes]:
        """What a read finds, and the bytes if it takes them for right."""
        if place in self.broken:
            return Outcome.DAMAGED, []
        header, *content = [self._pages.get(page) for page in self._slot(place, slot_bytes)]
        if header is None:
            return Outcome.MISSING, []
        if not isinstance(header, tuple):
            return Outcome.CORRUPT, []
        if header != ("header", name):
            return Outcome.FOREIGN, []
        whole = not any(isinstance(it, int) or (isinstance(it, tuple) and it[0] == "header") for it in content)
        if whole and place in self.refused:
            return Outcome.REFUSED, []
        return (Outcome.DONE, content) if whole else (Outcome.CORRUPT, [])  # type: ignore[return-value]

    def damage(self, place: int, kind: int) -> None:
        """A header is lost or another's, a page rots, the place breaks, or the key of what is there is gone."""
        self.unsure.add(place)
        first = place // PAGE_BYTES
        if kind == 0:
            self._pages.pop(first, None)
        elif kind == 1 and isinstance(self._pages.get(first), tuple):
            self._pages[first] = ("header", "another's")
        elif kind == 3:
            self.broken.add(place)
        elif kind == 4:
            self.refused.add(place)
        else:
            self._pages[first + HEADER_PAGES] = -1

    def note(self, changes: Iterable[tuple[int, Row | None]]) -> None:
        """The journal is told; it writes later."""
        self._notes += changes

    def write_journal(self, count: int | None = None) -> None:
        """The first notes are written; a crash loses the others."""
        count = len(self._notes) if count is None else count
        for place, row in self._notes[:count]:
            if row is None:
                self.journal.pop(place, None)
            else:
                self.journal[place] = row
        del self._notes[:count]

    def crash(self, written: float) -> list[tuple[int, Row]]:
        """The node is killed: the journal had written a share of its notes. What it says then, parents first."""
        self.write_journal(int(len(self._notes) * written))
        self._notes.clear()
        self.unsure.update(self.journal)
        left, known, rows = {}, set[bytes](), list[tuple[int, Row]]()
        for place, row in self.journal.items():
            name = row.name[0] & ((1 << SPACE_BITS) - 1), *row.name[1:]
            if self.named(name) == row.name:
                left[place] = Row(name, row.parent, row.slot_bytes)
        while left:
            ready = [place for place, row in left.items() if not row.parent or row.parent in known] or list(left)
            for place in ready:
                row = left.pop(place)
                known.add(row.name[2])
                rows.append((place, row))
        return rows

    @staticmethod
    def _slot(place: int, slot_bytes: int) -> range:
        return range(place // PAGE_BYTES, (place + slot_bytes) // PAGE_BYTES)


class Remote:
    """The store of a REMOTE tier, which evicts by itself or says that it is full."""

    def __init__(self, capacity_pages: int, *, evicts: bool) -> None:
        self.capacity_pages, self.evicts = capacity_pages, evicts
        self.parts: dict[Name, Bytes] = {}
        self.rotten: set[Name] = set()
        self.refused: set[Name] = set()

    @property
    def used_pages(self) -> int:
        """Pages of all that it holds."""
        return sum(map(len, self.parts.values()))

    def write(self, name: Name, content: Bytes, *, anew: bool = False) -> Outcome:
        """Keep a part, unless it is full; replace what is there only if told so."""
        if name in self.parts and not anew:
            return Outcome.DONE  # once is enough
        self.forget([name])
        while self.used_pages + len(content) > self.capacity_pages:
            if not self.evicts or not self.parts:
                return Outcome.FULL
            self.forget([next(iter(self.parts))])
        self.parts[name] = content
        return Outcome.DONE

    def read(self, name: Name) -> tuple[Outcome, Bytes]:
        """What a read finds, and the bytes if it takes them for right."""
        if name in self.rotten:
            return Outcome.CORRUPT, []
        if name in self.refused:
            return Outcome.REFUSED, []
        content = self.parts.get(name)
        return (Outcome.MISSING, []) if content is None else (Outcome.DONE, content)

    def forget(self, names: Sequence[Name]) -> None:
        """Parts are gone."""
        for name in names:
            self.parts.pop(name, None)
            self.rotten.discard(name)
            self.refused.discard(name)
