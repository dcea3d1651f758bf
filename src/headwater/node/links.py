"""Open links to peers, by life and transport: one thread on each at a time, made when they are needed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Link, Transport
from headwater.types import Member

IDLE_MAX = 64
"""Idle links kept in all; the one that was idle for longest is closed first."""


@dataclass(slots=True)
class Taken:
    """A link in use. `used_before` says that it was idle: the peer may have closed it meanwhile, which is no sign that
    it does not work."""

    link: Link
    used_before: bool


class LinkPool:
    """All of a node's links to its peers."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        """Takes ownership of the transports, by name."""
        self._transports = dict(transports)
        self._lock = threading.Lock()
        self._idled = threading.Condition(self._lock)
        self._idle: OrderedDict[int, tuple[int, str, Link]] = OrderedDict()
        self._busy: dict[int, tuple[int, Link]] = {}
        self._next = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"LinkPool({len(self._busy)} in use, {len(self._idle)} idle)"

    @property
    def names(self) -> tuple[str, ...]:
        """The transports that this node has."""
        return tuple(self._transports)

    @contextmanager
    def one(self, number: int, peer: Member, transport: str, until_s: float, *, fresh: bool = False) -> Iterator[Taken]:
        """A link to a peer for this block; with `fresh`, a new one. Raises what `Transport.connect` does.

        After UnavailableError or any other error but RefusedError the link is closed.
        """
        taken = self._take_idle(number, transport, fresh=fresh)
        if taken is None:
            try:
                taken = Taken(self._transports[transport].connect(peer, until_s), used_before=False)
            except OSError as error:  # out of descriptors, say
                raise UnavailableError(f"{peer.name}: {error}") from error
        with self._lock:
            closed = self._closed
            self._next += 1
            token = self._next
            if not closed:
                self._busy[token] = number, taken.link
        if closed:
            taken.link.close()
            raise UnavailableError("the node is ending")
        good = False
        try:
            yield taken
            good = True
        except RefusedError:
            good = True
            raise
        finally:
            self._give(token, number, transport, taken.link, good)

    def abort(self, numbers: Collection[int]) -> None:
        """End what is under way with these peers, as soon as that can be."""
        with self._lock:
            links = [link for number, link in self._busy.values() if number in numbers]
        for it in links:
            it.abort()

    def renumber(self, number: int, anew: int) -> None:
        """A life goes on under another number: so do its idle links, and what is under way goes on."""
        with self._lock:
            for token, (known, transport, link) in self._idle.items():
                if known == number:
                    self._idle[token] = anew, transport, link

    def forget(self, numbers: Collection[int]) -> None:
        """These lives are over: their idle links are closed, and what is under way with them ends."""
        with self._lock:
            gone = [token for token, (number, _, _) in self._idle.items() if number in numbers]
            links = [self._idle.pop(token)[2] for token in gone]
        for it in links:
            it.close()
        self.abort(numbers)

    def close(self, until_s: float = 0.0) -> bool:
        """Close all; what is in use is aborted, and waited for until then; whether nothing is in use any more."""
        with self._lock:
            self._closed = True
            idle = [link for _, _, link in self._idle.values()]
            self._idle.clear()
            busy = [link for _, link in self._busy.values()]
        for it in busy:
            it.abort()
        for it in idle:
            it.close()
        with self._idled:
            return self._idled.wait_for(lambda: not self._busy, max(until_s - time.monotonic(), 0.0))

    def close_transports(self) -> None:
        """Let go of what links share; after `close`, once no link is in use."""
        for it in self._transports.values():
            it.close()

    def _take_idle(self, number: int, transport: str, *, fresh: bool) -> Taken | None:
        with self._lock:
            if self._closed:
                raise UnavailableError("the node is ending")
            if fresh:
                return None
            for token in reversed(self._idle):
                found_number, found_transport, link = self._idle[token]
                if (found_number, found_transport) == (number, transport):
                    del self._idle[token]
                    return Taken(link, used_before=True)
        return None

    def _give(self, token: int, number: int, transport: str, link: Link, good: bool) -> None:
        surplus = [link]
        with self._lock:
            del self._busy[token]
            self._idled.notify_all()
            if good and not self._closed:
                self._idle[token] = number, transport, link
                surplus = [self._idle.popitem(last=False)[1][2]] if len(self._idle) > IDLE_MAX else []
        for it in surplus:
            it.close()
