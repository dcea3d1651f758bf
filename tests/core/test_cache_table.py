"""Every state of a ticket × everything that can happen to it, as one table.

States. L0, L1: a LOAD ticket of two shards of which none or one is done. LE: it has ended, its chunk is readable.
S0, S1, SF: a SAVE ticket of which no shard, one, or one with a failed chunk is done. Q0, Q1: quarantined, no shard
or one done. SC: ended, committed (as LE, after a save). SD: ended, nothing is held. GONE: the chunk has left.

A cell is the state afterwards; "!" means that the event was answered False and counted as unknown.
"""

from __future__ import annotations

import pytest

from headwater.core.cache import Cache
from headwater.core.entries import State
from headwater.types import ChunkKey, TicketKind
from tests.core.examples import LOAD_S, SAVE_S, chain, dense, granted_slots, load, reserve, save, small_cache

TABLE = """
       next  next-fails  next-late  stale  foreign  release  foreign-release  tick  late-tick  close  foreign-close  clear  pressure  known  forgotten  foreign-word
L0     L1    L1          L1         L0!    L0!      LE       L0!              L0    LE         LE     L0             L0     L0        L0     LE         L0
L1     LE    LE          LE         L1!    L1!      LE       L1!              L1    LE         LE     L1             L1     L1        L1     LE         L1
LE     LE!   LE!         LE!        LE!    LE!      LE!      LE!              LE    LE         LE     LE             GONE   GONE      LE     LE         LE
S0     S1    SF          Q1         S0!    S0!      SD       S0!              S0    Q0         SD     S0             S0     S0        S0     SD         S0
S1     SC    SD          SD         S1!    S1!      SD       S1!              S1    Q1         SD     S1             S1     S1        S1     SD         S1
SF     SD    SD          SD         SF!    SF!      SD       SF!              SF    Q1         SD     SF             SF     SF        SF     SD         SF
Q0     Q1    Q1          Q1         Q0!    Q0!      SD       Q0!              Q0    Q0         SD     Q0             Q0     Q0        Q0     SD         Q0
Q1     SD    SD          SD         Q1!    Q1!      SD       Q1!              Q1    Q1         SD     Q1             Q1     Q1        Q1     SD         Q1
SC     SC!   SC!         SC!        SC!    SC!      SC!      SC!              SC    SC         SC     SC             GONE   GONE      SC     SC         SC
SD     SD!   SD!         SD!        SD!    SD!      SD!      SD!              SD    SD         SD     SD             SD     SD        SD     SD         SD
"""  # noqa: E501

ROWS = [line.split() for line in TABLE.strip().splitlines()]
CELLS = [(row[0], event, cell) for row in ROWS[1:] for event, cell in zip(ROWS[0], row[1:], strict=True)]
TWO_SHARDS = dense(shards=2)
SLOTS = 4
IN_TIME, TOO_LATE = 1.0, max(LOAD_S, SAVE_S) + 0.5


