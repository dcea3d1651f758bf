"""Objects that other nodes hold: where they are, and how large their slots are, which their names do not say.

Theory of operation. The loop asks with `seek`; a thread locates the keys in the directory, whatever their slots, and
asks a holder of each about them (the topic `object`); the loop is told. From then on it is a read from a peer like any
other. A holder that does not answer is passed over for the next one; a key that nobody has is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from headwater.errors import RefusedError, UnavailableError
from headwater.node.errands import Answer, Errands
from headwater.node.messages import KEYS_MAX, pack_words, unpack_words
from headwater.node.peers import PeersTier
from headwater.types import KEY_BYTES, ChunkKey, chunk_name, pack_keys, split_keys

log = logging.getLogger(__name__)

TOPIC, GONE = "object", "object-gone"
SEEK_S, TELL_S = 1.0, 0.5
BATCH = 4096
WAITING_MAX = 65_536
Told = Callable[[str, ChunkKey, int, float], None]
"""Tenant, key, the slot's size or 0, now."""


class ObjectPeers:
    """A node's questions to its peers about objects, and its answers."""

    def __init__(
        self,
        tier: PeersTier,
        errands: Errands,
        sizes: Callable[[str, Sequence[ChunkKey], float], list[int]],
        remove: Callable[[str, Sequence[ChunkKey], float], None],
        told: Told,
    ) -> None:
        """The callables are for the loop: the slots' sizes of a tenant's objects that are here (0 where none is), their
        removal from here, and what came of a search."""
        self._tier, self._errands, self._sizes, self._remove, self._told = tier, errands, sizes, remove, told
        self._wanted: dict[tuple[str, ChunkKey], None] = {}
        self._gone: dict[tuple[str, ChunkKey], None] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headwater-objects", daemon=True)
        self._thread.start()

    def seek(self, tenant: str, key: ChunkKey) -> None:
        """Begin to look for an object; `told` is called in the loop."""
        with self._changed:
            if len(self._wanted) < WAITING_MAX:
                self._wanted[tenant, key] = None
                self._changed.notify()
                return
        self._errands.tell(lambda now: self._told(tenant, key, 0, now))  # too many are sought: it is a miss

    def removed(self, tenant: str, keys: Sequence[ChunkKey]) -> None:
        """Have the others remove these objects, too."""
        with self._changed:
            room = WAITING_MAX - len(self._gone)
            self._gone |= dict.fromkeys((tenant, key) for key in keys[:room])
            self._changed.notify()
        if room < len(keys):
            log.warning("%d removed objects are not removed from other nodes: too many at a time", len(keys) - room)

    def topics(self) -> dict[str, Callable[[str, bytes, float], bytes]]:
        """What peers may tell us; for the threads of connections."""
        return {TOPIC: self._asked, GONE: self._asked_to_remove}

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(SEEK_S + TELL_S)

    # ---- in the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._gone and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                wanted, gone = _take(self._wanted), _take(self._gone)
            for tenant in dict.fromkeys(name for name, _ in wanted):
                self._seek(tenant, [key for name, key in wanted if name == tenant])
            for tenant in dict.fromkeys(name for name, _ in gone):
                self._tell_gone(tenant, [key for name, key in gone if name == tenant])

    def _seek(self, tenant: str, keys: Sequence[ChunkKey]) -> None:
        until_s = time.monotonic() + SEEK_S
        found = dict.fromkeys(keys, 0)
        located = self._tier.locate([chunk_name(0, key) for key in keys], until_s)
        members = {it.number for it in self._tier.members()}
        left = {
            key: [it.number for it in there if it.number in members] for key, there in zip(keys, located, strict=True)
        }
        asked: set[int] = set()
        while time.monotonic() < until_s:
            number = next(
                (it for key, there in left.items() if not found[key] for it in there if it not in asked), None
            )
            if number is None:
                break
            asked.add(number)
            its = [key for key, there in left.items() if number in there and not found[key]]
            for key, size in zip(its, self._ask(number, tenant, its, until_s), strict=True):
                found[key] = size

        def tell(now: float) -> None:
            for key, size in found.items():
                self._told(tenant, key, size, now)

        self._errands.tell(tell)

    def _ask(self, number: int, tenant: str, keys: Sequence[ChunkKey], until_s: float) -> list[int]:
        body = msgspec.msgpack.encode((tenant, pack_keys(keys)))
        try:
            sizes = unpack_words(self._tier.tell(number, TOPIC, body, min(until_s, time.monotonic() + TELL_S)))
        except (UnavailableError, RefusedError, ValueError):
            return [0] * len(keys)
        return sizes if len(sizes) == len(keys) else [0] * len(keys)

    def _tell_gone(self, tenant: str, keys: Sequence[ChunkKey]) -> None:
        body = msgspec.msgpack.encode((tenant, pack_keys(keys)))
        for it in self._tier.members():
            try:
                self._tier.tell(it.number, GONE, body, time.monotonic() + TELL_S)
            except (UnavailableError, RefusedError):
                continue

    # ---- in the threads of connections ----------------------------------------------------------------

    def _asked(self, peer: str, body: bytes, until_s: float) -> bytes:
        tenant, keys = _decode(body)

        def begin(now: float, answer: Answer[bytes]) -> None:
            answer.give(pack_words(self._sizes(tenant, keys, now)))

        return self._errands.ask(begin, until_s)

    def _asked_to_remove(self, peer: str, body: bytes, until_s: float) -> bytes:
        tenant, keys = _decode(body)

        def begin(now: float, answer: Answer[bytes]) -> None:
            self._remove(tenant, keys, now)
            answer.give(b"")

        return self._errands.ask(begin, until_s)


def _take(waiting: dict[tuple[str, ChunkKey], None]) -> list[tuple[str, ChunkKey]]:
    """The first of what waits, which waits no more."""
    taken = list(islice(waiting, BATCH))
    for it in taken:
        del waiting[it]
    return taken


def _decode(body: bytes) -> tuple[str, list[ChunkKey]]:
    try:
        tenant, packed = msgspec.msgpack.decode(body, type=tuple[str, bytes])
        if len(packed) > KEYS_MAX * KEY_BYTES:
            raise ValueError(f"{len(packed)} bytes of keys")
        return tenant, split_keys(packed)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RefusedError("object", "a tenant and keys", str(error), "use equal versions") from None
