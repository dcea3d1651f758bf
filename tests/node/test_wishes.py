"""What an operator asks over the node's socket: it does what it says, twice is once, and nobody else may."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.config import NodeConfig
from headwater.errors import RefusedError
from headwater.node import server, wishes
from headwater.node.client import Session, ask_operator
from headwater.node.driver import NAME_CHARS_MAX, Node
from headwater.node.messages import (
    FRAME_BYTES_MAX,
    Evict,
    Explain,
    Namespaces,
    Pin,
    Pins,
    Prefetch,
    Register,
    StatusReply,
    Tiers,
    Wish,
    encode,
)
from headwater.types import pack_keys
from tests.node.conftest import Rig, eventually
from tests.node.peers import LAYOUT, SLOT_BYTES, keys, namespace, save
from tests.node.tiered import CHUNKS, bring, disk_of, load, rigged, save_all, settle, tier, with_tiers
from tests.servers import RedisServer, redis_server, valkey_program

ROOT = namespace().root()
PROMPTS = [f"prompt {number}" for number in range(4)]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(valkey_program(), tmp_path_factory.mktemp("valkey"), "--maxmemory", "64mb") as it:
        yield it


@pytest.fixture
def rig(config: NodeConfig, tmp_path: Path, valkey: RedisServer) -> Iterator[Rig]:
    """A node with a disk and a Valkey, which have all of PROMPTS."""
    valkey.say("FLUSHALL")
    with rigged(with_tiers(config, disk=disk_of(tmp_path), remotes=(valkey.url(),))) as it:
        save_all(it.session("saver", maps=True), PROMPTS)
        settle(it.address)
        yield it


def packed(name: str) -> bytes:
    """A prompt's keys, for the wire."""
    return pack_keys(keys(CHUNKS, name))


def ask(rig: Rig, wish: Wish) -> Any:
    """Ask as the node's own user."""
    return ask_operator(rig.address, wish)


def chunks(rig: Rig, name: str) -> list[dict[str, Any]]:
    """Where a prompt's chunks are, once the remotes have answered."""
    told: list[dict[str, Any]] = []

    def has_answered() -> bool:
        told.append(ask(rig, Explain(ROOT, packed(name))))
        return not told[-1]["waiting"]

    eventually(has_answered)
    found: list[dict[str, Any]] = told[-1]["chunks"]
    return found


def flood(session: Session, prompts: int, tag: str) -> None:
    """Save more than HOST can hold."""
    for number in range(prompts):
        save(session, keys(CHUNKS, f"{tag} {number}"))


def test_tiers_and_namespaces_tell_what_there_is(rig: Rig) -> None:
    told = ask(rig, Tiers())
    assert [it["tier"] for it in told["tiers"]] == ["host", "disk", "remote"]
    for it in told["tiers"][1:]:
        assert it["health"] == "well"
        assert it["written_bytes"] == len(PROMPTS) * CHUNKS * SLOT_BYTES
        assert it["queued_chunks"] == it["moving_bytes"] == 0
    assert told["tiers"][1]["used_bytes"] == len(PROMPTS) * CHUNKS * (SLOT_BYTES + 4096)
    (space,) = ask(rig, Namespaces())["namespaces"]
    assert (space["root"], space["chunk_tokens"]) == (ROOT.hex(), 16)
    assert space["namespace"]["model"] == "m"


def test_explain_follows_a_chunk(rig: Rig) -> None:
    before = chunks(rig, PROMPTS[0])
    assert [(it["host"], it["disk"], it["remotes"]) for it in before] == [(True, True, [True])] * CHUNKS
    assert ask(rig, Evict(ROOT, packed(PROMPTS[0]), below=False)) == {"deleted": CHUNKS, "kept": 0}
    after = chunks(rig, PROMPTS[0])
    assert [(it["host"], it["disk"], it["remotes"]) for it in after] == [(False, True, [True])] * CHUNKS
    assert {(it["last"]["event"], it["last"]["tier"]) for it in after} == {("deleted", "host")}
    never = chunks(rig, "never seen")
    assert [(it["host"], it["disk"], it["remotes"], it["last"]) for it in never] == [(False, False, [False], None)] * 8


