"""What waits and runs at each instance when several Conductors share a fleet, from three accounts of it.

Theory of operation. The load of an instance is

    own       exact: every request of ours, from when it is routed until it ended
  + others    what the other Conductors said last of theirs
  + drift     what the instance's engine said last, less what own and others made of that moment

A Conductor publishes absolute totals, numbered: a message that is lost, doubled or late changes nothing that the next
one does not repair. Instances that a message does not name have nothing. A Conductor that says bye counts no more at
once, one that says nothing for `ttl_s` then; a new life has a new name.

An engine knows of requests that came past all Conductors, and of those that nobody will end any more. What it says is
of the past: at the moment t it had not yet seen what was on its way. So we keep, for `history_s`, when each change of
our own reached the engine: what was routed, `flight_s` later; what ended, when we saw it end. The drift is the engine's
word less the sum as it was at t, and later changes of the sum go on top of it. What other Conductors routed shortly
before t, and say only after it, counts twice until the engine's next word: at most one message's worth, and too much
rather than too little. Drift is forgotten `ttl_s` after the word that it came from.

Between two messages the others go on. To take their last word for the present would send every Conductor to the same
instances at once, those that were the emptiest, the more of them the longer ago that was. They see what we see, and go
there too: so a policy is given what they said `evened`, filled up from the least by as much as they begin at their pace
in that time, and less as much again. Where little was said, much is left of the differences; after long silence
nothing is, and each evens out its own. The pace is the difference of two of their messages, whatever lies between.

    routed ──► waiting at the prefill instance ──prefilled──► running at the decode instance ──► finished
       progressed: fewer prompt tokens wait, or more KV runs          left: an instance takes all of this with it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, inf
from typing import NamedTuple

from headwater.fleet import Ask, Choice, Instance


class Totals(NamedTuple):
    """The loads of one instance, as the fields of `Instance`."""

    waiting_requests: int = 0
    waiting_tokens: int = 0
    running_requests: int = 0
    running_tokens: int = 0

    def plus(self, other: Totals, sign: int = 1) -> Totals:
        """The sum, or with -1 the difference."""
        return Totals(
            self.waiting_requests + sign * other.waiting_requests,
            self.waiting_tokens + sign * other.waiting_tokens,
            self.running_requests + sign * other.running_requests,
            self.running_tokens + sign * other.running_tokens,
        )


NOTHING = Totals()
PACE_S = 1.0
"""A pace is of about so long: some arrivals at the least, where it matters."""


@dataclass(frozen=True, slots=True)
class Published:
    """What one Conductor says of its own requests. Numbers of instances are the fleet's."""

    conductor: str
    serial: int
    totals: Mapping[int, Totals]
    begun: Totals = NOTHING
    """All that ever began to wait or to run, at all instances together: from two of these follows a pace."""


class _Request:
    __slots__ = ("decode", "prefill", "reached_s", "running", "tokens", "uncached", "waiting")

    def __init__(self, choice: Choice, tokens: int, uncached: int, reached_s: float) -> None:
        self.prefill, self.decode, self.tokens = choice.prefill, choice.decode, tokens
        self.uncached = self.waiting = uncached
        """Prompt tokens that were to be computed, and those that are not computed yet."""
        self.reached_s = reached_s
        """When the engine has it."""
        self.running = 0
        """Its KV; 0 until it is prefilled."""


