"""The slots of one tier's memory: who may be where.

Theory of operation. The memory is cut into slabs of one size. A slab is *unassigned*, or belongs to one slot
size and is cut into slots of it; a slot is *free* or *taken* by one entry. A slab whose last slot is freed
becomes unassigned again, so that models with other chunk sizes can have it. Slots of one size never fragment;
when another size needs room, the cache empties a cold slab (`residents` says by evicting whom).
A slot whose bytes went bad is *condemned*: once it is given back, that range of its slab is in no slot again.

    segment 0            segment 1
    |slab|slab|slab|...  |slab|...        address = segment << 40 | offset_bytes
    |slot|slot|slot|rest|
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from headwater.types import PAGE_BYTES, SEGMENT_SHIFT

NONE = -1
BAD = -2
QUARANTINE_SHARE = 1 / 16
"""How much of the memory may be condemned; beyond that, what is bad is used again, after all else."""


class Pool:
    """Slots of a fixed amount of memory; the caller decides who leaves when it is full."""

    def __init__(self, segments_bytes: Sequence[int], slab_bytes: int) -> None:
        assert slab_bytes > 0 and slab_bytes % PAGE_BYTES == 0, f"slab_bytes={slab_bytes}"
        self.slab_bytes = slab_bytes
        self._slab_address: list[int] = []
        self._first_slab: list[int] = []
        for segment, size in enumerate(segments_bytes):
            self._first_slab.append(len(self._slab_address))
            for offset in range(0, size - slab_bytes + 1, slab_bytes):
                self._slab_address.append(segment << SEGMENT_SHIFT | offset)
        count = len(self._slab_address)
        # Columns of slot numbers and entries, 8 bytes a slot; empty where a slab is unassigned.
        self._slot_bytes = [0] * count
        self._free = [array("i") for _ in range(count)]
        self._entry = [array("i") for _ in range(count)]
        self._unassigned = list(range(count - 1, -1, -1))
        self._with_room: dict[int, dict[int, None]] = {}
        self.taken_bytes = 0
        self.quarantined_bytes = 0
        """Condemned ranges, for good."""
        self._condemned: set[int] = set()
        self._bad: dict[int, list[tuple[int, int]]] = {}

    @property
    def capacity_bytes(self) -> int:
        """The memory that slots can use."""
        return len(self._slab_address) * self.slab_bytes

    def __repr__(self) -> str:
        sizes = sorted({size for size in self._slot_bytes if size})
        return (
            f"Pool({self.taken_slots} slots of {sizes} bytes taken, {self.taken_bytes}/{self.capacity_bytes} bytes, "
            f"{len(self._unassigned)}/{len(self._slab_address)} slabs unassigned)"
        )

    def allocate(self, slot_bytes: int, entry: int) -> int | None:
        """The address of a slot now taken by `entry`, or None when no slab of this size has room."""
        room = self._with_room.setdefault(slot_bytes, {})
        if not room:
            at = next((it for it in reversed(range(len(self._unassigned))) if self._fits(it, slot_bytes)), None)
            if at is None:
                return None
            self._assign(self._unassigned.pop(at), slot_bytes)
        slab = next(reversed(room))
        slot = self._free[slab].pop()
        if not self._free[slab]:
            del room[slab]
        self._entry[slab][slot] = entry
        self.taken_bytes += slot_bytes
        return self._slab_address[slab] + slot * slot_bytes

    def restore(self, slots: Sequence[tuple[int, int]], first_entry: int) -> list[bool]:
        """Take the very slots (address, size in bytes) that an earlier life had, for entries numbered from
        `first_entry` on in order of those that are taken; which ones they are. Refused is what cannot be a slot now:
        outside the memory, not where slots of its size start, or taken."""
        took = []
        touched: set[int] = set()
        entry = first_entry
        for address, size in slots:
            slab = self._restore_one(address, size, entry)
            took.append(slab != NONE)
            if slab != NONE:
                touched.add(slab)
                self.taken_bytes += size
                entry += 1
        for slab in touched:
            entries, size = self._entry[slab], self._slot_bytes[slab]
            self._free[slab] = array("i", [slot for slot in range(len(entries) - 1, -1, -1) if entries[slot] == NONE])
            if not self._free[slab]:
                self._with_room[size].pop(slab, None)
        return took

    def _restore_one(self, address: int, size: int, entry: int) -> int:
        """Mark one slot taken; its slab, or NONE. The free lists are put right by the caller."""
        if address >> SEGMENT_SHIFT >= len(self._first_slab) or not 0 < size <= self.slab_bytes:
            return NONE
        slab = self.slab(address)
        if slab >= len(self._slab_address) or not 0 <= address - self._slab_address[slab] < self.slab_bytes:
            return NONE
        slot, rest = divmod(address - self._slab_address[slab], size)
        if rest or slot >= self.slab_bytes // size or self._slot_bytes[slab] not in (0, size):
            return NONE
        if not self._slot_bytes[slab]:
            self._unassigned.remove(slab)
            self._with_room.setdefault(size, {})
            self._assign(slab, size)
        if self._entry[slab][slot] != NONE:
            return NONE
        self._entry[slab][slot] = entry
        return slab

    def free(self, address: int) -> None:
        """Give a taken slot back."""
        slab, slot = self._slot(address)
        size, entries, free = self._slot_bytes[slab], self._entry[slab], self._free[slab]
        assert entries[slot] != NONE, f"the slot at {address:#x} is freed twice"
        self.taken_bytes -= size
        if address not in self._condemned:
            entries[slot] = NONE
            free.append(slot)
        elif self._quarantine(slab, slot * size, size):
            entries[slot] = BAD
        else:
            entries[slot] = NONE
            free.insert(0, slot)
        room = self._with_room[size]
        if len(free) + self._bad_slots(slab) < len(entries):
            if free:
                room[slab] = None
        else:
            room.pop(slab, None)
            self._unassign(slab)

    def free_all(self, addresses: Iterable[int]) -> None:
        """Give many taken slots back, whole slabs at once."""
        of_slab: dict[int, list[int]] = {}
        first, size, offset = self._first_slab, self.slab_bytes, (1 << SEGMENT_SHIFT) - 1
        for address in addresses:
            of_slab.setdefault(first[address >> SEGMENT_SHIFT] + (address & offset) // size, []).append(address)
        for slab, those in of_slab.items():
            taken = len(self._entry[slab]) - len(self._free[slab])
            if len(set(those)) == len(those) == taken and slab not in self._bad and not self._condemned:
                self._with_room[self._slot_bytes[slab]].pop(slab, None)
                self.taken_bytes -= taken * self._slot_bytes[slab]
                self._unassign(slab)
                continue
            for address in those:
                self.free(address)

    def condemn(self, address: int) -> None:
        """What was written to a taken slot cannot be read there, or not as it was: nobody shall have the slot next."""
        self._slot(address)
        self._condemned.add(address)

    def slab(self, address: int) -> int:
        """The slab that holds an address."""
        offset = address & ((1 << SEGMENT_SHIFT) - 1)
        return self._first_slab[address >> SEGMENT_SHIFT] + offset // self.slab_bytes

    def slot_bytes(self, address: int) -> int:
        """The size of the slot at an address."""
        return self._slot_bytes[self.slab(address)]

    def entry(self, address: int) -> int | None:
        """The entry that has taken the slot at an address; None if it is free."""
        slab, slot = self._slot(address)
        entry = self._entry[slab][slot]
        return None if entry < 0 else entry

    @property
    def taken_slots(self) -> int:
        """How many slots are taken."""
        bad = sum(map(self._bad_slots, self._bad))
        return sum(map(len, self._entry)) - sum(map(len, self._free)) - bad

    def residents(self, slab: int) -> list[int]:
        """The entries that have slots in a slab."""
        return [entry for entry in self._entry[slab] if entry >= 0]

    def check(self) -> None:
        """Assert that every slot is either free or taken and that the sums agree."""
        total = 0
        unassigned = set(self._unassigned)
        assert len(unassigned) == len(self._unassigned), f"a slab is unassigned twice: {self._unassigned}"
        for slab, size in enumerate(self._slot_bytes):
            entries, free = self._entry[slab], self._free[slab]
            assert (slab in unassigned) == (not size), f"slab {slab}: {size=}, unassigned={slab in unassigned}"
            assert len(entries) == (self.slab_bytes // size if size else 0), f"slab {slab} lost slots"
            bad = self._bad_slots(slab)
            assert len(free) + bad < len(entries) or not size, f"slab {slab} is empty but assigned"
            slots = {start // size for start, _ in self._bad.get(slab, ())} if size else set()
            assert all(entries[it] == BAD for it in slots if it < len(entries)), f"slab {slab}: a bad slot is in use"
            assert {slot for slot, it in enumerate(entries) if it == NONE} == set(free), f"slab {slab}: free list"
            assert len(free) == len(set(free)), f"slab {slab}: a slot is free twice"
            if size:
                assert (slab in self._with_room[size]) == bool(free), f"slab {slab}: room list is wrong"
            total += size * (len(entries) - len(free) - bad)
        assert total == self.taken_bytes, f"taken_bytes={self.taken_bytes}, slots say {total}"

    def _slot(self, address: int) -> tuple[int, int]:
        """The slab and the number of the slot that starts at an address."""
        slab = self.slab(address)
        size = self._slot_bytes[slab]
        assert size, f"the slab of {address:#x} is unassigned"
        slot, rest = divmod(address - self._slab_address[slab], size)
        assert not rest, f"no slot starts at {address:#x}"
        return slab, slot

    def _assign(self, slab: int, slot_bytes: int) -> None:
        count = self.slab_bytes // slot_bytes
        assert count, f"slot_bytes={slot_bytes} does not fit slab_bytes={self.slab_bytes}"
        bad = self._bad_at(slab, slot_bytes)
        self._slot_bytes[slab] = slot_bytes
        self._free[slab] = array("i", [slot for slot in range(count - 1, -1, -1) if slot not in bad])
        self._entry[slab] = array("i", [BAD if slot in bad else NONE for slot in range(count)])
        self._with_room[slot_bytes][slab] = None

    def _unassign(self, slab: int) -> None:
        self._free[slab], self._entry[slab] = array("i"), array("i")
        self._slot_bytes[slab] = 0
        self._unassigned.append(slab)

    def _quarantine(self, slab: int, start: int, size: int) -> bool:
        """Take a condemned slot out for good; False if that would be too much."""
        self._condemned.discard(self._slab_address[slab] + start)
        if self.quarantined_bytes and self.quarantined_bytes + size > QUARANTINE_SHARE * self.capacity_bytes:
            return False
        self._bad.setdefault(slab, []).append((start, size))
        self.quarantined_bytes += size
        return True

    def _bad_at(self, slab: int, slot_bytes: int) -> set[int]:
        """Which slots of this size a slab cannot have."""
        ranges = self._bad.get(slab, ())
        return {at for start, size in ranges for at in range(start // slot_bytes, -(-(start + size) // slot_bytes))}

    def _bad_slots(self, slab: int) -> int:
        return self._entry[slab].count(BAD) if slab in self._bad else 0

    def _fits(self, at: int, slot_bytes: int) -> bool:
        """Whether an unassigned slab has a slot of this size that is good."""
        slab = self._unassigned[at]
        if slab not in self._bad:
            return True
        slots = self.slab_bytes // slot_bytes
        return sum(slot < slots for slot in self._bad_at(slab, slot_bytes)) < slots
