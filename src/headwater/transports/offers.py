"""What a process tells its peers about its memory, for transports that go there themselves; the rest of its exports is
as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwater.ports import Exports, Loan, Memory
from headwater.transports import cma


class Describer(Protocol):
    """Whoever answers one topic: NIXL's agent."""

    topic: str

    def describe(self, peer: str, body: bytes, regions: Sequence[Memory], until_s: float) -> bytes:
        """The answer. Raises RefusedError, UnavailableError."""


class Offers:
    """Exports that also answer the transports' own topics; what a server is given in place of the bare ones."""

    def __init__(self, exports: Exports, describers: Sequence[Describer] = ()) -> None:
        self._exports = exports
        self._describers = {it.topic: it for it in describers}
        self._probe = cma.Probe()

    def regions(self) -> Sequence[Memory]:
        """See `ports.Exports`."""
        return self._exports.regions()

    def lend(self, peer: str, realm: bytes, names: Sequence[bytes], until_s: float) -> Loan:
        """See `ports.Exports`."""
        return self._exports.lend(peer, realm, names, until_s)

    def accept(self, peer: str, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float) -> Loan:
        """See `ports.Exports`."""
        return self._exports.accept(peer, realm, names, sizes, until_s)

    def told(self, peer: str, topic: str, body: bytes, until_s: float) -> bytes:
        """See `ports.Exports`."""
        if topic == cma.TOPIC:
            return self._probe.places(self._exports.regions())
        if topic == cma.PROBE_TOPIC:
            return self._probe.places(())
        if describer := self._describers.get(topic):
            return describer.describe(peer, body, self._exports.regions(), until_s)
        return self._exports.told(peer, topic, body, until_s)
