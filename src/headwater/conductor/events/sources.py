"""All that one worker listens to: a subscription for each rank of each instance that publishes, a watch over each node.

Whatever they say goes to `sight.Sight`; how fast nodes reach what others hold is in `links`, for the policies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

import zmq

from headwater.conductor.events.device import Device
from headwater.conductor.events.frames import Figure
from headwater.conductor.events.lines import Dial, by_socket
from headwater.conductor.events.nodes import NodeWatch
from headwater.conductor.events.vllm import Subscription, rank_endpoint
from headwater.conductor.sight import REMOTE, Sight, State
from headwater.fleet import Link, Place
from headwater.fleetfile.model import InstanceSpec
from headwater.types import Tier

LATENCY_S, BYTES_S = 1e-3, 1e9
"""What is assumed of what nobody has measured yet: better tried than left out."""
HOST_LATENCY_S, HOST_BYTES_S = 1e-3, 5e9
"""Of an engine that reads its own node's memory, which nobody measures: a copy within the host, far sooner done than
computing anywhere."""
USUAL_BYTES = 8 << 20
STORE, OWN_DISK = -1, -2
OF_NODE = {Tier.REMOTE.value: STORE, Tier.DISK.value: OWN_DISK}
JOINED_MAX = 128
"""There are as many links as pairs of nodes."""


class Sources:
    """To be made, used and closed in the running loop. `nodes` are the fleet's: names and unix:/paths, by number."""

    def __init__(self, sight: Sight, nodes: Sequence[tuple[str, str]], *, are_joined: bool = False) -> None:
        """`are_joined`: the nodes are of one cluster. Then each is taken to reach the others until it tells how fast,
        which it cannot before it has."""
        self.links: dict[tuple[Place, int], Link] = {}
        """For `Fleet.links`: kept current in place."""
        self._to: dict[int, dict[int, Link]] = {}
        """The same by the node that reads, and whence: a node's number for its HOST, or STORE, or OWN_DISK. Places take
        far longer to hash, and with hundreds of nodes there are as many figures a second as a core can take."""
        self._sight = sight
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._subscriptions: dict[int, list[Subscription]] = {}
        self._names: dict[str, int] = {}
        """Nodes' numbers by their names in the cluster."""
        self._watches: dict[int, NodeWatch] = {}
        self._there: set[int] = set()
        """Nodes of the fleet, by number; and those of them that the directory lists."""
        self._members: set[int] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._are_joined = are_joined
        sight.on_again = self._again
        for number, (name, address) in enumerate(nodes):
            self._node(number, name, by_socket(address) if address else None)

    def __repr__(self) -> str:
        return f"Sources({len(self._subscriptions)} instances, {len(self._watches)} nodes)"

    def member_joined(self, number: int, name: str, dial: Dial) -> None:
        """A node of the cluster, of this name in it, is watched from now on."""
        self._members.add(number)
        self._sight.member_joined(number)
        self._names.setdefault(name, number)
        self._node(number, name, dial)

    def member_left(self, number: int, name: str) -> None:
        """It is not any more; nothing that it has told is true."""
        watch = self._watches.pop(number, None)
        if watch is not None:
            self._sight.sources.pop(f"node:{name}", None)
            watch.end()  # at once: the same number may be watched anew in a moment
            task = asyncio.get_running_loop().create_task(watch.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._there.discard(number)
        self._members.discard(number)
        self._names = {known: it for known, it in self._names.items() if it != number}
        self._sight.member_left(number)
        for source in list(self._to.get(number, ())):
            self._unlink(source, number)
        for target in [target for target, known in self._to.items() if number in known]:
            self._unlink(number, target)

    def _node(self, number: int, name: str, dial: Dial | None) -> None:
        """A node is of the fleet from now on, and is watched if we know how to reach it."""
        self._link(number, number, HOST_LATENCY_S, HOST_BYTES_S)
        if self._are_joined and len(self._there) < JOINED_MAX:
            for other in self._there - {number}:
                self._link(number, other, LATENCY_S, BYTES_S)
                self._link(other, number, LATENCY_S, BYTES_S)
        self._there.add(number)
        if dial is not None:
            watch = self._watches[number] = NodeWatch(number, dial, self._sight, self._measured)
            self._sight.sources[f"node:{name}"] = watch.state
            watch.start()

    @property
    def rows(self) -> dict[str, State]:
        """Who tells us; for `Sight.state`."""
        return self._sight.sources

    def tells(self, member: str) -> bool:
        """Whether a node that is watched by its socket has said that it is this member."""
        number = self._names.get(member)
        return number is not None and number not in self._members

    def is_up(self, number: int) -> bool:
        """Whether a node tells us what it holds."""
        watch = self._watches.get(number)
        return watch is not None and watch.is_up

    def add(self, number: int, spec: InstanceSpec) -> Device:
        """An instance is there; with events if it publishes any. Raises ValueError for an endpoint that is none."""
        self.remove(number)
        device = self._sight.joined(number, spec)
        if spec.events is not None and not spec.events_off:
            self._subscriptions[number] = []
            for rank in range(spec.ranks):
                self._subscribe(number, spec, device, rank)
        return device

    def remove(self, number: int) -> None:
        """An instance is gone."""
        for rank, it in enumerate(self._subscriptions.pop(number, [])):
            it.close()
            self._sight.sources.pop(f"events:{number}.{rank}", None)
        self._sight.left(number)

    def back(self, number: int) -> None:
        """An instance was away, and may have begun anew. Who publishes is asked whether it has, and what it holds; of
        others nothing is known any more."""
        subscriptions = self._subscriptions.get(number, [])
        for it in subscriptions:
            it.check()
        if not subscriptions:
            self._sight.restarted(number)

    def check(self) -> None:
        """Ask all engines whether there is more than came."""
        for subscriptions in self._subscriptions.values():
            for it in subscriptions:
                it.check()

    async def close(self) -> None:
        """End everything."""
        for number in list(self._subscriptions):
            self.remove(number)
        await asyncio.gather(*(it.close() for it in self._watches.values()), *self._ending)
        self._context.term()

    def _subscribe(self, number: int, spec: InstanceSpec, device: Device, rank: int) -> None:
        assert spec.events is not None
        events = rank_endpoint(spec.events, rank)
        replay = None if spec.replay is None else rank_endpoint(spec.replay, rank)
        it = Subscription(self._context, events, replay, partial(device.apply, rank), partial(device.forget, rank))
        self._subscriptions[number].append(it)

        def state() -> dict[str, object]:
            return {"instance": spec.name, "rank": rank, **it.state()}

        self._sight.sources[f"events:{number}.{rank}"] = state

    def _again(self, number: int) -> None:
        for it in self._subscriptions.get(number, []):
            it.again()

    def _measured(self, node: int, name: str, figures: tuple[Figure, ...]) -> None:
        """A node has told how fast it reads what."""
        if name and node in self._members:
            self._names.setdefault(name, node)
        elif name:
            self._names[name] = node
        best: dict[int, tuple[float, float, float]] = {}
        numbers = self._names
        for it in figures:
            source = OF_NODE[it.tier] if it.tier in OF_NODE else numbers.get(it.peer)
            if source is None:
                continue
            latency_s, bytes_s = _real(it.latency_s, LATENCY_S), _real(it.bytes_s, BYTES_S)
            usual_s = latency_s + USUAL_BYTES / bytes_s
            before = best.get(source)
            if before is None or usual_s < before[0]:
                best[source] = usual_s, latency_s, bytes_s
        known = self._to.get(node, {})
        for source in [it for it in known if it not in best]:
            if source < 0 or not (self._are_joined or source == node):
                self._unlink(source, node)
        for source, (_, latency_s, bytes_s) in best.items():
            link = known.get(source)
            if link is None or link.latency_s != latency_s or link.bytes_s != bytes_s:
                self._link(source, node, latency_s, bytes_s)

    def _link(self, source: int, target: int, latency_s: float, bytes_s: float) -> None:
        """There is this link, or it is as fast as this now; what it has queued stays."""
        known = self._to.get(target)
        if known is None:
            known = self._to[target] = {}
        link = known.get(source)
        if link is None:
            known[source] = self.links[_place(source, target), target] = Link(latency_s, bytes_s)
        else:
            link.latency_s, link.bytes_s = latency_s, bytes_s

    def _unlink(self, source: int, target: int) -> None:
        known = self._to[target]
        del known[source], self.links[_place(source, target), target]
        if not known:
            del self._to[target]


def _place(source: int, target: int) -> Place:
    if source == STORE:
        return REMOTE
    return Place(Tier.DISK, target) if source == OWN_DISK else Place(Tier.HOST, source)


def _real(value: float | None, assumed: float) -> float:
    """A measured figure; what is none, or not positive, is not believed."""
    return value if value is not None and 0 < value < math.inf else assumed
