"""Our routing policy: the least sum of seconds, for the request itself and for those that come after it.

Theory of operation. For every instance that can serve the request, from what the driver keeps current:

    queue_s     R waiting requests with W uncached tokens in all take R times the prefill of W / R tokens; and where KV
                has no room for this prompt, as long as it takes those that decode to give back what is short
    fetch_s     from the best source, or 0 if computing is faster. A token's computing costs the more, the more tokens
                are before it, and its bytes always the same: a source is worth all that it has, or nothing
    prefill_s   of the tokens that are neither there nor fetched
    decode_s    its own output, decoded with those that decode there

and then what the choice costs others, each with a weight of `Knobs`: work that later arrivals wait for; decoding that
stands still meanwhile; work that the instance was given lately, so that a prefix of everybody's does not lead everybody
to one instance; KV that the new one pushes out. The least sum wins, then the least recently chosen, then the number.

    choose   weigh all, stay with the longest prefix if that is hardly worse     changes nothing
    routed   whose turn it was, what it has to compute and to keep               the only memory
    left     forget an instance

In a fleet with roles a pair wins: the prefill's sum without decode_s, the hand-off of the whole prompt's KV from its
node to the other's, and the decode's decode_s. Of the instances of a node only the best of either kind are paired.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Any, NamedTuple, TypeVar

from headwater.core.sources import Source, Sources
from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Choice, Fleet, Held, Instance, Parts, Place, Role
from headwater.types import Tier

BOTH, PREFILL, DECODE = Role.BOTH, Role.PREFILL, Role.DECODE
DEVICE, HOST = Tier.DEVICE, Tier.HOST
NEVER = (0.0, 0.0)
UNIT_MAX = 1e100
FEW = 16
"""So many instances are all weighed: to pass over some would save nothing."""
ROUNDING = 1 + 1e-9
"""The same sum in another order is never off by more."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Weights of the terms, as measured on the conversation trace (8 instances); 0 leaves a term out."""

    work: float = 1.0
    """Seconds that others lose by a second of prefill: what is computed twice also holds its KV twice."""
    decode: float = 0.02
    """Of decode_s: answers are long, so a little of it evens out decoding without a longer wait for first tokens."""
    stall: float = 0.0
    """Of the prefill's seconds for each request that decodes there: evens out decoding, at the price of the wait."""
    late: float = 1.0
    """Of the prefill seconds that the instance was given lately beyond `late_over` times the mean: an idle fleet
    spreads soon, and where work is even by itself, as it is with sessions, nothing is paid."""
    late_over: float = 1.25
    """Sessions alone keep the busiest of 8 instances within this."""
    late_requests: int = 200
    """'Lately' is so many choices per instance; what is as old counts 1/e."""
    evict: float = 0.0
    """Of the seconds to compute as much KV as is pushed out, times the chance that it would be asked for again: more
    reuse, but not less waiting."""
    evict_s: float = 300.0
    """After so long KV has lost all but 1/e of its chances."""
    sticky_s: float = 0.0
    """A session moves only to where it saves more than this; `work` alone keeps sessions together."""
    stale_s: float = 5.0
    """Loads that lag so far behind are not believed: whom they call idle may be drowning by now, and to take turns is
    better."""
    session_share: float = 0.5
    """A prompt held to this share is a session's; what many have in common is less, and makes nobody stay."""
    peers_max: int = 4
    """The links from so many other nodes are looked at, those with the longest prefix."""
    pairs_max: int = 16
    """So many nodes for prefill, the best, are paired with as many for decode."""


USUAL = Knobs()


class Weighed(NamedTuple):
    """One instance as the place of a request's prefill. They sort as the policy prefers them."""

    cost_s: float
    """The weighted sum."""
    turn: int
    """When it was chosen last, in choices; 0 if never."""
    instance: int
    queue_s: float
    fetch_s: float
    prefill_s: float
    cached_tokens: int
    fetched_tokens: int
    source: Place | None
    decode_s: float = 0.0
    """0 for an instance that only prefills."""

    @property
    def parts(self) -> Parts:
        """Its seconds."""
        return Parts(self.queue_s, self.fetch_s, self.prefill_s, self.decode_s)


