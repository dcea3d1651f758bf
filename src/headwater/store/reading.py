"""Objects out of the node's memory: looked up in its table, copied, and looked at again.

Theory of operation. `plan` turns a key into the *pieces* of its bytes, one for an object in one slot. What the table
lists is not leased: after the copy the table must still say the same of each piece, or the copy is thrown away and
planned anew. What it does not list (the table is full, a lower tier has it) is asked for and leased while it is copied,
a round at a time: what has come up is read and let go of before the rest, which may need its room, is asked for again.
Bytes up to `VERIFIED_BYTES_MAX` a piece are checked against their checksum as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwater import _kernels
from headwater.errors import UnavailableError
from headwater.node.messages import KEYS_MAX, Find, Found, Leasing, Lower, unpack_words
from headwater.node.object_format import HEADER_BYTES, Header, Kind, Split, part_keys, read_header
from headwater.node.object_table import TRUSTED, Entry
from headwater.ports import Bytes
from headwater.store.connection import Connection
from headwater.tiers.header import payload_checksum
from headwater.types import ABSENT, ChunkKey, pack_keys

VERIFIED_BYTES_MAX = 256 << 10
TRIES = 8
"""How often a copy is begun again because its object was replaced meanwhile."""
POLL_S, POLL_S_MAX = 0.001, 0.016
REASONS = {
    Leasing.OPEN: "it was not brought up in time",
    Leasing.DRAINING: "the node is being stopped",
    Leasing.EXHAUSTED: "the node has as many leases as it can have",
}
LATE = "its lease was over before it was copied"


class Piece(NamedTuple):
    """Bytes of one slot. `entry` is what the table said at `place`; None for what is leased."""

    address: int
    length_bytes: int
    half: int
    place: int = 0
    entry: Entry | None = None


Plan = list[Piece]
"""All pieces of an object, in order."""


@dataclass(frozen=True, slots=True)
class Leased:
    """Slots that stay as they are until `deadline_s`: their addresses and sizes, ABSENT where there is none; `waits`
    says where there may be one a moment later."""

    tickets: tuple[int, ...]
    addresses: list[int]
    sizes: list[int]
    waits: list[bool]
    deadline_s: float
    leasing: Leasing


@dataclass(frozen=True, slots=True)
class Round:
    """Objects that are leased until `deadline_s`, with all their parts; None for a miss, and where it `waits`."""

    plans: list[Plan | None]
    waits: list[bool]
    tickets: tuple[int, ...]
    deadline_s: float
    leasing: Leasing

    @property
    def is_late(self) -> bool:
        """Whether what was read until now may be somebody else's bytes."""
        return bool(self.tickets) and time.monotonic() > self.deadline_s


def _find(one: Connection, key: ChunkKey) -> Piece | None:
    found = one.table.find(key)
    if found is None:
        return None
    place, entry = found
    address, length = entry[3] + HEADER_BYTES, entry[4]
    return Piece(address, length, entry[6], place, entry) if one.has(address, length) else None


def listed(one: Connection, root: bytes, key: ChunkKey) -> Plan | None:
    """The pieces of an object as the table has them; None if it does not list it, or not all of it."""
    head = _find(one, key) if TRUSTED else None
    if head is None or head.entry is None:
        return None
    if head.entry[2] != Kind.SPLIT:
        return [head]
    pieces: Plan = []
    for part in _parts_of(one, root, key, head) or ():
        piece = _find(one, part)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces or None


def _parts_of(one: Connection, root: bytes, key: ChunkKey, head: Piece) -> list[ChunkKey] | None:
    split = Split.decode(one.part(head.address, head.length_bytes).tobytes())
    return None if split is None or not still(one, [head]) else part_keys(root, key, split)


