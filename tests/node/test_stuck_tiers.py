"""Lower tiers that hang, that are far away, bad in one place, or full of what nobody has the key of."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.core import movement
from headwater.errors import UnavailableError
from headwater.node.client import Session, ask_operator
from headwater.node.messages import Evict
from headwater.ports import Bytes
from headwater.tiers import direct_io, endpoint
from headwater.tiers.endpoint import Endpoint
from headwater.tiers.memory import MemoryTier
from headwater.types import pack_keys
from tests.node.conftest import Rig, eventually
from tests.node.peers import keys, namespace, save
from tests.node.tiered import CHUNKS, PAUSE, bring, disk_of, load, plug, rigged, save_all, settle, tier, with_tiers
from tests.servers import redis_server, valkey_program
from tests.tiers.keys import Keys

ROOT = namespace().root()
TOKENS_S = 100.0
PROMPT_S = CHUNKS * 16 / TOKENS_S


def sink(rig: Rig, session: Session, names: Sequence[str]) -> None:
    """Take prompts out of HOST; what was just brought up stays for a moment."""

    def are_out() -> bool:
        for name in names:
            ask_operator(rig.address, Evict(ROOT, pack_keys(keys(CHUNKS, name)), below=False))
        return not any(any(session.contains(keys(CHUNKS, name))) for name in names)

    eventually(are_out)


# ---- calls that do not return --------------------------------------------------------------------------


def test_a_disk_that_hangs_is_sick_soon_and_stops_nobody(
    config: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read hangs in the kernel, the probe's too; what REMOTE has still comes. With the times as they are, it
    takes 6 s of READ_S and LATE_S."""
    monkeypatch.setattr(movement, "READ_S", 0.8)
    monkeypatch.setattr(movement, "LATE_S", 0.2)
    monkeypatch.setattr(movement, "ASK_S", 0.5)
    free = threading.Event()
    free.set()
    plain = direct_io.read

    def read(descriptor: int, views: Sequence[Bytes], offset: int) -> int:
        free.wait(30.0)
        return plain(descriptor, views, offset)

    monkeypatch.setattr(direct_io, "read", read)
    remotes = plug(monkeypatch, {"memory": MemoryTier()})
    with rigged(with_tiers(config, disk=disk_of(tmp_path), remotes=remotes, drain_s=0.2)) as rig:
        try:
            session = rig.session("engine", maps=True)
            prompts = [f"prompt {number}" for number in range(8)]
            save_all(session, prompts, rig.address)
            sink(rig, session, prompts)
            free.clear()
            began_s = time.monotonic()
            number, waits = 0, []
            while tier(rig.address)["health"] == "well":
                asked_s = time.monotonic()
                bring(session, keys(CHUNKS, prompts[number % 4]), f"hangs {number}", TOKENS_S)
                waits.append(time.monotonic() - asked_s)
                number += 1
                assert time.monotonic() - began_s < 2.5, "READ_S + LATE_S, two ticks, and what the machine takes"
            print(f"sick after {time.monotonic() - began_s:.2f} s; {number} requests, {max(waits):.3f} s at most")
            assert max(waits) < 0.10 * PROMPT_S + 0.2
            for name in prompts[4:]:
                it = bring(session, keys(CHUNKS, name), f"remote {name}", TOKENS_S)
                assert (it.remote, it.disk) == (CHUNKS, 0), "what the other tier has comes from there"
                assert load(session, keys(CHUNKS, name)) == CHUNKS
            assert save(session, keys(CHUNKS, "new")) == CHUNKS
            assert tier(rig.address)["health"] != "well"
            assert tier(rig.address, 2)["health"] == "well"
            assert tier(rig.address, 2)["opened"] == 0
        finally:
            free.set()
        took_s = eventually(lambda: tier(rig.address)["health"] == "well", 10.0)
        print(f"well again after {took_s:.2f} s")
        settle(rig.address)
        sink(rig, session, prompts)
        it = bring(session, keys(CHUNKS, prompts[6]), "again")
        assert it.disk == CHUNKS
        assert load(session, keys(CHUNKS, prompts[6])) == CHUNKS


