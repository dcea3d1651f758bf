"""HTTP with one server: every exchange ends by a deadline, or when another thread closes; every failure is typed."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from headwater.errors import ConfigError, RefusedError, UnavailableError
from headwater.places import mask

CONNECT_S = 5.0
LINE_BYTES = 1 << 20
BODY_BYTES = 16 << 20
SAID_CHARACTERS = 300


class Exchanges:
    """Requests to one server. Threads may share it; `key` is sent and never shown."""

    def __init__(self, url: str, key: str | None) -> None:
        self._secure, self._host, self._port, self._path = parts(url)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http{'s' if self._secure else ''}://{shown}:{self._port}{self._path}"
        self._key = key
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.ended = threading.Event()
        """Set by `close`."""

    def close(self) -> None:
        """End all exchanges under way, which raise UnavailableError; no further ones begin."""
        with self._lock:
            self.ended.set()
            for it in self._open:
                _shut(it)

    @contextmanager
    def exchange(self, path: str, within_s: float, body: dict[str, Any] | None = None) -> Iterator[Lines]:
        """The lines of a response with status 200 to a GET, or to a POST if there is a body.

        Raises RefusedError or UnavailableError, also for what goes wrong while the caller reads.
        """
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        deadline_s = time.monotonic() + within_s
        connection = kind(self._host, self._port, timeout=min(CONNECT_S, within_s))
        link: socket.socket | None = None
        try:
            connection.connect()
            link = connection.sock
            link.settimeout(max(deadline_s - time.monotonic(), 0.001))
            self._begin(link)
            sent_s = time.monotonic()
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", f"{self._path}{path}", content, headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise self._refusal(response.status, path, response.read(LINE_BYTES))
            yield Lines(response, sent_s, deadline_s)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self.url}: {self._why(error)}") from error
        finally:
            if link is not None:
                with self._lock:
                    self._open.discard(link)
                _shut(link)
            connection.close()

    def get(self, path: str, within_s: float) -> str:
        """A whole answer; raises as `exchange` does."""
        with self.exchange(path, within_s) as lines:
            return lines.response.read(BODY_BYTES).decode(errors="replace")

    def said(self, text: str) -> str:
        """What the server says, short, on one line, and without the key if it repeats that."""
        line = " ".join(text.split())
        return (line.replace(self._key, "***") if self._key else line)[:SAID_CHARACTERS]

    def _begin(self, link: socket.socket) -> None:
        with self._lock:
            if self.ended.is_set():
                raise UnavailableError(f"{self.url}: ended by the caller")
            self._open.add(link)

    def _why(self, error: Exception) -> str:
        if self.ended.is_set():
            return "ended by the caller"
        if isinstance(error, TimeoutError):
            return "no whole answer in time"
        return str(error) or repr(error)

    def _refusal(self, status: int, path: str, said: bytes) -> RefusedError | UnavailableError:
        given = f"{status} at {path}: {self.said(said.decode(errors='replace'))}"
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            had = "one that it refuses" if self._key else "none"
            return RefusedError("API key", "one that the server takes", had, "name its variable with --api-key-env")
        if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY):
            return RefusedError("request", "one that the server takes", given, "see what it says")
        if status < http.client.INTERNAL_SERVER_ERROR and status != http.client.TOO_MANY_REQUESTS:
            return RefusedError("URL", "an OpenAI-compatible server", given, "check the URL")
        return UnavailableError(f"{self.url}: {given}")


class Lines:
    """A response read by line; `sent_s` is when its request was sent, on the clock of time.monotonic."""

    def __init__(self, response: http.client.HTTPResponse, sent_s: float, deadline_s: float) -> None:
        self.response, self.sent_s, self._deadline_s = response, sent_s, deadline_s

    def __iter__(self) -> Iterator[tuple[bytes, float]]:
        """Each line and when it came."""
        while line := self.response.readline(LINE_BYTES):
            now_s = time.monotonic()
            if now_s > self._deadline_s:
                raise TimeoutError
            yield line, now_s


def parts(url: str) -> tuple[bool, str, int, str]:
    """Whether it is encrypted, host, port, and the path before /v1; raises ConfigError."""
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError as error:
        raise ConfigError(f"URL {mask(url)!r}: {error}") from None
    if split.scheme not in ("http", "https") or not split.hostname:
        raise ConfigError(f"URL {mask(url)!r}: not one as in http://127.0.0.1:8000")
    if split.username is not None or split.password is not None:
        raise ConfigError(f"URL {mask(url)!r}: name the variable that has the key with --api-key-env instead")
    if split.query or split.fragment:
        raise ConfigError(f"URL {mask(url)!r}: leave out what begins with ? or #")
    secure = split.scheme == "https"
    return secure, split.hostname, port or (443 if secure else 80), split.path.rstrip("/").removesuffix("/v1")


def _shut(link: socket.socket) -> None:
    """Wake whoever waits for the socket."""
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was first
