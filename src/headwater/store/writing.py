"""Objects into the node's memory: slots are placed, filled and published, a batch at a time.

Theory of operation. Each round places all that is left to do and acts on what the node says of each:

    YOURS  written into its slot, published        -> DONE; the slot's time was over -> ERROR
    HELD   compared                                -> DONE or EXISTS; it has just left -> another round
    BELOW  brought up, then as HELD
    BUSY   somebody writes it: another round a moment later, until the call's time is over -> ERROR
    FULL                                           -> FULL

What is larger than a slot goes in as parts first, and then as an object that lists them: nobody finds half of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headwater.node.messages import (
    Contained,
    Hold,
    Kept,
    Place,
    Placed,
    Publish,
    Published,
    Remove,
    Verdict,
    pack_words,
    unpack_words,
)
from headwater.node.object_format import HEADER_BYTES, PARTS_MAX, Header, Kind, Split, part_keys, slot_bytes
from headwater.ports import Bytes
from headwater.store.connection import Connection
from headwater.store.reading import Plan, length_of, listed, read_leased, still
from headwater.store.results import Outcome, PutResult
from headwater.tiers.checked_copy import copy_to_buffer
from headwater.tiers.header import payload_checksum
from headwater.types import ChunkKey, pack_keys

ROUND_KEYS, ROUND_BYTES = 4096, 256 << 20
"""What is placed at a time: it must be written before the slots' time is over."""
POLL_S = 0.002
BUSY = PutResult(Outcome.ERROR, "somebody else has been writing it for as long as this call may take")
LATE = PutResult(Outcome.ERROR, "the node took the slot back before it was written")
LEFT = PutResult(Outcome.ERROR, "some of its parts had left before it was written")
DONE, EXISTS = PutResult(Outcome.DONE), PutResult(Outcome.EXISTS, "there are other bytes of this key, which stay")


@dataclass(frozen=True, slots=True)
class Terms:
    """How the objects of a put are to be kept."""

    expires_ns: int
    pin_s: float
    replicas: int
    until_s: float


@dataclass(slots=True, eq=False)
class Put:
    """One object on its way. `stored` is what its slot gets: `data`, or the list of its parts."""

    key: ChunkKey
    data: Bytes
    stored: Bytes
    kind: Kind = Kind.WHOLE
    attempt: int = field(default_factory=lambda: secrets.randbits(63))
    parts: list[ChunkKey] = field(default_factory=list)
    published: bool = False
    """It is there by this very put."""
    result: PutResult | None = None


def put(one: Connection, root: bytes, puts: Sequence[Put], terms: Terms) -> None:
    """Put objects; each has its result afterwards. Raises UnavailableError: then nothing is known of any."""
    for it in puts:
        if slot_bytes(len(it.data), one.slab_bytes) is None:
            _put_parts(one, root, it, terms)
    left = [it for it in puts if it.result is None]
    while left:
        waiting: list[Put] = []
        for batch in _batches(left):
            waiting += _put_batch(one, root, batch, terms)
        left = waiting
        if left and time.monotonic() >= terms.until_s:
            for it in left:
                it.result = it.result or BUSY
            break
        if left:
            time.sleep(POLL_S)
    _remove_parts(one, puts)


