"""What one node wants copied to others: hot prefixes, and what must be held more than once.

Theory of operation. The driver does the same for both, every second or so:

    wanted = placement.hot_chains(now)  or  placement.wished_chains(now)
    holders = the directory's answer for their names (chains that start in mid-prompt are completed by the driver)
    orders = placement.hot(wanted, holders, rooms, now)  or  placement.wished(...)      -> sent to their targets

    hot      read by at least `fan_in` others, `hot_rate` times a second from us: one more member takes it, several if
             it is much hotter, `replicas_max` hold it in the end. What was ordered is left alone for `cool_s`, and for
             twice as long each time that it is still hot then, until it has been cold: below half the rate.
    wished   until `copies` members hold it, at most `tries` times, `cool_s` apart.

Copies that are not needed any more go the usual way: they are evicted where they are not used. All orders together
cost `bytes_s` at the most, and a member that has no free room is given `target_share` of its capacity in ten seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headwater.core.heat import Heat
from headwater.core.placing import Chain, Grants, Holders, Order, Purse, Reason, Room, pick, whole_copies

COLD = 0.5
"""A prefix is hot no more below this share of the rate that made it hot."""
LONGEST_COOL = 32
REMEMBERED_MAX = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """What placement may do."""

    bytes_s: float = 100e6
    hot_rate: float = 0.5
    fan_in: int = 2
    replicas_max: int = 3
    target_share: float = 0.1
    cool_s: float = 10.0
    tries: int = 5


@dataclass(slots=True)
class _Pause:
    """A hot prefix that was ordered: left alone until then."""

    until_s: float
    pause_s: float


@dataclass(slots=True)
class _Wish:
    chain: Chain
    copies: int
    due_s: float
    tries: int = 0


class Placement:
    """One node's copies elsewhere."""

    def __init__(self, own: int, limits: Limits | None = None, now: float = 0.0) -> None:
        """`own` is our number in the directory."""
        self.own, self.limits = own, limits or Limits()
        self.heat = Heat()
        self.purse = Purse(self.limits.bytes_s, now)
        self.grants = Grants(self.limits.target_share)
        self._paused: OrderedDict[bytes, _Pause] = OrderedDict()
        self._wishes: OrderedDict[bytes, _Wish] = OrderedDict()
        self.failed_wishes = 0
        self.ordered_bytes = dict.fromkeys(Reason, 0)

    def __repr__(self) -> str:
        return f"Placement({self.heat!r}, {len(self._paused)} ordered lately, {len(self._wishes)} wishes)"

    def served(self, reader: int, names: Sequence[bytes], sizes: Sequence[int], now: float) -> None:
        """A peer has read these chunks from us, in the order of its prompt."""
        self.heat.served(reader, names, sizes, now)

    # ---- hot prefixes ------------------------------------------------------------------------------

    def hot_chains(self, now: float, chains_max: int = 64) -> list[Chain]:
        """What is hot now and was not ordered lately, hottest first."""
        cold = COLD * self.limits.hot_rate
        for name in [it for it in self._paused if self.heat.rate(it, now) < cold]:
            if self._paused[name].until_s <= now:
                del self._paused[name]
        found = self.heat.chains(self.limits.hot_rate, self.limits.fan_in, now, chains_max)
        return [it for it in found if self._pause_over(it.names[-1], now)]

    def _pause_over(self, name: bytes, now: float) -> bool:
        pause = self._paused.get(name)
        return pause is None or pause.until_s <= now

    def hot(self, chains: Sequence[Chain], holders: Holders, rooms: Sequence[Room], now: float) -> list[Order]:
        """Orders for hot chains; those for which there is no money or no member that takes them are asked again."""
        self._settle(now)
        orders: list[Order] = []
        for chain in sorted(chains, key=lambda it: -it.worth):
            copies = whole_copies(chain.names, holders) | {self.own}
            heat = max(chain.worth / self.limits.hot_rate, 1.0)
            more = min(1 + math.floor(math.log2(heat)), self.limits.replicas_max - len(copies))
            given = self._give(chain, more, copies, holders, rooms, Reason.HOT, now)
            if given or more <= 0:
                self._pause(chain.names[-1], now)
            orders += given
        return orders

    def _pause(self, name: bytes, now: float) -> None:
        before = self._paused.pop(name, None)
        cool_s = self.limits.cool_s
        pause_s = min(2 * before.pause_s, LONGEST_COOL * cool_s) if before is not None else cool_s
        self._paused[name] = _Pause(now + pause_s, pause_s)
        if len(self._paused) > REMEMBERED_MAX:
            self._paused.popitem(last=False)

    # ---- copies that somebody has asked for ----------------------------------------------------------

    def wish(self, chain: Chain, copies: int, now: float) -> bool:
        """So many members shall hold this, which we hold; False if there are too many wishes already."""
        assert copies > 0 and chain.names, f"{copies=}, {len(chain.names)} names"
        if len(self._wishes) >= REMEMBERED_MAX and chain.names[-1] not in self._wishes:
            return False
        self._wishes[chain.names[-1]] = _Wish(chain, copies, now)
        return True

    def wished_chains(self, now: float, chains_max: int = 64) -> list[Chain]:
        """Wishes that are due to be looked at."""
        due = [it.chain for it in self._wishes.values() if it.due_s <= now]
        return due[:chains_max]

    def wished(self, chains: Sequence[Chain], holders: Holders, rooms: Sequence[Room], now: float) -> list[Order]:
        """Orders for wishes; one that is fulfilled, or was ordered too often in vain, is forgotten."""
        self._settle(now)
        orders: list[Order] = []
        for chain in chains:
            name = chain.names[-1]
            it = self._wishes.get(name)
            if it is None:
                continue
            copies = whole_copies(chain.names, holders) | {self.own}
            if len(copies) >= it.copies:
                del self._wishes[name]
            elif it.tries >= self.limits.tries:
                del self._wishes[name]
                self.failed_wishes += 1
            elif not self.purse.empty:
                it.tries += 1
                it.due_s = now + self.limits.cool_s
                self._wishes.move_to_end(name)
                orders += self._give(chain, it.copies - len(copies), copies, holders, rooms, Reason.REPLICAS, now)
        return orders

    # ---- both ----------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        self.purse.fill(now)
        self.grants.settle(now)

    def _give(
        self,
        chain: Chain,
        copies: int,
        besides: Collection[int],
        holders: Holders,
        rooms: Sequence[Room],
        reason: Reason,
        now: float,
    ) -> list[Order]:
        """Up to so many orders, each to another member."""
        taken = set(besides)
        orders: list[Order] = []
        while len(orders) < copies:
            zones = {it.zone for it in rooms if it.number in taken}
            found = pick(chain, rooms, holders, self.grants, taken, zones)
            if found is None or not self.purse.spend(found[1]):
                break
            room, size_bytes = found
            taken.add(room.number)
            self.grants.add(room.number, size_bytes, now)
            self.ordered_bytes[reason] += size_bytes
            orders.append(Order(room.number, chain.names, size_bytes, reason))
        return orders
