"""A node's part in its cluster: what the loop does for it, and the threads that it needs.

Theory of operation. The loop is the only one that touches the core; all that blocks has a thread of its own:

    beats, announcements   membership.py     to the directory
    reads of peers         peers.py          in the carrier's threads, as for any tier
    peers' reads           exports.py        in the threads of their connections; leased in the loop
    copies elsewhere       orders.py         decided in the loop, located and sent in a thread

After each turn of the loop `settle` tells the directory what has changed; about twice a second `tick` makes the report
that the next beat brings along. Without a directory none of this exists.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from ipaddress import ip_address
from typing import Any

import msgspec

from headwater.config import NodeConfig
from headwater.core.announcing import Announcing, Batch, Standpoint
from headwater.core.cache import Cache
from headwater.core.entries import State
from headwater.core.health import Health
from headwater.core.links import PathReport, PeerReport, Peers
from headwater.core.placing import Room
from headwater.core.quotas import Quotas
from headwater.core.spread import Copies
from headwater.directory.open import open_directory
from headwater.errors import RefusedError
from headwater.node.errands import Answer, Errands
from headwater.node.exports import NodeExports
from headwater.node.links import LinkPool
from headwater.node.membership import Membership, Pulse, Vitals
from headwater.node.orders import Orders
from headwater.node.peers import PeersTier
from headwater.node.reports import Report, write_report
from headwater.node.tiering import Tiering
from headwater.places import parse_remote
from headwater.ports import Directory, Transport
from headwater.tiers.host import MappedMemory
from headwater.transports.credentials import Credentials, load_credentials
from headwater.transports.host import host_id
from headwater.transports.nixl import Nixl
from headwater.transports.nixl_agent import Agent, agent_name
from headwater.transports.offers import Offers
from headwater.transports.server import PeerServer
from headwater.transports.shm import Shm
from headwater.transports.tcp import Tcp
from headwater.transports.wire import NEWEST, OLDEST
from headwater.types import NAME_BYTES, Announced, Changed, Listed, Member, Standing, Tier, chunk_name, split_name
from headwater.values import split_address
from headwater.version import VERSION

log = logging.getLogger(__name__)

STEP_ROWS = 2048
RETRY_S = 0.25
CLOSE_S = 3.0
HOT_SHOWN, HOT_S = 8, 5.0
LINKS_SHOWN = 16
EVICTED_BYTES_MAX = 1 << 17
NO_TAKERS = "no other node takes anything"


@dataclass(slots=True)
class Served:
    """What exists once the node's memory and tiers do."""

    cache: Cache
    tiering: Tiering
    exports: NodeExports
    server: PeerServer
    membership: Membership
    orders: Orders


