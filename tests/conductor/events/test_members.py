"""Nodes of other hosts, by what the directory lists: what they hold is seen over the peers' listener; wrong secrets,
other versions, lies, restarts; nodes that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import uvloop

from headwater.conductor import registry
from headwater.conductor.counts import Counts
from headwater.conductor.events import frames, lines, members, nodes
from headwater.conductor.events.errands import NodesErrands
from headwater.conductor.events.frames import Watch, Watched
from headwater.conductor.events.lines import by_peers, expect
from headwater.conductor.events.members import ClusterNodes, Members
from headwater.conductor.events.namespaces import Base, Registration
from headwater.conductor.events.sources import BYTES_S, JOINED_MAX, LATENCY_S, Sources
from headwater.conductor.registry import Roster
from headwater.conductor.sight import Sight
from headwater.config import NodeConfig
from headwater.core.hashing import chunk_keys
from headwater.core.rates import USUAL
from headwater.errors import HeadwaterError, RefusedError, UnavailableError
from headwater.fleet import Link, Place
from headwater.fleetfile.model import ConductorSpec, FleetFile, InstanceSpec, MembersSpec, NodeSpec
from headwater.node import conductors
from headwater.node.client import ask_operator, open_session
from headwater.node.messages import Evict
from headwater.transports import wire
from headwater.transports.credentials import Credentials, load_credentials
from headwater.transports.memory_exports import MemoryExports
from headwater.transports.server import PeerServer
from headwater.types import Listed, Member, Standing, Tier, pack_keys
from tests.clustered import Raise, cluster_of, raising, valkey
from tests.conductor.events.polling import eventually
from tests.conductor.running import running, until
from tests.node.conftest import Rig
from tests.node.peers import LAYOUT, namespace, save
from tests.node.tiered import disk_of
from tests.servers import RedisServer
from tests.transports.certificates import Authority

__all__ = ["valkey"]
IDS = list(range(64))
KEYS = chunk_keys(namespace().root(), IDS, LAYOUT.chunk_tokens)
ME = Member("conductor", 1, "")
INSTANCE = InstanceSpec("one", "m", "m", node="far", url="http://127.0.0.1:1", block_tokens=LAYOUT.chunk_tokens)


def in_loop(main: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is asked often, and pauses are short."""
    monkeypatch.setattr(members, "PERIOD_S", 0.05)
    monkeypatch.setattr(nodes, "PAUSE_S_MAX", 0.2)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return secret(tmp_path / "token", "a token of the tests")


def secret(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text + "\n")
    return path


@pytest.fixture
def start(valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: Path) -> Iterator[Raise]:
    """Starts nodes of one cluster, in this process."""
    with raising(valkey, tmp_path, monkeypatch, token_file=str(token)) as raised:
        yield raised


class Seen:
    """What one worker has that sees the nodes of a cluster."""

    def __init__(self, config: NodeConfig, spec: MembersSpec, named: Sequence[NodeSpec] = ()) -> None:
        fleet = FleetFile("", tuple(named), (INSTANCE,), ConductorSpec(), directory=config.directory,
                          cluster=config.cluster)  # fmt: skip
        self.roster = Roster(fleet, USUAL)
        self.sight = Sight(self.roster.nodes)
        self.sight.joined(0, INSTANCE)
        self.sources = Sources(self.sight, [(it.name, it.socket) for it in named], are_joined=True)
        self.counts = Counts()
        self.errands = NodesErrands(self.counts)
        self.nodes = ClusterNodes(fleet, spec, self.roster, self.sources, self.errands)

    def place(self, name: str, tier: Tier = Tier.HOST) -> Place:
        return Place(tier, self.roster.node(name))

    def held(self) -> dict[Place, int]:
        return dict(self.sight.held("m", self.sight.lenses("m", "", IDS)))

    def source(self, name: str) -> dict:
        found: dict = self.sight.sources.get(f"node:{name}", dict)()
        return found

    async def close(self) -> None:
        await self.nodes.close()
        await self.errands.close()
        await self.sources.close()


@contextlib.asynccontextmanager
async def seeing(config: NodeConfig, token: Path | None, *named: NodeSpec, **spec: str) -> AsyncIterator[Seen]:
    it = Seen(config, MembersSpec(token_file=None if token is None else str(token), **spec), named)
    try:
        yield it
    finally:
        await it.close()


