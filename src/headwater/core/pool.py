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

from collections.abc import Sequence

from headwater.types import PAGE_BYTES, SEGMENT_SHIFT


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
        self._slot_bytes = [0] * count
        self._free: list[list[int]] = [[] for _ in range(count)]
        self._taken: list[dict[int, int]] = [{} for _ in range(count)]
        self._unassigned = list(range(count - 1, -1, -1))
        self._with_room: dict[int, dict[int, None]] = {}
        self.taken_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """The memory that slots can use."""
        return len(self._slab_address) * self.slab_bytes

    def __repr__(self) -> str:
        sizes = sorted({size for size in self._slot_bytes if size})
        taken = sum(map(len, self._taken))
        return (
            f"Pool({taken} slots of {sizes} bytes taken, {self.taken_bytes}/{self.capacity_bytes} bytes, "
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
        address = self._free[slab].pop()
        if not self._free[slab]:
            del room[slab]
        self._taken[slab][address] = entry
        self.taken_bytes += slot_bytes
        return address

    def free(self, address: int) -> None:
        """Give a taken slot back."""
        slab = self.slab(address)
        size = self._slot_bytes[slab]
        del self._taken[slab][address]
        self.taken_bytes -= size
        room = self._with_room[size]
        if self._taken[slab]:
            self._free[slab].append(address)
            room[slab] = None
        else:
            room.pop(slab, None)
            self._free[slab] = []
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
        return self._taken[self.slab(address)].get(address)

    @property
    def taken_slots(self) -> int:
        """How many slots are taken."""
        return sum(map(len, self._taken))

    def residents(self, slab: int) -> list[int]:
        """The entries that have slots in a slab."""
        return list(self._taken[slab].values())

    def check(self) -> None:
        """Assert that every slot is either free or taken and that the sums agree."""
        total = 0
        for slab, size in enumerate(self._slot_bytes):
            if not size:
                assert slab in self._unassigned and not self._taken[slab] and not self._free[slab], f"slab {slab}"
                continue
            assert self._taken[slab], f"slab {slab} is empty but assigned"
            assert len(self._taken[slab]) + len(self._free[slab]) == self.slab_bytes // size, f"slab {slab} lost slots"
            assert not self._taken[slab].keys() & set(self._free[slab]), f"slab {slab}: a slot is free and taken"
            assert (slab in self._with_room[size]) == bool(self._free[slab]), f"slab {slab}: room list is wrong"
            total += size * len(self._taken[slab])
        assert total == self.taken_bytes, f"taken_bytes={self.taken_bytes}, slots say {total}"

    def _assign(self, slab: int, slot_bytes: int) -> None:
        start, count = self._slab_address[slab], self.slab_bytes // slot_bytes
        assert count, f"slot_bytes={slot_bytes} does not fit slab_bytes={self.slab_bytes}"
        self._slot_bytes[slab] = slot_bytes
        self._free[slab] = [start + index * slot_bytes for index in range(count - 1, -1, -1)]
        self._with_room[slot_bytes][slab] = None
