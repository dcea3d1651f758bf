"""What every transport must do. Subclass `TransportSuite` in a test module and give it a `pair` fixture:

class TestMine(TransportSuite):
    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        exports = KeptExports()
        ...serve them as MEMBER...
        yield Pair(MyTransport(...), member, exports)
        ...close all of it...
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Bytes, Item, Link, Transport
from headwater.transports.memory_exports import MemoryExports, RegionLoan, region_name
from headwater.types import Member, Outcome
from tests.node.conftest import eventually

REALM = b"conformance"
MEMBER = Member("holder", 7, "")
REGION_BYTES = 9 << 20
DONE = Outcome.DONE


def soon(seconds: float = 10.0) -> float:
    """A deadline that nothing here should reach."""
    return time.monotonic() + seconds


def content(seed: int, size: int = REGION_BYTES) -> Bytes:
    """Bytes that tell where they are from."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class KeptExports(MemoryExports):
    """Exports that remember their loans."""

    def __init__(self, realm: bytes = REALM, loan_s: float = 30.0) -> None:
        super().__init__(realm, loan_s)
        self.kept: list[RegionLoan] = []

    def end(self, loan: RegionLoan) -> None:
        self.kept.append(loan)
        super().end(loan)


@dataclass
class Pair:
    """A transport, and a member that it reaches, with what that one exports."""

    transport: Transport
    member: Member
    exports: KeptExports

    @contextmanager
    def link(self) -> Iterator[Link]:
        """A link to the member."""
        with closing(self.transport.connect(self.member, soon())) as link:
            yield link