def test_explain_a_request(rig: Rig) -> None:
    session = rig.session("engine", maps=True)
    ask(rig, Evict(ROOT, packed(PROMPTS[1]), below=False))
    bring(session, keys(CHUNKS, PROMPTS[1]), "cmpl-17-abc")
    told = ask(rig, Explain(b"", b"", "cmpl-17"))["request"]
    assert (told["request"], told["chunks"], told["host"]) == ("cmpl-17-abc", CHUNKS, 0)
    assert told["brought"] == {"disk": CHUNKS}
    assert told["namespace"] == ROOT.hex()
    with pytest.raises(RefusedError, match="request: expected one of the last requests"):
        ask(rig, Explain(b"", b"", "nobody"))


def test_keys_alone_are_not_prefetched(rig: Rig) -> None:
    one, other = keys(CHUNKS, PROMPTS[0])[3], keys(CHUNKS, PROMPTS[1])[5]
    ask(rig, Evict(ROOT, packed(PROMPTS[0]), below=False))
    with pytest.raises(RefusedError, match="given keys alone; name the prompt itself, by its tokens or text"):
        ask(rig, Prefetch(ROOT, pack_keys([one, other])))
    settle(rig.address)
    assert tier(rig.address)["read_chunks"] == 0


def test_prefetch_brings_up_once(rig: Rig) -> None:
    session = rig.session("engine", maps=True)
    wanted = keys(CHUNKS, PROMPTS[2])
    ask(rig, Evict(ROOT, packed(PROMPTS[2]), below=False))
    assert session.match(wanted).chunks == 0
    assert ask(rig, Prefetch(ROOT, packed(PROMPTS[2]), True)) == {"chunks": CHUNKS}
    eventually(lambda: session.match(wanted).chunks == CHUNKS)
    assert load(session, wanted) == CHUNKS
    assert ask(rig, Prefetch(ROOT, packed(PROMPTS[2]), True)) == {"chunks": 0}
    settle(rig.address)
    assert tier(rig.address)["read_chunks"] == CHUNKS


def test_evict_below_is_for_good_and_twice_is_once(rig: Rig) -> None:
    session = rig.session("engine", maps=True)
    assert ask(rig, Evict(ROOT, packed(PROMPTS[0]), below=True)) == {"deleted": 2 * CHUNKS, "kept": 0}, "HOST and DISK"
    assert ask(rig, Evict(ROOT, packed(PROMPTS[0]), below=True))["deleted"] == 0
    settle(rig.address)
    assert bring(session, keys(CHUNKS, PROMPTS[0]), "after").chunks == 0
    assert bring(session, keys(CHUNKS, PROMPTS[1]), "other").chunks == CHUNKS, "nothing else is gone"


def test_evicting_a_namespace_leaves_nothing_anywhere(rig: Rig, valkey: RedisServer) -> None:
    assert ask(rig, Evict(ROOT, b"", below=True))["deleted"] == 2 * len(PROMPTS) * CHUNKS
    settle(rig.address)
    assert ask(rig, Evict(ROOT, b"", below=True))["deleted"] == 0
    left = valkey.names()
    assert not [it for it in left if ROOT.hex().encode() in it]
    assert tier(rig.address)["used_bytes"] == 0


def test_a_pin_outlives_a_flood_and_ends(rig: Rig) -> None:
    session = rig.session("engine", maps=True)
    wanted = keys(CHUNKS, PROMPTS[3])
    pin = Pin(ROOT, packed(PROMPTS[3]), "ops", 60.0)
    assert ask(rig, pin) == {"pinned": CHUNKS, "released": 0}
    assert ask(rig, pin) == {"pinned": CHUNKS, "released": 1}, "again is the same pin"
    pins = [it for it in rig.cache.tickets.values() if it.kind.value == "pin"]
    assert len(pins) == 1
    flood(session, 40, "flood")
    assert session.match(wanted).chunks == CHUNKS
    assert session.match(keys(CHUNKS, PROMPTS[0])).chunks == 0, "what is not pinned has left"
    rig.clock.moved_s += 61.0
    eventually(lambda: not rig.cache.tickets)
    flood(session, 40, "second flood")
    assert session.match(wanted).chunks == 0, "its time is over"


