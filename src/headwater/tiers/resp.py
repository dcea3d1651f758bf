"""One connection to Redis or Valkey that moves big values between the socket and memory without copies.

A request goes out as one `sendmsg` over the caller's memory; a value comes in by `recv_into` the caller's memory. The
kernel does the waiting (SO_RCVTIMEO, MSG_WAITALL), so that half a megabyte costs one call. Only RESP2 is spoken, the
dialect of every server. A length is compared with what is expected before a byte is received, so that no reply makes
us allocate.

After any error the connection is closed and never used again: a late reply must not be taken for another's.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headwater.errors import UnavailableError
from headwater.tiers.endpoint import Endpoint, connect

Buffer = bytes | memoryview
Reply: TypeAlias = "int | bytes | list[Reply] | ServerError | None"

ARM_S = 0.005
LINE_BYTES = 64 << 10
_BUFFER_BYTES = 2 * LINE_BYTES
_AHEAD_BYTES = 64
"""What is received beyond a value has to be copied into the next one, so little is asked for at a time."""
_MOST_PARTS = 1000
"""Buffers in one sendmsg; the kernel takes 1024."""
MOST_REPLY_BYTES = 64 << 20
"""Of one reply, with all that is in it; a thousand members that say as much as they may are fewer."""
_ITEM_BYTES = 64
"""What an item of a reply counts for, besides its content."""
LARGEST_VALUE = 512 << 20
"""What servers keep under one key at most."""
_NUMBERS = {b":0": 0, b":1": 1}
"""What most replies are."""
_timeval = struct.Struct("@ll")

RIGHTS = "~headwater:* +ping +select +get +getex +set +exists +unlink +scan +info"
"""What a user of ours must be allowed, in the words of ACL SETUSER."""
BROKEN = ("NOAUTH", "WRONGPASS", "NOPERM", "LOADING", "MASTERDOWN", "READONLY", "MISCONF", "NOREPLICAS", "CLUSTERDOWN",
          "MOVED", "BUSY", "NOPROTO", "DENIED")  # fmt: skip
"""The first words of error replies that say that the server as a whole cannot serve us now."""


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error reply. `code` is its first word."""

    code: str
    text: str


class Received(enum.Enum):
    """What a reply was."""

    VALUE = "value"
    OTHER_LENGTH = "other length"
    NOTHING = "nothing"


