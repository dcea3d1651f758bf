"""Lower tiers that fail under a live node: requests go on, wrong bytes are found out, and what heals is used again."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.core import movement
from headwater.node.client import Session, ask_operator, fetch_status
from headwater.node.messages import Evict
from headwater.ports import Bytes
from headwater.tiers import direct_io
from headwater.types import Outcome, pack_keys
from tests.node.conftest import Rig, eventually
from tests.node.peers import keys, namespace, save
from tests.node.tiered import CHUNKS, PAUSE, bring, disk_of, load, rigged, save_all, settle, tier, with_tiers
from tests.servers import RedisServer, redis_server, valkey_program

ROOT = namespace().root()
HEAL_S = 10.0
FAULT_S = 1.2
TOKENS_S = 100.0
PROMPT_S = CHUNKS * 16 / TOKENS_S
"""How long the engine of these tests computes at a prompt."""


def sink(rig: Rig, session: Session, names: Sequence[str]) -> None:
    """Take prompts out of HOST, whatever else has them; what was just brought up stays for a moment."""

    def are_out() -> bool:
        for name in names:
            ask_operator(rig.address, Evict(ROOT, pack_keys(keys(CHUNKS, name)), below=False))
        return not any(any(session.contains(keys(CHUNKS, name))) for name in names)

    eventually(are_out)


# ---- a server that fails -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is done to a server for so long and undone; `opens` says whether the tier is skipped meanwhile, None that
    it depends."""

    begin: Callable[[RedisServer], object]
    end: Callable[[RedisServer], object]
    opens: bool | None = True
    seconds: float = FAULT_S


def nothing(server: RedisServer) -> None:
    """It ends by itself."""


def change_password(server: RedisServer) -> None:
    """Nobody who comes from now on knows the password, and everybody has to come again."""
    server.say("CONFIG", "SET", "requirepass", "another")
    server.password = "another"
    server.say("CLIENT", "KILL", "TYPE", "normal")


def change_password_back(server: RedisServer) -> None:
    server.say("CONFIG", "SET", "requirepass", "secret")
    server.password = "secret"