def test_a_pin_is_taken_back_by_its_owner(rig: Rig) -> None:
    for pinner in ("ops", "other"):
        ask(rig, Pin(ROOT, packed(PROMPTS[3]), pinner, 60.0))
    assert ask(rig, Pin(ROOT, b"", "ops", 0.0)) == {"pinned": 0, "released": 1}
    assert ask(rig, Pin(ROOT, b"", "ops", 0.0)) == {"pinned": 0, "released": 0}
    session = rig.session("engine", maps=True)
    flood(session, 40, "flood")
    assert session.match(keys(CHUNKS, PROMPTS[3])).chunks == CHUNKS, "the other's pin holds"


def test_pins_are_listed_until_they_end(rig: Rig) -> None:
    assert ask(rig, Pins()) == {"pins": []}
    ask(rig, Pin(ROOT, packed(PROMPTS[3]), "ops", 60.0))
    ask(rig, Pin(ROOT, packed(PROMPTS[2])[:16], "other", 3600.0))
    other, ops = ask(rig, Pins())["pins"]
    assert {name: ops[name] for name in ("pinner", "namespace", "tenant", "chunks", "bytes")} == {
        "pinner": "ops",
        "namespace": ROOT.hex(),
        "tenant": "",
        "chunks": CHUNKS,
        "bytes": CHUNKS * SLOT_BYTES,
    }
    assert (other["pinner"], other["chunks"], other["bytes"]) == ("other", 1, SLOT_BYTES)
    assert 0 < ops["seconds_left"] <= 60.0 < 3500 < other["seconds_left"] <= 3600.0
    rig.clock.moved_s += 61.0
    eventually(lambda: [it["pinner"] for it in ask(rig, Pins())["pins"]] == ["other"])
    ask(rig, Pin(ROOT, b"", "other", 0.0))
    assert ask(rig, Pins()) == {"pins": []}


def test_a_remote_that_does_not_answer_is_not_one_that_has_nothing(rig: Rig, valkey: RedisServer) -> None:
    valkey.kill()
    try:
        silent = chunks(rig, "of which the node has asked nobody")
        assert {tuple(it["remotes"]) for it in silent} == {(None,)}
        eventually(lambda: tier(rig.address, 2)["health"] != "well")
        silent = chunks(rig, "nor of these, while it is sick")
        assert {tuple(it["remotes"]) for it in silent} == {(None,)}
        error = tier(rig.address, 2)["last_error"]
        assert "Connection refused" in error["reason"]
        assert 0.0 <= error["seconds_ago"] < 30.0
        assert tier(rig.address, 1)["last_error"] is None
        assert "last_error" not in tier(rig.address, 0)
    finally:
        valkey.start()


def test_the_disks_book_keeping_is_told(rig: Rig) -> None:
    told = tier(rig.address)
    names = ("recovered_chunks", "journal_failures", "journal_forgotten_chunks", "journal_broken")
    assert [told[it] for it in names] == [0, 0, 0, False]
    journal = rig.node.tiering.journal
    assert journal is not None
    journal.failures, journal.forgotten, journal.broken = 3, 5, True
    told = tier(rig.address)
    assert [told[it] for it in names] == [0, 3, 5, True]
    assert not set(names) & tier(rig.address, 2).keys()


def test_another_amount_of_memory_leaves_the_disk_as_it_was(config: NodeConfig, tmp_path: Path) -> None:
    """Its slabs do not follow the memory's, and are dropped where they must change."""
    disk = disk_of(tmp_path)
    for memory, kept in ((8 << 20, 0), (32 << 20, CHUNKS), (16 << 20, CHUNKS)):
        with rigged(with_tiers(config, host_memory=memory, slab=0, disk=disk)) as rig:
            session = rig.session("engine", maps=True)
            assert tier(rig.address)["recovered_chunks"] == kept
            if not kept:
                save_all(session, PROMPTS[:1], rig.address)
            assert bring(session, keys(CHUNKS, PROMPTS[0]), "r").chunks == CHUNKS
            settle(rig.address)


