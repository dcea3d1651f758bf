"""A node's door: one event loop over a Unix socket.

Theory of operation. A *session* is one connection. It starts with Hello; a client that maps memory gets the
segments and the write end of a pipe, its *lifeline*. From then on each frame gets one reply, in order. An
instance (all sessions with one name) is alive while a session or a lifeline of it is open: when the last is
gone, no process can touch the memory any more, and everything that the instance held is freed at once.

    accept ─► Hello ─► requests … ─► closed by the peer, by a protocol error, by a frame that takes too long
                └─► lifeline ─► end of file

One bad client costs only itself: lengths are checked before anything is allocated, unfinished frames have a
deadline, a client that does not read its replies is not read from and nothing more of it is handled, and one
that sends many frames at once gets a few of them handled a turn. Out of descriptors, the node accepts nobody
for a while.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from headwater.errors import ProtocolError, RefusedError
from headwater.node.address import Listener, peer_user
from headwater.node.conductors import Remote
from headwater.node.driver import SPACES_MAX, SPACES_SHOWN, Node
from headwater.node.latency import Latency
from headwater.node.messages import (
    HEADER_BYTES,
    Hello,
    Message,
    Refused,
    Status,
    StatusReply,
    Watch,
    Wish,
    body_bytes,
    decode_request,
    encode,
)

log = logging.getLogger(__name__)

TICK_S = 0.5
FRAME_S = 10.0
LOG_S = 1.0
READ_BYTES = 256 << 10
PENDING_BYTES_MAX = 1 << 20
FRAMES_A_TURN = 32
READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
REFUSED_CHARS_MAX = 500


@dataclass(slots=True, eq=False)
class Session:
    """One connection: what was read and not yet handled, what was answered and not yet sent."""

    socket: socket.socket
    instance: str = ""
    received: bytearray = field(default_factory=bytearray)
    pending: bytearray = field(default_factory=bytearray)
    frame_since_s: float = 0.0
    events: int = select.EPOLLIN


class Server:
    """Serves a Node until `stop`; one thread runs `serve_forever`."""

    def __init__(self, node: Node, address: str | None = None) -> None:
        """Bind the socket; raises ConfigError if the address is taken or unusable."""
        self.node = node
        self.listener = Listener(address or node.config.socket)
        self.protocol_errors = 0
        self.turned_away = 0
        self.latencies: dict[str, Latency] = {}
        self._asked: deque[Future[dict[str, object]]] = deque()
        self._ended = False
        self._sessions: dict[int, Session] = {}
        self._lifelines: dict[int, str] = {}
        self._alive: dict[str, int] = {}
        self._backlog: dict[Session, None] = {}
        self._deaf = False
        self._complain_from_s = 0.0
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._stopping = False
        node.wake = self._wake
        self._epoll = select.epoll()
        self._epoll.register(self.listener.socket.fileno(), select.EPOLLIN)
        self._epoll.register(self._wake_read.fileno(), select.EPOLLIN)

    def __repr__(self) -> str:
        return f"Server({self.listener.path}, {len(self._sessions)} sessions, {len(self._lifelines)} lifelines)"

    @property
    def sessions(self) -> int:
        """Open connections."""
        return len(self._sessions)

    def stop(self) -> None:
        """Begin to drain: nothing new is leased or reserved, and the loop ends when nothing is held or after
        `node.drain_s`. May be called from a signal handler or another thread, and again."""
        # No lock: a second signal may interrupt the handler of the first right here.
        self._stopping = True
        self._wake()

    @property
    def calls(self) -> dict[str, int]:
        """Calls that were answered, by verb."""
        return {verb: sum(it.counts) for verb, it in self.latencies.items()}

    def ask(self) -> Future[dict[str, object]]:
        """The state, read by the loop between two requests, for other threads; cancelled once the server has ended."""
        asked: Future[dict[str, object]] = Future()
        self._asked.append(asked)
        self._wake()
        if self._ended:
            self._cancel_asked()
        return asked

    def status(self, spaces: int = SPACES_SHOWN) -> dict[str, object]:
        """The node's state and the door's: JSON-able, without keys, salts or tokens. For the loop's thread."""
        calls = {verb: {"counts": it.counts.copy(), "sum_s": it.sum_s} for verb, it in self.latencies.items()}
        return self.node.status(spaces) | {
            "sessions": len(self._sessions),
            "turned_away": self.turned_away,
            "protocol_errors": self.protocol_errors,
            "calls": calls,
        }

    def serve_forever(self) -> None:
        """Serve until stopped; then close all and free the node's memory."""
        clock, sessions = self.node.clock, self._sessions
        now = clock.now()
        next_tick_s = now + TICK_S
        drain_until_s = None
        try:
            while True:
                wait_s = 0.0 if self._backlog else max(min(next_tick_s, self.node.due_s) - now, 0.0)
                for descriptor, events in self._epoll.poll(0.02 if drain_until_s else wait_s):
                    session = sessions.get(descriptor)
                    if session is not None:
                        self._serve_session(session, events)
                    else:
                        self._serve_other(descriptor)
                if self._backlog:
                    for session in list(self._backlog):
                        self._serve_session(session, 0)
                self.node.settle()
                now = clock.now()
                self._tell_watchers(now)
                if now >= next_tick_s:
                    next_tick_s = now + TICK_S
                    self.node.expire()
                    self._close_slow(now)
                    self._listen()
                if self._stopping:
                    if drain_until_s is None:
                        self.node.draining = True
                        drain_until_s = now + self.node.config.drain_s
                    if now >= drain_until_s or self.node.quiet:
                        return
        finally:
            self._close()

    # ---- events ---------------------------------------------------------------------------------------

    def _serve_other(self, descriptor: int) -> None:
        if descriptor == self.listener.socket.fileno():
            self._accept()
        elif descriptor in self._lifelines:
            self._end_lifeline(descriptor)
        elif descriptor == self._wake_read.fileno():
            self._wake_read.recv(64)
            self._answer()

    def _accept(self) -> None:
        try:
            accepted, _ = self.listener.socket.accept()
        except OSError as error:  # the peer is gone again, or we are out of descriptors
            log.warning("cannot accept a connection: %s", error)
            # It stays in the queue and would wake us again at once, and for ever: wait until the next tick.
            self._deaf = True
            self._epoll.modify(self.listener.socket.fileno(), 0)
            return
        if len(self._sessions) >= self.node.config.max_sessions:
            self.turned_away += 1
            accepted.close()
            if self.node.clock.now() >= self._complain_from_s:
                self._complain_from_s = self.node.clock.now() + LOG_S
                limit = self.node.config.max_sessions
                log.warning("connection refused: node.max_sessions=%d reached (%d so far)", limit, self.turned_away)
            return
        accepted.setblocking(False)
        self._sessions[accepted.fileno()] = Session(accepted, frame_since_s=self.node.clock.now())
        self._epoll.register(accepted.fileno(), select.EPOLLIN)

    def _listen(self) -> None:
        if self._deaf:
            self._deaf = False
            self._epoll.modify(self.listener.socket.fileno(), select.EPOLLIN)

    def _serve_session(self, session: Session, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._flush(session)
            if events & READABLE and self._read(session):
                return
            self._handle_frames(session)
        except ProtocolError as error:
            self._close_bad(session, str(error))
        except OSError:  # the peer is gone
            self._close_session(session)

    def _read(self, session: Session) -> bool:
        """Read what there is; True if that was one frame, with nothing before it, and has been handled."""
        try:
            count = session.socket.recv_into(self._buffer)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError
        received = session.received
        if not received:
            # Nearly always a request comes alone and whole: then it is handled where it lies.
            if count >= HEADER_BYTES and not session.pending and count == HEADER_BYTES + body_bytes(self._buffer):
                self._handle(session, self._buffer[HEADER_BYTES:count])
                return True
            if session.instance:  # until Hello is there, its time runs from the connection on
                session.frame_since_s = self.node.clock.now()
        received += self._buffer[:count]
        return False

    def _handle_frames(self, session: Session) -> None:
        """Handle whole frames; what does not fit into this turn, or would be answered into a full buffer, waits."""
        received, start, more = session.received, 0, False
        for turn in range(FRAMES_A_TURN + 1):
            if len(received) - start < HEADER_BYTES or len(session.pending) >= PENDING_BYTES_MAX:
                break
            end = start + HEADER_BYTES + body_bytes(received[start : start + HEADER_BYTES])
            if len(received) < end:
                break
            if turn == FRAMES_A_TURN:
                more = True
                break
            self._handle(session, bytes(received[start + HEADER_BYTES : end]))
            start = end
        if start:
            del received[:start]
            session.frame_since_s = self.node.clock.now()
        if more != (session in self._backlog):
            if more:
                self._backlog[session] = None
            else:
                del self._backlog[session]
            self._watch(session)

    def _handle(self, session: Session, body: bytes | memoryview) -> None:
        request = decode_request(body)
        try:
            if isinstance(request, Hello):
                self._greet(session, request)
                return
            if not session.instance:
                raise ProtocolError("the first message must be Hello")
            if self.node.watching.waits(session):
                raise ProtocolError("a request while a Watch waits to be answered")
            if isinstance(request, Watch):
                self._check_operator(session)
                self.node.watching.ask(session, request, self.node.clock.now())
                return
            started_s = self.node.clock.now()
            reply: Message
            if isinstance(request, Status):
                reply = StatusReply(msgspec.json.encode(self.status()))
            elif isinstance(request, Wish):
                self._check_operator(session)
                reply = self.node.wish(request)
            else:
                reply = self.node.handle(session.instance, request)
            verb = type(request).__name__
            if verb not in self.latencies:
                self.latencies[verb] = Latency()
            self.latencies[verb].add(self.node.clock.now() - started_s)
        except RefusedError as error:
            self.node.refused += 1
            texts = (error.field, error.expected, error.given, error.remedy)
            reply = Refused(*(text[:REFUSED_CHARS_MAX] for text in texts))
        self._send(session, reply)

    @staticmethod
    def _check_operator(session: Session) -> None:
        """Only the node's own user and root may look at and change what is everybody's."""
        user = peer_user(session.socket)
        if user not in (0, os.geteuid()):
            raise RefusedError("user", f"{os.geteuid()}, who runs the node, or root", f"{user}", "ask as that user")

    def _greet(self, session: Session, hello: Hello) -> None:
        if session.instance:
            raise ProtocolError("a second Hello")
        welcome = self.node.welcome(hello)
        if hello.maps and len(self._lifelines) >= self.node.config.max_sessions:
            raise RefusedError(
                "lifelines",
                f"at most node.max_sessions={self.node.config.max_sessions} processes that map the memory",
                "one more",
                "raise node.max_sessions",
            )
        session.instance = hello.instance
        self._hold(hello.instance)
        if not hello.maps:
            self._send(session, welcome)
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lifelines[ours] = hello.instance
        self._hold(hello.instance)
        self._epoll.register(ours, select.EPOLLIN)
        try:
            frame = encode(welcome)
            # A fresh connection's buffer is empty: a few hundred bytes always fit.
            sent = socket.send_fds(session.socket, [frame], [*self.node.memory.descriptors, theirs])
            if sent != len(frame):
                raise ConnectionResetError
        finally:
            os.close(theirs)

    # ---- sending --------------------------------------------------------------------------------------

    def _tell_watchers(self, now: float) -> None:
        if not len(self.node.watching):
            return
        for watcher, answer in list(self.node.watching.answers(now)):
            if isinstance(watcher, Remote):
                self.node.conductors.tell(watcher, answer, now)
                continue
            assert isinstance(watcher, Session)
            try:
                self._send(watcher, answer)
            except OSError:  # the peer is gone
                self._close_session(watcher)

    def _send(self, session: Session, message: Message) -> None:
        frame = encode(message)
        if not session.pending:
            try:
                sent = session.socket.send(frame)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return
            frame = frame[sent:]
        session.pending += frame
        self._watch(session)

    def _flush(self, session: Session) -> None:
        try:
            sent = session.socket.send(session.pending)
        except BlockingIOError:
            return
        del session.pending[:sent]
        self._watch(session)

    def _watch(self, session: Session) -> None:
        """Read only from clients that read our replies and have had their turn."""
        events = select.EPOLLOUT if session.pending else 0
        if len(session.pending) < PENDING_BYTES_MAX and session not in self._backlog:
            events |= select.EPOLLIN
        if events != session.events:
            session.events = events
            self._epoll.modify(session.socket.fileno(), events)

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:  # it is awake already, or it has ended
            return

    def _answer(self) -> None:
        while self._asked:
            asked = self._asked.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_result(self.status(SPACES_MAX))

    def _cancel_asked(self) -> None:
        while self._asked:
            try:
                self._asked.popleft().cancel()
            except IndexError:  # two threads cancel at once
                return

    # ---- ends -----------------------------------------------------------------------------------------

    def _hold(self, instance: str) -> None:
        self._alive[instance] = self._alive.get(instance, 0) + 1

    def _let_go(self, instance: str) -> None:
        self._alive[instance] -= 1
        if not self._alive[instance]:
            del self._alive[instance]
            freed = self.node.close_instance(instance)
            if freed:
                log.info("instance %r is gone; %d tickets freed", instance, freed)

    def _close_bad(self, session: Session, why: str) -> None:
        """Close a connection for what its client did; a crowd of such clients gets one line of log a second."""
        self.protocol_errors += 1
        now = self.node.clock.now()
        if now >= self._complain_from_s:
            self._complain_from_s = now + LOG_S
            count = self.protocol_errors
            log.warning("closing a connection of %r: %s (%d such so far)", session.instance, why, count)
        self._close_session(session)

    def _close_session(self, session: Session) -> None:
        descriptor = session.socket.fileno()
        self._epoll.unregister(descriptor)
        del self._sessions[descriptor]
        self._backlog.pop(session, None)
        self.node.watching.left(session)
        session.socket.close()
        if session.instance:
            self._let_go(session.instance)

    def _end_lifeline(self, descriptor: int) -> None:
        if self._is_open(descriptor):
            return
        instance = self._lifelines.pop(descriptor)
        self._epoll.unregister(descriptor)
        os.close(descriptor)
        self._let_go(instance)

    @staticmethod
    def _is_open(descriptor: int) -> bool:
        """Whether somebody still holds the other end; bytes that a client wrote are thrown away."""
        try:
            return bool(os.read(descriptor, 4096))
        except BlockingIOError:
            return True

    def _close_slow(self, now: float) -> None:
        late = [
            it
            for it in self._sessions.values()
            if now - it.frame_since_s > FRAME_S and (it.received or not it.instance)
        ]
        for session in late:
            self._close_bad(session, f"no whole frame within {FRAME_S:.0f} s")

    def _close(self) -> None:
        for session in list(self._sessions.values()):
            self._close_session(session)
        for descriptor in list(self._lifelines):
            self._epoll.unregister(descriptor)
            os.close(descriptor)
        self._lifelines.clear()
        self._epoll.close()
        self.listener.close()
        self._wake_read.close()
        self._wake_write.close()
        self._ended = True
        self._cancel_asked()
        self.node.close()


class EmbeddedServer:
    """A Node served by a thread of this process: what an engine has when no node is configured."""

    def __init__(self, node: Node, address: str) -> None:
        self._server = Server(node, address)
        self._thread = threading.Thread(target=self._server.serve_forever, name="headwater-node", daemon=True)
        self._thread.start()

    @property
    def server(self) -> Server:
        """The server, for its sums."""
        return self._server

    def close(self) -> None:
        """Drain and end the thread."""
        self._server.stop()
        self._thread.join()
