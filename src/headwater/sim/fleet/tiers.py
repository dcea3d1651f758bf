"""The tiers below DEVICE and the links to them: when bytes arrive. What a tier keeps is in `stores`.

A *channel* carries one thing after another; a transfer takes a place in each channel that it goes through, and is over
when the slowest has carried it. Each way has its own channels: what is read does not wait for what is written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from headwater.fleet import Link, Place
from headwater.sim.fleet.config import FleetConfig, TierConfig
from headwater.sim.fleet.stores import Store, make_store
from headwater.types import Tier

Key = TypeVar("Key", bound=Hashable)


class Channel:
    """Bytes go through one after another. `links` are those that lead through it."""

    __slots__ = ("bytes_s", "free_s", "links")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.free_s = 0.0
        self.links: list[tuple[Link, list[Channel]]] = []


class Links(Mapping[tuple[Place, int], Link]):
    """All links of a fleet, from places to nodes; one is made when it is first asked for."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._made: dict[tuple[Place, int], Link | None] = {}

    def __getitem__(self, key: tuple[Place, int]) -> Link:
        if key not in self._made:
            self._made[key] = self._tiers.link(*key)
        if (link := self._made[key]) is None:
            raise KeyError(key)
        return link

    def __iter__(self) -> Iterator[tuple[Place, int]]:
        for place in self._tiers.stores:
            for node in range(self._tiers.nodes):
                if self.get((place, node)) is not None:
                    yield place, node

    def __len__(self) -> int:
        return len(self._tiers.stores) * self._tiers.nodes


class Tiers:
    """The stores of a fleet with so many nodes, and the channels between them."""

    def __init__(self, config: FleetConfig, nodes: int, unit_tokens: int) -> None:
        self._config = config
        self.nodes = nodes
        unit_bytes = max(config.kv_bytes_per_token * unit_tokens, 1)
        ghosts = 2 * sum(group.count * group.capacity_tokens for group in config.instances) // unit_tokens
        self.stores: dict[Place, Store] = {}
        tiers = config.tiers
        for tier, about, count in (
            (Tier.HOST, tiers.host, nodes),
            (Tier.DISK, tiers.disk, nodes),
            (Tier.REMOTE, tiers.remote, 1),
        ):
            if about is not None and about.size >= unit_bytes:
                for number in range(count):
                    place = Place(tier, number)
                    self.stores[place] = make_store(
                        place, about.size // unit_bytes, about.keeping, about.saving == "evicted", ghosts
                    )
        self._reads: dict[tuple[Tier, int], Channel] = {}
        self._writes: dict[tuple[Tier, int], Channel] = {}
        self._out: dict[int, Channel] = {}
        self._in: dict[int, Channel] = {}
        total = tiers.remote.total_bytes_s if tiers.remote is not None else 0
        self._total_read = Channel(total) if total else None
        self._total_write = Channel(total) if total else None
        self._busy: set[Channel] = set()
        self.links = Links(self)

    def link(self, place: Place, node: int) -> Link | None:
        """A new link from a place to a node; None if there is none."""
        way = self._way(place, node)
        if way is None:
            return None
        channels, latency_s = way
        link = Link(latency_s, min(channel.bytes_s for channel in channels))
        for channel in channels:
            channel.links.append((link, channels))
        return link

    def _about(self, tier: Tier) -> TierConfig | None:
        tiers = self._config.tiers
        return {Tier.HOST: tiers.host, Tier.DISK: tiers.disk, Tier.REMOTE: tiers.remote}.get(tier)

    def _way(self, place: Place, node: int) -> tuple[list[Channel], float] | None:
        """What bytes go through from a place to a node's instances, and the latency."""
        tier, number = place
        about = self._about(tier)
        peer = tier in (Tier.HOST, Tier.DISK) and number != node
        link = self._config.link
        if peer and link is not None:
            channels = [
                _channel(self._out, number, link.bytes_s),
                _channel(self._in, node, link.bytes_s),
            ]
            latency_s = link.latency_s
            if tier is Tier.DISK and about is not None:
                channels.append(_channel(self._reads, (tier, number), about.bytes_s))
                latency_s += about.latency_s
            return channels, latency_s
        if about is None or peer:
            return None
        channels = [_channel(self._reads, (tier, node), about.bytes_s)]
        if tier is Tier.REMOTE and self._total_read is not None:
            channels.append(self._total_read)
        return channels, about.latency_s

    def fetch(self, place: Place, node: int, size_bytes: int, now_s: float) -> float:
        """When so many bytes, asked for now, are at a node's instance."""
        way = self._way(place, node)
        assert way is not None, f"nothing leads from {place} to node {node}"
        channels, latency_s = way
        return latency_s + self._carry(channels, size_bytes, now_s)

    def save(self, place: Place, node: int, size_bytes: int, now_s: float) -> float:
        """When so many bytes of a node's instance, given now, are in a place."""
        channels, latency_s = self._way_in(place, node)
        return latency_s + self._carry(channels, size_bytes, now_s)

    def save_wait_s(self, place: Place, node: int, now_s: float) -> float:
        """How long what a node saves in a place waits for what is being saved before it."""
        return max(channel.free_s for channel in self._way_in(place, node)[0]) - now_s

    def _way_in(self, place: Place, node: int) -> tuple[list[Channel], float]:
        about = self._about(place.tier)
        assert about is not None, f"there is no {place}"
        channels = [_channel(self._writes, (place.tier, node), about.bytes_s)]
        if place.tier is Tier.REMOTE and self._total_write is not None:
            channels.append(self._total_write)
        return channels, about.latency_s

    def hand_off(self, source: int, target: int, size_bytes: int, now_s: float) -> float:
        """When so many bytes are at another node's instance; on one node at once."""
        if source == target:
            return now_s
        way = self._way(Place(Tier.HOST, source), target)
        assert way is not None, f"nothing leads from node {source} to node {target}"
        return way[1] + self._carry(way[0], size_bytes, now_s)

    def _carry(self, channels: list[Channel], size_bytes: int, now_s: float) -> float:
        done_s = now_s
        for channel in channels:
            channel.free_s = max(channel.free_s, now_s) + size_bytes / channel.bytes_s
            done_s = max(done_s, channel.free_s)
            if channel.links:
                self._busy.add(channel)
        return done_s

    def refresh(self, now_s: float) -> None:
        """Bring the links' queues up to date."""
        if not self._busy:
            return
        for channel in [*self._busy]:
            for link, channels in channel.links:
                wait_s = max(other.free_s for other in channels) - now_s
                link.queued_bytes = int(wait_s * link.bytes_s) if wait_s > 0 else 0
            if channel.free_s <= now_s:
                self._busy.discard(channel)


def _channel(channels: dict[Key, Channel], key: Key, bytes_s: float) -> Channel:
    found = channels.get(key)
    if found is None:
        found = channels[key] = Channel(bytes_s)
    return found
