"""The REMOTE tier on real servers: the contract, and what servers do to those who trust them."""

from __future__ import annotations

import random
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from headwater.errors import UnavailableError
from headwater.places import parse_remote
from headwater.ports import LowerTier, Piece
from headwater.tiers.header import VERSION
from headwater.tiers.redis import RedisTier
from headwater.tiers.redis_chunks import PIECE_BYTES
from headwater.tiers.remote import open_remote
from headwater.tiers.resp import RIGHTS
from headwater.types import PAGE_BYTES, Identity, Outcome
from tests.conformance.lower_tier import LowerTierSuite, identity, memory_of, soon
from tests.conftest import ROOT
from tests.node.conftest import eventually
from tests.servers import RedisServer, redis_server, valkey_program

DAMAGES = 2400


def opened(server: RedisServer, options: str = "") -> RedisTier:
    """A tier on a server."""
    tier = open_remote(parse_remote(server.url(options)))
    assert isinstance(tier, RedisTier)
    return tier


def piece(it: Identity, seed: int | None = None) -> Piece:
    return Piece(it, memory_of(it, seed))


def read(tier: LowerTier, it: Identity, seed: int = 1) -> Outcome:
    """What a read says; DONE is only ever said of the right bytes."""
    target = piece(it)
    [outcome] = tier.read([target], soon())
    assert outcome is not Outcome.DONE or np.array_equal(target.memory, memory_of(it, seed))
    return outcome