def split_parts(one: Connection, root: bytes, key: ChunkKey, until_s: float) -> list[ChunkKey]:
    """The keys of an object's parts, if it has several."""
    head = _find(one, key) if TRUSTED else None
    if head is not None and head.entry is not None:
        return (_parts_of(one, root, key, head) or []) if head.entry[2] == Kind.SPLIT else []
    while not one.lists_all:
        it = _lease(one, [key])
        parts = _leased_parts(one, root, key, it.addresses[0], it.sizes[0])
        one.release(it.tickets)
        if not it.waits[0] or it.leasing is Leasing.DRAINING or time.monotonic() >= until_s:
            return parts
        time.sleep(POLL_S)
    return []


def _leased_parts(one: Connection, root: bytes, key: ChunkKey, address: int, size: int) -> list[ChunkKey]:
    header = None if address == ABSENT else read_header(one.part(address, size).data, key)
    if header is None or header.kind is not Kind.SPLIT:
        return []
    split = Split.decode(one.part(address + HEADER_BYTES, header.length_bytes).tobytes())
    return [] if split is None else part_keys(root, key, split)


def still(one: Connection, plan: Plan) -> bool:
    """Whether all that was copied by this plan since it was made are the bytes that it was made for."""
    if len(plan) == 1:
        only = plan[0]
        return only.entry is None or one.table.still(only.place, only.entry)
    return all(it.entry is None or one.table.still(it.place, it.entry) for it in plan)


def length_of(plan: Plan) -> int:
    """The object's length."""
    return sum(it.length_bytes for it in plan)


def copy(one: Connection, copies: Sequence[tuple[Plan, Bytes]]) -> None:
    """Copy objects into memory that is large enough, in one go."""
    targets: list[int] = []
    sources: list[int] = []
    lengths: list[int] = []
    for plan, target in copies:
        at = target.ctypes.data
        for it in plan:
            if it.length_bytes:
                targets.append(at)
                sources.append(one.local(it.address))
                lengths.append(it.length_bytes)
                at += it.length_bytes
    count = len(targets)
    if count:
        words = np.array(targets + sources + lengths, np.uint64)
        _kernels.copyv(words[:count], words[count : 2 * count], words[2 * count :])


def is_whole(plan: Plan, copied: memoryview | bytes) -> bool:
    """Whether copied bytes have the checksums that they should, as far as they are short enough to be looked at."""
    at = 0
    view = memoryview(copied)
    for it in plan:
        if it.length_bytes <= VERIFIED_BYTES_MAX:
            digest = payload_checksum(view[at : at + it.length_bytes])
            if int.from_bytes(digest[:8], "little") != it.half:
                return False
        at += it.length_bytes
    return True


def _lease(one: Connection, keys: Sequence[ChunkKey]) -> Leased:
    """Lease what is held of these objects, and have the node bring up what is below."""
    tickets: tuple[int, ...] = ()
    addresses: list[int] = []
    sizes: list[int] = []
    waits: list[bool] = []
    deadline_s, leasing = float("inf"), Leasing.OPEN
    for start in range(0, len(keys), KEYS_MAX):
        got = one.call(Find(pack_keys(keys[start : start + KEYS_MAX]), True), Found)
        tickets += got.tickets
        addresses += unpack_words(got.addresses)
        sizes += unpack_words(got.sizes)
        its = Leasing(got.leasing)
        waits += [True] * (len(addresses) - len(waits)) if its is not Leasing.OPEN else map(bool, got.waits)
        deadline_s, leasing = min(deadline_s, got.deadline_s), its or leasing
    return Leased(tickets, addresses, sizes, waits, deadline_s, leasing)


def known(one: Connection, keys: Sequence[ChunkKey], until_s: float) -> list[bool]:
    """Which of these objects the node, its lower tiers or its peers have; raises UnavailableError if those who may have
    one do not say so in time."""
    packed = pack_keys(keys)
    while True:
        got = one.call(Find(packed, False, False), Found)
        if Lower.SOUGHT not in got.waits:
            break
        if time.monotonic() >= until_s:
            raise UnavailableError("those who may have it have not answered in time")
        time.sleep(POLL_S)
    there = zip(unpack_words(got.addresses), got.waits, strict=True)
    return [address != ABSENT or below == Lower.THERE for address, below in there]