FAULTS = {
    "killed": Fault(RedisServer.kill, RedisServer.start),
    "stopped": Fault(RedisServer.pause, RedisServer.resume, seconds=3.5),
    # A question or two are late, which may or may not be enough.
    "CLIENT PAUSE": Fault(lambda it: it.say("CLIENT", "PAUSE", f"{FAULT_S * 1e3:.0f}", "ALL"), nothing, opens=None),
    "FLUSHALL": Fault(lambda it: it.say("FLUSHALL"), nothing, opens=False),
    "OOM": Fault(
        lambda it: it.say("CONFIG", "SET", "maxmemory", "1mb"),
        lambda it: it.say("CONFIG", "SET", "maxmemory", "64mb"),
        opens=False,
    ),
    "wrong password": Fault(change_password, change_password_back),
}


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisServer]:
    options = ["--requirepass", "secret", "--maxmemory", "64mb", "--maxmemory-policy", "noeviction"]
    folder = tmp_path / "valkey"
    folder.mkdir()
    with redis_server(valkey_program(), folder, *options) as server:
        yield server


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_server_fails_no_request(
    config: NodeConfig, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(movement, "FULL_S", 1.0)
    monkeypatch.setattr(movement, "USAGE_S", 1.0)
    fault = FAULTS[name]
    valkey.user, valkey.password = "default", "secret"
    with rigged(with_tiers(config, remotes=(valkey.url(),), drain_s=0.2)) as rig:
        session = rig.session("engine", maps=True)
        prompts = [f"prompt {number}" for number in range(8)]
        save_all(session, prompts, rig.address)
        sink(rig, session, prompts)
        assert bring(session, keys(CHUNKS, prompts[0]), "before", TOKENS_S).remote == CHUNKS
        fault.begin(valkey)
        waits = traffic(rig, prompts[1:], fault.seconds)
        told = tier(rig.address)
        print(f"{name}: {len(waits)} requests, waited {max(waits):.3f} s at most; {told['errors']}, {told['health']}")
        # One look each two milliseconds, by a machine that may have other things to do.
        assert max(waits) < 0.10 * PROMPT_S + 0.1
        assert fault.opens is None or (told["opened"] > 0) == fault.opens
        if name == "OOM":
            assert told["errors"]["full"] > 0
        fault.end(valkey)
        took_s = eventually(Returned(rig), HEAL_S, seen=lambda: tier(rig.address))
        print(f"{name}: hits again after {took_s:.2f} s")
        assert tier(rig.address)["health"] == "well"


def traffic(rig: Rig, prompts: list[str], seconds: float) -> list[float]:
    """Requests for old prompts, and new ones saved, for so long; how long each waited. Every byte is checked."""
    session = rig.session("traffic", maps=True)
    until_s = time.monotonic() + seconds
    waits: list[float] = []
    while time.monotonic() < until_s:
        number = len(waits)
        wanted = keys(CHUNKS, prompts[number % len(prompts)])
        began_s = time.monotonic()
        it = bring(session, wanted, f"traffic {number}", TOKENS_S)
        waits.append(time.monotonic() - began_s)
        assert load(session, wanted) >= it.chunks
        save(session, wanted)
        save(session, keys(CHUNKS, f"new {number}"))
        assert not fetch_status(rig.address)["draining"]
    return waits


class Returned:
    """Whether a new prompt goes down and comes back."""

    def __init__(self, rig: Rig) -> None:
        self._rig, self._session, self._number = rig, rig.session("returned", maps=True), 0

    def __call__(self) -> bool:
        self._number += 1
        name = f"returned {self._number}"
        wanted = keys(CHUNKS, name)
        save(self._session, wanted)
        PAUSE.wait(0.05)
        ask_operator(self._rig.address, Evict(ROOT, pack_keys(wanted), below=False))
        it = bring(self._session, wanted, name, TOKENS_S)
        return load(self._session, wanted) == it.disk + it.remote == CHUNKS


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failing_disk_fails_no_request(
    config: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """EIO makes the tier sick; without room it goes on with what it has, and says so."""
    monkeypatch.setattr(movement, "FULL_S", 1.0)
    broken = threading.Event()

    def failing(name: str) -> None:
        plain = getattr(direct_io, name)

        def call(descriptor: int, views: Sequence[Bytes], offset: int) -> object:
            if broken.is_set():
                raise OSError(number, os.strerror(number))
            return plain(descriptor, views, offset)

        monkeypatch.setattr(direct_io, name, call)

    failing("write")
    if number == errno.EIO:
        failing("read")
    with rigged(with_tiers(config, disk=disk_of(tmp_path), drain_s=0.2)) as rig:
        session = rig.session("engine", maps=True)
        prompts = [f"prompt {number}" for number in range(8)]
        save_all(session, prompts, rig.address)
        sink(rig, session, prompts)
        broken.set()
        waits = traffic(rig, prompts, FAULT_S)
        told = tier(rig.address)
        print(f"{len(waits)} requests, waited {max(waits):.3f} s at most; {told['errors']}, {told['health']}")
        assert max(waits) < 0.10 * PROMPT_S + 0.1
        if number == errno.EIO:
            assert told["opened"] > 0
        else:
            assert told["errors"]["full"] > 0
            assert (told["opened"], told["hit_tokens"] > 0) == (0, True)
        broken.clear()
        took_s = eventually(Returned(rig), HEAL_S, seen=lambda: tier(rig.address))
        print(f"hits again after {took_s:.2f} s")


# ---- bytes that change ---------------------------------------------------------------------------------

WRONG = (Outcome.CORRUPT, Outcome.FOREIGN, Outcome.MISSING, Outcome.NEWER)


def check_flips(rig: Rig, flip: Callable[[str, int], None], draw: random.Random) -> None:
    """Flip one bit in one chunk of each prompt: the prefix ends there; saved again, it is whole again."""
    session = rig.session("engine", maps=True)
    prompts = [f"flipped {number}" for number in range(12)]
    save_all(session, prompts, rig.address)
    for turn in range(3):
        sink(rig, session, prompts)
        for name in prompts:
            wanted, at = keys(CHUNKS, name), draw.randrange(CHUNKS)
            before = tier(rig.address)["errors"]
            flip(name, at)
            it = bring(session, wanted, f"{turn} {name}")
            assert it.chunks == at, f"bit of chunk {at}"
            assert load(session, wanted) == at
            after = tier(rig.address)["errors"]
            assert sum(after[kind.value] - before[kind.value] for kind in WRONG) == 1, after
            settle(rig.address)  # a deletion that came after the next write would take the new one
            assert save(session, wanted) == CHUNKS - at
            settle(rig.address)
    assert tier(rig.address)["health"] == "well", "wrong bytes say nothing about the tier"
    sink(rig, session, prompts)
    for name in prompts:
        assert bring(session, keys(CHUNKS, name), name).chunks == CHUNKS
        assert load(session, keys(CHUNKS, name)) == CHUNKS


def test_flipped_bits_on_disk(config: NodeConfig, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with rigged(with_tiers(config, disk=disk_of(tmp_path))) as rig:
        disk = rig.node.tiering.levels[0].disk
        assert disk is not None
        (slabs,) = (tmp_path / "disk").glob("slabs-*")

        def flip(name: str, at: int) -> None:
            row = disk.spaces[0].index[0][keys(CHUNKS, name)[at]]
            place, size = disk.entries.address[row], disk.spaces[0].slot_bytes[0]
            flip_bit(slabs, place, size, draw)

        check_flips(rig, flip, draw)


def flip_bit(path: Path, offset: int, size: int, draw: random.Random) -> None:
    """Flip one bit of a part of a file."""
    with path.open("r+b", buffering=0) as file:
        at = offset + draw.randrange(size)
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << draw.randrange(8)
        file.seek(at)
        file.write(bytes([byte]))


def test_flipped_bits_in_valkey(config: NodeConfig, valkey: RedisServer, seed: int) -> None:
    draw = random.Random(seed)
    valkey.user, valkey.password = "default", "secret"
    with rigged(with_tiers(config, remotes=(valkey.url(),))) as rig:

        def flip(name: str, at: int) -> None:
            chunk = keys(CHUNKS, name)[at].hex().encode()
            stored = valkey.names()
            key = draw.choice([it for it in stored if chunk in it])
            value = bytearray(valkey.say("GET", key).partition(b"\r\n")[2][:-2])
            value[draw.randrange(len(value))] ^= 1 << draw.randrange(8)
            assert valkey.say("SET", key, bytes(value)) == b"+OK\r\n"

        check_flips(rig, flip, draw)
