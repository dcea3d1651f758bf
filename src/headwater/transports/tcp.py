"""Peers anywhere: one request, then outcomes, then the bytes, from the holder's memory straight into ours."""

from __future__ import annotations

import ipaddress
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.ports import Item
from headwater.transports.credentials import Credentials
from headwater.transports.handshake import introduce
from headwater.transports.link import Asker, Busy
from headwater.transports.payloads import receive_payloads, send_payloads
from headwater.transports.stream import BUFFER_BYTES, Stream, prepare
from headwater.transports.wire import (
    HEADER_BYTES,
    Batch,
    Kind,
    decode_statuses,
    encode_batch,
    padding,
)
from headwater.types import Member, Outcome
from headwater.values import split_address

CONNECT_S = 1.0
COPIED_BYTES = 16 << 10
"""So much is copied faster than the kernel is called once more."""


class Tcp:
    """Connects to other nodes' TCP listeners. `checksums=False` leaves the payloads' checksums out, for who checks them
    itself."""

    name = "tcp"

    def __init__(
        self, me: Callable[[], Member] | Member, cluster: str, credentials: Credentials, *, checksums: bool = True
    ) -> None:
        self._me, self._cluster, self._credentials, self._checksums = me, cluster, credentials, checksums

    def connect(self, peer: Member, until_s: float) -> TcpLink:
        """See `ports.Transport`."""
        until_s = min(until_s, time.monotonic() + CONNECT_S)
        me = self._me() if callable(self._me) else self._me
        connected = open_socket(peer, self._credentials, until_s)
        stream = Stream(connected, f"{peer.name} at {peer.address}")
        try:
            introduce(stream, me, peer, self._cluster, self._credentials, until_s, self.name)
        except (RefusedError, UnavailableError):
            stream.close()
            raise
        return TcpLink(stream, peer, checksums=self._checksums)

    def close(self) -> None:
        """See `ports.Transport`."""


class TcpLink(Asker):
    """A connection over which payloads are moved; see `ports.Link`."""

    def __init__(self, stream: Stream, peer: Member, *, checksums: bool = True) -> None:
        super().__init__(stream, peer)
        self._checksums = checksums
        self.corrupt = 0
        """Payloads whose checksum was wrong when they had arrived."""

    def read(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        sizes = [len(it.memory) for it in items]
        names = [it.name for it in items]
        request = encode_batch(Batch(realm, names, sizes, until_s - time.monotonic(), self._checksums))
        self.stream.say(Kind.READ, request, until_s)
        try:
            body = self.answer(Kind.STATUSES, until_s, _ahead_bytes(len(items), sum(sizes)))
            outcomes = decode_statuses(body, len(items))
            memories = [it.memory for it, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.DONE]
            if not memories:
                return outcomes
            right, late = receive_payloads(self.stream, memories, checked=self._checksums, until_s=until_s)
        except Busy:
            return [Outcome.FAILED] * len(items)
        except ProtocolError as error:
            self.stream.shut()
            raise UnavailableError(str(error)) from None
        except (BufferError, TypeError, ValueError):  # memory that cannot be received into: what comes is nobody's
            self.stream.shut()
            raise
        if late:
            return [Outcome.FAILED if it is Outcome.DONE else it for it in outcomes]
        if not all(right):
            self.corrupt += len(right) - sum(right)
            verdicts = iter(right)
            return [Outcome.CORRUPT if it is Outcome.DONE and not next(verdicts) else it for it in outcomes]
        return outcomes

    def write(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        memories = [it.memory for it in items]
        sizes = [len(it) for it in memories]
        names = [it.name for it in items]
        request = encode_batch(Batch(realm, names, sizes, until_s - time.monotonic(), self._checksums))
        head = self.stream.frame(Kind.WRITE, request)
        known = [None] * len(items)
        checked, never = self._checksums, math.inf
        send_payloads(self.stream, head, memories, known, checked=checked, deadline_s=never, until_s=until_s)
        try:
            return decode_statuses(self.answer(Kind.STATUSES, until_s), len(items))
        except Busy:
            return [Outcome.FAILED] * len(items)
        except ProtocolError as error:
            self.stream.shut()
            raise UnavailableError(str(error)) from None


def _ahead_bytes(count: int, size: int) -> int:
    """How much of an answer to receive at once: all of a small one, of a large one nothing that has to be copied."""
    return BUFFER_BYTES if size <= COPIED_BYTES else HEADER_BYTES + count + padding(count)


def open_socket(peer: Member, credentials: Credentials, until_s: float) -> socket.socket:
    """A connected, encrypted if need be, socket to a member's TCP address. Raises UnavailableError, RefusedError."""
    error: Exception = TimeoutError("it did not answer in time")
    try:
        for family, address in _addresses(peer.address, until_s):
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            if not credentials and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
                # Nothing would prove that a member is there, whatever the directory says.
                error = OSError("without a token or certificates only loopback is trusted")
                continue
            try:
                return _connect_to(family, address, credentials, left_s)
            except ssl.SSLCertVerificationError as failed:
                given = failed.verify_message
                remedy = "compare tls_ca with who signed the peer's certificate, and its last day"
                raise RefusedError("tls", "a certificate of tls_ca", given, remedy) from None
            except OSError as failed:
                error = failed
    except (OSError, UnicodeError, ValueError) as failed:
        error = failed
    raise UnavailableError(f"cannot connect to {peer.name} at {peer.address}: {error or 'no answer in time'}") from None


def _connect_to(family: int, address: Any, credentials: Credentials, left_s: float) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare(made)
        made.settimeout(left_s)
        made.connect(address)
        if credentials.client_tls is not None:
            return credentials.client_tls.wrap_socket(made)
    except OSError:
        made.close()
        raise
    return made


# ---- names --------------------------------------------------------------------------------------------

_lock = threading.Lock()
MOST_LOOKUPS = 64
_lookups: dict[str, Future[list[tuple[int, Any]]]] = {}
"""Hosts that are being looked up."""


def _addresses(address: str, until_s: float) -> list[tuple[int, Any]]:
    """Where HOST:PORT is. A name is looked up by a thread of its own, because the system's resolver takes as long as it
    likes; raises OSError, ValueError."""
    host, port = split_address(address)
    try:
        return _look_up(host, int(port), socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name
        pass
    with _lock:
        found = _lookups.get(address)
        if found is None:
            if len(_lookups) >= MOST_LOOKUPS:
                raise OSError(f"{MOST_LOOKUPS} names are being looked up already")
            found = Future()
            thread = threading.Thread(target=_look_up_for, args=(address, found), name="headwater-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(f"no thread to look up {host}: {error}") from None
            _lookups[address] = found
    return found.result(max(until_s - time.monotonic(), 0.0))


def _look_up_for(address: str, found: Future[list[tuple[int, Any]]]) -> None:
    host, port = split_address(address)
    failure: Exception = OSError(f"{host} cannot be looked up")
    answers: list[tuple[int, Any]] | None = None
    try:
        answers = _look_up(host, int(port), 0)
    except (OSError, UnicodeError) as error:
        failure = error
    finally:
        with _lock:
            _lookups.pop(address, None)
        if answers is not None:
            found.set_result(answers)
        else:
            found.set_exception(failure)


def _look_up(host: str, port: int, flags: int) -> list[tuple[int, Any]]:
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in answers]
