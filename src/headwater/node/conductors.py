"""Conductors of other hosts: over the peers' listener they ask for what one of this host asks for over the socket, to
be told what the node holds and to have a prompt brought up.

Theory of operation. Who is connected there has proven that it is of this cluster, and has a thread that waits for it:

    thread   a letter ─► does its version fit? ─► an errand for the loop ─► waits
    loop     Watch       asked of `watching` for this peer's session, whose next answer goes to the thread
             Prefetch    granted at once
             tick        a session that has not asked for `FORGET_S` is over: the loop hears of no connection's end
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headwater.errors import ProtocolError, RefusedError
from headwater.node.errands import Answer, Errands
from headwater.node.messages import PROTOCOL, UNDECODABLE, Letter, Prefetch, Reply, Watch, Watched, body_of
from headwater.node.watching import Watching
from headwater.version import VERSION

TOPIC = "conductor"
FORGET_S = 5.0
"""Who watches asks again as soon as it was answered."""
MOST_SESSION_BYTES = 32

_letters = msgspec.msgpack.Decoder(Letter)
_requests: msgspec.msgpack.Decoder[Watch | Prefetch] = msgspec.msgpack.Decoder(Watch | Prefetch)


class Remote(NamedTuple):
    """Who watches: a member by its name, and what it calls this watch."""

    peer: str
    session: bytes


@dataclass(slots=True)
class Asked:
    """What a session asked last."""

    answer: Answer[bytes]
    heard_s: float
    """When it asked, or was answered."""


class Conductors:
    """All of them; `told` is for the threads of connections, the rest for the node's loop."""

    def __init__(self, watching: Watching, errands: Errands, grant: Callable[[Prefetch], Reply]) -> None:
        self._watching, self._errands, self._grant = watching, errands, grant
        self._asked: dict[Remote, Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def told(self, peer: str, body: bytes, until_s: float) -> bytes:
        """A letter's answer. Raises RefusedError, UnavailableError; ProtocolError for what is no letter."""
        session, request = _read(body)

        def begin(now: float, answer: Answer[bytes]) -> None:
            if isinstance(request, Watch):
                self._watch(Remote(peer, session), request, answer, now)
            else:
                answer.give(body_of(self._grant(request)))

        return self._errands.ask(begin, until_s)

    def tell(self, remote: Remote, watched: Watched, now: float) -> None:
        """What `watching` has for one of them. If it has gone meanwhile it asks with other numbers next time."""
        it = self._asked[remote]
        it.heard_s = now
        it.answer.give(body_of(watched))

    def tick(self, now: float) -> None:
        """Forget those that are gone."""
        for remote in [it for it, asked in self._asked.items() if now - asked.heard_s > FORGET_S]:
            if not self._watching.waits(remote):
                del self._asked[remote]
                self._watching.left(remote)

    def _watch(self, remote: Remote, request: Watch, answer: Answer[bytes], now: float) -> None:
        self._watching.ask(remote, request, now)
        self._asked[remote] = Asked(answer, now)


def _read(body: bytes) -> tuple[bytes, Watch | Prefetch]:
    """Whose it is and what it wants."""
    try:
        letter = _letters.decode(body)
        if letter.protocol != PROTOCOL:
            raise RefusedError(
                "protocol",
                f"{PROTOCOL} (headwater {VERSION})",
                f"{letter.protocol} (headwater {letter.version})",
                "install the same headwater version on both sides",
            )
        request = _requests.decode(letter.request)
    except UNDECODABLE as error:
        raise ProtocolError(f"no letter of a Conductor: {type(error).__name__}") from None
    if not 0 < len(letter.session) <= MOST_SESSION_BYTES:
        raise ProtocolError(f"a session of {len(letter.session)} bytes")
    return letter.session, request
