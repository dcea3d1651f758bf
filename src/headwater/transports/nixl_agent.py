"""This process's end of NIXL: one agent, the memory that is registered with it, the peers' agents that it knows.

Who calls NIXL here is counted, so that the agent can be ended under whoever still waits. Peers' agents are added and
removed one at a time, and one that has failed is not used again before all links to it are closed: UCX does not mend a
connection. What NIXL guarantees and what it does not is in `nixl`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from headwater.errors import ConfigError, ProtocolError, RefusedError, UnavailableError
from headwater.ports import Bytes, Memory
from headwater.transports.wire import decode_with, encode_message
from headwater.types import Member

TOPIC = "headwater.nixl"
FIRST_WAIT_S, LONGEST_WAIT_S = 20e-6, 2e-3
SETTLE_S = 0.1
"""How much longer memory is kept after a transfer has failed."""
CLOSE_S = 5.0
"""How long `Agent.close` waits for transfers before it ends them all."""
ADDRESSES = 1 << 64
RDMA_DEVICES = Path("/sys/class/infiniband")

Span = tuple[int, int, int]
"""Address, bytes, device."""


@runtime_checkable
class Tensor(Protocol):
    """A contiguous torch tensor of bytes, as far as it is looked at here: memory of a device."""

    def data_ptr(self) -> int:
        """Its address."""

    def numel(self) -> int:
        """How many elements."""

    def element_size(self) -> int:
        """Bytes of one."""

    def get_device(self) -> int:
        """The device's number."""

    def cpu(self) -> Any:
        """A copy in DRAM."""


class Who(msgspec.Struct, array_like=True):
    """Who asks for an agent."""

    host: str
    has_rdma: bool


class Description(msgspec.Struct, array_like=True):
    """An exporter's agent, and where its regions are in its address space."""

    agent: str
    metadata: bytes
    numbers: list[int]
    bases: list[int]
    sizes: list[int]
    has_rdma: bool
    pid: int

    def places(self) -> dict[int, tuple[int, int]]:
        """Address and size of each region."""
        return dict(zip(self.numbers, zip(self.bases, self.sizes, strict=True), strict=True))


_who = msgspec.msgpack.Decoder(Who)
_description = msgspec.msgpack.Decoder(Description)


def decode_description(body: bytes) -> Description:
    """Raises ProtocolError."""
    it: Description = decode_with(_description, body)
    if not len(it.numbers) == len(it.bases) == len(it.sizes) == len(set(it.numbers)):
        raise ProtocolError(f"{len(it.numbers)} regions, {len(it.bases)} addresses and {len(it.sizes)} sizes")
    for base, size in zip(it.bases, it.sizes, strict=True):
        if base < 0 or size < 0 or base + size > ADDRESSES:
            raise ProtocolError(f"a region of {size} bytes at {base}")
    if min(it.numbers, default=0) < 0 or not 0 < it.pid < 1 << 31:
        raise ProtocolError(f"a region {min(it.numbers, default=0)} of the process {it.pid}")
    return it


@dataclass(slots=True)
class _Remote:
    """A peer's agent that ours knows."""

    metadata: bytes
    links: int = 0
    is_broken: bool = False


@dataclass(slots=True)
class _Registered:
    """Memory that our agent may use."""

    kind: str
    span: Span
    descriptors: Any
    memory: Any = field(repr=False)
    """Kept, so that it is not freed while it is registered."""