_Kind = tuple[dict[int, float], float, float]
"""What instances of equal times share for one prompt: its prefill after so many cached tokens; `_floors`."""

Row = tuple[float, int, int, float, float, float, int, int, Place | None, float]
"""The fields of `Weighed`, but for the last: the seconds of one token there, 0 where nobody asked. There is one for
each instance and request, and a plain tuple is made in no time."""


def can_prefill(ask: Ask, it: Instance) -> bool:
    """Whether an instance may be asked to compute this prompt."""
    fits = it.capacity_tokens >= ask.tokens and it.model == ask.model
    return it.alive and not it.draining and it.role is not DECODE and fits


def can_decode(ask: Ask, it: Instance) -> bool:
    """Whether an instance may be asked to answer this prompt, wherever it was computed."""
    fits = it.capacity_tokens >= ask.tokens and it.model == ask.model
    return it.alive and not it.draining and it.role is not PREFILL and fits


def has_roles(fleet: Fleet) -> bool:
    """Whether prefill and decode are chosen apart."""
    for it in fleet.instances.values():  # noqa: SIM110  (twice as fast as any())
        if it.role is not BOTH:
            return True
    return False


def handoff_s(ask: Ask, fleet: Fleet, source: Instance, target: Instance) -> float | None:
    """How long the whole prompt's KV takes from one instance to another; None if nothing leads there."""
    if source is target or (source.node is not None and source.node == target.node):
        return 0.0
    if source.node is None or target.node is None:
        return None
    link = fleet.links.get((Place(HOST, source.node), target.node))
    return None if link is None else link.seconds(ask.tokens * fleet.kv_bytes_per_token)


def decoding(ask: Ask, it: Instance) -> tuple[float, float]:
    """The seconds of a request's whole decoding at an instance, and per token: as if those that decode there now did
    so until its end."""
    tpot_s = it.times.decode_s(it.running_requests + 1, it.running_tokens + ask.tokens)
    return ask.output_tokens * tpot_s, tpot_s


def on_devices(held: Held) -> dict[int, int]:
    """How many tokens each instance's DEVICE holds, by the instance's number."""
    # By position: a named tuple taken apart, or asked by name, takes several times as long.
    return {place[1]: tokens for place, tokens in held.items() if place[0] is DEVICE}


def queue_s(it: Instance, tokens: int, output_tokens: int) -> float:
    """How long a prompt of so many tokens waits at an instance that can prefill it, before its own prefill begins."""
    times, waiting, kv, queue = it.times, it.waiting_tokens, it.running_tokens, 0.0
    if waiting > 0:
        requests = it.waiting_requests or 1
        mean, step, token2 = waiting / requests, times.step_tokens, times.prefill_token2_s
        queue = requests * times.prefill_fixed_s + waiting * (times.prefill_token_s + token2 * mean)
        if mean > step:
            queue += waiting * (mean - step) * (times.prefill_context_s / 2 - token2)
    short = kv + tokens - it.capacity_tokens
    if short > 0 and it.shared_tokens:
        short -= it.shared_tokens * it.running_requests // max(it.running_requests + it.waiting_requests, 1)
    if short > 0:
        queue += output_tokens * times.decode_s(it.running_requests + 1, kv) * short / kv
    return queue


def is_light(ask: Ask, choice: Choice, times: EngineTimes) -> bool:
    """Whether so little is computed that the step itself takes longer."""
    computed = ask.tokens - choice.cached_tokens - choice.fetched_tokens
    return computed * times.prefill_token_s <= times.prefill_fixed_s


