"""The nodes of the Conductor's cluster, as the directory lists them: who is there is asked now and then.

Theory of operation. One task, and one thread for the calls, which block:

    list ─► for each name its youngest life    new: `joined`    another life or address: `left`, `joined`
       ▲                                       not listed, and `is_up` says no: `left`
       └──── pause, 2 to 10 s ◄── the directory is away: nothing changes ◄┘

A directory that comes back empty lists nobody for a moment: whoever still answers stays. Nodes that the fleet file
names by their sockets are watched there and left out here. What is listed proves nothing: a member is whoever proves
it when it is connected to (`lines`). A look that fails by an error of ours is logged, and the next one is taken.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from headwater.conductor.events.errands import NodesErrands
from headwater.conductor.events.lines import by_peers
from headwater.conductor.events.sources import Sources
from headwater.conductor.registry import Roster
from headwater.conductor.sight import State
from headwater.directory.open import open_directory
from headwater.errors import HeadwaterError, RefusedError, UnavailableError
from headwater.fleetfile.model import FleetFile, MembersSpec
from headwater.transports.credentials import load_credentials
from headwater.types import Listed, Member

log = logging.getLogger(__name__)

PERIOD_S, MEMBER_S, PERIOD_MOST_S = 2.0, 0.05, 10.0
"""How often the list is read, and so long for each member at the least: it comes with what each reports."""
CALL_S = 1.0
MEMBERS_MAX = 512
"""Nodes that are watched; each worker has a connection to every one."""


class Directory(Protocol):
    """Of `ports.Directory`, what is needed here."""

    def members(self, until_s: float) -> Sequence[Listed]:
        """Who is there. Raises UnavailableError."""

    def close(self) -> None:
        """End its connections."""


class Users(Protocol):
    """Who wants to know; all in the loop."""

    def joined(self, member: Member) -> None:
        """A node of this name is there, or another life of it than before. Raises RefusedError if it is left out."""

    def left(self, name: str) -> None:
        """It is not, or this life of it is over."""

    def is_up(self, name: str) -> bool:
        """Whether it answers to us, so that it is there whatever is said."""

    def is_ours(self, name: str) -> bool:
        """Whether it is a node that we know better than by the directory, and that is to be left out."""

    def looked(self, names: Collection[str]) -> None:
        """These are listed now, or still answer, whether or not they are left out."""


class Members:
    """Who is there now. `start` and `close` are called in the running loop."""

    def __init__(self, directory: Directory, users: Users) -> None:
        """Owns the directory."""
        self._directory, self._users = directory, users
        self._thread = ThreadPoolExecutor(1, "headwater-members")
        self._task: asyncio.Task[None] | None = None
        self._known: dict[str, Member] = {}
        self._count = 0
        self.trouble = ""
        self.answers = 0

    def __repr__(self) -> str:
        return f"Members({len(self._known)}, {self.trouble or 'well'})"

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.get_running_loop().create_task(self._look_on(), name="headwater-members")

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        # Connections first: a call that is under way fails then, or at its deadline.
        self._directory.close()
        await asyncio.to_thread(self._thread.shutdown)

    def state(self) -> dict[str, object]:
        """For people."""
        up = bool(self.answers) and not self.trouble
        return {"up": up, "trouble": self.trouble, "answers": self.answers, "members": len(self._known)}

    async def _look_on(self) -> None:
        while True:
            (found,) = await asyncio.gather(self._look(), return_exceptions=True)
            error = found if isinstance(found, BaseException) else None
            trouble = found if isinstance(found, str) else f"{type(found).__name__}: see the log"
            if trouble and trouble != self.trouble:
                log.warning("nodes of the cluster: %s", trouble, exc_info=error)
            self.trouble = trouble
            await asyncio.sleep(min(max(PERIOD_S, self._count * MEMBER_S), PERIOD_MOST_S))

    async def _look(self) -> str:
        """One look; what is wrong."""
        try:
            listed = await asyncio.get_running_loop().run_in_executor(self._thread, self._list)
        except HeadwaterError as error:
            return str(error)
        self.answers += 1
        refusal = self._take(listed)
        if self._count > MEMBERS_MAX:
            return f"{self._count} nodes are listed; {MEMBERS_MAX} of them are watched"
        return refusal

    def _list(self) -> Sequence[Listed]:
        try:
            return self._directory.members(time.monotonic() + CALL_S)
        except OSError as error:  # out of descriptors, say
            raise UnavailableError(f"the directory: {error}") from None

    def _take(self, listed: Sequence[Listed]) -> str:
        """Tell who came and who went; why one that came is left out."""
        users, known, refusal = self._users, self._known, ""
        youngest: dict[str, Member] = {}
        for member in (it.member for it in listed if not users.is_ours(it.member.name)):
            if member.name not in youngest or member.epoch > youngest[member.name].epoch:
                youngest[member.name] = member
        self._count = len(youngest)
        for name, before in list(known.items()):
            now = youngest.get(name)
            if now is None:
                ends = users.is_ours(name) or not users.is_up(name)
            else:
                ends = (now.epoch, now.address) != (before.epoch, before.address)
            if ends:
                del known[name]
                users.left(name)
        for name, member in youngest.items():
            if name not in known and len(known) < MEMBERS_MAX:
                try:
                    users.joined(member)
                except RefusedError as error:
                    refusal = f"some are left out: {error}"
                else:
                    known[name] = member
        users.looked({it.member.name for it in listed} | known.keys())
        return refusal


class ClusterNodes:
    """The nodes that the directory lists, watched and asked for errands as those of this host are. Made and closed in
    the running loop."""

    def __init__(
        self, fleet: FleetFile, spec: MembersSpec, roster: Roster, sources: Sources, errands: NodesErrands
    ) -> None:
        """Begins at once. Raises ConfigError for credentials that cannot be read."""
        assert fleet.directory is not None, "the fleet file was checked"
        files = (spec.token_file, spec.tls_cert, spec.tls_key, spec.tls_ca)
        self._credentials = load_credentials(*(it or "" for it in files))
        self._me = Member(spec.name, int.from_bytes(os.urandom(4)), "")
        self._cluster, self._named = fleet.cluster, {it.name for it in fleet.nodes}
        self._roster, self._sources, self._errands = roster, sources, errands
        self._unlisted: dict[str, State] = {}
        """By their names in the state."""
        self.members = Members(open_directory(fleet.directory, fleet.cluster), self)
        self.members.start()

    def __repr__(self) -> str:
        return f"ClusterNodes({self.members!r})"

    async def close(self) -> None:
        """Look no more; the nodes are their users' to close."""
        await self.members.close()

    def joined(self, member: Member) -> None:
        """See `Users`."""
        number = self._roster.node(member.name)
        dial = by_peers(self._me, member, self._cluster, self._credentials)
        self._sources.member_joined(number, member.name, dial)
        self._errands.joined(number, dial)

    def left(self, name: str) -> None:
        """See `Users`."""
        number = self._roster.known_node(name)
        if number is not None:
            self._sources.member_left(number, name)
            self._errands.left(number)
            self._roster.node_left(name)

    def is_up(self, name: str) -> bool:
        """See `Users`."""
        number = self._roster.known_node(name)
        return number is not None and self._sources.is_up(number)

    def is_ours(self, name: str) -> bool:
        """See `Users`: the file has its socket, be it by another name."""
        return name in self._named or self._sources.tells(name)

    def looked(self, names: Collection[str]) -> None:
        """See `Users`: an instance may be said to be on a node that is not there, or that the file names otherwise."""
        rows, before = self._sources.rows, self._unlisted
        for key in before:
            if rows.get(key) is before[key]:
                del rows[key]
        self._unlisted = {}
        for number in self._roster.instances():
            spec = self._roster.spec(number)
            if spec.node is None or spec.node in self._named:
                continue
            if self._sources.tells(spec.node):
                trouble = "the file's nodes have it by another name"
            elif spec.node not in names:
                trouble = "no such node is listed"
            else:
                continue
            said = {"instance": spec.name, "up": False, "trouble": trouble, "answers": 0}
            rows[f"node:{spec.node}"] = self._unlisted[f"node:{spec.node}"] = partial(dict, said)
