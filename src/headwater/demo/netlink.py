"""Network devices by the kernel's own interface (rtnetlink): no program is needed that a small machine may lack.

A `Netlink` speaks to the network namespace in which it was opened. See rtnetlink(7), and the kernel's
`include/uapi/linux/{if_link,if_addr,neighbour,pkt_sched}.h`, from which the numbers are.
"""

from __future__ import annotations

import os
import socket
import struct
from types import TracebackType
from typing import Self

NEWLINK, NEWADDR, NEWNEIGH, DELNEIGH, NEWQDISC, DELQDISC = 16, 20, 28, 29, 36, 37
REQUEST, ACK, REPLACE, EXCLUSIVE, CREATE = 0x1, 0x4, 0x100, 0x200, 0x400
ERROR = 2
UP = 1
PERMANENT = 0x80
ROOT = 0xFFFFFFFF
ETHERNET = 1
BURST_BYTES = 64 << 10
QUEUE_BYTES = 256 << 10

_header = struct.Struct("=IHHII")
_link = struct.Struct("=BxHiII")
_address = struct.Struct("=BBBBi")
_neighbour = struct.Struct("=BxxxiHBB")
_queue = struct.Struct("=BxxxiIII")
_rate = struct.Struct("=BBHhHI")


def _attribute(kind: int, value: bytes) -> bytes:
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + b"\0" * (-size % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("=I", value))


def _kind_of_link(kind: str, data: bytes = b"") -> bytes:
    return _attribute(18, _text(1, kind) + (_attribute(2, data) if data else b""))


class Netlink:
    """Changes devices of one namespace; every method raises OSError with the kernel's reason."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._serial = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def add_bridge(self, name: str) -> None:
        """A switch, to which other devices are joined."""
        self._make_link(_text(3, name) + _kind_of_link("bridge"))

    def add_cable(self, name: str, far_name: str, far_namespace: int) -> None:
        """Two connected devices: one here, one in the namespace that a descriptor stands for."""
        far = _link.pack(0, 0, 0, 0, 0) + _text(3, far_name) + _attribute(28, struct.pack("=i", far_namespace))
        self._make_link(_text(3, name) + _kind_of_link("veth", _attribute(1, far)))

    def join(self, name: str, bridge: str) -> None:
        """Plug a device into a switch."""
        self._set_link(name, 0, 0, _number(10, socket.if_nametoindex(bridge)))

    def switch(self, name: str, *, on: bool) -> None:
        """Have a device work, or not."""
        self._set_link(name, UP if on else 0, UP, b"")

    def add_address(self, name: str, address: str, prefix_bits: int) -> None:
        """Give a device an IPv4 address, and the route to its network."""
        packed = socket.inet_aton(address)
        body = _address.pack(socket.AF_INET, prefix_bits, 0, 0, socket.if_nametoindex(name))
        self._ask(NEWADDR, CREATE | EXCLUSIVE, body + _attribute(2, packed) + _attribute(1, packed))

    def misdirect(self, name: str, address: str) -> None:
        """Send all that is for an address to a device that does not exist: it is lost, and nobody is told."""
        body = self._neighbour_of(name, PERMANENT, address)
        self._ask(NEWNEIGH, CREATE | REPLACE, body + _attribute(2, b"\x02\0\0\0\0\xfe"))

    def direct(self, name: str, address: str) -> None:
        """Undo `misdirect`."""
        self._ask(DELNEIGH, 0, self._neighbour_of(name, 0, address))

    def throttle(self, name: str, bytes_s: int) -> None:
        """Let a device send only so many bytes a second."""
        rate = _rate.pack(0, ETHERNET, 0, 0, 0, bytes_s)
        options = _attribute(1, rate + _rate.pack(0, 0, 0, 0, 0, 0) + struct.pack("=III", QUEUE_BYTES, 0, 0))
        options += _number(6, BURST_BYTES)
        body = _queue.pack(0, socket.if_nametoindex(name), 0x10000, ROOT, 0)
        self._ask(NEWQDISC, CREATE | REPLACE, body + _text(1, "tbf") + _attribute(2, options))

    def unthrottle(self, name: str) -> None:
        """Undo `throttle`."""
        self._ask(DELQDISC, 0, _queue.pack(0, socket.if_nametoindex(name), 0, ROOT, 0))

    # ---- inside ---------------------------------------------------------------------------------------

    @staticmethod
    def _neighbour_of(name: str, state: int, address: str) -> bytes:
        body = _neighbour.pack(socket.AF_INET, socket.if_nametoindex(name), state, 0, 0)
        return body + _attribute(1, socket.inet_aton(address))

    def _make_link(self, attributes: bytes) -> None:
        self._ask(NEWLINK, CREATE | EXCLUSIVE, _link.pack(0, 0, 0, 0, 0) + attributes)

    def _set_link(self, name: str, flags: int, mask: int, attributes: bytes) -> None:
        self._ask(NEWLINK, 0, _link.pack(0, 0, socket.if_nametoindex(name), flags, mask) + attributes)

    def _ask(self, kind: int, flags: int, body: bytes) -> None:
        self._serial += 1
        size = _header.size + len(body)
        self._socket.send(_header.pack(size, kind, REQUEST | ACK | flags, self._serial, 0) + body)
        reply = self._socket.recv(1 << 16)
        _, answer, _, _, _ = _header.unpack_from(reply)
        (code,) = struct.unpack_from("=i", reply, _header.size)
        if answer != ERROR or code:
            raise OSError(-code, os.strerror(-code))
