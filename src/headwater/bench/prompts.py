"""Prompts that one node of a cluster has and another is asked for, as an engine asks: `match` until there, `load`.

    python -m headwater.bench.prompts TOTAL_BYTES

answers lines `fetch CHUNK_BYTES CHUNKS CALLS all|one` as `blocks` does: each call has the asked node fetch a prompt of
so many chunks from the other over TCP, verified, and ends when all of it is leased; then the asked node forgets it,
which is not timed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench import tools
from headwater.bench.objects import answer_file, bind, pattern
from headwater.bench.peers import Peer, node_process
from headwater.errors import UnavailableError
from headwater.node.client import Link, Session, ask_operator
from headwater.node.messages import Evict
from headwater.ports import Bytes
from headwater.types import KEY_BYTES, ChunkKey, KVGroup, KVLayout, Namespace, pack_keys

CHUNK_TOKENS, PAGES = 256, 16
CALL_S, KNOWN_S = 30.0, 20.0
POLL_S, POLL_SHARE = 0.0002, 0.1
"""How long to wait before asking again: a share of what has been waited so far, for asking costs the node time."""
MODEL = "prompts"


def cluster_settings(port: int, directory: Path, name: str) -> dict[str, str]:
    """Settings of a node of a cluster, as if each were on a host of its own."""
    token = directory / "token"
    if not token.exists():
        token.touch(0o600)
        token.write_text("bench-0123456789abcdef\n", encoding="ascii")
    return {
        "HEADWATER_NODE_NAME": name,
        "HEADWATER_NODE_CLUSTER": "bench",
        "HEADWATER_NODE_DIRECTORY": f"valkey://127.0.0.1:{port}",
        "HEADWATER_NODE_LISTEN": "127.0.0.1:0",
        "HEADWATER_NODE_TOKEN_FILE": str(token),
        "HEADWATER_NODE_HOST_ID": name,
    }


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a prompt was asked for: whether the node said at first that more will come, how much came, and how long it
    took."""

    expected: bool
    chunks: int
    seconds: float
    is_right: bool = True


