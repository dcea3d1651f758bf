"""The instances that there are: those of the fleet file, and those that were registered since.

Theory of operation. An instance has a number as long as it is there, the least that is free:

    register     joins: a number, `joined` is called                                       -> HERE
    unregister   gets no more requests (draining), `leaving` is called; who keeps count    -> LEAVING
                 of those under way releases it when there are none
    release      `left` is called, for each who remembers anything by number; only then
                 the number is free for another                                            -> gone

So nobody ever finds, under a number, what was remembered of somebody else. Nodes get numbers as well, and keep them
while the fleet file or the cluster's list has them, or an instance is on them. Who gives a node's number back has seen
that nothing is held or linked under it; a request that waits may still mean the node of before, and would err in what
it expects to find. So numbers are used again as late as can be: when there are no new ones, those first that were freed
first.

What was registered or unregistered at run time is a `Change`, with the time of a wall clock; of two changes of one name
the later counts, at each worker in the end, in whatever order they come.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headwater.conductor.addresses import check_allowed, networks_of, origin_of
from headwater.conductor.http.exchange import Origin
from headwater.enginetimes import EngineTimes
from headwater.errors import ConfigError, RefusedError
from headwater.fleet import Instance
from headwater.fleetfile.model import FleetFile, InstanceSpec

INSTANCES_MAX = 1024
NODES_MAX = 4096
CHANGES_MAX = 4096
NAME_CHARACTERS = 128
UNKNOWN_TOKENS = 1 << 30
"""The capacity of an instance that has not said it yet: nothing is turned away for what we do not know."""


class Change(NamedTuple):
    """What became of a name at run time; without a spec it was taken out."""

    stamp: int
    """Nanoseconds of a wall clock."""
    name: str
    spec: InstanceSpec | None


class Roster:
    """See `parts.Registry`. The `Instance` objects live as long as their numbers, and are changed in place."""

    def __init__(
        self,
        file: FleetFile,
        times: EngineTimes,
        *,
        networks: Sequence[str] = (),
        instances_max: int = INSTANCES_MAX,
    ) -> None:
        """`networks`: where instances may be that register at run time, besides loopback. Raises ConfigError."""
        self._times = times
        self._networks = networks_of(networks)
        self._max = instances_max
        self._instances: dict[int, Instance] = {}
        self._specs: dict[int, InstanceSpec] = {}
        self._origins: dict[int, Origin] = {}
        self._numbers: dict[str, int] = {}
        self.names: dict[int, str] = {}
        """Of those that are there; only to be read."""
        self._nodes: dict[str, int] = {}
        self._node_names: list[str] = []
        self._lasting: set[str] = set()
        """Nodes that keep their numbers though no instance is on them."""
        self._freed: deque[int] = deque()
        self._joined: list[Callable[[int], None]] = []
        self._left: list[Callable[[int], None]] = []
        self._leaving: list[Callable[[int], None]] = []
        self._changes: OrderedDict[str, Change] = OrderedDict()
        self.newest = 0
        """The stamp of the latest change."""
        for node in file.nodes:
            self.node(node.name)
        for spec in file.instances:
            try:
                self._join(spec, self._origin(spec))
            except RefusedError as error:
                raise ConfigError(f"{file.path}: instance {spec.name!r}: {error}") from error

    def __repr__(self) -> str:
        names = ", ".join(f"{number}={spec.name}" for number, spec in self._specs.items())
        return f"Roster({names})"

    # ---- what there is

    def spec(self, number: int) -> InstanceSpec:
        """See `parts.Registry`."""
        return self._specs[number]

    def origin(self, number: int) -> Origin:
        """See `parts.Registry`."""
        return self._origins[number]

    def instances(self) -> Mapping[int, Instance]:
        """See `parts.Registry`; always the same mapping."""
        return self._instances

    def by_name(self, name: str) -> int | None:
        """See `parts.Registry`; also of one that is leaving."""
        return self._numbers.get(name)

    def name(self, number: int) -> str:
        """Its name; '' of one that has left."""
        return self.names.get(number, "")

    def node(self, name: str) -> int:
        """The number of a node, given at its first mention and kept until `node_left`. Raises RefusedError when there
        are too many."""
        number = self._node_number(name)
        self._lasting.add(name)
        return number

    def known_node(self, name: str) -> int | None:
        """The number of a node that has one."""
        return self._nodes.get(name)

    def node_left(self, name: str) -> None:
        """It is there no more: its number is free as soon as no instance is on it."""
        self._lasting.discard(name)
        self._free_node(name)

    def _node_number(self, name: str) -> int:
        number = self._nodes.get(name)
        if number is not None:
            return number
        if len(self._node_names) < NODES_MAX:
            number = len(self._node_names)
            self._node_names.append(name)
        elif self._freed:
            number = self._freed.popleft()
            self._node_names[number] = name
        else:
            raise RefusedError("node", f"at most {NODES_MAX} names", "another one", "use those that there are")
        self._nodes[name] = number
        return number

    def _free_node(self, name: str) -> None:
        if name not in self._nodes or name in self._lasting or any(it.node == name for it in self._specs.values()):
            return
        number = self._nodes.pop(name)
        self._node_names[number] = ""
        self._freed.append(number)

    @property
    def nodes(self) -> Sequence[str]:
        """Their names by number, '' for none; always the same list, which grows."""
        return self._node_names

    def node_name(self, number: int | None) -> str:
        """Its name; '' for none."""
        known = number is not None and 0 <= number < len(self._node_names)
        return self._node_names[number] if known and number is not None else ""

    def models(self) -> set[str]:
        """What clients may ask for, whether or not anybody serves it at this moment."""
        return {spec.served_name for spec in self._specs.values()}

    # ---- who comes and goes

    def watch(
        self,
        joined: Callable[[int], None] | None = None,
        left: Callable[[int], None] | None = None,
        leaving: Callable[[int], None] | None = None,
    ) -> None:
        """Be told of instances from now on, in the order of watching; `leaving` when it was unregistered, of which
        one has to see that it is released; `left` just before it is, while its name and spec can still be asked for."""
        if leaving is not None:
            self._leaving.append(leaving)
        if joined is not None:
            self._joined.append(joined)
        if left is not None:
            self._left.append(left)

    def register(self, spec: InstanceSpec, stamp: int) -> int:
        """An instance that somebody runs joins; its number. The same again changes nothing. Raises RefusedError for an
        address that is not allowed, a name that is taken, or too many instances."""
        origin = self._checked(spec)
        known = self._numbers.get(spec.name)
        if known is not None:
            # Also one on its way out: its streams are served, and its number is theirs until then.
            if self._specs[known] == spec:
                self._instances[known].draining = False
                self._note(Change(stamp, spec.name, spec))
                return known
            raise RefusedError("name", "one that is not taken", "another instance's", "unregister that one first")
        if len(self._instances) >= self._max:
            raise RefusedError("instances", f"at most {self._max}", "one more", "unregister some")
        number = self._join(spec, origin)
        self._note(Change(stamp, spec.name, spec))
        return number

    def unregister(self, name: str, stamp: int) -> int | None:
        """An instance gets no more requests, and is released when none are under way: its number. None if unknown."""
        number = self._numbers.get(name)
        if number is not None:
            self._instances[number].draining = True
            self._note(Change(stamp, name, None))
            for leaving in self._leaving:
                leaving(number)
        return number

    def leaving(self, number: int) -> bool:
        """Whether it was unregistered, and waits for its last requests."""
        spec = self._specs.get(number)
        change = self._changes.get(spec.name) if spec is not None else None
        return change is not None and change.spec is None

    def release(self, number: int) -> None:
        """Nothing of it is under way: everybody forgets it, and then its number is free."""
        assert self.leaving(number), f"instance {number} was not unregistered"
        for left in self._left:
            left(number)
        spec = self._specs.pop(number)
        del self._numbers[spec.name]
        del self._instances[number], self._origins[number], self.names[number]
        if spec.node is not None:
            self._free_node(spec.node)

    # ---- what other workers say

    def changes(self) -> list[Change]:
        """All that is known of run time, for workers that have missed some."""
        return list(self._changes.values())

    def heard(self, change: Change) -> None:
        """Another worker's word. What is older than what we know is nothing. Raises RefusedError as `register`."""
        known = self._changes.get(change.name)
        if known is not None and known.stamp >= change.stamp:
            return
        if change.spec is not None:
            self.register(change.spec, change.stamp)
        elif self.unregister(change.name, change.stamp) is None:
            self._note(change)

    def _note(self, change: Change) -> None:
        self._changes.pop(change.name, None)
        self._changes[change.name] = change
        self.newest = max(self.newest, change.stamp)
        while len(self._changes) > CHANGES_MAX:
            # An old word about somebody who is gone anyway; those who are here are fewer.
            gone = next((name for name, it in self._changes.items() if name not in self._numbers), change.name)
            del self._changes[gone]

    def _checked(self, spec: InstanceSpec) -> Origin:
        if not 0 < len(spec.name) <= NAME_CHARACTERS or not spec.name.isprintable():
            raise RefusedError("name", f"1 to {NAME_CHARACTERS} printable characters", "another one", "correct it")
        if spec.url is None:
            raise RefusedError("url", "that of an instance that runs", "none", "add it")
        origin = origin_of(spec.url)
        check_allowed(origin, self._networks)
        return origin

    def _origin(self, spec: InstanceSpec) -> Origin:
        if spec.url is not None:
            return origin_of(spec.url)
        if spec.port is None:
            raise RefusedError("port", "a port or a url", "neither", "add one of them")
        return Origin("127.0.0.1", spec.port)

    def _join(self, spec: InstanceSpec, origin: Origin) -> int:
        assert spec.name not in self._numbers, f"instance {spec.name} is there already"
        node = self._node_number(spec.node) if spec.node is not None else None
        number = next(it for it in range(len(self._instances) + 1) if it not in self._instances)
        self._instances[number] = Instance(
            number,
            self._times,
            spec.capacity_tokens or UNKNOWN_TOKENS,
            spec.role,
            node,
            spec.served_name,
        )
        self._specs[number], self._origins[number] = spec, origin
        self._numbers[spec.name], self.names[number] = number, spec.name
        for joined in self._joined:
            joined(number)
        return number
