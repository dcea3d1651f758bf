"""What others do, as policies to compare ours with: each with its formula, and where that is from.

All of them order the instances that can prefill the prompt and take the first; equal ones in the order of who was
chosen least recently, where the original draws lots. In a fleet with roles the prefill is chosen so, and the decode
that has the least KV of those that it can hand off to. What is then fetched, and the estimated seconds, are worked out
as for our own: what fetches is the engine's plug-in, which does the same whoever routed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from headwater.core.routing import can_decode, can_prefill, choice_of, handoff_s, on_devices, queue_s
from headwater.fleet import Ask, Choice, Fleet, Held, Instance, Place, Role
from headwater.types import Tier

Rank = Any
"""A number or a tuple that sorts instances; those of one call have the same form."""

MASK = (1 << 64) - 1
SPREAD = 0x9E3779B97F4A7C15
AFTER_ALL = 1 << 62
"""Higher than any number of an instance."""
HASHED = 8
"""How many instances' hashes one digest holds."""


class Rival:
    """What all have in common: they differ in `ranks`."""

    name = ""

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._turn} choices)"

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """A rank for each of those that are able, the least the best."""
        raise NotImplementedError

    def choose(self, ask: Ask, held: Held, fleet: Fleet) -> Choice | None:
        """The first by rank that has an instance to decode; None if nobody can serve the request."""
        able = [it for it in fleet.instances.values() if can_prefill(ask, it)]
        if not able:
            return None
        ranks = self.ranks(ask, held, fleet, able)
        least = min(ranks)
        first = [it for it, rank in zip(able, ranks, strict=True) if rank == least]
        best = first[0] if len(first) == 1 else min(first, key=self._order)
        if best.role is Role.BOTH:
            return self.choice(ask, held, fleet, best, best)
        for at in sorted(range(len(able)), key=lambda at: (ranks[at], self._order(able[at]))):
            decode = decode_for(ask, fleet, able[at])
            if decode is not None:
                return self.choice(ask, held, fleet, able[at], decode)
        return None

    def choice(self, ask: Ask, held: Held, fleet: Fleet, prefill: Instance, decode: Instance) -> Choice:
        """The choice of these two, with what is fetched and how long it takes."""
        return choice_of(ask, held, fleet, prefill, decode)

    def _order(self, it: Instance) -> tuple[int, int]:
        """Among equals: who was chosen least recently."""
        return self._turns.get(it.number, 0), it.number

    def routed(self, ask: Ask, choice: Choice, fleet: Fleet) -> None:
        """Remember whose turn it was."""
        self._turn += 1
        self._turns[choice.prefill] = self._turns[choice.decode] = self._turn

    def finished(self, ask: Ask, choice: Choice) -> None:
        """Nothing: the loads are the driver's."""

    def left(self, instance: int) -> None:
        """Forget an instance."""
        self._turns.pop(instance, None)


def decode_for(ask: Ask, fleet: Fleet, prefill: Instance) -> Instance | None:
    """The prefill instance itself if it decodes, or of those that it can hand off to the one with the least KV."""
    if prefill.role is Role.BOTH:
        return prefill
    found = [
        it for it in fleet.instances.values() if can_decode(ask, it) and handoff_s(ask, fleet, prefill, it) is not None
    ]
    return min(found, key=lambda it: (it.running_tokens, it.running_requests, it.number), default=None)


def device_tokens(held: Held, it: Instance) -> int:
    """How much of the prompt an instance's DEVICE holds."""
    return held.get(Place(Tier.DEVICE, it.number), 0)