class Connection:
    """A logged-in connection for one thread at a time; every call ends by `until_s` or raises UnavailableError."""

    def __init__(self, endpoint: Endpoint, until_s: float) -> None:
        """Connect and log in. Raises UnavailableError."""
        self._endpoint = endpoint
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        self._left_bytes = 0
        self._tls = endpoint.tls is not None
        self._armed: dict[int, float] = {}
        self._armed_at = -ARM_S
        self._socket = connect(endpoint, until_s)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        try:
            self._log_in(until_s)
        except UnavailableError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()

    def send(self, parts: Sequence[Buffer], until_s: float) -> None:
        """Send all parts; they may be changed afterwards."""
        for first in range(0, len(parts), _MOST_PARTS):
            self._send(parts[first : first + _MOST_PARTS], until_s)

    def call(self, *arguments: bytes, until_s: float) -> Reply:
        """One command and its reply, an error reply included."""
        self.send([command(*arguments)], until_s)
        return self.reply(until_s)

    def reply(self, until_s: float, most_bytes: int = LINE_BYTES) -> Reply:
        """The next reply, of at most `most_bytes` in each of its strings and MOST_REPLY_BYTES in all, no deeper than a
        list in a list."""
        self._left_bytes = MOST_REPLY_BYTES
        return self._reply(until_s, most_bytes, 0)

    def _reply(self, until_s: float, most_bytes: int, depth: int) -> Reply:
        line = self._line(until_s, LINE_BYTES)
        kind, rest = line[:1], line[1:]
        self._count(len(rest))
        if kind == b"+":
            return rest
        if kind == b":":
            return self._number(rest)
        if kind == b"-":
            return _error(rest)
        if kind == b"$":
            length = self._number(rest)
            return None if length == -1 else self._string(length, most_bytes, until_s)
        if kind == b"*":
            count = self._number(rest)
            if count < -1 or depth > 1:
                raise self._nonsense(f"an array of {count} at depth {depth}")
            self._count(max(count, 0) * _ITEM_BYTES)
            return None if count == -1 else [self._reply(until_s, most_bytes, depth + 1) for _ in range(count)]
        raise self._nonsense(f"a reply that starts with {kind!r}")

    def integers(self, count: int, until_s: float) -> list[int | ServerError]:
        """The next `count` replies, each a number; hundreds cost little more than one."""
        found: list[int | ServerError] = []
        while len(found) < count:
            lines = [self._line(until_s, LINE_BYTES)]
            end = self._bytes.rfind(b"\r\n", self._start, self._end) + 2
            if end > self._start:
                *more, rest = bytes(self._buffer[self._start : end]).split(b"\r\n", count - len(found) - 1)
                lines += more
                self._start = end - len(rest)
            found += [self._integer(it) if (known := _NUMBERS.get(it)) is None else known for it in lines]
        return found

    def _integer(self, line: bytes) -> int | ServerError:
        if line[:1] == b"-":
            return _error(line[1:])
        if line[:1] != b":":
            raise self._nonsense(f"{line[:16]!r} for a number")
        return self._number(line[1:])

    def receive(self, target: memoryview, until_s: float) -> Received | ServerError:
        """Receive the next reply, a string, into `target`, if it has exactly that length; else throw it away."""
        line = self._line(until_s, _AHEAD_BYTES)
        if line[:1] == b"-":
            return _error(line[1:])
        length = self._number(line[1:]) if line[:1] == b"$" else -2
        if length == -1:
            return Received.NOTHING
        if not 0 <= length <= LARGEST_VALUE:
            raise self._nonsense(f"{line[:24]!r} for a value")
        if length == len(target):
            have = min(self._end - self._start, length)
            target[:have] = self._buffer[self._start : self._start + have]
            self._start += have
            self._fill(target[have:], until_s)
        else:
            self._skip(length, until_s)
        if self._line(until_s, _AHEAD_BYTES):
            raise self._nonsense("a value without an end")
        return Received.VALUE if length == len(target) else Received.OTHER_LENGTH

    def _skip(self, length: int, until_s: float) -> None:
        while length > 0:
            if self._start == self._end:
                self._more(until_s, min(length, LINE_BYTES))
            step = min(length, self._end - self._start)
            self._start += step
            length -= step

    def is_stale(self) -> bool:
        """Whether an idle connection is gone: nothing may come while nothing was asked."""
        return bool(self._poll.poll(0))

    def _log_in(self, until_s: float) -> None:
        it = self._endpoint
        if it.password or it.user:
            words = [it.user.encode(), it.password.encode()] if it.user else [it.password.encode()]
            self._must(b"OK", self.call(b"AUTH", *words, until_s=until_s), "user and password", secret=True)
        if it.database:
            self._must(b"OK", self.call(b"SELECT", b"%d" % it.database, until_s=until_s), "the database")
        reply = self.call(b"PING", until_s=until_s)
        if not (isinstance(reply, ServerError) and reply.code == "NOPERM"):
            self._must(b"PONG", reply, "the connection")

    def _must(self, expected: bytes, reply: Reply, what: str, secret: bool = False) -> None:
        if isinstance(reply, ServerError):
            # What a server says to a login may repeat the password.
            why = explain(ServerError(reply.code, "")) if secret else explain(reply)
            raise UnavailableError(f"{self._endpoint.name} refuses {what}: {why}")
        if reply != expected:
            raise self._nonsense(f"another reply than {expected!r}")

    def _string(self, length: int, most_bytes: int, until_s: float) -> bytes:
        if not 0 <= length <= most_bytes:
            raise self._nonsense(f"a string of {length} bytes")
        self._count(length)
        content = bytearray(length)
        have = min(self._end - self._start, length)
        content[:have] = self._buffer[self._start : self._start + have]
        self._start += have
        self._fill(memoryview(content)[have:], until_s)
        if self._line(until_s, LINE_BYTES):
            raise self._nonsense("a string without an end")
        return bytes(content)

    def _count(self, size: int) -> None:
        """So many bytes of the reply have come, or are about to."""
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise self._nonsense(f"a reply of more than {MOST_REPLY_BYTES} bytes")

    def _number(self, digits: bytes) -> int:
        if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
            raise self._nonsense(f"{digits[:24]!r} for a number")
        return int(digits)

    def _line(self, until_s: float, ahead_bytes: int) -> bytes:
        searched = self._start
        while (found := self._bytes.find(b"\r\n", searched, self._end)) < 0:
            if self._end - self._start >= LINE_BYTES:
                raise self._nonsense("a line without an end")
            searched = max(self._start, self._end - 1)
            moved = self._more(until_s, ahead_bytes)
            searched -= moved
        line = bytes(self._buffer[self._start : found])
        self._start = found + 2
        return line

    def _more(self, until_s: float, most_bytes: int) -> int:
        """Receive some bytes into the buffer; how far its content moved to the front for that."""
        moved = 0
        if self._start == self._end:
            moved, self._start, self._end = self._start, 0, 0
        elif self._end + most_bytes > _BUFFER_BYTES:
            moved, size = self._start, self._end - self._start
            self._buffer[:size] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, size
        self._end += self._receive(self._buffer[self._end : self._end + most_bytes], until_s, 0)
        return moved

    def _fill(self, target: memoryview, until_s: float) -> None:
        done = 0
        while done < len(target):
            done += self._receive(target[done:], until_s, socket.MSG_WAITALL)

    def _receive(self, target: memoryview, until_s: float, flags: int) -> int:
        try:
            self._arm(until_s, socket.SO_RCVTIMEO)
            size = self._socket.recv_into(target) if self._tls else self._socket.recv_into(target, len(target), flags)
        except OSError as error:
            raise self._lost(error) from None
        if size == 0:
            raise self._lost(ConnectionResetError("it closed the connection"))
        return size

    def _send(self, parts: Sequence[Buffer], until_s: float) -> None:
        try:
            self._arm(until_s, socket.SO_SNDTIMEO)
            if self._tls:
                for part in parts:
                    self._socket.sendall(part)
                return
            size = sum(map(len, parts))
            sent = self._socket.sendmsg(parts)
        except OSError as error:
            raise self._lost(error) from None
        # A blocking socket sends all, unless its time was over or a signal came.
        while sent < size:
            parts = _rest(parts, sent)
            size -= sent
            try:
                self._arm(until_s, socket.SO_SNDTIMEO)
                sent = self._socket.sendmsg(parts)
            except OSError as error:
                raise self._lost(error) from None

    def _arm(self, until_s: float, option: int) -> None:
        """Let the kernel end the next call in time; a timer that is right to ARM_S is left as it is."""
        now = time.monotonic()
        left_s = until_s - now
        if left_s <= 0:
            raise TimeoutError
        if self._tls:
            self._socket.settimeout(left_s)
        elif self._armed.get(option, -1.0) != until_s or now - self._armed_at > ARM_S:
            whole = int(left_s)
            self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval.pack(whole, int((left_s - whole) * 1e6) or 1))
            if now - self._armed_at > ARM_S:
                self._armed.clear()
                self._armed_at = now
            self._armed[option] = until_s

    def _lost(self, error: OSError) -> UnavailableError:
        self.close()
        late = isinstance(error, TimeoutError | BlockingIOError)
        why = "did not answer in time" if late else f"broke the connection: {error}"
        return UnavailableError(f"{self._endpoint.name} {why}")

    def _nonsense(self, what: str) -> UnavailableError:
        self.close()
        return UnavailableError(f"{self._endpoint.name} does not speak the protocol of Redis: {what}")


def command(*arguments: bytes) -> bytes:
    """A command as it goes over the wire."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%s\r\n" % (len(it), it) for it in arguments)


def explain(error: ServerError) -> str:
    """An error reply in words for an operator."""
    remedy = {
        "NOAUTH": "it wants a password; put user and password into the URL",
        "WRONGPASS": "user and password do not fit",
        "NOPERM": f"the user may not do this; it needs {RIGHTS}",
        "LOADING": "it is still reading its data",
        "READONLY": "it is a replica, which takes no writes; name the primary",
        "MISCONF": "it cannot save its data to disk and takes no writes",
        "MASTERDOWN": "it is a replica that has lost its primary",
        "MOVED": "it is one node of a cluster, which is not supported; name a single server",
    }.get(error.code)
    return f"{error.code}: {remedy}" if remedy else f"{error.code} {error.text}"[:200]


def _error(rest: bytes) -> ServerError:
    code, _, words = rest.decode("utf-8", "replace").partition(" ")
    return ServerError(code[:32], words[:200])


def _rest(parts: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What is left of parts of which `sent` bytes went out."""
    left: list[Buffer] = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            left.append(memoryview(part)[sent:])
            sent = 0
    return left