def test_pins_are_bounded(rig: Rig) -> None:
    with pytest.raises(RefusedError, match="half of the host memory"):
        ask(rig, Pin(ROOT, pack_keys(keys(65, "many")), "ops", 60.0))
    for ttl_s in (-1.0, 8 * 86400.0, float("nan"), float("inf")):
        with pytest.raises(RefusedError, match="ttl: expected 0 to 604800 s"):
            ask(rig, Pin(ROOT, packed(PROMPTS[3]), "ops", ttl_s))


def test_a_pin_does_not_hold_up_the_end(config: NodeConfig, tmp_path: Path) -> None:
    with rigged(with_tiers(config, disk=disk_of(tmp_path), drain_s=30.0)) as rig:
        save_all(rig.session("saver", maps=True), PROMPTS)
        ask(rig, Pin(ROOT, packed(PROMPTS[0]), "ops", 3600.0))
        settle(rig.address)


def test_answers_fit_a_frame_whatever_there_is(config: NodeConfig) -> None:
    node = Node(with_tiers(config))
    widest = "\x00" * NAME_CHARS_MAX  # six bytes each in JSON
    fields = dict.fromkeys(("kv_dtype", "layout", "parallel", "tenant", "adapter"), widest)
    for number in range(600):
        node.handle(f"{number}", Register(namespace(model=f"{number:04}" + widest[4:], **fields), LAYOUT))
    reply = node.wish(Namespaces())
    assert isinstance(reply, StatusReply)
    assert len(encode(reply)) < FRAME_BYTES_MAX
    assert len(msgspec.json.decode(reply.state)["namespaces"]) > 100
    root = node.tiering.origin(0).root
    many = keys(wishes.EXPLAINED_KEYS_MAX + 1, "many")
    assert len(encode(node.wish(Explain(root, pack_keys(many[1:]))))) < FRAME_BYTES_MAX
    with pytest.raises(RefusedError, match="keys: expected at most 8192 in one question, given 8193; ask for a part"):
        node.wish(Explain(root, pack_keys(many)))
    node.close()


@pytest.mark.parametrize(
    "wish", [Prefetch(b"x" * 32, b""), Evict(b"", b"", below=True), Pin(b"x", b"", "ops", 1.0), Explain(b"x", b"")]
)
def test_an_unknown_namespace_is_named(rig: Rig, wish: Wish) -> None:
    with pytest.raises(RefusedError) as refused:
        ask(rig, wish)
    assert str(refused.value) == (
        f"namespace: expected one that this node knows, given {wish.root.hex()[:12]}; see `headwater status`"  # type: ignore[union-attr]
    )


class Other(socket.socket):
    """What an accepted connection of another user looks like."""

    def getsockopt(self, level: int, name: int, size: int = 0) -> Any:
        return struct.pack("3i", 1, 65534, 65534)


@pytest.mark.parametrize(
    "wish",
    [
        Tiers(),
        Namespaces(),
        Pins(),
        Explain(ROOT, b""),
        Prefetch(ROOT, b"", True),
        Pin(ROOT, b"", "ops", 0.0),
        Evict(ROOT, b"", below=True),
    ],
)
def test_another_user_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch, wish: Wish) -> None:
    """The node sees a peer of another user, as if the socket's mode had been widened."""
    plain = server.Server._check_operator

    def check(session: server.Session) -> None:
        theirs = server.Session(Other(fileno=session.socket.fileno()))
        try:
            plain(theirs)
        finally:
            theirs.socket.detach()

    monkeypatch.setattr(server.Server, "_check_operator", staticmethod(check))
    with pytest.raises(RefusedError, match="user: expected 0, who runs the node, or root, given 65534; ask as that"):
        ask(rig, wish)
    assert tier(rig.address)["used_bytes"], "nothing was done"