class Scene:
    """One chunk in a small cache, its ticket, and the slot that the ticket named."""

    def __init__(self, state: str) -> None:
        self.cache, self.space = small_cache(SLOTS, TWO_SHARDS)
        self.key: ChunkKey = chain(1)[0]
        self.kind = TicketKind.LOAD if state.startswith("L") else TicketKind.SAVE
        self.late = state.startswith("Q")
        if self.kind is TicketKind.LOAD:
            save(self.cache, self.space, [self.key], owner="writer")
            granted = load(self.cache, self.space, [self.key])
            self.ticket, (self.slot,) = granted.ticket, granted_slots(granted.addresses)
        else:
            reserved = reserve(self.cache, self.space, [self.key])
            self.ticket, (self.slot,) = reserved.ticket, granted_slots(reserved.addresses)
        steps = {
            "L0": [], "L1": [(0, ())], "LE": [(0, ()), (1, ())],
            "S0": [], "S1": [(0, ())], "SF": [(0, (0,))], "SC": [(0, ()), (1, ())], "SD": [(0, (0,)), (1, ())],
            "Q0": [], "Q1": [(0, ())],
        }  # fmt: skip
        for shard, failed in steps[state]:
            assert self.cache.done("a", self.ticket, shard, failed, IN_TIME)
        if self.late:
            self.cache.expire(TOO_LATE)
        assert self.state() == state

    def state(self) -> str:
        """What the scene has become, read from the cache alone."""
        self.cache.check()
        cache, ticket = self.cache, self.cache.tickets.get(self.ticket)
        row = cache.spaces[self.space].index[0].get(self.key)
        ready = row is not None and cache.entries.state[row] == State.READY
        assert cache.match(self.space, [self.key]) == int(ready)
        assert cache.contains(self.space, [self.key]) == bytes([ready])
        if ticket is None:
            held = cache.pool.entry(self.slot) if cache.pool.taken_slots else None
            if ready:
                assert row is not None
                assert not cache.entries.leases[row]
                return "LE" if self.kind is TicketKind.LOAD else "SC"
            assert held is None or cache.entries.keys[held] != self.key
            return "GONE" if cache.spaces[self.space].stored_chunks else "SD"
        done = TWO_SHARDS.shards - len(ticket.shards_left)
        if ticket.kind is TicketKind.LOAD:
            assert row is not None
            assert cache.entries.leases[row] == 1
            assert ready
            return f"L{done}"
        assert not ready
        assert cache.pool.entry(self.slot) == ticket.rows[0]
        if ticket.quarantined:
            assert row is None
            return f"Q{done}"
        assert row == ticket.rows[0]
        return "SF" if ticket.failed else f"S{done}"

    def happen(self, event: str) -> object:
        """Carry an event out; its answer."""
        cache, ticket = self.cache, self.cache.tickets.get(self.ticket)
        shard = min(ticket.shards_left) if ticket else 1
        stale = 0 if ticket and 0 not in ticket.shards_left else 7
        now = TOO_LATE + 1 if self.late else IN_TIME
        match event:
            case "next":
                return cache.done("a", self.ticket, shard, (), now)
            case "next-fails":
                return cache.done("a", self.ticket, shard, (0,), now)
            case "next-late":
                return cache.done("a", self.ticket, shard, (), TOO_LATE)
            case "stale":
                return cache.done("a", self.ticket, stale, (), now)
            case "foreign":
                return cache.done("b", self.ticket, shard, (), now)
            case "release":
                return cache.release("a", self.ticket)
            case "foreign-release":
                return cache.release("b", self.ticket)
            case "tick":
                return cache.expire(IN_TIME)
            case "late-tick":
                return cache.expire(TOO_LATE)
            case "close":
                return cache.close("a")
            case "foreign-close":
                return cache.close("b")
            case "known":
                return cache.keep("a", {self.ticket, 12345})
            case "forgotten":
                return cache.keep("a", {12345})
            case "foreign-word":
                return cache.keep("b", ())
            case "clear":
                return cache.clear(self.space)
        assert event == "pressure"
        # Somebody else wants the whole memory: gets what is not held, and no more.
        held = self.state() in ("L0", "L1", "S0", "S1", "SF", "Q0", "Q1")
        granted = reserve(cache, self.space, chain(SLOTS, seed=9), owner="b", now=now)
        slots = granted_slots(granted.addresses)
        assert len(slots) == SLOTS - held
        assert (self.slot in slots) == (not held)
        return None


@pytest.mark.parametrize(("state", "event", "cell"), CELLS, ids=[f"{it[0]}-{it[1]}" for it in CELLS])
def test_every_event_in_every_state(state: str, event: str, cell: str) -> None:
    scene = Scene(state)
    unknown = scene.cache.unknown_tickets
    answer = scene.happen(event)
    assert scene.state() == cell.rstrip("!")
    assert (answer is False) == cell.endswith("!")
    assert scene.cache.unknown_tickets == unknown + cell.endswith("!")


def test_the_table_has_every_state_and_event() -> None:
    assert len(CELLS) == 10 * 16
    assert len({(state, event) for state, event, _ in CELLS}) == len(CELLS)


@pytest.mark.parametrize("ticket", [0, -1, 1, 2**63])
def test_unknown_tickets_are_counted_and_ignored(ticket: int) -> None:
    cache: Cache = small_cache(1)[0]
    assert not cache.done("a", ticket, 0, (), 0.0)
    assert not cache.release("a", ticket)
    assert cache.unknown_tickets == 2
    cache.check()
