"""Reading from peers that are slow, gone, wrong or somebody else: the next replica, or a miss; and links to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from headwater.core.budget import Priority
from headwater.core.links import Peers
from headwater.directory.memory import MemoryDirectory
from headwater.errors import RefusedError, UnavailableError
from headwater.node import stalls
from headwater.node.errands import Answer, Errands
from headwater.node.links import IDLE_MAX, LinkPool
from headwater.node.peers import PeersTier
from headwater.node.reports import REPORT_BYTES_MAX, Report, read_report, write_report
from headwater.ports import Item, Piece
from headwater.types import Announced, Identity, Member, Origin, Outcome, Tier, chunk_name
from tests.node.conftest import eventually
from tests.node.peers import LAYOUT, SLOT_BYTES, keys, namespace

ORIGIN = Origin.of(namespace(), LAYOUT)
Script = Callable[["FakeLink", Sequence[Item]], list[Outcome]]


def good(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
    """What a healthy peer does."""
    for it in items:
        it.memory[:] = link.peer.epoch
    return [Outcome.DONE] * len(items)


def broken(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
    """A connection that ends in the middle."""
    raise UnavailableError("it broke")


def paused(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
    """A peer that is stopped: nothing comes until somebody aborts."""
    assert link.aborted.wait(10), "nobody gave it up"
    raise UnavailableError("aborted")


def each(outcome: Outcome) -> Script:
    """A peer that says the same of everything."""
    return lambda link, items: [outcome] * len(items)


class FakeLink:
    """A link that does what its peer's script says."""

    def __init__(self, peer: Member, script: Script) -> None:
        self.peer, self.script = peer, script
        self.aborted = threading.Event()
        self.closed = False
        self.moved = 0

    def read(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        return self.script(self, items)

    def write(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        raise AssertionError("nobody writes to peers")

    def ask(self, topic: str, body: bytes, until_s: float) -> bytes:
        """See `ports.Link`."""
        return f"{self.peer.name}/{topic}".encode()

    def moved_bytes(self) -> int:
        """See `ports.Link`."""
        return self.moved

    def abort(self) -> None:
        """See `ports.Link`."""
        self.aborted.set()

    def close(self) -> None:
        """See `ports.Link`."""
        self.closed = True


class FakeTransport:
    """Connects to scripted peers by name."""

    name = "tcp"

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.links: list[FakeLink] = []
        self.refuses: dict[str, RefusedError] = {}
        self.closed = False

    def connect(self, peer: Member, until_s: float) -> FakeLink:
        """See `ports.Transport`."""
        if peer.name in self.refuses:
            raise self.refuses[peer.name]
        if peer.name not in self.scripts:
            raise UnavailableError(f"{peer.name} does not answer")
        self.links.append(FakeLink(peer, self.scripts[peer.name]))
        return self.links[-1]

    def close(self) -> None:
        """See `ports.Transport`."""
        self.closed = True


class Town:
    """A directory with some members, and one node's view of them."""

    def __init__(self) -> None:
        self.directory, self.transport = MemoryDirectory(), FakeTransport()
        self.stale = 0
        me = Member("me", 1, "127.0.0.1:1")
        self.own = self.directory.join(me, self.soon())
        self.tier = PeersTier(self.directory, Peers(me, self.own), LinkPool({"tcp": self.transport}), self._stale)
        self.numbers: dict[str, int] = {}

    def _stale(self) -> None:
        self.stale += 1

    @staticmethod
    def soon(seconds: float = 5.0) -> float:
        """A deadline."""
        return time.monotonic() + seconds

    def member(self, name: str, epoch: int, script: Script | None, chunks: int = 4, tier: Tier = Tier.HOST) -> None:
        """A member that holds the first chunks of the prompt, and what it does when it is read from."""
        number = self.numbers[name] = self.directory.join(Member(name, epoch, "127.0.0.1:2"), self.soon())
        if script is not None:
            self.transport.scripts[name] = script
        changes = [Announced(chunk_name(0, key), tier, present=True) for key in keys(chunks)]
        self.directory.announce(number, 1, changes, self.soon())
        self.tier.listed(self.directory.members(self.soon()), self.own)

    def pieces(self, count: int = 4) -> list[Piece]:
        """Memory for the first chunks."""
        return [Piece(Identity(ORIGIN, 0, key), np.zeros(SLOT_BYTES, np.uint8)) for key in keys(count)]

    def read(
        self, count: int = 4, within_s: float = 5.0, *, background: bool = False
    ) -> tuple[list[Outcome], list[int]]:
        """Read, and from which epoch the bytes are."""
        pieces = [replace(it, background=background) for it in self.pieces(count)]
        outcomes = self.tier.read(pieces, self.soon(within_s))
        return outcomes, [int(it.memory[0]) for it in pieces]


@pytest.fixture
def town() -> Iterator[Town]:
    """A town that is closed afterwards."""
    town = Town()
    yield town
    town.tier.close()
    assert town.transport.closed
    assert all(it.closed for it in town.transport.links)


def test_chunks_come_from_who_holds_them(town: Town) -> None:
    town.member("a", 7, good, chunks=2)
    assert town.tier.holds([it.identity for it in town.pieces()], town.soon()) == [True, True, False, False]
    outcomes, sources = town.read()
    assert outcomes == [Outcome.DONE, Outcome.DONE, Outcome.MISSING, Outcome.MISSING]
    assert sources == [7, 7, 0, 0]


def test_nobody_else_there_is_no_question(town: Town) -> None:
    town.directory.sick = True
    assert town.tier.holds([it.identity for it in town.pieces()], town.soon()) == [False] * 4
    assert town.tier.directory_is_well, "it was not asked"


@pytest.mark.parametrize(
    "script", [broken, None, each(Outcome.MISSING), each(Outcome.CORRUPT), each(Outcome.FOREIGN), each(Outcome.FAILED)]
)
def test_the_next_replica_serves_when_the_first_does_not(town: Town, script: Script | None) -> None:
    town.member("a", 7, script)
    town.member("b", 8, good)
    for _ in range(2):
        outcomes, sources = town.read()
        assert outcomes == [Outcome.DONE] * 4
        assert sources == [8] * 4


def test_corrupt_bytes_are_counted_and_are_a_miss_where_nobody_else_has_them(town: Town) -> None:
    town.member("a", 7, each(Outcome.CORRUPT))
    assert town.read()[0] == [Outcome.MISSING] * 4
    assert town.tier.corrupt == 4


def test_one_sick_peer_does_not_make_the_tier_sick(town: Town) -> None:
    """No call raises, and nothing is FAILED, which would count against all peers together."""
    town.member("a", 7, broken)
    for _ in range(4):
        assert town.read()[0] == [Outcome.MISSING] * 4


def test_a_paused_peer_is_given_up_for_another(town: Town) -> None:
    town.member("a", 7, paused)
    town.member("b", 8, good)
    begun_s = time.monotonic()
    outcomes, sources = town.read()
    assert (outcomes, sources) == ([Outcome.DONE] * 4, [8] * 4)
    assert time.monotonic() - begun_s < stalls.GIVE_UP_S


def test_a_paused_peer_is_given_up_also_if_nobody_else_has_it(town: Town) -> None:
    town.member("a", 7, paused)
    begun_s = time.monotonic()
    assert town.read()[0] == [Outcome.MISSING] * 4
    assert time.monotonic() - begun_s < stalls.GIVE_UP_S + 0.5
    # Then it is sick: it promises nothing, and the next request does not wait for it.
    assert not any(town.tier.holds([it.identity for it in town.pieces()], town.soon()))
    begun_s = time.monotonic()
    assert town.read()[0] == [Outcome.MISSING] * 4
    assert time.monotonic() - begun_s < stalls.GIVE_UP_S / 2


def test_a_slow_peer_that_makes_progress_is_waited_for(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "GIVE_UP_S", 0.3)

    def trickles(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        for _ in range(12):
            link.moved += 1
            assert not link.aborted.wait(0.1), "it was given up"
        return good(link, items)

    town.member("a", 7, trickles)
    assert town.read() == ([Outcome.DONE] * 4, [7] * 4)
    assert town.tier.peers.report(time.monotonic())[0].health.value == "well"


def test_somebody_else_at_the_address_is_no_member(town: Town) -> None:
    town.member("a", 7, good)
    town.transport.refuses["a"] = RefusedError("member", "a in epoch 7", "another", "look up who is there")
    assert town.read()[0] == [Outcome.MISSING] * 4
    assert town.stale, "the list of members is out of date"
    del town.transport.refuses["a"]
    assert town.read()[0] == [Outcome.MISSING] * 4, "what it is said to hold is not asked for again"
    town.member("a", 9, good)
    assert town.read() == ([Outcome.DONE] * 4, [9] * 4)


def test_a_refusal_to_serve_is_a_miss_there(town: Town) -> None:
    def refuses(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        raise RefusedError("layout", "one", "another", "lay it out alike")

    town.member("a", 7, refuses)
    town.member("b", 8, good)
    assert town.read() == ([Outcome.DONE] * 4, [8] * 4)


def test_what_is_known_goes_on_being_used_while_the_directory_is_away(town: Town) -> None:
    town.member("a", 7, good)
    assert town.read()[0] == [Outcome.DONE] * 4
    town.directory.sick = True
    town.tier.locations._ttl_s = 0.0
    assert town.tier.holds([it.identity for it in town.pieces()], town.soon()) == [True] * 4
    assert not town.tier.directory_is_well
    assert town.read() == ([Outcome.DONE] * 4, [7] * 4)


def test_a_slow_peer_is_asked_for_little_at_a_time(town: Town) -> None:
    asked: list[int] = []

    def counts(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        asked.append(len(items))
        return good(link, items)

    town.member("a", 7, counts)
    path = town.tier.peers._peers[town.numbers["a"]].path("tcp", Tier.HOST, time.monotonic())
    for _ in range(20):
        path.observe(SLOT_BYTES, 0.06)
    assert town.read() == ([Outcome.DONE] * 4, [7] * 4)
    assert len(asked) > 1
    assert sum(asked) == 4


def test_copies_that_nobody_waits_for_give_way_to_loads(town: Town) -> None:
    town.member("a", 7, good)
    number = town.numbers["a"]
    with town.tier.turns.one(number, Priority.LOAD, 1, town.soon()) as comes:
        assert comes
        town.tier.turns.listed([number], {number: 1000.0})
        assert town.read(background=True)[0] == [Outcome.DONE] * 4, "one a second in any case"
        assert town.read(background=True, within_s=0.05)[0] == [Outcome.MISSING] * 4
        assert town.read()[0] == [Outcome.DONE] * 4


def test_several_holders_are_read_from_at_the_same_time(town: Town) -> None:
    meeting = threading.Barrier(2, timeout=5)

    def meets(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        meeting.wait()
        return good(link, items)

    town.member("a", 7, meets, chunks=2)
    number = town.numbers["b"] = town.directory.join(Member("b", 8, "127.0.0.1:2"), town.soon())
    town.transport.scripts["b"] = meets
    changes = [Announced(chunk_name(0, key), Tier.HOST, present=True) for key in keys(4)[2:]]
    town.directory.announce(number, 1, changes, town.soon())
    town.tier.listed(town.directory.members(town.soon()), town.own)
    assert town.read() == ([Outcome.DONE] * 4, [7, 7, 8, 8])


def test_a_life_that_got_another_number_holds_what_it_held(town: Town) -> None:
    """As after the directory has lost everything: the answers that are known go on being good."""
    town.member("a", 7, good)
    assert town.read()[0] == [Outcome.DONE] * 4
    town.directory.leave(town.numbers["a"], town.soon())
    town.directory.join(Member("a", 7, "127.0.0.1:2"), town.soon())
    town.tier.listed(town.directory.members(town.soon()), town.own)
    assert town.read() == ([Outcome.DONE] * 4, [7] * 4)
    town.directory.leave(max(it.number for it in town.tier.members()), town.soon())
    town.directory.join(Member("a", 8, "127.0.0.1:2"), town.soon())
    town.tier.listed(town.directory.members(town.soon()), town.own)
    town.directory.sick = True
    assert town.read()[0] == [Outcome.MISSING] * 4, "another life"


def test_an_idle_link_that_was_closed_is_no_failure(town: Town) -> None:
    calls = 0

    def closed_meanwhile(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise UnavailableError("it closed the connection")
        return good(link, items)

    town.member("a", 7, closed_meanwhile)
    for _ in range(2):
        assert town.read() == ([Outcome.DONE] * 4, [7] * 4)
    assert len(town.transport.links) == 2
    assert town.tier.peers.report(time.monotonic())[0].health.value == "well"


def test_words_reach_every_member_or_that_is_said(town: Town) -> None:
    town.member("dead", 9, None)
    town.member("a", 7, good)
    town.member("b", 8, good)
    with pytest.raises(UnavailableError, match="clear"):
        town.tier.tell_all("clear", b"", town.soon())
    assert sorted(it.peer.name for it in town.transport.links) == ["a", "b"], "also those behind one that is dead"
    town.directory.leave(town.numbers["dead"], town.soon())
    town.tier.listed(town.directory.members(town.soon()), town.own)
    assert sorted(town.tier.tell_all("clear", b"", town.soon())) == [b"a/clear", b"b/clear"]


def test_memory_is_not_given_back_while_one_of_several_peers_still_writes(town: Town) -> None:
    going, late = threading.Event(), []

    def fails(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        assert going.wait(5)
        raise ValueError("a bug")

    def writes_on(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        going.set()
        eventually(lambda: town.tier.peers.report(time.monotonic())[0].reads == 0)
        late.append(True)
        return good(link, items)

    town.member("a", 7, fails, chunks=2)
    number = town.numbers["b"] = town.directory.join(Member("b", 8, "127.0.0.1:2"), town.soon())
    town.transport.scripts["b"] = writes_on
    changes = [Announced(chunk_name(0, key), Tier.HOST, present=True) for key in keys(4)[2:]]
    town.directory.announce(number, 1, changes, town.soon())
    town.tier.listed(town.directory.members(town.soon()), town.own)
    with pytest.raises(ValueError, match="a bug"):
        town.read()
    assert late, "it returned while the other peer was still writing"


def test_a_descriptor_that_lacks_is_no_bug(town: Town) -> None:
    def out_of_descriptors(link: FakeLink, items: Sequence[Item]) -> list[Outcome]:
        raise OSError(24, "Too many open files")

    town.member("a", 7, out_of_descriptors)
    town.member("b", 8, good)
    assert town.read() == ([Outcome.DONE] * 4, [8] * 4)


def test_a_transport_that_is_not_for_us_is_not_the_last(town: Town) -> None:
    """Two users on one host cannot share memory, and can talk over TCP."""
    town.member("a", 7, good)
    town.transport.refuses["a"] = RefusedError("user", "0", "1000", "run both nodes as one user")
    assert town.read()[0] == [Outcome.MISSING] * 4
    assert not town.stale
    assert town.tier.peers.report(time.monotonic())[0].paths[0].failures == 1


def test_what_was_sick_is_tried_before_it_is_needed(town: Town) -> None:
    town.member("a", 7, broken)
    town.read()
    assert town.tier.peers.report(time.monotonic())[0].health.value == "sick"
    town.transport.scripts["a"] = good
    eventually(
        lambda: town.tier.probe(town.soon()) or town.tier.peers.report(time.monotonic())[0].health.value == "well"
    )


@pytest.mark.parametrize("told", [b"noise", b'{"used_bytes": "x"}', b'{"tenants": [1]}', b"[" * 100_000, b"\xff"])
def test_a_report_that_makes_no_sense_is_empty(told: bytes) -> None:
    assert read_report(told) == Report()


def test_a_report_is_never_too_long_to_be_sent() -> None:
    links = [{"number": number, "name": "x" * 60} for number in range(1000)]
    tenants = {f"tenant-{number}": number for number in range(2000)}
    for report in (Report(1, 2, peers=links), Report(1, 2, tenants, peers=links)):
        written = write_report(report)
        assert len(written) <= REPORT_BYTES_MAX
        assert (read_report(written).capacity_bytes, read_report(written).used_bytes) == (1, 2)


def test_links_are_used_again_and_not_kept_for_ever() -> None:
    transport = FakeTransport()
    transport.scripts["a"] = good
    pool, peer = LinkPool({"tcp": transport}), Member("a", 1, "")
    with pool.one(1, peer, "tcp", 0.0) as first:
        assert not first.used_before
    with pool.one(1, peer, "tcp", 0.0) as second:
        assert second.used_before
        assert second.link is first.link
        with pool.one(1, peer, "tcp", 0.0) as third:
            assert third.link is not first.link
    with pool.one(2, peer, "tcp", 0.0) as other:
        assert other.link not in (first.link, third.link), "another life"
    with pytest.raises(UnavailableError), pool.one(1, peer, "tcp", 0.0) as failing:
        raise UnavailableError("it broke")
    assert failing.link.closed
    with pytest.raises(RefusedError), pool.one(2, peer, "tcp", 0.0) as refusing:
        raise RefusedError("a", "b", "c", "d")
    assert not refusing.link.closed, "a refusal leaves the link as it was"
    for number in range(3, 3 + 2 * IDLE_MAX):
        with pool.one(number, peer, "tcp", 0.0):
            pass
    assert sum(not it.closed for it in transport.links) == IDLE_MAX
    pool.forget([3 + 2 * IDLE_MAX - 1])
    assert transport.links[-1].closed
    pool.close()
    assert all(it.closed for it in transport.links)
    with pytest.raises(UnavailableError), pool.one(1, peer, "tcp", 0.0):
        pass


def test_links_to_those_that_are_gone_are_aborted() -> None:
    transport = FakeTransport()
    transport.scripts["a"] = good
    pool = LinkPool({"tcp": transport})
    with pool.one(1, Member("a", 1, ""), "tcp", 0.0) as taken:
        pool.forget([2])
        assert not taken.link.aborted.is_set()
        pool.forget([1])
        assert taken.link.aborted.is_set()
    pool.close()


def test_errands_are_done_in_order_by_who_runs_them() -> None:
    errands, done = Errands(lambda: None), []
    for number in range(3):
        errands.tell(lambda now, number=number: done.append((number, now)))
    errands.run(4.0)
    assert done == [(0, 4.0), (1, 4.0), (2, 4.0)]


def test_who_asks_the_loop_gets_an_answer_or_learns_that_there_is_none() -> None:
    woken = threading.Event()
    errands = Errands(woken.set)
    answers: list[object] = []

    def ask(within_s: float, begin: Callable[[float, Answer[int]], None]) -> threading.Thread:
        def run() -> None:
            try:
                answers.append(errands.ask(begin, time.monotonic() + within_s))
            except UnavailableError as error:
                answers.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    thread = ask(5.0, lambda now, it: it.give(7))
    assert woken.wait(5)
    errands.run(0.0)
    thread.join()
    late: list[Answer[int]] = []
    thread = ask(0.05, lambda now, it: late.append(it))
    eventually(lambda: errands._waiting)
    errands.run(0.0)
    thread.join()
    assert not late[0].is_wanted
    assert not late[0].give(8), "nobody takes what it would hold"
    assert not late[0].refuse(UnavailableError("too late"))
    begun: list[float] = []
    thread = ask(0.0, lambda now, it: begun.append(now))
    thread.join()
    errands.run(0.0)
    assert not begun, "nobody waits for it any more"
    thread = ask(5.0, lambda now, it: _raise(UnavailableError("not now")))
    eventually(lambda: errands._waiting)
    errands.run(0.0)
    thread.join()
    thread = ask(5.0, lambda now, it: None)
    eventually(lambda: errands._waiting)
    errands.run(0.0)
    errands.end()
    thread.join()
    ask(5.0, lambda now, it: None).join()
    late_text = "the node's loop has no answer in time"
    assert answers == [7, late_text, late_text, "not now", *["the node is ending"] * 2]


def _raise(error: Exception) -> None:
    raise error


def test_the_end_disturbs_nobody_who_has_an_answer_already() -> None:
    errands = Errands(lambda: None)
    answer: Answer[int] = Answer()
    assert answer.give(7)
    errands._asked[answer] = None
    errands.end()
    assert answer.wait(0.0) == 7
