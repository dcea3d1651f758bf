"""What takes the place of network namespaces where they cannot be had: loopback addresses, and relays that can stall.

Each node advertises a relay's address instead of its own. A link that is cut is a relay that takes bytes and passes
none on, which is what a lost link looks like. A relay does not know who calls, so that a host that is cut off from one
other is cut off from all. The kernel moves the bytes from socket to socket (splice), so that a relay costs little.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Self

SPLICE_BYTES = 1 << 20
CONNECT_S = 2.0


class Relay:
    """Passes connections on from one loopback address to another, or keeps them waiting. Two threads a connection."""

    def __init__(self, address: str, target: tuple[str, int]) -> None:
        """Start to listen on a free port."""
        self._target = target
        self._listener = socket.create_server((address, 0))
        self._flows, self._ending = threading.Event(), threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def stall(self, *, stalled: bool) -> None:
        """Pass nothing on from now on, or all again."""
        if stalled:
            self._flows.clear()
        else:
            self._flows.set()

    def close(self) -> None:
        """End all connections."""
        self._ending.set()
        self._flows.set()
        with self._lock:
            for it in (self._listener, *self._open):
                _shut(it)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="relay", daemon=True)
        with self._lock:
            self._threads = [it for it in self._threads if it.is_alive() or not it.ident]
            self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with suppress(OSError):  # it was shut
            while not self._ending.is_set():
                near, _ = self._listener.accept()
                self._start(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            self._flows.wait()
            with socket.create_connection(self._target, CONNECT_S) as far:
                far.settimeout(None)
                with self._lock:
                    self._open |= {near, far}
                try:
                    if not self._ending.is_set():
                        back = self._start(self._pass, far, near)
                        self._pass(near, far)
                        back.join()
                finally:
                    with self._lock:
                        self._open -= {near, far}

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        """One way of a connection, until it ends; then the other way ends, too."""
        drain, fill = os.pipe2(os.O_CLOEXEC)
        try:
            with suppress(OSError):
                while count := os.splice(source.fileno(), fill, SPLICE_BYTES):
                    self._flows.wait()
                    while count:
                        count -= os.splice(drain, target.fileno(), count)
        finally:
            os.close(drain)
            os.close(fill)
            _shut(source)
            _shut(target)


def _shut(it: socket.socket) -> None:
    """Wake up whoever waits for this socket."""
    with suppress(OSError):
        it.shutdown(socket.SHUT_RDWR)


class Loopback:
    """Hosts that are addresses of this one; see `namespaces.Lab` for the methods."""

    words = "nodes on 127.0.0.2 and up, behind relays: network namespaces need root"
    hub_address = "127.0.0.1"

    def __init__(self, names: Sequence[str]) -> None:
        self._places: dict[str, tuple[str, int]] = {}
        self._relays: dict[str, Relay] = {}
        self._cuts: dict[str, set[str]] = {name: set() for name in names}
        for number, name in enumerate(names, 2):
            address = f"127.0.0.{number}"
            self._places[name] = (address, _free_port(address))
            self._relays[name] = Relay(address, self._places[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the relays."""
        for relay in self._relays.values():
            relay.close()

    def at(self, name: str) -> AbstractContextManager[None]:
        """There is only one place to be."""
        assert name in self._places
        return nullcontext()

    def at_hub(self) -> AbstractContextManager[None]:
        """There is only one place to be."""
        return nullcontext()

    def settings(self, name: str) -> dict[str, str]:
        """What a node on that host must be told of its place."""
        address, port = self._places[name]
        return {"listen": f"{address}:{port}", "advertise": f"{address}:{self._relays[name].port}", "host_id": name}

    def cut(self, name: str, other: str) -> None:
        """Lose what one host sends to another, and all that others send there."""
        self._cuts[other].add(name)
        self._relays[other].stall(stalled=True)

    def mend(self, name: str, other: str) -> None:
        """Undo `cut`."""
        self._cuts[other].discard(name)
        self._relays[other].stall(stalled=bool(self._cuts[other]))


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