def batched_s(it: Instance, queue_s: float) -> float:
    """The same wait, where those who are light share steps, with others or among themselves.

    That each takes a step of its own is what it costs others who might come, which keeps them apart; whether one is
    served in time is a question of the steps that there will be."""
    light, requests, times = it.light_requests, it.waiting_requests, it.times
    steps = max(requests - light, -(-it.waiting_tokens // times.step_tokens), 1)
    return max(queue_s - (requests - steps) * times.prefill_fixed_s, 0.0) if requests > steps else queue_s


def choice_of(ask: Ask, held: Held, fleet: Fleet, prefill: Instance, decode: Instance) -> Choice:
    """The choice of exactly these two, with what is fetched and how long everything takes."""
    tokens, times = ask.tokens, prefill.times
    cached = min(held.get(Place(DEVICE, prefill.number), 0), tokens - 1)
    found: Source | None = None
    if fleet.links and prefill.node is not None:
        sources = Sources(ask, held, fleet, 1 + USUAL.work, USUAL.peers_max)
        found = sources.best(prefill.node, cached, times) if sources else None
    fetch, prefill_s, fetched, source = found or (0.0, times.prefill_s(tokens - cached, cached), 0, None)
    decode_s, tpot_s = decoding(ask, decode)
    handoff = 0.0 if prefill is decode else handoff_s(ask, fleet, prefill, decode) or 0.0
    parts = Parts(queue_s(prefill, tokens, ask.output_tokens), fetch, prefill_s, decode_s, handoff)
    return Choice(prefill.number, decode.number, parts, cached, fetched, source, tpot_s)


def _floors(times: EngineTimes, tokens: int, own: float) -> tuple[float, float]:
    """The least that a waiting token costs anywhere, and a prompt of its own decoding; 0 for fits with negative parts,
    with which it may be anything."""
    prefills = min(times.prefill_fixed_s, times.prefill_token2_s, times.prefill_context_s) >= 0
    decodes = min(times.decode_request_s, times.decode_kv_s, times.decode_kv2_s) >= 0
    return times.prefill_token_s if prefills else 0.0, own * times.decode_s(1, tokens) if decodes else 0.0


class Headwater:
    """The policy; see the head of this file."""

    name = "headwater"

    def __init__(self, knobs: Knobs | None = None) -> None:
        self.knobs = knobs or Knobs()
        self._turn = 0
        self._turns: dict[int, int] = {}
        self._late: dict[int, float] = {}
        self._late_sum = 0.0
        # What a second given now adds to `_late`. It grows with each choice, instead of all that is in `_late` fading.
        self._unit = 1.0
        # When an instance was given something last, and its new KV until then, of which the older counts less.
        self._made: dict[int, tuple[float, float]] = {}
        self.weighed: list[Row] | None = None
        """What `choose` weighed last, for whoever wants to `tell` it later; None where that is not everything."""

    def __repr__(self) -> str:
        return f"Headwater({self._turn} choices, {len(self._turns)} instances, {self.knobs})"

    def choose(self, ask: Ask, held: Held, fleet: Fleet) -> Choice | None:
        """The least sum; None if nobody can serve the request."""
        paired = has_roles(fleet)
        rows = self._weigh(ask, held, fleet, paired, every=paired or self.knobs.sticky_s > 0)
        if not rows:
            return None
        if paired:
            return self._choose_pair(ask, rows, fleet)
        best = min(rows)
        if self.knobs.sticky_s > 0:
            best = self._stay(ask, best, rows)
        _, _, number, queue, fetch, prefill, cached, fetched, source, tpot = best
        if tpot and self.weighed is rows:
            decode = ask.output_tokens * tpot
        else:
            decode, tpot = decoding(ask, fleet.instances[number])
        return Choice(number, number, Parts(queue, fetch, prefill, decode), cached, fetched, source, tpot)

    def explain(self, ask: Ask, held: Held, fleet: Fleet) -> list[Weighed]:
        """All that can prefill it, the best first, by the same sums as `choose`."""
        found = [Weighed(*row[:9]) for row in sorted(self._weigh(ask, held, fleet, has_roles(fleet), every=True))]
        decodes = {it.instance: decoding(ask, fleet.instances[it.instance])[0] for it in found}
        only = {it.instance for it in found if fleet.instances[it.instance].role is PREFILL}
        return [it if it.instance in only else it._replace(decode_s=decodes[it.instance]) for it in found]

    @staticmethod
    def tell(rows: Sequence[Row], output_tokens: int) -> list[Weighed]:
        """What `explain` said when these were `weighed`."""
        return [Weighed(*row[:9], output_tokens * row[9]) for row in sorted(rows)]

    def recalled(self, numbers: Iterable[int], share: float = 1.0) -> Headwater:
        """A policy that explains this moment later, to a fleet of these instances, which are so much of all of them."""
        it = Headwater(self.knobs)
        it._turn, it._unit, it._late_sum = self._turn, self._unit, self._late_sum * share
        for number in numbers:
            if number in self._turns:
                it._turns[number] = self._turns[number]
            if number in self._late:
                it._late[number] = self._late[number]
            if number in self._made:
                it._made[number] = self._made[number]
        return it

    def routed(self, ask: Ask, choice: Choice, fleet: Fleet) -> None:
        """Remember whose turn it was, and what it has to compute and to keep."""
        self._turn += 1
        target, knobs = choice.prefill, self.knobs
        self._turns[target] = self._turns[choice.decode] = self._turn
        if knobs.late:
            self._unit *= 1 + 1 / (knobs.late_requests * len(fleet.instances))
            given = self._unit * choice.parts.prefill_s
            self._late[target] = self._late.get(target, 0.0) + given
            self._late_sum += given
            if self._unit > UNIT_MAX:
                self._late = {number: late / self._unit for number, late in self._late.items()}
                self._late_sum, self._unit = sum(self._late.values()), 1.0
        if knobs.evict:
            then, made = self._made.get(target, (fleet.now, 0.0))
            made *= exp(min(then - fleet.now, 0.0) / knobs.evict_s)
            self._made[target] = (fleet.now, made + ask.tokens - choice.cached_tokens)

    def finished(self, ask: Ask, choice: Choice) -> None:
        """Nothing: the loads are the driver's."""

    def left(self, instance: int) -> None:
        """Forget an instance."""
        self._late_sum -= self._late.pop(instance, 0.0)
        self._turns.pop(instance, None)
        self._made.pop(instance, None)

    def _weigh(self, ask: Ask, held: Held, fleet: Fleet, paired: bool, every: bool = False) -> list[Row]:
        """The instances that can prefill the prompt: `every` one, or without those that are sure not to be the best.

        No term is negative: of many instances, most are passed over by a few of the terms. A row an instance, so
        everything is a local name, and what many have in common is worked out once.
        """
        knobs, tokens, model, output, now = self.knobs, ask.tokens, ask.model, ask.output_tokens, fleet.now
        work, stall, evict, evict_s = 1 + knobs.work, knobs.stall, knobs.evict, knobs.evict_s
        own, late_weight = 0.0 if paired else knobs.decode * output, knobs.late / self._unit
        late_free = knobs.late_over * self._late_sum / max(len(fleet.instances), 1)
        turn_of, late_of, made_of = self._turns.get, self._late.get, self._made.get
        cached_of = on_devices(held).get
        sources = Sources(ask, held, fleet, work, knobs.peers_max) if fleet.links else None
        sources = sources or None
        passes = not every and len(fleet.instances) > FEW
        stale_s = knobs.stale_s
        kinds: dict[int, _Kind] = {}
        times, most_s, stale = None, inf, False
        rows: list[Row] = []
        for number, it in fleet.instances.items():
            if it.times is not times:
                times = it.times
                kind = kinds.get(id(times))
                if kind is None:
                    kind = kinds[id(times)] = ({}, *(_floors(times, tokens, own) if passes else NEVER))
                prefills, token_s, least_s = kind
                fixed, token, token2 = times.prefill_fixed_s, times.prefill_token_s, times.prefill_token2_s
                step, base, each = times.step_tokens, times.decode_fixed_s, times.decode_request_s
                linear, square = times.decode_kv_s, times.decode_kv2_s
            cached = cached_of(number, 0)
            if cached >= tokens:
                cached = tokens - 1  # the last token is always computed: its result is the answer's first
            waiting, running, kv = it.waiting_tokens, it.running_requests, it.running_tokens + tokens
            if it.late_s > stale_s:
                waiting, running, kv, stale = 0, 0, tokens, True
            least = least_s + waiting * token_s if passes else 0.0
            if sources is not None and it.node is not None:
                if passes and least + work * token_s * (tokens - max(cached, sources.most_tokens)) > most_s:
                    continue
                fetch, prefill, fetched, source = sources.best(it.node, cached, times)
            else:
                fetch, fetched, source = 0.0, 0, None
                known = prefills.get(cached)
                if known is None:
                    known = prefills[cached] = times.prefill_s(tokens - cached, cached)
                prefill = known
            if passes and least + fetch + work * prefill > most_s:
                continue
            if not it.alive or it.draining or it.role is DECODE or it.capacity_tokens < tokens or it.model != model:
                continue
            queue = 0.0
            if kv > it.capacity_tokens or waiting < 0:
                queue = queue_s(it, tokens, output)
            elif waiting:
                requests = it.waiting_requests or 1
                mean = waiting / requests
                if mean > step:
                    queue = queue_s(it, tokens, output)
                else:  # the same, as it mostly is, without a call
                    queue = requests * fixed + waiting * (token + token2 * mean)
            cost = queue + fetch + (work + stall * running) * prefill
            late = late_of(number, 0.0)
            if late > late_free:
                cost += late_weight * (late - late_free)
            decode = 0.0
            if own:
                decode = base + each * (running + 1) + kv * (linear + square * kv)  # EngineTimes.decode_s
                if decode > 0:
                    cost += own * decode
                else:
                    decode = 0.0
            if evict:
                then, made = made_of(number, NEVER)
                if made > 0:
                    made *= exp(min(then - now, 0.0) / evict_s)
                    # So much KV a while makes what is there last capacity / made whiles.
                    lasts = exp(-it.capacity_tokens / max(made, 1.0))
                    cost += evict * (tokens - cached) * token * lasts
            rows.append((cost, turn_of(number, 0), number, queue, fetch, prefill, cached, fetched, source, decode))
            if passes and cost < most_s:
                most_s = cost * ROUNDING
        self.weighed = None if passes or not own or stale else rows
        return rows

    def _stay(self, ask: Ask, best: Row, rows: list[Row]) -> Row:
        """Where most of a session's prompt is, unless the best saves enough."""
        longest = max(row[6] for row in rows)
        if longest == best[6] or longest < self.knobs.session_share * ask.tokens:
            return best
        home = min(row for row in rows if row[6] == longest)
        return home if home[0] - best[0] <= self.knobs.sticky_s else best

    def _choose_pair(self, ask: Ask, rows: list[Row], fleet: Fleet) -> Choice | None:
        """The least sum of both parts and the hand-off."""
        weight, turn_of, instances = self.knobs.decode, self._turns.get, fleet.instances
        answers = []
        for number, it in instances.items():
            if can_decode(ask, it):
                decode, tpot = decoding(ask, it)
                answers.append((weight * decode, turn_of(number, 0), number, decode, tpot))
        prefills, answers = _best_of_nodes(rows, instances), _best_of_nodes(answers, instances)
        for limit in (self.knobs.pairs_max, len(instances)):
            pairs = []
            for row in prefills[:limit]:
                for answer in answers[:limit]:
                    handoff = handoff_s(ask, fleet, instances[row[2]], instances[answer[2]])
                    if handoff is not None:
                        pairs.append((row[0] + handoff + answer[0], row[1], answer[1], row[2], row, answer, handoff))
            if pairs:  # otherwise nothing leads from the best to the best
                _, _, _, number, row, answer, handoff = min(pairs, key=lambda it: it[:4])
                parts = Parts(row[3], row[4], row[5], answer[3], handoff)
                return Choice(number, answer[2], parts, row[6], row[7], row[8], answer[4])
        return None


Sorted = TypeVar("Sorted", bound=tuple[Any, ...])


def _best_of_nodes(rows: list[Sorted], instances: Mapping[int, Instance]) -> list[Sorted]:
    """The first row of each node, and of each instance without one, in order; the third field is the instance."""
    best: dict[int, Sorted] = {}
    for row in sorted(rows):
        node = instances[row[2]].node
        best.setdefault(-1 - row[2] if node is None else node, row)
    return list(best.values())
