"""A subscription to what one rank of a vLLM engine publishes about its KV blocks, over ZeroMQ, in one event loop.

    SUB     [topic, number u64 big-endian, payload] ──► read_batch ──► Ordering ──► apply, forget
    DEALER  [b"", number] ──► the engine's ROUTER ──► [b"", (topic,) number, payload] ..., end: number -1
            one for each replay, so that nothing of an earlier one can be taken for it

Theory of operation. Sockets are read when their descriptors say so, a few frames a turn: a descriptor of ZeroMQ says so
once, not as long as there is something, so that a turn that stops early calls itself again. Both sockets have limits of
frames and of bytes a frame. ZeroMQ connects again by itself, with pauses from 0.1 to 5 s; what was lost meanwhile shows
as a gap, or at the next check.

A replay that has brought nothing for `REPLAY_S` has failed, and is tried again after a pause that doubles. An engine
that says nothing is asked after `CHECK_S` whether there is more than came, and then less and less often: each question
costs it a walk over all that it keeps. Nothing that an engine sends raises out of here.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import zmq

from headwater.conductor.events.batches import Batch, read_batch
from headwater.conductor.events.ordering import Ordering
from headwater.errors import ProtocolError

FRAMES_A_TURN = 32
FRAMES_MAX, REPLAYED_MAX = 4096, 32_768
"""Frames that wait to be read, of each socket."""
FRAME_BYTES_MAX = 8 << 20
REPLAY_S = 2.0
CHECK_S, CHECK_S_MAX = 5.0, 60.0
PAUSE_S, PAUSE_S_MAX = 0.1, 5.0
CONNECT_MS, CONNECT_MS_MAX = 100, 5000
END = (1 << 64) - 1
_number = struct.Struct(">Q")


class Subscription:
    """One publisher. `apply` gets its batches in order, each once; `forget` is called when what they said is void."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        events: str,
        replay: str | None,
        apply: Callable[[Batch], None],
        forget: Callable[[], None],
    ) -> None:
        """Begin; to be called in the running loop. `events` and `replay` are endpoints to connect to."""
        self._loop = asyncio.get_running_loop()
        self._context, self._events, self._replay_at = context, events, replay
        self.ordering = Ordering(apply, forget, replays=replay is not None)
        self.unreadable = 0
        """Messages that are no numbered frames at all."""
        self._closed = self._goes_on = False
        self._pause_s = PAUSE_S
        self._replay: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._applied, self._check_s = -1, CHECK_S
        self._check = self._loop.call_later(CHECK_S, self._check_on)
        self._socket = self._open(zmq.SUB, events, FRAMES_MAX, self._read)
        self._ask()

    def __repr__(self) -> str:
        return f"Subscription({self._events}, {self.ordering!r})"

    def again(self) -> None:
        """What was told is lost: have it told from the beginning, as far as the engine remembers."""
        if not self._closed:
            self._drop_replay()
            self.ordering.again()
            self._ask()

    def check(self) -> None:
        """Ask now whether there is more than came."""
        if not self._closed:
            self.ordering.check()
            self._ask()

    def state(self) -> dict[str, Any]:
        """For people."""
        return {
            "endpoint": self._events,
            "replays_from": self._replay_at,
            "next": self.ordering.next,
            "settled": self.ordering.is_settled,
            "unreadable": self.unreadable,
            **asdict(self.ordering.sums),
        }

    def close(self) -> None:
        """End it."""
        if self._closed:
            return
        self._closed = True
        self._check.cancel()
        self._drop_replay()
        self._shut(self._socket)

    # ---- sockets ----------------------------------------------------------------------------------------

    def _open(self, kind: int, endpoint: str, frames: int, read: Callable[[], None]) -> zmq.Socket[bytes]:
        it = self._context.socket(kind)
        it.setsockopt(zmq.LINGER, 0)
        it.setsockopt(zmq.RCVHWM, frames)
        it.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        it.setsockopt(zmq.RECONNECT_IVL, CONNECT_MS)
        it.setsockopt(zmq.RECONNECT_IVL_MAX, CONNECT_MS_MAX)
        it.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if kind == zmq.SUB:
            it.setsockopt(zmq.SUBSCRIBE, b"")
        it.connect(endpoint)
        self._loop.add_reader(int(it.getsockopt(zmq.FD)), read)
        self._loop.call_soon(read)
        return it

    def _shut(self, it: zmq.Socket[bytes]) -> None:
        self._loop.remove_reader(int(it.getsockopt(zmq.FD)))
        it.close(0)

    @staticmethod
    def _receive(it: zmq.Socket[bytes]) -> Sequence[bytes] | None:
        try:
            return it.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _read(self) -> None:
        if self._closed or self._goes_on:
            return
        for _ in range(FRAMES_A_TURN):
            parts = self._receive(self._socket)
            if parts is None:
                break
            number, batch = self._parse(parts[-2:])
            if number is not None and number != END:
                self.ordering.came(number, batch)
        else:
            self._goes_on = True
            self._loop.call_soon(self._read_on)
        self._ask()

    def _read_on(self) -> None:
        self._goes_on = False
        self._read()

    def _parse(self, parts: Sequence[bytes]) -> tuple[int | None, Batch | None]:
        """A number and its batch; no number: this is nothing of ours. No batch: it cannot be read."""
        if len(parts) != 2 or len(parts[0]) != _number.size:
            self.unreadable += 1
            return None, None
        number = _number.unpack(parts[0])[0]
        if number == END:
            return END, None
        try:
            return number, read_batch(parts[1])
        except ProtocolError:
            return number, None

    # ---- replays ----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Have the replay sent that is wanted, unless one is on its way or was tried a moment ago."""
        if self.ordering.wants is None or self._timer is not None or self._replay_at is None:
            return
        self._replay = self._open(zmq.DEALER, self._replay_at, REPLAYED_MAX, self._read_replay)
        self._timer = self._loop.call_later(REPLAY_S, self._failed)
        try:
            self._replay.send_multipart([b"", _number.pack(self.ordering.wants)], zmq.NOBLOCK)
        except zmq.Again:
            self._failed()

    def _read_replay(self) -> None:
        for _ in range(FRAMES_A_TURN):
            if self._replay is None:
                return
            parts = self._receive(self._replay)
            if parts is None:
                self._rest()
                return
            number, batch = self._parse(parts[-2:])
            if number == END:
                self._drop_replay()
                self._pause_s = PAUSE_S
                self.ordering.replay_ended()
                self._ask()
                return
            if number is not None:
                self.ordering.replayed(number, batch)
        self._rest()
        self._loop.call_soon(self._read_replay)

    def _rest(self) -> None:
        """It goes on: the deadline is that of its next frame."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(REPLAY_S, self._failed)

    def _drop_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._replay is not None:
            self._shut(self._replay)
            self._replay = None

    def _failed(self) -> None:
        self._drop_replay()
        self.ordering.replay_failed()
        self._timer = self._loop.call_later(self._pause_s, self._try_again)
        self._pause_s = min(self._pause_s * 2, PAUSE_S_MAX)

    def _try_again(self) -> None:
        self._timer = None
        self._ask()

    def _check_on(self) -> None:
        applied = self.ordering.sums.applied
        is_silent, self._applied = applied == self._applied, applied
        self._check_s = min(self._check_s * 2, CHECK_S_MAX) if is_silent else CHECK_S
        self._check = self._loop.call_later(self._check_s, self._check_on)
        if is_silent:
            self.check()


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Where a data-parallel rank publishes: so many ports further on. Raises ValueError for one without a port."""
    if not rank:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
