"""An instance's request in a simulated cluster: it asks its host's node, waits, loads, computes the rest and saves it.

Whatever becomes of the node, the request is answered: with a hit as far as one is there in time, or by computing all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwater.core.fetch import Answer
from headwater.sim.cluster_life import Around, Life, Site
from headwater.sim.cluster_oracle import must
from headwater.types import ABSENT, ChunkKey, Loadable, Reservation

MESSAGE_S = 0.0002
CALL_S = 1.0
"""How long an instance waits for the node's word."""
LEAST_S, MOST_S = 0.004, 0.04
"""How long before it asks again, and how long a copy takes."""


class Request:
    """One request at one site."""

    def __init__(self, cluster: Around, site: Site, name: str, keys: Sequence[ChunkKey]) -> None:
        self._cluster, self._site, self.name, self.keys = cluster, site, name, list(keys)
        self._began_s = cluster.now
        self._node: Life | None = None
        self.hit: int | None = None
        """How many chunks it loaded, once it is answered."""

    def start(self) -> None:
        """Ask for the prefix."""
        self._ask()

    def save(self) -> None:
        """It was computed already; ask for room at once."""
        self._cluster.sums.answered += 1
        self.hit = 0
        self._save(0)

    def _call(self, act: Callable[[Life], Any], then: Callable[[Any], None]) -> None:
        """A call to the node; `then` is told None if it has no answer in time, or is another life by now."""
        schedule, life = self._cluster.schedule, self._site.life
        if life is None or (self._node is not None and life is not self._node):
            then(None)
            return
        self._node = life
        is_open = [True]

        def end(answer: Any) -> None:
            if is_open:
                is_open.clear()
                then(answer)
            elif isinstance(answer, Loadable | Reservation) and answer.ticket:
                # Nobody took it: what it holds is given back.
                schedule.after(MESSAGE_S, "", lambda: release(answer.ticket), life.process)

        def release(ticket: int) -> None:
            life.release(self.name, ticket)
            life.settle()

        def arrive() -> None:
            answer = act(life)
            life.settle()
            schedule.after(MESSAGE_S, "", lambda: end(answer))

        schedule.after(MESSAGE_S, "", arrive, life.process)
        schedule.after(CALL_S, "", lambda: end(None))

    def _soon(self, act: Callable[[], None]) -> None:
        self._cluster.schedule.after(self._cluster.rng.uniform(LEAST_S, MOST_S), "", act)

    def _ask(self) -> None:
        self._call(lambda node: node.ask(self.name, self.keys), self._asked)

    def _asked(self, answer: Answer | None) -> None:
        if answer is None:
            self._compute(0)
        elif answer.waiting:
            self._soon(self._ask)
        elif answer.chunks:
            self._call(lambda node: node.load(self.name, self.keys[: answer.chunks]), self._loading)
        else:
            self._compute(0)

    def _loading(self, found: Loadable | None) -> None:
        node = self._node
        if found is None or not found.ticket or node is None:
            self._compute(0)
            return
        keys, places = self.keys[: found.chunks], found.addresses[0]
        seen = [node.memory.flaw(place, key) for place, key in zip(places, keys, strict=True)]

        def copied() -> None:
            if node.now >= found.deadline_s:
                self._compute(0)  # too late for the bytes to count
                return
            for place, key, before in zip(places, keys, seen, strict=True):
                flaw = before or node.memory.flaw(place, key)
                must(flaw is None, f"{self.name} was told that {key.hex()[:6]} is right, and it is {flaw}")
            self._cluster.sums.hit_chunks += found.chunks
            self._call(lambda node: node.done(self.name, found.ticket), lambda _: None)
            self._compute(found.chunks)

        self._soon(copied)

    def _compute(self, hit: int) -> None:
        """It is answered as to what is reused; the rest takes the engine some time."""
        self.hit = hit
        cluster = self._cluster
        waited_s = cluster.now - self._began_s
        must(waited_s <= cluster.budget_s, f"{self.name} waited {waited_s:.3f} s of {cluster.budget_s} s")
        cluster.sums.answered += 1
        rest_s = len(self.keys[hit:]) * cluster.plan.chunk_s
        if hit < len(self.keys):
            cluster.schedule.after(rest_s, "", lambda: self._save(hit))
        else:
            self._forget()

    def _save(self, hit: int) -> None:
        parent = self.keys[hit - 1] if hit else None
        self._call(lambda node: node.reserve(self.name, parent, self.keys[hit:]), lambda got: self._saving(hit, got))

    def _saving(self, hit: int, got: Reservation | None) -> None:
        node = self._node
        if got is None or not got.ticket or node is None:
            self._forget()
            return
        writer = node.writer_of(got.ticket)
        made = [
            (place, (key, self._cluster.attempt()))
            for place, key in zip(got.addresses[0], self.keys[hit:], strict=False)
            if place != ABSENT
        ]
        for place, content in made:
            node.memory.write(writer, place, 0, content)

        def copied() -> None:
            if self._cluster.gives_up():
                self._call(lambda node: node.release(self.name, got.ticket), lambda _: self._forget())
                return
            for place, content in made:
                node.memory.write(writer, place, 1, content)
            self._call(lambda node: node.done(self.name, got.ticket), lambda _: self._forget())

        self._soon(copied)

    def _forget(self) -> None:
        self._call(lambda node: node.forget(self.name), lambda _: None)
