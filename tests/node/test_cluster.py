"""Nodes of one cluster, in this process, with a real directory: what one has computed is a hit on the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headwater.config import NodeConfig
from headwater.directory.open import open_directory
from headwater.errors import ConfigError, RefusedError, UnavailableError
from headwater.node import cluster, exports
from headwater.node.client import ask_operator, fetch_status
from headwater.node.errands import Answer
from headwater.node.exports import realm_of
from headwater.node.messages import Drain
from headwater.node.orders import PullOrder
from headwater.types import Standing, Tier, chunk_name, pack_keys
from tests.clustered import Raise, cluster_of, raising, together, valkey
from tests.node.conftest import Rig, eventually
from tests.node.peers import LAYOUT, SLOT_BYTES, keys, namespace, save
from tests.node.tiered import bring, load, settle
from tests.servers import RedisServer

__all__ = ["valkey"]
CHUNKS = 6


@pytest.fixture
def raised(valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Raise]:
    """Starts nodes of this test's cluster by name."""
    with raising(valkey, tmp_path, monkeypatch) as start:
        yield start


def holders(rig: Rig, name: str, tier: Tier = Tier.HOST) -> list[int]:
    """How many nodes hold each chunk of a prompt, as the directory says."""
    directory = open_directory(rig.node.config.directory, rig.node.config.cluster)
    try:
        found = directory.locate([chunk_name(0, key) for key in keys(CHUNKS, name)], rig.clock.now() + 1)
    finally:
        directory.close()
    return [sum(it.tier is tier for it in replicas) for replicas in found]


def test_what_one_node_has_is_a_hit_on_another(raised: Raise) -> None:
    a, b = raised("a"), raised("b")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    engine = b.session("eb", maps=True)
    matched = bring(engine, keys(CHUNKS, "p"), "r1")
    assert (matched.chunks, matched.remote) == (CHUNKS, CHUNKS)
    assert load(engine, keys(CHUNKS, "p")) == CHUNKS
    eventually(lambda: holders(a, "p") == [2] * CHUNKS)
    told = cluster_of(a)
    assert told["served"]["chunks"] == CHUNKS
    assert told["served"]["bytes"] == CHUNKS * SLOT_BYTES
    assert cluster_of(b)["peers"][0]["read_bytes"] == CHUNKS * SLOT_BYTES
    a.quiet()


def test_nodes_of_one_host_copy_from_each_others_memory(raised: Raise) -> None:
    a, b = raised("a", host_id=""), raised("b", host_id="")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    engine = b.session("eb", maps=True)
    assert bring(engine, keys(CHUNKS, "p"), "r1").chunks == CHUNKS
    assert load(engine, keys(CHUNKS, "p")) == CHUNKS
    assert [(it["transport"], it["read_bytes"]) for it in cluster_of(b)["peers"]] == [("shm", CHUNKS * SLOT_BYTES)]
    a.quiet()


def test_memory_is_read_by_nixl_where_both_have_it(raised: Raise) -> None:
    pytest.importorskip("nixl_cu12", reason="the wheel nixl-cu12 is not installed")
    a, b = raised("a", host_id="one", nixl=True), raised("b", host_id="one", nixl=True)
    for rig in (a, b):  # without the way over shared memory, which is better on one host
        rig.node.cluster.member = replace(rig.node.cluster.member, transports=("nixl", "tcp"))
        rig.node.cluster.tier.peers._own = rig.node.cluster.member
    a.node.cluster.directory.join(a.node.cluster.member, a.clock.now() + 1)
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    eventually(lambda: b.node.cluster.tier.members()[0].member.transports == ("nixl", "tcp"))
    engine = b.session("eb", maps=True)
    for round_ in ("first", "second"):  # the holder has a checksum only from the second time on
        assert bring(engine, keys(CHUNKS, "p"), round_).chunks == CHUNKS
        assert load(engine, keys(CHUNKS, "p")) == CHUNKS
        if round_ == "first":
            b.node.errands.ask(lambda now, it: it.give(b.cache.evict(0, keys(1, "p"))), b.clock.now() + 1)
    assert {it["transport"] for it in cluster_of(b)["peers"] if it["read_bytes"]} == {"nixl"}


def test_other_clusters_and_other_tenants_share_nothing(raised: Raise) -> None:
    a, b, other = raised("a"), raised("b"), raised("c", cluster="elsewhere")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    assert bring(other.session("ec", maps=True), keys(CHUNKS, "p"), "r").chunks == 0
    # The same keys would be a bug of the one who makes them; the holder looks at the namespace all the same.
    stranger = b.session("eb", namespace(tenant="blue"), maps=True)
    assert bring(stranger, keys(CHUNKS, "p"), "r").chunks == 0


