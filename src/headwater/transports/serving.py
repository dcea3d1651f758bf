"""One accepted connection: who it is, and then its requests, one after another, in a thread of its own.

Things that are lent for the time of one request are given back when it is over, however it ends. Loans that the peer
uses by itself (LEND, ACCEPT) end with what it says, those to be read also with their deadline, all of them with the
connection: nothing may be written where a peer may still write, and a peer that is gone writes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Exports, Lent, Loan, Memory
from headwater.transports import wire
from headwater.transports.handshake import Guest
from headwater.transports.payloads import Sums, checksum, runs, send_payloads
from headwater.transports.stream import Buffer, Stream
from headwater.transports.wire import Batch, Kind
from headwater.types import Outcome

TICK_S = 0.5
"""How often an idle connection looks whether loans are over."""
IDLE_S = 60.0
"""How long a connection without loans may be idle."""
FRAME_S = 5.0
"""How long the rest of a frame may take once it has begun."""
REPLY_S = 5.0
MOST_LOANS = 1024
MOST_DRAINED = 64 << 20
"""Bytes that nobody wants and that are received all the same, so that the connection stays good."""
MOST_DESCRIPTORS = 250


@dataclass(slots=True)
class Counters:
    """What one connection, or all of them, did."""

    requests: int = 0
    lent: int = 0
    given_back: int = 0
    abandoned: int = 0
    """Loans that ended with their connection or their deadline, not by the peer's word."""
    late: int = 0
    corrupt: int = 0
    payload_in: int = 0
    payload_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, other: Counters) -> None:
        """Take another's sums in."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Lending:
    """A loan that a peer uses by itself."""

    loan: Loan
    sizes: Sequence[int]
    writes: bool


@dataclass(slots=True, eq=False)
class Serving:
    """Serves one peer until its connection ends; `run` is for the connection's thread."""

    stream: Stream
    guest: Guest
    exports: Exports
    counters: Counters = field(default_factory=Counters)
    loans: dict[int, Lending] = field(default_factory=dict)
    _number: int = 0

    def run(self) -> None:
        """Answer requests until the connection ends. Raises UnavailableError (it ended), ProtocolError."""
        try:
            while True:
                asked_s = time.monotonic()
                while not self.stream.wait(TICK_S):
                    now = time.monotonic()
                    self._expire(now)
                    if not self.loans and now - asked_s >= IDLE_S:
                        return  # the peer connects again when it needs to, and others need the place
                kind, body = self.stream.hear(time.monotonic() + FRAME_S)
                serve = self._verbs.get(kind)
                if serve is None:
                    raise self.stream.nonsense(f"{kind.name} is no request")
                self.counters.requests += 1
                if self.loans:
                    self._expire(time.monotonic())
                serve(self, body)
        finally:
            # Shut first: once memory is given back, nothing may come into it any more.
            self.stream.shut()
            for number in list(self.loans):
                self._abandon(number)

    def tally(self) -> Counters:
        """The sums until now."""
        self.counters.bytes_in, self.counters.bytes_out = self.stream.bytes_in, self.stream.bytes_out
        return self.counters

    # ---- payloads over the connection ---------------------------------------------------------------------

    def _read(self, body: memoryview) -> None:
        batch = wire.decode_batch(body)
        until_s = time.monotonic() + batch.budget_s
        loan = self._borrow(batch, until_s, writes=False)
        if isinstance(loan, RefusedError | UnavailableError):
            self._say_no(loan)
            return
        outcomes, there = _sorted(loan.parts, batch.sizes)
        sums: Sequence[int | None] = [it.checksum for it in there]
        done = False
        try:
            head = self.stream.frame(Kind.STATUSES, wire.encode_statuses(outcomes))
            if there:
                sums, late = self._send(head, there, sums, loan.deadline_s, batch.checked, until_s)
                done = not late
            else:
                self.stream.send(head, until_s)
        finally:
            if len(there) == len(outcomes):
                self._give_back(loan, [done] * len(outcomes), sums)
            else:
                rest = iter(sums)
                marks = [done and it is Outcome.DONE for it in outcomes]
                self._give_back(loan, marks, [next(rest) if it is Outcome.DONE else None for it in outcomes])

    def _send(
        self,
        head: Sequence[Buffer],
        there: Sequence[Lent],
        known: Sequence[int | None],
        deadline_s: float,
        checked: bool,
        until_s: float,
    ) -> tuple[Sequence[int | None], bool]:
        memories = [it.memory for it in there]
        found, late = send_payloads(
            self.stream, head, memories, known, checked=checked, deadline_s=deadline_s, until_s=until_s
        )
        self.counters.payload_out += sum(map(len, memories))
        self.counters.late += late
        return found if checked else known, late

    def _write(self, body: memoryview) -> None:
        batch = wire.decode_batch(body)
        until_s = time.monotonic() + batch.budget_s
        loan = self._borrow(batch, until_s, writes=True)
        if isinstance(loan, RefusedError | UnavailableError):
            self._drain(batch.sizes, until_s)
            self._trailer(batch, until_s)
            self._say_no(loan)
            return
        outcomes, there = _sorted(loan.parts, batch.sizes)
        sums: list[int | None] = [None] * len(outcomes)
        verdicts = [False] * len(outcomes)
        try:
            self._fill(batch, outcomes, there, sums, min(until_s, loan.deadline_s))
            expected = self._trailer(batch, until_s)
            self._judge(loan, outcomes, sums, expected)
            verdicts = [it is Outcome.DONE for it in outcomes]
        finally:
            answers = self._give_back(loan, verdicts, sums)
        final = [answer if mark else it for it, answer, mark in zip(outcomes, answers, verdicts, strict=True)]
        self.stream.say(Kind.STATUSES, wire.encode_statuses(final), time.monotonic() + REPLY_S)

    def _fill(
        self, batch: Batch, outcomes: list[Outcome], there: Sequence[Lent], sums: list[int | None], until_s: float
    ) -> None:
        """Receive payloads where they belong, and hash them."""
        rest = iter(there)
        for wanted, stretch in groupby(range(len(outcomes)), lambda index: outcomes[index] is Outcome.DONE):
            indices = list(stretch)
            if not wanted:
                self._drain([batch.sizes[it] for it in indices], until_s)
                continue
            found = Sums()
            for run in runs([next(rest).memory for _ in indices]):
                self.stream.fill(run[0], until_s)
                self.counters.payload_in += sum(map(len, run[0]))
                if batch.checked:
                    found.take(run)
            if batch.checked:
                sums[indices[0] : indices[-1] + 1] = found.found

    def _trailer(self, batch: Batch, until_s: float) -> Sequence[int]:
        count = len(batch.names)
        kind, body = self.stream.hear(until_s, wire.trailer_bytes(count, batch.checked))
        if kind is not Kind.TRAILER:
            raise self.stream.nonsense(f"{kind.name} behind payloads")
        return wire.decode_trailer(body, count, batch.checked)[1]

    def _judge(
        self, loan: Loan, outcomes: list[Outcome], sums: Sequence[int | None], expected: Sequence[int | None]
    ) -> None:
        """Make of DONE what it is: bytes that are not what was sent, or came too late, are not."""
        late = time.monotonic() > loan.deadline_s
        self.counters.late += late
        for index, (outcome, found) in enumerate(zip(outcomes, sums, strict=True)):
            if outcome is not Outcome.DONE:
                continue
            if late:
                outcomes[index] = Outcome.FAILED
            elif found is not None and found != expected[index]:
                outcomes[index] = Outcome.CORRUPT
                self.counters.corrupt += 1

    def _drain(self, sizes: Sequence[int], until_s: float) -> None:
        size = sum(sizes)
        if size > MOST_DRAINED:
            raise UnavailableError(f"{self.stream.name} sends {size} bytes for which there is no room")
        self.stream.drain(size, until_s)

    # ---- loans that the peer uses by itself ---------------------------------------------------------------

    def _lend(self, body: memoryview) -> None:
        self._grant(wire.decode_batch(body), writes=False)

    def _lend_room(self, body: memoryview) -> None:
        self._grant(wire.decode_batch(body), writes=True)

    def _grant(self, batch: Batch, *, writes: bool) -> None:
        if len(self.loans) >= MOST_LOANS:
            self._say_no(UnavailableError(f"{MOST_LOANS} loans are out already"))
            return
        loan = self._borrow(batch, time.monotonic() + batch.budget_s, writes=writes)
        if isinstance(loan, RefusedError | UnavailableError):
            self._say_no(loan)
            return
        self._number += 1
        self.loans[self._number] = Lending(loan, batch.sizes, writes)
        outcomes, there = _sorted(loan.parts, batch.sizes)
        rest = iter(there)
        parts = [next(rest) if it is Outcome.DONE else it for it in outcomes]
        left_s = loan.deadline_s - time.monotonic()
        self.stream.say(Kind.LENT, wire.encode_grant(self._number, left_s, parts), time.monotonic() + REPLY_S)

    def _take_back(self, body: memoryview) -> None:
        number, done = wire.decode_given(body)
        lending = self.loans.get(number)
        if lending is None:  # its deadline was over
            return
        if lending.writes or len(done) != len(lending.loan.parts):
            raise self.stream.nonsense(f"{len(done)} parts of loan {number} come back")
        del self.loans[number]
        self._give_back(lending.loan, done, [None] * len(done))

    def _commit(self, body: memoryview) -> None:
        number, done, claims = wire.decode_commit(body)
        lending = self.loans.get(number)
        if lending is None or not lending.writes or len(done) != len(lending.loan.parts):
            raise self.stream.nonsense(f"{len(done)} parts of loan {number} are committed")
        loan = lending.loan
        outcomes, there = _sorted(loan.parts, lending.sizes)
        rest, more = iter(there), iter(claims)
        sums: list[int | None] = [None] * len(done)
        expected: list[int | None] = [None] * len(done)
        for index, outcome in enumerate(outcomes):
            memory = next(rest).memory if outcome is Outcome.DONE else None
            if done[index] and claims:
                expected[index] = next(more)
            if memory is not None and not done[index]:
                outcomes[index] = Outcome.FAILED
            elif memory is not None and claims:
                sums[index] = checksum(memory)
                self.counters.payload_in += len(memory)
        self._judge(loan, outcomes, sums, expected)
        verdicts = [it is Outcome.DONE for it in outcomes]
        del self.loans[number]
        answers = self._give_back(loan, verdicts, sums)
        final = [answer if mark else it for it, answer, mark in zip(outcomes, answers, verdicts, strict=True)]
        self.stream.say(Kind.STATUSES, wire.encode_statuses(final), time.monotonic() + REPLY_S)

    def _expire(self, now: float) -> None:
        """Loans to be read end with their deadline: who still reads throws away what it gets."""
        for number in [it for it, lending in self.loans.items() if not lending.writes]:
            if now > self.loans[number].loan.deadline_s:
                self._abandon(number)

    def _abandon(self, number: int) -> None:
        loan = self.loans.pop(number).loan
        self.counters.abandoned += 1
        self._give_back(loan, [False] * len(loan.parts), [None] * len(loan.parts))

    # ---- the rest -------------------------------------------------------------------------------------------

    def _regions(self, body: memoryview) -> None:
        asked = wire.decode_regions(body)
        if not self.stream.is_local:
            self._say_no(RefusedError("regions", "a Unix socket", "a network", "read over the connection"))
            return
        regions = self.exports.regions()
        told = [it for it in regions if it.number >= asked.first][:MOST_DESCRIPTORS]
        passed = [_open_anew(it) for it in told]
        descriptors = [it for it in passed if it is not None]
        try:
            marks = [it is not None for it in passed], [it.writable for it in told]
            mapped = wire.Mapped([it.number for it in regions], [len(it.memory) for it in told], *marks)
            message = wire.encode_message(mapped)
            self.stream.say_with(Kind.MAPPED, message, descriptors, time.monotonic() + REPLY_S)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _ask(self, body: memoryview) -> None:
        asked = wire.decode_ask(body)
        until_s = time.monotonic() + min(asked.budget_s, wire.MOST_BUDGET_S)
        if asked.topic.startswith(wire.LOCAL_TOPIC) and not self.stream.is_local:
            self._say_no(RefusedError("topic", "a Unix socket", "a network", "use another transport"))
            return
        try:
            answer = self.exports.told(self.guest.name, asked.topic, asked.body, until_s)
        except (RefusedError, UnavailableError) as error:
            self._say_no(error)
            return
        if len(answer) > wire.MOST_MESSAGE:
            limit, given = f"at most {wire.MOST_MESSAGE} bytes", f"{len(answer)}"
            self._say_no(RefusedError("answer", limit, given, "ask for less at a time"))
            return
        self.stream.say(Kind.ANSWER, answer, time.monotonic() + REPLY_S)

    def _borrow(self, batch: Batch, until_s: float, *, writes: bool) -> Loan | RefusedError | UnavailableError:
        names, peer = batch.names, self.guest.name
        try:
            if writes:
                loan = self.exports.accept(peer, batch.realm, names, batch.sizes, until_s)
            else:
                loan = self.exports.lend(peer, batch.realm, names, until_s)
        except (RefusedError, UnavailableError) as error:
            return error
        self.counters.lent += 1
        return loan

    def _give_back(self, loan: Loan, done: Sequence[bool], sums: Sequence[int | None]) -> list[Outcome]:
        self.counters.given_back += 1
        return loan.give_back(done, sums)

    def _say_no(self, error: RefusedError | UnavailableError) -> None:
        if isinstance(error, RefusedError):
            kind, body = Kind.REFUSED, wire.encode_message(wire.Refused.of(error))
        else:
            kind, body = Kind.BUSY, str(error)[: wire.MOST_TEXT].encode()
        self.stream.say(kind, body, time.monotonic() + REPLY_S)

    _verbs: ClassVar[dict[Kind, Callable[[Serving, memoryview], None]]] = {
        Kind.READ: _read,
        Kind.WRITE: _write,
        Kind.LEND: _lend,
        Kind.ACCEPT: _lend_room,
        Kind.GIVE_BACK: _take_back,
        Kind.COMMIT: _commit,
        Kind.REGIONS: _regions,
        Kind.ASK: _ask,
    }


def _open_anew(region: Memory) -> int | None:
    """A descriptor of the region to be passed on, which the caller closes: one for reading only, unless it may be
    written. None if there is none."""
    if region.descriptor is None:
        return None
    try:
        if region.writable:
            return os.dup(region.descriptor)
        return os.open(f"/proc/self/fd/{region.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # it has gone meanwhile, no descriptors are left, /proc is not there
        return None


def _sorted(parts: Sequence[Lent | Outcome], sizes: Sequence[int]) -> tuple[list[Outcome], list[Lent]]:
    """An outcome for each part, DONE for what is there and has the size asked for; and those that are."""
    whole = [it for it in parts if not isinstance(it, Outcome)]
    if len(whole) == len(parts) == len(sizes) and [len(it.memory) for it in whole] == list(sizes):
        return [Outcome.DONE] * len(whole), whole
    outcomes: list[Outcome] = []
    there: list[Lent] = []
    for part, size in zip(parts, sizes, strict=True):
        if isinstance(part, Outcome):
            outcomes.append(part)
        elif len(part.memory) != size:
            outcomes.append(Outcome.FOREIGN)
        else:
            outcomes.append(Outcome.DONE)
            there.append(part)
    return outcomes, there
