"""A watch over real nodes: saved chunks by tier, registrations, figures; nodes that restart, hang or lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from headwater.conductor.events import frames, nodes
from headwater.conductor.events.lines import by_socket
from headwater.conductor.events.nodes import NodeWatch
from headwater.conductor.events.sources import BYTES_S, HOST_BYTES_S, HOST_LATENCY_S, LATENCY_S, Sources
from headwater.conductor.sight import REMOTE, Sight
from headwater.config import NodeConfig
from headwater.core.hashing import chunk_keys
from headwater.fleet import Link, Place
from headwater.fleetfile.model import InstanceSpec
from headwater.node.messages import Figure, Moves, Watched, Welcome, encode
from headwater.tiers.memory import MemoryTier
from headwater.types import Tier
from tests.conductor.events.polling import eventually
from tests.node.conftest import Rig
from tests.node.peers import LAYOUT, namespace, save
from tests.node.tiered import disk_of, plug, with_tiers

IDS = list(range(64))
HOST, DISK = Place(Tier.HOST, 0), Place(Tier.DISK, 0)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(socket=f"unix:{tmp_path}/n.sock", host_memory=8 << 20, slab=64 << 10, prefault=False, drain_s=0.1)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Nodes that end with the test."""
    made: list[Rig] = []
    yield made
    for it in made:
        it.close()


@contextlib.asynccontextmanager
async def watching(sight: Sight, *addresses: str) -> AsyncIterator[Sources]:
    sources = Sources(sight, [(f"n{number}", address) for number, address in enumerate(addresses)])
    try:
        yield sources
    finally:
        await sources.close()


def sighted(count: int = 1) -> Sight:
    sight = Sight([f"n{number}" for number in range(count)])
    sight.joined(0, InstanceSpec("one", "m", "m", node="n0", block_tokens=LAYOUT.chunk_tokens))
    return sight


def held(sight: Sight, salt: str = "") -> dict[Place, int]:
    return dict(sight.held("m", sight.lenses("m", salt, IDS)))