def test_a_chunk_that_only_a_disk_holds_is_brought_up_and_lent(raised: Raise, tmp_path: Path) -> None:
    a = raised("a", disk=f"{tmp_path}/disk:16MiB", disk_reserve=0)
    b = raised("b")
    engine = a.session("ea", maps=True)
    save(engine, keys(CHUNKS, "p"))
    settle(a.address)
    space = a.node._spaces[namespace().root()]
    a.node.errands.ask(lambda now, answer: answer.give(a.cache.evict(space, keys(CHUNKS, "p"))), 1e9)
    together(a, b)
    eventually(lambda: (holders(a, "p"), holders(a, "p", Tier.DISK)) == ([0] * CHUNKS, [1] * CHUNKS))
    reader = b.session("eb", maps=True)
    assert bring(reader, keys(CHUNKS, "p"), "r").chunks == CHUNKS
    assert load(reader, keys(CHUNKS, "p")) == CHUNKS
    assert cluster_of(a)["served"]["from_disk"] == CHUNKS


def test_clear_and_evict_reach_every_node(raised: Raise) -> None:
    a, b = raised("a"), raised("b")
    engine = a.session("ea", maps=True)
    save(engine, keys(CHUNKS, "p"))
    save(engine, keys(CHUNKS, "q"))
    together(a, b)
    reader = b.session("eb", maps=True)
    assert bring(reader, keys(CHUNKS, "p"), "r").chunks == CHUNKS
    assert engine.clear().pending in ((), ("peers",))
    eventually(lambda: not engine.still_clearing())
    assert not any(reader.contains(keys(CHUNKS, "p")))
    assert bring(engine, keys(CHUNKS, "p"), "r2").chunks == 0, "it came back from the other node"
    assert bring(reader, keys(CHUNKS, "q"), "r3").chunks == 0
    save(engine, keys(CHUNKS, "p"))
    assert bring(engine, keys(CHUNKS, "p"), "r4").chunks == CHUNKS


def test_a_node_that_drains_leaves_its_chunks_with_the_others(raised: Raise) -> None:
    a, b = raised("a"), raised("b")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    assert ask_operator(a.address, Drain())["draining"]
    eventually(lambda: ask_operator(a.address, Drain(begins=False))["done"], 15.0)
    assert holders(a, "p") == [2] * CHUNKS
    listed = {it.member.name: it.standing for it in b.node.cluster.directory.members(b.clock.now() + 1)}
    assert listed == {"a": Standing.DRAINING, "b": Standing.SERVING}
    with pytest.raises(RefusedError, match="one that drains"):
        order = PullOrder(namespace(), LAYOUT, namespace().root(), pack_keys(keys(1, "z")), "hot")
        a.node.cluster.orders.told_pull("b", msgspec.msgpack.encode(order), a.clock.now() + 1)
    # Nobody on b had registered this namespace; an engine that does finds what was pulled.
    a.close()
    engine = b.session("eb", maps=True)
    assert load(engine, keys(CHUNKS, "p")) == CHUNKS


def test_a_node_that_is_alone_cannot_be_drained(raised: Raise) -> None:
    a = raised("a")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    state = ask_operator(a.address, Drain())
    assert state["stuck"] == "no other node takes anything"
    assert not state["done"]


def test_copies_that_somebody_wishes_for_are_made(raised: Raise) -> None:
    a, b, c = raised("a"), raised("b"), raised("c")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b, c)
    space = a.node._spaces[namespace().root()]

    def wish(now: float, answer: Answer[bool]) -> None:
        answer.give(a.node.cluster.orders.wish(space, keys(CHUNKS, "p"), 3, now))

    assert a.node.errands.ask(wish, a.clock.now() + 1)
    eventually(lambda: holders(a, "p") == [3] * CHUNKS, 15.0)
    assert cluster_of(a)["orders"]["sent"]["replicas"] >= 2