class Asker:
    """A client of one node for chunks of one size."""

    def __init__(self, node: Peer, chunk_bytes: int) -> None:
        self.node, self.chunk_bytes = node, chunk_bytes
        self._layout = KVLayout(CHUNK_TOKENS, (KVGroup(CHUNK_TOKENS // PAGES, chunk_bytes // PAGES, (1,)),))
        namespace = Namespace("bench", "raw", MODEL, self._layout.fingerprint())
        self._root = namespace.root()
        self._link = Link(node.address, f"bench-{os.getpid()}-{id(self)}", maps=True, connect_s=CALL_S, call_s=CALL_S)
        self._session = Session(self._link, namespace, self._layout)
        self._requests = count()

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def save(self, keys: Sequence[ChunkKey], number: int) -> None:
        """Save a prompt whose bytes say which it is."""
        reserved = self._session.reserve(keys)
        assert reserved.covered == len(keys), "the node has no room"
        for place in reserved.addresses[0]:
            self._part(place)[:] = pattern(number, self.chunk_bytes)
        assert self._session.done(reserved.ticket), "the save came too late"

    def fetch(self, keys: Sequence[ChunkKey], number: int, within_s: float) -> Fetched:
        """Have the node bring a prompt from wherever it is, at most so long, and compare its bytes."""
        request = f"{self._link!r}-{next(self._requests)}"
        # The node waits a tenth of what computing the prompt would take.
        tokens_s = 0.1 * CHUNK_TOKENS / within_s
        began_s = time.monotonic()
        state = self._session.match(keys, counts=False, request=request, tokens_s=tokens_s)
        expected = state.waiting
        while state.waiting and time.monotonic() < began_s + within_s:
            time.sleep(max(POLL_S, POLL_SHARE * (time.monotonic() - began_s)))
            state = self._session.match(keys, counts=False, request=request, tokens_s=tokens_s)
        held = self._session.load(keys)
        took_s = time.monotonic() - began_s
        right = all(np.array_equal(self._part(it), pattern(number, self.chunk_bytes)) for it in held.addresses[0][-1:])
        if held.ticket:
            self._session.done(held.ticket)
        self._session.forget([request])
        return Fetched(expected, held.chunks, took_s, right)

    def evict(self, keys: Sequence[ChunkKey]) -> None:
        """Have the node forget a prompt, and nobody else."""
        ask_operator(self.node.address, Evict(self._root, pack_keys(keys), below=False))

    def _part(self, place: int) -> Bytes:
        memory = self._link.memory
        assert memory is not None, "the node gave its memory"
        return np.frombuffer(memory.view(place, self.chunk_bytes), np.uint8)


def prompt(number: int, chunks: int, purpose: str = "") -> list[ChunkKey]:
    """Keys of a prompt."""
    name = f"{purpose}{number}/"
    return [ChunkKey(sha256(f"{name}{it}".encode()).digest()[:KEY_BYTES]) for it in range(chunks)]


@contextmanager
def pair(total_bytes: int) -> Iterator[tuple[Peer, Peer]]:
    """A holder with room for so much, and a node to be asked."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-")))
        port = stack.enter_context(tools.valkey(directory))
        yield (
            stack.enter_context(node_process(2 * total_bytes, settings=cluster_settings(port, directory, "holder"))),
            stack.enter_context(node_process(total_bytes, settings=cluster_settings(port, directory, "asked"))),
        )


class Turns:
    """Timed fetches."""

    def __init__(self, holder: Peer, asked: Peer, total_bytes: int) -> None:
        self._peers, self._total_bytes = (holder, asked), total_bytes
        self._askers: dict[int, tuple[Asker, Asker]] = {}
        self._held: dict[tuple[int, int], list[list[ChunkKey]]] = {}
        self._serial = count()

    def turn(self, chunk_bytes: int, chunks: int, calls: int, where: str) -> dict[str, Any]:
        """Fetch so many prompts, one after another."""
        prompts = self._prompts(chunk_bytes, chunks)
        _, asker = self._askers[chunk_bytes]
        pids = [it.pid for it in self._peers]
        clocks = [~it << 3 | 2 for it in pids]  # of whole processes, threads that have ended included
        bind(pids, everywhere=where == "all")
        seconds = []
        gc.collect()
        cpu_s, peer_cpu_s = time.process_time(), sum(map(time.clock_gettime, clocks))
        for _ in range(calls):
            number = next(self._serial) % len(prompts)
            got = asker.fetch(prompts[number], number, CALL_S)
            if got.chunks != chunks or not got.is_right:
                raise SystemExit(f"{got.chunks} of {chunks} chunks came")
            seconds.append(got.seconds)
            asker.evict(prompts[number])
        cpu_s = time.process_time() - cpu_s
        peer_cpu_s = sum(map(time.clock_gettime, clocks)) - peer_cpu_s
        return {"seconds": seconds, "cpu_s": cpu_s, "peer_cpu_s": peer_cpu_s}

    def _prompts(self, chunk_bytes: int, chunks: int) -> list[list[ChunkKey]]:
        if chunk_bytes not in self._askers:
            holder, asked = self._peers
            self._askers[chunk_bytes] = (Asker(holder, chunk_bytes), Asker(asked, chunk_bytes))
        if (chunk_bytes, chunks) not in self._held:
            holding, asker = self._askers[chunk_bytes]
            number_of = max(self._total_bytes // 4 // (chunk_bytes * chunks), 1)
            prompts = [prompt(it, chunks, f"{chunk_bytes}/{chunks}/") for it in range(number_of)]
            for number, keys in enumerate(prompts):
                holding.save(keys, number)
            for number, keys in enumerate(prompts):
                wait_known(asker, keys, number)
            self._held[chunk_bytes, chunks] = prompts
        return self._held[chunk_bytes, chunks]


def wait_known(asker: Asker, keys: Sequence[ChunkKey], number: int) -> None:
    """Until the node gets a prompt from another; then it forgets it. Raises UnavailableError if that never is."""
    until_s = time.monotonic() + KNOWN_S
    while (got := asker.fetch(keys, number, CALL_S)).chunks != len(keys):
        if time.monotonic() > until_s:
            raise UnavailableError(f"another node's chunks are not found: {got.chunks} of {len(keys)}")
        time.sleep(0.01)
    asker.evict(keys)


def main(total_bytes: int) -> None:
    """Answer turns until stdin ends."""
    answers = answer_file()
    with pair(total_bytes) as (holder, asked):
        turns = Turns(holder, asked, total_bytes)
        answers.write("{}\n")
        answers.flush()
        for request in sys.stdin:
            _, chunk_bytes, chunks, calls, where = request.split()
            answers.write(json.dumps(turns.turn(int(chunk_bytes), int(chunks), int(calls), where)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
