"""Where peers come in: one or two listeners, a thread for each connection, and nobody served who is not one of us.

    accept ─► TLS ─► handshake (2 s, 4 KiB, few at a time) ─► requests (`serving`) ─► the connection ends

A crowd of strangers costs a bounded number of threads for two seconds each; members that are connected are not touched
by it. What is not the protocol gets no answer.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import select
import socket
import ssl
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from headwater.errors import ConfigError, ProtocolError, RefusedError, UnavailableError
from headwater.ports import Exports
from headwater.transports.credentials import Credentials
from headwater.transports.handshake import GREETING_S, receive
from headwater.transports.serving import Counters, Serving
from headwater.transports.stream import Stream, prepare
from headwater.types import Member

log = logging.getLogger(__name__)

MOST_STRANGERS = 64
"""Connections that have not proven who they are, at a time."""
BACKLOG = 512
LOG_S = 1.0
SPEAKS_TLS = b"\x15\x03\x01\x00\x02\x02\x46"
"""What TLS says to plain text: the alert `protocol version`."""
LINGER_S, LINGER_READS = 0.5, 8
DEAF_S = 0.1
"""How long nobody is accepted after the host had no descriptor for it."""
_credentials = struct.Struct("3i")  # pid, user, group


class PeerServer:
    """Serves `exports` to the members of a cluster."""

    def __init__(
        self,
        me: Callable[[], Member] | Member,
        cluster: str,
        exports: Exports,
        credentials: Credentials,
        listen: tuple[str, int] | None,
        socket_path: str | None = None,
        max_connections: int = 1024,
    ) -> None:
        """Bind; raises ConfigError with the field, its value and the remedy. Nobody is accepted before `start`."""
        self._me, self._cluster, self._exports, self._credentials = me, cluster, exports, credentials
        self._most = max_connections
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Stream | None] = {}
        self._servings: set[Serving] = set()
        self._strangers: dict[threading.Thread, socket.socket] = {}
        self._ended = Counters()
        self._refused: Counter[str] = Counter()
        self._accepted = self._turned_away = self._protocol_errors = 0
        self._complain_from_s = 0.0
        self._stopping = False
        self._tcp = _listen(listen, credentials) if listen is not None else None
        self._unix: UnixListener | None = None
        try:
            self._unix = UnixListener(socket_path) if socket_path is not None else None
        except ConfigError:
            self._close_listeners()
            raise
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._accepting = threading.Thread(target=self._accept_forever, name="headwater-peers", daemon=True)

    def __repr__(self) -> str:
        where = ", ".join(it for it in (self.address, self.socket_path) if it)
        return f"PeerServer({where}, {len(self._servings)} peers, {len(self._strangers)} strangers)"

    @property
    def address(self) -> str:
        """HOST:PORT as it was bound, the real port included; empty without a TCP listener."""
        if self._tcp is None:
            return ""
        host, port = self._tcp.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def socket_path(self) -> str:
        """The path of the Unix listener; empty without one."""
        return str(self._unix.path) if self._unix else ""

    def start(self) -> None:
        """Begin to accept."""
        self._accepting.start()

    def close(self, until_s: float) -> None:
        """End all connections and wait for their threads until `until_s`; one that hangs in the exporter is left. Once:
        a second call does nothing."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            os.write(self._wake_write, b"x")
            streams = [it for it in self._threads.values() if it is not None]
        if self._accepting.ident is not None:
            self._accepting.join(max(until_s - time.monotonic(), 0.0))
        for stream in streams:
            stream.shut()
        for thread in list(self._threads):
            thread.join(max(until_s - time.monotonic(), 0.0))
        self._close_listeners()
        if not self._accepting.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def stats(self) -> dict[str, object]:
        """Sums since the start, and who is connected now."""
        with self._lock:
            sums = Counters()
            for it in (self._ended, *(serving.tally() for serving in self._servings)):
                sums.add(it)
            loans = sum(len(it.loans) for it in self._servings)
            return asdict(sums) | {
                "connections": len(self._servings),
                "strangers": len(self._strangers),
                "loans": loans,
                "accepted": self._accepted,
                "turned_away": self._turned_away,
                "protocol_errors": self._protocol_errors,
                "refused": dict(self._refused),
            }

    # ---- accepting ------------------------------------------------------------------------------------------

    def _accept_forever(self) -> None:
        poll = select.poll()
        listeners: dict[int, socket.socket] = {}
        for listener in (self._tcp, self._unix.socket if self._unix else None):
            if listener is not None:
                listeners[listener.fileno()] = listener
                poll.register(listener, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while not self._stopping:
            for descriptor, _ in poll.poll():
                if descriptor in listeners:
                    self._accept(listeners[descriptor])

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, address = listener.accept()
        except BlockingIOError:  # it is gone again
            return
        except OSError as error:
            self._complain("cannot accept a connection: %s", error)
            # It stays in the queue and would wake us again at once, and for ever.
            select.select([self._wake_read], [], [], DEAF_S)
            return
        name = f"{address[0]} port {address[1]}" if isinstance(address, tuple) else "a process of this host"
        with self._lock:
            full = len(self._threads) >= self._most or len(self._strangers) >= 2 * MOST_STRANGERS or self._stopping
            if not full:
                self._accepted += 1
                thread = threading.Thread(target=self._serve, args=(accepted, name), name="headwater-peer", daemon=True)
                self._threads[thread] = None
                self._strangers[thread] = accepted
                self._hurry_strangers()
        if not full:
            try:
                thread.start()
                return
            except RuntimeError as error:  # the host gives no more threads
                log.error("no thread for a connection: %s", error)
                with self._lock:
                    self._accepted -= 1
                    del self._threads[thread], self._strangers[thread]
        accepted.close()
        with self._lock:
            self._turned_away += 1
        self._complain("%s is turned away: %d connections, %d of strangers", name, self._most, len(self._strangers))

    def _hurry_strangers(self) -> None:
        """With too many strangers, those that have been here for longest go: members need only moments to prove
        themselves, also while a crowd says nothing."""
        for it in list(self._strangers.values())[: max(len(self._strangers) - MOST_STRANGERS, 0)]:
            with suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)

    def _serve(self, accepted: socket.socket, name: str) -> None:
        """A connection's life."""
        serving = None
        try:
            serving = self._greet(accepted, name)
            if serving is not None:
                serving.run()
        except ProtocolError as error:
            self._count_protocol_error(str(error))
        except UnavailableError as error:
            log.debug("connection ended: %s", error)
        finally:
            with self._lock:
                if serving is not None:
                    self._servings.discard(serving)
                    self._ended.add(serving.tally())
                    serving.stream.close()
                accepted.close()
                del self._threads[threading.current_thread()]

    def _greet(self, accepted: socket.socket, name: str) -> Serving | None:
        """TLS and the handshake; None if it is not one of us."""
        until_s = time.monotonic() + GREETING_S
        reason = ""
        stream = None
        try:
            prepare(accepted)
            stream = Stream(self._wrap(accepted), name)
            with self._lock:
                self._threads[threading.current_thread()] = stream
                if self._stopping:
                    stream.shut()
            self._check_user(accepted)
            self._encrypt(stream, until_s)
            me = self._me() if callable(self._me) else self._me
            guest = receive(stream, me, self._cluster, self._credentials, until_s)
            stream.name = f"{printable(guest.name)} at {name}"
            serving = Serving(stream, guest, self._exports)
            with self._lock:
                self._servings.add(serving)
            return serving
        except RefusedError as error:
            reason = error.field
            self._complain("%s is refused: %s", name, error)
        except ProtocolError as error:
            reason = "garbage"
            self._count_protocol_error(str(error))
        except UnavailableError:
            reason = "late" if time.monotonic() >= until_s else "gone"
        except OSError as error:  # among them what TLS does not like
            reason = "late" if isinstance(error, TimeoutError) else "tls" if isinstance(error, ssl.SSLError) else "gone"
            self._complain("%s is refused: %s", name, error)
            if stream is not None:
                _let_hear(stream.socket, error, until_s)
        finally:
            with self._lock:
                self._strangers.pop(threading.current_thread(), None)
                if reason:
                    self._refused[reason] += 1
                    if stream is not None:
                        self._ended.bytes_in += stream.bytes_in
                        self._ended.bytes_out += stream.bytes_out
        if stream is not None:
            stream.close()
        return None

    def _wrap(self, accepted: socket.socket) -> socket.socket:
        context = self._credentials.server_tls
        if context is None or accepted.family == socket.AF_UNIX:
            return accepted
        return context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)

    @staticmethod
    def _encrypt(stream: Stream, until_s: float) -> None:
        if isinstance(stream.socket, ssl.SSLSocket):
            stream.socket.settimeout(max(until_s - time.monotonic(), 0.001))
            stream.socket.do_handshake()

    @staticmethod
    def _check_user(accepted: socket.socket) -> None:
        if accepted.family != socket.AF_UNIX:
            return
        user = _credentials.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size))[1]
        if user not in (0, os.geteuid()):
            raise RefusedError("user", f"{os.geteuid()} or root", f"{user}", "run both nodes as one user")

    # ---- the rest -------------------------------------------------------------------------------------------

    def _count_protocol_error(self, why: str) -> None:
        with self._lock:
            self._protocol_errors += 1
        self._complain("closing a connection: %s", why)

    def _complain(self, text: str, *words: object) -> None:
        """Log, but a crowd gets one line a second."""
        now = time.monotonic()
        with self._lock:
            if now < self._complain_from_s:
                return
            self._complain_from_s = now + LOG_S
        log.warning(text, *(it if isinstance(it, int) else printable(str(it)) for it in words))

    def _close_listeners(self) -> None:
        if self._tcp is not None:
            self._tcp.close()
        if self._unix is not None:
            self._unix.close()