def test_a_full_node_gives_some_of_its_chunks_to_an_emptier_one(raised: Raise) -> None:
    a, b = raised("a"), raised("b")
    engine = a.session("ea", maps=True)
    names = [f"p{number}" for number in range(60)]
    for name in names:
        save(engine, keys(CHUNKS, name))
    together(a, b)
    used = a.cache.pool.taken_bytes
    assert used > 0.5 * a.cache.pool.capacity_bytes
    eventually(lambda: cluster_of(a)["orders"]["sent"]["rebalance"] > 0, 10.0)
    eventually(lambda: a.cache.pool.taken_bytes < used, 15.0, seen=lambda: cluster_of(a)["orders"])
    # Nothing is lost by it: every chunk is on one of them.
    directory = a.node.cluster.directory

    def held_somewhere() -> bool:
        wanted = [chunk_name(0, key) for name in names for key in keys(CHUNKS, name)]
        return all(directory.locate(wanted, a.clock.now() + 1))

    eventually(held_somewhere)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"noise", "an order"),
        (msgspec.msgpack.encode(PullOrder(namespace(), LAYOUT, bytes(32), b"short", "hot")), "an order"),
        (msgspec.msgpack.encode(PullOrder(namespace(), LAYOUT, bytes(32), b"", "hot")), "a sound order"),
        (msgspec.msgpack.encode(PullOrder(namespace(), LAYOUT, b"root", bytes(16), "hot")), "a sound order"),
    ],
)
def test_orders_that_make_no_sense_are_refused(raised: Raise, body: bytes, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        raised("a").node.cluster.orders.told_pull("b", body, 1e9)


def test_a_holder_looks_at_namespace_layout_and_names(raised: Raise) -> None:
    a = raised("a")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    exports, names = a.node.cluster._served.exports, [chunk_name(0, keys(CHUNKS, "p")[0])]
    root, until_s = namespace().root(), a.clock.now() + 1
    unknown = exports.lend("b", bytes(48), names, until_s)
    assert [str(it) for it in unknown.parts] == ["Outcome.MISSING"]
    with pytest.raises(RefusedError, match="layout"):
        exports.lend("b", root + bytes(16), names, until_s)
    with pytest.raises(RefusedError, match="name"):
        exports.lend("b", realm_of(root, LAYOUT), [b"short"], until_s)
    with pytest.raises(RefusedError, match="do not write"):
        exports.accept("b", realm_of(root, LAYOUT), names, [SLOT_BYTES], until_s)
    with pytest.raises(RefusedError, match="topic"):
        exports.told("b", "what", b"", until_s)
    loan = exports.lend("b", realm_of(root, LAYOUT), names, until_s)
    assert a.cache.tickets
    loan.give_back([True], [4711])
    a.quiet()
    again = exports.lend("b", realm_of(root, LAYOUT), names, until_s)
    assert again.parts[0].checksum == 4711, "it was computed before, and the chunk is the same"
    again.give_back([False], [None])
    a.quiet()


def test_what_one_request_may_name_is_bounded(raised: Raise) -> None:
    a = raised("a")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    served, root, until_s = a.node.cluster._served, namespace().root(), a.clock.now() + 5
    name = chunk_name(0, keys(CHUNKS, "p")[0])
    with pytest.raises(RefusedError, match="at most"):
        served.exports.lend("b", realm_of(root, LAYOUT), [name] * (exports.NAMES_MAX + 1), until_s)
    for names in (name * (cluster.EVICTED_BYTES_MAX // len(name) + 1), name + b"short"):
        with pytest.raises(RefusedError, match="whole names"):
            served.exports.told("b", "evict", msgspec.msgpack.encode((root, names)), until_s)
    assert a.cache.contains(a.node._spaces[root], keys(CHUNKS, "p")) == b"\1" * CHUNKS
    served.exports.told("b", "evict", msgspec.msgpack.encode((root, name)), until_s)
    assert a.cache.contains(a.node._spaces[root], keys(CHUNKS, "p")) == bytes(CHUNKS), "and what hangs on it"


def test_a_checksum_does_not_outlive_its_chunk(raised: Raise) -> None:
    """The same key may be computed again, with other bytes in the last places."""
    a = raised("a")
    engine = a.session("ea", maps=True)
    save(engine, keys(1, "p"))
    exports, name = a.node.cluster._served.exports, chunk_name(0, keys(1, "p")[0])
    realm, until_s = realm_of(namespace().root(), LAYOUT), a.clock.now() + 5
    exports.lend("b", realm, [name], until_s).give_back([True], [4711])
    a.quiet()
    engine.clear()
    save(engine, keys(1, "p"))
    loan = exports.lend("b", realm, [name], until_s)
    assert loan.parts[0].checksum is None
    loan.give_back([False], [None])


def test_a_checksum_that_comes_late_is_not_another_chunks(raised: Raise) -> None:
    a = raised("a")
    engine = a.session("ea", maps=True)
    save(engine, keys(1, "p"))
    exports, name = a.node.cluster._served.exports, chunk_name(0, keys(1, "p")[0])
    realm, until_s = realm_of(namespace().root(), LAYOUT), a.clock.now() + 5
    loan = exports.lend("b", realm, [name], until_s)
    engine.clear()
    save(engine, keys(1, "p"))
    loan.give_back([True], [4711])
    a.quiet()
    again = exports.lend("b", realm, [name], until_s)
    assert again.parts[0].checksum is None
    again.give_back([False], [None])


def test_a_peer_that_asks_too_late_harms_nobody(raised: Raise) -> None:
    a = raised("a")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    exports, names = a.node.cluster._served.exports, [chunk_name(0, keys(CHUNKS, "p")[0])]
    for realm in (bytes(48), realm_of(namespace().root(), LAYOUT)):
        for topic in ("", "evict", "clear", "pull", "object"):
            # The loop may be quicker than the clock: then there is an answer, or a loan.
            with suppress(UnavailableError, RefusedError):
                if topic:
                    exports.told("b", topic, b"x", a.clock.now() - 1)
                else:
                    exports.lend("b", realm, names, a.clock.now() - 1).give_back([False], [None])
    a.quiet()
    assert fetch_status(a.address)["cluster"]


def test_a_peer_cannot_lend_itself_all_of_the_memory(raised: Raise) -> None:
    a = raised("a")
    engine = a.session("ea", maps=True)
    for number in range(60):
        save(engine, keys(CHUNKS, f"p{number}"))
    exports, realm = a.node.cluster._served.exports, realm_of(namespace().root(), LAYOUT)
    loans = []
    with pytest.raises(UnavailableError, match="too much"):
        for number in range(60):
            names = [chunk_name(0, key) for key in keys(CHUNKS, f"p{number}")]
            loans.append(exports.lend("b", realm, names, a.clock.now() + 5))
    for it in loans:
        it.give_back([True] * CHUNKS, [1] * CHUNKS)
    a.quiet()
    exports.lend("b", realm, names, a.clock.now() + 5).give_back([False] * CHUNKS, [None] * CHUNKS)


def test_nobody_is_made_to_take_namespaces_in_that_nobody_has(raised: Raise) -> None:
    a, b = raised("a"), raised("b")
    together(a, b)
    strange = namespace(model="made up")
    order = PullOrder(strange, LAYOUT, strange.root(), pack_keys(keys(1, "z")), "hot")
    with pytest.raises(RefusedError, match="somebody holds"):
        a.node.cluster.orders.told_pull("b", msgspec.msgpack.encode(order), a.clock.now() + 1)
    assert strange.root() not in a.node._spaces


def test_the_directory_is_emptied_and_knows_everything_again(raised: Raise, valkey: RedisServer) -> None:
    a, b = raised("a"), raised("b")
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    valkey.say("FLUSHALL")
    eventually(lambda: cluster_of(a)["directory"]["walks"] == 2)
    together(a, b)
    assert holders(a, "p") == [1] * CHUNKS
    engine = b.session("eb", maps=True)
    assert bring(engine, keys(CHUNKS, "p"), "r").chunks == CHUNKS


def test_a_name_that_a_newer_life_has_is_not_taken(raised: Raise) -> None:
    a = raised("a")
    later = raised("later", name="a")
    eventually(lambda: "epoch" in cluster_of(a)["directory"]["trouble"] or not cluster_of(a)["directory"]["well"], 10.0)
    assert cluster_of(later)["directory"]["well"]
    # It goes on by itself.
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    assert load(a.session("ea", maps=True), keys(CHUNKS, "p")) == CHUNKS


def test_a_tenants_quota_holds_over_all_nodes(raised: Raise) -> None:
    quotas = {"blue": 2 << 20}
    a, b = raised("a", cluster_quotas=quotas), raised("b", cluster_quotas=quotas)
    for rig in (a, b):
        save(rig.session(f"e{rig.node.config.name}", namespace(tenant="blue"), maps=True), keys(CHUNKS, "p"))
    together(a, b)
    eventually(lambda: all(it.cache.shares["blue"].quota_bytes for it in (a, b)))

    def lines() -> int:
        return sum(it.cache.shares["blue"].quota_bytes for it in (a, b))

    eventually(lambda: abs(lines() - (2 << 20)) < 4096, 10.0, seen=lines)


def test_others_than_loopback_need_credentials(config: NodeConfig, valkey: RedisServer) -> None:
    with pytest.raises(ConfigError, match="listen"):
        Rig(replace(config, directory=valkey.url(), listen="0.0.0.0:0"))


def test_a_directory_that_was_never_there_changes_nothing(raised: Raise, config: NodeConfig) -> None:
    rig = Rig(replace(config, directory="redis://127.0.0.1:1"))
    try:
        engine = rig.session("e", maps=True)
        save(engine, keys(CHUNKS, "p"))
        assert bring(engine, keys(CHUNKS, "p"), "r").chunks == CHUNKS
        assert bring(engine, keys(CHUNKS, "q"), "r").chunks == 0
        assert "refused" in cluster_of(rig)["directory"]["trouble"]
    finally:
        rig.close()