def in_loop(main: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


def save_prompt(rig: Rig, salt: str = "", instance: str = "one") -> None:
    """Save a prompt as the plug-in does: keys of the request's salt in the namespace of the engine."""
    session = rig.session(instance, maps=True)
    save(session, chunk_keys(namespace(salt=salt).root(), IDS, LAYOUT.chunk_tokens))


def test_saved_chunks_are_seen_by_tier_and_by_salt(
    config: NodeConfig, rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (url,) = plug(monkeypatch, {"far": MemoryTier()})
    rigs.append(rig := Rig(with_tiers(config, disk=disk_of(tmp_path), remotes=(url,))))
    save_prompt(rig, "s")
    sight = sighted()

    async def main() -> None:
        async with watching(sight, config.socket) as sources:
            await eventually(lambda: held(sight, "s") == {HOST: 64, DISK: 64, REMOTE: 64})
            assert held(sight) == held(sight, "other") == {}
            save_prompt(rig)
            await eventually(lambda: held(sight) == {HOST: 64, DISK: 64, REMOTE: 64})
            answer = sight.query("m", IDS)["one"]
            assert answer == {"longest_matched": 64, "GPU": 0, "CPU": 64, "DISK": 64, "DP": {"0": 0}}
            rig.clock.moved_s += 10
            await eventually(lambda: set(sources.links) == {(HOST, 0), (DISK, 0), (REMOTE, 0)})
            assert all(it.latency_s > 0 and it.bytes_s > 0 for it in sources.links.values())
            state = sight.state()
            assert state["models"]["m"]["registered"]
            assert state["sources"]["node:n0"]["up"]

    in_loop(main)


def test_a_node_that_restarts_is_seen_as_it_is_then(config: NodeConfig, rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(config))
    save_prompt(rig)
    sight = sighted()

    async def main() -> None:
        async with watching(sight, config.socket):
            await eventually(lambda: held(sight) == {HOST: 64})
            rigs.pop().close()
            await eventually(lambda: held(sight) == {})
            assert sight.state()["models"]["m"]["registered"]
            rigs.append(again := Rig(config))
            await eventually(lambda: sight.state()["sources"]["node:n0"]["up"])
            save_prompt(again)
            await eventually(lambda: held(sight) == {HOST: 64})
            assert sight.state()["sources"]["node:n0"]["losses"] == 1

    in_loop(main)


def test_a_conductor_that_restarts_learns_the_same(config: NodeConfig, rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(config))
    save_prompt(rig)

    async def main() -> None:
        for _ in range(3):
            sight = sighted()
            async with watching(sight, config.socket):
                await eventually(lambda: held(sight) == {HOST: 64})  # noqa: B023

    in_loop(main)


def test_a_watch_that_falls_behind_is_told_everything_again(
    config: NodeConfig, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.node.watching.QUEUE_LIMIT", 3)
    rigs.append(rig := Rig(config))
    sight = sighted()

    async def main() -> None:
        async with watching(sight, config.socket):
            await eventually(lambda: sight.state()["sources"]["node:n0"]["answers"] > 0)
            save_prompt(rig)  # the loop stands still meanwhile
            save_prompt(rig, "s")
            await eventually(lambda: held(sight) == held(sight, "s") == {HOST: 64})
            assert sight.state()["sources"]["node:n0"]["dumps"] >= 2

    in_loop(main)


def test_nodes_are_told_apart(config: NodeConfig, rigs: list[Rig], tmp_path: Path) -> None:
    other = replace(config, socket=f"unix:{tmp_path}/o.sock")
    rigs += [Rig(config), Rig(other)]
    sight = sighted(2)

    async def main() -> None:
        async with watching(sight, config.socket, other.socket):
            save_prompt(rigs[0])
            save_prompt(rigs[1], instance="one.second")
            await eventually(lambda: held(sight) == {HOST: 64, Place(Tier.HOST, 1): 64})

    in_loop(main)


def test_a_node_that_is_not_there_is_tried_again_with_pauses(tmp_path: Path) -> None:
    sight = sighted()

    async def main() -> None:
        async with watching(sight, f"unix:{tmp_path}/none.sock"):
            await eventually(lambda: sight.state()["sources"]["node:n0"]["trouble"])
            assert not sight.state()["sources"]["node:n0"]["up"]

    in_loop(main)


ANSWERS = {
    "silence": b"",
    "garbage": os.urandom(0) + b"\x05\0\0\0abcde",
    "too much": b"\xff\xff\xff\xff",
    "half": encode(Watched(1, 1, ""))[:-1],
    "another message": encode(Welcome(2, "", "", 0, ())),
    "half a key": encode(Watched(1, 1, "", (Moves("host", b"k" * 17, b""),))),
    "no tier": encode(Watched(1, 1, "", (Moves("attic", b"", b""),))),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_node_says_wrongly_costs_its_watch_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SILENT_S", 0.1)
    path = f"{tmp_path}/l.sock"
    greeted = 0

    async def liar(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal greeted
        for answer in (encode(Welcome(2, "", "", 0, ())), ANSWERS[name]):
            with contextlib.suppress(asyncio.IncompleteReadError):
                size = frames.body_bytes(await reader.readexactly(4))
                await reader.readexactly(size)
                writer.write(answer)
                greeted += 1
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async def main() -> None:
        sight = sighted()
        server = await asyncio.start_unix_server(liar, path)
        watch = NodeWatch(0, by_socket(f"unix:{path}"), sight, lambda *_: None)
        watch.start()
        await eventually(lambda: greeted >= 4)  # it came again
        assert not watch.is_up
        assert watch.trouble
        await watch.close()
        server.close()
        await server.wait_closed()
        assert held(sight) == {}

    in_loop(main)


def own_memory(nodes: int) -> dict[tuple[Place, int], Link]:
    """The links from nodes' own memory to their engines, which are always there."""
    return {(Place(Tier.HOST, it), it): Link(HOST_LATENCY_S, HOST_BYTES_S) for it in range(nodes)}


def test_nodes_of_one_cluster_are_taken_to_reach_each_other_until_they_say_how_fast() -> None:
    async def main() -> None:
        sources = Sources(Sight(["n0", "n1"]), [("n0", ""), ("n1", "")], are_joined=True)
        first, second = Place(Tier.HOST, 0), Place(Tier.HOST, 1)
        own = own_memory(2)
        assert sources.links == own | {(first, 1): Link(LATENCY_S, BYTES_S), (second, 0): Link(LATENCY_S, BYTES_S)}
        sources._measured(1, "second", (Figure("disk", "", 1.0, 1e3),))
        sources._measured(0, "first", (Figure("host", "second", 0.25, 1e6),))
        assert sources.links[second, 0] == Link(0.25, 1e6) and sources.links[first, 1] == Link(LATENCY_S, BYTES_S)
        sources._measured(1, "second", ())
        assert set(sources.links) == {*own, (first, 1), (second, 0)}
        await sources.close()

    in_loop(main)


def test_figures_become_links_and_nonsense_does_not() -> None:
    async def main() -> None:
        sources = Sources(Sight(["n0", "n1"]), [("n0", ""), ("n1", "")])
        sources._measured(1, "second", ())
        sources._measured(
            0,
            "first",
            (
                Figure("disk", "", 0.5, 1e6),
                Figure("remote", "", float("nan"), -1.0),
                Figure("remote", "", 1.0, 1e3),
                Figure("host", "second", 0.25, None),
                Figure("host", "unheard-of", 1.0, 1.0),
            ),
        )
        second = Place(Tier.HOST, 1)
        assert sources.links == own_memory(2) | {
            (DISK, 0): Link(0.5, 1e6),
            (REMOTE, 0): Link(1e-3, 1e9),
            (second, 0): Link(0.25, 1e9),
        }
        link = sources.links[DISK, 0]
        link.queued_bytes = 7
        sources._measured(0, "first", (Figure("disk", "", 0.1, 1e6),))
        assert sources.links == own_memory(2) | {(DISK, 0): link}
        assert (link.latency_s, link.queued_bytes) == (0.1, 7)
        await sources.close()

    in_loop(main)


class Unread(dict[tuple[Place, int], Link]):
    """Links that nobody goes through from end to end."""

    def __iter__(self) -> Iterator[tuple[Place, int]]:
        raise AssertionError("there are as many as pairs of nodes")


def test_what_one_node_tells_costs_its_own_links_alone() -> None:
    async def main() -> None:
        names = [f"n{it}" for it in range(5)]
        sources = Sources(Sight(names), [(it, "") for it in names], are_joined=True)
        sources.links = Unread(sources.links)
        for number, name in enumerate(names):
            others = [Figure("host", it, 0.5, 1e6) for it in names if it != name]
            sources._measured(number, name, (*others, Figure("disk", "", 0.5, 1e6), Figure("remote", "", 0.5, 1e6)))
        assert len(sources.links) == 5 * 5 + 5 + 5
        sources._measured(4, "n4", ())
        sources.member_left(0, "n0")
        assert sources.links.keys() == {
            *((Place(Tier.HOST, source), target) for source in range(1, 5) for target in range(1, 5)),
            *((place, target) for target in range(1, 4) for place in (REMOTE, Place(Tier.DISK, target))),
        }
        for number in range(1, 5):
            sources.member_left(number, names[number])
        assert not len(sources.links) and not sources._to
        await sources.close()

    in_loop(main)


def test_a_listening_socket_that_nobody_serves_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CONNECT_S", 0.05)
    path = f"{tmp_path}/d.sock"

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(path)
            deaf.listen()
            watch = NodeWatch(0, by_socket(f"unix:{path}"), sighted(), lambda *_: None)
            watch.start()
            await eventually(lambda: watch.trouble)
            await watch.close()

    in_loop(main)
