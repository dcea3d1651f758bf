"""A directory that is killed, forgets, lags, stalls or is full: reads go on, and all of it is told again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, DirectoryServer, Load, keys
from tests.node.conftest import eventually
from tests.node.peers import ForkServer

CHUNKS = 16
BACK_S = 10.0
FLUSHES = 5


@pytest.fixture
def cluster(forks: ForkServer, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose directory is its own, to be broken."""
    directory = DirectoryServer(tmp_path / "d", None)
    yield Cluster(forks, tmp_path, directory, None)
    forks.forget()
    directory.server.resume()
    directory.server.kill()


def started(cluster: Cluster, prompts: int = 4) -> list[list]:
    """A and B, with prompts on A that B has located."""
    for name in ("A", "B"):
        cluster.start(name)
    wanted = [keys(CHUNKS, f"prompt-{number}") for number in range(prompts)]
    for it in wanted:
        cluster.put("A", it)
    cluster.know("B", "A")
    with cluster.reader("B") as reader:
        for it in wanted:
            assert reader.get(it).chunks == CHUNKS
    return wanted


def test_reads_go_on_while_it_is_dead_and_after_it_came_back_empty(cluster: Cluster) -> None:
    wanted = started(cluster)
    with cluster.reader("B") as reader, Load(reader, wanted[0]) as load:
        load.more(20)
        cluster.directory.server.kill()
        load.run_for(1.5)
        during = len(load.gets)
        with cluster.reader("A") as writer:
            meanwhile = keys(CHUNKS, "meanwhile")
            assert writer.put(meanwhile) == CHUNKS
        cluster.directory.start()
        answered_s = time.monotonic()
        all_keys = [*wanted[0], *wanted[1], *wanted[2], *wanted[3], *meanwhile]
        cluster.listed(all_keys, BACK_S, by="A")
        back_s = time.monotonic() - answered_s
        load.more(20)
    longest_s = load.longest_s
    print(f"{len(all_keys)} of {len(all_keys)} keys back after {back_s:.2f} s; {during} gets until then, ", end="")
    print(f"{load.whole().count(False)} short, longest {longest_s * 1e3:.0f} ms")
    assert all(load.whole()), "reads never stop"
    assert longest_s < 1.0
    with cluster.reader("B") as reader:
        eventually(lambda: reader.get_again(meanwhile).chunks == CHUNKS, BACK_S)


def test_it_is_flushed(cluster: Cluster) -> None:
    """The nodes notice one after the other, in any order: until all have told what they hold, it is not to be believed
    when it knows of nobody."""
    wanted = started(cluster, prompts=2)
    back_s = []
    with cluster.reader("B") as reader, Load(reader, wanted[0]) as load:
        for _ in range(FLUSHES):
            load.more(5)
            assert cluster.directory.say("FLUSHALL") == b"+OK\r\n"
            back_s.append(round(cluster.listed([*wanted[0], *wanted[1]], BACK_S, by="A"), 2))
        load.more(5)
    print(f"all keys back after {back_s} s; {load.whole().count(False)} of {len(load.gets)} short")
    assert all(load.whole()), "reads never stop"


def test_it_comes_back_as_it_was_before(cluster: Cluster) -> None:
    """What a replica that lagged would be after a failover: an older state, with lives and entries that are over."""
    wanted = started(cluster, prompts=2)
    server = cluster.directory.server
    assert cluster.directory.say("SAVE") == b"+OK\r\n"
    old = shutil.copy(server.folder / "dump.rdb", server.folder / "old.rdb")
    newer = keys(CHUNKS, "newer")
    with cluster.reader("A") as writer:
        writer.evict(wanted[0])
        assert writer.put(newer, 2) == CHUNKS
    cluster.listed(newer)
    cluster.members["B"].kill()
    cluster.start("B")
    server.kill()
    shutil.copy(old, server.folder / "dump.rdb")
    cluster.directory.start()
    cluster.listed(newer, BACK_S)
    with cluster.reader("B") as reader:
        eventually(lambda: reader.get_again(newer).attempts == {2}, BACK_S)
        eventually(lambda: reader.get_again(wanted[1]).chunks == CHUNKS, BACK_S)
        got = reader.get_again(wanted[0])
        assert (got.chunks, got.seconds < 1.0) == (0, True), "an entry that is stale costs a miss"
    eventually(lambda: cluster.directory.listed(wanted[0]) == 0, BACK_S)


def test_it_stalls(cluster: Cluster) -> None:
    wanted = started(cluster)
    with cluster.reader("B") as reader, Load(reader, wanted[0]) as load:
        load.more(10)
        cluster.directory.server.pause()
        load.run_for(2.5)
        unknown = reader_of_new(cluster)
        cluster.directory.server.resume()
        load.more(10)
    print(
        f"{load.whole().count(False)} of {len(load.gets)} short, longest {load.longest_s:.3f} s; unknown {unknown:.3f}"
    )
    assert all(load.whole())
    assert load.longest_s < 1.0
    assert unknown < 1.0, "what nobody has located costs no more than the directory may take"


def reader_of_new(cluster: Cluster) -> float:
    """How long a node takes to give up on a prompt that it knows nothing of."""
    with cluster.reader("B") as reader:
        got = reader.get(keys(CHUNKS, "unknown"))
    assert got.chunks == 0
    return got.seconds


def test_it_is_full(cluster: Cluster) -> None:
    wanted = started(cluster, prompts=2)
    assert cluster.directory.say("CONFIG", "SET", "maxmemory-policy", "noeviction") == b"+OK\r\n"
    assert cluster.directory.say("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
    calls_before = cluster.directory.server.number("stats", "total_commands_processed")
    late = keys(CHUNKS, "late")
    with cluster.reader("B") as reader, Load(reader, wanted[0]) as load:
        with cluster.reader("A") as writer:
            assert writer.put(late) == CHUNKS
        load.run_for(2.0)
        calls = cluster.directory.server.number("stats", "total_commands_processed") - calls_before
        assert cluster.directory.say("CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"
        back_s = cluster.listed(late, BACK_S)
    print(f"told {back_s:.2f} s after there was room; {calls} commands while there was none")
    assert all(load.whole())
    assert calls < 200, "it is not asked again and again"
