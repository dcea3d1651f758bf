"""A subscription over real sockets: live events, gaps and replays, engines that begin anew, garbage, and no leaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
import zmq

from headwater.conductor.events import vllm
from headwater.conductor.events.sources import Sources
from headwater.conductor.events.vllm import rank_endpoint
from headwater.conductor.sight import Sight
from headwater.core.hashing import chunk_keys
from headwater.fleet import Place
from headwater.fleetfile.model import InstanceSpec
from headwater.types import Tier
from tests.conductor.events.engine import BLOCK, ToyEngine, salted
from tests.conductor.events.polling import eventually
from tests.servers import free_port

END = b"\xff" * 8


class Publisher:
    """A toy engine's PUB and ROUTER, served by the test's loop when it says so. `old`: replays as up to vLLM 0.23."""

    def __init__(self, context: zmq.Context[Any], seed: int = 1, *, old: bool = False, buffer: int = 1000) -> None:
        self.engine = ToyEngine(random.Random(seed), buffer)
        self.events, self.replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.context, self.old, self.silent = context, old, False
        self.requests: list[int] = []
        self.open()

    def open(self) -> None:
        """Bind."""
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        for it, endpoint in ((self.pub, self.events), (self.router, self.replays)):
            it.setsockopt(zmq.LINGER, 0)
            try:
                it.bind(endpoint)
            except zmq.ZMQError:
                self.close()  # or the context waits for them when it ends
                raise

    def reopened(self) -> bool:
        """Try to bind again: what was closed is let go of a moment later."""
        try:
            self.open()
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Unbind."""
        self.pub.close(0)
        self.router.close(0)

    def send(self, frame: tuple[int, bytes]) -> None:
        """Publish a frame."""
        self.pub.send_multipart([b"kv", frame[0].to_bytes(8, "big"), frame[1]])

    def step(self) -> None:
        """Serve a prompt."""
        self.send(self.engine.step())

    def serve(self) -> None:
        """Answer replays."""
        while self.router.poll(0):
            who, _, first = self.router.recv_multipart()
            self.requests.append(int.from_bytes(first, "big"))
            if self.silent:
                continue
            topic = [] if self.old else [b"kv"]
            for number, payload in self.engine.replay(self.requests[-1]):
                self.router.send_multipart([who, b"", *topic, number.to_bytes(8, "big"), payload])
            self.router.send_multipart([who, b"", *([] if self.old else [b""]), END, b""])


