"""What leaves a node for good: its only copies when it drains, and its surplus when others are much emptier.

Theory of operation, drain. Every chunk is `open` until the directory says that another member holds it (`safe`), or
nobody takes it (`lost`). Chains go most valuable first; an order is looked at again when it should be done, and given
up to `TRIES` times. It ends when nothing is open; what the operator waits for at the most is the driver's affair.

Rebalance begins when we are `BEGIN` fuller than the members' mean and ends at `END` above it. Only members below the
mean take anything, into free room only, and all that are too full share what they can take.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headwater.core.placing import Chain, Grants, Holders, Order, Purse, Reason, Room, pick

TRIES = 3
AGAIN_S = 5.0
ROUND_CHAINS = 64
BEGIN, END = 0.15, 0.05
SENT_S, SENT_MAX = 60.0, 1024
"""An order of rebalancing that was not carried out by then may be given again."""
DRAIN_SHARE = 0.25
"""Of a member's capacity that a draining node may fill in ten seconds, evicting what is worth less."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a drain is, in bytes of the chunks that it began with."""

    open_bytes: int
    safe_bytes: int
    lost_bytes: int

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.open_bytes == 0


@dataclass(slots=True)
class _Leaving:
    chain: Chain
    tries: int = 0
    due_s: float = 0.0


@dataclass(slots=True)
class _Sums:
    safe_bytes: int = 0
    lost_bytes: int = 0
    open: dict[bytes, int] = field(default_factory=dict)


class Drain:
    """A node's way out: which of its chunks are copied where before it leaves."""

    def __init__(self, own: int, chains: Iterable[Chain], bytes_s: float, now: float) -> None:
        """`chains` are all that we hold, whole prefixes; those that share a beginning may both have it."""
        self._own = own
        self._purse, self._grants = Purse(bytes_s, now), Grants(DRAIN_SHARE)
        self._queue: dict[bytes, _Leaving] = {}
        self._sums = _Sums()
        self._uses = Counter[bytes]()
        """Of each chunk: the chains in the queue that have it."""
        for chain in sorted(chains, key=lambda it: -it.worth):
            if chain.names and chain.names[-1] not in self._queue:
                self._queue[chain.names[-1]] = _Leaving(chain)
                self._uses.update(chain.names)
                self._sums.open.update(zip(chain.names, chain.sizes, strict=True))

    def __repr__(self) -> str:
        return f"Drain({len(self._queue)} chains, {self.progress!r})"

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return Progress(sum(self._sums.open.values()), self._sums.safe_bytes, self._sums.lost_bytes)

    def chains(self, now: float, chains_max: int = ROUND_CHAINS) -> list[Chain]:
        """The next ones to be located and stepped: most valuable first, what was ordered when it should be done."""
        found: list[Chain] = []
        for it in self._queue.values():
            if it.due_s <= now:
                found.append(it.chain)
                if len(found) == chains_max:
                    break
        return found

    def step(self, chains: Sequence[Chain], holders: Holders, rooms: Sequence[Room], now: float) -> list[Order]:
        """Orders for chains of which somebody else does not hold all; `rooms` are the members, `holders` located."""
        self._purse.fill(now)
        self._grants.settle(now)
        staying = {it.number for it in rooms if it.takes and it.number != self._own}
        orders: list[Order] = []
        ordered: dict[bytes, set[int]] = {}
        for chain in chains:
            it = self._queue.get(chain.names[-1])
            if it is None:
                continue
            unsafe = [name for name in chain.names if not staying & set(holders.get(name, ()))]
            for name in set(chain.names) - set(unsafe):
                self._sums.safe_bytes += self._sums.open.pop(name, 0)
            if not unsafe:
                self._leave(chain)
            elif it.tries >= TRIES:
                self._give_up(chain, unsafe)
            elif not self._purse.empty:
                order = self._order(chain, unsafe, holders, ordered, rooms, now)
                it.tries += 1
                it.due_s = now + AGAIN_S
                if order is not None:
                    orders.append(order)
        return orders

    def _order(
        self,
        chain: Chain,
        unsafe: Sequence[bytes],
        holders: Holders,
        ordered: dict[bytes, set[int]],
        rooms: Sequence[Room],
        now: float,
    ) -> Order | None:
        """To the member that has most of it, by what it holds and what this round has given it."""
        held = {name: {*holders.get(name, ()), *ordered.get(name, ())} for name in chain.names}
        planned = [set(ordered.get(name, ())) for name in unsafe]
        if all(planned) and set.intersection(*planned):
            # Another chain of this round takes all of it along.
            return None
        found = pick(chain, rooms, held, self._grants, {self._own}, ())
        if found is None or not self._purse.spend(found[1]):
            return None
        room, size_bytes = found
        self._grants.add(room.number, size_bytes, now)
        for name in chain.names:
            ordered.setdefault(name, set()).add(room.number)
        return Order(room.number, chain.names, size_bytes, Reason.DRAIN)

    def _give_up(self, chain: Chain, unsafe: Sequence[bytes]) -> None:
        """Nobody took it. A chunk that another chain may yet bring to safety stays open with that one."""
        self._leave(chain)
        for name in unsafe:
            if not self._uses[name]:
                self._sums.lost_bytes += self._sums.open.pop(name, 0)

    def _leave(self, chain: Chain) -> None:
        del self._queue[chain.names[-1]]
        self._uses.subtract(chain.names)


