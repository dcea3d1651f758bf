"""The node without its socket: what it holds is bounded, what it says adds up, and the wire changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headwater.config import NodeConfig
from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.pool import Pool
from headwater.errors import ProtocolError, RefusedError, ResourceError
from headwater.node import driver
from headwater.node.driver import Node
from headwater.node.messages import (
    FRAME_BYTES_MAX,
    PROTOCOL,
    Hello,
    Load,
    Loaded,
    Match,
    Register,
    Registered,
    Reserve,
    Reserved,
    Status,
    encode,
)
from headwater.types import HitRule, KVGroup, KVLayout, pack_keys
from tests.node.conftest import MovedClock, Rig, descriptors
from tests.node.peers import LAYOUT, keys, namespace


@pytest.fixture
def node(config: NodeConfig) -> Iterator[Node]:
    node = Node(config, MovedClock())
    yield node
    node.cache.check()
    node.close()


def register(node: Node, instance: str, **changes: str) -> int:
    reply = node.handle(instance, Register(namespace(**changes), LAYOUT))
    assert isinstance(reply, Registered)
    return reply.space


def test_namespaces_are_bounded_because_they_stay(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SPACES_MAX", 300)
    for index in range(300):
        assert register(node, f"i{index}", model=f"{index}") == index
    with pytest.raises(RefusedError, match="namespaces: expected at most 300"):
        register(node, "late", model="late")
    assert register(node, "welcome", model="7") == 7, "one that is known is always welcome"
    assert len(node.cache.spaces) == 300


def test_status_fits_a_frame_whatever_there_is(node: Node) -> None:
    widest = "\x00" * driver.NAME_CHARS_MAX  # six bytes each in JSON
    fields = dict.fromkeys(("kv_dtype", "layout", "parallel", "tenant"), widest)
    for index in range(driver.SPACES_SHOWN + 50):
        space = register(node, f"i{index}", model=f"{index:04}" + widest[4:], **fields)
        if index % 2:
            reply = node.handle(f"i{index}", Reserve(space, b"", pack_keys(keys(1 + index % 3)), (), (0,)))
            assert isinstance(reply, Reserved)
            node.cache.done(f"i{index}", reply.ticket, 0, (), 0.0)
    shown = node.status()["namespaces"]
    assert isinstance(shown, list)
    assert len(shown) == driver.SPACES_SHOWN
    assert min(it["held_bytes"] for it in shown[:150]) > 0, "those that hold most"
    reply = node.handle("i0", Status())
    assert len(encode(reply)) < FRAME_BYTES_MAX


def test_tickets_are_bounded_and_that_is_an_outcome(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    space = register(node, "a")
    ready = node.handle("a", Reserve(space, b"", pack_keys(keys(1)), (), (0,)))
    assert isinstance(ready, Reserved)
    node.cache.done("a", ready.ticket, 0, (), 0.0)
    monkeypatch.setattr(driver, "TICKETS_MAX", 3)
    for index in range(5):
        reply = node.handle("a", Reserve(space, b"", pack_keys(keys(1, f"{index}")), (), (0,)))
        assert isinstance(reply, Reserved)
        assert (reply.ticket != 0, reply.covered) == ((True, 1) if index < 3 else (False, 0))
    loaded = node.handle("a", Load(space, pack_keys(keys(1)), 0, (0,)))
    assert isinstance(loaded, Loaded)
    assert (loaded.ticket, loaded.chunks) == (0, 0)
    assert node.close_instance("a") == 3


def test_a_node_that_drains_grants_nothing_and_answers_everything(node: Node) -> None:
    space = register(node, "a")
    held = node.handle("a", Reserve(space, b"", pack_keys(keys(2)), (), (0,)))
    assert isinstance(held, Reserved)
    node.cache.done("a", held.ticket, 0, (), 0.0)
    node.draining = True
    loaded = node.handle("a", Load(space, pack_keys(keys(2)), 0, (0,)))
    assert isinstance(loaded, Loaded)
    assert (loaded.ticket, loaded.chunks, loaded.addresses) == (0, 0, (b"",))
    assert node.handle("a", Match(space, pack_keys(keys(2)), False)).chunks == 2  # type: ignore[union-attr]
    assert not node.cache.tickets


def test_hello_is_no_request(node: Node) -> None:
    with pytest.raises(ProtocolError, match="Hello is not allowed after the handshake"):
        node.handle("a", Hello(PROTOCOL, "x", "a", False))


def test_an_instance_that_is_gone_is_unknown(node: Node) -> None:
    space = register(node, "a")
    node.close_instance("a")
    with pytest.raises(ProtocolError, match="not this instance's"):
        node.handle("a", Match(space, b"", False))
    assert register(node, "a", salt="other") != space, "the name is free for another namespace"


def test_a_node_without_memory_is_refused_before_anything_else(config: NodeConfig) -> None:
    before = descriptors()
    with pytest.raises(ResourceError, match=str(1 << 39)):
        Node(replace(config, host_memory=1 << 39, slab=1 << 20))
    assert descriptors() == before


def test_two_lives_of_a_node_share_neither_name_nor_ticket_numbers(config: NodeConfig) -> None:
    lives = []
    for _ in range(3):
        node = Node(config)
        space = register(node, "a")
        reply = node.handle("a", Reserve(space, b"", pack_keys(keys(1)), (), (0,)))
        assert isinstance(reply, Reserved)
        lives.append((node.epoch, reply.ticket, node.name))
        node.close()
    assert len({it[2] for it in lives}) == 3
    assert sorted(lives) == lives
    assert len({it[1] for it in lives}) == 3


TWO_GROUPS = KVLayout(
    16,
    (KVGroup(16, 4096, (1, 1)), KVGroup(16, 4096, (1, 1), HitRule.WINDOW, 40), KVGroup(16, 512, (1, 1), HitRule.LAST)),
)


@pytest.mark.parametrize("layout", [LAYOUT, TWO_GROUPS], ids=["dense", "hybrid"])
@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
def test_a_session_is_the_cache_itself_over_a_wire(
    config: NodeConfig, layout: KVLayout, eviction: str, seed: int
) -> None:
    """The same calls to a session and to a bare cache: every answer is the same, and so are the sums."""
    rig = Rig(replace(config, host_memory=1 << 20, eviction=eviction))
    node = rig.node
    bare = Cache(
        Pool([1 << 20], node.cache.pool.slab_bytes), POLICIES[eviction], config.load_lease_s, config.save_lease_s
    )
    shift = node.epoch
    space = bare.add_space(namespace(layout), layout)
    session = rig.session("a", namespace(layout), layout)
    draw = random.Random(seed)
    chains = [keys(20, f"{index}") for index in range(12)]
    tickets: list[int] = []
    try:
        for turn in range(1500):
            chain = draw.choice(chains)
            count = draw.randint(0, 20)
            wanted, action = chain[:count], draw.randrange(9)
            shards = draw.choice(((0, 1), (0,), (1,))) if layout is TWO_GROUPS else (0,)
            if action == 0:
                counts = draw.random() < 0.5
                chunks = bare.match(space, wanted)
                if counts:
                    bare.count_lookup(space, count, chunks)
                assert session.match(wanted, counts=counts).chunks == chunks, turn
            elif action == 1:
                assert session.contains(wanted) == [bool(it) for it in bare.contains(space, wanted)], turn
            elif action in (2, 3):
                first = draw.choice((0, 0, 3))
                mine = session.load(wanted, first, shards)
                other = bare.load("a", space, wanted, first, shards, 0.0)
                assert (mine.ticket and mine.ticket - shift, mine.chunks) == (other.ticket, other.chunks), turn
                assert mine.addresses == other.addresses, turn
                tickets += [mine.ticket] if mine.ticket else []
            elif action in (4, 5):
                lacking = [(draw.randrange(3), draw.randrange(20))] if draw.random() < 0.2 else []
                split = draw.randint(0, count)
                parent = chain[split - 1] if split else None
                new = session.reserve(wanted[split:], parent, lacking, shards)
                same = bare.reserve("a", space, parent, wanted[split:], frozenset(lacking), shards, 0.0)
                assert (new.ticket and new.ticket - shift, new.covered) == (same.ticket, same.covered), turn
                assert new.addresses == same.addresses, turn
                tickets += [new.ticket] if new.ticket else []
            elif action == 6 and tickets:
                ticket, shard = draw.choice(tickets), draw.randrange(2)
                failed = draw.sample(range(20), 2) if draw.random() < 0.3 else []
                assert session.done(ticket, shard, failed) == bare.done("a", ticket - shift, shard, failed, 0.0), turn
            elif tickets:
                ticket = tickets.pop(0)
                if draw.random() < 0.2:
                    assert session.release([ticket]) == bare.release("a", ticket - shift), turn
                for shard in (0, 1):
                    assert session.done(ticket, shard) == bare.done("a", ticket - shift, shard, (), 0.0), turn
        mine, other = node.cache.spaces[0], bare.spaces[space]
        assert {name: getattr(mine, name) for name in SUMS} == {name: getattr(other, name) for name in SUMS}
        assert mine.evicted_bytes > 0
        assert mine.hit_tokens > 0
        status = node.status()["namespaces"][0]  # type: ignore[index]
        assert status["held_bytes"] == status["stored_bytes"] - status["evicted_bytes"] - status["deleted_bytes"]
        assert status["hit_tokens"] + status["miss_tokens"] == status["lookup_tokens"]
        assert session.clear().deleted == bare.clear(space)
        assert repr(node.cache.pool) == repr(bare.pool)
    finally:
        rig.close()


SUMS = (
    "lookup_tokens",
    "hit_tokens",
    "stored_bytes",
    "evicted_bytes",
    "deleted_bytes",
    "stored_chunks",
    "failed_chunks",
)