class Cluster:
    """One node's cluster side. Made in two steps: `tier` is needed to open the tiers, and `serve` needs those."""

    def __init__(self, config: NodeConfig, name: str, epoch: int, errands: Errands) -> None:
        """Read credentials and open the directory's client; raises ConfigError. Nobody is spoken to yet."""
        self.config, self.errands = config, errands
        self.credentials: Credentials = load_credentials(
            config.token_file, config.tls_cert, config.tls_key, config.tls_ca
        )
        self.member = Member(
            config.name or name,
            epoch,
            config.advertise or config.listen,
            "",
            config.host_id or host_id(),
            config.labels,
            ("tcp",),
            VERSION,
            OLDEST,
            NEWEST,
            config.host_memory,
        )
        self.directory: Directory = open_directory(config.directory, config.cluster)
        known = config.cluster, self.credentials
        transports: dict[str, Transport] = {it.name: it(lambda: self.member, *known) for it in (Shm, Tcp)}
        self._agent: Agent | None = None
        if config.nixl:
            self._agent = Agent(agent_name(self.member), self.member.host)
            transports["nixl"] = Nixl(lambda: self.member, *known, self._agent)
        self.member = replace(self.member, transports=tuple(transports))
        self.copies = Copies()
        self.quotas = Quotas(config.cluster_quotas)
        self.tier = PeersTier(self.directory, Peers(self.member), LinkPool(transports), self._hurry)
        self.draining = False
        self._served: Served | None = None
        self.announcing = Announcing(self._inventory)
        self._sent: Batch | None = None
        self._retry_s = 0.0
        self._report = b"{}"
        self._hot: list[dict[str, Any]] = []
        self._hot_s = 0.0

    def __repr__(self) -> str:
        return f"Cluster({self.config.cluster}, {self.announcing!r}, {self.tier!r})"

    # ---- life -----------------------------------------------------------------------------------------

    def serve(self, cache: Cache, tiering: Tiering, memory: MappedMemory, spaces: Mapping[bytes, int]) -> NodeExports:
        """Bind, join and begin; raises ConfigError if that address cannot be had, or may not without credentials."""
        exports = NodeExports(cache, tiering, memory, spaces, self.errands, self.config.load_lease_s)
        host, port = split_address(self.config.listen)
        path = self.config.socket.removeprefix("unix:") + ".peers"
        offers = Offers(exports, [] if self._agent is None else [self._agent])
        server = PeerServer(lambda: self.member, self.config.cluster, offers, self.credentials, (host, int(port)), path)
        try:
            return self._serve(cache, tiering, memory, exports, server, path)
        except BaseException:
            server.close(time.monotonic() + CLOSE_S)
            raise

    def _serve(
        self,
        cache: Cache,
        tiering: Tiering,
        memory: MappedMemory,
        exports: NodeExports,
        server: PeerServer,
        path: str,
    ) -> NodeExports:
        self.member = replace(self.member, address=self._advertised(server.address), socket=path)
        membership = Membership(
            self.directory, lambda: self.member, self._vitals, self._pulse, self._listed, self._announced
        )
        orders = Orders(self.config, self.errands, cache, tiering, self.tier, self.rooms, self.copies)
        self._served = Served(cache, tiering, exports, server, membership, orders)
        if self._agent is not None:
            self._agent.register(memory.array(0, memory.sizes[0]))
        exports.served = orders.served
        exports.topics |= {"evict": self._told_evict, "clear": self._told_clear, "ping": _pong}
        tiering.on_changes = self._heard
        self.tick(time.monotonic())
        server.start()
        membership.start()
        orders.start()
        return exports

    def close(self) -> None:
        """Leave the cluster. What peers read now ends; the tier is closed with the others."""
        served = self._served
        if served is None:
            self.directory.close()
            self.tier.close()
            return
        served.orders.close(time.monotonic() + CLOSE_S)
        ended = served.membership.close(time.monotonic() + CLOSE_S)
        served.server.close(time.monotonic() + CLOSE_S)
        if ended:
            self.directory.close()

    def let_go(self) -> None:
        """The tiers are closed: nothing of the node's memory is registered with anybody any more."""
        if self._agent is not None:
            self._agent.close()

    @property
    def orders(self) -> Orders:
        """Who has copies made elsewhere."""
        assert self._served is not None
        return self._served.orders

    @property
    def due_s(self) -> float:
        """When `settle` is to be called at the latest."""
        return math.inf if self._served is None else self._served.exports.due_s

    # ---- the loop's turns -----------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Tell the directory what has changed, and lend what has come up from the disk."""
        served = self._served
        if served is None:
            return
        served.exports.settle(now)
        if self._sent is None and now >= self._retry_s:
            self._sent = self.announcing.batch()
            if self._sent is not None:
                served.membership.announce(self._sent)

    def tick(self, now: float) -> None:
        """About twice a second: what the next beat says, tenants' lines, copies elsewhere."""
        served = self._served
        if served is None:
            return
        if self.config.cluster_quotas:
            self._draw_lines(served.cache)
        served.orders.tick(now)
        self._report = write_report(self._make_report(served, now))
        self.settle(now)

    def _heard(self, changes: Sequence[Changed]) -> None:
        served = self._served
        assert served is not None
        for change in changes:
            self.announcing.changed(change)
        served.exports.heard(changes)

    def _draw_lines(self, cache: Cache) -> None:
        for number, report in self.tier.reports.items():
            self.quotas.reported(number, report.tenants)
        held_here = {name: it.held_bytes for name, it in cache.shares.items()}
        for tenant, line in self.quotas.lines(held_here).items():
            if tenant in cache.shares:
                local = self.config.quotas.get(tenant)
                cache.shares[tenant].quota_bytes = line if local is None else min(line, local)

    def rooms(self) -> list[Room]:
        """All members as places for copies, ourselves included."""
        found = []
        for it in self.tier.members():
            report = self.tier.reports.get(it.number) or Report()
            zone = it.member.labels.get("zone", "")
            serves = it.standing is Standing.SERVING
            found.append(Room(it.number, it.member.capacity_bytes, report.used_bytes, zone, takes=serves))
        served = self._served
        if served is not None:
            pool = served.cache.pool
            zone = self.config.labels.get("zone", "")
            own = Room(self.announcing.number, pool.capacity_bytes, pool.taken_bytes, zone, takes=not self.draining)
            found.append(own)
        return found

    # ---- what the threads tell ------------------------------------------------------------------------

    def _vitals(self) -> Vitals:
        """For the beat thread; each part is set whole."""
        announcing = self.announcing
        behind = announcing.number if announcing.standpoint is Standpoint.BEHIND else None
        standing = Standing.DRAINING if self.draining else Standing.SERVING
        return Vitals(standing, self._report, announcing.stamp(), behind)

    def _pulse(self, pulse: Pulse) -> None:
        self.errands.tell(lambda now: self._beaten(pulse))

    def _beaten(self, pulse: Pulse) -> None:
        if pulse.joined:
            self._sent = None
            self.announcing.joined(pulse.number)
        else:
            self.announcing.beaten(pulse.beat, pulse.stamp)
        if self.announcing.standpoint is not Standpoint.MEMBER:
            self._sent = None
            self._hurry()

    def _listed(self, members: list[Listed], own: int) -> None:
        """For the beat thread."""
        self.tier.listed(members, own)
        self.errands.tell(lambda now: self.quotas.listed([it.number for it in members if it.number != own]))

    def _announced(self, batch: Batch, answer: bytes | RefusedError | None) -> None:
        self.errands.tell(lambda now: self._applied(batch, answer, now))

    def _applied(self, batch: Batch, answer: bytes | RefusedError | None, now: float) -> None:
        if batch is self._sent:
            self._sent = None
        if isinstance(answer, bytes):
            self.announcing.acknowledged(batch)
            held = zip(batch.changes, answer, strict=False)
            self.copies.told({split_name(it.name)[1]: others for it, others in held if it.present})
            return
        if answer is not None:
            self.announcing.refused(batch)
            self._hurry()
        self._retry_s = now + RETRY_S

    def _hurry(self) -> None:
        if self._served is not None:
            self._served.membership.hurry()

    # ---- what peers tell ------------------------------------------------------------------------------

    def _told_clear(self, peer: str, body: bytes, until_s: float) -> bytes:
        served = self._served
        assert served is not None

        def begin(now: float, answer: Answer[bytes]) -> None:
            space = served.exports.spaces.get(body)
            cleared = 0 if space is None else served.tiering.clear(space, now, here_only=True).deleted
            answer.give(msgspec.msgpack.encode(cleared))

        log.info("%s has a namespace cleared", peer[:64])
        return self.errands.ask(begin, until_s)

    def _told_evict(self, peer: str, body: bytes, until_s: float) -> bytes:
        served = self._served
        assert served is not None
        try:
            root, names = msgspec.msgpack.decode(body, type=tuple[bytes, bytes])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RefusedError("evict", "a root and names", str(error), "use equal versions") from None
        if len(names) > EVICTED_BYTES_MAX or len(names) % NAME_BYTES:
            whole = f"whole names, at most {EVICTED_BYTES_MAX} bytes of them"
            raise RefusedError("evict", whole, f"{len(names)} bytes", "use equal versions")
        each = (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))
        keys = list(dict.fromkeys(split_name(it)[1] for it in each))

        def begin(now: float, answer: Answer[bytes]) -> None:
            space = served.exports.spaces.get(root)
            if space is not None:
                served.tiering.evict_here(space, keys)
            answer.give(b"")

        return self.errands.ask(begin, until_s)

    # ---- inside ---------------------------------------------------------------------------------------

    def _inventory(self) -> Iterator[list[Announced]]:
        """What HOST and DISK hold, some rows a step."""
        served = self._served
        assert served is not None
        disk = served.tiering.disk_level
        for cache in (served.cache, None if disk is None else disk.disk):
            if cache is None:
                continue
            entries, first = cache.entries, 0
            while first < len(entries.keys):
                rows = range(first, min(first + STEP_ROWS, len(entries.keys)))
                ready = [it for it in rows if entries.state[it] == State.READY]
                names = (chunk_name(entries.group[it], entries.keys[it]) for it in ready)
                yield [Announced(name, cache.tier, present=True) for name in names]
                first += STEP_ROWS

    def _advertised(self, address: str) -> str:
        """What others connect to: as the operator says, or the address at which the directory is reached from here."""
        if self.config.advertise:
            return self.config.advertise
        host, port = split_address(address)
        if not ip_address(host).is_unspecified:
            return address
        spec = parse_remote(self.config.directory)
        try:
            found = socket.getaddrinfo(spec.host, spec.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # sends nothing
                own = str(probe.getsockname()[0])
        except (OSError, IndexError):
            own = socket.gethostname()
        return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"

    def _make_report(self, served: Served, now: float) -> Report:
        """What this node says of itself."""
        cache, pool = served.cache, served.cache.pool
        level = served.tiering.disk_level
        disk = None if level is None else level.disk
        if now >= self._hot_s:
            self._hot_s = now + HOT_S
            self._hot = served.orders.hottest(now, HOT_SHOWN)
        used = [it for it in self.links(now) if it["transport"] != "-"]
        used.sort(key=lambda it: (it["health"] == Health.WELL.value, -it["read_bytes"]))
        tenants = self.config.cluster_quotas
        return Report(
            pool.capacity_bytes,
            pool.taken_bytes,
            {name: it.held_bytes for name, it in cache.shares.items() if name in tenants},
            served.exports.sums.size_bytes,
            served.exports.sums.chunks,
            sum(it.lookup_tokens for it in cache.spaces),
            sum(it.hit_tokens for it in cache.spaces),
            0 if disk is None else disk.pool.capacity_bytes,
            0 if disk is None else disk.pool.taken_bytes,
            used[:LINKS_SHOWN],
            self._hot,
        )

    def links(self, now: float) -> list[dict[str, Any]]:
        """Every peer and transport that was used, for people."""
        with self.tier.lock:
            peers = self.tier.peers.report(now)
            sums: Counter[tuple[int, str]] = Counter({key: it.size_bytes for key, it in self.tier.sums.items()})
        used = [(it, path) for it in peers for path in (_of_host(it.paths) or [None])]
        return [_link(it, path, sums) for it, path in used]

    def drain(self, now: float, *, begins: bool) -> dict[str, Any]:
        """Have the others pull what only this node holds, or say how far that is."""
        if begins:
            self.draining = True
            self.orders.begin_drain(self.announcing.number, now)
            self._hurry()
        progress = self.orders.drained()
        if progress is None:
            stuck = "it was not begun" if not self.draining else "" if self._has_takers() else NO_TAKERS
            return {"draining": self.draining, "done": False, "left_bytes": 0, "safe_bytes": 0, "stuck": stuck}
        stuck = ""
        if not self._has_takers():
            stuck = NO_TAKERS
        elif progress.over and progress.lost_bytes:
            stuck = "the other nodes have no room for it"
        return {
            "draining": True,
            "done": progress.over and not progress.lost_bytes,
            "left_bytes": progress.open_bytes + progress.lost_bytes,
            "safe_bytes": progress.safe_bytes,
            "stuck": stuck,
        }

    def _has_takers(self) -> bool:
        return any(it.takes for it in self.rooms())

    def status(self, now: float) -> dict[str, Any]:
        """The cluster as this node sees it: JSON-able, no keys."""
        served = self._served
        assert served is not None
        exports = served.exports.sums
        return {
            "name": self.member.name,
            "cluster": self.config.cluster,
            "number": self.announcing.number,
            "address": self.member.address,
            "members": len(self.tier.members()) + 1,
            "standing": (Standing.DRAINING if self.draining else Standing.SERVING).value,
            "directory": {
                "well": served.membership.is_well and self.tier.directory_is_well,
                "trouble": served.membership.trouble,
                "standpoint": self.announcing.standpoint.value,
                "settled": self.announcing.is_settled,
                "queued": len(self.announcing),
                "walks": self.announcing.walks,
                "located": len(self.tier.locations),
            },
            "peers": self.links(now),
            "corrupt_chunks": self.tier.corrupt,
            "served": {
                "chunks": exports.chunks,
                "bytes": exports.size_bytes,
                "missing": exports.missing,
                "from_disk": exports.from_disk,
                "late": exports.late,
            },
            "server": served.server.stats(),
            "orders": served.orders.status(),
        }


def _pong(peer: str, body: bytes, until_s: float) -> bytes:
    """Somebody wants to know whether we answer."""
    return b""


def _of_host(paths: Sequence[PathReport]) -> list[PathReport | None]:
    return [it for it in paths if it.tier is Tier.HOST and (it.reads or it.failures)]


def _link(it: PeerReport, path: PathReport | None, sums: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    states = [it.health, *([] if path is None else [path.health])]
    return {
        "number": it.number,
        "name": it.name,
        "health": max(states, key=[Health.WELL, Health.PROBING, Health.SICK].index).value,
        "transport": "-" if path is None else path.transport,
        "latency_s": None if path is None else path.latency_s,
        "bytes_s": None if path is None else path.bytes_s,
        "read_bytes": 0 if path is None else sums[it.number, path.transport],
        "in_flight_bytes": it.reading_bytes,
        "hedged": it.hedges,
    }


def default_name(address: str) -> str:
    """A node's name if it was given none: the same after a restart on the same host and socket."""
    return f"{socket.gethostname()[:40]}-{sha256((host_id() + address).encode()).hexdigest()[:8]}"