def flip(server: RedisServer, name: bytes, bit: int) -> None:
    server.say("BITFIELD", name, "INCRBY", "u1", str(bit), "1")


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    tier = opened(server)
    yield tier
    tier.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Valkey that the test may end and reconfigure."""
    with redis_server(valkey_program(), tmp_path / "valkey") as server:
        yield server


class TestContract(LowerTierSuite):
    @pytest.fixture
    def tier(self, server: RedisServer) -> Iterator[LowerTier]:
        tier = opened(server)
        yield tier
        tier.close()


class TestContractWithTimeToLive(LowerTierSuite):
    @pytest.fixture
    def tier(self, server: RedisServer) -> Iterator[LowerTier]:
        tier = opened(server, "?ttl=1h&cluster=other&connections=1")
        yield tier
        tier.close()


def test_a_unix_socket_will_do(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with redis_server(valkey_program(), tmp_path / "valkey", "--unixsocket", str(path)):
        tier = open_remote(parse_remote(f"valkey+unix://{path}?db=3"))
        assert tier.write([piece(identity(1), 1)], soon()) == [Outcome.DONE]
        assert read(tier, identity(1)) is Outcome.DONE
        tier.close()


def test_clusters_and_databases_do_not_see_each_other(server: RedisServer) -> None:
    tiers = [opened(server, it) for it in ("", "?cluster=a", "?cluster=b", "/1", "/1?cluster=a")]
    for at, it in enumerate(tiers):
        assert it.holds([identity(1)], soon()) == [False]
        assert it.write([piece(identity(1), at)], soon()) == [Outcome.DONE]
    for at, it in enumerate(tiers):
        assert read(it, identity(1), at) is Outcome.DONE
        it.close()


# ---- what is written, and what is left behind ----------------------------------------------------------


def test_keys_are_what_the_documentation_says(server: RedisServer, tier: RedisTier) -> None:
    it = identity(5, 3)
    tier.write([piece(it, 1)], soon())
    base = f"headwater:default:none:{it.origin.root.hex()}:3:{it.key.hex()}:".encode()
    header, *pieces = sorted(server.names(), key=len)
    assert header == base + b"h"
    assert {name.rpartition(b":")[2] for name in pieces} == {b"%d" % at for at in range(3)}
    assert all(name.startswith(base) for name in pieces)
    assert server.say("STRLEN", header) == b":%d\r\n" % PAGE_BYTES
    assert server.say("STRLEN", pieces[0]) == b":%d\r\n" % PIECE_BYTES


def test_nothing_is_left_behind(server: RedisServer, tier: RedisTier) -> None:
    it = identity(5, 3)
    for seed in (1, 2, 3):
        tier.write([piece(it, seed)], soon())
        assert len(server.names()) == 1 + 3
    tier.delete([it], soon())
    assert server.names() == []


def test_every_key_lives_for_the_time_to_live_after_its_last_use(server: RedisServer) -> None:
    tier, it = opened(server, "?ttl=100s"), identity(5, 3)

    def seconds_left() -> set[int]:
        return {int(server.say("TTL", name)[1:]) for name in server.names()}

    assert tier.write([piece(it, 1)], soon()) == [Outcome.DONE]
    assert seconds_left() <= {99, 100}
    for name in server.names():
        assert server.say("EXPIRE", name, "7") == b":1\r\n"
    assert tier.holds([it], soon()) == [True]
    assert seconds_left() <= {6, 7}, "a question is no use"
    assert read(tier, it) is Outcome.DONE
    assert seconds_left() <= {99, 100}
    tier.close()


def test_without_a_time_to_live_nothing_expires(server: RedisServer, tier: RedisTier) -> None:
    tier.write([piece(identity(5, 3), 1)], soon())
    assert {server.say("TTL", name) for name in server.names()} == {b":-1\r\n"}


def test_a_chunk_whose_piece_was_evicted_is_missing_and_nobody_is_told_of_it_again(
    server: RedisServer, tier: RedisTier
) -> None:
    for victim in range(3):
        tier.write([piece(identity(5, 3), 1), piece(identity(6, 3), 1)], soon())
        [name] = [it for it in server.names() if it.endswith(b":%d" % victim) and identity(5).key.hex().encode() in it]
        server.say("DEL", name)
        pieces = [piece(identity(number, 3)) for number in (5, 6)]
        assert tier.read(pieces, soon()) == [Outcome.MISSING, Outcome.DONE]
        assert tier.holds([identity(5, 3), identity(6, 3)], soon()) == [False, True]


def test_a_writer_that_dies_half_way_leaves_nothing_to_find(server: RedisServer, tier: RedisTier) -> None:
    """The header is written last: a server that stops taking keys after any of them has no chunk."""
    it = identity(5, 3)
    tier.write([piece(it, 1)], soon())
    [header] = [name for name in server.names() if name.endswith(b":h")]
    server.say("DEL", header)
    assert tier.holds([it], soon()) == [False]
    assert read(tier, it) is Outcome.MISSING
    assert tier.write([piece(it, 1)], soon()) == [Outcome.DONE]
    assert len(server.names()) == 4


def test_reads_writes_and_questions_do_not_wait_for_each_other(server: RedisServer) -> None:
    tier, it = opened(server, "?connections=2"), identity(1)
    assert tier.write([piece(it, 1)], soon()) == [Outcome.DONE]
    with tier._reads.one(soon()), tier._reads.one(soon()):
        assert tier.holds([it], soon(1)) == [True]
        assert tier.write([piece(it, 1)], soon(1)) == [Outcome.DONE]
        with pytest.raises(UnavailableError, match="busy"):
            tier.read([piece(it)], soon(0.05))
    with tier._writes.one(soon()):
        assert tier.holds([it], soon(1)) == [True]
        assert read(tier, it) is Outcome.DONE
    with tier._questions.one(soon()):
        assert read(tier, it) is Outcome.DONE
    tier.close()


# ---- bytes that are wrong --------------------------------------------------------------------------------


def test_every_flipped_bit_is_found(server: RedisServer, tier: RedisTier, seed: int) -> None:
    """In the header page and in every piece; each flip is put right before the next."""
    rng = random.Random(seed)
    chunks = [identity(1, 0), identity(2, 1)]
    tier.write([piece(it, 1) for it in chunks], soon())
    sizes = {name: int(server.say("STRLEN", name)[1:]) for name in server.names()}
    assert len(sizes) == 4
    damages = 0
    for name, size in sizes.items():
        it = chunks[0] if chunks[0].key.hex().encode() in name else chunks[1]
        for number in range(DAMAGES // len(sizes)):
            bits = rng.sample(range(size * 8), (1, 1, 1, 2, 8)[number % 5])
            for bit in bits:
                flip(server, name, bit)
            assert read(tier, it) in (Outcome.CORRUPT, Outcome.FOREIGN), f"seed {seed}: {name!r} bits {bits}"
            for bit in bits:
                flip(server, name, bit)
            damages += 1
    assert damages >= 2000
    assert [read(tier, it) for it in chunks] == [Outcome.DONE] * 2


def test_bits_flipped_in_a_chunk_of_several_pieces_are_found(server: RedisServer, tier: RedisTier, seed: int) -> None:
    rng, it = random.Random(seed), identity(3, 3)
    tier.write([piece(it, 1)], soon())
    for name in server.names():
        size = int(server.say("STRLEN", name)[1:])
        for bit in [0, size * 8 - 1, *rng.sample(range(size * 8), 20)]:
            flip(server, name, bit)
            assert read(tier, it) in (Outcome.CORRUPT, Outcome.FOREIGN), f"seed {seed}: {name!r} bit {bit}"
            flip(server, name, bit)
    assert read(tier, it) is Outcome.DONE


def test_headers_that_lie_are_not_believed(server: RedisServer, tier: RedisTier, seed: int) -> None:
    """Whoever may write to the server can make a page whose checksum is right; lengths and names in it may be any."""
    rng, it = random.Random(seed), identity(3, 2)
    tier.write([piece(it, 1)], soon())
    [name] = [name for name in server.names() if name.endswith(b":h")]
    page = server.say("GET", name).partition(b"\r\n")[2][:-2]
    outcomes = set()
    for number in range(400):
        lie = bytearray(page)
        at = rng.choice([8, 10, 12, 16, 24, 32, 40, 56, 88, 104, 120, 136, 152, 168, 232, 240])
        size = rng.choice([1, 2, 4, 8])
        lie[at : at + size] = rng.choice([rng.randbytes(size), bytes(size), b"\xff" * size])
        struct.pack_into("<Q", lie, PAGE_BYTES - 8, xxhash.xxh3_64_intdigest(bytes(lie[:-8])))
        server.say("SET", name, bytes(lie))
        outcome = read(tier, it)
        outcomes.add(outcome)
        assert outcome is not Outcome.FAILED, f"seed {seed}, lie {number} at {at}"
    assert outcomes == {Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN, Outcome.NEWER}


@pytest.mark.parametrize("content", ["", "x", "zeros", "short", "long", "huge", "pickle", "list"])
def test_other_things_in_place_of_a_key_are_not_taken_for_it(
    server: RedisServer, tier: RedisTier, content: str
) -> None:
    """The chunks beside it are read all the same, and writing it again puts it right."""
    it, beside = identity(5, 3), identity(6, 3)
    tier.write([piece(it, 1), piece(beside, 1)], soon())
    for name in [name for name in server.names() if it.key.hex().encode() in name]:
        size = int(server.say("STRLEN", name)[1:])
        if content == "list":
            server.say("DEL", name)
            server.say("RPUSH", name, "x")
        else:
            value = {
                "zeros": bytes(size),
                "short": bytes(size - 1),
                "long": bytes(size + 1),
                "huge": bytes(9 << 20),
                "pickle": b"cos\nsystem\n(S'false'\ntR.",
            }.get(content, content.encode())
            server.say("SET", name, value)
        pieces = [piece(beside), piece(it), piece(beside)]
        outcomes = tier.read(pieces, soon())
        assert outcomes == [Outcome.DONE, Outcome.CORRUPT, Outcome.DONE]
        assert np.array_equal(pieces[2].memory, memory_of(beside, 1))
        tier.delete([it], soon())
        assert tier.holds([it], soon()) == [False]
        assert tier.write([piece(it, 1)], soon()) == [Outcome.DONE]
        assert read(tier, it) is Outcome.DONE


def test_a_chunk_under_another_ones_name_is_foreign(server: RedisServer, tier: RedisTier) -> None:
    chunks = [identity(1, 1), identity(2, 1), identity(3, 2)]
    tier.write([piece(it, 1) for it in chunks], soon())
    headers = [name for name in server.names() if name.endswith(b":h")]
    for source in headers:
        for target in headers:
            if source != target:
                kept = server.say("DUMP", target)
                body = kept.partition(b"\r\n")[2][:-2]
                server.say("COPY", source, target, "REPLACE")
                [it] = [it for it in chunks if it.key.hex().encode() in target]
                assert read(tier, it) is Outcome.FOREIGN
                server.say("RESTORE", target, "0", body, "REPLACE")
    assert [read(tier, it) for it in chunks] == [Outcome.DONE] * 3


def test_a_newer_version_is_a_miss_and_is_left_alone(server: RedisServer, tier: RedisTier) -> None:
    it = identity(1, 1)
    tier.write([piece(it, 1)], soon())
    [name] = [name for name in server.names() if name.endswith(b":h")]
    page = bytearray(server.say("GET", name).partition(b"\r\n")[2][:-2])
    struct.pack_into("<H", page, 8, VERSION + 1)
    struct.pack_into("<Q", page, PAGE_BYTES - 8, xxhash.xxh3_64_intdigest(bytes(page[:-8])))
    server.say("SET", name, bytes(page))
    before = server.names()
    assert read(tier, it) is Outcome.NEWER
    assert server.names() == before


# ---- servers that are sick -------------------------------------------------------------------------------


def test_hits_return_after_a_kill_and_a_restart(own_server: RedisServer) -> None:
    tier, it = opened(own_server), identity(5, 3)
    for _ in range(5):
        assert tier.write([piece(it, 1)], soon()) == [Outcome.DONE]
        assert read(tier, it) is Outcome.DONE
        own_server.kill()
        begun_s = time.monotonic()
        for call in (
            lambda: tier.holds([it], soon()),
            lambda: read(tier, it),
            lambda: tier.write([piece(it, 1)], soon()),
            lambda: tier.usage(soon()),
        ):
            with pytest.raises(UnavailableError, match="redis://127"):
                call()
        assert time.monotonic() - begun_s < 1.0
        own_server.start()
        assert tier.holds([it], soon()) == [False], "the first call after it is back works"
        assert read(tier, it) is Outcome.MISSING
    tier.close()


def test_kills_under_traffic_never_give_wrong_bytes(own_server: RedisServer, seed: int) -> None:
    """Four threads write and read through five deaths of the server; each ends, and works again after the last."""
    tier, stop, worked = opened(own_server, "?connections=4"), threading.Event(), [0] * 4

    def life(thread: int) -> None:
        rng = random.Random(seed + thread)
        while not stop.is_set():
            it = identity(thread * 10 + rng.randrange(4), rng.randrange(4))
            try:
                tier.write([piece(it, 1)], soon(2))
                worked[thread] += read(tier, it) is Outcome.DONE
            except UnavailableError:
                continue

    threads = [threading.Thread(target=life, args=(thread,)) for thread in range(4)]
    for it in threads:
        it.start()
    try:
        for _ in range(5):
            before = list(worked)
            eventually(lambda before=before: all(b > a for a, b in zip(before, worked, strict=True)), 20)
            own_server.kill()
            own_server.start()
        before = list(worked)
        eventually(lambda: all(b > a for a, b in zip(before, worked, strict=True)), 20)
    finally:
        stop.set()
        for it in threads:
            it.join()
    tier.close()


def test_flushed_under_traffic_it_misses(server: RedisServer, tier: RedisTier) -> None:
    chunks = [identity(number, 3) for number in range(8)]
    for at in range(6):
        tier.write([piece(it, 1) for it in chunks], soon())
        flush = threading.Thread(target=server.say, args=("FLUSHALL",))
        flush.start()
        assert {read(tier, it) for it in chunks} <= {Outcome.DONE, Outcome.MISSING}, f"round {at}"
        flush.join()
        assert tier.holds(chunks, soon()) == [False] * len(chunks)


def test_a_full_server_says_full_and_keeps_what_it_has(own_server: RedisServer) -> None:
    tier = opened(own_server)
    kept, size = identity(1, 3), identity(1, 3).length_bytes
    assert tier.write([piece(kept, 1)], soon()) == [Outcome.DONE]
    tier.usage(soon())
    assert tier.warning is not None
    assert "no maxmemory" in tier.warning
    # Room for a chunk and for some pieces of the next, so that it fails half way.
    most = own_server.number("memory", "used_memory") + size + 600_000
    own_server.say("CONFIG", "SET", "maxmemory", str(most), "maxmemory-policy", "noeviction")
    received = own_server.number("stats", "total_net_input_bytes")
    chunks = [identity(number, 3) for number in range(2, 22)]
    outcomes = tier.write([piece(it, 1) for it in chunks], soon())
    done = outcomes.count(Outcome.DONE)
    assert outcomes == [Outcome.DONE] * done + [Outcome.FULL] * (20 - done)
    assert done == 1
    assert own_server.number("stats", "total_net_input_bytes") - received < 4 * size, "what does not fit is not sent"
    assert len([it for it in own_server.names() if not it.endswith(b"probe")]) == 4 * (1 + done), (
        "nothing is left of it"
    )
    assert tier.usage(soon()).capacity_bytes == most
    assert [read(tier, it) for it in [kept, *chunks]].count(Outcome.DONE) == 1 + done
    tier.delete([kept, *chunks], soon())
    assert tier.write([piece(kept, 1)], soon()) == [Outcome.DONE], "there is room again"
    tier.close()


@pytest.mark.parametrize(
    ("options", "maxmemory", "policy", "warning"),
    [
        ("", "0", "noeviction", "no maxmemory"),
        ("?capacity=1GiB", "0", "noeviction", None),
        ("", "100mb", "noeviction", "noeviction"),
        ("?ttl=1h", "100mb", "noeviction", None),
        ("", "100mb", "volatile-lru", "volatile-lru"),
        ("", "100mb", "volatile-ttl", "set .ttl="),
        ("?ttl=1h", "100mb", "volatile-lru", None),
        ("", "100mb", "allkeys-lru", None),
    ],
)
def test_an_operator_is_told_once_what_the_server_will_do_to_him(
    own_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    options: str,
    maxmemory: str,
    policy: str,
    warning: str | None,
) -> None:
    own_server.say("CONFIG", "SET", "maxmemory", maxmemory, "maxmemory-policy", policy)
    tier = opened(own_server, options)
    for _ in range(3):
        usage = tier.usage(soon())
    assert usage.capacity_bytes == {"0": 1 << 30 if options else None, "100mb": 100 << 20}[maxmemory]
    assert (tier.warning is None) == (warning is None)
    assert len(caplog.records) == (warning is not None)
    assert warning is None or re.search(warning, caplog.text)
    tier.close()


def test_a_full_server_is_not_a_sick_one(own_server: RedisServer) -> None:
    tier = opened(own_server)
    tier.write([piece(identity(1, 3), 1)], soon())
    own_server.say("CONFIG", "SET", "maxmemory", "1mb")
    usage = tier.usage(soon())
    assert usage.capacity_bytes == 1 << 20
    assert usage.used_bytes is not None
    assert usage.used_bytes > usage.capacity_bytes
    assert read(tier, identity(1, 3)) is Outcome.DONE
    tier.close()


def test_an_evicting_server_takes_all_and_lies_about_nothing(own_server: RedisServer) -> None:
    tier = opened(own_server)
    own_server.say("CONFIG", "SET", "maxmemory", "8mb", "maxmemory-policy", "allkeys-lru")
    chunks = [identity(number, 3) for number in range(20)]
    for it in chunks:
        assert tier.write([piece(it, 1)], soon())[0] in (Outcome.DONE, Outcome.FULL)
    outcomes = [read(tier, it) for it in chunks]
    assert set(outcomes) <= {Outcome.DONE, Outcome.MISSING}
    assert Outcome.MISSING in outcomes
    held = tier.holds(chunks, soon())
    assert held == [it is Outcome.DONE for it in outcomes]
    tier.usage(soon())
    assert tier.warning is None
    tier.close()


def test_a_paused_server_costs_the_deadline_and_no_late_reply_is_taken_for_anothers(own_server: RedisServer) -> None:
    tier = opened(own_server, "?connections=1")
    first, second = identity(1, 3), identity(2, 3)
    tier.write([piece(first, 1), piece(second, 2)], soon())
    for _ in range(3):
        own_server.say("CLIENT", "PAUSE", "600", "ALL")
        for call in (
            lambda: tier.read([piece(first)], soon(0.15)),
            lambda: tier.holds([first], soon(0.1)),
            lambda: tier.write([piece(first, 1)], soon(0.1)),
        ):
            begun_s = time.monotonic()
            with pytest.raises(UnavailableError, match="in time"):
                call()
            assert time.monotonic() - begun_s < 0.4
        assert read(tier, second, 2) is Outcome.DONE
        assert read(tier, first, 1) is Outcome.DONE
    tier.close()


def test_what_was_done_before_the_server_stopped_is_done(own_server: RedisServer) -> None:
    """A stopped server in the middle of a batch: the first chunks are there, the others failed."""
    tier = opened(own_server)
    chunks = [identity(number, 3) for number in range(40)]
    stop = threading.Thread(target=lambda: (eventually(lambda: len(own_server.names()) > 20), own_server.pause()))
    stop.start()
    try:
        outcomes = tier.write([piece(it, 1) for it in chunks] * 8, soon(3))
    finally:
        stop.join()
        own_server.resume()
    assert set(outcomes) <= {Outcome.DONE, Outcome.FAILED}
    if Outcome.FAILED in outcomes:
        assert outcomes == sorted(outcomes, key=[Outcome.DONE, Outcome.FAILED].index)
    done = {it for it, outcome in zip(chunks * 8, outcomes, strict=True) if outcome is Outcome.DONE}
    assert done
    assert {read(tier, it) for it in done} == {Outcome.DONE}
    tier.close()


def test_a_replica_refuses_writes_and_says_why(own_server: RedisServer) -> None:
    tier = opened(own_server)
    own_server.say("REPLICAOF", "127.0.0.1", "1")
    for call in (lambda: tier.write([piece(identity(1), 1)], soon()), lambda: tier.usage(soon())):
        with pytest.raises(UnavailableError, match="replica"):
            call()
    own_server.say("REPLICAOF", "NO", "ONE")
    tier.usage(soon())
    tier.close()


# ---- who may come in -------------------------------------------------------------------------------------


def test_a_password_is_needed_and_never_told(tmp_path: Path) -> None:
    secret = "s3cr%3At"
    with redis_server(valkey_program(), tmp_path / "valkey", "--requirepass", "s3cr:t") as server:
        server.password = "s3cr:t"
        right = open_remote(parse_remote(f"redis://:{secret}@127.0.0.1:{server.port}"))
        assert right.write([piece(identity(1), 1)], soon()) == [Outcome.DONE]
        right.close()
        for url, why in (
            (f"redis://127.0.0.1:{server.port}", "wants a password"),
            (f"redis://:wr0ng-word@127.0.0.1:{server.port}", "do not fit"),
            (f"redis://someone:wr0ng-word@127.0.0.1:{server.port}", "do not fit"),
        ):
            spec = parse_remote(url)
            tier = open_remote(spec)
            with pytest.raises(UnavailableError, match=why) as told:
                tier.usage(soon())
            for text in (str(told.value), repr(spec), str(spec), spec.name, repr(tier)):
                assert "wr0ng" not in text
                assert "someone" not in text
            tier.close()


def limited(server: RedisServer, rights: str, options: str) -> RedisTier:
    """A tier whose user has these rights and no others, on whatever server it is."""
    server.say("ACL", "SETUSER", "kv", "reset", "on", ">word", *rights.split())
    tier = open_remote(parse_remote(f"redis://kv:word@127.0.0.1:{server.port}/1{options}"))
    assert isinstance(tier, RedisTier)
    return tier


@pytest.mark.parametrize("options", ["", "?ttl=1h"])
def test_a_user_with_the_rights_that_are_documented_can_do_all(server: RedisServer, options: str) -> None:
    """Exactly those of the error text and of the documentation; in a database that has to be selected."""
    assert f"`{RIGHTS}`" in (ROOT / "docs/operations.md").read_text("utf-8")
    tier = limited(server, RIGHTS, options)
    assert tier.usage(soon()).used_bytes is not None
    chunks = [identity(1, 3), identity(2, 0)]
    assert tier.write([piece(it, 1) for it in chunks], soon()) == [Outcome.DONE] * 2
    assert tier.write([piece(it, 2) for it in chunks], soon()) == [Outcome.DONE] * 2, "in the place of what is there"
    assert [read(tier, it, 2) for it in chunks] == [Outcome.DONE] * 2
    tier.delete(chunks[:1], soon())
    assert tier.holds(chunks, soon()) == [False, True]
    assert tier.clear(identity(1).origin, soon()) == 1
    assert tier.holds(chunks, soon()) == [False, False]
    tier.close()


def test_every_right_that_is_documented_is_needed(server: RedisServer) -> None:
    words = RIGHTS.split()
    for lacking in words[1:]:
        denied = False
        for options in ("", "?ttl=1h"):
            tier = limited(server, " ".join(it for it in words if it != lacking), options)
            try:
                denied |= tier.usage(soon()).used_bytes is None
                denied |= tier.write([piece(identity(1, 3), 1)], soon()) != [Outcome.DONE]
                denied |= read(tier, identity(1, 3)) is not Outcome.DONE
                tier.holds([identity(1, 3)], soon())
                tier.clear(identity(1).origin, soon())
            except UnavailableError as error:
                assert RIGHTS in str(error)
                denied = True
            tier.close()
        assert denied or lacking == "+ping", f"{lacking}: never missed"


def test_who_may_not_ask_knows_less_and_goes_on(server: RedisServer) -> None:
    tier = limited(server, RIGHTS.replace(" +info", "").replace(" +ping", ""), "")
    assert tier.usage(soon()).used_bytes is None
    assert tier.write([piece(identity(1, 3), 1)], soon()) == [Outcome.DONE]
    tier.close()
