"""One node's cache: which chunks are where, who may touch them, who leaves next.

Theory of operation. A *row* (entries.py) is one replica: RESERVED while it is written, READY once it is
readable. A *ticket* is the only thing that holds anything: a LOAD ticket leases READY rows, a SAVE ticket
reserves new ones. It belongs to an owner (an engine instance), covers a number of shards (ranks), and has a
deadline.

    match    how long a prefix is READY by every group's hit rule; changes nothing, may be asked again
    hold     lease exactly these rows -> LOAD ticket (a move between tiers) or PIN ticket (an operator's wish)
    load     lease every hit first -> LOAD ticket -> each shard copies, says done -> leases end
    reserve  rows for keys not yet held -> SAVE ticket -> each shard writes, says done -> READY, then `Stored`
    release  the holder gives a ticket up: legal in every state, also cancel and failure

What moves a ticket on: `done` of its last shard, `release`, its deadline (`expire`), the death of its owner
(`close`). A SAVE ticket past its deadline can commit nothing any more: its rows are DOOMED, not findable, and
their slots are quarantined until its shards say done or the owner is gone, because a late writer may still
write there. A late reader cannot be stopped either; it checks the deadline itself after its copy.

Each tenant has a *share*: a policy of its own, and what it is entitled to when room is short. A tenant above that
gives way before one below, so that a flood of one leaves the others what is theirs. With one tenant there is nothing
to share, and its policy decides alone.

The same class keeps the books of the DISK tier: its slots lie in files, `tier` names it in what is announced, and
`restore` brings back what an earlier life had written.

Invariants (`check` asserts them; the simulator calls it after every event):
  - the parent of a resident row is resident; a row leaves only as a leaf without leases
  - only RESERVED and DOOMED rows are in SAVE tickets, each in exactly one; leases = rows in LOAD and PIN tickets
  - a key is findable exactly while its row is RESERVED or READY
  - bytes stored - evicted - deleted = bytes READY
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


@dataclass(slots=True, eq=False)
class Share:
    """One tenant's part of a tier: who of its chunks leaves next, what it holds, and its quota if it has one."""

    tenant: str
    policy: EvictionPolicy
    quota_bytes: int | None = None
    held_bytes: int = 0


@dataclass(slots=True)
class Space:
    """What the cache knows of one namespace: its layout, its findable rows by group, and its sums.

    `order` is the groups with the main one first: a chunk's row is placed before its companions' rows.
    """

    namespace: Namespace
    layout: KVLayout
    share: Share
    slot_bytes: tuple[int, ...]
    index: list[dict[ChunkKey, int]] = field(init=False)
    main: int | None = field(init=False)
    order: tuple[int, ...] = field(init=False)
    companions: tuple[int, ...] = field(init=False)
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

    @property
    def held_bytes(self) -> int:
        """Bytes of READY replicas."""
        return self.stored_bytes - self.evicted_bytes - self.deleted_bytes


