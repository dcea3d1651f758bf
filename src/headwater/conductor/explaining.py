"""Why requests went where they went: what the choice was made of, and what came of it, for the last so many.

What our policy has weighed is kept as it is, which costs nothing, and told when somebody asks. Where it passed over
instances, paired them, or is not ours, seconds are worked out then, by the policy's own arithmetic, from what it saw:
loads and times of the instances, who held what, the links, and the policy's own memory. Of more than
`CANDIDATES` instances those are kept that were chosen, hold most of the prompt or come first; how many are left out is
said. No text, ids or keys are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from headwater.conductor.registry import Roster
from headwater.core.admission import Verdict
from headwater.core.routing import Headwater, Row, Weighed, can_prefill, choice_of
from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Choice, Fleet, Held, Instance, Link, Place, Role
from headwater.ports import RoutingPolicy
from headwater.types import Tier

CANDIDATES = 32
Seen = tuple[int, EngineTimes, int, Role, int | None, bool, bool, int, int, int, int, float]
"""An instance's number, times, capacity, role, node, alive, draining, its four loads, how late they were."""


class Try(msgspec.Struct, eq=False):
    """One choice, and all that it was made of."""

    choice: Choice
    verdict: Verdict | None
    waited_s: float
    names: Mapping[int, str] = msgspec.field(default_factory=dict)
    weighed: Sequence[Row] | None = None
    """What the policy weighed, where that is all; the rest but the choice is not needed then."""
    output_tokens: int = 0
    instances: Sequence[Seen] = ()
    left_out: int = 0
    gathered: bool = False
    """Whether it was not the policy's best, but where others compute the same."""
    needless: bool = False
    """Whether the decode instance of a pair would have found nothing of what the other computes."""
    held: Held = msgspec.field(default_factory=dict)
    links: Sequence[tuple[Place, int, float, float, int]] = ()
    policy: Headwater | None = None
    now: float = 0.0
    lost: str = ""
    """Why it had to be tried again."""
    prefill_lost: str = ""
    """Why the prefill instance of a pair did not compute it."""


class Record(msgspec.Struct, eq=False):
    """One request. Times are of the loop's clock."""

    request: str
    model: str
    tenant: str
    counted: str
    """How its tokens were found."""
    tokens: int
    output_tokens: int
    block_tokens: int
    priority: int
    slos: tuple[float | None, float | None]
    arrived_s: float
    kv_bytes: int = 0
    tries: list[Try] = msgspec.field(default_factory=list)
    outcome: str = "waiting"
    routed_s: float = 0.0
    computed_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    answered_tokens: int = 0
    cached_tokens: int | None = None
    found_tokens: int | None = None


def record_of(request: str, ask: Ask, counted: str, arrived_s: float) -> Record:
    """Of a request that has come."""
    return Record(
        request, ask.model, ask.tenant, counted, ask.tokens, ask.output_tokens, ask.block_tokens, ask.priority,
        (ask.ttft_slo_s, ask.tpot_slo_s), arrived_s,
    )  # fmt: skip


class Explained:
    """The last requests of one worker."""

    def __init__(self, roster: Roster, most: int) -> None:
        self._roster, self._most = roster, most
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._names: Mapping[int, str] | None = None
        """As they are now: not changed, but made anew."""
        roster.watch(self._renamed, self._renamed)

    def _renamed(self, number: int) -> None:
        self._names = None

    def __repr__(self) -> str:
        return f"Explained({len(self._records)} of at most {self._most} requests)"

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, record: Record) -> None:
        """Remember this request, in place of the oldest and of one of the same name."""
        if self._most <= 0:
            return
        records = self._records
        records.pop(record.request, None)
        if len(records) >= self._most:
            records.popitem(last=False)
        records[record.request] = record

    def chose(
        self,
        record: Record,
        it: Try,
        held: Held,
        fleet: Fleet,
        policy: RoutingPolicy,
        hidden: Collection[int] = (),
        weighed: Sequence[Row] | None = None,
    ) -> None:
        """What a choice was made of, without the hidden instances; called before anything is changed by it. What the
        policy has weighed of them all says it best."""
        record.tries.append(it)
        if self._names is None:
            self._names = dict(self._roster.names)
        it.names = self._names
        if weighed is not None:
            it.weighed = weighed
        elif self._most > 0:
            self._keep(record, it, held, fleet, policy, hidden)

    def _keep(
        self, record: Record, it: Try, held: Held, fleet: Fleet, policy: RoutingPolicy, hidden: Collection[int]
    ) -> None:
        record.kv_bytes = fleet.kv_bytes_per_token
        choice, instances = it.choice, fleet.instances
        chosen: Collection[int] = instances.keys()
        if len(chosen) > CANDIDATES:
            it.left_out = len(chosen) - CANDIDATES
            chosen = _first(choice, held, list(chosen))
        it.instances = _seen([instances[number] for number in chosen], hidden)
        it.held, it.now = held, fleet.now
        if fleet.links and any(place[0] is not Tier.DEVICE for place in held):
            it.links = [
                (place, node, link.latency_s, link.bytes_s, link.queued_bytes)
                for (place, node), link in fleet.links.items()
                if place in held
            ]
        if isinstance(policy, Headwater):
            it.policy = policy.recalled(chosen, len(chosen) / max(len(instances), 1))

    def get(self, request: str) -> dict[str, Any] | None:
        """All of it in plain values; None if it is not remembered."""
        it = self._records.get(request)
        if it is None:
            return None
        took: dict[str, Any] = {}
        if it.computed_s:
            took["prefilled_s"] = it.computed_s - it.routed_s
        if it.first_s:
            took["first_token_s"] = it.first_s - it.routed_s
            if it.ended_s and it.answered_tokens > 1:
                took["per_token_s"] = (it.ended_s - it.first_s) / (it.answered_tokens - 1)
        if it.ended_s:
            took["whole_s"] = it.ended_s - it.arrived_s
            took["answered_tokens"] = it.answered_tokens
            took["cached_tokens"] = it.cached_tokens
            if it.found_tokens is not None:
                took["found_tokens"] = it.found_tokens
        return {
            "request": it.request,
            "model": it.model,
            "tenant": it.tenant,
            "priority": it.priority,
            "prompt_tokens": it.tokens,
            "counted": str(it.counted),
            "expected_tokens": it.output_tokens,
            "ttft_slo_s": it.slos[0],
            "tpot_slo_s": it.slos[1],
            "outcome": it.outcome,
            "tries": [_explain(it, each) for each in it.tries],
            "took": took,
        }


