"""Conductors that tell each other their loads, over buses that lose, forge and break."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from headwater.conductor.counts import Counts
from headwater.conductor.directory_bus import DirectoryBus
from headwater.conductor.resp_messages import BUFFER_BYTES, Replies, Reply
from headwater.conductor.sharing import (
    BIG_TOKENS,
    CONDUCTORS_MAX,
    LOOK_S,
    MESSAGE_BYTES,
    PERIOD_S,
    Received,
    Sharing,
)
from headwater.conductor.workers_bus import WorkersBus
from headwater.core.loads import Totals
from headwater.errors import ConfigError, ProtocolError, RefusedError
from headwater.places import parse_remote
from headwater.tiers.remote import endpoint_of
from headwater.tiers.resp import ServerError
from tests.conductor.brain.rig import BrainRig, MadeTimers, prompt, spec
from tests.servers import redis_server, valkey_program

pack = msgspec.msgpack.encode


class MadeBus:
    """A bus between those of one list, that loses what it is told to."""

    def __init__(self, ends: list[MadeBus], *, local: bool = True) -> None:
        self.local = local
        self._ends = ends
        self.received: Received | None = None
        self.lose = lambda: False
        self.sent: list[bytes] = []

    def start(self, received: Received) -> None:
        """See `Bus`."""
        self.received = received
        self._ends.append(self)

    def send(self, message: bytes) -> None:
        """See `Bus`."""
        self.sent.append(message)
        for it in self._ends:
            if it.received is not None and not self.lose():
                it.received(message)

    def close(self) -> None:
        """See `Bus`."""
        self.received = None


class SharingRig:
    """Some Conductors of one fleet on one bus and one clock."""

    def __init__(self, count: int = 2, *, instances: int = 2, local: bool = True) -> None:
        self.timers, ends = MadeTimers(), []
        self.brains = [
            BrainRig(instances, quiet=True, name=f"c{it}", timers=self.timers, admission=False) for it in range(count)
        ]
        self.buses = [MadeBus(ends, local=local) for _ in range(count)]
        self.wall = 1000
        self.sharings = [
            Sharing(it.brain, it.roster, self.timers, it.counts, [bus], cluster="x", wall_ns=self._wall)
            for it, bus in zip(self.brains, self.buses, strict=True)
        ]
        for it in self.sharings:
            it.start()

    def _wall(self) -> int:
        self.wall += 1
        return self.wall

    def loads(self, at: int) -> list[Totals]:
        """What one of them sees."""
        book, now = self.brains[at].brain.loads.book, self.timers.now
        return [book.load(number, now) for number in self.brains[at].roster.instances()]

    def count(self, at: int, label: str) -> float:
        """How many messages came to that."""
        return self.brains[at].counts.numbers.get(("shared", label), 0)


def test_two_see_the_sum_and_forget_who_says_bye() -> None:
    rig = SharingRig()
    first = [rig.brains[0].take(prompt(it)) for it in range(3)]
    rig.brains[1].take(prompt(9))
    rig.timers.run(PERIOD_S + LOOK_S)
    assert rig.loads(0) == rig.loads(1)
    assert sum(it.waiting_requests for it in rig.loads(0)) == 4
    rig.brains[0].finish(first[0])
    rig.timers.run(PERIOD_S + LOOK_S)
    assert sum(it.waiting_requests for it in rig.loads(1)) == 3
    rig.sharings[0].close()
    assert sum(it.waiting_requests for it in rig.loads(1)) == 1
    rig.sharings[1].close()
    assert rig.timers.pending() == 0


def test_two_do_not_go_to_the_same_place() -> None:
    rig = SharingRig(instances=4)
    for number in range(40):
        rig.brains[number % 2].take(prompt(number))
        rig.timers.run(0.05)
    counts = [it.waiting_requests for it in rig.loads(0)]
    assert max(counts) - min(counts) <= 3, counts


def test_much_at_once_is_said_at_once() -> None:
    rig = SharingRig()
    rig.timers.run(PERIOD_S + 0.05)
    before = len(rig.buses[0].sent)
    rig.brains[0].take(prompt(1, BIG_TOKENS + 1))
    rig.timers.run(1.5 * LOOK_S)
    assert len(rig.buses[0].sent) == before + 1 and sum(it.waiting_requests for it in rig.loads(1)) == 1


def test_lost_messages_are_repaired() -> None:
    rig, draw = SharingRig(3), random.Random(20240907)
    for bus in rig.buses:
        bus.lose = lambda: draw.random() < 0.5
    live = []
    for number in range(200):
        live.append((number % 3, rig.brains[number % 3].take(prompt(number))))
        if len(live) > 10:
            at, client = live.pop(draw.randrange(len(live)))
            rig.brains[at].finish(client)
        rig.timers.run(0.02)
    for bus in rig.buses:
        bus.lose = lambda: False
    rig.timers.run(2 * PERIOD_S)
    assert rig.loads(0) == rig.loads(1) == rig.loads(2)


def test_instances_are_named_on_the_wire() -> None:
    rig = SharingRig()
    for it in rig.brains:
        it.roster.unregister("i0", 1)
    rig.timers.run(0.1)
    rig.brains[0].roster.register(spec("p"), 2)  # number 0 here
    rig.brains[1].roster.register(spec("q"), 2)  # and here
    rig.brains[0].roster.register(spec("q"), 3)
    number = rig.brains[1].roster.by_name("q")
    assert number == 0
    for at in range(4):
        rig.brains[1].take(prompt(at))
    rig.timers.run(PERIOD_S + LOOK_S)
    mine, theirs = rig.brains[0].roster, rig.brains[1].brain.loads.book
    book = rig.brains[0].brain.loads.book
    at_q = mine.by_name("q")
    assert at_q == 2 and book.load(at_q, rig.timers.now) == theirs.load(0, rig.timers.now) != Totals()
    assert book.load(0, rig.timers.now) == Totals(), "nobody has p but us"


def said(**changed: object) -> bytes:
    """A message of another Conductor."""
    fields: dict[str, object] = {
        "tag": "said", "version": 1, "cluster": "x", "conductor": "z", "serial": 5, "begun": (0, 0, 0, 0),
        "totals": {"i0": (1, 2, 3, 4)}, "newest": 0,
    }  # fmt: skip
    fields.update(changed)
    return pack(tuple(fields.values()))


def changed(name: str = "x1", url: str = "http://127.0.0.1:9", stamp: int = 10**6, **more: object) -> bytes:
    """A registration at another worker."""
    it = ("model", "m", url, "both", None, None, None, False, 1, None, None)
    return pack(("changed", 1, more.get("cluster", "x"), "z", [(stamp, name, it)]))


@pytest.mark.parametrize(
    ("message", "label"),
    [
        (b"", "malformed"), (b"\xff" * 100, "malformed"), (pack({"a": 1}), "malformed"), (b"\x91" * 5000, "malformed"),
        (said()[:-3], "malformed"), (said(serial=-1), "malformed"), (said(conductor="a" * 500), "malformed"),
        (said(conductor=""), "malformed"), (said(begun=(1, 2, 3)), "malformed"),
        (said(totals={"i0": (-1, 0, 0, 0)}), "malformed"), (said(totals={"i0": (1 << 60, 0, 0, 0)}), "malformed"),
        (said(totals={f"i{it}": (1, 1, 1, 1) for it in range(2000)}), "malformed"), (said(tag="other"), "malformed"),
        (said(cluster="y"), "foreign"), (said(version=2), "foreign"), (b"x" * (MESSAGE_BYTES + 1), "too long"),
        (changed(url="http://169.254.169.254"), "refused"), (changed(url="http://8.8.8.8"), "refused"),
        (changed(name="i0"), "refused"), (changed(cluster="y"), "foreign"), (changed(name="a" * 300), "malformed"),
    ],
    ids=lambda it: None if isinstance(it, str) else "",
)  # fmt: skip
def test_what_does_not_fit_is_dropped_and_counted(message: bytes, label: str) -> None:
    rig = SharingRig(1)
    received = rig.buses[0].received
    assert received is not None
    before = rig.count(0, label)
    received(message)
    assert rig.count(0, label) == before + 1
    assert rig.loads(0) == [Totals(), Totals()] and len(rig.brains[0].roster.instances()) == 2
    received(said())
    assert rig.loads(0)[0] == Totals(1, 2, 3, 4) and rig.count(0, "heard") == 1


def test_too_many_conductors_are_not_believed() -> None:
    rig = SharingRig(1)
    received = rig.buses[0].received
    assert received is not None
    for number in range(CONDUCTORS_MAX + 5):
        received(said(conductor=f"z{number}"))
    assert rig.count(0, "too many") == 5
    rig.timers.run(60.0)
    received(said(conductor="late"))
    assert rig.count(0, "too many") == 5 and rig.loads(0)[0] == Totals(1, 2, 3, 4)


def test_registered_at_one_worker_is_there_for_all() -> None:
    rig = SharingRig(3)
    rig.sharings[0].register(spec("new", capacity_tokens=5))
    assert all(it.roster.by_name("new") == 2 for it in rig.brains)
    assert rig.brains[1].roster.instances()[2].capacity_tokens == 5
    client = next(it for it in (rig.brains[1].take(prompt(n, 4)) for n in range(9)) if it.at == 2)
    assert rig.sharings[2].unregister("new") and not rig.sharings[2].unregister("never")
    rig.timers.run(0.1)
    assert [it.roster.by_name("new") for it in rig.brains] == [None, 2, None], "a request is under way there"
    rig.brains[1].finish(client)
    assert rig.brains[1].roster.by_name("new") is None
    with pytest.raises(RefusedError):
        rig.sharings[0].register(spec("far", url="http://8.8.8.8"))


def test_a_worker_that_missed_it_learns_of_it() -> None:
    rig = SharingRig(2)
    rig.buses[0].lose = lambda: True
    for number in range(100):
        rig.sharings[0].register(spec(f"n{number}"))
    rig.sharings[0].unregister("n7")
    rig.buses[0].lose = lambda: False
    assert rig.brains[1].roster.by_name("n1") is None
    rig.timers.run(2.0)
    assert rig.brains[1].roster.by_name("n99") is not None and rig.brains[1].roster.by_name("n7") is None
    assert rig.brains[1].roster.newest == rig.brains[0].roster.newest


def test_registrations_from_other_hosts_are_dropped() -> None:
    rig = SharingRig(2, local=False)
    rig.sharings[0].register(spec("new"))
    rig.timers.run(3.0)
    assert rig.brains[1].roster.by_name("new") is None
    received = rig.buses[1].received
    assert received is not None
    received(changed())
    assert rig.brains[1].roster.by_name("x1") is None and rig.count(1, "foreign") == 1


# ---- replies of a server


def test_replies_in_pieces_of_any_size() -> None:
    stream = b"+OK\r\n:3\r\n*3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$5\r\na\r\nb\r\r\n$-1\r\n-ERR no way\r\n*0\r\n"
    expected: list[Reply] = [b"OK", 3, [b"message", b"ch", b"a\r\nb\r"], None, ServerError("ERR", "no way"), []]
    for size in range(1, len(stream) + 1):
        replies, found = Replies(), []
        for at in range(0, len(stream), size):
            found += replies.take(stream[at : at + size])
        assert found == expected, size


@pytest.mark.parametrize(
    "data",
    [
        b"what\r\n", b"$999999999\r\n", b"$-2\r\n", b"*9999\r\n", b"*-1\r\n", b":1x\r\n", b"$2\r\nabcd",
        b"+" + b"a" * 2000,
        b"*1\r\n*1\r\n*1\r\n+a\r\n", b":" + b"9" * 30 + b"\r\n",
    ],
)  # fmt: skip
def test_nonsense_is_not_read(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Replies().take(data)
    assert BUFFER_BYTES > MESSAGE_BYTES


# ---- real sockets


async def eventually(fact: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait in the loop until it holds."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while not fact():
        assert loop.time() < until_s, f"not so within {within_s} s"
        step: asyncio.Future[None] = loop.create_future()
        loop.call_later(0.005, step.set_result, None)
        await step


def run(main: Callable[[], Awaitable[None]]) -> None:
    """In a loop of its own."""

    async def whole() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(whole())


def test_workers_hear_each_other_whoever_starts_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("w") / "b"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard: dict[int, list[bytes]] = {it: [] for it in range(3)}
        buses = []
        for number in (2, 0, 1):
            bus = WorkersBus(folder, number, 3, loop)
            bus.start(heard[number].append)
            buses.append((number, bus))
        life = 1

        def everybody() -> bool:
            for number, bus in buses:
                bus.send(b"%d in life %d" % (number, life))
            every = {b"%d in life %d" % (it, life) for it in range(3)}
            return all(every - set(heard[mine]) == {b"%d in life %d" % (mine, life)} for mine in heard)

        await eventually(everybody)
        number, bus = buses.pop(0)
        bus.close()
        again, life = WorkersBus(folder, number, 3, loop), 2
        again.start(heard[number].append)
        buses.append((number, again))
        await eventually(everybody)
        many = [b"%06d" % it for it in range(200)]  # more than are read at once
        before = len(heard[0])
        for message in many:
            again.send(message)
        await eventually(lambda: [it for it in heard[0][before:] if it in many] == many)
        for _, bus in buses:
            bus.close()
        buses[0][1].send(b"too late")

    run(main)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.iterdir()), "no socket is left"


def test_the_folder_is_ours_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(shared)
    (tmp_path / "file").touch()
    loop = asyncio.new_event_loop()
    try:
        for path in (shared, link, tmp_path / "file"):
            with pytest.raises(ConfigError, match="the workers' bus"):
                WorkersBus(path, 0, 1, loop)
    finally:
        loop.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with redis_server(valkey_program(), tmp_path_factory.mktemp("valkey")) as server:
        yield server


def test_conductors_on_several_hosts(valkey, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rigs = [BrainRig(2, quiet=True, name=f"h{it}", timers=loop, admission=False) for it in range(2)]
        buses = [DirectoryBus(endpoint_of(parse_remote(valkey.url())), "x", it.counts) for it in rigs]
        stranger = DirectoryBus(endpoint_of(parse_remote(valkey.url())), "y", Counts())
        strange: list[bytes] = []
        stranger.start(strange.append)
        sharings = [
            Sharing(it.brain, it.roster, loop, it.counts, [bus], cluster="x", wall_ns=time.time_ns)
            for it, bus in zip(rigs, buses, strict=True)
        ]
        for it in sharings:
            it.start()
        client = rigs[0].take(prompt(1))
        await eventually(lambda: rigs[1].brain.loads.book.load(client.at, loop.time()) == Totals(1, 900))
        valkey.kill()
        await eventually(lambda: not buses[0].is_connected)
        valkey.start()
        rigs[0].finish(client)
        await eventually(lambda: rigs[1].brain.loads.book.load(client.at, loop.time()) == Totals(), 20.0)
        await eventually(lambda: all(it.is_connected for it in buses), 20.0)
        valkey.say("PUBLISH", "headwater:x:conductors", b"\x00garbage")
        await eventually(lambda: rigs[1].counts.numbers.get(("shared", "malformed")))
        for it in sharings:
            it.close()
        stranger.close()
        for bus in (*buses, stranger):
            await bus.closed()
        assert not strange, "another cluster's channel"

    run(main)


def test_a_server_that_is_no_server_is_tried_again_and_harms_nobody() -> None:
    async def main() -> None:
        counts, came = Counts(), []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        bus = DirectoryBus(endpoint_of(parse_remote(f"redis://127.0.0.1:{port}")), "x", counts)
        bus.start(lambda message: None)
        await eventually(lambda: counts.numbers.get(("shared", "disconnected"), 0) >= 2)
        bus.send(b"nowhere")
        assert counts.numbers["shared", "unsent"] >= 1 or bus.is_connected
        bus.close()
        await bus.closed()
        server.close()
        await server.wait_closed()
        assert len(came) >= 2

    run(main)
