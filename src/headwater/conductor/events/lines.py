"""Connections to nodes: over the Unix socket of one of this host, or as a peer to one of its cluster elsewhere.

Both take one question at a time; what is behind them, watches and errands, does not know which it is. Deadlines are the
caller's. A node elsewhere is reached where nodes reach each other, and both sides prove that they are of the cluster
(`transports.handshake`); lengths are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import ssl
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from headwater.conductor.events import frames
from headwater.conductor.events.frames import PROTOCOL, TOPIC, Hello, Message, Refused, Reply, Watched, Welcome
from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.transports import wire
from headwater.transports.credentials import Credentials
from headwater.transports.handshake import ALERT, Introduction, check_certified, not_encrypted
from headwater.transports.wire import Kind
from headwater.types import Member
from headwater.values import split_address
from headwater.version import VERSION

ANSWER_S = 4.0
"""How long a node elsewhere may take for an answer; it says so if it cannot."""
ENDED = "the node has ended the connection"
T = TypeVar("T", Welcome, Watched)


class Line(Protocol):
    """A connection to a node."""

    async def ask(self, message: Message) -> Reply:
        """One question and its answer. Raises RefusedError, ProtocolError, UnavailableError, OSError; only after
        RefusedError it is good for another one."""

    def close(self) -> None:
        """End it."""


Dial = Callable[[], Awaitable[Line]]
"""Connects to a node. Raises as `ask` does."""


def by_socket(address: str) -> Dial:
    """To a node of this host, at unix:/path."""
    path = address.removeprefix("unix:")

    async def dial() -> Line:
        reader, writer = await asyncio.open_unix_connection(path)
        line = SocketLine(reader, writer)
        me = f"conductor.{random.randbytes(8).hex()}"
        try:
            expect(Welcome, await line.ask(Hello(PROTOCOL, VERSION, me, maps=False)))
        except BaseException:
            line.close()
            raise
        return line

    return dial


def by_peers(me: Member, peer: Member, cluster: str, credentials: Credentials) -> Dial:
    """To a node of the cluster, as a member called `me`, which is in no directory. Without credentials only loopback
    is trusted."""

    async def dial() -> Line:
        host, port = split_address(peer.address)
        if not port.isdecimal():
            raise UnavailableError("it listens nowhere for peers")
        try:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=credentials.client_tls)
            line = PeerLine(reader, writer, credentials)
            try:
                await line.introduce(me, peer, cluster)
            except BaseException:
                line.close()
                raise
        except ssl.SSLCertVerificationError as error:
            raise _distrusted("a certificate of tls_ca", error.verify_message) from None
        except ssl.SSLError as error:
            raise _distrusted("certificates that both sides take", error.reason or "another answer") from None
        except (ValueError, OverflowError):  # a label that is none, a zero byte, a port beyond 65535
            raise UnavailableError("it is listed with an address that is none") from None
        return line

    return dial


def expect(kind: type[T], reply: Reply) -> T:
    """A reply of the kind that was asked for; raises RefusedError or ProtocolError."""
    if isinstance(reply, Refused):
        raise RefusedError(reply.field, reply.expected, reply.given, reply.remedy)
    if not isinstance(reply, kind):
        raise ProtocolError(f"{type(reply).__name__} where {kind.__name__} was expected")
    return reply


class SocketLine:
    """See `Line`: to a node of this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, message: Message) -> Reply:
        """See `Line`."""
        _check_open(self._writer)
        self._writer.write(frames.encode(message))
        await self._writer.drain()
        size = frames.body_bytes(await _read(self._reader, frames.HEADER_BYTES))
        return frames.decode(await _read(self._reader, size))

    def close(self) -> None:
        """See `Line`."""
        self._writer.close()


class PeerLine:
    """See `Line`: to a node elsewhere, once it is introduced."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials) -> None:
        self._reader, self._writer, self._credentials = reader, writer, credentials
        self._protocol, self._seed = wire.HANDSHAKE, 0
        self._sent = self._received = 0
        self._session = os.urandom(frames.SESSION_BYTES)

    async def introduce(self, me: Member, peer: Member, cluster: str) -> None:
        """Prove who we are, and see that exactly this life of this member is there. Raises as `ask` does."""
        if self._credentials.client_tls is not None:
            check_certified(self._writer.get_extra_info("peercert"), peer.name)
        elif not self._credentials and not _is_loopback(self._writer.get_extra_info("peername")):
            raise UnavailableError("without a token or certificates only loopback is trusted")
        words = Introduction(me, peer, cluster, self._credentials, "tcp")
        await self._say(Kind.HELLO, words.hello)
        await self._say(Kind.PROOF, words.prove(await self._hear(Kind.CHALLENGE, wire.MOST_GREETING)))
        words.believe(await self._hear(Kind.WELCOME, wire.MOST_GREETING))
        self._protocol, self._seed = words.protocol, words.seed

    async def ask(self, message: Message) -> Reply:
        """See `Line`."""
        letter = frames.encode_letter(self._session, message)
        await self._say(Kind.ASK, wire.encode_message(wire.Ask(TOPIC, ANSWER_S, letter)))
        return frames.decode(await self._hear(Kind.ANSWER, wire.MOST_MESSAGE))

    def close(self) -> None:
        """See `Line`; at once, as TLS would take leave first."""
        self._writer.transport.abort()

    async def _say(self, kind: Kind, body: bytes) -> None:
        _check_open(self._writer)
        self._sent += 1
        self._writer.writelines(wire.encode_frame(self._protocol, kind, self._sent - 1, body, self._seed))
        await self._writer.drain()

    async def _hear(self, due: Kind, most_bytes: int) -> bytes:
        header = await _read(self._reader, wire.HEADER_BYTES)
        kind, length, content = wire.decode_header(header, self._protocol, self._received, most_bytes, self._seed)
        self._received += 1
        padded = await _read(self._reader, length + wire.padding(length))
        wire.check_body(padded, content, self._seed)
        body = padded[:length]
        if kind is Kind.REFUSED:
            raise wire.decode_refused(body)
        if kind is Kind.BUSY:
            raise UnavailableError(f"not now: {body[: wire.MOST_TEXT].decode('utf-8', 'replace')}")
        if kind is not due:
            raise ProtocolError(f"{kind.name} where {due.name} was due")
        return body


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        if error.partial.startswith(ALERT):
            raise not_encrypted() from None
        raise ConnectionResetError(ENDED) from None


def _check_open(writer: asyncio.StreamWriter) -> None:
    """The other end may have closed it since it was used; event loops do not agree on what writing does then."""
    if writer.is_closing():
        raise ConnectionResetError(ENDED)


def _is_loopback(peer: object) -> bool:
    return isinstance(peer, tuple) and ipaddress.ip_address(str(peer[0]).partition("%")[0]).is_loopback


def _distrusted(expected: str, given: str) -> RefusedError:
    return RefusedError("tls", expected, given, "compare tls_cert and tls_ca of both sides, and their last days")