class Rig:
    """A Sight that listens to publishers."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self.sight = Sight()
        self.sources = Sources(self.sight, [])
        self.publishers: list[Publisher] = []

    def publisher(self, number: int = 0, *, replays: bool = True, **more: Any) -> Publisher:
        """One more instance, with a toy engine."""
        it = Publisher(self.context, **more)
        self.publishers.append(it)
        replay = it.replays if replays else None
        spec = InstanceSpec(f"e{number}", "m", "m", events=it.events, replay=replay, block_tokens=BLOCK)
        device = self.sources.add(number, spec)
        device._root = salted
        device.forget_all()
        return it

    def serve(self) -> None:
        """Let engines answer."""
        for it in self.publishers:
            it.serve()

    def claimed(self, number: int = 0) -> set[bytes]:
        """The keys that are taken for held."""
        place = Place(Tier.DEVICE, number)
        return {key for places, keys in self.sight.index.dump() if place in places for key in keys}

    def state(self, number: int = 0) -> dict[str, Any]:
        """Of its subscription."""
        found: Any = self.sight.state()["sources"][f"events:{number}.0"]
        return found

    async def agrees(self, number: int = 0) -> None:
        """Wait until the index has what the engine has."""

        def fact() -> bool:
            self.serve()
            settled = self.state(number)["settled"]
            return bool(settled) and self.claimed(number) == self.publishers[number].engine.keys

        await eventually(fact)

    async def connected(self, number: int = 0) -> None:
        """Publish batches of nothing until one arrives: a subscription takes a moment."""
        it = self.publishers[number]

        def fact() -> bool:
            it.send(it.engine.publish([]))
            self.serve()
            return bool(self.state(number)["applied"])

        await eventually(fact)
        await self.agrees(number)


@contextlib.asynccontextmanager
async def rigged() -> AsyncIterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        for it in rig.publishers:
            it.close()
        await rig.sources.close()
        rig.context.term()


def in_loop(test: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    """Run with uvloop, as the Conductor does."""

    async def run() -> None:
        async with rigged() as rig:
            await test(rig)
        assert len(asyncio.all_tasks()) == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("old", [False, True])
def test_who_comes_late_learns_all_and_goes_on_live(old: bool) -> None:
    async def run(rig: Rig) -> None:
        it = rig.publisher(old=old)
        for _ in range(200):
            it.step()
        await rig.agrees()
        assert it.requests[0] == 0
        await rig.connected()
        for _ in range(100):
            it.step()
        await rig.agrees()
        assert rig.claimed()

    in_loop(run)


def test_a_gap_is_replayed_and_a_lost_end_is_found() -> None:
    async def run(rig: Rig) -> None:
        it = rig.publisher()
        await rig.connected()
        for _ in range(5):
            it.engine.step()
        it.step()
        await rig.agrees()
        assert (rig.state()["gaps"], rig.state()["resyncs"]) == (1, 0)
        it.engine.step()
        rig.sources.check()
        await rig.agrees()
        assert rig.state()["resyncs"] == 0

    in_loop(run)


def test_an_engine_that_says_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "CHECK_S", 0.02)

    async def run(rig: Rig) -> None:
        it = rig.publisher()
        await rig.connected()
        while it.engine.step()[0] < 5 or not it.engine.keys:
            pass
        await rig.agrees()
        assert rig.claimed()

    in_loop(run)


def test_an_engine_that_begins_anew_is_followed() -> None:
    async def run(rig: Rig) -> None:
        it = rig.publisher()
        for _ in range(20):
            it.step()
        await rig.agrees()
        it.close()
        it.engine.restart()
        await eventually(it.reopened)
        for _ in range(5):
            it.engine.step()
        rig.sources.check()
        await rig.agrees()
        assert rig.state()["restarts"] == 1
        await rig.connected()

    in_loop(run)


def test_without_replays_it_goes_on_from_now() -> None:
    async def run(rig: Rig) -> None:
        it = rig.publisher(replays=False)
        await rig.connected()
        it.step()
        it.engine.step()
        it.engine.cached.clear()
        it.send(it.engine.publish([{"type": "AllBlocksCleared"}]))
        it.step()
        await rig.agrees()
        assert rig.state()["gaps"] == rig.state()["resyncs"] == 1

    in_loop(run)


def test_replays_that_do_not_come_are_asked_for_with_pauses_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "REPLAY_S", 0.05)
    monkeypatch.setattr(vllm, "PAUSE_S", 0.01)

    async def run(rig: Rig) -> None:
        it = rig.publisher()
        it.silent = True

        def fact() -> bool:
            it.step()
            rig.serve()
            return bool(rig.state()["applied"])

        await eventually(fact)
        assert len(it.requests) >= 2
        await eventually(lambda: rig.claimed() <= it.engine.keys and rig.claimed())

    in_loop(run)


def test_garbage_is_counted_and_never_raises() -> None:
    async def run(rig: Rig) -> None:
        draw = random.Random(7)
        it = rig.publisher()
        await rig.connected()
        for _ in range(300):
            count = draw.randrange(1, 5)
            it.pub.send_multipart([draw.randbytes(draw.choice([0, 1, 8, 9, 40])) for _ in range(count)])
        number, payload = it.engine.step()
        for _ in range(300):
            cut = bytearray(payload)
            cut[draw.randrange(len(cut))] ^= draw.randrange(1, 256)
            it.send((number, bytes(cut)))
        it.step()
        await eventually(lambda: rig.serve() or rig.state()["unreadable"] > 100)  # type: ignore[func-returns-value]
        it.engine.cached.clear()
        it.send(it.engine.publish([{"type": "AllBlocksCleared"}]))
        it.step()
        rig.sources.check()
        await rig.agrees()

    in_loop(run)


def test_a_burst_is_read_a_few_at_a_time_and_wholly() -> None:
    async def run(rig: Rig) -> None:
        it = rig.publisher(buffer=10_000)
        await rig.connected()
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(others())
        for _ in range(1500):
            it.step()
        await rig.agrees()
        # Some are read before the other has its first turn.
        assert turns > 1500 // vllm.FRAMES_A_TURN // 2
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    in_loop(run)


def test_instances_that_leave_take_their_sockets_along() -> None:
    async def run(rig: Rig) -> None:
        for number in range(20):
            rig.publisher()
            assert len(rig.publishers) == number + 1
        assert list(rig.sight.state()["sources"]) == ["events:0.0"]
        rig.sources.remove(0)
        assert rig.sight.state()["sources"] == {}

    in_loop(run)


def test_who_was_away_is_asked_whether_it_has_begun_anew_and_is_not_forgotten() -> None:
    async def run(rig: Rig) -> None:
        it = rig.publisher(buffer=10)
        await rig.connected()
        for _ in range(12):
            for _ in range(5):  # fewer than it could say again, so that none is lost for good
                it.step()
            await rig.agrees()
        asked, before = len(it.requests), rig.claimed()
        rig.sources.back(0)
        assert rig.claimed() == before, "more than the engine could say again"
        await rig.agrees()
        assert rig.claimed() == before and len(it.requests) > asked and not rig.state()["resyncs"]
        it.engine = ToyEngine(random.Random(2), 10)
        rig.sources.back(0)
        await rig.agrees()
        assert rig.state()["restarts"] == 1 and not rig.claimed()

    in_loop(run)


def test_who_was_away_and_publishes_nothing_may_hold_nothing() -> None:
    async def run(rig: Rig) -> None:
        rig.sources.add(0, InstanceSpec("e0", "m", "m", block_tokens=BLOCK))
        rig.sight.expect(0, rig.sight.lenses("m", "", [1] * 4 * BLOCK))
        assert rig.claimed()
        rig.sources.back(0)
        assert not rig.claimed()

    in_loop(run)


def test_keys_with_another_root_are_told_again() -> None:
    async def run(rig: Rig) -> None:
        it = rig.publisher()
        ids = [2] * 3 * BLOCK
        it.send(it.engine.publish(it.engine.serve(ids)))
        await rig.agrees()
        rig.sight._devices[0]._root = lambda salt: b"another".ljust(32)
        rig.sight._devices[0].forget_all()
        rig.sight.on_again(0)
        wanted = set(chunk_keys(b"another".ljust(32), ids, BLOCK))
        await eventually(lambda: rig.serve() or rig.claimed() == wanted)  # type: ignore[func-returns-value]

    in_loop(run)


def test_ranks_publish_so_many_ports_further_on() -> None:
    assert rank_endpoint("tcp://127.0.0.1:5557", 0) == "tcp://127.0.0.1:5557"
    assert rank_endpoint("tcp://[::1]:5557", 3) == "tcp://[::1]:5560"