@dataclass(slots=True)
class _Other:
    serial: int
    heard_s: float
    totals: Mapping[int, Totals]
    begun: Totals
    since_s: float
    """When `begun` was heard."""
    pace: tuple[float, ...] | None = None
    """How much of each has begun a second, lately; None until two messages came."""

    def next(self, message: Published, now: float) -> _Other:
        """After one more message."""
        past_s, begun = now - self.since_s, message.begun.plus(self.begun, -1)
        if past_s <= 0 or min(begun) < 0:  # at once, or it began anew
            since_s = self.since_s if past_s <= 0 and min(begun) >= 0 else now
            start = self.begun if since_s == self.since_s else message.begun
            return _Other(message.serial, now, message.totals, start, since_s, self.pace)
        pace = tuple(count / past_s for count in begun)
        if self.pace is not None:
            gain = -expm1(-past_s / PACE_S)
            pace = tuple(old + gain * (new - old) for old, new in zip(self.pace, pace, strict=True))
        return _Other(message.serial, now, message.totals, message.begun, now, pace)


class _Account:
    """Of one instance: our own totals, when which change reached its engine, and its engine's word."""

    __slots__ = ("changes", "drift", "own", "sampled_s")

    def __init__(self) -> None:
        self.own = [0, 0, 0, 0]
        """As the fields of `Totals`."""
        self.changes: deque[tuple[float, int, int, int, int]] = deque()
        """When, and by how much each of the totals changed."""
        self.drift = NOTHING
        self.sampled_s: float | None = None


