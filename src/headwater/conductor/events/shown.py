"""What of the index others are told: who holds a prompt, in the words of Mooncake's indexer, and the fleet's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.conductor.events.device import RANK_SHIFT, Device
from headwater.conductor.events.hottest import Hottest
from headwater.conductor.events.namespaces import Model
from headwater.conductor.job import Lens
from headwater.core.engine_keys import EngineHash
from headwater.core.prefix import PrefixIndex
from headwater.fleet import Place
from headwater.fleetfile.model import InstanceSpec
from headwater.types import Tier

HOT_SHOWN, KEY_DIGITS = 16, 12
RANK_FIRST = 1 << RANK_SHIFT


class Shown:
    """Reads what is `Sight`'s, and changes nothing."""

    def __init__(
        self,
        index: PrefixIndex,
        devices: Mapping[int, Device],
        specs: Mapping[int, InstanceSpec],
        models: Mapping[str, Model],
        nodes: Sequence[str],
        hottest: Hottest,
    ) -> None:
        self._index, self._devices, self._specs = index, devices, specs
        self._models, self._nodes, self._hottest = models, nodes, hottest

    def query(self, model: str, lenses: Sequence[Lens]) -> dict[str, dict[str, Any]]:
        """Who holds how many tokens of a prompt, by instance."""
        held: dict[Place, int] = {}
        for keys, tokens in lenses:
            for place, count in self._index.find(keys, tokens).items():
                held[place] = max(held.get(place, 0), count)
        answer = {}
        for number, spec in self._specs.items():
            if spec.served_name != model:
                continue
            device = self._devices[number]
            routed = held.get(device.place, 0)
            ranks = {rank: max(held.get(place, 0), routed) for rank, place in enumerate(device.places)}
            on_device = max(ranks.values())
            node = self._nodes.index(spec.node) if spec.node in self._nodes else None
            host, disk = (0 if node is None else held.get(Place(it, node), 0) for it in (Tier.HOST, Tier.DISK))
            answer[spec.name] = {
                "longest_matched": max(on_device, host, disk),
                "GPU": on_device,
                "CPU": host,
                "DISK": disk,
                "DP": {str(rank): count for rank, count in ranks.items()},
            }
        return answer

    def query_by_hash(self, hashes: Sequence[EngineHash]) -> dict[str, dict[str, Any]]:
        """The same for blocks by the names that engines gave them, of which only engines know."""
        answer = {}
        for number, device in self._devices.items():
            ranks = [count * device.block_tokens for count in device.matched(hashes)]
            answer[self._specs[number].name] = {
                "longest_matched": max(ranks),
                "GPU": max(ranks),
                "CPU": 0,
                "DISK": 0,
                "DP": {str(rank): count for rank, count in enumerate(ranks)},
            }
        return answer

    def state(self) -> dict[str, Any]:
        """Without keys but the beginnings of those of the hottest prefixes."""
        return {
            "keys": len(self._index),
            "keys_max": self._index.limit,
            "forgotten": self._index.forgotten,
            "models": {
                it.name: {
                    "registered": it.is_registered,
                    "tokens_a_key": [way.tokens for way in it.ways],
                    "kv_bytes_per_token": it.kv_bytes_per_token,
                }
                for it in self._models.values()
            },
            "devices": {self._specs[number].name: _device_state(it) for number, it in self._devices.items()},
            "hottest": [
                {
                    "key": it.key.hex()[:KEY_DIGITS],
                    "tokens": it.tokens,
                    "hits": it.hits,
                    "places": sorted(self._place_name(place) for place in without_ranks(self._index.find([it.key]))),
                }
                for it in self._hottest.top(HOT_SHOWN)
            ],
        }

    def _place_name(self, place: Place) -> str:
        if place.tier is Tier.DEVICE:
            spec = self._specs.get(place.number)
            return f"device:{place.number if spec is None else spec.name}"
        if place.tier is Tier.REMOTE:
            return "remote"
        return f"{place.tier.value}:{self._nodes[place.number]}"


def without_ranks(held: Mapping[Place, int]) -> dict[Place, int]:
    """An instance holds what the best of its ranks does."""
    merged: dict[Place, int] = {}
    for place, count in held.items():
        if place.number >= RANK_FIRST:
            place = Place(place.tier, place.number & RANK_FIRST - 1)
        if count > merged.get(place, 0):
            merged[place] = count
    return merged


def _device_state(device: Device) -> dict[str, Any]:
    sums = device.sums
    return {
        "block_tokens": device.block_tokens,
        "ranks": device.ranks,
        "blocks": device.hashes,
        "expected": device.expected,
        "stored": sums.stored,
        "removed": sums.removed,
        "cleared": sums.cleared,
        "foreign": sums.foreign,
        "passed": sums.passed,
        "orphans": sums.orphans,
        "malformed": sums.malformed,
        "unknown": sums.unknown,
    }