class TransportSuite:
    """The contract of `ports.Transport`, `ports.Link` and `ports.Exports`."""

    INTERRUPTS = True
    """Whether a call can end while the exporter is still thinking."""

    def add(self, pair: Pair, memory: Bytes, *, writable: bool = True) -> int:
        """Register memory; transports that need descriptors override this and return the segment."""
        return pair.exports.add(memory, writable=writable)

    def regions(self, pair: Pair, *seeds: int) -> list[Bytes]:
        memories = [content(it) for it in seeds]
        for it in memories:
            self.add(pair, it)
        return [it.memory for it in pair.exports.regions()]

    def test_what_is_read_is_what_is_there(self, pair: Pair) -> None:
        (source,) = self.regions(pair, 1)
        sizes = [1, 63, 64, 65, 4096, 17, 0, 300_001, (5 << 20) + 3, 4096]
        starts = np.cumsum([7, *sizes])[:-1].tolist()
        wide = np.full(sum(sizes) + 2 * len(sizes), 0xA5, np.uint8)
        places = np.cumsum([1, *(it + 2 for it in sizes)])[:-1].tolist()
        items = [
            Item(region_name(0, start, size), wide[place : place + size])
            for start, size, place in zip(starts, sizes, places, strict=True)
        ]
        with pair.link() as link:
            for _ in range(2):
                assert link.read(REALM, items, soon()) == [DONE] * len(items)
        for start, size, place in zip(starts, sizes, places, strict=True):
            assert np.array_equal(wide[place : place + size], source[start : start + size])
            assert wide[place - 1] == 0xA5 and wide[place + size] == 0xA5, "memory beside an item was touched"

    def test_what_is_written_is_there(self, pair: Pair) -> None:
        (target,) = self.regions(pair, 1)
        before = target.copy()
        sizes = [1, 65, 4096, 0, (5 << 20) + 3]
        starts = np.cumsum([3, *(it + 5 for it in sizes)])[:-1].tolist()
        mine = content(2)
        items = [
            Item(region_name(0, start, size), mine[start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ]
        with pair.link() as link:
            assert link.write(REALM, items, soon()) == [DONE] * len(items)
        for start, size in zip(starts, sizes, strict=True):
            before[start : start + size] = mine[start : start + size]
        assert np.array_equal(target, before)

    def test_many_small_things(self, pair: Pair) -> None:
        (source,) = self.regions(pair, 1)
        target = np.zeros(3000 * 8, np.uint8)
        items = [Item(region_name(0, at * 16, 8), target[at * 8 : at * 8 + 8]) for at in range(3000)]
        with pair.link() as link:
            assert link.read(REALM, items, soon()) == [DONE] * 3000
            assert np.array_equal(target.reshape(-1, 8), source[: 3000 * 16].reshape(-1, 16)[:, :8])
            target[:] = 9
            assert link.write(REALM, items, soon()) == [DONE] * 3000
        assert (source[: 3000 * 16].reshape(-1, 16)[:, :8] == 9).all()

    def test_nothing_asked_is_nothing_done(self, pair: Pair) -> None:
        with pair.link() as link:
            assert link.read(REALM, [], soon()) == []
            assert link.write(REALM, [], soon()) == []

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_what_is_not_there_costs_the_others_nothing(self, pair: Pair, verb: str) -> None:
        (region,) = self.regions(pair, 1)
        memory = content(3, 4 * 4096)
        rows = [memory[at * 4096 : (at + 1) * 4096] for at in range(4)]
        names = [region_name(0, 0, 4096), region_name(5, 0, 4096), b"odd", region_name(0, 8192, 4095)]
        items = [Item(name, row) for name, row in zip(names, rows, strict=True)]
        with pair.link() as link:
            for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
                found = getattr(link, verb)(REALM, [items[it] for it in order], soon())
                expected = [DONE, Outcome.MISSING, Outcome.MISSING, Outcome.FOREIGN]
                assert found == [expected[it] for it in order]
                assert np.array_equal(rows[0], region[:4096])
            assert getattr(link, verb)(REALM, items[1:], soon()) == expected[1:]
        eventually(lambda: pair.exports.loans == 0)
        assert [it.done for it in pair.exports.kept][-2:] == [[False, True, False, False], [False] * 3]

    def test_what_may_not_be_written_is_not(self, pair: Pair) -> None:
        self.add(pair, content(1), writable=False)
        with pair.link() as link:
            item = Item(region_name(0, 0, 8), np.zeros(8, np.uint8))
            assert link.write(REALM, [item], soon()) == [Outcome.REFUSED]
            assert link.read(REALM, [item], soon()) == [DONE]

    def test_a_realm_that_is_not_served(self, pair: Pair) -> None:
        self.regions(pair, 1)
        item = Item(region_name(0, 0, 4096), np.zeros(4096, np.uint8))
        with pair.link() as link:
            for verb in (link.read, link.write):
                with pytest.raises(RefusedError, match="realm"):
                    verb(b"another", [item], soon())
                assert verb(REALM, [item], soon()) == [DONE], "the link is no good after a refusal"

    def test_an_exporter_that_cannot_now(self, pair: Pair) -> None:
        self.regions(pair, 1)
        item = Item(region_name(0, 0, 4096), np.zeros(4096, np.uint8))
        with pair.link() as link:
            pair.exports.available = False
            assert link.read(REALM, [item], soon()) == [Outcome.FAILED]
            assert link.write(REALM, [item], soon()) == [Outcome.FAILED]
            pair.exports.available = True
            assert link.read(REALM, [item], soon()) == [DONE]

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_a_loan_that_had_ended(self, pair: Pair, verb: str) -> None:
        self.regions(pair, 1)
        pair.exports.loan_s = -0.001
        item = Item(region_name(0, 0, 4096), np.zeros(4096, np.uint8))
        with pair.link() as link:
            try:
                found = getattr(link, verb)(REALM, [item], soon())
            except UnavailableError:
                found = [Outcome.FAILED]
            assert found == [Outcome.FAILED]
        eventually(lambda: pair.exports.loans == 0)
        assert pair.exports.kept[-1].done == [False]

    def test_every_loan_is_given_back(self, pair: Pair, seed: int) -> None:
        rng = random.Random(seed)
        self.regions(pair, 1, 2)
        with pair.link() as link:
            for _ in range(20):
                batch = [region_name(rng.randrange(3), rng.randrange(100), 100) for _ in range(rng.randrange(1, 5))]
                verb = rng.choice((link.read, link.write))
                verb(REALM, [Item(it, np.zeros(100, np.uint8)) for it in batch], soon())
        eventually(lambda: pair.exports.loans == 0)
        assert len(pair.exports.kept) == 20

    def test_messages(self, pair: Pair) -> None:
        pair.exports.on("say", lambda peer, body, until_s: body[::-1])
        with pair.link() as link:
            assert link.ask("say", b"abc", soon()) == b"cba"
            assert link.ask("say", b"", soon()) == b""
            big = bytes(content(4, 3 << 20))
            assert link.ask("say", big, soon()) == big[::-1]
            with pytest.raises(RefusedError, match="topic"):
                link.ask("unknown", b"", soon())
            most = 4 << 20
            assert len(link.ask("say", bytes(most), soon())) == most
            assert link.ask("say", b"x", soon()) == b"x"

    def test_another_life_is_not_taken_for_this_one(self, pair: Pair) -> None:
        for other in (replace(pair.member, epoch=pair.member.epoch + 1), replace(pair.member, name="other")):
            with pytest.raises(RefusedError, match=r"member|tls"):
                pair.transport.connect(other, soon())
        with pair.link() as link:
            assert (link.peer.name, link.peer.epoch) == (MEMBER.name, MEMBER.epoch)

    def test_no_time_left(self, pair: Pair) -> None:
        self.regions(pair, 1)
        with pair.link() as link:
            item = Item(region_name(0, 0, 4096), np.zeros(4096, np.uint8))
            with pytest.raises(UnavailableError):
                link.read(REALM, [item], time.monotonic() - 1)
            with pytest.raises(UnavailableError):
                link.read(REALM, [item], soon())

    def test_a_link_that_was_aborted_is_of_no_use(self, pair: Pair) -> None:
        pair.exports.on("say", lambda peer, body, until_s: body)
        with pair.link() as link:
            link.abort()
            with pytest.raises(UnavailableError):
                link.ask("say", b"", soon())
            link.abort()

    def test_a_call_ends_in_time(self, pair: Pair) -> None:
        if not self.INTERRUPTS:
            pytest.skip("its exporter answers in the caller's thread")
        with self.thinking(pair), pair.link() as link:
            before_s = time.monotonic()
            with pytest.raises(UnavailableError):
                link.ask("think", b"", before_s + 0.1)
            assert 0.09 <= time.monotonic() - before_s < 2

    def test_a_call_ends_when_it_is_aborted(self, pair: Pair) -> None:
        if not self.INTERRUPTS:
            pytest.skip("its exporter answers in the caller's thread")
        with self.thinking(pair) as thinks, pair.link() as link, ThreadPoolExecutor(1) as thread:
            call = thread.submit(link.ask, "think", b"", soon(60))
            assert thinks.wait(10)
            link.abort()
            with pytest.raises(UnavailableError):
                call.result(10)

    @contextmanager
    def thinking(self, pair: Pair) -> Iterator[threading.Event]:
        """A topic, `think`, that has no answer while this lasts; set once it is asked for."""
        asked, answered = threading.Event(), threading.Event()

        def think(peer: str, body: bytes, until_s: float) -> bytes:
            asked.set()
            answered.wait(30)
            return b""

        pair.exports.on("think", think)
        try:
            yield asked
        finally:
            answered.set()

    def test_threads_with_links_of_their_own(self, pair: Pair) -> None:
        (source,) = self.regions(pair, 1)

        def life(number: int) -> None:
            rng = random.Random(number)
            target = np.zeros(1 << 20, np.uint8)
            with pair.link() as link:
                for _ in range(10):
                    sizes: Sequence[int] = [rng.randrange(1, 200_000) for _ in range(4)]
                    starts = [rng.randrange(REGION_BYTES - 200_000) for _ in sizes]
                    rows = [target[at * 200_000 :][:size] for at, size in enumerate(sizes)]
                    names = [region_name(0, start, size) for start, size in zip(starts, sizes, strict=True)]
                    items = [Item(name, row) for name, row in zip(names, rows, strict=True)]
                    assert link.read(REALM, items, soon()) == [DONE] * 4
                    for start, row in zip(starts, rows, strict=True):
                        assert np.array_equal(row, source[start : start + len(row)])

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(life, range(4)))
