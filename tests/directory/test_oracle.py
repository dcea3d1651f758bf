"""The same random life in a server and in `core.directory.Records`: they give the same answers.

Numbers, generations and versions have other values in each; what is compared is which of them are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headwater.core.directory import Records
from headwater.directory.redis import RedisDirectory
from headwater.errors import RefusedError
from headwater.tiers.endpoint import Endpoint
from headwater.types import Announced, Beat, Listed, Replica, Standing
from tests.conformance.directory import soon
from tests.core.directories import DISK, HOST, member, name
from tests.directory.conftest import CLUSTER, age
from tests.servers import RedisServer

SILENT_S, FORGET_S, STEP_S = 30.0, 90.0, 20.0
"""No number of steps comes nearer than ten seconds to either, which is what a slow machine has."""
CHUNKS = 5
Answer = TypeVar("Answer")
changes = st.lists(
    st.builds(lambda it, *rest: Announced(name(it), *rest), st.integers(0, CHUNKS - 1), st.sampled_from((HOST, DISK)),
              st.booleans()),
    max_size=8,
)  # fmt: skip
whom = st.integers(0, 7)
steps = st.one_of(
    st.tuples(st.just("join"), st.sampled_from("abcd"), st.integers(0, 3)),
    st.tuples(st.just("beat"), whom, st.sampled_from((Standing.SERVING, Standing.DRAINING))),
    st.tuples(st.just("announce"), whom, st.sampled_from((0, 1, 1, 1, 1, 1, 2)), changes),
    st.tuples(st.just("announce"), whom, st.just(1), changes),
    st.tuples(st.just("leave"), whom),
    st.tuples(st.just("elapse"), st.integers(1, 5)),
    st.tuples(st.just("back"), st.integers(1, 8)),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("flush")),
)


class Pair:
    """Both, and which of their numbers stand for the same."""

    def __init__(self, server: RedisServer) -> None:
        endpoint = Endpoint("it", "127.0.0.1", server.port)
        self.server = server
        self.redis = RedisDirectory(endpoint, CLUSTER, 1, SILENT_S, FORGET_S)
        self.now = 1000.0
        self.generations = 0
        self.records = self._empty()
        self.numbers: list[tuple[int, int]] = [(77, 77)]
        self.same: dict[tuple[str, object], object] = {}

    def _empty(self) -> Records:
        self.generations += 1
        self.server.say("FLUSHALL")
        return Records(str(self.generations), SILENT_S, FORGET_S)

    def both(self, mine: Callable[[], Answer], theirs: Callable[[], Answer]) -> tuple[Answer, Answer] | None:
        """Both answers; None if both refuse."""
        try:
            expected = mine()
        except RefusedError as error:
            with pytest.raises(RefusedError) as caught:
                theirs()
            assert (caught.value.field, caught.value.remedy) == (error.field, error.remedy)
            return None
        return expected, theirs()

    def alike(self, kind: str, mine: object, theirs: object) -> None:
        """Two values that must stand for each other from now on, and for nothing else."""
        assert self.same.setdefault((kind, mine), theirs) == theirs
        assert self.same.setdefault((kind + "'", theirs), mine) == mine

    def join(self, node: str, epoch: int) -> None:
        who = member(node, epoch)
        if answers := self.both(lambda: self.records.join(who, self.now), lambda: self.redis.join(who, soon())):
            self.alike("number", *answers)
            if answers not in self.numbers:
                self.numbers.append(answers)

    def beat(self, at: int, standing: Standing) -> None:
        mine, theirs = self.number(at)
        report = b"%d" % at
        expected = self.records.beat(mine, standing, report, self.now)
        found = self.redis.beat(theirs, standing, report, soon())
        assert (expected is None) == (found is None)
        if isinstance(expected, Beat) and isinstance(found, Beat):
            assert expected.serial == found.serial
            self.alike("generation", expected.generation, found.generation)
            self.alike(f"version {expected.generation}", expected.members, found.members)

    def announce(self, at: int, ahead: int, batch: Sequence[Announced]) -> None:
        mine, theirs = self.number(at)
        beat = self.records._lives.get(mine)
        serial = (beat.serial if beat else 0) + ahead
        answers = self.both(
            lambda: self.records.announce(mine, serial, batch, self.now),
            lambda: self.redis.announce(theirs, serial, batch, soon()),
        )
        assert answers is None or answers[0] == answers[1]

    def leave(self, at: int) -> None:
        mine, theirs = self.number(at)
        self.records.leave(mine, self.now)
        self.redis.leave(theirs, soon())

    def elapse(self, steps: int) -> None:
        self.now += steps * STEP_S
        age(self.server, steps * STEP_S)

    def back(self, steps: int) -> None:
        """A server takes over whose clock is behind. Both hear of it, and before it of what was due, by a verb that has
        nothing to do."""
        self.leave(0)
        self.elapse(-steps)
        self.leave(0)

    def sweep(self) -> None:
        while self.records.sweep(3, self.now):
            pass
        self.redis.sweep(soon())
        assert int(self.server.say("HLEN", self.redis.prefix + "chunks")[1:]) == len(self.records)

    def flush(self) -> None:
        self.records = self._empty()

    def number(self, at: int) -> tuple[int, int]:
        return self.numbers[at % len(self.numbers)]

    def compare(self) -> None:
        known = dict(self.numbers)

        def told(found: Listed) -> tuple[object, ...]:
            return found.member, found.standing, found.report

        names = [name(it) for it in range(CHUNKS)]
        expected = [tuple(Replica(known[r.number], r.tier) for r in it) for it in self.records.locate(names, self.now)]
        assert self.redis.locate(names, soon()) == expected
        mine, theirs = self.records.members(self.now), self.redis.members(soon())
        assert [known[it.number] for it in mine] == [it.number for it in theirs]
        assert [told(it) for it in mine] == [told(it) for it in theirs]
        for expect, find in zip(mine, theirs, strict=True):
            assert expect.heard_s - 0.1 <= find.heard_s < expect.heard_s + 10


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(steps, max_size=30))
@example([("join", "a", 1), ("back", 5), ("elapse", 2)])
@example([("join", "a", 1), ("elapse", 2), ("back", 5), ("elapse", 2), ("elapse", 1)])
def test_a_server_answers_like_the_records(server: RedisServer, life: list[tuple[str, ...]]) -> None:
    pair = Pair(server)
    try:
        for verb, *words in life:
            pair.now += 0.001
            getattr(pair, verb)(*words)
            pair.compare()
    finally:
        pair.redis.close()