class LoadBook:
    """The loads of a fleet's instances as one Conductor knows them. Times are its own clock's, and never go back."""

    def __init__(
        self, name: str, ttl_s: float = 10.0, flight_s: float = 0.05, history_s: float = 5.0, serial: int = 0
    ) -> None:
        """Messages are numbered from `serial` on: a Conductor that comes back under its name begins above what it had
        come to, as with the nanoseconds of a wall clock."""
        assert 0 <= flight_s <= history_s <= ttl_s, f"{flight_s=}, {history_s=}, {ttl_s=}"
        self.name = name
        self._ttl_s, self._flight_s, self._history_s = ttl_s, flight_s, history_s
        self._serial = serial
        self._begun = [0, 0, 0, 0]
        self._requests: dict[str, _Request] = {}
        self._accounts: dict[int, _Account] = {}
        self._others: dict[str, _Other] = {}
        self._said: dict[int, Totals] = {}
        """The sum of what others say, good until then."""
        self._said_until_s = -inf

    def __repr__(self) -> str:
        return f"LoadBook({self.name}: {len(self._requests)} own requests, {len(self._others)} other Conductors)"

    # ---- our own requests

    def routed(self, ask: Ask, choice: Choice, now: float) -> None:
        """A request was sent where `choice` says. Routing it again, elsewhere, ends what it was before."""
        self.finished(ask.request, now)
        waiting = ask.tokens - choice.cached_tokens - choice.fetched_tokens
        reached_s = now + self._flight_s
        self._requests[ask.request] = _Request(choice, ask.tokens, waiting, reached_s)
        begun = self._begun
        begun[0] += 1
        begun[1] += waiting
        self._change(choice.prefill, now, reached_s, 1, waiting, 0, 0)

    def prefilled(self, request: str, now: float) -> None:
        """Its first token came."""
        it = self._requests.get(request)
        if it is not None and not it.running:
            reached_s = max(now, it.reached_s)
            begun = self._begun
            begun[2] += 1
            begun[3] += it.tokens
            self._change(it.prefill, now, reached_s, -1, -it.waiting, 0, 0)
            it.waiting, it.running = 0, it.tokens
            self._change(it.decode, now, now, 0, 0, 1, it.tokens)

    def progressed(self, request: str, computed_tokens: int, answered_tokens: int, now: float) -> None:
        """So many of its prompt's uncached tokens are computed, and so many of its answer have come, in all."""
        it = self._requests.get(request)
        if it is None:
            return
        if it.running:
            self._change(it.decode, now, now, 0, 0, 0, it.tokens + answered_tokens - it.running)
            it.running = it.tokens + answered_tokens
        else:
            left = min(it.waiting, max(it.uncached - computed_tokens, 0))
            self._change(it.prefill, now, max(now, it.reached_s), 0, left - it.waiting, 0, 0)
            it.waiting = left

    def finished(self, request: str, now: float) -> None:
        """It ended, however, or was lost; nothing if it is not known."""
        it = self._requests.pop(request, None)
        if it is None:
            return
        if it.running:
            self._change(it.decode, now, now, 0, 0, -1, -it.running)
        else:
            self._change(it.prefill, now, max(now, it.reached_s), -1, -it.waiting, 0, 0)

    def left(self, instance: int) -> None:
        """An instance is gone, with all that waited and ran there; its number may be given to another."""
        gone = [name for name, it in self._requests.items() if instance == (it.decode if it.running else it.prefill)]
        for name in gone:
            del self._requests[name]
        self._accounts.pop(instance, None)
        for other in self._others.values():
            other.totals = {number: totals for number, totals in other.totals.items() if number != instance}
        self._said_until_s = -inf

    # ---- what others say

    def publish(self) -> Published:
        """Our own totals, for all other Conductors; to be said now and then, and whenever they have changed much."""
        self._serial += 1
        own = {number: Totals._make(account.own) for number, account in self._accounts.items() if any(account.own)}
        return Published(self.name, self._serial, own, Totals(*self._begun))

    def bye(self) -> Published:
        """Our last message: our requests end with us."""
        self._serial += 1
        return Published(self.name, self._serial, {}, Totals(*self._begun))

    def heard(self, message: Published, now: float) -> None:
        """What another Conductor said; nothing if something later is known already."""
        known = self._others.get(message.conductor)
        if message.conductor != self.name and (known is None or known.serial < message.serial):
            # Who has said bye stays for a while, with nothing: what it said earlier may still come.
            self._others[message.conductor] = (
                known.next(message, now)
                if known is not None
                else _Other(message.serial, now, message.totals, message.begun, now)
            )
            self._said_until_s = -inf

    def told(
        self,
        instance: int,
        sampled_s: float,
        waiting_requests: int,
        running_requests: int,
        waiting_tokens: int | None = None,
        running_tokens: int | None = None,
        *,
        now: float,
    ) -> None:
        """What an engine had at `sampled_s`. Tokens that it does not count are taken as in proportion to its requests.
        Nothing if it is older than `history_s`, or than what it said before."""
        account = self._accounts.get(instance)
        if account is None:
            account = self._accounts[instance] = _Account()
        if sampled_s < now - self._history_s or (account.sampled_s is not None and sampled_s < account.sampled_s):
            return
        then = self.own_at(instance, sampled_s).plus(self._others_said(now).get(instance, NOTHING))
        if waiting_tokens is None:
            waiting_tokens = _in_proportion(then.waiting_tokens, then.waiting_requests, waiting_requests)
        if running_tokens is None:
            running_tokens = _in_proportion(then.running_tokens, then.running_requests, running_requests)
        said = Totals(waiting_requests, waiting_tokens, running_requests, running_tokens)
        account.drift, account.sampled_s = said.plus(then, -1), sampled_s

    # ---- the loads

    def own(self, instance: int) -> Totals:
        """What of it is ours."""
        account = self._accounts.get(instance)
        return Totals._make(account.own) if account is not None else NOTHING

    def own_at(self, instance: int, sampled_s: float) -> Totals:
        """What of it was ours at a moment, as the engine saw it; not longer ago than `history_s`."""
        account = self._accounts.get(instance)
        if account is None:
            return NOTHING
        waiting, waiting_tokens, running, running_tokens = account.own
        settled_s = sampled_s - self._flight_s
        for when, *change in reversed(account.changes):
            if when > sampled_s:
                waiting -= change[0]
                waiting_tokens -= change[1]
                running -= change[2]
                running_tokens -= change[3]
            elif when <= settled_s:
                break  # each is made at most `flight_s` before it reaches the engine, so all before this one are past
        return Totals(waiting, waiting_tokens, running, running_tokens)

    def load(self, instance: int, now: float) -> Totals:
        """All that waits and runs at an instance, as far as it was said."""
        return self._load(instance, self._others_said(now).get(instance, NOTHING), now)

    @property
    def drifts(self) -> bool:
        """Whether loads change by themselves within a moment, as what others begin at their pace does."""
        return bool(self._others)

    def fill(self, instances: Mapping[int, Instance], now: float) -> None:
        """Write the loads, and when anybody but ourselves has said something of them, into what a policy reads."""
        others = self._others_by_now(instances, now)
        others_s = max((it.heard_s for it in self._others.values()), default=0.0)
        for number, it in instances.items():
            load = self._load(number, others.get(number, NOTHING), now)
            it.waiting_requests, it.waiting_tokens, it.running_requests, it.running_tokens = load
            account = self._accounts.get(number)
            sampled_s = account.sampled_s if account is not None else None
            it.heard_s = max(others_s, 0.0 if sampled_s is None else sampled_s, it.heard_s)

    def _load(self, instance: int, others: Totals, now: float) -> Totals:
        total, account = others, self._accounts.get(instance)
        if account is not None:
            total = total.plus(Totals._make(account.own))
            if account.sampled_s is not None and now < account.sampled_s + self._ttl_s:
                total = total.plus(account.drift)
        return Totals(*(max(it, 0) for it in total))

    def _others_by_now(self, instances: Iterable[int], now: float) -> dict[int, Totals]:
        """What others have at each instance, with what they have most likely done since they said so."""
        known = self._others_said(now)
        if not known:
            return known
        said = {number: known.get(number, NOTHING) for number in instances}
        paces = [(now - it.heard_s, it.pace) for it in self._others.values() if it.pace is not None]
        columns: list[Sequence[int]] = []
        for at, column in enumerate(zip(*said.values(), strict=True)):
            unseen = sum(age_s * pace[at] for age_s, pace in paces)
            columns.append(evened(column, unseen) if unseen > 0 else column)
        return {number: Totals(*row) for number, row in zip(said, zip(*columns, strict=True), strict=True)}

    def _others_said(self, now: float) -> dict[int, Totals]:
        """By instance, the sum of what others say, of whom anything was heard lately; the rest are forgotten."""
        if now >= self._said_until_s:
            self._others = {name: it for name, it in self._others.items() if now < it.heard_s + self._ttl_s}
            self._said = {}
            for other in self._others.values():
                for number, totals in other.totals.items():
                    known = self._said.get(number)
                    self._said[number] = totals if known is None else known.plus(totals)
            self._said_until_s = min((it.heard_s for it in self._others.values()), default=inf) + self._ttl_s
        return self._said

    def _change(
        self, instance: int, now: float, reached_s: float, waiting: int, waiting_tokens: int, running: int, tokens: int
    ) -> None:
        """More or less of our own at an instance, whose engine does not know before `reached_s`, which is not past."""
        account = self._accounts.get(instance)
        if account is None:
            account = self._accounts[instance] = _Account()
        own, changes = account.own, account.changes
        own[0] += waiting
        own[1] += waiting_tokens
        own[2] += running
        own[3] += tokens
        changes.append((reached_s, waiting, waiting_tokens, running, tokens))
        past_s = now - self._history_s
        while changes[0][0] < past_s:
            changes.popleft()


def evened(amounts: Sequence[int], more: float) -> list[int]:
    """Amounts after `more` came in all where the least was, as into a vessel with an uneven floor, and as much left
    again, from everywhere in proportion."""
    ordered, total = sorted(amounts), sum(amounts)
    below, level = 0, 0.0
    for count, amount in enumerate(ordered, 1):
        below += amount
        level = (below + more) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    stays = total / (total + more)
    return [round(max(amount, level) * stays) for amount in amounts]


def _in_proportion(tokens: int, requests: int, said: int) -> int:
    return tokens * said // requests if requests > 0 else 0
