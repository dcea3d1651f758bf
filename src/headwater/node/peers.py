"""What other nodes hold, as a tier below HOST: located in the directory, read from whoever has it, never written to.

Theory of operation. `holds` asks the location cache, and the directory for what is not known or is old. `read` takes
the chunks from as few holders as can be, verified, straight into the slots that the mover has reserved:

    choose ─► for each holder: its transports in turn ─► a link ─► read
                 done                    that chunk is here
                 missing, foreign        the directory was behind: the next replica
                 late, broken, corrupt   the next transport, then the next replica
    nobody left ─► MISSING: one peer that is sick makes no tier sick

The directory being away makes nothing fail: what is known of it goes on being used.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec

from headwater.core.budget import Priority
from headwater.core.health import Breaker, Health
from headwater.core.links import Begun, Peers, Read, Wanted
from headwater.core.locations import Locations
from headwater.errors import HeadwaterError, RefusedError, UnavailableError
from headwater.node.exports import realm_of
from headwater.node.links import LinkPool
from headwater.node.reports import Report, read_report
from headwater.node.stalls import StallWatch
from headwater.node.turns import Turns
from headwater.ports import Directory, Item, Piece
from headwater.types import Identity, Listed, Member, Origin, Outcome, Replica, Standing, Tier, Usage, chunk_name

log = logging.getLogger(__name__)

LOCATE_S = 0.5
"""How long the directory may take to say where a prompt is; later the request computes."""
BUSY_S = 0.02
"""How long to wait for a read of a holder that has as many under way as it may."""
NAMES_MAX = 4096
ANEW_S = 10.0
"""How long a directory that has begun anew may take to hear of everybody."""
THREADS = 8
PROBES_MAX, PROBE_S = 4, 0.3
CLOSE_S = 3.0
ANOTHER = ("member", "cluster")
"""Fields of a refusal that say that somebody else is at that address."""
NOT_SERVED = ("realm", "layout", "names", "namespace")
"""Fields of a refusal that say something of what was asked for; any other says that this transport does not work."""


@dataclass(slots=True)
class PeerSums:
    """What came from one peer, by its number, over one transport."""

    chunks: int = 0
    size_bytes: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)


class PeersTier:
    """The cluster below one node; see `ports.LowerTier`. Calls come from several threads."""

    def __init__(self, directory: Directory, peers: Peers, links: LinkPool, stale: Callable[[], None]) -> None:
        """`stale` is called when something says that the list of members is out of date."""
        self.directory, self.peers, self.links = directory, peers, links
        self.locations = Locations()
        self.lock = threading.Lock()
        """Guards `peers`, `locations` and `sums`."""
        self.sums: dict[tuple[int, str], PeerSums] = {}
        self.corrupt = 0
        """Chunks whose checksum was wrong when they had arrived."""
        self.stale = stale
        self._asking = Breaker(failures=1)
        self.stalls = StallWatch(peers, self.lock)
        self.turns = Turns()
        self.threads = ThreadPoolExecutor(THREADS, "headwater-peers")
        """For requests that are served by several peers at once."""
        self._listed: dict[int, Listed] = {}
        self._own = 0
        self._anew_until_s = 0.0
        self.reports: dict[int, Report] = {}
        """What the members said of themselves with their last beats."""
        self._names: dict[str, int] = {}
        self._complaints: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"PeersTier({self.peers!r}, {self.locations!r})"

    def listed(self, members: Sequence[Listed], own: int) -> None:
        """The directory has told who is there."""
        now = time.monotonic()
        there = {it.number: it for it in members if it.number != own}
        reports = {number: read_report(it.report) for number, it in there.items()}
        with self.lock:
            if own != self._own:
                # The directory has begun anew, and hears of the others one after the other.
                self._anew_until_s = now + ANEW_S if self._own else 0.0
                self._own = own
            gone = self._listed.keys() - there.keys()
            lives = {(it.member.name, it.member.epoch): number for number, it in there.items()}
            names = {name for name, _ in lives}
            renumbered: set[int] = set()
            for number in list(gone):
                member = self._listed[number].member
                # The directory may have lost it and given it another number: it holds what it held.
                anew = lives.get((member.name, member.epoch))
                if anew is not None:
                    self.locations.renumbered(number, anew)
                    self.links.renumber(number, anew)
                    renumbered.add(number)
                elif now < self._anew_until_s and member.name not in names:
                    there[number], reports[number] = self._listed[number], self.reports[number]
                    gone.discard(number)
                else:
                    self.locations.ended((number,))
            self._listed, self.reports = there, reports
            self._names = {it.member.name: number for number, it in there.items()}
            self._complaints = {number: it for number, it in self._complaints.items() if number in there}
            self.peers.renumber(own)
            self.peers.listed(there.values(), now)
            rates = self.peers.rates()
            for key in [it for it in self.sums if it[0] in gone]:
                del self.sums[key]
        self.turns.listed(there.keys(), rates)
        self.links.forget(gone - renumbered)

    def members(self) -> list[Listed]:
        """The other members, as last told."""
        return list(self._listed.values())

    # ---- as a tier ------------------------------------------------------------------------------------

    def holds(self, identities: Sequence[Identity], until_s: float) -> list[bool]:
        """See `LowerTier`."""
        located = self.locate([chunk_name(it.group, it.key) for it in identities], until_s)
        met = {it.number for replicas in located for it in replicas}
        with self.lock:
            now = time.monotonic()
            serving = {number for number in met if self.peers.serves(number, now)}
        return [any(it.number in serving for it in replicas) for replicas in located]

    def number_of(self, name: str) -> int | None:
        """The number of the member of this name."""
        return self._names.get(name)

    def locate_now(self, names: Sequence[bytes], until_s: float) -> list[tuple[Replica, ...]]:
        """The same as the directory says at this moment; raises UnavailableError."""
        return self.directory.locate(names, until_s)

    def locate(self, names: Sequence[bytes], until_s: float) -> list[tuple[Replica, ...]]:
        """Who holds these chunks, ourselves included, as far as known."""
        now = time.monotonic()
        with self.lock:
            if not len(self.peers):
                return [()] * len(names)
            found, ask = self.locations.find(names, now)
            may_ask = bool(ask) and self._asking.allows(now)
        if may_ask:
            self._locate(ask, min(until_s, now + LOCATE_S))
            with self.lock:
                found, _ = self.locations.find(names, now)
        return [it or () for it in found]

    def _locate(self, names: Sequence[bytes], until_s: float) -> None:
        try:
            answers = self.directory.locate(names, until_s)
        except UnavailableError:
            with self.lock:
                self._asking.failed(time.monotonic(), random.random(), unavailable=True)
            return
        with self.lock:
            now = time.monotonic()
            self.locations.merge(names, self._by_members(answers), now, anew=now < self._anew_until_s)
            self._asking.succeeded(now)

    def _by_members(self, answers: Sequence[tuple[Replica, ...]]) -> list[tuple[Replica, ...]]:
        """Answers without the holders that we have not been told of: we ask who they are, and later again."""
        known: dict[int, tuple[Replica, ...]] = {}
        for replicas in answers:
            if id(replicas) not in known:
                there = tuple(it for it in replicas if it.number == self._own or it.number in self.peers)
                known[id(replicas)] = replicas if len(there) == len(replicas) else there
        if any(len(known[id(it)]) < len(it) for it in answers):
            self.stale()
        return [known[id(it)] for it in answers]

    @property
    def directory_is_well(self) -> bool:
        """Whether the directory answered when it was last asked where something is."""
        return self._asking.state is Health.WELL

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        outcomes = [Outcome.MISSING] * len(pieces)
        origins: dict[bytes, list[int]] = {}
        for index, it in enumerate(pieces):
            origins.setdefault(it.identity.origin.root, []).append(index)
        for indices in origins.values():
            _Reading(self, pieces, indices, outcomes, until_s).run()
        return outcomes

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`; nothing is written to peers."""
        return [Outcome.REFUSED] * len(pieces)

    def delete(self, identities: Sequence[Identity], until_s: float) -> None:
        """See `LowerTier`: an operator wants these chunks gone from every node."""
        origins: dict[bytes, list[Identity]] = {}
        for it in identities:
            origins.setdefault(it.origin.root, []).append(it)
        for root, its in origins.items():
            for first in range(0, len(its), NAMES_MAX):
                names = b"".join(chunk_name(it.group, it.key) for it in its[first : first + NAMES_MAX])
                self.tell_all("evict", msgspec.msgpack.encode((root, names)), until_s)

    def clear(self, origin: Origin, until_s: float) -> int:
        """See `LowerTier`: every node deletes what it has of the namespace."""
        # Twice: one that was told first may have read from one that was told last.
        answers = self.tell_all("clear", origin.root, until_s) + self.tell_all("clear", origin.root, until_s)
        try:
            return sum(msgspec.msgpack.decode(it, type=int) for it in answers)
        except (msgspec.MsgspecError, RecursionError):
            return 0

    def usage(self, until_s: float) -> Usage:
        """See `LowerTier`; by the members' own reports."""
        capacity = used = 0
        for it in self.members():
            capacity += it.member.capacity_bytes
            used += (self.reports.get(it.number) or Report()).used_bytes
        return Usage(capacity, used)

    def close(self) -> None:
        """See `LowerTier`: what is under way ends."""
        idle = self.links.close(time.monotonic() + CLOSE_S)
        self.threads.shutdown(wait=idle)
        self.stalls.close()
        if idle:
            self.links.close_transports()
        else:
            log.error("peers: a read does not return; leaving it behind")

    # ---- words ----------------------------------------------------------------------------------------

    def tell(self, number: int, topic: str, body: bytes, until_s: float) -> bytes:
        """Say something to a member; its answer. Raises UnavailableError or RefusedError."""
        with self.lock:
            member = self.peers.member(number)
            names = self.peers.transports(number, Tier.HOST, time.monotonic(), 0)
        trouble: HeadwaterError = UnavailableError(f"member {number} cannot be reached now")
        for name in names if member is not None else ():
            assert member is not None
            for fresh in (False, True):
                try:
                    with self.links.one(number, member, name, until_s, fresh=fresh) as taken:
                        return taken.link.ask(topic, body, until_s)
                except UnavailableError as error:
                    trouble = error
                except RefusedError as error:
                    trouble = error
                    if error.field not in ("user", "tls"):
                        raise
                    break  # this transport is not for us
        raise trouble

    def tell_all(self, topic: str, body: bytes, until_s: float) -> list[bytes]:
        """Say something to every member that is not silent, also behind one that does not answer; raises
        UnavailableError unless all have."""
        answers: list[bytes] = []
        trouble: HeadwaterError | None = None
        numbers = [it.number for it in self.members() if it.standing is not Standing.SILENT]
        for number, done in zip(numbers, self._tell_each(numbers, topic, body, until_s), strict=True):
            if isinstance(done, bytes):
                answers.append(done)
            else:
                log.info("member %d was not told to %s: %s", number, topic, done)
                trouble = done
        if trouble is not None:
            raise UnavailableError(f"not all members could be told to {topic}: {trouble}")
        return answers

    def _tell_each(
        self, numbers: Sequence[int], topic: str, body: bytes, until_s: float
    ) -> list[bytes | HeadwaterError]:
        def one(number: int) -> bytes | HeadwaterError:
            try:
                return self.tell(number, topic, body, until_s)
            except HeadwaterError as error:
                return error

        return list(self.threads.map(one, numbers))

    def probe(self, until_s: float) -> None:
        """Try again those that were sick and are due, so that they are well again before they are needed."""
        with self.lock:
            due = self.peers.probes(time.monotonic())
        for number, name in due[:PROBES_MAX]:
            with self.lock:
                begun = self.peers.began(number, name, Tier.HOST, 0, time.monotonic())
                member = self.peers.member(number)
            if begun is None or member is None:
                continue
            good = False
            try:
                soon_s = min(until_s, time.monotonic() + PROBE_S)
                with self.links.one(number, member, name, soon_s, fresh=True) as taken:
                    taken.link.ask("ping", b"", soon_s)
                good = True
            except HeadwaterError as error:
                log.debug("peer %d over %s is not well yet: %s", number, name, error)
            with self.lock:
                now = time.monotonic()
                if good:
                    self.peers.succeeded(begun, now)
                else:
                    self.peers.failed(begun, now, random.random(), unavailable=True)

    def complain(self, number: int, error: RefusedError) -> None:
        """A member does not serve what it should have."""
        if str(error) != self._complaints.get(number):
            self._complaints[number] = str(error)
            log.warning("member %d refuses: %s", number, error)

    def another_life(self, number: int) -> None:
        """At the address of this member there is somebody else."""
        with self.lock:
            self.peers.left(number)
            self.locations.ended((number,))
        self.links.forget((number,))
        self.stale()

    def count(self, number: int, transport: str, size_bytes: int, outcomes: Sequence[Outcome]) -> None:
        """A read has ended."""
        with self.lock:
            it = self.sums.setdefault((number, transport), PeerSums())
            it.chunks += sum(outcome is Outcome.DONE for outcome in outcomes)
            it.size_bytes += size_bytes
            it.outcomes.update(outcomes)
            self.corrupt += sum(outcome is Outcome.CORRUPT for outcome in outcomes)


