"""One node's cache: which chunks are where, who may touch them, who leaves next.

Theory of operation. A *row* (entries.py) is one replica: RESERVED while it is written, READY once it is
readable. A *ticket* is the only thing that holds anything: a LOAD ticket leases READY rows, a SAVE ticket
reserves new ones. It belongs to an owner (an engine instance), covers a number of shards (ranks), and has a
deadline.

    match    how long a prefix is READY by every group's hit rule; changes nothing, may be asked again
    load     lease every hit first -> LOAD ticket -> each shard copies, says done -> leases end
    reserve  rows for keys not yet held -> SAVE ticket -> each shard writes, says done -> READY, then `Stored`
    release  the holder gives a ticket up: legal in every state, also cancel and failure

What moves a ticket on: `done` of its last shard, `release`, its deadline (`expire`), the death of its owner
(`close`). A SAVE ticket past its deadline can commit nothing any more: its rows are DOOMED, not findable, and
their slots are quarantined until its shards say done or the owner is gone, because a late writer may still
write there. A late reader cannot be stopped either; it checks the deadline itself after its copy.

Invariants (`check` asserts them; the simulator calls it after every event):
  - the parent of a resident row is resident; a row leaves only as a leaf without leases
  - only RESERVED and DOOMED rows are in SAVE tickets, each in exactly one; leases = rows in LOAD tickets
  - a key is findable exactly while its row is RESERVED or READY
  - bytes stored - evicted - deleted = bytes READY
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.core.entries import NONE, Entries, State
from headwater.core.layout import companions, longest_usable, main_group, needed_chunks
from headwater.core.pool import Pool
from headwater.types import (
    ABSENT,
    Changed,
    ChunkKey,
    KVLayout,
    Loadable,
    Namespace,
    Removed,
    Reservation,
    Stored,
    TicketKind,
    Tier,
)

if TYPE_CHECKING:
    from headwater.ports import EvictionPolicy

RECLAIM_TRIES = 8


@dataclass(slots=True)
class Ticket:
    """Rows that an owner may read (LOAD) or must write (SAVE), until every shard is done."""

    owner: str
    kind: TicketKind
    rows: list[int]
    chunk_of: list[int]
    shards_left: set[int]
    deadline_s: float
    quarantined: bool = False
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Space:
    """What the cache knows of one namespace: its layout, its findable rows by group, and its sums.

    `order` is the groups with the main one first: a chunk's row is placed before its companions' rows.
    """

    namespace: Namespace
    layout: KVLayout
    index: list[dict[ChunkKey, int]] = field(init=False)
    main: int | None = field(init=False)
    order: tuple[int, ...] = field(init=False)
    companions: tuple[int, ...] = field(init=False)
    slot_bytes: tuple[int, ...] = field(init=False)
    lookup_tokens: int = 0
    hit_tokens: int = 0
    stored_bytes: int = 0
    evicted_bytes: int = 0
    deleted_bytes: int = 0
    stored_chunks: int = 0
    evicted_chunks: int = 0
    deleted_chunks: int = 0
    failed_chunks: int = 0

    def __post_init__(self) -> None:
        groups = range(len(self.layout.groups))
        self.index = [{} for _ in groups]
        self.main = main_group(self.layout)
        self.companions = companions(self.layout)
        self.order = (*(() if self.main is None else (self.main,)), *self.companions)
        self.slot_bytes = tuple(self.layout.slot_bytes(group) for group in groups)

    @property
    def held_bytes(self) -> int:
        """Bytes of READY replicas."""
        return self.stored_bytes - self.evicted_bytes - self.deleted_bytes


class Cache:
    """The HOST tier's state machine; pure: told the time, told what happened, answers what to do."""

    def __init__(self, pool: Pool, policy: EvictionPolicy, load_s: float, save_s: float, epoch: int = 0) -> None:
        """`load_s` and `save_s` are the tickets' lives; `epoch` starts their numbers, so that no ticket of an
        earlier life of the node can be mistaken for one of this."""
        self.pool, self.policy = pool, policy
        self.entries = Entries()
        self.spaces: list[Space] = []
        self.tickets: dict[int, Ticket] = {}
        self.expired_loads = self.expired_saves = self.unknown_tickets = 0
        self._load_s, self._save_s = load_s, save_s
        self._next_ticket = epoch + 1
        self._shield = NONE
        self._changes: list[Changed] = []

    def __repr__(self) -> str:
        states = [sum(1 for it in self.entries.state if it == state) for state in (1, 2, 3)]
        return (
            f"Cache({states[0]} reserved, {states[1]} ready, {states[2]} quarantined, "
            f"{len(self.tickets)} tickets, {self.pool!r})"
        )

    def take_changes(self) -> list[Changed]:
        """What became readable and what left since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def add_space(self, namespace: Namespace, layout: KVLayout) -> int:
        """The handle of a new namespace; the caller has checked the layout and that it is new."""
        self.spaces.append(Space(namespace, layout))
        return len(self.spaces) - 1

    # ---- questions ------------------------------------------------------------------------------------

    def match(self, space: int, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks are usable by every group's hit rule; no effect."""
        it, state, ready = self.spaces[space], self.entries.state, State.READY
        limit = len(keys)
        if it.main is not None:
            find = it.index[it.main].get
            for position, key in enumerate(keys):
                row = find(key)
                if row is None or state[row] != ready:
                    limit = position
                    break
        others = it.companions
        if not others or not limit:
            return limit
        present = {group: [self._ready(it, group, key) for key in keys[:limit]] for group in others}
        return longest_usable(it.layout, present, limit)

    def contains(self, space: int, keys: Sequence[ChunkKey]) -> bytes:
        """One byte a key: 1 where every group's part of that chunk is READY."""
        it, state, ready = self.spaces[space], self.entries.state, State.READY
        if len(it.index) == 1:
            find = it.index[0].get
            return bytes([(row := find(key)) is not None and state[row] == ready for key in keys])
        groups = range(len(it.index))
        return bytes([all(self._ready(it, group, key) for group in groups) for key in keys])

    def count_lookup(self, space: int, asked: int, hit: int) -> None:
        """Add one request's lookup to the sums, in chunks."""
        it = self.spaces[space]
        it.lookup_tokens += asked * it.layout.chunk_tokens
        it.hit_tokens += hit * it.layout.chunk_tokens

    # ---- load -----------------------------------------------------------------------------------------

    def load(
        self,
        owner: str,
        space: int,
        keys: Sequence[ChunkKey],
        first: int,
        shards: Collection[int],
        now: float,
    ) -> Loadable:
        """Lease the usable prefix from chunk `first` on, for the given shards to read."""
        it, entries = self.spaces[space], self.entries
        chunks = self.match(space, keys)
        self._touch(it, keys[:chunks])
        addresses: list[tuple[int, ...]] = []
        rows: list[int] = []
        for group, index in enumerate(it.index):
            needed = needed_chunks(it.layout, group, chunks)
            places = []
            for position in range(first, chunks):
                if position not in needed:
                    places.append(ABSENT)
                    continue
                row = index[keys[position]]
                entries.leases[row] += 1
                rows.append(row)
                places.append(entries.address[row])
            addresses.append(tuple(places))
        if not rows:
            return Loadable(0, chunks, tuple(addresses), now)
        ticket = self._open(owner, TicketKind.LOAD, rows, [], shards, now + self._load_s)
        return Loadable(ticket, chunks, tuple(addresses), now + self._load_s)

    # ---- save -----------------------------------------------------------------------------------------

    def reserve(
        self,
        owner: str,
        space: int,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        lacking: Collection[tuple[int, int]],
        shards: Collection[int],
        now: float,
    ) -> Reservation:
        """Slots for the keys that nobody holds or writes yet, as far as there is room: a full cache means a
        shorter prefix. `parent` is the key before keys[0], None at the start of a prompt; if it is not held,
        nothing is reserved. `lacking` names (group, position) parts that the caller cannot write.
        """
        it = self.spaces[space]
        main = None if it.main is None else it.index[it.main]
        above = NONE
        if parent is not None and main is not None:
            above = main.get(parent, NONE)
            if above == NONE:
                return Reservation(0, 0, tuple(() for _ in it.index), now)
        addresses: list[list[int]] = [[] for _ in it.index]
        rows: list[int] = []
        chunk_of: list[int] = []
        covered = 0
        for position, key in enumerate(keys):
            if main is not None and key not in main and (it.main, position) in lacking:
                break
            wanted = [group for group in it.order if (group, position) not in lacking]
            new = self._reserve_chunk(space, it, key, wanted, above)
            if new is None:
                break
            for group in range(len(it.index)):
                addresses[group].append(self.entries.address[new[group]] if group in new else ABSENT)
            rows += new.values()
            chunk_of += [position] * len(new)
            covered = position + 1
            if main is not None:
                above = main[key]
        granted = tuple(map(tuple, addresses))
        if not rows:
            return Reservation(0, covered, granted, now)
        ticket = self._open(owner, TicketKind.SAVE, rows, chunk_of, shards, now + self._save_s)
        return Reservation(ticket, covered, granted, now + self._save_s)

    # ---- ends -----------------------------------------------------------------------------------------

    def done(self, owner: str, ticket_id: int, shard: int, failed: Collection[int], now: float) -> bool:
        """A shard has finished its copy; `failed` are positions of the `reserve` call whose bytes are not good.

        False for a ticket that is unknown, somebody else's, or done already: counted and ignored.
        """
        ticket = self.tickets.get(ticket_id)
        if ticket is None or ticket.owner != owner or shard not in ticket.shards_left:
            self.unknown_tickets += 1
            return False
        ticket.shards_left.discard(shard)
        ticket.failed.update(failed)
        if ticket.kind is TicketKind.SAVE and now > ticket.deadline_s:
            self._quarantine(ticket)
        if not ticket.shards_left:
            self._finish(ticket_id, commit=True)
        return True

    def release(self, owner: str, ticket_id: int) -> bool:
        """Give a ticket up; the owner vouches that nobody writes to its slots any more. Legal in every state."""
        ticket = self.tickets.get(ticket_id)
        if ticket is None or ticket.owner != owner:
            self.unknown_tickets += 1
            return False
        self._finish(ticket_id, commit=False)
        return True

    def keep(self, owner: str, known: Collection[int]) -> int:
        """An owner says which of its tickets it knows of; the others, which it can never end, end now; how many."""
        lost = [number for number, ticket in self.tickets.items() if ticket.owner == owner and number not in known]
        for number in lost:
            self._finish(number, commit=False)
        return len(lost)

    def close(self, owner: str) -> int:
        """Every process of an owner is gone: release all that it held; the number of tickets."""
        held = [number for number, ticket in self.tickets.items() if ticket.owner == owner]
        for number in held:
            self._finish(number, commit=False)
        return len(held)

    def expire(self, now: float) -> int:
        """End leases whose deadline has passed and quarantine late saves; the number of tickets affected."""
        late = [n for n, it in self.tickets.items() if now > it.deadline_s and not it.quarantined]
        for number in late:
            ticket = self.tickets[number]
            if ticket.kind is TicketKind.LOAD:
                self.expired_loads += 1
                self._finish(number, commit=False)
            else:
                self._quarantine(ticket)
        return len(late)

    def clear(self, space: int) -> int:
        """Delete every replica of a namespace that nobody uses; the number deleted."""
        return self._remove_leaves([row for index in self.spaces[space].index for row in index.values()], "deleted")

    # ---- inside ---------------------------------------------------------------------------------------

    def _ready(self, it: Space, group: int, key: ChunkKey) -> bool:
        row = it.index[group].get(key)
        return row is not None and self.entries.state[row] == State.READY

    def _touch(self, it: Space, keys: Sequence[ChunkKey]) -> None:
        # Leaf first, so that a parent is never older than its child.
        finds = [it.index[group].get for group in reversed(it.order)]
        state, ready, access = self.entries.state, State.READY, self.policy.access
        for key in reversed(keys):
            for find in finds:
                row = find(key)
                if row is not None and state[row] == ready:
                    access(row)

    def _reserve_chunk(
        self, space: int, it: Space, key: ChunkKey, groups: Sequence[int], above: int
    ) -> dict[int, int] | None:
        """New rows by group for what is missing of a chunk; None, with nothing changed, if there is no room."""
        main = it.main
        new: dict[int, int] = {}
        for group in groups:
            if key in it.index[group]:
                continue
            parent = above if group == main or main is None else it.index[main].get(key, NONE)
            row = self._place(space, it, group, key, parent)
            if row is None:
                for undone in reversed(new.values()):
                    self._unplace(undone)
                return None
            new[group] = row
        return new

    def _place(self, space: int, it: Space, group: int, key: ChunkKey, parent: int) -> int | None:
        slot_bytes = it.slot_bytes[group]
        # The parent must outlive the search for room: it becomes this row's parent only afterwards.
        self._shield = parent
        row = self.entries.next_row()
        address = self.pool.allocate(slot_bytes, row)
        if address is None and self._make_room(slot_bytes):
            row = self.entries.next_row()
            address = self.pool.allocate(slot_bytes, row)
        self._shield = NONE
        if address is None:
            return None
        added = self.entries.add(key, space, group, address, parent)
        assert added == row, f"row {added} was announced as {row}"
        it.index[group][key] = row
        return row

    def _unplace(self, row: int) -> None:
        """Take back a row of this call: nothing hangs on it and nobody writes to it yet."""
        self._hide(row)
        self._drop(row)

    def _hide(self, row: int) -> None:
        entries = self.entries
        del self.spaces[entries.space[row]].index[entries.group[row]][entries.keys[row]]
        entries.detach(row)

    def _make_room(self, slot_bytes: int) -> bool:
        """Evict the next victim, or, when its slot has another size, all of its slab."""
        for _ in range(RECLAIM_TRIES):
            row = self.policy.victim(self._evictable)
            if row is None:
                return False
            address = self.entries.address[row]
            if self.pool.slot_bytes(address) == slot_bytes:
                self._remove(row, "evicted")
                return True
            self.policy.insert(row, self.entries.keys[row])
            if any(self._empty_slab(slab) for slab in self._slabs_of_lineage(row)):
                return True
        return False

    def _slabs_of_lineage(self, row: int) -> list[int]:
        """Slabs that are as cold as a leaf: its own and the next ones in which its ancestors are."""
        slabs: dict[int, None] = {}
        while row != NONE and len(slabs) < RECLAIM_TRIES:
            slabs[self.pool.slab(self.entries.address[row])] = None
            row = self.entries.parent[row]
        return list(slabs)

    def _empty_slab(self, slab: int) -> bool:
        """Evict everything in a slab with all that hangs on it; False, with nothing changed, if some is in use."""
        entries = self.entries
        rows: dict[int, None] = {}
        pending = self.pool.residents(slab)
        while pending:
            row = pending.pop()
            if row not in rows:
                if entries.state[row] != State.READY or entries.leases[row] or row == self._shield:
                    return False
                rows[row] = None
                pending.extend(entries.children(row))
        self._remove_leaves(rows, "evicted")
        return True

    def _remove_leaves(self, rows: Collection[int], reason: str) -> int:
        """Remove those of these rows that can leave, children before their parents; the number removed."""
        left = dict.fromkeys(rows)
        count = 0
        for start in rows:
            row = start
            while row in left and self._evictable(row):
                parent = self.entries.parent[row]
                del left[row]
                self.policy.remove(row)
                self._remove(row, reason)
                count += 1
                row = parent
        return count

    def _evictable(self, row: int) -> bool:
        entries = self.entries
        return (
            entries.state[row] == State.READY
            and not entries.leases[row]
            and entries.is_leaf(row)
            and row != self._shield
        )

    def _remove(self, row: int, reason: str) -> None:
        """A READY leaf leaves; the policy has forgotten it already."""
        entries = self.entries
        space = self.spaces[entries.space[row]]
        group, key = entries.group[row], entries.keys[row]
        size = space.slot_bytes[group]
        if reason == "evicted":
            space.evicted_bytes += size
            space.evicted_chunks += 1
        else:
            space.deleted_bytes += size
            space.deleted_chunks += 1
        self._changes.append(Removed(entries.space[row], group, (key,), Tier.HOST, size, reason))
        self._hide(row)
        self._drop(row)

    def _drop(self, row: int) -> None:
        self.pool.free(self.entries.address[row])
        self.entries.free(row)

    def _doom(self, row: int) -> None:
        """Make a RESERVED row unfindable, and all that hangs on it; slots of rows being written stay taken."""
        entries = self.entries
        for it in reversed(entries.subtree(row)):
            if entries.state[it] == State.READY:
                if entries.leases[it]:
                    # Only a client that lied about `parent` can have brought readers here. They keep the row.
                    entries.detach(it)
                    continue
                self.policy.remove(it)
                self._remove(it, "deleted")
                continue
            assert entries.state[it] == State.RESERVED, f"row {it} is linked in state {entries.state[it]}"
            self._hide(it)
            entries.state[it] = State.DOOMED
            self.spaces[entries.space[it]].failed_chunks += 1

    def _quarantine(self, ticket: Ticket) -> None:
        if ticket.quarantined:
            return
        ticket.quarantined = True
        self.expired_saves += 1
        for row in ticket.rows:
            if self.entries.state[row] == State.RESERVED:
                self._doom(row)

    def _open(
        self,
        owner: str,
        kind: TicketKind,
        rows: list[int],
        chunk_of: list[int],
        shards: Collection[int],
        deadline_s: float,
    ) -> int:
        number = self._next_ticket
        self._next_ticket += 1
        self.tickets[number] = Ticket(owner, kind, rows, chunk_of, set(shards), deadline_s)
        return number

    def _finish(self, number: int, *, commit: bool) -> None:
        ticket = self.tickets.pop(number)
        entries = self.entries
        if ticket.kind is TicketKind.LOAD:
            for row in ticket.rows:
                entries.leases[row] -= 1
            return
        for row, position in zip(ticket.rows, ticket.chunk_of, strict=True):
            if entries.state[row] == State.RESERVED and (not commit or position in ticket.failed):
                self._doom(row)
        ready = [row for row in ticket.rows if entries.state[row] == State.RESERVED]
        for row in ticket.rows:
            if entries.state[row] == State.DOOMED:
                self._drop(row)
        self._commit(ready)

    def _commit(self, rows: Sequence[int]) -> None:
        entries = self.entries
        stored: dict[tuple[int, int], list[ChunkKey]] = {}
        # Leaf first, for the same reason as in _touch.
        for row in reversed(rows):
            entries.state[row] = State.READY
            self.policy.insert(row, entries.keys[row])
        for row in rows:
            stored.setdefault((entries.space[row], entries.group[row]), []).append(entries.keys[row])
        for (number, group), keys in stored.items():
            space = self.spaces[number]
            size = space.slot_bytes[group] * len(keys)
            space.stored_bytes += size
            space.stored_chunks += len(keys)
            self._changes.append(Stored(number, group, tuple(keys), Tier.HOST, size))

    def check(self) -> None:
        """Assert every invariant; a violation is a programmer's error and names the row."""
        self.pool.check()
        entries = self.entries
        leases: dict[int, int] = {}
        writing: dict[int, int] = {}
        for number, ticket in self.tickets.items():
            assert ticket.shards_left, f"ticket {number} has no shard left and is still open"
            for row in ticket.rows:
                if ticket.kind is TicketKind.LOAD:
                    leases[row] = leases.get(row, 0) + 1
                else:
                    assert row not in writing, f"row {row} is in tickets {writing[row]} and {number}"
                    writing[row] = number
        ready_bytes = [0] * len(self.spaces)
        ready = findables = 0
        for row, state in enumerate(entries.state):
            if state == State.FREE:
                continue
            key, number, group = entries.keys[row], entries.space[row], entries.group[row]
            space = self.spaces[number]
            findable = space.index[group].get(key) == row
            assert findable == (state in (State.RESERVED, State.READY)), f"row {row} {State(state).name}: {findable=}"
            assert entries.leases[row] == leases.get(row, 0), f"row {row}: {entries.leases[row]} leases"
            assert (row in writing) == (state != State.READY), f"row {row} {State(state).name} and its ticket"
            assert self.pool.entry(entries.address[row]) == row, f"row {row}: its slot is another's"
            assert self.pool.slot_bytes(entries.address[row]) == space.slot_bytes[group], f"row {row}: slot size"
            findables += findable
            parent = entries.parent[row]
            if parent != NONE:
                assert entries.state[parent] in (State.RESERVED, State.READY), f"row {row}: parent {parent} is gone"
            if state == State.READY:
                ready += 1
                ready_bytes[number] += space.slot_bytes[group]
        for number, space in enumerate(self.spaces):
            assert space.held_bytes == ready_bytes[number], f"space {number}: held_bytes={space.held_bytes}"
        indexed = sum(len(index) for space in self.spaces for index in space.index)
        assert indexed == findables, f"{indexed} keys are indexed for {findables} findable rows"
        assert self.pool.taken_slots == len(entries), f"{self.pool.taken_slots} slots taken by {len(entries)} rows"
        assert len(self.policy) == ready, f"policy knows {len(self.policy)} of {ready} READY rows"