def leased_round(one: Connection, root: bytes, keys: Sequence[ChunkKey]) -> Round:
    """Lease those of these objects that are here, whole."""
    heads = _lease(one, keys)
    plans: list[Plan | None] = []
    waits = list(heads.waits)
    parts: list[tuple[int, ChunkKey]] = []
    for at, (key, address, size) in enumerate(zip(keys, heads.addresses, heads.sizes, strict=True)):
        header = None if address == ABSENT else read_header(one.part(address, size).data, key)
        plans.append(None if header is None else [_piece(header, address)])
        if header is not None and header.kind is Kind.SPLIT:
            plans[at] = None
            parts += [(at, part) for part in _leased_parts(one, root, key, address, size)]
    if not parts:
        return Round(plans, waits, heads.tickets, heads.deadline_s, heads.leasing)
    rest = _lease(one, [key for _, key in parts])
    lacking = set()
    for (at, key), address, size, wait in zip(parts, rest.addresses, rest.sizes, rest.waits, strict=True):
        header = None if address == ABSENT else read_header(one.part(address, size).data, key)
        waits[at] |= wait
        if header is None:
            lacking.add(at)
            continue
        plans[at] = [*(plans[at] or []), _piece(header, address)]
    for at in lacking:
        plans[at] = None
    deadline_s = min(heads.deadline_s, rest.deadline_s)
    return Round(plans, waits, heads.tickets + rest.tickets, deadline_s, rest.leasing or heads.leasing)


def read_leased(
    one: Connection,
    root: bytes,
    keys: Sequence[ChunkKey],
    until_s: float,
    use: Callable[[Sequence[int], Sequence[Plan | None]], object],
) -> dict[int, str]:
    """Have `use` read objects while they are leased: it is given positions and their plans, None for a miss, each as
    soon as it is known, and again where its lease was over too soon. Returns which could not be read in time, and why.
    """
    left = list(range(len(keys)))
    pause_s = POLL_S
    while True:
        got = leased_round(one, root, [keys[at] for at in left])
        known = [turn for turn, waits in enumerate(got.waits) if not waits]
        try:
            use([left[turn] for turn in known], [got.plans[turn] for turn in known])
            late = got.is_late
        finally:
            one.release(got.tickets)
        if not late:
            left = [at for at, waits in zip(left, got.waits, strict=True) if waits]
        if not left or got.leasing is Leasing.DRAINING or time.monotonic() >= until_s:
            return dict.fromkeys(left, LATE if late else REASONS[got.leasing])
        pause_s = POLL_S if known and not late else min(2 * pause_s, POLL_S_MAX)
        time.sleep(pause_s)


def lease_all(one: Connection, root: bytes, keys: Sequence[ChunkKey], until_s: float) -> Round:
    """Lease objects, all at the same time; raises UnavailableError if what is there cannot be had so."""
    plans: list[Plan | None] = [None] * len(keys)
    left = list(range(len(keys)))
    tickets: tuple[int, ...] = ()
    deadline_s = float("inf")
    try:
        while True:
            got = leased_round(one, root, [keys[at] for at in left])
            for at, plan in zip(left, got.plans, strict=True):
                plans[at] = plan
            if any(got.plans):
                tickets, deadline_s = tickets + got.tickets, min(deadline_s, got.deadline_s)
            else:
                one.release(got.tickets)
            left = [at for at, waits in zip(left, got.waits, strict=True) if waits]
            if not left:
                return Round(plans, [False] * len(keys), tickets, deadline_s, got.leasing)
            if got.leasing is Leasing.DRAINING or time.monotonic() >= until_s:
                raise UnavailableError(f"keys[{left[0]}]: {REASONS[got.leasing]}")
            time.sleep(POLL_S)
    except BaseException:
        one.release(tickets)
        raise


def _piece(header: Header, address: int) -> Piece:
    half = int.from_bytes(header.checksum[:8], "little")
    return Piece(address + HEADER_BYTES, header.length_bytes, half)
