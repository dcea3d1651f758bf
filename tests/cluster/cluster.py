"""Clusters for tests: members that are real processes, a real directory, and clients that read and check every byte."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwater.demo.namespaces import Lab
from headwater.directory.open import open_directory
from headwater.errors import HeadwaterError, UnavailableError
from headwater.node.client import Link, Session, ask_operator, fetch_status
from headwater.node.messages import Evict
from headwater.transports import wire
from headwater.types import ChunkKey, KVLayout, chunk_name, pack_keys
from tests.cluster.nodes import member
from tests.cluster.payloads import attempt_of, layout_of, namespace_of, part, put
from tests.node.conftest import eventually
from tests.node.peers import ForkServer, Peer
from tests.servers import RedisServer, valkey_program

NAME = "test"
TOKEN = "a token of at least thirty-two characters"
SMALL = layout_of(64 << 10)
WAIT_S = 2.0
"""How long a get waits for what other nodes have."""
READY_S = 10.0
PAUSE = threading.Event()
POLL_S = 0.001
PAUSE_S = 0.01
"""How long to leave the machine to others after a get that brought nothing."""


def keys(count: int, name: str) -> list[ChunkKey]:
    """Keys that belong to a name."""
    return [ChunkKey(hashlib.md5(f"{name}/{index}".encode()).digest()) for index in range(count)]


@dataclass(frozen=True)
class Got:
    """What one get brought: how many chunks, written by which attempts, when it began and how long it took."""

    chunks: int
    attempts: frozenset[int]
    began_s: float
    seconds: float


class Reader:
    """A thin client of one node that gets prompts as an engine does, and checks every byte."""

    _serial = itertools.count()

    def __init__(self, address: str, layout: KVLayout = SMALL) -> None:
        self.address, self.layout = address, layout
        self.root = namespace_of(layout).root()
        name = f"reader-{next(self._serial)}"
        link = Link(address, name, maps=True, connect_s=5.0, call_s=5.0)
        self.session = Session(link, namespace_of(layout), layout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def put(self, wanted: Sequence[ChunkKey], attempt: int = 1) -> int:
        """Save what is not held yet; how many chunks were written."""
        return put(self.session, wanted, attempt)

    def get(self, wanted: Sequence[ChunkKey], wait_s: float = WAIT_S) -> Got:
        """Have the node bring a prompt, load it and check it."""
        session, request = self.session, f"get-{next(self._serial)}"
        began_s = time.monotonic()
        # A node waits a tenth of what computing would take.
        tokens_s = 0.1 * self.layout.chunk_tokens / wait_s
        while session.match(wanted, counts=False, request=request, tokens_s=tokens_s).waiting:
            if time.monotonic() - began_s > wait_s:
                break
            PAUSE.wait(POLL_S)
        session.forget([request])
        held = session.load(wanted)
        took_s = time.monotonic() - began_s
        size = self.layout.slot_bytes(0)
        attempts = {
            attempt_of(key, part(session, place, size)) for key, place in zip(wanted, held.addresses[0], strict=False)
        }
        assert time.monotonic() < held.deadline_s or not held.ticket, "the lease is long enough for a test"
        if held.ticket:
            session.done(held.ticket)
        return Got(held.chunks, frozenset(attempts), began_s, took_s)

    def evict(self, wanted: Sequence[ChunkKey]) -> int:
        """Have the node forget these chunks; how many it has forgotten."""
        told: Any = ask_operator(self.address, Evict(self.root, pack_keys(wanted), below=False))
        return int(told["deleted"])

    def get_again(self, wanted: Sequence[ChunkKey], wait_s: float = WAIT_S) -> Got:
        """Get what the node has no longer: from others."""
        self.evict(wanted)
        return self.get(wanted, wait_s)


def is_evicted(reader: Reader, wanted: Sequence[ChunkKey]) -> bool:
    """Have a node forget these chunks; whether it has, which leases may keep it from."""
    reader.evict(wanted)
    return not any(reader.session.contains(wanted))


@dataclass
class Load:
    """Gets in a thread of their own, one after the other, until `stop`."""

    reader: Reader
    wanted: Sequence[ChunkKey]
    wait_s: float = WAIT_S
    gets: list[Got] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        if self.failed and error is None:
            raise self.failed[0]

    def more(self, count: int, within_s: float = 20.0) -> None:
        """Wait until so many more gets are done."""
        until = len(self.gets) + count
        eventually(lambda: len(self.gets) >= until or self.failed, within_s)

    def run_for(self, seconds: float) -> None:
        """Let gets be made for a while."""
        self._ending.wait(seconds)

    def whole(self, begun_after_s: float = 0.0) -> list[bool]:
        """Which gets brought everything, of those that began after a moment."""
        return [it.chunks == len(self.wanted) for it in self.gets if it.began_s >= begun_after_s]

    @property
    def longest_s(self) -> float:
        """The longest get."""
        return max(it.seconds for it in self.gets)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                got = self.reader.get_again(self.wanted, self.wait_s)
                self.gets.append(got)
                if got.chunks < len(self.wanted):
                    self._ending.wait(PAUSE_S)
        except (HeadwaterError, AssertionError, OSError) as error:
            self.failed.append(error)


class DirectoryServer:
    """A Valkey, on loopback or where all hosts of a lab reach it; may be killed, paused and started again."""

    def __init__(self, folder: Path, lab: Lab | None, options: Sequence[str] = ()) -> None:
        self._lab = lab
        address = "127.0.0.1" if lab is None else lab.hub_address
        folder.mkdir(parents=True, exist_ok=True)
        with self.there():
            more = ["--protected-mode", "no", "--bind", "127.0.0.1", *([] if lab is None else [address]), *options]
            self.server = RedisServer(valkey_program(), folder, more)
        self.url = f"redis://{address}:{self.server.port}"

    def there(self) -> AbstractContextManager[None]:
        """Where it runs."""
        return nullcontext() if self._lab is None else self._lab.at_hub()

    def start(self) -> None:
        """Start it again, empty."""
        with self.there():
            self.server.start()

    def say(self, *words: str | bytes) -> bytes:
        """One command."""
        with self.there():
            return self.server.say(*words)

    def listed(self, wanted: Sequence[ChunkKey], number: int | None = None) -> int:
        """How many of these chunks somebody, or the member of this number, is said to hold; 0 while there is no
        answer."""
        with self.there():
            directory = open_directory(self.url, NAME)
            try:
                found = directory.locate([chunk_name(0, key) for key in wanted], time.monotonic() + 1.0)
            except UnavailableError:
                found = []
            finally:
                directory.close()
        return sum(any(number in (None, it.number) for it in replicas) for replicas in found)


class Member:
    """One node process."""

    def __init__(self, name: str, peer: Peer, address: str) -> None:
        self.name, self.peer, self.address = name, peer, address

    def status(self) -> dict[str, Any]:
        """What it says of its cluster."""
        told: Any = fetch_status(self.address).get("cluster")
        assert isinstance(told, dict), "this node is in no cluster"
        return told

    def is_in(self) -> bool:
        """Whether it has joined."""
        return bool(self.status()["number"])

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.peer.signal(number)

    def kill(self) -> None:
        """As a power cut would."""
        self.peer.kill()


class Cluster:
    """Members and their directory."""

    def __init__(self, forks: ForkServer, folder: Path, directory: DirectoryServer, lab: Lab | None) -> None:
        self.directory, self.lab, self.folder = directory, lab, folder
        self.members: dict[str, Member] = {}
        self._forks = forks
        self.token = folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(TOKEN)

    def settings(self, name: str) -> dict[str, Any]:
        """How a member is started."""
        place = {"listen": "127.0.0.1:0", "host_id": name} if self.lab is None else self.lab.settings(name)
        return {
            "name": name,
            "cluster": NAME,
            "directory": self.directory.url,
            "token_file": str(self.token),
            "prefault": False,
            "drain_s": 0.1,
            "host_memory": 16 << 20,
            "slab": 1 << 20,
            **place,
        }

    def start(
        self,
        name: str,
        changes: dict[str, Any] | None = None,
        *,
        joined: bool = True,
        protocols: tuple[int, int] = (wire.OLDEST, wire.NEWEST),
    ) -> Member:
        """Start a member; with `joined`, return when the directory has given it a number."""
        address = f"unix:{self.folder}/{name}.sock"
        namespace = ""
        if self.lab is not None:
            namespace = f"/proc/{os.getpid()}/fd/{self.lab.hosts[name].namespace}"
        settings = {**self.settings(name), **(changes or {}), "quiet": True}
        peer = self._forks.start(member, address=address, namespace=namespace, protocols=protocols, settings=settings)
        said = peer.hear()
        assert said == "up", said
        it = self.members[name] = Member(name, peer, address)
        if joined:
            eventually(it.is_in, READY_S, seen=it.status)
        return it

    @contextmanager
    def reader(self, name: str, layout: KVLayout = SMALL) -> Iterator[Reader]:
        """A client of a member."""
        with Reader(self.members[name].address, layout) as reader:
            yield reader

    def listed(self, wanted: Sequence[ChunkKey], within_s: float = 5.0, by: str = "") -> float:
        """Wait until the directory has these chunks, held by anybody or by one member; how long that took."""

        def is_listed() -> bool:
            number = self.members[by].status()["number"] if by else None
            return self.directory.listed(wanted, number) == len(wanted)

        return eventually(is_listed, within_s)

    def put(self, name: str, wanted: Sequence[ChunkKey], attempt: int = 1, layout: KVLayout = SMALL) -> None:
        """Have a member hold chunks, and the directory know it."""
        with self.reader(name, layout) as reader:
            assert reader.put(wanted, attempt) == len(wanted)
        self.listed(wanted)

    def know(self, name: str, of: str, within_s: float = 5.0) -> None:
        """Wait until a member has another one's present life in its list, which a beat brings after a second."""
        number = self.members[of].status()["number"]
        eventually(lambda: number in numbers(self.members[name].status()), within_s)


def numbers(status: dict[str, Any]) -> set[int]:
    """The other lives that a member knows."""
    return {it["number"] for it in status["peers"]}
