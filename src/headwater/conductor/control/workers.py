"""The workers as their parent sees them: a heartbeat of each, kept, and questions to all of them with a deadline.

Theory of operation. Each worker that runs has one task, which asks for its beat each BEAT_S and keeps what it said
and when. Probes read what was kept: a worker that is busy or stuck makes its own beat old, and nothing else wait. A
question goes to the workers side by side, each with ASK_S; who is late is left out and named.

A worker with a pid that was not seen before (a new one, or one that was restarted) knows nothing of what registered
at run time, so its task first tells it. `registered` is the only thing here that no worker could say; it is lost with
the parent.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from headwater.conductor.control.indexer import Gone, Publisher
from headwater.conductor.control.worker import socket_path
from headwater.errors import UnavailableError

BEAT_S = 0.5
ASK_S = 1.0
FRESH_S = 3.0
"""Who was not heard for so long is not counted as ready."""
ANSWER_BYTES = 64 << 20
CONNECTIONS = 16
REGISTERED = 4096
State = dict[str, Any]


class Answer(NamedTuple):
    """A worker's status and body."""

    status: int
    body: bytes

    def json(self) -> State:
        """Its body; raises UnavailableError if it is none of ours."""
        try:
            found = json.loads(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UnavailableError(f"a worker answered {self.status} with what is no JSON object")
        return found


class Workers:
    """All of them. Everything here runs in the parent's loop."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        """`clock` is the loop's."""
        self._directory, self._clock = directory, clock
        self._ones: dict[int, _One] = {}
        self.registered: dict[tuple[str, str, int], bytes] = {}
        """What registered at run time, by instance, tenant and rank, as it was sent."""

    def started(self, row: int) -> None:
        """A worker was started: ask for its beat from now on."""
        if row not in self._ones:
            self._ones[row] = _One(row, socket_path(self._directory, row), self)

    async def gone(self, row: int) -> None:
        """A worker has ended and is not to come back."""
        one = self._ones.pop(row, None)
        if one is not None:
            await one.close()

    async def close(self) -> None:
        """Ask nobody any more."""
        ones, self._ones = list(self._ones.values()), {}
        await asyncio.gather(*(one.close() for one in ones))

    def beats(self) -> Mapping[int, State | None]:
        """What each worker said last; None if that is too long ago, or nothing was heard yet."""
        now = self._clock()
        return {row: one.beat if now - one.heard_s <= FRESH_S else None for row, one in sorted(self._ones.items())}

    def silent_s(self) -> Mapping[int, float | None]:
        """How long ago each worker was heard."""
        now = self._clock()
        return {row: now - one.heard_s if one.beat is not None else None for row, one in self._ones.items()}

    async def ask(self, row: int, method: str, path: str, body: bytes | None = None) -> Answer:
        """Ask one worker; raises UnavailableError after ASK_S at the latest."""
        one = self._ones.get(row)
        if one is None:
            raise UnavailableError(f"worker {row} is not running")
        return await one.ask(method, path, body)

    async def ask_all(self, method: str, path: str, body: bytes | None = None) -> dict[int, Answer | UnavailableError]:
        """Ask all of them side by side; who does not answer is there with the reason."""
        rows = sorted(self._ones)
        found = await asyncio.gather(*(_or_error(self.ask(row, method, path, body)) for row in rows))
        return dict(zip(rows, found, strict=True))

    async def ask_until(self, method: str, path: str, status: int) -> tuple[Answer | None, list[int]]:
        """Ask all of them side by side until one answers with this status; else None, and who did not answer at all."""
        tasks = {asyncio.ensure_future(_or_error(self.ask(row, method, path))): row for row in sorted(self._ones)}
        silent = []
        try:
            for next_one in asyncio.as_completed(tasks):
                answer = await next_one
                if isinstance(answer, Answer) and answer.status == status:
                    return answer, []
            silent = [row for task, row in tasks.items() if isinstance(task.result(), UnavailableError)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return None, silent

    async def ask_any(self, method: str, path: str, body: bytes) -> Answer:
        """Ask one that is heard, and another one if it does not answer; raises UnavailableError."""
        heard = [row for row, beat in self.beats().items() if beat is not None]
        for row in heard:
            answer = await _or_error(self.ask(row, method, path, body))
            if isinstance(answer, Answer):
                return answer
        raise UnavailableError("no worker answers; see `headwater fleet`")

    def check_room(self, publisher: Publisher) -> None:
        """Whether one more can be remembered; raises UnavailableError."""
        if _name(publisher) not in self.registered and len(self.registered) >= REGISTERED:
            raise UnavailableError(f"{REGISTERED} publishers are registered already; unregister some")

    def remember(self, publisher: Publisher, body: bytes) -> None:
        """What a worker that is started later has to be told."""
        self.registered[_name(publisher)] = body

    def forget(self, gone: Gone) -> None:
        """What is not to be told any more."""
        for key in list(self.registered):
            if key[:2] == (gone.instance_id, gone.tenant_id) and gone.dp_rank in (None, key[2]):
                del self.registered[key]


class _One:
    """One worker: its connections, and the task that asks for its beat."""

    def __init__(self, row: int, path: Path, workers: Workers) -> None:
        self.beat: State | None = None
        self.heard_s = float("-inf")
        self._row, self._path, self._workers = row, path, workers
        self._told: object = None
        self._session: aiohttp.ClientSession | None = None
        self._task = asyncio.ensure_future(self._listen())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def ask(self, method: str, path: str, body: bytes | None) -> Answer:
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._path), limit=CONNECTIONS)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        data = None if body is None else io.BytesIO(body)
        try:
            async with (
                asyncio.timeout(ASK_S),
                self._session.request(method, "http://worker" + path, data=data, allow_redirects=False) as answer,
            ):
                return Answer(answer.status, await _bounded(answer.content))
        except TimeoutError:
            raise UnavailableError(f"worker {self._row} did not answer within {ASK_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"worker {self._row} does not answer: {type(error).__name__}") from None

    async def _listen(self) -> None:
        while True:
            began_s = self._workers._clock()
            try:
                beat = (await self.ask("GET", "/beat", None)).json()
                if beat.get("pid") != self._told:
                    await self._tell()
                    self._told = beat.get("pid")
                self.beat, self.heard_s = beat, self._workers._clock()
            except UnavailableError:
                pass  # what was heard grows old, which is what the probes look at
            await asyncio.sleep(max(0.0, began_s + BEAT_S - self._workers._clock()))

    async def _tell(self) -> None:
        for body in list(self._workers.registered.values()):
            await self.ask("POST", "/register", body)


def _name(publisher: Publisher) -> tuple[str, str, int]:
    return publisher.instance_id, publisher.tenant_id, publisher.dp_rank


async def _or_error(asked: Awaitable[Answer]) -> Answer | UnavailableError:
    try:
        return await asked
    except UnavailableError as error:
        return error


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        parts.append(part)
        size += len(part)
        if size > ANSWER_BYTES:
            raise aiohttp.ClientPayloadError("too long")
    return b"".join(parts)
