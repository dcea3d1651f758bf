"""A prompt's ids from an engine: POST /tokenize at one that is alive, over the same connections as everything else."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from headwater.conductor.http.exchange import Upstreams
from headwater.conductor.job import Parsed
from headwater.conductor.legs import Small
from headwater.conductor.outbound import credentials
from headwater.conductor.parts import Registry
from headwater.conductor.tokens.asked import PATH, answer, question

FIRST_S = 5.0


class EngineIds:
    """Asks the instances of a model in turn."""

    def __init__(self, upstreams: Upstreams, registry: Registry) -> None:
        self._upstreams, self._registry, self._turn = upstreams, registry, 0

    def ask(self, parsed: Parsed, done: Callable[[array[int] | None], None]) -> None:
        """`done` is told the ids; None if no instance gave any."""
        there = self._registry.instances()
        able = [number for number, it in there.items() if it.alive and not it.draining and it.model == parsed.model]
        if not able:
            done(None)
            return
        self._turn += 1
        number = able[self._turn % len(able)]
        body = question(parsed, self._registry.spec(number).served_name)
        sink = Small(lambda status, said: done(answer(said) if status == 200 else None))
        headers = [(b"content-type", b"application/json"), *credentials(self._registry.spec(number))]
        self._upstreams.call(self._registry.origin(number), "POST", PATH, headers, body, sink, first_s=FIRST_S)
