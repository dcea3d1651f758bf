"""A connection as frames and payloads: blocking, for one thread at a time, with a deadline for everything.

The kernel does the waiting (SO_RCVTIMEO, SO_SNDTIMEO, MSG_WAITALL), so that megabytes cost one call. Payloads go from
and into memory as it lies there. After any error the connection is shut and never used again.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from headwater.errors import ProtocolError, UnavailableError
from headwater.transports.wire import (
    HANDSHAKE,
    HEADER_BYTES,
    MOST_BODY,
    Kind,
    check_body,
    decode_header,
    encode_frame,
    padding,
)

Buffer: TypeAlias = Any
"""bytes, bytearray, memoryview or uint8[n]; of arrays, type checkers do not know before Python 3.12 that they are."""

ARM_S = 0.005
"""How much later than its deadline a call may end because its timer was not set anew."""
BUFFER_BYTES = 64 << 10
MOST_PARTS = 1000
"""Buffers in one call; the kernel takes 1024."""
SCRATCH_BYTES = 256 << 10
IDLE_S, PROBE_S, PROBES = 1, 1, 3
"""Keepalive: a connection whose other end is gone is found out this fast."""
_timeval = struct.Struct("@ll")


class Stream:
    """Frames over a connected socket, which it owns. `name` is for messages."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self.socket, self.name = connected, name
        self.protocol, self.seed = HANDSHAKE, 0
        self.bytes_in = self.bytes_out = 0
        self.is_local = connected.family == socket.AF_UNIX
        self._tls = isinstance(connected, ssl.SSLSocket)
        self._sent = self._received = 0
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._armed = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}
        self.alert = ""
        """What a TLS peer said when it refused us."""
        self._shut = False
        if not self._tls:
            connected.setblocking(True)

    def __repr__(self) -> str:
        return f"Stream({self.name}, protocol {self.protocol}, {self._sent} frames out, {self._received} in)"

    def shut(self) -> None:
        """From any thread: whoever waits here is woken, and nothing moves any more."""
        self._shut = True
        try:
            # Not SSLSocket.shutdown, which makes what comes next on an encrypted socket look like plain text.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        except OSError:  # it is gone already
            return

    def close(self) -> None:
        """Let go of the socket; no other thread may be in a call."""
        self._shut = True
        self.socket.close()

    def agree(self, protocol: int, seed: int) -> None:
        """The handshake is over: what all later frames are of."""
        self.protocol, self.seed = protocol, seed

    # ---- out --------------------------------------------------------------------------------------------

    def frame(self, kind: Kind, body: bytes) -> tuple[bytes, bytes]:
        """The next frame's two parts, for `send`, which must follow in this order."""
        self._sent += 1
        return encode_frame(self.protocol, kind, self._sent - 1, body, self.seed)

    def send(self, parts: Sequence[Buffer], until_s: float, *, more: bool = False) -> None:
        """Send all parts, from where they lie. Raises UnavailableError. `more` will be sent at once."""
        flags = socket.MSG_MORE if more else 0
        if len(parts) <= MOST_PARTS:
            self._send(parts, until_s, flags)
            return
        for first in range(0, len(parts), MOST_PARTS):
            self._send(parts[first : first + MOST_PARTS], until_s, flags)

    def say(self, kind: Kind, body: bytes, until_s: float) -> None:
        """Send one frame."""
        self.send(self.frame(kind, body), until_s)

    def say_with(self, kind: Kind, body: bytes, descriptors: Sequence[int], until_s: float) -> None:
        """Send one frame with descriptors beside it, on a Unix socket."""
        frame = b"".join(self.frame(kind, body))
        try:
            self._arm(socket.SO_SNDTIMEO, until_s)
            sent = socket.send_fds(self.socket, [frame], list(descriptors))
        except OSError as error:
            raise self._lost(error) from None
        self.bytes_out += sent
        if sent < len(frame):
            self._send([frame[sent:]], until_s, 0)

    def _send(self, parts: Sequence[Buffer], until_s: float, flags: int) -> None:
        if self._tls:
            self._send_tls(parts, until_s)
            return
        left = sum(map(len, parts))
        while left:
            try:
                self._arm(socket.SO_SNDTIMEO, until_s)
                sent = self.socket.sendmsg(parts, (), flags)
            except BlockingIOError:  # an earlier, shorter timer
                continue
            except OSError as error:
                raise self._lost(error) from None
            self.bytes_out += sent
            left -= sent
            if left:  # the timer, or a signal
                parts = _rest(parts, sent)

    def _send_tls(self, parts: Sequence[Buffer], until_s: float) -> None:
        for part in parts:
            view, done = memoryview(part).cast("B"), 0
            while done < len(view):
                try:
                    self._arm(socket.SO_SNDTIMEO, until_s)
                    sent = self.socket.send(view[done : done + SCRATCH_BYTES])
                except OSError as error:
                    raise self._lost(error) from None
                self.bytes_out += sent
                done += sent

    # ---- in ---------------------------------------------------------------------------------------------

    @property
    def buffered(self) -> int:
        """Bytes that have been received and not been taken."""
        return self._end - self._start

    def hear(
        self, until_s: float, most_bytes: int = MOST_BODY, ahead_bytes: int = BUFFER_BYTES
    ) -> tuple[Kind, memoryview]:
        """The next frame; its body is valid until the next call. Raises UnavailableError, ProtocolError.

        `ahead_bytes` are received at once: what is behind the frame has to be copied later, if it is a payload.
        """
        header = self._take(HEADER_BYTES, until_s, ahead_bytes)
        try:
            kind, length, content = decode_header(header, self.protocol, self._received, most_bytes, self.seed)
            self._received += 1
            padded = self._take(length + padding(length), until_s, 0)
            check_body(padded, content, self.seed)
        except ProtocolError as error:
            raise self.nonsense(str(error)) from None
        return kind, padded[:length]

    def hear_with(self, until_s: float, most_descriptors: int) -> tuple[Kind, memoryview, list[int]]:
        """The next frame and the descriptors beside it, which the caller closes; on a Unix socket."""
        assert self._start == self._end, "a frame with descriptors must come alone"
        descriptors: list[int] = []
        try:
            self._arm(socket.SO_RCVTIMEO, until_s)
            # Not socket.recv_fds: it drops the flag that keeps the descriptors from programs that this process starts.
            space = socket.CMSG_SPACE(most_descriptors * 4)
            first, ancillary, _, _ = self.socket.recvmsg(BUFFER_BYTES, space, socket.MSG_CMSG_CLOEXEC)
            rights = [it for level, kind, it in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
            whole = b"".join(it[: len(it) - len(it) % 4] for it in rights)
            descriptors = list(struct.unpack(f"@{len(whole) // 4}i", whole))
            if not first:
                raise ConnectionResetError("it closed the connection")
            self._start, self._end = 0, len(first)
            self._buffer[: len(first)] = first
            self.bytes_in += len(first)
            kind, body = self.hear(until_s)
        except BaseException as error:
            for it in descriptors:
                os.close(it)
            if isinstance(error, OSError):
                raise self._lost(error) from None
            raise
        return kind, body, descriptors

    def wait(self, tick_s: float, most_bytes: int = BUFFER_BYTES) -> bool:
        """Whether something has come; at most `tick_s` are waited. Raises UnavailableError."""
        if self._start < self._end:
            return True
        try:
            self._arm(socket.SO_RCVTIMEO, time.monotonic() + tick_s)
            size = self.socket.recv_into(self._buffer[:most_bytes])
        except (BlockingIOError, TimeoutError):
            if self._shut:
                raise self._lost(ConnectionResetError("it is being closed")) from None
            return False
        except OSError as error:
            raise self._lost(error) from None
        if not size:
            raise self._lost(ConnectionResetError("it closed the connection"))
        self._start, self._end = 0, size
        self.bytes_in += size
        return True

    def peek(self, size: int, until_s: float) -> bytes:
        """The next bytes, which stay where they are: `size`, or fewer if no more come at once. Raises as `hear`."""
        while not self.wait(max(until_s - time.monotonic(), 0.0), size):
            if time.monotonic() >= until_s:
                raise self._lost(TimeoutError())
        return bytes(self._buffer[self._start : min(self._start + size, self._end)])

    def fill(self, targets: Sequence[Buffer], until_s: float) -> None:
        """Receive what fills all targets, one after another. Raises UnavailableError."""
        if self._start < self._end:
            targets = self._fill_buffered(targets)
        for first in range(0, len(targets), MOST_PARTS):
            self._fill(targets[first : first + MOST_PARTS], until_s)

    def drain(self, size: int, until_s: float) -> None:
        """Throw away what comes next. Raises UnavailableError."""
        scratch = memoryview(bytearray(min(size, SCRATCH_BYTES)))
        while size > 0:
            step = min(size, len(scratch))
            self.fill([scratch[:step]], until_s)
            size -= step

    def room(self, length: int) -> memoryview:
        """Room for a frame with a body of `length` bytes, to be filled behind payloads; see `accept`."""
        return memoryview(bytearray(HEADER_BYTES + length + padding(length)))

    def accept(self, room: memoryview, due: Kind) -> memoryview:
        """The body of the frame that was received into a `room`. Raises ProtocolError."""
        header, padded = room[:HEADER_BYTES], room[HEADER_BYTES:]
        try:
            kind, length, content = decode_header(header, self.protocol, self._received, len(padded), self.seed)
            if kind is not due or length + padding(length) != len(padded):
                raise ProtocolError(f"{kind.name} of {length} bytes where {due.name} was due")
            check_body(padded, content, self.seed)
        except ProtocolError as error:
            raise self.nonsense(str(error)) from None
        self._received += 1
        return padded[:length]

    def nonsense(self, what: str) -> ProtocolError:
        """The error to raise when what came is not the protocol; the connection is shut."""
        self.shut()
        return ProtocolError(f"{self.name}: {what}")

    def _take(self, size: int, until_s: float, ahead_bytes: int) -> memoryview:
        """The next `size` bytes: in the buffer if they fit, else in memory of their own."""
        have = self._end - self._start
        if size > BUFFER_BYTES:
            taken = memoryview(bytearray(size))
            self.fill([taken], until_s)
            return taken
        if have < size:
            if self._start + max(size, ahead_bytes) > BUFFER_BYTES or not have:
                self._buffer[:have] = bytes(self._buffer[self._start : self._end])
                self._start, self._end = 0, have
            while self._end - self._start < size:
                most = min(self._start + max(size, ahead_bytes), BUFFER_BYTES)
                self._end += self._receive([self._buffer[self._end : most]], until_s, 0)
        taken = self._buffer[self._start : self._start + size]
        self._start += size
        return taken

    def _fill_buffered(self, targets: Sequence[Buffer]) -> list[Buffer]:
        left: list[Buffer] = []
        for it in targets:
            have = min(self._end - self._start, len(it))
            if have:
                view = memoryview(it)
                view[:have] = self._buffer[self._start : self._start + have]
                self._start += have
                it = view[have:]
            left.append(it)
        return left

    def _fill(self, targets: Sequence[Buffer], until_s: float) -> None:
        if self._tls:  # by records of 16 KiB at most
            for it in targets:
                view, done = memoryview(it), 0
                while done < len(view):
                    done += self._receive([view[done:]], until_s, 0)
            return
        left = sum(map(len, targets))
        while left:
            size = self._receive(targets, until_s, socket.MSG_WAITALL)
            left -= size
            if left:
                targets = _rest(targets, size)

    def _receive(self, targets: Sequence[Buffer], until_s: float, flags: int) -> int:
        while True:
            try:
                self._arm(socket.SO_RCVTIMEO, until_s)
                if self._tls:
                    size = self.socket.recv_into(targets[0])
                elif len(targets) == 1:
                    size = self.socket.recv_into(targets[0], 0, flags)
                else:
                    size = self.socket.recvmsg_into(targets, 0, flags)[0]
            except BlockingIOError:  # an earlier, shorter timer
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not size:
                raise self._lost(ConnectionResetError("it closed the connection"))
            self.bytes_in += size
            return size

    # ---- time and ends ----------------------------------------------------------------------------------

    def _arm(self, option: int, until_s: float) -> None:
        """Let the kernel end the next call in time. One that ends too early is begun again, so a timer is good as long
        as it is not too long and not far too short."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._shut:
            raise ConnectionAbortedError("it was ended here")
        if self._tls:
            self.socket.settimeout(left_s)
        elif not left_s / 2 <= self._armed[option] <= left_s + ARM_S:
            whole = int(left_s)
            self.socket.setsockopt(socket.SOL_SOCKET, option, _timeval.pack(whole, int((left_s - whole) * 1e6) or 1))
            self._armed[option] = left_s

    def _lost(self, error: OSError) -> UnavailableError:
        self.shut()
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            self.alert = error.reason.replace("_", " ").lower()
        late = isinstance(error, TimeoutError | BlockingIOError)
        why = "did not answer in time" if late else f"broke the connection: {error}"
        return UnavailableError(f"{self.name} {why}")


def prepare(connected: socket.socket) -> None:
    """Set up a TCP socket: nothing waits for more to come, and an end that is gone is found out."""
    if connected.family == socket.AF_UNIX:
        return
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, IDLE_S),
        (socket.TCP_KEEPINTVL, PROBE_S),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, PROBES * PROBE_S * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _rest(parts: Sequence[Buffer], done: int) -> list[Buffer]:
    """What is left of parts of which `done` bytes are through."""
    left: list[Buffer] = []
    for part in parts:
        if done >= len(part):
            done -= len(part)
        else:
            left.append(memoryview(part)[done:])
            done = 0
    return left
