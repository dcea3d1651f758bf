"""A holder behind a link that changes, loses, doubles, mixes up and delays bytes: what comes is right, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from headwater.demo.processes import free_port
from headwater.types import ChunkKey
from tests.cluster import toxics
from tests.cluster.cluster import PAUSE, Cluster, keys
from tests.cluster.toxics import Foul, Toxic
from tests.node.conftest import eventually

CHUNKS = 8
ROUNDS = 12
LONGEST_S = 1.5
HEAL_S = 10.0
REST_S = 0.1
"""Between two gets, so that the node tries the link again now and then."""


@dataclass
class Behind:
    """A cluster in which B reads from A over a relay."""

    cluster: Cluster
    relay: Foul
    wanted: list[ChunkKey]


@pytest.fixture
def behind(cluster: Cluster, seed: int) -> Iterator[Behind]:
    """A behind a relay, and B."""
    port = free_port()
    with Foul(lambda: ("127.0.0.1", port), seed) as relay:
        cluster.start("A", {"listen": f"127.0.0.1:{port}", "advertise": relay.address})
        cluster.start("B")
        wanted = keys(CHUNKS, "foul")
        cluster.put("A", wanted)
        cluster.know("B", "A")
        yield Behind(cluster, relay, wanted)
        for it in cluster.members.values():
            it.kill()


@pytest.mark.parametrize(
    "toxic", [toxics.flip, toxics.truncate, toxics.end, toxics.duplicate, toxics.reorder], ids=lambda it: it.__name__
)
def test_bytes_that_are_not_as_they_were_sent(behind: Behind, toxic: Toxic) -> None:
    """The reader checks every byte that it gets; see `Reader.get`."""
    with behind.cluster.reader("B") as reader:
        assert reader.get_again(behind.wanted).chunks == CHUNKS
        behind.relay.toxic = toxic
        gets = []
        for _ in range(ROUNDS):
            gets.append(reader.get_again(behind.wanted))
            PAUSE.wait(REST_S)
        assert behind.relay.touched, "nothing was wrong with the link"
        assert max(it.seconds for it in gets) <= LONGEST_S
        assert any(it.chunks < CHUNKS for it in gets)
        behind.relay.toxic = toxics.nothing
        healed_s = eventually(lambda: reader.get_again(behind.wanted).chunks == CHUNKS, HEAL_S)
    whole = sum(it.chunks == CHUNKS for it in gets)
    print(
        f"{toxic.__name__}: {behind.relay.touched} pieces, {whole} of {ROUNDS} gets whole, healed in {healed_s:.2f} s"
    )


def test_a_link_with_a_long_delay(behind: Behind) -> None:
    with behind.cluster.reader("B") as reader:
        assert reader.get_again(behind.wanted).chunks == CHUNKS
        for delay_s in (0.05, 3.0):
            behind.relay.delay_s = delay_s
            gets = [reader.get_again(behind.wanted, wait_s=5.0) for _ in range(3)]
            print(f"{delay_s} s: {[(it.chunks, round(it.seconds, 2)) for it in gets]}")
            assert max(it.seconds for it in gets) <= LONGEST_S
            assert (gets[0].chunks == CHUNKS) == (delay_s < 1.0)
        behind.relay.delay_s = 0.0
        eventually(lambda: reader.get_again(behind.wanted).chunks == CHUNKS, HEAL_S)
