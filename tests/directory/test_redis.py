"""The directory on real servers: the contract, and what servers, operators and strangers do to it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.core.directory import MOST_HOLDERS
from headwater.directory import redis as module
from headwater.directory.open import open_directory
from headwater.directory.redis import RIGHTS, RedisDirectory
from headwater.errors import ConfigError, RefusedError, UnavailableError
from headwater.types import Announced, Standing
from tests.conformance.directory import DirectorySuite, beat, holders, joined, locate, soon
from tests.core.directories import HOST, member, name, removed, stored
from tests.directory.conftest import PREFIX, age, opened
from tests.servers import RedisServer, redis_server, valkey_program

CHUNKS = PREFIX + "chunks"


class TestContract(DirectorySuite):
    """See the suite; the fixtures are in conftest."""


def lua(server: RedisServer, body: str, *words: str | bytes) -> bytes:
    """Run a few words of Lua as somebody else."""
    reply = server.say("EVAL", body, "0", *words)
    assert not reply.startswith(b"-"), reply
    return reply


# ---- what is there -------------------------------------------------------------------------------------------


def test_clusters_and_databases_do_not_see_each_other(server: RedisServer) -> None:
    directories = [opened(server), opened(server, cluster="other"), opened(server, "/1")]
    for it in directories:
        [a] = joined(it, "a")
        assert it.announce(a, 1, stored(1), soon()) == b"\0"
        assert holders(it, 1) == [a]
        it.close()


def test_keys_are_what_the_documentation_says(server: RedisServer, directory: RedisDirectory) -> None:
    a, b = joined(directory, "a", "b")
    directory.announce(a, 1, stored(1), soon())
    age(server, 4)
    beat(directory, b)
    kinds = {"awake": "zset", "silent": "zset", "meta": "hash", "names": "hash", "chunks": "hash"}
    lives = {PREFIX.encode() + b"life:" + it.to_bytes(6, "big") for it in (a, b)}
    assert set(server.names()) == {(PREFIX + it).encode() for it in kinds} | lives
    for it, kind in kinds.items():
        assert server.say("TYPE", PREFIX + it) == f"+{kind}\r\n".encode()


def test_nothing_is_left_behind(server: RedisServer, directory: RedisDirectory) -> None:
    a, b = joined(directory, "a", "b")
    directory.announce(a, 1, stored(*range(2000)), soon())
    directory.announce(b, 1, stored(1, 2), soon())
    directory.announce(b, 2, removed(1, 2), soon())
    directory.leave(a, soon())
    directory.leave(b, soon())
    assert server.say("HLEN", CHUNKS) == b":2000\r\n"
    assert directory.sweep(soon()) is False
    assert server.names() == [(PREFIX + "meta").encode()]


def test_what_ended_lives_left_is_dropped_where_a_batch_meets_it(
    server: RedisServer, directory: RedisDirectory
) -> None:
    a, b, c = joined(directory, "a", "b", "c")
    for it in (a, b):
        directory.announce(it, 1, stored(1, 2, 3), soon())
    directory.leave(a, soon())
    assert directory.announce(c, 1, stored(1) + removed(2), soon()) == b"\1\1"
    sizes = [server.say("HSTRLEN", CHUNKS, name(it)) for it in (1, 2, 3)]
    assert sizes == [b":14\r\n", b":7\r\n", b":14\r\n"]


def test_sweeping_goes_on_where_somebody_stopped(
    server: RedisServer, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SWEEP_ENTRIES", 20)
    a, b = joined(directory, "a", "b")
    directory.announce(a, 1, stored(*range(4000)), soon())
    directory.announce(b, 1, stored(*range(100)), soon())
    assert directory.sweep(soon()) is False
    assert server.say("HEXISTS", PREFIX + "meta", "place") == b":0\r\n", "nobody had left"
    directory.leave(a, soon())
    seen = iter((0.0, *([0.0] * 10), 1e18))
    with monkeypatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seen)))
        assert directory.sweep(soon()) is True
    left = int(server.say("HLEN", CHUNKS)[1:])
    assert 100 < left < 4000
    # Who ends while a round is under way is not left for the next.
    directory.leave(b, soon())
    other = opened(server)
    assert other.sweep(soon()) is False
    other.close()
    assert server.say("HLEN", CHUNKS) == b":0\r\n"


def test_chunks_are_looked_up_at_once_however_few(server: RedisServer, directory: RedisDirectory) -> None:
    """And not along a list, as servers do in a small hash, be it one that they read back from a file."""
    [a] = joined(directory, "a")
    for serial in (1, 2):
        directory.announce(a, serial, stored(serial), soon())
        assert server.say("OBJECT", "ENCODING", CHUNKS) == b"$9\r\nhashtable\r\n"
        server.say("DEL", CHUNKS)
        server.say("HSET", CHUNKS, name(9), a.to_bytes(6, "big") + b"\1")
        assert server.say("OBJECT", "ENCODING", CHUNKS) == b"$8\r\nlistpack\r\n"
    directory.announce(a, 3, stored(1) + removed(2), soon())
    assert (holders(directory, 1), holders(directory, 9)) == ([a], [a])
    assert server.say("HLEN", CHUNKS) == b":2\r\n"


def test_a_chunk_costs_few_bytes(server: RedisServer, directory: RedisDirectory) -> None:
    a, b = joined(directory, "a", "b")
    rng = random.Random(1)
    names = [rng.randbytes(17) for _ in range(20_000)]
    empty = server.number("memory", "used_memory")
    for replicas, number in enumerate((a, b), 1):
        for serial, start in enumerate(range(0, len(names), 4000), 1):
            some = [Announced(it, HOST, True) for it in names[start : start + 4000]]
            directory.announce(number, serial, some, soon())
            beat(directory, a)
            beat(directory, b)
        each = (server.number("memory", "used_memory") - empty) / len(names)
        print(f"{each:.0f} bytes a chunk with {replicas} replicas")
        assert each < 130


# ---- what servers do -----------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_yet_and_comes_back(own_valkey: RedisServer) -> None:
    own_valkey.kill()
    directory = opened(own_valkey)
    with pytest.raises(UnavailableError, match="cannot connect"):
        joined(directory, "a")
    own_valkey.start()
    [a] = joined(directory, "a")
    assert directory.announce(a, 1, stored(1), soon()) == b"\0"
    directory.close()


def test_a_server_restarted_empty_is_another_generation(own_server: RedisServer) -> None:
    directory = opened(own_server)
    [a] = joined(directory, "a")
    directory.announce(a, 1, stored(1), soon())
    before = beat(directory, a)
    own_server.kill()
    own_server.start()
    assert directory.beat(a, Standing.SERVING, b"", soon()) is None
    assert holders(directory, 1) == []
    with pytest.raises(RefusedError):
        directory.announce(a, 2, stored(1), soon())
    [again] = joined(directory, "a")
    after = beat(directory, again)
    assert again > a
    assert after.generation != before.generation
    assert after.serial == 0
    directory.close()


def test_everything_flushed_is_another_generation_each_time(server: RedisServer, directory: RedisDirectory) -> None:
    numbers, generations = set(), set()
    for _ in range(5):
        [a] = joined(directory, "a")
        numbers.add(a)
        generations.add(beat(directory, a).generation)
        server.say("FLUSHALL")
        assert directory.beat(a, Standing.SERVING, b"", soon()) is None
    assert len(numbers) == len(generations) == 5


def test_a_server_restarted_with_an_older_copy_shows_it_by_the_serial(own_server: RedisServer) -> None:
    directory = opened(own_server)
    a, b = joined(directory, "a", "b")
    directory.announce(a, 1, stored(1), soon())
    directory.announce(b, 1, stored(1), soon())
    assert own_server.say("SAVE") == b"+OK\r\n"
    directory.announce(a, 2, stored(2), soon())
    directory.announce(a, 3, removed(1), soon())
    [late] = joined(directory, "late")
    before = beat(directory, a)
    own_server.kill()
    own_server.start()
    after = beat(directory, a)
    assert after.generation == before.generation
    assert (before.serial, after.serial, beat(directory, b).serial) == (3, 1, 1)
    with pytest.raises(RefusedError, match="at most 2, given 4"):
        directory.announce(a, 4, stored(4), soon())
    assert directory.beat(late, Standing.SERVING, b"", soon()) is None
    # The number that was given after the copy was made is not given to anybody else.
    assert not {late, a, b} & set(joined(directory, "x", "y", "late"))
    directory.leave(a, soon())
    [again] = joined(directory, "a")
    assert directory.announce(again, 1, stored(2), soon()) == b"\0"
    assert (holders(directory, 1), holders(directory, 2)) == ([b], [again])
    directory.close()


def test_the_same_life_after_some_of_it_was_evicted(server: RedisServer, directory: RedisDirectory) -> None:
    """A server that is told to evict keys loses any of them."""
    [a] = joined(directory, "a")
    directory.announce(a, 1, stored(1), soon())
    before = beat(directory, a)
    server.say("DEL", PREFIX + "meta")
    assert beat(directory, a).generation != before.generation
    server.say("DEL", PREFIX.encode() + b"life:" + a.to_bytes(6, "big"))
    assert beat(directory, a).serial == 0
    assert directory.members(soon()) == []
    server.say("DEL", PREFIX + "names")
    [again] = joined(directory, "a")
    assert again != a
    assert [it.number for it in directory.members(soon())] == [again]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_life_ends_that_only_its_name_still_knows(server: RedisServer, directory: RedisDirectory, epoch: int) -> None:
    """Its last beat was evicted, or is not in an older copy; whoever joins by that name follows it."""
    old, other = directory.join(member("a"), soon()), directory.join(member("b"), soon())
    directory.announce(old, 1, stored(1), soon())
    server.say("DEL", PREFIX + "awake")
    new = directory.join(member("a", epoch), soon())
    assert new not in (old, other)
    lives = {PREFIX.encode() + b"life:" + it.to_bytes(6, "big") for it in (other, new)}
    assert {it for it in server.names() if b"life:" in it} == lives
    assert directory.sweep(soon()) is False
    assert server.say("EXISTS", CHUNKS) == b":0\r\n"
    assert [it.number for it in directory.members(soon())] == [new]


def test_a_server_that_has_forgotten_the_scripts_gets_them_again(
    server: RedisServer, directory: RedisDirectory
) -> None:
    [a] = joined(directory, "a")
    for _ in range(2):
        server.say("SCRIPT", "FLUSH")
        directory.announce(a, int(beat(directory, a).serial) + 1, stored(1), soon())
        server.say("SCRIPT", "FLUSH")
        assert len(locate(directory, *range(5000))) == 5000
        server.say("SCRIPT", "FLUSH")
        assert len(directory.members(soon())) == 1


@pytest.mark.parametrize("how", ["stopped", "paused"])
def test_every_call_ends_in_time(own_valkey: RedisServer, how: str) -> None:
    directory = opened(own_valkey)
    [a] = joined(directory, "a")
    directory.announce(a, 1, stored(1), soon())
    holders(directory, 1)
    calls: list[Callable[[float], object]] = [
        lambda until_s: directory.join(member("b"), until_s),
        lambda until_s: directory.beat(a, Standing.SERVING, b"", until_s),
        lambda until_s: directory.announce(a, 2, stored(2), until_s),
        lambda until_s: directory.locate([name(1)], until_s),
        lambda until_s: directory.members(until_s),
        lambda until_s: directory.leave(a, until_s),
        lambda until_s: directory.sweep(until_s),
    ]
    if how == "stopped":
        own_valkey.pause()
    else:
        own_valkey.say("CLIENT", "PAUSE", "100000", "ALL")
    begun_s = time.monotonic()

    def late(call: Callable[[float], object]) -> str:
        with pytest.raises(UnavailableError) as caught:
            call(begun_s + 0.2)
        return str(caught.value)

    with ThreadPoolExecutor(len(calls)) as threads:
        texts = list(threads.map(late, calls))
    assert time.monotonic() - begun_s < 0.2 + 1.0
    assert any("did not answer in time" in it for it in texts)
    if how == "stopped":
        own_valkey.resume()
    else:
        own_valkey.kill()
        own_valkey.start()
        [a] = joined(directory, "a")
    directory.beat(a, Standing.SERVING, b"", soon())
    assert directory.members(soon()) is not None
    directory.close()


def test_a_full_server_says_so_and_still_tells_and_forgets(own_server: RedisServer) -> None:
    directory = opened(own_server)
    a, b = joined(directory, "a", "b")
    directory.announce(a, 1, stored(1), soon())
    own_server.say("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(UnavailableError, match="OOM: its maxmemory is used up; raise it"):
        directory.announce(a, 2, stored(2), soon())
    with pytest.raises(UnavailableError, match="OOM"):
        joined(directory, "c")
    assert holders(directory, 1) == [a]
    assert beat(directory, a).serial == 1
    assert len(directory.members(soon())) == 2
    directory.leave(b, soon())
    assert [it.number for it in directory.members(soon())] == [a]
    directory.sweep(soon())
    own_server.say("CONFIG", "SET", "maxmemory", "0")
    assert directory.announce(a, 2, stored(2), soon()) == b"\0"
    directory.close()


def test_a_replica_tells_and_takes_nothing(own_server: RedisServer) -> None:
    directory = opened(own_server)
    [a] = joined(directory, "a")
    directory.announce(a, 1, stored(1), soon())
    own_server.say("REPLICAOF", "127.0.0.1", "1")
    for call in (
        lambda: beat(directory, a),
        lambda: directory.announce(a, 2, stored(2), soon()),
        lambda: joined(directory, "b"),
    ):
        with pytest.raises(UnavailableError, match="READONLY: it is a replica"):
            call()
    assert holders(directory, 1) == [a]
    own_server.say("CONFIG", "SET", "replica-serve-stale-data", "no")
    with pytest.raises(UnavailableError, match="MASTERDOWN: it is a replica that has lost its primary"):
        holders(directory, 1)
    own_server.say("REPLICAOF", "NO", "ONE")
    assert beat(directory, a).serial == 1
    directory.close()


# ---- who may do what -----------------------------------------------------------------------------------------


def everything(directory: RedisDirectory) -> None:
    """Every verb, so that every command of every script runs."""
    a, b = joined(directory, "a", "b")
    directory.announce(a, 1, stored(1, 2), soon())
    directory.announce(a, 2, removed(1), soon())
    directory.join(member("b", 2), soon())
    beat(directory, a, Standing.DRAINING)
    holders(directory, 2)
    directory.members(soon())
    directory.leave(a, soon())
    directory.sweep(soon())
    assert holders(directory, 2) == []
    assert b


def limited(server: RedisServer, rights: str, options: str = "") -> RedisDirectory:
    server.say("ACL", "SETUSER", "mine", "reset", "on", ">s3cret", *rights.split())
    url = server.url(options).replace("redis://", "redis://mine:s3cret@")
    directory = open_directory(url, "prod")
    assert isinstance(directory, RedisDirectory)
    return directory


def test_a_user_with_few_rights_will_do(server: RedisServer) -> None:
    directory = limited(server, RIGHTS.replace("~headwater:*", f"~{PREFIX}*"))
    everything(directory)
    directory.close()
    elsewhere = limited(server, RIGHTS.replace("~headwater:*", "~headwater:{blue}:dir:*"))
    with pytest.raises(UnavailableError, match="NOPERM: the user may not do this"):
        joined(elsewhere, "a")
    elsewhere.close()


def test_none_of_those_rights_is_too_many(server: RedisServer) -> None:
    words = RIGHTS.split()
    for left_out in words:
        if left_out == "+ping":  # a user who may not ask whether the server is there may do everything else
            continue
        server.say("FLUSHALL")
        server.say("SCRIPT", "FLUSH")
        directory = limited(server, " ".join(it for it in words if it != left_out), "/1")
        with pytest.raises(UnavailableError) as caught:
            everything(directory)
        assert "NOPERM" in str(caught.value), left_out
        assert RIGHTS in str(caught.value) or left_out == "+select", left_out
        assert "s3cret" not in str(caught.value)
        directory.close()


def test_passwords_are_in_no_text(own_valkey: RedisServer) -> None:
    own_valkey.say("CONFIG", "SET", "requirepass", "other")
    url = own_valkey.url().replace("redis://", "redis://me:s3cret@")
    directory = open_directory(url, "prod")
    with pytest.raises(UnavailableError) as caught:
        joined(directory, "a")
    assert "WRONGPASS" in str(caught.value)
    assert "s3cret" not in str(caught.value) + repr(directory)
    directory.close()
    own_valkey.password = "other"


@pytest.mark.parametrize(
    ("url", "cluster", "why"),
    [
        ("s3://bucket/x", "prod", "kept by one of redis"),
        ("redis://u:s3cret@h:1/x", "prod", "number of a database"),
        ("redis://u:s3cret@h?ttl=1h", "prod", "no option 'ttl'"),
        ("redis://u:s3cret@h?codec=zstd", "prod", "no option 'codec'"),
        ("redis://u:s3cret@h?cluster=x", "prod", "no option 'cluster'"),
        ("redis://u:s3cret@h?capacity=1GiB", "prod", "no option 'capacity'"),
        ("redis://u:s3cret@h", "a}b", "not a name"),
        ("redis://u:s3cret@h", "", "not a name"),
    ],
)
def test_urls_that_name_no_directory(url: str, cluster: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        open_directory(url, cluster)
    assert "s3cret" not in str(caught.value)


def test_a_unix_socket_will_do(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with redis_server(valkey_program(), tmp_path / "valkey", "--unixsocket", str(path)):
        directory = open_directory(f"valkey+unix://{path}?db=3", "prod")
        everything(directory)  # type: ignore[arg-type]
        directory.close()


# ---- what strangers write ------------------------------------------------------------------------------------


def test_entries_that_nobody_of_us_wrote_count_for_nothing(server: RedisServer, directory: RedisDirectory) -> None:
    [a] = joined(directory, "a")
    mine = a.to_bytes(6, "big")
    bad = [
        b"", b"x", mine, mine + b"\0", mine + b"\4", mine + b"\xff", bytes(7), mine + b"\1x", b"\xff" * 7,
        (mine + b"\1") * (MOST_HOLDERS + 1), bytes(1 << 20),
    ]  # fmt: skip
    for at, it in enumerate(bad):
        server.say("HSET", CHUNKS, name(at), it)
    server.say("HSET", CHUNKS, "an odd name", mine + b"\1")
    assert locate(directory, *range(len(bad))) == [()] * len(bad)
    assert directory.announce(a, 1, stored(*range(len(bad) - 2)), soon()) == bytes(len(bad) - 2)
    assert [holders(directory, it) for it in range(len(bad) - 2)] == [[a]] * (len(bad) - 2)
    [b] = joined(directory, "b")
    directory.leave(b, soon())
    directory.sweep(soon())
    assert server.say("HLEN", CHUNKS) == b":%d\r\n" % (len(bad) - 2)


def test_chunks_of_another_type_are_dropped(server: RedisServer, directory: RedisDirectory) -> None:
    a, b = joined(directory, "a", "b")
    server.say("SET", CHUNKS, "mine")
    assert holders(directory, 1) == []
    assert directory.announce(a, 1, stored(1), soon()) == b"\0"
    assert holders(directory, 1) == [a]
    server.say("SET", CHUNKS, "mine")
    directory.leave(b, soon())
    assert directory.sweep(soon()) is False
    assert server.say("EXISTS", CHUNKS) == b":0\r\n"


def test_members_that_nobody_of_us_wrote_are_left_out(server: RedisServer, directory: RedisDirectory) -> None:
    a, b = joined(directory, "a", "b")
    life = PREFIX.encode() + b"life:" + b.to_bytes(6, "big")
    good = b'{"name":"b","epoch":1,"address":"x:1","later":{"field":[1]}}'
    server.say("HSET", life, "member", good)
    assert [it.member.name for it in directory.members(soon())] == ["a", "b"], "newer nodes may say more"
    bad = [b"", b"{}", b"null", b"[" * 5000, b"\xff\xfe", good[:-1], good.replace(b'"b"', b"7")]
    bad += [good.replace(b'"b"', b'""'), good.replace(b":1,", b":-1,"), good.replace(b":1,", b":1e400,")]
    bad.append(good.replace(b"x:1", b"x" * 20_000))
    for record in bad:
        server.say("HSET", life, "member", record)
        assert [it.number for it in directory.members(soon())] == [a], record[:40]
    server.say("HSET", life, "member", good, "standing", "what?")
    assert [it.number for it in directory.members(soon())] == [a]
    server.say("HSET", life, "standing", "serving", "report", b"x" * 40_000)
    assert [it.number for it in directory.members(soon())] == [a]
    server.say("HSET", life, "report", b"")
    server.say("ZADD", PREFIX + "awake", "9e15", "odd")
    assert [it.number for it in directory.members(soon())] == [a, b]


def test_numbers_that_are_none_are_begun_anew(server: RedisServer, directory: RedisDirectory) -> None:
    [a] = joined(directory, "a")
    for value in ("what?", "1e300", "-5", "nan", "inf", ""):
        fields = ("last", "version", "place", "begun", "ended", "swept")
        server.say("HSET", PREFIX + "meta", *(word for it in fields for word in (it, value)))
        [b] = joined(directory, f"b{value}")
        assert a < b < 1 << 48
        before = beat(directory, b).members
        assert 0 < before < 1 << 53
        directory.announce(b, 1, stored(1), soon())
        server.say("HSET", PREFIX + "meta", "ended", value)
        directory.leave(b, soon())
        assert beat(directory, a).members != before
        assert directory.sweep(soon()) is False
        assert server.say("EXISTS", CHUNKS) == b":0\r\n", "what had ended was swept"
    ahead = a + (1 << 32)
    server.say("HSET", PREFIX + "meta", "last", str(ahead))
    assert joined(directory, "later", "last") == [ahead + 1, ahead + 2], "the clock went back"
    server.say("HSET", PREFIX + "names", "c", "what?")
    joined(directory, "c")
    server.say("HSET", PREFIX.encode() + b"life:" + a.to_bytes(6, "big"), "serial", "what?")
    assert beat(directory, a).serial == 0


@pytest.mark.parametrize("key", ["meta", "names", "awake", "silent", "life"])
def test_keys_of_another_type_are_named(server: RedisServer, directory: RedisDirectory, key: str) -> None:
    [a] = joined(directory, "a")
    whole = PREFIX.encode() + (b"life:" + a.to_bytes(6, "big") if key == "life" else key.encode())
    server.say("SET", whole, "mine")
    with pytest.raises(UnavailableError, match=r"WRONGTYPE: another program has written to headwater:\{prod\}:dir:"):
        everything(directory)


def test_any_bytes_anywhere_are_no_crash(server: RedisServer, directory: RedisDirectory, seed: int) -> None:
    rng = random.Random(seed)
    odd: list[bytes] = [
        b"",
        b"0",
        b"-1",
        b"nan",
        b"1e999",
        b"{}",
        bytes(7),
        b"\xff" * 300,
        b"\r\n",
        b"99999999999999999999",
    ]
    [a] = joined(directory, "a")
    for _ in range(40):
        life = PREFIX.encode() + b"life:" + a.to_bytes(6, "big")
        key, fields = rng.choice(
            [
                (
                    PREFIX.encode() + b"meta",
                    [b"generation", b"last", b"version", b"place", b"begun", b"swept", b"ended"],
                ),
                (life, [b"member", b"name", b"serial", b"standing", b"report"]),
                (PREFIX.encode() + b"names", [b"a", b"b", b""]),
                (CHUNKS.encode(), [name(1), name(2), b""]),
            ]
        )
        server.say("HSET", key, rng.choice(fields), rng.choice(odd))
        for call in (
            lambda: joined(directory, "a", "b"),
            lambda: directory.beat(a, Standing.SERVING, b"", soon()),
            lambda: directory.announce(a, 1, stored(1, 2), soon()),
            lambda: locate(directory, 1, 2),
            lambda: directory.members(soon()),
            lambda: directory.sweep(soon()),
        ):
            try:
                call()
            except (UnavailableError, RefusedError):
                continue
    server.say("FLUSHALL")
    everything(directory)
