"""Where a Redis or Valkey server is, and the socket that leads there."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import UnavailableError

CONNECT_S = 1.0
Address = tuple[Any, ...] | str
_lock = threading.Lock()
_lookups: dict[tuple[str, int], Future[list[tuple[int, Address]]]] = {}
"""Names that are being looked up."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is and how one logs in. `name` is for messages; user and password never are."""

    name: str
    host: str = ""
    port: int = 0
    path: str = ""
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    database: int = 0
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def connect(endpoint: Endpoint, until_s: float) -> socket.socket:
    """A connected socket, encrypted if need be; tries each address of the host. Raises UnavailableError."""
    until_s = min(until_s, time.monotonic() + CONNECT_S)
    error: Exception = TimeoutError("no time was left")
    try:
        for family, address in _addresses(endpoint, until_s):
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            try:
                return _connect_to(family, address, endpoint, left_s)
            except OSError as failed:
                error = failed
    except (OSError, UnicodeError) as failed:  # no such name, or none at all
        error = failed
    raise UnavailableError(f"cannot connect to {endpoint.name}: {str(error) or 'it did not answer in time'}") from None


def _addresses(endpoint: Endpoint, until_s: float) -> list[tuple[int, Address]]:
    """Where the host is. The system's resolver takes as long as it likes, so it has a thread of its own, which whoever
    asks next waits for as well; raises TimeoutError."""
    if endpoint.path:
        return [(socket.AF_UNIX, endpoint.path)]
    name = endpoint.host, endpoint.port
    with _lock:
        found = _lookups.get(name)
        if found is None:
            found = _lookups[name] = Future()
            thread = threading.Thread(target=_look_up, args=(*name, found), name="headwater-lookup", daemon=True)
            thread.start()
    return found.result(max(until_s - time.monotonic(), 0.0))


def _look_up(host: str, port: int, found: Future[list[tuple[int, Address]]]) -> None:
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        failure: Exception | None = error
    else:
        failure = None
    with _lock:
        _lookups.pop((host, port), None)
    if failure is None:
        found.set_result([(family, address) for family, _, _, _, address in answers])
    else:
        found.set_exception(failure)


def _connect_to(family: int, address: Address, endpoint: Endpoint, left_s: float) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.settimeout(left_s)
        made.connect(address)
        if family != socket.AF_UNIX:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.tls is not None:
            return endpoint.tls.wrap_socket(made, server_hostname=endpoint.host)
        made.settimeout(None)
    except OSError:
        made.close()
        raise
    return made