def _first(choice: Choice, held: Held, numbers: Sequence[int]) -> list[int]:
    """The most interesting of many instances."""
    holders = sorted((place for place in held if place[0] is Tier.DEVICE), key=lambda it: -held[it])
    known = set(numbers)
    wanted = [choice.prefill, choice.decode, *(it.number for it in holders if it.number in known), *numbers]
    return list(dict.fromkeys(wanted))[:CANDIDATES]


def _seen(instances: Sequence[Instance], hidden: Collection[int]) -> Sequence[Seen]:
    return [
        (
            it.number, it.times, it.capacity_tokens, it.role, it.node,
            it.alive and it.number not in hidden, it.draining,
            it.waiting_requests, it.waiting_tokens, it.running_requests, it.running_tokens, it.late_s,
        )
        for it in instances
    ]  # fmt: skip


def _explain(record: Record, it: Try) -> dict[str, Any]:
    names, choice, source = it.names, it.choice, it.choice.source
    said: dict[str, Any] = {
        "instance": names.get(choice.prefill, ""),
        "decode": names.get(choice.decode, ""),
        "estimated": {**choice.parts._asdict(), "ttft_s": choice.parts.ttft_s, "tpot_s": choice.tpot_s},
        "cached_tokens": choice.cached_tokens,
        "fetched_tokens": choice.fetched_tokens,
        "source": None if source is None else f"{source.tier.name.lower()}:{source.number}",
        "waited_s": it.waited_s,
        "gathered": it.gathered,
        "needless": it.needless,
        "verdict": None if it.verdict is None else it.verdict.reason.value,
        "candidates": [_told(each, names) for each in _weighed(record, it)],
        "left_out": it.left_out,
    }
    if it.lost:
        said["lost"] = it.lost
    if it.prefill_lost:
        said["prefill_lost"] = it.prefill_lost
    return said


def _weighed(record: Record, it: Try) -> list[Weighed]:
    """The candidates, the best first; of policies that are not ours with the sum of their seconds for a cost."""
    if it.weighed is not None:
        return Headwater.tell(it.weighed, it.output_tokens)
    instances: Mapping[int, Instance] = {
        row[0]: Instance(row[0], row[1], row[2], row[3], row[4], record.model, row[5], row[6], 0.0, *row[7:])
        for row in it.instances
    }
    links = {(place, node): Link(latency, speed, queued) for place, node, latency, speed, queued in it.links}
    fleet = Fleet(instances, record.kv_bytes, links, it.now)
    ask = Ask(record.request, record.tokens, (), record.block_tokens, record.output_tokens, record.model)
    if it.policy is not None:
        return it.policy.explain(ask, it.held, fleet)
    found = []
    for number, each in instances.items():
        if can_prefill(ask, each):
            choice = choice_of(ask, it.held, fleet, each, each)
            parts = choice.parts
            sums = (parts.queue_s, parts.fetch_s, parts.prefill_s)
            found.append(
                Weighed(parts.ttft_s, 0, number, *sums, choice.cached_tokens, choice.fetched_tokens, choice.source,
                        parts.decode_s)
            )  # fmt: skip
    return sorted(found, key=lambda row: row[:3])


def _told(it: Weighed, names: Mapping[int, str]) -> dict[str, Any]:
    return {
        "instance": names.get(it.instance, ""),
        "cost_s": it.cost_s,
        "queue_s": it.queue_s,
        "fetch_s": it.fetch_s,
        "prefill_s": it.prefill_s,
        "decode_s": it.decode_s,
        "cached_tokens": it.cached_tokens,
        "fetched_tokens": it.fetched_tokens,
    }
