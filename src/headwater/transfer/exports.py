"""What an engine lends: its segments by number, offset and length, as far as each may be read or written."""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headwater.errors import RefusedError
from headwater.ports import Bytes, Lent, Loan, Memory
from headwater.transfer.claims import Claim, Claims, parse_mark
from headwater.transfer.inbox import Inbox, Notification
from headwater.transports.memory_exports import MemoryExports, RegionLoan
from headwater.transports.nixl_agent import TOPIC, Agent
from headwater.transports.payloads import checksum
from headwater.types import Outcome

REALM = b"headwater.transfer"
NOTE = "note/"
SEGMENTS = "segments"
_number = struct.Struct("<I")
_note = struct.Struct("<QQ")
TOPIC_CHARS_MAX = 48
BODY_BYTES_MAX = 1 << 20
CHECKSUMS_MAX = 65_536
RECENT = 4096
"""So many notifications of all peers are remembered, so that one that was sent twice comes once."""


def encode_note(epoch: int, serial: int, body: bytes) -> bytes:
    """A notification: the sender's life, its number there, the body."""
    return _note.pack(epoch, serial) + body


@dataclass(slots=True)
class EngineLoan:
    """See `ports.Loan`."""

    loan: RegionLoan
    parts: Sequence[Lent | Outcome]
    claims: Claims | None = None
    claim: Claim | None = None
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.loan.deadline_s

    def give_back(self, done: Sequence[bool], checksums: Sequence[int | None]) -> list[Outcome]:
        """See `ports.Loan`."""
        try:
            return self.loan.give_back(done, checksums)
        finally:
            if self.claims is not None and self.claim is not None:
                self.claims.end(self.claim)


class EngineExports:
    """See `ports.Exports`."""

    def __init__(self, inbox: Inbox, describe: Callable[[], bytes], loan_s: float) -> None:
        self._memory = MemoryExports(REALM, loan_s)
        self._inbox, self._describe = inbox, describe
        self._unreadable: set[int] = set()
        self._immutable: set[int] = set()
        self._checksums: OrderedDict[bytes, int] = OrderedDict()
        """Of things in immutable memory, by name."""
        self._recent: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self._lock = threading.Lock()
        self._claims = Claims()

    @property
    def loans(self) -> int:
        """How many requests of peers are under way."""
        return self._memory.loans

    def add(
        self, memory: Bytes, descriptor: int | None, *, readable: bool, writable: bool, immutable: bool = False
    ) -> int:
        """See `MemoryExports.add`."""
        number = self._memory.add(memory, descriptor, writable=writable)
        if immutable:
            self._immutable.add(number)
        if not readable:
            self._unreadable.add(number)
        return number

    def remove(self, segment: int, until_s: float) -> None:
        """See `MemoryExports.remove`."""
        self._memory.remove(segment, until_s)
        self._unreadable.discard(segment)
        self._immutable.discard(segment)

    def regions(self) -> Sequence[Memory]:
        """See `ports.Exports`."""
        return self._memory.regions()

    def lend(self, peer: str, realm: bytes, names: Sequence[bytes], until_s: float) -> Loan:
        """See `ports.Exports`."""
        if not self._unreadable and not self._immutable:
            return self._memory.lend(peer, realm, names, until_s)
        hidden = {at for at, name in enumerate(names) if self._is_hidden(name)} if self._unreadable else set()
        loan = self._memory.lend(peer, realm, [b"" if at in hidden else it for at, it in enumerate(names)], until_s)
        parts = [Outcome.REFUSED if at in hidden else it for at, it in enumerate(loan.parts)]
        if self._immutable:
            try:
                parts = [self._summed(name, it) for name, it in zip(names, parts, strict=True)]
            except BaseException:
                loan.give_back([False] * len(parts), [None] * len(parts))
                raise
        return EngineLoan(loan, parts)

    def accept(self, peer: str, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float) -> Loan:
        """See `ports.Exports`. The realm's end tells which request of its sender this is; see `claims`."""
        mark = parse_mark(realm[len(REALM) :]) if realm.startswith(REALM) else None
        claim = self._claims.take(peer, mark, names, until_s)
        try:
            loan = self._memory.accept(peer, realm if mark is None else REALM, names, sizes, until_s)
        except BaseException:
            self._claims.end(claim)
            raise
        return EngineLoan(loan, loan.parts, self._claims, claim)

    def told(self, peer: str, topic: str, body: bytes, until_s: float) -> bytes:
        """See `ports.Exports`."""
        if topic == SEGMENTS:
            return self._describe()
        if not topic.startswith(NOTE):
            raise RefusedError("topic", f"{SEGMENTS} or {NOTE}…", topic, "ask for what is known")
        if len(body) < _note.size:
            raise RefusedError("body", f"at least {_note.size} bytes", f"{len(body)}", "send it with Engine.notify")
        if len(body) > _note.size + BODY_BYTES_MAX or len(topic) > len(NOTE) + TOPIC_CHARS_MAX:
            given = f"{len(body) - _note.size} bytes about {len(topic) - len(NOTE)} characters"
            expected = f"at most {BODY_BYTES_MAX} bytes, and {TOPIC_CHARS_MAX} characters of topic"
            raise RefusedError("body", expected, given, "send it with Engine.notify")
        name = (peer, *_note.unpack_from(body))
        with self._lock:
            if name not in self._recent:
                self._inbox.put(Notification(peer, topic.removeprefix(NOTE), bytes(body[_note.size :])))
                self._recent[name] = None
                if len(self._recent) > RECENT:
                    self._recent.popitem(last=False)
        return b""

    def _summed(self, name: bytes, part: Lent | Outcome) -> Lent | Outcome:
        """With its checksum, which is computed once, if it is immutable."""
        if isinstance(part, Outcome) or _number.unpack_from(name)[0] not in self._immutable:
            return part
        found = self._checksums.get(name)
        if found is None:
            found = checksum(part.memory)
            with self._lock:
                self._checksums[name] = found
                if len(self._checksums) > CHECKSUMS_MAX:
                    self._checksums.popitem(last=False)
        return Lent(part.memory, part.extent, found)

    def _is_hidden(self, name: bytes) -> bool:
        return len(name) >= _number.size and _number.unpack_from(name)[0] in self._unreadable


class ExportedToNixl:
    """What has the registered memory, and no other, registered with NIXL's agent, too; see `offers.Describer`."""

    topic = TOPIC

    def __init__(self, agent: Agent, exports: EngineExports) -> None:
        """`agent` stays the caller's."""
        self.agent, self._exports = agent, exports
        self._lock = threading.Lock()

    def describe(self, peer: str, body: bytes, regions: Sequence[Memory], until_s: float) -> bytes:
        """See `offers.Describer`."""
        with self._lock:  # with the regions of now: those that were given may have left
            return self.agent.describe(peer, body, self._exports.regions(), until_s)

    def update(self) -> None:
        """Memory has left. Raises UnavailableError if NIXL fails, or was closed."""
        with self._lock:
            self.agent.export(self._exports.regions())