class RoundRobin(Rival):
    """One after the other, by number."""

    name = "round_robin"
    needs_loads = False
    """Nor anything else: whoever routes may do the same without asking."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """Those after the last one come first."""
        last = self._last
        return [it.number if it.number > last else it.number + AFTER_ALL for it in able]

    def routed(self, ask: Ask, choice: Choice, fleet: Fleet) -> None:
        """Go on after this one."""
        super().routed(ask, choice, fleet)
        self._last = choice.prefill


class LeastLoad(Rival):
    """The fewest waiting tokens, then the fewest requests."""

    name = "least_load"

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """By load alone."""
        return [(it.waiting_tokens, it.waiting_requests + it.running_requests) for it in able]


class Session(Rival):
    """The highest hash of session and instance (rendezvous hashing, Thaler and Ravishankar 1998): when an instance
    leaves, only its own sessions move. A request without a session is one of its own."""

    name = "session"

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """By the hash alone."""
        session = (ask.session or ask.request).encode()
        digests: dict[int, bytes] = {}
        ranks = []
        for it in able:
            group, at = divmod(it.number, HASHED)
            if group not in digests:
                digests[group] = blake2b(b"%d/%b" % (group, session), digest_size=8 * HASHED).digest()
            ranks.append(digests[group][8 * at : 8 * at + 8])
        return ranks


class PrefixOnly(Rival):
    """The longest prefix, whatever waits there."""

    name = "prefix"

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """By the prefix alone."""
        tokens = on_devices(held)
        return [-tokens.get(it.number, 0) for it in able]


class Dynamo(Rival):
    """NVIDIA Dynamo's KV router (ai-dynamo 1.6, the router guide in its docs), at temperature 0; all in blocks:

        cost = prefill_load_scale x max(prefill - device - 0.75 host - 0.25 disk, 0) + decode

    `prefill` is this prompt and what waits there already; host and disk are what they hold beyond the faster tiers, in
    the instance's node; `decode` is the KV of all active requests with this one.
    """

    host_credit, disk_credit = 0.75, 0.25

    def __init__(self, prefill_load_scale: float = 1.0) -> None:
        super().__init__()
        self._scale = prefill_load_scale
        self.name = "dynamo" if prefill_load_scale == 1 else f"dynamo_{prefill_load_scale:g}"

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """By the cost."""
        return [self.cost(ask, held, it) for it in able]

    def cost(self, ask: Ask, held: Held, it: Instance) -> float:
        """The formula above."""
        size = ask.block_tokens
        device = device_tokens(held, it) // size
        host = disk = 0
        if it.node is not None:
            host = max(held.get(Place(Tier.HOST, it.node), 0) // size - device, 0)
            disk = max(held.get(Place(Tier.DISK, it.node), 0) // size - device - host, 0)
        prefill = (ask.tokens + it.waiting_tokens) / size
        decode = (it.running_tokens + it.waiting_tokens + ask.tokens + size - 1) // size
        credit = device + self.host_credit * host + self.disk_credit * disk
        return self._scale * max(prefill - credit, 0.0) + decode


class StickyUntilSaturated(Rival):
    """llm-d's default since July 2026 (llm-d PR 2071). With uncached tokens in flight / peak prefill rate as an
    instance's TTFT: of those that hold at least 80 % of the prompt, unless the best of them is over 18 s later than the
    best of all, and but for one request in a hundred, so that other instances come to hold it too; the least load of
    tokens of those that are left."""

    name = "sticky"
    share, patience_s, explore = 0.8, 18.0, 0.01

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self._draw = (2 * seed + 1) * SPREAD & MASK  # never 0; small seeds give large numbers

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """First those that hold it, if they are not to be passed over; by tokens in flight."""
        tokens = on_devices(held)
        holds = [tokens.get(it.number, 0) >= self.share * ask.tokens for it in able]
        ttft_s = [it.waiting_tokens * it.times.prefill_token_s for it in able]
        sticky_s = min((late for late, has in zip(ttft_s, holds, strict=True) if has), default=0.0)
        if self._draw < self.explore * MASK or sticky_s - min(ttft_s) > self.patience_s:
            holds = [False] * len(able)
        return [(not has, it.waiting_tokens + it.running_tokens) for it, has in zip(able, holds, strict=True)]

    def routed(self, ask: Ask, choice: Choice, fleet: Fleet) -> None:
        """Draw for the next one (xorshift64, Marsaglia 2003)."""
        super().routed(ask, choice, fleet)
        self._draw ^= self._draw << 13 & MASK
        self._draw ^= self._draw >> 7
        self._draw ^= self._draw << 17 & MASK


class Mooncake(Rival):
    """Algorithm 1 of Mooncake (FAST'25): the least

        TTFT = transfer(best - prefix) + queue + prefill(tokens after best)    where best / prefix > threshold
        TTFT = queue + prefill(tokens after prefix)                            elsewhere

    `prefix` is what the instance or its node's HOST holds, `best` the longest of all, which has to come over a link.
    The queue is the waiting tokens' prefill, as for ours. The threshold is set by hand; the paper names none.
    """

    name = "mooncake"

    def __init__(self, threshold: float = 1.5) -> None:
        super().__init__()
        self._threshold = threshold

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """By TTFT."""
        return [self.plan(ask, held, fleet, it)[0] for it in able]

    def plan(self, ask: Ask, held: Held, fleet: Fleet, it: Instance) -> tuple[float, float, int, Place | None]:
        """An instance's TTFT, how much of it is the transfer, how many tokens have come to be there, and from where
        what its DEVICE lacks comes."""
        waits_s = queue_s(it, 1, ask.output_tokens)
        most = ask.tokens - 1
        prefix, source, transfer_s = min(device_tokens(held, it), most), None, 0.0
        if it.node is not None:
            own = Place(Tier.HOST, it.node)
            if held.get(own, 0) > prefix and (own, it.node) in fleet.links:
                prefix, source = min(held[own], most), own
            there = [place for place in held if (place, it.node) in fleet.links]
            place = max(there, key=lambda at: (held[at], -at.number), default=None)
            if place is not None and min(held[place], most) > self._threshold * prefix:
                best = min(held[place], most)
                transfer_s = fleet.links[(place, it.node)].seconds((best - prefix) * fleet.kv_bytes_per_token)
                prefix, source = best, place
        return transfer_s + waits_s + it.times.prefill_s(ask.tokens - prefix, prefix), transfer_s, prefix, source

    def choice(self, ask: Ask, held: Held, fleet: Fleet, prefill: Instance, decode: Instance) -> Choice:
        """What is fetched is what the algorithm says."""
        made = super().choice(ask, held, fleet, prefill, decode)
        _, transfer_s, prefix, source = self.plan(ask, held, fleet, prefill)
        prefill_s = prefill.times.prefill_s(ask.tokens - prefix, prefix)
        parts = made.parts._replace(fetch_s=transfer_s, prefill_s=prefill_s)
        return replace(made, parts=parts, fetched_tokens=prefix - made.cached_tokens, source=source)


class CacheAware(Rival):
    """`cache_aware` of SGLang's router and vLLM's: when the most requests at an instance exceed the fewest by more than
    64 and by half, the fewest; else the longest match if it is over 0.3 of the prompt, or else the smallest tree: to
    whom the fewest tokens were sent that it had not."""

    name = "cache_aware"
    match_share, more_requests, times_requests = 0.3, 64, 1.5

    def __init__(self) -> None:
        super().__init__()
        self._trees: dict[int, int] = {}

    def ranks(self, ask: Ask, held: Held, fleet: Fleet, able: Sequence[Instance]) -> Sequence[Rank]:
        """By requests, by match, or by tree."""
        requests = [it.waiting_requests + it.running_requests for it in able]
        most, fewest = max(requests), min(requests)
        if most - fewest > self.more_requests and most > self.times_requests * fewest:
            return requests
        tokens = on_devices(held)
        matched = [tokens.get(it.number, 0) for it in able]
        if max(matched) > self.match_share * ask.tokens:
            return [-count for count in matched]
        return [self._trees.get(it.number, 0) for it in able]

    def routed(self, ask: Ask, choice: Choice, fleet: Fleet) -> None:
        """The tree grows by what was not matched."""
        super().routed(ask, choice, fleet)
        target = choice.prefill
        self._trees[target] = self._trees.get(target, 0) + ask.tokens - choice.cached_tokens

    def left(self, instance: int) -> None:
        """Forget its tree as well."""
        super().left(instance)
        self._trees.pop(instance, None)