def printable(text: str) -> str:
    """A stranger's words for a log: in one line, and not too many."""
    return "".join(it if it.isprintable() else "?" for it in text[:400])


def _let_hear(refused: socket.socket, error: OSError, until_s: float) -> None:
    """Close our half, and wait for theirs: an end with bytes that nobody has read would take back what was said."""
    try:
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":  # of which OpenSSL says nothing
            socket.socket.send(refused, SPEAKS_TLS)
        socket.socket.shutdown(refused, socket.SHUT_WR)
        refused.settimeout(max(min(until_s - time.monotonic(), LINGER_S), 0.001))
        for _ in range(LINGER_READS):
            if not socket.socket.recv(refused, 4096):
                return
    except OSError:  # it is gone
        return


def _listen(where: tuple[str, int], credentials: Credentials) -> socket.socket:
    host, port = where
    shown = f"listen={host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0",  # noqa: S104 - refused below without credentials
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{shown}: no such host: {error}; name an address of this host") from None
    if not credentials and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{shown}: others can reach it, and there are no credentials; set token_file, or tls_cert, tls_key and "
            "tls_ca, or listen on 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{shown}: cannot bind: {error.strerror}; choose another address or port") from None
    return listener


class UnixListener:
    """A listening Unix socket that one process owns: mode 0600, in a private directory, guarded by a lock file."""

    def __init__(self, path: str) -> None:
        """Bind and listen; raises ConfigError if another process is there or the directory is not private."""
        self.path = Path(path)
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        shown = f"socket_path={path}"
        try:
            self._check_directory(shown)
            self._lock = self._take_lock()
        except BlockingIOError:
            raise ConfigError(f"{shown}: another process serves it; choose another path") from None
        except OSError as error:
            raise ConfigError(f"{shown}: {error}; choose a path in a directory of your own") from None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.path.unlink(missing_ok=True)  # ours by the lock: a stale socket of a process that was killed
            os.fchmod(self.socket.fileno(), 0o600)
            self.socket.bind(path)
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.close()
            raise ConfigError(f"{shown}: cannot bind: {error}; choose another path") from None

    def close(self) -> None:
        """Stop listening and leave nothing behind."""
        self.socket.close()
        self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _take_lock(self) -> int:
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), self._lock_path.stat()):
                    return lock
            except FileNotFoundError:
                pass
            except OSError:
                os.close(lock)
                raise
            os.close(lock)  # who was just stopping removed the file between our open and our lock

    def _check_directory(self, shown: str) -> None:
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        private = "use a directory of mode 0700 that this user owns"
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{shown}: {directory} belongs to user {found.st_uid}; {private}")
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise ConfigError(f"{shown}: {directory} is writable by others; {private}")
        if self.path.is_symlink() or self._lock_path.is_symlink():
            raise ConfigError(f"{shown}: it or its lock is a symbolic link; remove that")
        if self.path.exists() and not self.path.is_socket():
            raise ConfigError(f"{shown}: something that is no socket is there; choose another path")
