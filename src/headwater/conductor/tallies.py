"""What is told of requests and instances: metrics, and the rows of `headwater fleet`."""

from __future__ import annotations

from typing import Any

from headwater.conductor.counts import Counts
from headwater.conductor.earning import Health
from headwater.conductor.flight import Flight
from headwater.conductor.registry import Roster
from headwater.fleet import Choice

PROMPT, ON_DEVICE = ("prompt_tokens", ""), ("reused_tokens", "device")


class Tallies:
    """Of one worker. Metrics have no label that grows with the instances that ever were."""

    def __init__(self, counts: Counts, roster: Roster) -> None:
        self._counts, self._roster = counts, roster
        self._numbers = counts.numbers
        self._numbers[ON_DEVICE] += 0  # a metric that is there from the beginning
        self._rows: dict[int, list[int]] = {}
        """Of each instance: requests that ended, their prompts' tokens, those that it had cached, those fetched."""

    def started(self, flight: Flight, now: float) -> None:
        """A stream's first token came."""
        self._counts.observe("ttft_seconds", now - flight.job.arrived_s)

    def ended(self, flight: Flight, choice: Choice, now: float, *, whole: bool) -> None:
        """A request that was begun has ended there."""
        job, steps = flight.job, flight.job.answered_tokens - 1
        if whole and flight.first_s and steps > 0 and job.parsed.n == 1 and not flight.losses:
            self._counts.observe("tpot_seconds", (now - flight.first_s) / steps)
        # An engine counts as cached what its connector brought, too.
        told = job.cached_tokens if job.cached_tokens is not None else choice.cached_tokens + choice.fetched_tokens
        fetched = choice.fetched_tokens
        if fetched:
            fetched = min(fetched, max(told - choice.cached_tokens, 0))
        if choice.source is not None:
            self._counts.add("reused_tokens", choice.source.tier.name.lower(), fetched)
        self.computed(choice.prefill, flight.ask.tokens, told - fetched, fetched)
        if choice.decode != choice.prefill:
            self.computed(choice.decode, 0, 0, 0)

    def computed(self, number: int, tokens: int, device: int, fetched: int) -> None:
        """One has ended there whose prompt had so many tokens, of which so many were cached and so many fetched."""
        self._numbers[PROMPT] += tokens
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = [0, 0, 0, 0]
        row[0] += 1
        row[1] += tokens
        if device:
            self._numbers[ON_DEVICE] += device
            row[2] += device
        if fetched:
            row[3] += fetched

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self._rows.pop(number, None)

    def state(self, number: int, under_way: int, health: Health | None, now: float) -> dict[str, Any]:
        """One instance, in plain values."""
        it, spec = self._roster.instances()[number], self._roster.spec(number)
        requests, prompt, device, fetched = self._rows.get(number, (0, 0, 0, 0))
        return {
            "name": spec.name,
            "number": number,
            "model": spec.served_name,
            "role": it.role.value,
            "node": spec.node,
            "alive": it.alive,
            "draining": it.draining,
            "share": health.share(number, now) if health is not None else 1.0,
            "waiting_requests": it.waiting_requests,
            "waiting_tokens": it.waiting_tokens,
            "running_requests": it.running_requests,
            "running_tokens": it.running_tokens,
            "capacity_tokens": it.capacity_tokens,
            "prefill_tokens_s": 1 / it.times.prefill_token_s,
            "decode_step_s": it.times.decode_s(1, 1024),
            "own_requests": under_way,
            "ended_requests": requests,
            "prompt_tokens": prompt,
            "device_tokens": device,
            "fetched_tokens": fetched,
            **(health.state(number) if health is not None else {}),
        }