def test_a_resolver_that_hangs_is_waited_for_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    free, asked = threading.Event(), []

    def look_up(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        free.wait(20.0)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(UnavailableError, match="cannot connect to kv: it did not answer in time"):
            endpoint.connect(Endpoint("kv", host="kv.example", port=1), began_s + 0.1)
        assert time.monotonic() - began_s < 0.1 + 0.5
    assert asked == ["kv.example"], "one thread, however often it is asked"
    free.set()
    with pytest.raises(UnavailableError, match="Name or service not known"):
        endpoint.connect(Endpoint("kv", host="kv.example", port=1), time.monotonic() + 5.0)


# ---- a server that is far away -------------------------------------------------------------------------


@contextmanager
def far_away(port: int, rtt_s: float) -> Iterator[int]:
    """A port behind which is another, every byte of it half a round trip later."""
    listener = socket.create_server(("127.0.0.1", 0))
    links: list[socket.socket] = [listener]

    def pump(source: socket.socket, target: socket.socket) -> None:
        on_the_way: list[tuple[float, bytes]] = []
        more = threading.Condition()

        def deliver() -> None:
            while True:
                with more:
                    more.wait_for(lambda: bool(on_the_way))
                    at_s, data = on_the_way.pop(0)
                PAUSE.wait(max(at_s - time.monotonic(), 0.0))
                try:
                    if not data:
                        target.shutdown(socket.SHUT_WR)
                        return
                    target.sendall(data)
                except OSError:
                    return

        threading.Thread(target=deliver, daemon=True).start()
        data = b"x"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            with more:
                on_the_way.append((time.monotonic() + rtt_s / 2, data))
                more.notify()

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", port))
            links.extend((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=pump, args=(one, other), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)
        for it in links:
            it.close()


def test_many_new_prompts_do_not_make_a_far_away_server_sick(config: NodeConfig, tmp_path: Path) -> None:
    """60 new prompts a second over 50 ms: a question of its own for each would be three times what one connection
    can ask."""
    with (
        redis_server(valkey_program(), tmp_path, "--maxmemory", "64mb") as server,
        far_away(server.port, 0.05) as port,
        rigged(with_tiers(config, remotes=(f"redis://127.0.0.1:{port}",), drain_s=0.2)) as rig,
    ):
        session = rig.session("engine", maps=True)
        save_all(session, ["old"], rig.address)
        sink(rig, session, ["old"])
        began_s = time.monotonic()
        for number in range(120):
            PAUSE.wait(max(began_s + number / 60 - time.monotonic(), 0.0))
            session.match(keys(CHUNKS, f"new {number}"), request=f"new {number}", tokens_s=20.0)
            if number >= 20:
                session.forget([f"new {number - 20}"])
        told = tier(rig.address)
        print(f"{told['opened']} times sick, {rig.node.tiering.levels[0].breaker!r}")
        assert (told["health"], told["opened"]) == ("well", 0)
        assert rig.node.tiering.levels[0].breaker.slow_operations == 0
        assert bring(session, keys(CHUNKS, "old"), "old", 20.0).remote == CHUNKS


# ---- places and chunks that are bad --------------------------------------------------------------------


def test_one_bad_sector_costs_one_chunk(config: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad: set[int] = set()
    for name in ("read", "write"):
        plain = getattr(direct_io, name)

        def call(descriptor: int, views: Sequence[Bytes], offset: int, plain: object = plain) -> object:
            if offset in bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return plain(descriptor, views, offset)  # type: ignore[operator]

        monkeypatch.setattr(direct_io, name, call)
    prompts = [f"prompt {number}" for number in range(4)]
    with rigged(with_tiers(config, disk=disk_of(tmp_path))) as rig:
        session = rig.session("engine", maps=True)
        save_all(session, prompts, rig.address)
        disk = rig.node.tiering.levels[0].disk
        assert disk is not None
        place = disk.entries.address[disk.spaces[0].index[0][keys(CHUNKS, prompts[2])[5]]]
        bad.add(place)
        for turn in range(3):
            sink(rig, session, prompts)
            came = [bring(session, keys(CHUNKS, name), f"{name} {turn}").chunks for name in prompts]
            assert came == ([8, 8, 5, 8] if turn == 0 else [8] * 4)
            save(session, keys(CHUNKS, prompts[2]))
            settle(rig.address)
        told = tier(rig.address)
        assert (told["errors"]["damaged"], told["opened"], told["health"]) == (1, 0, "well")
        assert told["quarantined_bytes"] == disk.spaces[0].slot_bytes[0]
    bad.clear()
    with rigged(with_tiers(config, disk=disk_of(tmp_path))) as rig:
        disk = rig.node.tiering.levels[0].disk
        assert disk is not None
        assert rig.node.tiering.recovered_chunks == 4 * CHUNKS
        assert place not in {disk.entries.address[row] for row in disk.spaces[0].index[0].values()}


def test_a_bad_sector_found_by_a_write_costs_nothing(
    config: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, bad = direct_io.write, set[int]()

    def write(descriptor: int, views: Sequence[Bytes], offset: int) -> None:
        if sum(map(len, views)) > 4096 and not bad:
            bad.add(offset)
        if offset in bad and sum(map(len, views)) > 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain(descriptor, views, offset)

    monkeypatch.setattr(direct_io, "write", write)
    with rigged(with_tiers(config, disk=disk_of(tmp_path))) as rig:
        session = rig.session("engine", maps=True)
        save_all(session, ["prompt"], rig.address)
        told = tier(rig.address)
        assert (told["errors"]["damaged"], told["opened"], told["written_chunks"]) == (1, 0, CHUNKS)
        assert told["quarantined_bytes"] > 0
        sink(rig, session, ["prompt"])
        assert bring(session, keys(CHUNKS, "prompt"), "r").disk == CHUNKS


@pytest.mark.parametrize("kind", ["disk", "remote"])
def test_what_was_written_with_a_key_that_is_gone_is_written_anew(
    config: NodeConfig, tmp_path: Path, kind: str
) -> None:
    ring = Keys(tmp_path / "keys.toml")
    ring.write(("old", "*"))
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    below = {"disk": disk_of(tmp_path) + "?codec=aes"}
    if kind == "remote":
        below = {"remotes": (f"file://{folder}?codec=aes",)}  # type: ignore[dict-item]
    settings = with_tiers(config, keys=str(ring.path), **below)
    with rigged(settings) as rig:
        save_all(rig.session("engine", maps=True), ["prompt"], rig.address)
    ring.write(("new", "*"))
    wanted = keys(CHUNKS, "prompt")
    for life in range(2):
        with rigged(settings) as rig:
            session = rig.session("engine", maps=True)
            it = bring(session, wanted, "first")
            assert it.chunks == (0 if life == 0 else CHUNKS)
            if life == 0:
                settle(rig.address)
                save(session, wanted)
                settle(rig.address)
                assert tier(rig.address)["errors"]["refused"] == CHUNKS
                assert tier(rig.address)["written_chunks"] == CHUNKS
                sink(rig, session, ["prompt"])
                it = bring(session, wanted, "second")
                assert it.disk + it.remote == CHUNKS
            assert load(session, wanted) == CHUNKS
            assert tier(rig.address)["health"] == "well"
