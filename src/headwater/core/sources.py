"""From where the KV of a prompt's next tokens comes to a node's instances soonest, or whether computing is faster."""

from __future__ import annotations

from operator import itemgetter

from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Fleet, Held, Place
from headwater.types import Tier

DEVICE = Tier.DEVICE
first = itemgetter(0)
Source = tuple[float, float, int, Place | None]
"""fetch_s, prefill_s of what is left, how many tokens are fetched, from where."""
Way = tuple[float, float, float, int, Place]
"""What fetching and the rest would cost from the first token on; what a token less to fetch spares; prefill_s of the
rest; how many tokens the source has; the source."""


class Sources:
    """The sources of one request: HOST and DISK of the instance's own node, the one REMOTE store, and those of the
    other nodes that hold most. DEVICEs are none: an engine lends what is in its node's memory, not its own.

    A token costs the more to compute, the more tokens are before it, and its bytes take always the same: of each source
    everything is worth fetching, or nothing.
    """

    def __init__(self, ask: Ask, held: Held, fleet: Fleet, work: float, peers_max: int) -> None:
        self._tokens = ask.tokens
        self._links = fleet.links
        self._bytes = fleet.kv_bytes_per_token
        self._work = work
        self._known: dict[tuple[int, int, int], Source] = {}
        self._ways: dict[tuple[int, int], tuple[list[Way], float]] = {}
        # The last token is always computed: its result is the answer's first.
        most = ask.tokens - 1
        self._below = {place: min(count, most) for place, count in held.items() if place[0] is not DEVICE}
        self.most_tokens = max(self._below.values(), default=0)
        """What the best of them holds."""
        ranked = sorted(self._below, key=lambda it: (-self._below[it], it.number, it.tier.value))
        remote = [place for place in ranked if place.tier is Tier.REMOTE]
        self._common = remote + [place for place in ranked if place.tier is not Tier.REMOTE][:peers_max]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._below)

    def best(self, node: int, cached: int, times: EngineTimes) -> Source:
        """For an instance of a node, whose DEVICE holds `cached` tokens: the least of fetch_s + work x prefill_s."""
        key = (node, cached, id(times))
        best = self._known.get(key)
        if best is not None:
            return best
        prefill_s = times.prefill_s(self._tokens - cached, cached)
        best, least = (0.0, prefill_s, 0, None), self._work * prefill_s
        ways, spared_most = self._ways_to(node, times)
        for whole, spared, rest_s, until, place in ways:
            if whole - cached * spared_most >= least:
                break  # nor do those that follow, which cost more from the first token on
            cost = whole - cached * spared
            if cost < least and until > cached:
                best, least = (cost - self._work * rest_s, rest_s, until - cached, place), cost
        self._known[key] = best
        return best

    def _ways_to(self, node: int, times: EngineTimes) -> tuple[list[Way], float]:
        """From all sources that a link leads from, the cheapest first; and the most that a token less spares."""
        known = self._ways.get((node, id(times)))
        if known is None:
            ways = []
            for place in (Place(Tier.HOST, node), Place(Tier.DISK, node), *self._common):
                link = self._links.get((place, node))
                if link is not None and place in self._below:
                    until = self._below[place]
                    rest_s = times.prefill_s(self._tokens - until, until)
                    whole = link.seconds(until * self._bytes) + self._work * rest_s
                    ways.append((whole, self._bytes / link.bytes_s, rest_s, until, place))
            ways.sort(key=first)
            known = self._ways[(node, id(times))] = (ways, max((way[1] for way in ways), default=0.0))
        return known
