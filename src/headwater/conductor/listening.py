"""The sockets that a Conductor's workers listen on. The parent binds them, so that they outlive a worker.

Each place (`workers`) has its own, and all share one port (SO_REUSEPORT): the kernel spreads connections over the
places. A worker that replaces another listens on the same ones. Were each worker to bind its own, those connections
that the kernel had accepted for the old one, but which it had not taken yet when it closed its socket, would be reset.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from headwater.errors import ConfigError
from headwater.values import split_address


class Listening:
    """One place's sockets: bound, and listening from the first worker on. Nobody is served while none is there."""

    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT; a name may have several addresses. Raises ConfigError."""
        host, port = split_address(address)
        self._sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, where in dict.fromkeys(found):
                self._bind(socket.socket(family, kind, protocol), where)
        except OSError as error:
            self.close()
            raise ConfigError(f"conductor.listen={address}: {error.strerror or error}; choose another") from error

    def __repr__(self) -> str:
        return f"Listening({self.descriptors})"

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For a worker to inherit."""
        return tuple(it.fileno() for it in self._sockets)

    def close(self) -> None:
        """Whoever still listens here goes on; if nobody does, connections are refused from now on."""
        for it in self._sockets:
            it.close()
        self._sockets.clear()

    def _bind(self, it: socket.socket, where: object) -> None:
        self._sockets.append(it)
        it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if it.family == socket.AF_INET6:
            it.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        it.bind(where)  # type: ignore[arg-type]


def inherited(descriptors: Sequence[int]) -> list[socket.socket]:
    """What a worker was given."""
    return [socket.socket(fileno=it) for it in descriptors]