def save_prompt(rig: Rig, instance: str = "one") -> None:
    save(rig.session(instance, maps=True), KEYS)


def member_of(rig: Rig) -> Member:
    assert rig.node.cluster is not None
    return rig.node.cluster.member


def dial(rig: Rig, token: Path | None, **changes: object) -> lines.Dial:
    """A connection to a node as a member, with other words than are right."""
    credentials = load_credentials("" if token is None else str(token))
    cluster = str(changes.pop("cluster", rig.node.config.cluster))
    return by_peers(ME, replace(member_of(rig), **changes), cluster, credentials)


# ---- what is seen


def test_what_nodes_elsewhere_hold_is_seen_as_they_come_and_go(start: Raise, token: Path, tmp_path: Path) -> None:
    far = start("far", disk=f"{disk_of(tmp_path)}")

    async def main() -> None:
        async with seeing(far.node.config, token) as seen:
            await eventually(lambda: seen.source("far").get("up"))
            save_prompt(far)
            both = {seen.place("far"): 64, seen.place("far", Tier.DISK): 64}
            await eventually(lambda: seen.held() == both)
            other = await asyncio.to_thread(start, "other")
            save_prompt(other, "one.second")
            await eventually(lambda: seen.held() == both | {seen.place("other"): 64})
            pair = seen.place("far"), seen.roster.node("other")
            assert seen.sources.links[pair] == Link(LATENCY_S, BYTES_S)
            assert seen.sight.state()["models"]["m"]["registered"]
            await asyncio.to_thread(other.close)
            await eventually(lambda: seen.held() == both and "node:other" not in seen.sight.sources)
            assert not any(seen.roster.node("other") == it for _, it in seen.sources.links)
            assert seen.nodes.members.state()["members"] == 1
            seen.sources.member_left(seen.roster.node("far"), "far")
            assert seen.held() == {} and "node:far" not in seen.sight.sources

    in_loop(main)


def test_a_node_elsewhere_brings_up_what_it_is_told_to(start: Raise, token: Path, tmp_path: Path) -> None:
    far = start("far", disk=f"{disk_of(tmp_path)}")
    session = far.session("one", maps=True)
    save(session, KEYS)

    async def main() -> None:
        async with seeing(far.node.config, token) as seen:
            disk, host = seen.place("far", Tier.DISK), seen.place("far")
            await eventually(lambda: seen.held() == {host: 64, disk: 64})
            await asyncio.to_thread(evicted, far)
            await eventually(lambda: seen.held() == {disk: 64})
            number, root = seen.roster.node("far"), seen.sight.root("m", "")
            assert root is not None
            seen.errands.prefetch(number, root, KEYS)
            await eventually(lambda: seen.held() == {host: 64, disk: 64})
            seen.errands.prefetch(number, bytes(32), KEYS)  # nobody's namespace
            await eventually(lambda: seen.counts.numbers == {("prefetches", "refused"): 1})
            # A connection that the node, or an end of it, has closed meanwhile is made anew.
            hang_up(far)
            seen.errands.prefetch(number, bytes(32), KEYS)
            await eventually(lambda: seen.counts.numbers == {("prefetches", "refused"): 2})
            line = seen.errands._nodes[number]._line
            assert isinstance(line, lines.PeerLine)
            line._writer.close()
            seen.errands.prefetch(number, bytes(32), KEYS)
            await eventually(lambda: seen.counts.numbers == {("prefetches", "refused"): 3})
            seen.errands.prefetch(99, root, KEYS)  # no such node
            assert seen.counts.numbers == {("prefetches", "refused"): 3}

    in_loop(main)


def hang_up(rig: Rig) -> None:
    """End all its connections to others."""
    assert rig.node.cluster is not None and rig.node.cluster._served is not None
    for stream in list(rig.node.cluster._served.server._threads.values()):
        if stream is not None:
            stream.shut()


def evicted(rig: Rig) -> None:
    ask_operator(rig.address, Evict(namespace().root(), pack_keys(KEYS), below=False))