class Rebalance:
    """What a node that is much fuller than the others gives them, within a bandwidth."""

    def __init__(self, own: int, bytes_s: float, now: float = 0.0) -> None:
        self.own = own
        self._purse, self._grants = Purse(bytes_s, now), Grants(0.0)
        self._sent: OrderedDict[bytes, tuple[Chain, float]] = OrderedDict()
        self.active = False

    def __repr__(self) -> str:
        return f"Rebalance({'active' if self.active else 'at rest'})"

    def surplus_bytes(self, rooms: Sequence[Room]) -> int:
        """How much we have above the mean; 0 while that is not worth it. `rooms` are all members, ourselves too."""
        taking = [it for it in rooms if it.takes or it.number == self.own]
        own = next((it for it in taking if it.number == self.own), None)
        capacity = sum(it.capacity_bytes for it in taking)
        if own is None or len(taking) < 2 or not capacity:
            self.active = False
            return 0
        mean = sum(it.used_bytes for it in taking) / capacity
        self.active = own.fill > mean + (END if self.active else BEGIN)
        return int((own.fill - mean) * own.capacity_bytes) if self.active else 0

    def step(self, chains: Sequence[Chain], holders: Holders, rooms: Sequence[Room], now: float) -> list[Order]:
        """Orders for chains that nobody else holds, in the order given: the coldest of those that are worth keeping."""
        surplus = self.surplus_bytes(rooms)
        taking = [it for it in rooms if it.takes]
        mean = sum(it.used_bytes for it in taking) / max(sum(it.capacity_bytes for it in taking), 1)
        emptier = [it for it in taking if it.fill < mean and it.number != self.own]
        givers = sum(it.fill > mean + END for it in rooms)
        self._purse.fill(now, min(1.0, len(emptier) / max(givers, 1)))
        self._grants.settle(now)
        for name in [it for it, (_, sent_s) in self._sent.items() if sent_s <= now - SENT_S]:
            del self._sent[name]
        given = sum(self._grants.given(it.number) for it in rooms)
        orders: list[Order] = []
        for chain in chains:
            if given >= surplus:
                break
            if chain.names[-1] in self._sent or set(holders.get(chain.names[-1], ())) - {self.own}:
                continue
            found = pick(chain, emptier, holders, self._grants, {self.own}, ())
            if found is None:
                continue
            if not self._purse.spend(found[1]):
                break
            room, size_bytes = found
            given += size_bytes
            self._grants.add(room.number, size_bytes, now)
            self._sent[chain.names[-1]] = chain, now
            if len(self._sent) > SENT_MAX:
                self._sent.popitem(last=False)
            orders.append(Order(room.number, chain.names, size_bytes, Reason.REBALANCE))
        return orders

    @property
    def sent(self) -> list[Chain]:
        """What was ordered and is not known to have arrived: to be located."""
        return [chain for chain, _ in self._sent.values()]

    def arrived(self, holders: Holders) -> list[Chain]:
        """What others hold by now and may be evicted here, from its end; said once. That is what ends the surplus."""
        found = [it for it in self.sent if all(set(holders.get(name, ())) - {self.own} for name in it.names)]
        for chain in found:
            del self._sent[chain.names[-1]]
        return found