class Cache:
    """One tier's state machine; pure: told the time, told what happened, answers what to do."""

    def __init__(
        self,
        pool: Pool,
        make_policy: Callable[[], EvictionPolicy],
        load_s: float,
        save_s: float,
        epoch: int = 0,
        tier: Tier = Tier.HOST,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        """`load_s` and `save_s` are the tickets' lives; `epoch` starts their numbers, so that no ticket of an
        earlier life of the node can be mistaken for one of this. `quotas` are bytes by tenant; the others share what
        is left equally."""
        self.pool, self.tier = pool, tier
        self.entries = Entries()
        self.spaces: list[Space] = []
        self.shares: dict[str, Share] = {}
        self.tickets: dict[int, Ticket] = {}
        self.expired_loads = self.expired_saves = self.unknown_tickets = 0
        self._make_policy, self._quotas = make_policy, dict(quotas or {})
        self._load_s, self._save_s = load_s, save_s
        self._next_ticket = epoch + 1
        self._shield = NONE
        self._cause = NONE
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

    def add_space(self, namespace: Namespace, layout: KVLayout, slot_bytes: Sequence[int] | None = None) -> int:
        """The handle of a new namespace; the caller has checked the layout and that it is new. `slot_bytes` is for a
        tier whose slots are not those of the layout: one size for each group."""
        share = self.shares.get(namespace.tenant)
        if share is None:
            quota = self._quotas.get(namespace.tenant)
            share = self.shares[namespace.tenant] = Share(namespace.tenant, self._make_policy(), quota)
        sizes = slot_bytes or [layout.slot_bytes(group) for group in range(len(layout.groups))]
        self.spaces.append(Space(namespace, layout, share, tuple(sizes)))
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

    def is_ready(self, space: int, group: int, key: ChunkKey) -> bool:
        """Whether one group's part of a chunk is READY."""
        return self._ready(self.spaces[space], group, key)

    def place_of(self, space: int, group: int, key: ChunkKey) -> int:
        """Where one group's part of a chunk is READY; ABSENT if it is not."""
        row = self.spaces[space].index[group].get(key) if group < len(self.spaces[space].index) else None
        return ABSENT if row is None or self.entries.state[row] != State.READY else self.entries.address[row]

    def which_ready(self, space: int, group: int, keys: Sequence[ChunkKey]) -> list[bool]:
        """For each key, whether one group's part of it is READY."""
        find, state, ready = self.spaces[space].index[group].get, self.entries.state, State.READY
        return [(row := find(key)) is not None and state[row] == ready for key in keys]

    def hanging_on(self, space: int, key: ChunkKey) -> list[tuple[int, ChunkKey]]:
        """The READY parts (group, key) of a resident chunk and of all that hangs on it, ancestors first."""
        it, entries = self.spaces[space], self.entries
        row = NONE if it.main is None else it.index[it.main].get(key, NONE)
        found = [] if row == NONE else entries.subtree(row)
        return [(entries.group[row], entries.keys[row]) for row in found if entries.state[row] == State.READY]

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

    def hold(
        self, owner: str, kind: TicketKind, space: int, parts: Iterable[tuple[int, ChunkKey]], until_s: float
    ) -> tuple[int, list[int]]:
        """Lease those of these (group, key) parts that are READY until `until_s`: the ticket (0 if none is) and, for
        each part, its address or ABSENT. It is no use of a chunk: who leaves next does not change."""
        it, entries = self.spaces[space], self.entries
        rows, places = [], []
        for group, key in parts:
            row = it.index[group].get(key)
            if row is None or entries.state[row] != State.READY:
                places.append(ABSENT)
                continue
            entries.leases[row] += 1
            rows.append(row)
            places.append(entries.address[row])
        return (self._open(owner, kind, rows, [], (0,), until_s) if rows else 0), places

    def parent_of(self, space: int, key: ChunkKey) -> ChunkKey | None:
        """The chunk before a resident one, as far as it is resident."""
        it, entries = self.spaces[space], self.entries
        row = NONE if it.main is None else it.index[it.main].get(key, NONE)
        above = NONE if row == NONE else entries.parent[row]
        return None if above == NONE else entries.keys[above]

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
        until_s: float | None = None,
    ) -> Reservation:
        """Slots for the keys that nobody holds or writes yet, as far as there is room: a full cache means a
        shorter prefix. `parent` is the key before keys[0], None at the start of a prompt; if it is not held,
        nothing is reserved. `lacking` names (group, position) parts that the caller cannot write. `until_s` is
        the deadline if it is another than usual.
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
        deadline_s = now + self._save_s if until_s is None else until_s
        ticket = self._open(owner, TicketKind.SAVE, rows, chunk_of, shards, deadline_s)
        return Reservation(ticket, covered, granted, deadline_s)

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
            if ticket.kind is TicketKind.SAVE:
                self._quarantine(ticket)
                continue
            self.expired_loads += ticket.kind is TicketKind.LOAD
            self._finish(number, commit=False)
        return len(late)

    def clear(self, space: int, mover: str | None = None) -> int:
        """Delete every replica of a namespace that nobody uses; the number deleted.

        What only `mover` reads is found no more, and its slots are free when it is done; what `mover` writes will not
        become READY.
        """
        it, entries = self.spaces[space], self.entries
        reads: dict[int, int] = {}
        for number, ticket in list(self.tickets.items()) if mover is not None else ():
            if ticket.owner != mover or entries.space[ticket.rows[0]] != space:
                continue
            if ticket.kind is TicketKind.SAVE:
                self.void(number)
            for row in ticket.rows if ticket.kind is TicketKind.LOAD else ():
                reads[row] = reads.get(row, 0) + 1
        stays: set[int] = set()
        state, leases, ready = entries.state, entries.leases, int(State.READY)
        used = [row for index in it.index for row in index.values() if leases[row] or state[row] != ready]
        for row in used:
            if state[row] != ready or leases[row] > reads.get(row, 0):
                while row != NONE and row not in stays:
                    stays.add(row)
                    row = entries.parent[row]
        return sum(self._clear_group(space, group, stays) for group in range(len(it.index)))

    def void(self, ticket_id: int) -> None:
        """What a SAVE ticket covers will not become READY: its rows are found no more, and its slots are free when it
        ends."""
        self._void(self.tickets[ticket_id])

    def evict(self, space: int, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks and all that hangs on them, but for what is in use; the number deleted."""
        rows: dict[int, None] = {}
        for index in self.spaces[space].index:
            for key in keys:
                row = index.get(key)
                if row is not None:
                    rows.update(dict.fromkeys(self.entries.subtree(row)))
        return self._remove_leaves(rows, "deleted")

    def touch(self, space: int, keys: Sequence[ChunkKey]) -> None:
        """Chunks are used: they leave later."""
        self._touch(self.spaces[space], keys)

    def make_room(self, space: int, slot_bytes: int) -> bool:
        """Evict the next victim for a slot of a namespace, although a free one may be there; whether one left."""
        return self._make_room(slot_bytes, self.spaces[space].share)

    def drop(self, space: int, group: int, key: ChunkKey, address: int, reason: str) -> bool:
        """The READY row at an address turned out not to hold what it should: nobody finds it any more, and its slot is
        free as soon as nobody reads it. What hung on it stays, and hangs on nothing. False if the chunk is not there,
        or elsewhere by now."""
        entries = self.entries
        row = self.spaces[space].index[group].get(key)
        if row is None or entries.state[row] != State.READY or entries.address[row] != address:
            return False
        for child in list(entries.children(row)):
            entries.detach(child)
        self._withdraw(row, reason)
        return True

    def restore(self, space: int, parts: Sequence[tuple[int, ChunkKey, bytes, int]]) -> list[bool]:
        """READY rows of an earlier life: (group, key, key of the chunk before or empty, address), oldest first, those
        of a chunk before those that hang on it; which ones are there now. The others' slots are gone or taken."""
        it, entries = self.spaces[space], self.entries
        unique = {(group, key): None for group, key, _, _ in parts}
        assert len(unique) == len(parts), "a part is restored twice"
        took = self.pool.restore([(address, it.slot_bytes[group]) for group, _, _, address in parts], len(entries.keys))
        assert not entries.has_free, "rows are restored before any is freed"
        main = None if it.main is None else it.index[it.main]
        for (group, key, above, address), taken in zip(parts, took, strict=True):
            if not taken:
                continue
            parent = NONE
            if main is not None:
                parent = main.get(ChunkKey(above) if group == it.main else key, NONE)
            row = entries.add(key, space, group, address, parent)
            it.index[group][key] = row
            entries.state[row] = State.READY
            it.share.policy.insert(row, key, parent)
            it.stored_bytes += it.slot_bytes[group]
            it.stored_chunks += 1
            it.share.held_bytes += it.slot_bytes[group]
        return took

    # ---- inside ---------------------------------------------------------------------------------------

    def _ready(self, it: Space, group: int, key: ChunkKey) -> bool:
        row = it.index[group].get(key)
        return row is not None and self.entries.state[row] == State.READY

    def _touch(self, it: Space, keys: Sequence[ChunkKey]) -> None:
        # Leaf first, so that a parent is never older than its child.
        finds = [it.index[group].get for group in reversed(it.order)]
        state, ready, access = self.entries.state, State.READY, it.share.policy.access
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
        self._shield, self._cause = parent, space
        row = self.entries.next_row()
        address = self.pool.allocate(slot_bytes, row)
        if address is None and self._make_room(slot_bytes, it.share):
            row = self.entries.next_row()
            address = self.pool.allocate(slot_bytes, row)
        self._shield = self._cause = NONE
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

    def _make_room(self, slot_bytes: int, wants: Share) -> bool:
        """Evict the next victim, or, when its slot has another size, all of its slab."""
        givers = self._givers(wants)
        for share in givers:
            for _ in range(RECLAIM_TRIES):
                row = share.policy.victim(self._evictable)
                if row is None:
                    break
                address = self.entries.address[row]
                if self.pool.slot_bytes(address) == slot_bytes:
                    self._remove(row, "evicted")
                    return True
                share.policy.insert(row, self.entries.keys[row], self.entries.parent[row])
                if any(self._empty_slab(slab, givers) for slab in self._slabs_of_lineage(row)):
                    return True
        return False

    def _givers(self, wants: Share) -> list[Share]:
        """Who gives room, in order: those that hold most against what they are entitled to. Nobody who is within
        that gives any to another."""
        if len(self.shares) == 1:
            return [wants]
        holding = [share for share in self.shares.values() if share.held_bytes or share is wants]
        given = sum(share.quota_bytes or 0 for share in holding)
        others = sum(share.quota_bytes is None for share in holding)
        rest = max(self.pool.capacity_bytes - given, 0) // max(others, 1)

        def excess(share: Share) -> float:
            return share.held_bytes / max(rest if share.quota_bytes is None else share.quota_bytes, 1)

        return sorted((it for it in holding if it is wants or excess(it) > 1.0), key=excess, reverse=True)

    def _slabs_of_lineage(self, row: int) -> list[int]:
        """Slabs that are as cold as a leaf: its own and the next ones in which its ancestors are."""
        slabs: dict[int, None] = {}
        while row != NONE and len(slabs) < RECLAIM_TRIES:
            slabs[self.pool.slab(self.entries.address[row])] = None
            row = self.entries.parent[row]
        return list(slabs)

    def _empty_slab(self, slab: int, givers: Sequence[Share]) -> bool:
        """Evict everything in a slab with all that hangs on it; False, with nothing changed, if some is in use or
        somebody's who need not give."""
        entries = self.entries
        rows: dict[int, None] = {}
        pending = self.pool.residents(slab)
        while pending:
            row = pending.pop()
            if row not in rows:
                if entries.state[row] != State.READY or entries.leases[row] or row == self._shield:
                    return False
                if self.spaces[entries.space[row]].share not in givers:
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
                self.spaces[self.entries.space[row]].share.policy.remove(row)
                self._remove(row, reason)
                count += 1
                row = parent
        return count

    def _clear_group(self, space: int, group: int, stays: set[int]) -> int:
        """Delete all rows of one group but those that stay, with all they hang on; the number deleted.

        At once and announced at once: row by row, from the leaves up, would take several times as long.
        """
        it, entries = self.spaces[space], self.entries
        left = {key: row for key, row in it.index[group].items() if row in stays} if stays else {}
        gone = (
            [row for row in it.index[group].values() if row not in stays] if stays else list(it.index[group].values())
        )
        if not gone:
            return 0
        size = it.slot_bytes[group]
        keys, places = tuple(map(entries.keys.__getitem__, gone)), tuple(map(entries.address.__getitem__, gone))
        it.index[group] = left
        remove = it.share.policy.remove
        for row in gone:
            remove(row)
        entries.unlink(gone, stays)
        leases = entries.leases
        doomed = {row for row in gone if leases[row]}
        for row in doomed:
            entries.state[row] = State.DOOMED
        free = [row for row in gone if row not in doomed] if doomed else gone
        self.pool.free_all(map(entries.address.__getitem__, free))
        entries.free_all(free)
        it.share.held_bytes -= size * len(gone)
        it.deleted_bytes += size * len(gone)
        it.deleted_chunks += len(gone)
        self._changes.append(Removed(space, group, keys, self.tier, size * len(gone), "deleted", places=places))
        return len(gone)

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
        self._count_removed(row, reason)
        self._hide(row)
        self._drop(row)

    def _withdraw(self, row: int, reason: str) -> None:
        """A READY row on which nothing hangs is found no more; its slot stays taken until its last reader is done."""
        self.spaces[self.entries.space[row]].share.policy.remove(row)
        self._count_removed(row, reason)
        self._hide(row)
        if self.entries.leases[row]:
            self.entries.state[row] = State.DOOMED
        else:
            self._drop(row)

    def _count_removed(self, row: int, reason: str) -> None:
        entries = self.entries
        number, group = entries.space[row], entries.group[row]
        space = self.spaces[number]
        size = space.slot_bytes[group]
        space.share.held_bytes -= size
        if reason == "evicted":
            space.evicted_bytes += size
            space.evicted_chunks += 1
        else:
            space.deleted_bytes += size
            space.deleted_chunks += 1
        places = (entries.address[row],)
        change = Removed(number, group, (entries.keys[row],), self.tier, size, reason, self._cause, places)
        self._changes.append(change)

    def _drop(self, row: int) -> None:
        self.pool.free(self.entries.address[row])
        self.entries.free(row)

    def _doom(self, row: int) -> None:
        """Make a RESERVED row unfindable, and all that hangs on it; slots of rows being written stay taken."""
        entries = self.entries
        for it in reversed(entries.subtree(row)):
            if entries.state[it] == State.READY:
                # It may have readers: a move to another tier, or those whom a client's lie about `parent` brought here.
                self._withdraw(it, "deleted")
                continue
            assert entries.state[it] == State.RESERVED, f"row {it} is linked in state {entries.state[it]}"
            self._hide(it)
            entries.state[it] = State.DOOMED
            self.spaces[entries.space[it]].failed_chunks += 1

    def _quarantine(self, ticket: Ticket) -> None:
        if ticket.quarantined:
            return
        self.expired_saves += 1
        self._void(ticket)

    def _void(self, ticket: Ticket) -> None:
        ticket.quarantined = True
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
        if ticket.kind is not TicketKind.SAVE:
            for row in ticket.rows:
                entries.leases[row] -= 1
                if entries.state[row] == State.DOOMED and not entries.leases[row]:
                    self._drop(row)
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
        stored: dict[tuple[int, int], list[int]] = {}
        # Leaf first, for the same reason as in _touch.
        for row in reversed(rows):
            entries.state[row] = State.READY
            self.spaces[entries.space[row]].share.policy.insert(row, entries.keys[row], entries.parent[row])
        for row in rows:
            stored.setdefault((entries.space[row], entries.group[row]), []).append(row)
        for (number, group), found in stored.items():
            space = self.spaces[number]
            size = space.slot_bytes[group] * len(found)
            space.stored_bytes += size
            space.stored_chunks += len(found)
            space.share.held_bytes += size
            keys, places = tuple(map(entries.keys.__getitem__, found)), tuple(map(entries.address.__getitem__, found))
            self._changes.append(Stored(number, group, keys, self.tier, size, places))

    def check(self) -> None:
        """Assert every invariant; a violation is a programmer's error and names the row."""
        self.pool.check()
        entries = self.entries
        leases: dict[int, int] = {}
        writing: dict[int, int] = {}
        for number, ticket in self.tickets.items():
            assert ticket.shards_left, f"ticket {number} has no shard left and is still open"
            for row in ticket.rows:
                if ticket.kind is not TicketKind.SAVE:
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
            used = row in writing or (state == State.DOOMED and row in leases)
            assert used == (state != State.READY), f"row {row} {State(state).name} and its ticket"
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
        known = sum(len(share.policy) for share in self.shares.values())
        assert known == ready, f"the policies know {known} of {ready} READY rows"
        for share in self.shares.values():
            held = sum(space.held_bytes for space in self.spaces if space.share is share)
            assert share.held_bytes == held, f"share of {share.tenant!r}: held_bytes={share.held_bytes}, spaces: {held}"