def test_a_node_whose_socket_the_file_has_is_watched_once(start: Raise, token: Path) -> None:
    far = start("far")

    async def main() -> None:
        async with seeing(far.node.config, token, NodeSpec("here", far.address)) as seen:
            await eventually(lambda: seen.source("here").get("up"))
            # It may have been listed before it has said by its socket which member it is.
            await eventually(lambda: "another name" in str(seen.source("far").get("trouble")))
            answers = seen.nodes.members.answers
            await eventually(lambda: seen.nodes.members.answers > answers + 1)
            assert "another name" in str(seen.source("far").get("trouble")) and seen.source("here")["up"]
            assert seen.nodes.members.state()["members"] == 0
        async with seeing(far.node.config, token, NodeSpec("far", far.address)) as seen:
            await eventually(lambda: seen.source("far").get("up") and seen.nodes.members.answers > 1)
            assert seen.nodes.members.state()["members"] == 0

    in_loop(main)


def test_a_node_that_begins_anew_is_seen_as_it_is_then(start: Raise, token: Path) -> None:
    far = start("far")
    save_prompt(far)

    async def main() -> None:
        async with seeing(far.node.config, token) as seen:
            await eventually(lambda: seen.held() == {seen.place("far"): 64})
            await asyncio.to_thread(far.close)
            await eventually(lambda: seen.held() == {})
            again = await asyncio.to_thread(start, "far")
            await eventually(lambda: seen.source("far").get("up"))
            assert seen.held() == {}
            await asyncio.to_thread(save_prompt, again)
            await eventually(lambda: seen.held() == {seen.place("far"): 64})

    in_loop(main)


# ---- who is not let in


