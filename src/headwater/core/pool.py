"""The slots of one tier's memory: who may be where.

Theory of operation. The memory is cut into slabs of one size. A slab is *unassigned*, or belongs to one slot
size and is cut into slots of it; a slot is *free* or *taken* by one entry. A slab whose last slot is freed
becomes unassigned again, so that models with other chunk sizes can have it. Slots of one size never fragment;
when another size needs room, the cache empties a cold slab (`residents` says by evicting whom).

    segment 0            segment 1
    |slab|slab|slab|...  |slab|...        address = segment << 40 | offset_bytes
    |slot|slot|slot|rest|
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headwater.types import PAGE_BYTES, SEGMENT_SHIFT

NONE = -1


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
            if not self._unassigned:
                return None
            self._assign(self._unassigned.pop(), slot_bytes)
        slab = next(reversed(room))
        slot = self._free[slab].pop()
        if not self._free[slab]:
            del room[slab]
        self._entry[slab][slot] = entry
        self.taken_bytes += slot_bytes
        return self._slab_address[slab] + slot * slot_bytes

    def free(self, address: int) -> None:
        """Give a taken slot back."""
        slab, slot = self._slot(address)
        size, entries, free = self._slot_bytes[slab], self._entry[slab], self._free[slab]
        assert entries[slot] != NONE, f"the slot at {address:#x} is freed twice"
        entries[slot] = NONE
        free.append(slot)
        self.taken_bytes -= size
        room = self._with_room[size]
        if len(free) < len(entries):
            room[slab] = None
        else:
            room.pop(slab, None)
            self._free[slab], self._entry[slab] = array("i"), array("i")
            self._slot_bytes[slab] = 0
            self._unassigned.append(slab)

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
        return None if entry == NONE else entry

    @property
    def taken_slots(self) -> int:
        """How many slots are taken."""
        return sum(map(len, self._entry)) - sum(map(len, self._free))

    def residents(self, slab: int) -> list[int]:
        """The entries that have slots in a slab."""
        return [entry for entry in self._entry[slab] if entry != NONE]

    def check(self) -> None:
        """Assert that every slot is either free or taken and that the sums agree."""
        total = 0
        unassigned = set(self._unassigned)
        assert len(unassigned) == len(self._unassigned), f"a slab is unassigned twice: {self._unassigned}"
        for slab, size in enumerate(self._slot_bytes):
            entries, free = self._entry[slab], self._free[slab]
            assert (slab in unassigned) == (not size), f"slab {slab}: {size=}, unassigned={slab in unassigned}"
            assert len(entries) == (self.slab_bytes // size if size else 0), f"slab {slab} lost slots"
            assert len(free) < len(entries) or not size, f"slab {slab} is empty but assigned"
            assert {slot for slot, it in enumerate(entries) if it == NONE} == set(free), f"slab {slab}: free list"
            assert len(free) == len(set(free)), f"slab {slab}: a slot is free twice"
            if size:
                assert (slab in self._with_room[size]) == bool(free), f"slab {slab}: room list is wrong"
            total += size * (len(entries) - len(free))
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
        self._slot_bytes[slab] = slot_bytes
        self._free[slab] = array("i", range(count - 1, -1, -1))
        self._entry[slab] = array("i", [NONE]) * count
        self._with_room[slot_bytes][slab] = None
