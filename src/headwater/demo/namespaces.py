"""Hosts that are none: network namespaces on one machine, joined by a switch, with links that can be cut.

Theory of operation. A namespace is there as long as a process or an open descriptor is in it. These have no names and
no mounts: `Lab` keeps a descriptor for each, so that its end, `kill -9` included, and that of the processes that were
started inside, is theirs. A thread enters a namespace for a moment (`inside`); what it opens or starts meanwhile
belongs there for good: sockets, and processes with all their children.

         switch namespace:  directory at 10.77.0.254
         ───┬──────────┬──────────┬───
          A .1       B .2       C .3          one namespace each
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self

from headwater.demo.netlink import Netlink
from headwater.errors import ResourceError

NEW_NET = 0x40000000
DEVICE, SWITCH = "eth0", "switch"
PEER_PORT = 7420
PREFIX_BITS = 24
HUB_ADDRESS = "10.77.0.254"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_namespace() -> int:
    """A descriptor that keeps a new, empty network namespace; raises OSError where that is not allowed."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _check(_libc.unshare(NEW_NET))
            made.append(_own_namespace())
        except OSError as error:
            made.append(error)

    # In a thread of its own, which ends: ours stays where it is.
    thread = threading.Thread(target=make, name="namespace")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def enter(namespace: int) -> None:
    """Move this thread to a namespace; what it starts later is there, too."""
    _check(_libc.setns(namespace, NEW_NET))


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """This thread is in a namespace for the time of the block; so is whatever it opens or starts there, for ever."""
    home = _own_namespace()
    try:
        enter(namespace)
        try:
            yield
        finally:
            enter(home)
    finally:
        os.close(home)


class Host:
    """One namespace with one address."""

    def __init__(self, name: str, address: str, namespace: int) -> None:
        self.name, self.address, self.namespace = name, address, namespace


class Lab:
    """Hosts that reach each other over a switch; all of it is gone when the lab and what runs in it is."""

    words = "each node in a network namespace of its own"
    hub_address = HUB_ADDRESS

    def __init__(self, names: Sequence[str]) -> None:
        """Make them; raises ResourceError where this user or this kernel cannot."""
        self.hosts: dict[str, Host] = {}
        self._opened: list[int] = []
        try:
            self.hub = self._add_hub()
            for number, name in enumerate(names, 1):
                self._add_host(name, f"10.77.0.{number}")
        except OSError as error:
            self.close()
            raise ResourceError(f"no network namespaces here ({error.strerror}); they need root") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go; the namespaces stay for as long as a process is inside."""
        while self._opened:
            os.close(self._opened.pop())

    def at(self, name: str) -> AbstractContextManager[None]:
        """What this thread opens or starts in the block is on that host."""
        return inside(self.hosts[name].namespace)

    def at_hub(self) -> AbstractContextManager[None]:
        """The same for what serves all hosts, at `hub_address`."""
        return inside(self.hub.namespace)

    def settings(self, name: str) -> dict[str, str]:
        """What a node on that host must be told of its place."""
        address = self.hosts[name].address
        return {"listen": f"0.0.0.0:{PEER_PORT}", "advertise": f"{address}:{PEER_PORT}"}

    def cut(self, name: str, other: str) -> None:
        """Lose whatever one host sends to another; neither of them is told."""
        with inside(self.hosts[name].namespace), Netlink() as net:
            net.misdirect(DEVICE, self.hosts[other].address)

    def mend(self, name: str, other: str) -> None:
        """Undo `cut`."""
        with inside(self.hosts[name].namespace), Netlink() as net:
            net.direct(DEVICE, self.hosts[other].address)

    def unplug(self, name: str) -> None:
        """Take a host off the switch: nothing comes or goes."""
        self._plug(name, on=False)

    def plug(self, name: str) -> None:
        """Undo `unplug`."""
        self._plug(name, on=True)

    def throttle(self, name: str, bytes_s: int | None) -> None:
        """Let a host send only so many bytes a second; None: as many as it can."""
        with inside(self.hosts[name].namespace), Netlink() as net:
            if bytes_s is None:
                net.unthrottle(DEVICE)
            else:
                net.throttle(DEVICE, bytes_s)

    # ---- inside ---------------------------------------------------------------------------------------

    def _plug(self, name: str, *, on: bool) -> None:
        with inside(self.hub.namespace), Netlink() as net:
            net.switch(_cable(name), on=on)

    def _add_hub(self) -> Host:
        hub = Host("hub", HUB_ADDRESS, self._open())
        with inside(hub.namespace), Netlink() as net:
            net.switch("lo", on=True)
            net.add_bridge(SWITCH)
            net.add_address(SWITCH, hub.address, PREFIX_BITS)
            net.switch(SWITCH, on=True)
        return hub

    def _add_host(self, name: str, address: str) -> None:
        host = Host(name, address, self._open())
        with inside(self.hub.namespace), Netlink() as net:
            net.add_cable(_cable(name), DEVICE, host.namespace)
            net.join(_cable(name), SWITCH)
            net.switch(_cable(name), on=True)
        with inside(host.namespace), Netlink() as net:
            net.switch("lo", on=True)
            net.add_address(DEVICE, address, PREFIX_BITS)
            net.switch(DEVICE, on=True)
        self.hosts[name] = host

    def _open(self) -> int:
        namespace = new_namespace()
        self._opened.append(namespace)
        return namespace


def _cable(name: str) -> str:
    """What the switch calls a host's link; the kernel allows 15 characters."""
    return f"to-{name}"[:15]