class _Reading:
    """One call's way through the holders of its chunks."""

    def __init__(
        self,
        tier: PeersTier,
        pieces: Sequence[Piece],
        indices: Sequence[int],
        outcomes: list[Outcome],
        until_s: float,
    ) -> None:
        """`indices` are the pieces of one namespace; their outcomes are filled in."""
        self._tier, self._outcomes, self._until_s = tier, outcomes, until_s
        self._priority = Priority.REPLICATION if pieces[indices[0]].background else Priority.LOAD
        self._busy = False
        """A holder that is well had as many reads under way as it may."""
        self._items = {at: Item(_name(pieces[at]), pieces[at].memory) for at in indices}
        origin = pieces[indices[0]].identity.origin
        self._realm = realm_of(origin.root, origin.layout)
        self._without: set[int] = set()

    def run(self) -> None:
        """Read what can be had."""
        located = self._tier.locate([it.name for it in self._items.values()], self._until_s)
        left = dict(zip(self._items, located, strict=True))
        while left and time.monotonic() < self._until_s:
            order = list(left)
            wanted = [Wanted(left[at], len(self._items[at].memory)) for at in order]
            with self._tier.lock:
                choice = self._tier.peers.choose(wanted, time.monotonic(), self._without)
            if choice.unknown:
                self._tier.stale()
            if not choice.reads and not choice.busy:
                return
            if not choice.reads or self._busy:
                self._busy = False
                time.sleep(BUSY_S)
                continue
            if len(choice.reads) == 1:
                self._read(choice.reads[0], [order[at] for at in choice.reads[0].chunks], left)
                continue
            self._read_all([(it, [order[at] for at in it.chunks]) for it in choice.reads], left)

    def _read_all(self, reads: Sequence[tuple[Read, list[int]]], left: dict[int, tuple[Replica, ...]]) -> None:
        """Read from several holders at once. Whatever becomes of one, this ends when all have: until then memory may be
        written to."""
        begun: list[Future[None]] = []
        try:
            for it, indices in reads:
                begun.append(self._tier.threads.submit(self._read, it, indices, left))
        finally:
            wait(begun)
        for done in begun:
            done.result()

    def _read(self, read: Read, indices: Sequence[int], left: dict[int, tuple[Replica, ...]]) -> None:
        """Read from one holder: what comes is no longer left; what does not is not its any more."""
        tier, number = self._tier, read.number
        with tier.lock:
            member = tier.peers.member(number)
            now = time.monotonic()
            names = tier.peers.transports(number, read.tier, now, read.size_bytes)
            most_bytes = tier.peers.batch_bytes(number, names[0], read.tier, now) if names else 0
        # What a slow peer is asked for at a time, so that one that does not end soon is seen to have stalled.
        indices = self._first(indices, most_bytes)
        outcomes: list[Outcome] | None = None
        has_others = any(it.number not in (number, *self._without) for at in indices for it in left[at])
        size_bytes = sum(len(self._items[at].memory) for at in indices)
        with tier.turns.one(number, self._priority, size_bytes, self._until_s) as comes:
            for name in names if member is not None and comes else ():
                assert member is not None
                outcomes = self._try(read, member, name, indices, has_others=has_others)
                if outcomes is not None or self._busy or number in self._without:
                    break
                if time.monotonic() >= self._until_s:
                    break
        if outcomes is None:
            if not self._busy:
                self._without.add(number)
            return
        with tier.lock:
            now = time.monotonic()
            for at, outcome in zip(indices, outcomes, strict=True):
                if outcome is Outcome.DONE:
                    self._outcomes[at] = outcome
                    del left[at]
                    continue
                # Nothing of what it has of this chunk is of use to us now.
                left[at] = tuple(it for it in left[at] if it.number != number)
                if outcome in (Outcome.MISSING, Outcome.FOREIGN, Outcome.NEWER):
                    tier.locations.missed(self._items[at].name, number, now)

    def _first(self, indices: Sequence[int], most_bytes: int) -> list[int]:
        """As many of these as are so many bytes together, one at the least."""
        found: list[int] = []
        size_bytes = 0
        for at in indices:
            size_bytes += len(self._items[at].memory)
            if found and size_bytes > most_bytes:
                break
            found.append(at)
        return found

    def _try(
        self, read: Read, member: Member, transport: str, indices: Sequence[int], *, has_others: bool
    ) -> list[Outcome] | None:
        """Read over one transport; None if that did not work."""
        tier = self._tier
        items = [self._items[at] for at in indices]
        size_bytes = sum(len(it.memory) for it in items)
        for fresh in (False, True):
            with tier.lock:
                begun = tier.peers.began(read.number, transport, read.tier, size_bytes, time.monotonic())
            if begun is None:
                self._busy = True
                return None
            used_before = False
            watched = None
            outcomes: list[Outcome] | None = None
            try:
                with tier.links.one(read.number, member, transport, self._until_s, fresh=fresh) as taken:
                    used_before = taken.used_before
                    with tier.stalls.over(begun, taken.link, has_others=has_others) as watched:
                        outcomes = taken.link.read(self._realm, items, self._until_s)
            except (UnavailableError, OSError) as error:
                stalled = watched is not None and watched.stalled
                gave_up = watched is not None and watched.gave_up
                self._failed(begun, error, stalled=stalled, counts=gave_up or not (stalled or used_before))
                if stalled or not used_before:
                    return None
                continue  # the peer had closed an idle link
            except RefusedError as error:
                self._refused(begun, error)
                return [Outcome.REFUSED] * len(items) if error.field in NOT_SERVED else None
            finally:
                if outcomes is None and not begun.over:
                    self._abandon(begun)
            came = sum(len(it.memory) for it, done in zip(items, outcomes, strict=True) if done is Outcome.DONE)
            with tier.lock:
                tier.peers.succeeded(begun, time.monotonic(), came)
            tier.count(read.number, transport, came, outcomes)
            return outcomes
        return None

    def _abandon(self, begun: Begun) -> None:
        """A bug has ended a read; the peer must not be taken for busy for ever."""
        with self._tier.lock:
            self._tier.peers.abandoned(begun, time.monotonic())

    def _failed(self, begun: Begun, error: Exception, *, stalled: bool, counts: bool) -> None:
        log.debug("peer %d over %s: %s", begun.number, begun.transport, error)
        with self._tier.lock:
            now = time.monotonic()
            if counts:
                self._tier.peers.failed(begun, now, random.random(), unavailable=True)
            else:
                self._tier.peers.abandoned(begun, now)
        if stalled:
            self._without.add(begun.number)

    def _refused(self, begun: Begun, error: RefusedError) -> None:
        with self._tier.lock:
            now = time.monotonic()
            if error.field in NOT_SERVED or error.field in ANOTHER:
                self._tier.peers.abandoned(begun, now)
            else:
                self._tier.peers.failed(begun, now, random.random(), unavailable=True)
        if error.field in ANOTHER:
            self._without.add(begun.number)
            self._tier.another_life(begun.number)
        else:
            self._tier.complain(begun.number, error)


def _name(piece: Piece) -> bytes:
    return chunk_name(piece.identity.group, piece.identity.key)