def test_another_secret_is_said_and_tried_again_with_pauses(
    start: Raise, token: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    far = start("far")
    wrong = secret(tmp_path / "wrong", "another token of tests")

    async def main() -> None:
        async with seeing(far.node.config, wrong) as seen:
            await eventually(lambda: "token" in seen.source("far").get("trouble", ""))
            tried = refused(far, "token")
            began_s = time.monotonic()
            await eventually(lambda: refused(far, "token") > tried + 5)
            assert time.monotonic() - began_s > 0.35
            assert not seen.source("far")["up"] and seen.source("far")["answers"] == 0
            assert "expected a proof of this cluster's token" in seen.source("far")["trouble"]

    in_loop(main)
    said = [it for it in caplog.records if it.name == nodes.__name__]
    assert len(said) == 1 and "a token" not in said[0].getMessage() and "another token" not in said[0].getMessage()


def refused(rig: Rig, field: str) -> int:
    stats: dict = cluster_of(rig)["server"]
    found: int = stats["refused"].get(field, 0)
    return found


@pytest.mark.parametrize(
    ("field", "changes"),
    [("member", {"epoch": 1}), ("member", {"name": "near"}), ("cluster", {"cluster": "another"}), ("token", {})],
    ids=["another life", "another name", "another cluster", "no token"],
)
def test_whoever_is_not_meant_is_refused(field: str, changes: dict, start: Raise, token: Path) -> None:
    far = start("far")

    async def main() -> None:
        with pytest.raises(RefusedError) as error:
            await dial(far, None if field == "token" else token, **changes)()
        assert error.value.field == field

    in_loop(main)


def test_with_certificates_both_sides_are_who_they_say(
    valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "theirs")

    def tls(authority: Authority, name: str, trusted: Authority = ours) -> dict[str, str]:
        cert, key = authority.files(name)
        return {"tls_cert": cert, "tls_key": key, "tls_ca": str(trusted.path)}

    async def refusal(rig: Rig, **files: str) -> RefusedError:
        with pytest.raises(RefusedError) as error:
            await by_peers(ME, member_of(rig), rig.node.config.cluster, load_credentials("", **files))()
        return error.value

    async def main(rig: Rig, disguised: Rig) -> None:
        async with seeing(rig.node.config, None, **tls(ours, "conductor")) as seen:
            await eventually(lambda: seen.source("far").get("up"))
            await eventually(lambda: "certificate for near" in seen.source("near").get("trouble", ""))
        assert "conductor" in (await refusal(rig, **tls(ours, "somebody"))).expected
        for it in (
            await refusal(rig),
            await refusal(rig, **tls(theirs, "conductor")),
            await refusal(rig, **tls(ours, "conductor", theirs)),
        ):
            assert it.field == "tls"

    with raising(valkey, tmp_path, monkeypatch) as raised:
        rig, disguised = raised("far", **tls(ours, "far")), raised("near", **tls(ours, "elsewhere"))
        in_loop(lambda: main(rig, disguised))


@contextlib.asynccontextmanager
async def strange(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[str]:
    """The address of somebody who is no node."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        await server.wait_closed()


def test_without_credentials_nobody_beyond_loopback_is_believed() -> None:
    assert lines._is_loopback(("127.0.0.9", 1)) and lines._is_loopback(("::1", 1, 0, 0))
    assert not lines._is_loopback(("10.0.0.1", 1)) and not lines._is_loopback(None)

    async def main() -> None:
        said: list[bytes] = []

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said.append(await reader.read(1))
            writer.close()

        async with strange(hear) as address:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(lines, "_is_loopback", lambda peer: False)
                with pytest.raises(UnavailableError, match="only loopback is trusted"):
                    await by_peers(ME, Member("far", 1, address), "c", Credentials())()
            await eventually(lambda: said)
            assert said == [b""]

    in_loop(main)


# ---- versions, lies, silence


def letter(request: bytes, protocol: int = frames.PROTOCOL, session: bytes = b"s") -> bytes:
    return msgspec.msgpack.encode(frames.Letter(protocol, "0.0.9", session, msgspec.Raw(request)))


def test_another_version_is_refused_by_name(start: Raise, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = start("far")

    async def trouble() -> str:
        async with seeing(far.node.config, token) as seen:
            await eventually(lambda: seen.source("far").get("trouble"))
            return str(seen.source("far")["trouble"])

    async def newer() -> None:
        monkeypatch.setattr(frames, "PROTOCOL", 77)
        assert "protocol: expected 2 (headwater" in await trouble()
        monkeypatch.undo()

    async def older() -> None:
        # A node from before there was this topic.
        assert far.node.cluster is not None and far.node.cluster._served is not None
        del far.node.cluster._served.exports.topics[conductors.TOPIC]
        assert "topic: expected" in await trouble()

    in_loop(newer)
    in_loop(older)


WATCH = msgspec.msgpack.encode([31])
NO_LETTERS = {
    "nothing": b"",
    "garbage": b"\xc1",
    "too few": b"\x90",
    "garbage within": letter(b"\xc1"),
    "no message": letter(msgspec.msgpack.encode(["x"])),
    "another request": letter(msgspec.msgpack.encode([17])),
    "no session": letter(WATCH, session=b""),
    "long session": letter(WATCH, session=b"s" * 33),
}


@pytest.mark.parametrize("name", NO_LETTERS)
def test_what_is_no_letter_ends_its_connection(name: str, start: Raise, token: Path) -> None:
    far = start("far")

    async def main() -> None:
        line = await dial(far, token)()
        assert isinstance(line, lines.PeerLine)
        await line._say(wire.Kind.ASK, wire.encode_message(wire.Ask(frames.TOPIC, 1.0, NO_LETTERS[name])))
        with pytest.raises(ConnectionResetError):
            await line._hear(wire.Kind.ANSWER, 100)
        line.close()
        assert not len(far.node.watching)

    in_loop(main)


class Liar(MemoryExports):
    """Answers whatever it is asked with the same."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer, self.asked = answer, 0

    def told(self, peer: str, topic: str, body: bytes, until_s: float) -> bytes:
        self.asked += 1
        return self.answer


LIES = {
    "garbage": b"abcde",
    "nothing": b"",
    "another message": msgspec.msgpack.encode([2, 2, "", "", 0, []]),
    "half a key": msgspec.msgpack.encode([32, 1, 1, "", [["host", b"k" * 17, b""]]]),
    "no tier": msgspec.msgpack.encode([32, 1, 1, "", [["attic", b"", b""]]]),
}


@pytest.mark.parametrize("name", LIES)
def test_what_a_node_says_wrongly_costs_its_watch_alone(name: str) -> None:
    exports, credentials = Liar(LIES[name]), Credentials((b"a token of the tests",))
    member = Member("far", 5, "")
    server = PeerServer(member, "c", exports, credentials, ("127.0.0.1", 0))
    server.start()

    async def main() -> None:
        sight = Sight(["far"])
        sources = Sources(sight, [])
        sources.member_joined(0, "far", by_peers(ME, replace(member, address=server.address), "c", credentials))
        await eventually(lambda: exports.asked >= 2)
        state = sight.sources["node:far"]()
        assert state["trouble"] and not state["up"] and len(sight.index) == 0
        await sources.close()

    try:
        in_loop(main)
    finally:
        server.close(time.monotonic() + 5)


STRANGERS = {
    "silence": b"",
    "http": b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n",
    "tls": b"\x15\x03\x01\x00\x02\x02\x46",
    "a long frame": wire.encode_header(0, wire.Kind.CHALLENGE, 0, 1 << 30, 0, 0),
    "a broken body": (lambda it: it[:30] + b"?" + it[31:])(
        b"".join(wire.encode_frame(0, wire.Kind.CHALLENGE, 0, b"x" * 16, 0))
    ),
    "another frame": b"".join(wire.encode_frame(0, wire.Kind.WELCOME, 0, b"", 0)),
    "a forged line": b"".join(
        wire.encode_frame(0, wire.Kind.REFUSED, 0, msgspec.msgpack.encode(["x\n2026 forged", "", "", ""]), 0)
    ),
}
SAID = {
    "silence": "TimeoutError", "http": "a frame that starts with", "tls": "tls: expected TLS",
    "a long frame": "a body of 1073741824 bytes", "a broken body": "a body with a wrong checksum",
    "another frame": "WELCOME where CHALLENGE", "a forged line": "x?2026",
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_at_the_address_are_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CONNECT_S", 0.1 if name == "silence" else 5.0)

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(24)
        writer.write(STRANGERS[name])
        if name == "tls":
            writer.write_eof()
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async def main() -> None:
        sight = Sight(["far"])
        sources = Sources(sight, [])
        async with strange(stranger) as address:
            sources.member_joined(0, "far", by_peers(ME, Member("far", 5, address), "c", Credentials()))
            try:
                await eventually(lambda: sight.sources["node:far"]()["trouble"])
                assert SAID[name] in str(sight.sources["node:far"]()["trouble"])
            finally:
                await sources.close()

    in_loop(main)


NO_ADDRESSES = ["", "127.0.0.1", "nowhere.invalid:1", "127.0.0.1:99999", "127.0.0.1:9999999999999999999999",
                "\xfc..x:80", "a" * 70 + ".b:80", "\0:80", "127.0.0.1:\xb2"]  # fmt: skip


@pytest.mark.parametrize("address", NO_ADDRESSES, ids=range(len(NO_ADDRESSES)))
def test_addresses_that_are_none_cost_their_node_alone(address: str) -> None:
    async def main() -> None:
        dial = by_peers(ME, Member("far", 5, address), "c", Credentials())
        with pytest.raises((HeadwaterError, OSError)):
            async with asyncio.timeout(5):
                await dial()
        counts = Counts()
        sight, errands = Sight(["far"]), NodesErrands(counts)
        sources = Sources(sight, [])
        sources.member_joined(0, "far", dial)
        errands.joined(0, dial)
        for times in (1, 2):
            errands.prefetch(0, bytes(32), KEYS)
            await eventually(lambda times=times: counts.numbers == {("prefetches", "lost"): times})
        await eventually(lambda: sight.sources["node:far"]()["trouble"])
        await errands.close()
        await sources.close()

    in_loop(main)


def test_watches_go_on_in_either_loop() -> None:
    """The two loops do not agree on what such an address raises."""

    async def main() -> None:
        for address in NO_ADDRESSES[3:]:
            with pytest.raises((HeadwaterError, OSError)):
                await by_peers(ME, Member("far", 5, address), "c", Credentials())()

    asyncio.run(main())


# ---- a node's watches of Conductors elsewhere


def test_who_stops_asking_is_forgotten_and_told_all_anew(start: Raise, token: Path) -> None:
    far = start("far")
    save_prompt(far)

    async def main() -> None:
        line = await dial(far, token)()
        told = expect(Watched, await line.ask(Watch()))
        assert len(told.moves) == 1
        settled = expect(Watched, await line.ask(Watch(told.number, told.serial)))
        assert (settled.number, settled.moves) == (told.number, ())
        far.clock.moved_s += conductors.FORGET_S + 1
        await eventually(lambda: not len(far.node.watching) and not len(far.node.conductors))
        anew = expect(Watched, await line.ask(Watch(settled.number, settled.serial)))
        assert anew.number not in (0, told.number)
        assert anew.moves == told.moves
        line.close()

    in_loop(main)


def test_a_watch_that_waits_is_not_forgotten(start: Raise, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = start("far")
    monkeypatch.setattr(conductors, "FORGET_S", 0.3)
    monkeypatch.setattr("headwater.node.watching.HOLD_S", 0.6)

    async def main() -> None:
        async with seeing(far.node.config, token) as seen:
            await eventually(lambda: seen.source("far").get("answers", 0) > 3)
            assert (seen.source("far")["dumps"], seen.source("far")["losses"]) == (1, 0)

    in_loop(main)


def test_more_watchers_than_there_may_be_are_refused(
    start: Raise, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = start("far")
    monkeypatch.setattr("headwater.node.watching.WATCHERS_MAX", 1)

    async def main() -> None:
        first, second = await dial(far, token)(), await dial(far, token)()
        await first.ask(Watch())
        with pytest.raises(RefusedError, match="watchers"):
            await second.ask(Watch())
        assert len(far.node.conductors) == 1
        first.close()
        second.close()

    in_loop(main)


# ---- the list


class Listing:
    """A directory that says what it is told to."""

    def __init__(self) -> None:
        self.members_: list[Listed] | HeadwaterError | OSError = []
        self.is_closed, self.calls = False, 0

    def says(self, *those: Member) -> None:
        self.members_ = [Listed(number, it, Standing.SERVING, 0.0) for number, it in enumerate(those)]

    def members(self, until_s: float) -> list[Listed]:
        self.calls += 1
        if isinstance(self.members_, Exception):
            raise self.members_
        return self.members_

    def close(self) -> None:
        self.is_closed = True


class Told:
    """What users of the list are told."""

    def __init__(self) -> None:
        self.there: dict[str, Member] = {}
        self.up: set[str] = set()
        self.ours: set[str] = set()
        self.changes = 0

    def joined(self, member: Member) -> None:
        assert member.name not in self.there
        self.there[member.name] = member
        self.changes += 1

    def left(self, name: str) -> None:
        del self.there[name]
        self.changes += 1

    def is_up(self, name: str) -> bool:
        return name in self.up

    def is_ours(self, name: str) -> bool:
        return name in self.ours

    def looked(self, names: Collection[str]) -> None:
        self.names = set(names)


@contextlib.asynccontextmanager
async def listing() -> AsyncIterator[tuple[Listing, Told, Callable[[], object]]]:
    directory, told = Listing(), Told()
    it = Members(directory, told)
    it.start()

    async def looked() -> dict[str, object]:
        answers = it.answers
        await eventually(lambda: it.answers > answers + 1)
        return it.state()

    yield directory, told, looked
    await it.close()
    assert directory.is_closed


def test_the_list_is_followed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(members, "PERIOD_S", 0.001)
    monkeypatch.setattr(members, "MEMBERS_MAX", 3)
    one, two = Member("one", 1, "h:1"), Member("two", 1, "h:2")

    async def main() -> None:
        async with listing() as (directory, told, looked):
            directory.says(one, replace(one, epoch=3), replace(one, epoch=2), two)
            await looked()
            assert told.there == {"one": replace(one, epoch=3), "two": two}
            directory.says(replace(one, epoch=3, address="h:9"), two)
            await looked()
            assert told.there["one"].address == "h:9" and told.changes == 4
            told.up = {"one"}
            directory.says()
            assert (await looked())["members"] == 1  # it answers, so it is there
            assert list(told.there) == ["one"]
            directory.members_ = UnavailableError("the directory is away")
            state, calls = dict(told.there), directory.calls
            await eventually(lambda: directory.calls > calls + 3 and "away" in caplog.text)
            assert told.there == state
            directory.members_ = OSError("no descriptors")
            await eventually(lambda: "no descriptors" in caplog.text)
            assert told.there == state
            told.ours = {"one"}
            directory.says(one, two)
            assert (await looked())["up"] and list(told.there) == ["two"]
            directory.says(*(Member(f"m{at}", 1, "") for at in range(5)))
            state_now = await looked()
            assert len(told.there) == 3 and "5 nodes are listed" in str(state_now["trouble"])

    in_loop(main)
    assert caplog.text.count("is away") == caplog.text.count("no descriptors") == 1


def test_one_that_is_refused_is_not_known_and_tried_again() -> None:
    one, two = Member("one", 1, "h:1"), Member("two", 1, "h:2")

    async def main() -> None:
        async with listing() as (directory, told, looked):
            join = told.joined

            def refuse(member: Member) -> None:
                if member == one:
                    raise RefusedError("node", "fewer", "one more", "wait")
                join(member)

            told.joined = refuse  # type: ignore[method-assign]
            directory.says(one, two)
            state = await looked()
            assert list(told.there) == ["two"] and told.names == {"one", "two"}
            assert state["members"] == 1 and "left out: node" in str(state["trouble"]) and not state["up"]
            directory.says(two)  # nobody is told that it left who never came
            assert (await looked())["up"]
            told.joined = join  # type: ignore[method-assign]
            directory.says(one, two)
            assert (await looked())["members"] == 2

    in_loop(main)


def test_a_look_that_fails_is_logged_and_the_next_one_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listing() as (directory, told, looked):
            told.there["one"] = Member("one", 1, "h:1")  # so that it cannot join
            directory.says(Member("one", 1, "h:1"))
            state = await looked()
            assert not state["up"] and "AssertionError" in str(state["trouble"])
            told.there.clear()
            assert (await looked())["up"] and list(told.there) == ["one"]

    in_loop(main)
    assert caplog.text.count("Traceback") == 1


@contextlib.asynccontextmanager
async def told_of(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Seen, Listing]]:
    """A worker with a directory that says what it is told to; its members listen nowhere."""
    directory = Listing()
    monkeypatch.setattr(members, "open_directory", lambda *_: directory)
    async with seeing(NodeConfig(directory="redis://127.0.0.1:1", cluster="c"), None) as seen:
        yield seen, directory


def test_names_that_come_and_go_use_up_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "NODES_MAX", 8)

    async def main() -> None:
        async with told_of(monkeypatch) as (seen, directory):
            for turn in range(6):
                names = [f"pod-{turn}-{at}" for at in range(5)]
                directory.says(*(Member(it, 1, "") for it in names))
                await eventually(lambda names=names: {f"node:{it}" for it in names} <= seen.sight.sources.keys())
                assert seen.nodes.members.state()["up"] and len(seen.roster.nodes) <= 8
                numbers = [seen.roster.known_node(it) for it in names]
                assert len(set(numbers)) == 5 and None not in numbers and seen.roster.known_node("far") == 0
            directory.says(*(Member(f"more-{at}", 1, "") for at in range(9)))
            await eventually(lambda: "left out" in str(seen.nodes.members.state()["trouble"]))
            directory.says(Member("last", 1, ""))
            await eventually(lambda: seen.nodes.members.state()["up"] and "node:last" in seen.sight.sources)
            assert seen.nodes.members.state()["members"] == 1

    in_loop(main)


def test_plug_ins_on_listed_nodes_count_while_these_are_there() -> None:
    def registration(layout: str) -> Registration:
        record = replace(namespace(), layout=layout)
        return Registration("one.x", Base(record.root(), record), LAYOUT.chunk_tokens, 1)

    async def main() -> None:
        sight = Sight(["far", "strange"])
        sight.joined(0, INSTANCE)
        sources = Sources(sight, [], are_joined=True)
        for number, name in enumerate(("far", "strange")):
            sources.member_joined(number, name, by_peers(ME, Member(name, 1, ""), "c", Credentials()))
        sight.registered(1, [registration("theirs")])
        assert not sight.state()["models"]["m"]["registered"]
        sight.registered(0, [registration("ours")])
        root = sight.root("m", "")
        assert root == registration("ours").base.root
        sources.member_left(0, "far")
        sources.member_joined(0, "far", by_peers(ME, Member("far", 2, ""), "c", Credentials()))
        assert sight.root("m", "") == root
        sight.joined(1, replace(INSTANCE, name="two", node="strange"))
        sight.registered(1, [registration("newer")._replace(instance="two.y")])
        assert sight.root("m", "") == registration("newer").base.root
        await sources.close()

    in_loop(main)


def test_an_instance_on_a_node_that_is_not_listed_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with told_of(monkeypatch) as (seen, directory):
            directory.says(Member("fahr", 1, ""))
            said = {"instance": "one", "up": False, "trouble": "no such node is listed", "answers": 0}
            await eventually(lambda: seen.source("far") == said and "node:fahr" in seen.sight.sources)
            assert seen.nodes.members.state()["up"]
            directory.says(Member("far", 1, ""))
            await eventually(lambda: "dumps" in seen.source("far"))
            directory.says()
            await eventually(lambda: seen.source("far") == said)
            seen.roster.unregister("one", 1)
            seen.roster.release(0)
            await eventually(lambda: "node:far" not in seen.sight.sources)

    in_loop(main)


def test_links_are_assumed_between_a_bounded_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JOINED_MAX == 128
    monkeypatch.setattr("headwater.conductor.events.sources.JOINED_MAX", 2)

    async def main() -> None:
        sources = Sources(Sight(["a", "b", "c"]), [], are_joined=True)
        for number, name in enumerate("abc"):
            sources.member_joined(number, name, by_peers(ME, Member(name, 1, ""), "c", Credentials()))
        assert len(sources.links) == 3 + 2
        for number, name in enumerate("abc"):
            sources.member_left(number, name)
        assert not sources.links and not sources._sight.sources
        await sources.close()

    in_loop(main)


# ---- real processes


class NodeProcess:
    """`headwater node` in a process of its own."""

    def __init__(self, folder: Path, name: str, directory: str, cluster: str, token: Path) -> None:
        self.address = f"unix:{folder}/{name}.sock"
        line = [sys.executable, "-m", "headwater", "node", "--socket", self.address, "--host-memory", "16MiB",
                "--slab", "64KiB", "--metrics", "off", "--no-prefault", "--name", name, "--cluster", cluster,
                "--directory", directory, "--listen", "127.0.0.1:0", "--token-file", str(token)]  # fmt: skip
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline()

    def save_prompt(self) -> None:
        """As a plug-in does; what was saved stays when it ends."""
        session = open_session(self.address, "one", namespace(), LAYOUT, maps=True, connect_s=5, call_s=5)
        save(session, KEYS)
        session.link.close()

    def kill(self) -> None:
        """With force."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_real_node_is_seen_killed_and_seen_again(valkey: RedisServer, tmp_path: Path, token: Path) -> None:
    settings = valkey.url(), tmp_path.name[:60], token
    node = NodeProcess(tmp_path, "far", *settings)
    config = NodeConfig(directory=settings[0], cluster=settings[1])

    async def main() -> None:
        nonlocal node
        async with seeing(config, token) as seen:
            await eventually(lambda: seen.source("far").get("up"))
            await asyncio.to_thread(node.save_prompt)
            await eventually(lambda: seen.held() == {seen.place("far"): 64})
            node.kill()
            await eventually(lambda: seen.held() == {} and not seen.source("far").get("up"))
            node = await asyncio.to_thread(NodeProcess, tmp_path, "far", *settings)
            await eventually(lambda: seen.source("far").get("up"))
            await asyncio.to_thread(node.save_prompt)
            await eventually(lambda: seen.held() == {seen.place("far"): 64})

    try:
        in_loop(main)
    finally:
        node.kill()


def test_a_conductor_process_sees_a_node_elsewhere(valkey: RedisServer, tmp_path: Path, token: Path) -> None:
    cluster = tmp_path.name[:60]
    node = NodeProcess(tmp_path, "far", valkey.url(), cluster, token)
    file = {"directory": valkey.url(), "cluster": cluster}
    try:
        with running(tmp_path, 1, file=file, instance={"node": "far"}, members={"token_file": str(token)}) as fleet:

            def source(name: str) -> dict:
                found: dict = fleet.state()["sight"]["sources"].get(name, {})
                return found

            def in_host() -> int:
                asked = {"model": "toy", "token_ids": IDS, "block_size": LAYOUT.chunk_tokens}
                answer = fleet.control("POST", "/query", asked)
                if answer.status != 200:  # the worker's beat is late
                    return -1
                count: int = answer.json["default"]["e0"]["CPU"]
                return count

            until(lambda: source("node:far").get("up") and source("directory")["up"], fleet.logs)
            until(lambda: in_host() == 0, fleet.logs)
            node.save_prompt()
            until(lambda: in_host() == len(IDS), fleet.logs)
            secret(token, "quite another token")
            node.kill()
            until(lambda: in_host() == 0, fleet.logs)
            node = NodeProcess(tmp_path, "far", valkey.url(), cluster, token)
            until(lambda: "token: expected" in source("node:far")["trouble"], fleet.logs)
            assert not source("node:far")["up"]
            assert "Traceback" not in fleet.logs() and "another token" not in fleet.logs()
    finally:
        node.kill()
