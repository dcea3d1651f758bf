"""Chunks to and from files or Redis through LMCache's own adapters, one turn at a time; run by LMCache's Python.

    .cache/peers/lmcache/bin/python benchmarks/lmcache_tiers.py ADAPTER TARGET CHUNK_BYTES TOTAL_BYTES [--rounds N]

TARGET is a directory for `fs` and `fs_native`, `redis://host:port` for `resp` and `redis`. A line `store` or `load` on
stdin asks for one turn: all chunks once. Each answer is a line of JSON with the turn's seconds and the CPU seconds of
this process; the first line says that all is ready, after a store and a load whose bytes were compared. With `--rounds`
nobody has to ask. Ends when stdin ends; words for people go to stderr.

A store into files is over when the files and their directory are synced; the files are new ones, since LMCache skips
what is there. Before a load they are dropped from the page cache, and a load that did not read the device is refused.
Making room for a store and dropping the cache is not timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
    wait_eventfd,
)
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector

MIB = 1 << 20
PAGE_BYTES = 4096
IN_FLIGHT = 2
"""Batches under way at a time, as many as the other side has threads."""
SYNC_THREADS = 4
WAIT_S = 120.0
FILES, SERVERS = ("fs", "fs_native"), ("resp", "redis")


class Adapter(Protocol):
    """All chunks at once, to and from the memory that it was made with; assertion error unless all went well."""

    def store(self) -> None:
        """Send all chunks from the first half of the memory."""

    def load(self) -> None:
        """Bring all chunks into the second half of the memory."""

    def is_right(self) -> bool:
        """Whether the last load brought the bytes that were sent."""

    def forget(self) -> None:
        """Make sure that the next store has to write."""

    def close(self) -> None:
        """End its threads."""


class Batches:
    """An L2 adapter of LMCache's server mode, used as its own `lmcache bench l2` does."""

    def __init__(self, settings: dict[str, object], memory: torch.Tensor, chunk_bytes: int) -> None:
        count = len(memory) // 2 // chunk_bytes
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(settings)])).adapters[0]
        self._adapter = create_l2_adapter(config, l1_memory_desc=create_l1_memory_desc(memory, align_bytes=PAGE_BYTES))
        self._keys = make_object_keys(count)
        self._sources = make_memory_objects(memory, count, chunk_bytes, 0)
        self._targets = make_memory_objects(memory, count, chunk_bytes, count * chunk_bytes)

    def store(self) -> None:
        """See Adapter."""
        adapter = self._adapter
        waited: dict[int, Any] = {}
        asked = [adapter.submit_store_task(keys, objects) for keys, objects in self._batches(self._sources)]
        while len(waited) < len(asked):
            assert wait_eventfd(adapter.get_store_event_fd(), WAIT_S), "LMCache does not end its store"
            waited |= adapter.pop_completed_store_tasks()
        assert all(it.is_successful() for it in waited.values()), "LMCache could not store"

    def load(self) -> None:
        """See Adapter."""
        adapter, loaded = self._adapter, 0
        asked = {adapter.submit_load_task(keys, objects) for keys, objects in self._batches(self._targets)}
        while asked:
            assert wait_eventfd(adapter.get_load_event_fd(), WAIT_S), "LMCache does not end its load"
            for task in sorted(asked):
                if (found := adapter.query_load_result(task)) is not None:
                    loaded += found.popcount()
                    asked.remove(task)
        assert loaded == len(self._keys), f"LMCache loaded {loaded} of {len(self._keys)} chunks"

    def is_right(self) -> bool:
        """See Adapter."""
        return _equal(self._sources, self._targets)

    def forget(self) -> None:
        """See Adapter."""
        self._adapter.delete(self._keys)

    def close(self) -> None:
        """See Adapter."""
        self._adapter.close()

    def _batches(self, objects: Sequence[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
        for start in range(min(IN_FLIGHT, len(objects))):
            yield self._keys[start::IN_FLIGHT], list(objects[start::IN_FLIGHT])


class Connector:
    """The `redis://` connector of LMCache's in-process mode, called as its remote backend does."""

    def __init__(self, url: str, memory: torch.Tensor, chunk_bytes: int) -> None:
        count, layers = len(memory) // 2 // chunk_bytes, chunk_bytes // MIB
        assert layers * MIB == chunk_bytes, "a chunk is 256 tokens of so many layers of 4 KiB a token"
        shape = (layers, 2, 256, 8, 128)
        about = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape)
        self._memory, self._chunk_bytes = memory.view(2, count, chunk_bytes), chunk_bytes
        self._shape = about.get_shapes()[0]
        self._sources = [self._object(0, number) for number in range(count)]
        self._free: Iterator[Any] = iter(())
        self._found: list[Any] = []
        self._keys = [CacheEngineKey("bench", 1, 0, number, torch.bfloat16) for number in range(count)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        # In place of LMCache's pool in DRAM: the memory that we hand out, at no cost.
        pool = SimpleNamespace(config=LMCacheEngineConfig.from_defaults(), metadata=about, allocate=self._allocate)
        self._connector = RedisConnector(url, self._loop, pool)

    def store(self) -> None:
        """See Adapter."""
        self._run(self._connector.batched_put(self._keys, self._sources))

    def load(self) -> None:
        """See Adapter."""
        self._free = (self._object(1, number) for number in range(len(self._keys)))
        self._found = self._run(self._load())
        assert all(it is not None for it in self._found), "LMCache did not find all chunks"

    def is_right(self) -> bool:
        """See Adapter. Memory is handed out in the order in which chunks come, so it need not be theirs."""
        return _equal(self._sources, self._found)

    def forget(self) -> None:
        """See Adapter. It always writes."""

    def close(self) -> None:
        """See Adapter. LMCache's own way to close it waits for itself, so its tasks are cancelled instead."""
        self._run(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._connector.connection.aclose()

    async def _load(self) -> list[Any]:
        return await asyncio.gather(*(self._connector.get(key) for key in self._keys))

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def _object(self, half: int, number: int) -> Any:
        about = MemoryObjMetadata(
            shape=self._shape,
            dtype=torch.bfloat16,
            address=0,
            phy_size=self._chunk_bytes,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
            shapes=[self._shape],
            dtypes=[torch.bfloat16],
        )
        return TensorMemoryObj(raw_data=self._memory[half, number], metadata=about, parent_allocator=None)

    def _allocate(self, _shapes: object, _dtypes: object, _format: object) -> Any:
        return next(self._free)


def _equal(sent: Sequence[Any], received: Sequence[Any]) -> bool:
    return all(torch.equal(one.raw_data, other.raw_data) for one, other in zip(sent, received, strict=True))


class Files:
    """What lies in the directory, and whether it is on the device."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(SYNC_THREADS)

    def sync(self) -> None:
        """Wait until everything in the directory is on the device."""
        list(self._pool.map(self._sync, sorted(it for it in self._directory.rglob("*") if it.is_file())))
        self._sync(self._directory)

    def drop(self) -> None:
        """Take all of it out of the page cache; it must be synced."""
        for path in self._directory.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown()

    @staticmethod
    def _sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def bytes_read() -> int:
    """How many bytes all threads of this process have fetched from a device so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Turns:
    """Stores and loads of all chunks, timed."""

    def __init__(self, adapter: Adapter, files: Files | None, total_bytes: int) -> None:
        self._adapter, self._files, self._total_bytes = adapter, files, total_bytes

    def store(self) -> dict[str, float]:
        """One store of all chunks."""
        if self._files is not None:
            self._adapter.forget()
            self._files.sync()
        began = time.perf_counter(), time.process_time()
        self._adapter.store()
        if self._files is not None:
            self._files.sync()
        return _since(began)

    def load(self) -> dict[str, float]:
        """One load of all chunks."""
        if self._files is not None:
            self._files.drop()
        read, began = bytes_read(), (time.perf_counter(), time.process_time())
        self._adapter.load()
        spent = _since(began)
        if self._files is not None and bytes_read() - read < self._total_bytes:
            raise SystemExit("the loads did not come from a device: is the directory in memory?")
        return spent


def _since(began: tuple[float, float]) -> dict[str, float]:
    return {"seconds": time.perf_counter() - began[0], "cpu_s": time.process_time() - began[1]}


def fill(memory: torch.Tensor) -> None:
    """Random bytes in the first half, none of them in the second."""
    torch.manual_seed(1)
    half = len(memory) // 2
    memory[:half].view(torch.int64).random_()
    memory[half:].zero_()


def make(arguments: argparse.Namespace, memory: torch.Tensor) -> tuple[Adapter, Files | None]:
    """The adapter that was asked for, and its files if it has any."""
    name, target, chunk_bytes = arguments.adapter, arguments.target, arguments.chunk_bytes
    if name in FILES:
        directory = Path(target)
        directory.mkdir(parents=True, exist_ok=True)
        settings = {"type": name, "base_path": str(directory), "use_odirect": arguments.direct}
        return Batches(settings, memory, chunk_bytes), Files(directory)
    if name == "redis":
        return Connector(target, memory, chunk_bytes), None
    place = urlsplit(target)
    return Batches({"type": name, "host": place.hostname, "port": place.port}, memory, chunk_bytes), None


def serve(turns: Turns, requests: Iterator[str], answers: TextIO) -> None:
    """One answer a request, until there are no more."""
    verbs = {"store": turns.store, "load": turns.load}
    for request in requests:
        answers.write(json.dumps(verbs[request.strip()]()) + "\n")
        answers.flush()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Stores and loads through LMCache's adapters, turn by turn.")
    parser.add_argument("adapter", choices=[*FILES, *SERVERS])
    parser.add_argument("target", metavar="TARGET", help="a directory, or redis://host:port")
    parser.add_argument("chunk_bytes", type=int)
    parser.add_argument("total_bytes", type=int)
    parser.add_argument("--rounds", type=int, help="so many stores and loads by itself")
    parser.add_argument(
        "--direct", action="store_true", help="files past the page cache, which is not LMCache's default"
    )
    return parser.parse_args()


def main() -> None:
    """Set up, compare the bytes once, then take turns."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # LMCache logs to stdout
    arguments = parse()
    memory = make_aligned_tensor(2 * arguments.total_bytes, PAGE_BYTES)
    adapter, files = make(arguments, memory)
    try:
        fill(memory)
        turns = Turns(adapter, files, arguments.total_bytes)
        turns.store()
        turns.load()
        if not adapter.is_right():
            raise SystemExit("LMCache did not bring back the bytes that it was given")
        answers.write(json.dumps({"ready": True}) + "\n")
        answers.flush()
        rounds = arguments.rounds
        serve(turns, iter(sys.stdin) if rounds is None else iter(["store", "load"] * rounds), answers)
    finally:
        adapter.close()
        if files is not None:
            files.close()


if __name__ == "__main__":
    main()