class Agent:
    """This process's NIXL agent: one for all that it reads and exports. `name` must be of this life of the process."""

    topic = TOPIC

    def __init__(self, name: str, host: str = "", *, emulated: bool = False) -> None:
        """Takes half a second. Raises ConfigError where NIXL is not installed, UnavailableError where it fails."""
        self.name, self.host, self.emulated = name, host, emulated
        self.has_rdma = has_rdma()
        self._nixl, self._errors = _create(name)
        self._changed = threading.Condition()
        self._calls = 0
        self._closing = False
        self._ended = threading.Event()
        self._busy: set[Transfer] = set()
        self._remotes: dict[str, _Remote] = {}
        self._membership = threading.Lock()
        self._exported: dict[int, _Registered] = {}
        self._registered: list[_Registered] = []
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"Agent({self.name}, {len(self._remotes)} peers, {len(self._busy)} transfers)"

    # ---- what we export ---------------------------------------------------------------------------------------

    def export(self, regions: Sequence[Memory]) -> None:
        """Have exactly these regions registered; to be called before memory of a region is let go of."""
        with self._membership, self._call() as nixl:
            wanted = {it.number: it.memory for it in regions if len(it.memory)}
            for number, known in list(self._exported.items()):
                if number not in wanted or known.span != span_of(wanted[number]):
                    nixl.deregister_memory(known.descriptors)
                    del self._exported[number]
            for number in wanted.keys() - self._exported.keys():
                self._exported[number] = _register(nixl, wanted[number])

    def describe(self, peer: str, body: bytes, regions: Sequence[Memory], until_s: float) -> bytes:
        """See `offers.Describer`: our agent, with all regions registered."""
        try:
            who: Who = decode_with(_who, body)
        except ProtocolError as error:
            raise RefusedError("nixl", "who asks", str(error), "compare the versions of both nodes") from None
        if not self.emulated and not (who.has_rdma and self.has_rdma) and who.host != self.host:
            raise RefusedError("nixl", "RDMA devices on both nodes", "TCP only", "leave it to the transport tcp")
        self.export(regions)
        with self._membership, self._call() as nixl:
            metadata: bytes = nixl.get_agent_metadata()
            spans = {number: it.span for number, it in self._exported.items()}
        bases, sizes = [it[0] for it in spans.values()], [it[1] for it in spans.values()]
        return encode_message(Description(self.name, metadata, list(spans), bases, sizes, self.has_rdma, os.getpid()))

    # ---- what we read into ------------------------------------------------------------------------------------

    def register(self, memory: Bytes | Tensor) -> None:
        """Have memory ready to be read into, for as long as the agent lives: registering it for each read is slow."""
        with self._membership, self._call() as nixl:
            self._registered.append(_register(nixl, memory))

    def lacking(self, memories: Sequence[Bytes | Tensor]) -> list[Bytes | Tensor]:
        """Those that are not part of registered memory."""
        known = [*self._registered, *self._exported.values()]
        return [it for it in memories if not any(_covers(them, it) for them in known)]

    @contextlib.contextmanager
    def registered(self, memories: Sequence[Bytes | Tensor]) -> Iterator[None]:
        """Register these for a while, if they are not."""
        made: list[_Registered] = []
        try:
            with self._call() as nixl:
                made += [_register(nixl, it) for it in self.lacking(memories)]
            yield
        finally:
            with contextlib.suppress(UnavailableError), self._call() as nixl:
                for it in made:
                    nixl.deregister_memory(it.descriptors)

    # ---- peers ------------------------------------------------------------------------------------------------

    def join(self, name: str, metadata: bytes) -> None:
        """Know a peer's agent; each call is undone by one of `leave`. Raises UnavailableError."""
        with self._membership, self._call() as nixl:
            remote = self._remotes.get(name)
            if remote is not None and remote.is_broken:
                raise UnavailableError(f"the agent {name} has failed and is not let go of yet")
            if remote is None or remote.metadata != metadata:
                found = nixl.add_remote_agent(metadata).decode("utf-8", "replace")
                if found != name:
                    nixl.remove_remote_agent(found)
                    raise UnavailableError(f"the metadata of {name} is that of {found}")
                nixl.make_connection(name)
            if remote is None:
                remote = self._remotes[name] = _Remote(metadata)
            remote.metadata = metadata
            remote.links += 1

    def leave(self, name: str) -> None:
        """A link is closed."""
        with self._membership:
            remote = self._remotes[name]
            remote.links -= 1
            if remote.links:
                return
            del self._remotes[name]
            with contextlib.suppress(UnavailableError), self._call() as nixl:
                nixl.remove_remote_agent(name)

    def failed(self, name: str) -> None:
        """A transfer of this peer's broke: UCX does not mend a connection."""
        with self._membership:
            if name in self._remotes:
                self._remotes[name].is_broken = True

    # ---- transfers --------------------------------------------------------------------------------------------

    def read(self, name: str, kind: str, targets: Sequence[Span], sources: Sequence[Span]) -> Transfer:
        """Begin to fill targets, which are of one kind of memory, from a peer's DRAM."""
        with self._call() as nixl:
            mine = nixl.get_xfer_descs(list(targets), kind)
            theirs = nixl.get_xfer_descs(list(sources), "DRAM")
            handle = nixl.initialize_xfer("READ", mine, theirs, name)
            transfer = Transfer(self, handle, nixl.transfer(handle))
            self._busy.add(transfer)
        return transfer

    def check(self, transfer: Transfer) -> str:
        """Look how far it is: PROC, DONE or ERR. Raises UnavailableError once the agent is closed."""
        with self._call() as nixl:
            state: str = nixl.check_xfer_state(transfer.handle)
        return state

    def ended(self, transfer: Transfer) -> None:
        """Nothing of it is under way."""
        with contextlib.suppress(UnavailableError), self._call():
            transfer.handle.release()
        self._busy.discard(transfer)

    def close(self) -> None:
        """End it all, in the order in which UCX does not crash. Transfers that do not end by themselves within CLOSE_S
        are ended with the agent; when this returns, nothing is moved any more."""
        with self._changed:
            if self._closing:
                return
            until_s = time.monotonic() + CLOSE_S
            while self._busy and time.monotonic() < until_s:  # who waits for them looks how far they are
                self._changed.wait(LONGEST_WAIT_S)
            self._closing = True
            while self._calls:
                self._changed.wait()
        nixl = self._nixl
        if not self._busy:
            for name in list(self._remotes):
                with contextlib.suppress(*self._errors):
                    nixl.remove_remote_agent(name)
            for it in (*self._registered, *self._exported.values()):
                nixl.deregister_memory(it.descriptors)
        for transfer in self._busy:
            # Its memory is let go of by nobody: the request still points there, and goes with the agent.
            transfer.handle._released, transfer.handle._agent = True, None
        self._busy.clear()
        self._registered.clear()
        self._exported.clear()
        nixl.agent = None
        self._ended.set()
        atexit.unregister(self.close)

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        """NIXL's own agent, which is not ended meanwhile."""
        with self._changed:
            if not self._closing:
                self._calls += 1
                closed = False
            else:
                closed = True
        if closed:
            self._ended.wait()
            raise UnavailableError("the NIXL agent is closed")
        try:
            yield self._nixl
        except self._errors as error:
            raise UnavailableError(f"NIXL: {error}") from None
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()


