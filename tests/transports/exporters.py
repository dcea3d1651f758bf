"""Exporters for the transports that go to memory by themselves: in this process, and in one of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headwater.ports import Bytes, Item, Lent
from headwater.tiers.host import MappedMemory, create_memory
from headwater.transports.credentials import Credentials
from headwater.transports.memory_exports import MemoryExports, RegionLoan, region_name
from headwater.transports.nixl_agent import Agent
from headwater.transports.offers import Offers
from headwater.transports.payloads import checksum
from headwater.transports.server import PeerServer
from headwater.types import Extent, Member, Outcome

REALM = b"tests"
CLUSTER = "tests"
CREDENTIALS = Credentials((b"a token of the tests",))
HOST = "this host"
KIB, MIB = 1 << 10, 1 << 20
ME = Member("reader", 1, "", host=HOST)


class Exporter(MemoryExports):
    """Plain memory whose things lie in regions always, with checksums if they are asked for. Remembers its loans."""

    def __init__(self, realm: bytes = REALM, loan_s: float = 30.0, *, checked: bool = True) -> None:
        super().__init__(realm, loan_s)
        self.checked = checked
        self.lie: Callable[[Lent], Lent] = lambda it: it
        self.kept: list[RegionLoan] = []

    def lend(self, peer: str, realm: bytes, names: Sequence[bytes], until_s: float) -> RegionLoan:
        """With extents and checksums."""
        return self._placed(super().lend(peer, realm, names, until_s), names, checked=self.checked)

    def accept(
        self, peer: str, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float
    ) -> RegionLoan:
        """With extents."""
        return self._placed(super().accept(peer, realm, names, sizes, until_s), names, checked=False)

    def end(self, loan: RegionLoan) -> None:
        """Remember what was said of it."""
        self.kept.append(loan)
        super().end(loan)

    def _placed(self, loan: RegionLoan, names: Sequence[bytes], *, checked: bool) -> RegionLoan:
        parts = list(loan.parts)
        for index, (part, name) in enumerate(zip(loan.parts, names, strict=True)):
            if not isinstance(part, Outcome):
                segment, offset = int.from_bytes(name[:4], "little"), int.from_bytes(name[4:12], "little")
                sum_ = checksum(part.memory) if checked else None
                lent = Lent(part.memory, Extent(segment, offset, len(part.memory)), sum_)
                parts[index] = self.lie(lent)
        loan.parts = parts
        return loan


def pattern(size: int, seed: int = 1) -> Bytes:
    """Bytes that say whose they are."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def segment(size: int, seed: int = 1) -> tuple[MappedMemory, Bytes]:
    """Memory that others may map, filled."""
    memory = create_memory(size, "memfd", lock=False)
    array = memory.array(0, size)
    array[:] = pattern(size, seed)
    return memory, array


def thing(offset: int, length: int, segment_number: int = 0) -> bytes:
    """What a piece of a region is called."""
    return region_name(segment_number, offset, length)


def items(*places: tuple[int, int]) -> list[Item]:
    """Things of the first region by offset and length, and room for them."""
    return [Item(thing(offset, length), np.zeros(length, np.uint8)) for offset, length in places]


@contextlib.contextmanager
def serving(
    exports: MemoryExports, path: Path, agent: Agent | None = None, name: str = "exporter", epoch: int = 7
) -> Iterator[tuple[PeerServer, Member]]:
    """A server in this process, and how it is called."""
    member = Member(name, epoch, "", str(path / "s"), HOST)
    offers = Offers(exports, [agent] if agent else [])
    server = PeerServer(member, CLUSTER, offers, CREDENTIALS, ("127.0.0.1", 0), str(path / "s"))
    server.start()
    try:
        yield server, dataclasses.replace(member, address=server.address)
    finally:
        server.close(time.monotonic() + 5)


def soon(seconds: float = 5.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


# ---- an exporter in a process of its own ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the other process shall be."""

    directory: str
    size: int = 4 * MIB
    seed: int = 1
    descriptor: bool = True
    nixl: bool = False
    emulated: bool = False
    checked: bool = True
    loan_s: float = 30.0
    epoch: int = 7


class Exporting:
    """Another process that exports one region."""

    def __init__(self, settings: Settings, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transports.exporters", json.dumps(dataclasses.asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | (environment or {}),
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "it did not start"
        self.member = msgspec.json.decode(line, type=Member)
        self.pid = self._process.pid

    def loans(self) -> tuple[int, int]:
        """How many loans are out, and how many were given back."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"loans\n")
        self._process.stdin.flush()
        out, back = self._process.stdout.readline().split()
        return int(out), int(back)

    def signal(self, number: signal.Signals) -> None:
        """Let it go on, kill it."""
        self._process.send_signal(number)

    def pause(self) -> None:
        """Stop it where it is; when this returns, it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> int:
        """Let it end by itself; its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(20)
        self._process.stdout.close()
        return code

    def kill(self) -> None:
        """End it for sure."""
        self._process.kill()
        self.end()


@contextlib.contextmanager
def exporting(settings: Settings, environment: dict[str, str] | None = None) -> Iterator[Exporting]:
    """The other process, and its end."""
    process = Exporting(settings, environment)
    try:
        yield process
    finally:
        process.kill()


def main() -> int:
    """The other process."""
    settings = Settings(**json.loads(sys.argv[1]))
    exports = Exporter(loan_s=settings.loan_s, checked=settings.checked)
    if settings.descriptor:
        memory, array = segment(settings.size, settings.seed)
        exports.add(array, memory.descriptors[0])
    else:
        array = pattern(settings.size, settings.seed)
        exports.add(array)
    agent = Agent(f"exporter.{settings.epoch}", HOST, emulated=settings.emulated) if settings.nixl else None
    with serving(exports, Path(settings.directory), agent, epoch=settings.epoch) as (_, member):
        print(msgspec.json.encode(member).decode(), flush=True)
        for _ in sys.stdin:
            print(exports.loans, len(exports.kept), flush=True)
    if agent is not None:
        agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