def _batches(puts: Sequence[Put]) -> Iterator[list[Put]]:
    batch: list[Put] = []
    size = 0
    for it in puts:
        if batch and (len(batch) >= ROUND_KEYS or size + len(it.stored) > ROUND_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(it)
        size += len(it.stored)
    if batch:
        yield batch


def _put_batch(one: Connection, root: bytes, puts: Sequence[Put], terms: Terms) -> list[Put]:
    """One round; those that need another."""
    placed = one.call(Place(pack_keys(it.key for it in puts), pack_words(len(it.stored) for it in puts)), Placed)
    addresses = unpack_words(placed.addresses)
    mine = [at for at, verdict in enumerate(placed.verdicts) if verdict == Verdict.YOURS]
    if mine:
        try:
            for at in mine:
                _write(one, puts[at], addresses[at], terms.expires_ns)
        except BaseException:
            one.call_quietly(Publish(placed.placing, tuple(range(len(puts)))))
            raise
        published = one.call(Publish(placed.placing, (), terms.pin_s, terms.replicas), Published)
        for at in mine:
            if published.done and published.done[at]:
                puts[at].result = PutResult(Outcome.DONE, pinned=bool(published.pinned[at]))
                puts[at].published = True
            else:
                puts[at].result = LEFT if puts[at].kind is Kind.SPLIT else LATE
    there = [it for it, v in zip(puts, placed.verdicts, strict=True) if v in (Verdict.HELD, Verdict.BELOW)]
    if there:
        for it, reason in _compare(one, root, there, terms.until_s):
            it.result = PutResult(Outcome.ERROR, reason)
        _keep(one, there, terms)
    for it, verdict in zip(puts, placed.verdicts, strict=True):
        if verdict == Verdict.FULL:
            it.result = PutResult(Outcome.FULL, f"no slot for {len(it.stored)} bytes: the rest is leased, or too small")
    return [it for it in puts if it.result is None]


def _write(one: Connection, it: Put, address: int, expires_ns: int) -> None:
    slot = one.part(address, HEADER_BYTES + len(it.stored))
    checksum = copy_to_buffer(it.stored, slot[HEADER_BYTES:])
    header = Header(it.key, it.kind, len(it.stored), checksum, expires_ns, it.attempt)
    slot[:HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)


def _keep(one: Connection, puts: Sequence[Put], terms: Terms) -> None:
    """What was there already is pinned and has replicas as if it had just come."""
    same = [it for it in puts if it.result == DONE]
    if same and (terms.pin_s or terms.replicas > 1):
        flags = one.call(Hold(pack_keys(it.key for it in same), terms.pin_s or -1.0, terms.replicas), Kept).flags
        for it, flag in zip(same, flags, strict=True):
            it.result = PutResult(Outcome.DONE, pinned=bool(flag))


def _compare(one: Connection, root: bytes, puts: Sequence[Put], until_s: float) -> list[tuple[Put, str]]:
    """Say of objects that are there whether they are these; nothing of those that have left. Returns which could not
    be read, and why."""
    unlisted = []
    for it in puts:
        plan = listed(one, root, it.key)
        if plan is None:
            unlisted.append(it)
        elif still(one, plan):
            it.result = DONE if matches(plan, it.data) else EXISTS
    if not unlisted:
        return []

    def judge(turns: Sequence[int], plans: Sequence[Plan | None]) -> None:
        for turn, plan in zip(turns, plans, strict=True):
            unlisted[turn].result = None if plan is None else DONE if matches(plan, unlisted[turn].data) else EXISTS

    unread = read_leased(one, root, [it.key for it in unlisted], until_s, judge)
    return [(unlisted[turn], reason) for turn, reason in unread.items()]


def matches(plan: Plan, data: Bytes) -> bool:
    """Whether an object has exactly these bytes, by length and checksums."""
    if length_of(plan) != len(data):
        return False
    at = 0
    for it in plan:
        half = payload_checksum(data[at : at + it.length_bytes])[:8]
        if int.from_bytes(half, "little") != it.half:
            return False
        at += it.length_bytes
    return True


# ---- objects of several parts ------------------------------------------------------------------------------


def _put_parts(one: Connection, root: bytes, it: Put, terms: Terms) -> None:
    """Put what an object consists of, so that the object itself is only its list; or find that it is there."""
    late = _compare(one, root, [it], time.monotonic())
    if it.result is not None and not late:
        _keep(one, [it], terms)
        return
    it.result = None
    step = one.slab_bytes - HEADER_BYTES
    split = Split(len(it.data), step, it.attempt)
    if len(split.sizes) > PARTS_MAX:
        it.result = PutResult(Outcome.FULL, f"it would have more than {PARTS_MAX} parts")
        return
    parts = [
        Put(key, data, data, Kind.PART, it.attempt)
        for key, start in zip(part_keys(root, it.key, split), range(0, len(it.data), step), strict=True)
        for data in (it.data[start : start + step],)
    ]
    it.parts = [part.key for part in parts]
    it.kind, it.stored = Kind.SPLIT, np.frombuffer(split.encode(), np.uint8)
    put(one, root, parts, terms)
    bad = next((part.result for part in parts if part.result is not None and part.result.outcome != Outcome.DONE), None)
    if bad is not None:
        it.result = bad


def _remove_parts(one: Connection, puts: Sequence[Put]) -> None:
    """Of an object that did not come about by this put, nothing of this put stays."""
    keys = [key for it in puts if it.result is not None and not it.published for key in it.parts]
    if keys:
        one.call(Remove(pack_keys(keys)), Contained)