@dataclass(slots=True, eq=False)
class Transfer:
    """One read that was begun."""

    agent: Agent
    handle: Any
    state: str

    def wait(self, until_s: float, is_aborted: Callable[[], bool]) -> bool:
        """Return when nothing is under way any more: whether it came to its end, and in time."""
        wait_s = FIRST_WAIT_S
        in_time = True
        try:
            while self.state == "PROC":
                in_time = time.monotonic() < until_s and not is_aborted()
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                self.state = self.agent.check(self)
        except UnavailableError:
            self.state = "ERR"
        if self.state != "DONE":
            time.sleep(SETTLE_S)
        self.agent.ended(self)
        return self.state == "DONE" and in_time and time.monotonic() < until_s


def agent_name(member: Member) -> str:
    """How the agent of this life of a node is called."""
    return f"{member.name}.{member.epoch}"


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


# ---- NIXL itself ------------------------------------------------------------------------------------------


def _create(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's agent, and what its calls raise."""
    raise_exceptions = logging.raiseExceptions
    try:
        import nixl_cu12 as nixl
    except ImportError:
        raise ConfigError("transport nixl: NIXL is not installed; pip install 'headwater[nixl]'") from None
    finally:
        logging.raiseExceptions = raise_exceptions
    theirs = logging.getLogger("nixl")  # which has just been told to print everything
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)
    errors: tuple[type[Exception], ...] = (RuntimeError,)
    errors += tuple(it for it in vars(nixl._bindings).values() if isinstance(it, type) and issubclass(it, Exception))
    strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    try:
        return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"], sync_mode=strict)), errors
    except errors as error:
        raise UnavailableError(f"NIXL: {error}") from None


def _register(nixl: Any, memory: Bytes | Tensor) -> _Registered:
    kind, span = kind_of(memory), span_of(memory)
    return _Registered(kind, span, nixl.register_memory([(*span, "")], kind), memory)


def kind_of(memory: Bytes | Tensor) -> str:
    """What NIXL calls this kind of memory."""
    return "DRAM" if isinstance(memory, np.ndarray) else "VRAM"


def size_of(memory: Bytes | Tensor) -> int:
    """How many bytes."""
    return len(memory) if isinstance(memory, np.ndarray) else memory.numel() * memory.element_size()


def span_of(memory: Bytes | Tensor) -> Span:
    """Where they are."""
    if isinstance(memory, np.ndarray):
        return memory.ctypes.data, len(memory), 0
    return memory.data_ptr(), size_of(memory), max(memory.get_device(), 0)


def _covers(region: _Registered, memory: Bytes | Tensor) -> bool:
    address, size, device = span_of(memory)
    start, length, where = region.span
    same = region.kind == kind_of(memory) and where == device
    return same and start <= address and address + size <= start + length
