"""Keeps chunks in an object store (S3, GCS, Azure) or on a shared file system: one object for each chunk.

    PREFIX/CLUSTER/CODEC/RO/ROOT/GROUP/KEY        header page, then the payload; RO is the start of ROOT

An object appears whole or not at all. What a write that was cut off leaves behind (parts of a multipart upload, a file
NAME#NUMBER) is no object and is never read; a bucket's lifecycle rule or the file system's owner removes it. Only
`clear` lists anything: a chunk is asked for by its name. On a file system, writing stops while less than a twentieth of
it or 1 GiB is free; folders have mode 0700 and files 0600, unless the directory is shared with its group.

The library that talks to the store has no deadlines of its own for a call, so its calls run as tasks of an event loop
and are cancelled when their time is over. What such a task may still touch is its own copy, never HOST memory.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.errors import UnavailableError
from headwater.places import mask
from headwater.ports import Bytes, Piece
from headwater.tiers.codec import Codec, Plain, bring_back
from headwater.tiers.header import (
    Encoded,
    Unreadable,
    check_payload,
    payload_checksum,
    read_header,
    write_header,
)
from headwater.types import PAGE_BYTES, Identity, Origin, Outcome, Usage

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MULTIPART_BYTES = 16 << 20
"""Objects above this size go in parts of the half of it."""
HEADS_AT_ONCE = 32
SHARED_MODE = 0o2770
"""Folders that a group shares; what is made in them is the group's, too."""
RESERVE_BYTES = 1 << 30
RESERVE_SHARE = 20
PROBE = "probe"
_FULL = ("StorageFull", "No space left on device", "os error 28", "Disk quota exceeded", "os error 122", "507 ")
Work = Coroutine[Any, Any, Any]


