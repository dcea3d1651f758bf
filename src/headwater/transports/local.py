"""Peers in this very process: a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Exports, Item, Lent
from headwater.transports.payloads import checksum
from headwater.types import Member, Outcome


class Local:
    """Moves to and from one exporter of this process; with `me`, only for who asks for exactly that life of it."""

    name = "local"

    def __init__(self, exports: Exports, me: Callable[[], Member] | Member | None = None) -> None:
        self._exports, self._me = exports, me

    def connect(self, peer: Member, until_s: float) -> LocalLink:
        """See `ports.Transport`."""
        me = self._me() if callable(self._me) else self._me
        if me is not None and (me.name, me.epoch) != (peer.name, peer.epoch):
            expected = f"{peer.name} in its life {peer.epoch}"
            raise RefusedError("member", expected, "another", "look up in the directory who is there now")
        return LocalLink(peer, self._exports, (me or peer).name)

    def close(self) -> None:
        """See `ports.Transport`."""


class LocalLink:
    """See `ports.Link`."""

    def __init__(self, peer: Member, exports: Exports, asker: str) -> None:
        self.peer = peer
        self._exports, self._asker = exports, asker
        self._ended = False

    def read(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        self._check(until_s)
        try:
            loan = self._exports.lend(self._asker, realm, [it.name for it in items], until_s)
        except UnavailableError:
            return [Outcome.FAILED] * len(items)
        outcomes = [Outcome.FAILED] * len(items)
        done = [False] * len(items)
        try:
            for index, (part, item) in enumerate(zip(loan.parts, items, strict=True)):
                outcomes[index] = self._copy(part, item, until_s, reads=True)
            if time.monotonic() <= loan.deadline_s:
                done = [it is Outcome.DONE for it in outcomes]
            else:
                outcomes = [Outcome.FAILED if it is Outcome.DONE else it for it in outcomes]
        finally:
            loan.give_back(done, [None] * len(items))
        return outcomes

    def write(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        self._check(until_s)
        names, sizes = [it.name for it in items], [len(it.memory) for it in items]
        try:
            loan = self._exports.accept(self._asker, realm, names, sizes, until_s)
        except UnavailableError:
            return [Outcome.FAILED] * len(items)
        outcomes = [Outcome.FAILED] * len(items)
        done = [False] * len(items)
        try:
            for index, (part, item) in enumerate(zip(loan.parts, items, strict=True)):
                outcomes[index] = self._copy(part, item, min(until_s, loan.deadline_s), reads=False)
            done = [it is Outcome.DONE for it in outcomes]
        finally:
            sums = [checksum(it.memory) if mark else None for it, mark in zip(items, done, strict=True)]
            answers = loan.give_back(done, sums)
        return [answer if mark else it for it, answer, mark in zip(outcomes, answers, done, strict=True)]

    def ask(self, topic: str, body: bytes, until_s: float) -> bytes:
        """See `ports.Link`."""
        self._check(until_s)
        return self._exports.told(self._asker, topic, body, until_s)

    def moved_bytes(self) -> int:
        """See `ports.Link`."""
        return 0

    def abort(self) -> None:
        """See `ports.Link`."""
        self._ended = True

    def close(self) -> None:
        """See `ports.Link`."""
        self._ended = True

    def _copy(self, part: Lent | Outcome, item: Item, until_s: float, *, reads: bool) -> Outcome:
        if isinstance(part, Outcome):
            return part
        if len(part.memory) != len(item.memory):
            return Outcome.FOREIGN
        self._check(until_s)
        target, source = (item.memory, part.memory) if reads else (part.memory, item.memory)
        np.copyto(target, source)
        return Outcome.DONE

    def _check(self, until_s: float) -> None:
        if self._ended:
            raise UnavailableError(f"the link to {self.peer.name} was ended here")
        if time.monotonic() >= until_s:
            self._ended = True
            raise UnavailableError(f"{self.peer.name} did not answer in time")
