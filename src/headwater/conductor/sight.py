"""Who holds what: the index of one worker, fed by engines' events, by nodes, and by what was routed.

    engine ── events/vllm ──► events/device ──┐
    brain  ── expect, unexpect ──► device   ──┤──► PrefixIndex ◄── held ── brain
    node   ── events/nodes ──► told, node_* ──┘

Instances and nodes have the registry's numbers; the fleet file's nodes are the first. Everything is called in one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwater._kernels.index import make_table
from headwater.conductor.events.device import Device
from headwater.conductor.events.hottest import Hottest
from headwater.conductor.events.namespaces import Model, Registration, Roots
from headwater.conductor.events.recent import Recent
from headwater.conductor.events.shown import Shown, without_ranks
from headwater.conductor.job import Lens
from headwater.core.engine_keys import EngineHash
from headwater.core.prefix import PrefixIndex
from headwater.fleet import Held, Place
from headwater.fleetfile.model import InstanceSpec
from headwater.types import KEY_BYTES, Tier

KEYS = 1 << 22
REMOTE = Place(Tier.REMOTE, 0)
State = Callable[[], dict[str, object]]


class Sight:
    """See parts.Sight. `on_again` is called with an instance's number when its events are needed from the beginning, as
    its keys have another root."""

    def __init__(self, nodes: Sequence[str] = (), keys: int = KEYS) -> None:
        """`nodes` are the fleet's, by number, and may become more; `keys` is how many keys are kept at most."""
        self.index = PrefixIndex(keys, KEY_BYTES, make_table)
        self.on_again: Callable[[int], None] = _nobody
        self.sources: dict[str, State] = {}
        """Who tells us, and what they say of themselves; for `state`."""
        self.unkeyable = 0
        """Prompts with ids that are no token ids."""
        self._nodes = nodes
        self._roots = Roots()
        self._models: dict[str, Model] = {}
        self._devices: dict[int, Device] = {}
        self._specs: dict[int, InstanceSpec] = {}
        self._registrations: dict[int, list[Registration]] = {}
        self._listed: set[int] = set()
        """The nodes that we know by the cluster's list, in which other fleets' are as well."""
        self._telling: set[int] = set()
        """The nodes that tell us what they hold."""
        self._recent = Recent()
        self._hottest = Hottest()
        self._has_ranks = False
        self._shown = Shown(self.index, self._devices, self._specs, self._models, self._nodes, self._hottest)

    def __repr__(self) -> str:
        return f"Sight({self.index!r}, {len(self._devices)} instances, {len(self._models)} models)"

    # ---- who there is -----------------------------------------------------------------------------------

    def joined(self, number: int, spec: InstanceSpec) -> Device:
        """An instance is there; its events go to what this returns."""
        self.left(number)
        name = spec.served_name
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = Model(name)
        known = model

        def root(salt: str) -> bytes:
            return self._roots.root(known.home, salt)

        device = Device(
            number,
            self.index,
            root,
            block_tokens=spec.block_tokens,
            capacity_tokens=spec.capacity_tokens,
            ranks=spec.ranks,
        )
        device.on_block_tokens = lambda: self._plan(name)
        self._devices[number], self._specs[number] = device, spec
        self._plan(name)
        self._assign()
        return device

    def learned(self, number: int, *, capacity_tokens: int | None = None, block_tokens: int | None = None) -> None:
        """What an instance says of itself when it is asked; of its blocks, its events are believed before that."""
        device = self._devices.get(number)
        if device is None:
            return
        device.capacity_tokens = capacity_tokens or device.capacity_tokens
        if block_tokens and block_tokens != device.block_tokens and not device.sums.stored:
            device.block_tokens = block_tokens
            device.forget_all()
            self._plan(self._specs[number].served_name)
            self.on_again(number)

    def restarted(self, number: int) -> None:
        """An instance may have begun anew, and nobody says what it holds."""
        device = self._devices.get(number)
        if device is not None:
            device.forget_all()
            self.on_again(number)

    def left(self, number: int) -> None:
        """See parts.Sight."""
        device = self._devices.pop(number, None)
        if device is None:
            return
        device.gone()
        name = self._specs.pop(number).served_name
        self._has_ranks = any(it.ranks > 1 for it in self._devices.values())
        if any(spec.served_name == name for spec in self._specs.values()):
            self._plan(name)
        else:
            del self._models[name]

    def _plan(self, name: str) -> None:
        sizes = [self._devices[it].block_tokens for it, spec in self._specs.items() if spec.served_name == name]
        self._models[name].has_blocks(sizes)
        self._has_ranks = any(it.ranks > 1 for it in self._devices.values())

    # ---- what nodes tell --------------------------------------------------------------------------------

    def member_joined(self, node: int) -> None:
        """A node is there that the cluster lists, so it may be another fleet's."""
        self._listed.add(node)

    def member_left(self, node: int) -> None:
        """It is not any more; its number may be given to another one."""
        self.node_forgotten(node)
        self._listed.discard(node)
        if self._registrations.pop(node, None):
            self._assign()

    def registered(self, node: int, registrations: Sequence[Registration]) -> None:
        """These are all that engines' plug-ins have registered with a node."""
        self._registrations[node] = list(registrations)
        self._telling.add(node)
        self._assign()

    def _assign(self) -> None:
        """Tell the models which registrations are theirs. Those without any keep what they knew: a node that restarts
        forgets its engines for a moment."""
        found: dict[str, list[Registration]] = {}
        for node, registrations in sorted(self._registrations.items()):
            for it in registrations:
                name = self._model_of(node, it.instance)
                if name is not None:
                    found.setdefault(name, []).append(it)
        for name, its in found.items():
            if self._models[name].registered(its):
                for number, spec in self._specs.items():
                    if spec.served_name == name:
                        self._devices[number].forget_all()
                        self.on_again(number)

    def _model_of(self, node: int, instance: str) -> str | None:
        """Whose registration this is. A plug-in goes by `engine_id` and a word for this start of its engine; one that
        was given no id can be told if the node's instances all serve one model. Where other fleets' nodes are listed as
        well, their instances may have our names: only those count there that are on that node, or nobody says where."""
        name, is_listed = self._nodes[node], node in self._listed
        for spec in self._specs.values():
            if is_listed and spec.node not in (name, None):
                continue
            if instance == spec.name or instance.startswith((f"{spec.name}.", f"{spec.name}_dp")):
                return spec.served_name
        served = {spec.served_name for spec in self._specs.values() if spec.node == name}
        return served.pop() if len(served) == 1 else None

    def node_changed(self, node: int, tier: Tier, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """A node has stored these chunks in one of its tiers, and removed those. REMOTE is everybody's."""
        place = REMOTE if tier is Tier.REMOTE else Place(tier, node)
        if stored:
            self.index.stored(place, stored)
        if removed:
            self.index.removed(place, removed)

    def node_forgotten(self, node: int) -> None:
        """Nothing is known of a node any more; what is on REMOTE stays there."""
        self._telling.discard(node)
        for tier in (Tier.HOST, Tier.DISK):
            self.index.cleared(Place(tier, node))

    # ---- what the brain asks ----------------------------------------------------------------------------

    def lenses(self, model: str, salt: str, ids: Sequence[int], *, again: bool = False) -> Sequence[Lens]:
        """See parts.Sight. Ids that are asked for are not changed afterwards."""
        known = self._models.get(model)
        if known is None:
            return ()
        ways = known.ways
        found = self._recent.find(ids, salt, ways) if again else None
        if found is not None:
            return found
        keys = self._roots.keys
        try:
            lenses = tuple([Lens(keys(way, salt, ids), way.tokens) for way in ways])
        except (OverflowError, TypeError):
            self.unkeyable += 1
            return ()
        if again:
            self._recent.keep(ids, salt, ways, lenses)
        return lenses

    def root(self, model: str, salt: str) -> bytes | None:
        """That of the namespace under which nodes hold a model's chunks; None if no plug-in has said it."""
        known = self._models.get(model)
        return None if known is None or not known.is_registered else self._roots.root(known.home, salt)

    def held(self, model: str, lenses: Sequence[Lens]) -> Held:
        """See parts.Sight."""
        held: dict[Place, int] = {}
        for keys, tokens in lenses:
            found = self.index.find(keys, tokens)
            if not found:
                continue
            longest = next(iter(found.values()))
            self._hottest.met(keys[longest // tokens - 1], longest)
            if held:
                for place, count in found.items():
                    if count > held.get(place, 0):
                        held[place] = count
            else:
                held = found
        return without_ranks(held) if self._has_ranks and held else held

    def expect(self, number: int, lenses: Sequence[Lens]) -> None:
        """See parts.Sight."""
        device, keys = self._device_keys(number, lenses)
        if device is not None and keys:
            device.expect(keys)

    def unexpect(self, number: int, lenses: Sequence[Lens]) -> None:
        """See parts.Sight."""
        device, keys = self._device_keys(number, lenses)
        if device is not None and keys:
            device.unexpect(keys)

    def by_rank(self, number: int, lenses: Sequence[Lens]) -> Sequence[int]:
        """How many leading tokens each data-parallel rank holds, by events; nothing of an instance with one rank."""
        device, keys = self._device_keys(number, lenses)
        if device is None or device.ranks == 1 or not keys:
            return ()
        found = self.index.find(keys, device.block_tokens)
        return [found.get(place, 0) for place in device.places]

    def stored(self, number: int, model: str, lenses: Sequence[Lens]) -> bool | None:
        """See parts.Sight."""
        known, spec = self._models.get(model), self._specs.get(number)
        if known is None or spec is None or spec.node not in self._nodes or len(lenses) != len(known.ways):
            return None
        node = self._nodes.index(spec.node)
        chunks = [lens for way, lens in zip(known.ways, lenses, strict=True) if known.is_chunks(way)]
        if node not in self._telling or not chunks:
            return None
        places = Place(Tier.HOST, node), Place(Tier.DISK, node), REMOTE
        for keys, tokens in chunks:
            found = self.index.find(keys, tokens)
            if max(found.get(it, 0) for it in places) >= len(keys) * tokens:
                return True
        return False

    def kv_bytes_per_token(self, model: str) -> int:
        """As the plug-in's layout has it; 0 while nobody has said."""
        known = self._models.get(model)
        return 0 if known is None else known.kv_bytes_per_token

    def _device_keys(self, number: int, lenses: Sequence[Lens]) -> tuple[Device | None, Sequence[bytes]]:
        """An instance, and the keys that its events would have."""
        device = self._devices.get(number)
        if device is None:
            return None, ()
        model = self._models[self._specs[number].served_name]
        way = model.block_way(device.block_tokens)
        at = model.ways.index(way)
        # Routed before the ways changed: it will be said by events.
        fits = at < len(lenses) and lenses[at].tokens == way.tokens and len(lenses) == len(model.ways)
        return device, lenses[at].keys if fits else ()

    # ---- what others ask --------------------------------------------------------------------------------

    def query(self, model: str, ids: Sequence[int], salt: str = "") -> dict[str, dict[str, Any]]:
        """See `control.indexer.Indexed`."""
        return self._shown.query(model, self.lenses(model, salt, ids))

    def query_by_hash(self, hashes: Sequence[EngineHash]) -> dict[str, dict[str, Any]]:
        """See `control.indexer.Indexed`."""
        return self._shown.query_by_hash(hashes)

    def state(self) -> dict[str, Any]:
        """See parts.Sight: without keys but the beginnings of those of the hottest prefixes."""
        return self._shown.state() | {
            "unkeyable": self.unkeyable,
            "sources": {name: state() for name, state in self.sources.items()},
        }


def _nobody(number: int) -> None:
    """Nobody can ask for events again."""