class ObjectStoreTier:
    """One bucket, or one directory: then `directory` is its path, and how full its file system is counts.

    `name` is for messages. At most `connections` objects are under way for each call, and held in memory.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        codec: Codec | None = None,
        *,
        cluster: str = "default",
        connections: int = 2,
        directory: str | None = None,
        shared: bool = False,
    ) -> None:
        self._store, self._name, self._codec = store, name, codec or Plain()
        self._cluster, self._connections, self._directory = cluster, connections, directory
        self._folder_mode = SHARED_MODE if shared else 0o700
        self._folders: set[str] = set()
        import obstore

        self._obstore, self._in_doubt = obstore, True
        self._lock = threading.Lock()
        self._asked: Future[os.statvfs_result] = Future()
        self._asked.cancel()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headwater-object-store", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ObjectStoreTier({self._name}, cluster={self._cluster}, codec={self._codec.name})"

    def holds(self, identities: Sequence[Identity], until_s: float) -> list[bool]:
        """See `LowerTier`; what was not answered in time counts as absent."""
        self._check(until_s)
        work = self._heads([self._path(it) for it in identities], until_s)
        answers = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        self._raise_if_all_failed(answers)
        return [it is True for it in answers]

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        self._check(until_s)
        work = (self._get(self._path(it.identity), PAGE_BYTES + self._most_bytes(it.identity)) for it in pieces)
        answers: list[Outcome | UnavailableError] = []
        for piece, found in zip(pieces, self._run(work, until_s, self._connections), strict=True):
            answers.append(self._take(piece, found) if isinstance(found, memoryview) else found)
        return self._outcomes(answers)

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`; a store that was too slow may still finish, and then holds a whole chunk."""
        self._check(until_s)
        if self._directory and self._room(until_s) < sum(it.identity.length_bytes for it in pieces):
            return [Outcome.FULL] * len(pieces)
        work = (self._put_piece(it) for it in pieces)
        return self._outcomes(list(self._run(work, until_s, self._connections)))

    def delete(self, identities: Sequence[Identity], until_s: float) -> None:
        """See `LowerTier`."""
        self._check(until_s)
        for it in self._run((self._delete(self._path(it)) for it in identities), until_s, HEADS_AT_ONCE):
            if isinstance(it, UnavailableError):
                raise it

    def clear(self, origin: Origin, until_s: float) -> int:
        """See `LowerTier`; the one place where objects are listed."""
        self._check(until_s)
        [found] = self._run((self._clear(it) for it in (self._folder(origin),)), until_s, 1)
        if isinstance(found, UnavailableError):
            raise found
        return found if isinstance(found, int) else 0

    def usage(self, until_s: float) -> Usage:
        """See `LowerTier`."""
        self._check(until_s)
        if self._directory is None:
            [found] = self._run((self._probe(it) for it in (f"{self._cluster}/{PROBE}",)), until_s, 1)
            if found is not Outcome.DONE:
                raise found if isinstance(found, UnavailableError) else UnavailableError(f"{self._name}: {found}")
            return Usage(None, None)
        total_bytes, free_bytes = self._file_system(until_s)
        return Usage(total_bytes - _reserve(total_bytes), total_bytes - free_bytes)

    def close(self) -> None:
        """See `LowerTier`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Iterable[Work], until_s: float, at_once: int) -> Iterator[Any]:
        """The results in order, or UnavailableError as a value; `at_once` of them are under way or kept."""
        running: deque[Future[Any]] = deque()
        work = iter(work)
        try:
            while True:
                while len(running) < at_once and (following := next(work, None)) is not None:
                    running.append(asyncio.run_coroutine_threadsafe(self._bounded(following, until_s), self._loop))
                if not running:
                    return
                yield running.popleft().result()
        finally:
            for it in running:
                it.cancel()

    async def _bounded(self, work: Work, until_s: float) -> Any:
        """The result of one call to the store, whose every failure is a value."""
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                return await self._tried(work)
        except TimeoutError:
            return self._late()

    async def _tried(self, work: Work) -> Any:
        obstore = self._obstore
        try:
            return await work
        except FileNotFoundError:
            return Outcome.MISSING
        except (OSError, ValueError, obstore.exceptions.BaseError) as error:
            text = str(error)
            if any(it in text for it in _FULL):
                return Outcome.FULL
            return self._failed(f": {mask(text.splitlines()[0] if text else repr(error))[:300]}")

    async def _heads(self, paths: Sequence[str], until_s: float) -> list[bool | Outcome | UnavailableError]:
        """What each path's HEAD said, a few at a time; in one task, since there may be hundreds."""
        answers: list[bool | Outcome | UnavailableError | None] = [None] * len(paths)
        waiting = iter(enumerate(paths))

        async def ask() -> None:
            for at, path in waiting:
                answers[at] = await self._tried(self._head(path))

        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await asyncio.gather(*(ask() for _ in range(min(HEADS_AT_ONCE, len(paths)))))
        return [self._late() if it is None else it for it in answers]

    def _late(self) -> UnavailableError:
        return self._failed(" did not answer in time")

    def _failed(self, why: str) -> UnavailableError:
        self._in_doubt = True
        return UnavailableError(self._name + why)

    async def _head(self, path: str) -> bool:
        await self._obstore.head_async(self._store, path)
        return True

    async def _get(self, path: str, most_bytes: int) -> memoryview | Outcome:
        found = await self._obstore.get_async(self._store, path)
        if not PAGE_BYTES <= found.meta["size"] <= most_bytes:
            return Outcome.CORRUPT
        return memoryview(await found.bytes_async())

    async def _put(self, path: str, content: bytes | memoryview) -> Outcome | UnavailableError:
        multipart = len(content) > MULTIPART_BYTES
        folder = path.rpartition("/")[0]
        try:
            if self._directory and folder not in self._folders:
                await self._aside(self._make_folders, folder)
            await self._obstore.put_async(
                self._store, path, content, use_multipart=multipart, chunk_size=MULTIPART_BYTES // 2, max_concurrency=4
            )
        except FileNotFoundError:
            self._folders.clear()  # somebody has removed them
            return self._failed(" does not exist")
        if self._directory and self._folder_mode != SHARED_MODE:
            with suppress(FileNotFoundError):
                await self._aside(os.chmod, f"{self._directory}/{path}", 0o600)
        return Outcome.DONE

    async def _aside(self, call: Callable[..., None], *arguments: object) -> None:
        """Have a call that may hang carried out by a thread that nobody waits for longer than for this task."""
        answer: Future[None] = Future()

        def carry_out() -> None:
            try:
                call(*arguments)
            except OSError as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        threading.Thread(target=carry_out, name="headwater-files", daemon=True).start()
        await asyncio.shield(asyncio.wrap_future(answer))

    def _make_folders(self, folder: str) -> None:
        """A folder and those that it is in, with our mode instead of what the umask leaves of the library's."""
        place = self._directory or "/"
        for name in folder.split("/"):
            place = f"{place}/{name}"
            with suppress(FileExistsError):
                os.mkdir(place, 0o700)
                if self._folder_mode == SHARED_MODE:
                    os.chmod(place, SHARED_MODE)
        self._folders.add(folder)

    async def _probe(self, path: str) -> Outcome | UnavailableError:
        """Whether the store answers and, since writing costs money only after a failure, whether it takes writes."""
        if not self._in_doubt and await self._tried(self._head(path)) is True:
            return Outcome.DONE
        written: Outcome | UnavailableError = await self._tried(self._put(path, PROBE.encode()))
        self._in_doubt = written is not Outcome.DONE
        return written

    async def _delete(self, path: str) -> Outcome:
        await self._obstore.delete_async(self._store, path)
        return Outcome.DONE

    async def _clear(self, folder: str) -> int:
        found = 0
        async for page in self._obstore.list(self._store, prefix=folder):
            await self._obstore.delete_async(self._store, [it["path"] for it in page])
            found += len(page)
        return found

    async def _none(self) -> Outcome:
        return Outcome.REFUSED

    def _put_piece(self, piece: Piece) -> Work:
        """A copy of a chunk behind its header page, on its way."""
        identity = piece.identity
        content: Bytes = np.empty(PAGE_BYTES + self._most_bytes(identity), np.uint8)
        target = content[PAGE_BYTES:]
        if self._codec.in_place:
            target[:] = piece.memory
            encoded: Encoded | None = Encoded(identity.length_bytes, self._codec.name)
        else:
            encoded = self._codec.encode(identity, piece.memory, target)
        if encoded is None:
            return self._none()
        whole = content[: PAGE_BYTES + encoded.stored_bytes].data
        write_header(whole[:PAGE_BYTES], identity, encoded, payload_checksum(whole[PAGE_BYTES:]))
        return self._put(self._path(identity), whole)

    def _take(self, piece: Piece, found: memoryview) -> Outcome:
        """Bring an object's bytes into HOST memory if they are what they should be."""
        header = read_header(found[:PAGE_BYTES])
        if isinstance(header, Unreadable):
            return header.value
        if not header.names(piece.identity) or header.encoded.codec != self._codec.name:
            return Outcome.FOREIGN
        if check_payload(header, found[PAGE_BYTES:]) is not Outcome.DONE:
            return Outcome.CORRUPT
        stored = np.frombuffer(found, np.uint8, offset=PAGE_BYTES)
        return bring_back(self._codec, piece.identity, header.encoded, stored, piece.memory)

    def _outcomes(self, answers: Sequence[Outcome | UnavailableError]) -> list[Outcome]:
        self._raise_if_all_failed(answers)
        return [Outcome.FAILED if isinstance(it, UnavailableError) else it for it in answers]

    def _raise_if_all_failed(self, answers: Sequence[object]) -> None:
        errors = [it for it in answers if isinstance(it, UnavailableError)]
        if errors and len(errors) == len(answers):
            raise errors[0]

    def _most_bytes(self, identity: Identity) -> int:
        return self._codec.stored_bytes(identity)

    def _path(self, identity: Identity) -> str:
        return f"{self._folder(identity.origin)}/{identity.group}/{identity.key.hex()}"

    def _folder(self, origin: Origin) -> str:
        root = origin.root.hex()
        return f"{self._cluster}/{self._codec.name}/{root[:2]}/{root}"

    def _room(self, until_s: float) -> int:
        total_bytes, free_bytes = self._file_system(until_s)
        return free_bytes - _reserve(total_bytes)

    def _file_system(self, until_s: float) -> tuple[int, int]:
        """Size and free bytes of the directory's file system; a file server that hangs costs a thread, not the call."""
        with self._lock:
            if self._asked.done():
                self._asked = Future()
                threading.Thread(target=self._ask, args=(self._asked,), name="headwater-statvfs", daemon=True).start()
            answer = self._asked
        try:
            found = answer.result(max(0.0, until_s - time.monotonic()))
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._name}: {error or 'it does not answer'}") from None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def _ask(self, answer: Future[os.statvfs_result]) -> None:
        try:
            answer.set_result(os.statvfs(self._directory or "/"))
        except OSError as error:
            answer.set_exception(error)

    def _check(self, until_s: float) -> None:
        if time.monotonic() >= until_s:
            raise UnavailableError(f"{self._name} was asked too late")


def _reserve(total_bytes: int) -> int:
    return max(total_bytes // RESERVE_SHARE, RESERVE_BYTES)
