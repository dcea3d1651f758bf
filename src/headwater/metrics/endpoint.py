"""A node's read-only HTTP door on loopback: /metrics, /status, /health, /ready.

Theory of operation. One thread with its own event loop; it asks the node's loop for the state and never touches
it itself. A connection carries one request: it is read within REQUEST_S and REQUEST_BYTES, answered within
REQUEST_S and closed, so that a slow client costs one of CONNECTIONS places for that long and nobody else waits.

    /health   200 while the node's loop answers within ANSWER_S; restart the node otherwise
    /ready    200 while it also takes new loads and saves (not draining)
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from headwater.errors import ConfigError
from headwater.metrics.exposition import State, public_state, render

Ask = Callable[[], "Future[State]"]

CONNECTIONS = 32
REQUEST_S = 5.0
REQUEST_BYTES = 8192
ANSWER_S = 1.0
_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]{0,1000}) HTTP/1\.[01]\r\n")
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """The door; bound as soon as it is made, open from `start` to `close`."""

    def __init__(self, host: str, port: int) -> None:
        """Take the port; raises ConfigError if somebody has it."""
        try:
            self._socket = socket.create_server((host, port), family=_family(host), backlog=CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                f"node.metrics = {host}:{port}: {os.strerror(error.errno or 0)}; stop what listens there, "
                "choose another port, or set node.metrics to off"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-endpoint", daemon=True)
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        """Where the door is."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self, ask: Ask) -> None:
        """Open the door; `ask` is `Server.ask`."""
        self._ask = ask
        self._thread.start()

    def close(self) -> None:
        """Cut all connections, end the thread, give the port back. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
        self._socket.close()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=REQUEST_BYTES)
        await self._ending.wait()
        # Accept nobody, and let what is being accepted arrive: a connection in between would never be closed.
        self._loop.remove_reader(self._socket)
        while running := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in running & self._serving.keys():
                task.cancel()
            await asyncio.wait(running)
        server.close()
        await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next round

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(lambda ended: self._serving.pop(ended).transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(2 * REQUEST_S):
                writer.write(await self._reply(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except OSError:  # the client is gone, or too slow
            return

    async def _reply(self, reader: asyncio.StreamReader) -> bytes:
        if len(self._serving) > CONNECTIONS:
            return _response(503, "too many connections\n")
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(431, "request too large\n")
        except asyncio.IncompleteReadError:
            return _response(400, "not a request\n")
        match = _REQUEST.match(head)
        if match is None:
            return _response(400, "not a request\n")
        if match[1] not in (b"GET", b"HEAD"):
            return _response(405, "only GET\n", "Allow: GET, HEAD\r\n")
        response = await self._answer(match[2].partition(b"?")[0].decode())
        return response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if match[1] == b"HEAD" else response

    async def _answer(self, path: str) -> bytes:
        if path not in ("/metrics", "/status", "/health", "/ready"):
            return _response(404, "known here: /metrics /status /health /ready\n")
        try:
            async with asyncio.timeout(ANSWER_S):
                state = await asyncio.wrap_future(self._ask(), loop=self._loop)
        except (TimeoutError, asyncio.CancelledError):
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            return _response(503, f"the node did not answer within {ANSWER_S:.0f} s\n")
        if path == "/metrics":
            return _response(200, render(state).decode(), kind=_PROMETHEUS)
        if path == "/status":
            return _response(200, json.dumps(public_state(state)) + "\n", kind="application/json")
        if path == "/ready" and state["draining"]:
            return _response(503, "draining\n")
        return _response(200, "ok\n")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _response(status: int, body: str, more: str = "", kind: str = "text/plain; charset=utf-8") -> bytes:
    content = body.encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        f"Cache-Control: no-store\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + content


_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
