"""The Store: objects in the nodes' memory, by name.

    with Store("unix:/run/headwater/node.sock") as store:
        store.put({"a": b"...", "b": array})            # -> [PutResult, PutResult]
        store.get(["a", "b", "c"])                      # -> [bytes, bytes, None]
        store.get_into(["a"], [buffer])                 # one copy, straight into the caller's memory
        with store.view(["b"]) as (b,): use(b.data)     # no copy

Objects do not change: a key that is there keeps its bytes until they are removed, evicted, or their time is over. It is
a cache: what is not pinned leaves when room is needed. Keys are bytes or text of at most 4 KiB; text is its UTF-8.

What comes of one object is a value; exceptions are for the batch: UnavailableError when the node is away (nothing is
known of what a put or remove of that batch did; the next call connects again, at most once in `RETRY_S`), RefusedError
for arguments that cannot be, before anything is done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.node.messages import Contained, Hold, Kept, Remove, Used
from headwater.node.object_format import Kind, tenant_root
from headwater.ports import Bytes
from headwater.store.connection import Connection, empty
from headwater.store.names import Name, Names
from headwater.store.reading import (
    TRIES,
    Plan,
    copy,
    is_whole,
    known,
    lease_all,
    length_of,
    listed,
    read_leased,
    split_parts,
    still,
)
from headwater.store.results import MISSED, GetResult, Outcome, PutResult
from headwater.store.writing import Put, Terms, put
from headwater.transfer.buffers import bytes_of
from headwater.types import ChunkKey, pack_keys

RETRY_S = 0.2
"""How long calls fail at once after an attempt to connect that failed."""
TELL_S, TELL_MAX = 0.25, 4096
"""How often the node is told what was read without asking it."""
SMALL_BYTES = 32 << 10
FEW = 16
"""So many keys are looked up one by one: NumPy would take longer to begin."""
REPLICAS_MAX = 64
PIN_S = 7 * 86_400.0
CORRUPT = "its bytes are not what was stored"


@dataclass(frozen=True, slots=True)
class View:
    """An object where it lies: read-only, and only inside the `with` block."""

    pieces: tuple[memoryview, ...]
    """Its bytes in order: one piece, but for objects larger than a slab of the node."""

    @property
    def length_bytes(self) -> int:
        """The object's length."""
        return sum(map(len, self.pieces))

    @property
    def data(self) -> memoryview:
        """The bytes in one piece; raises RefusedError for an object of several."""
        if len(self.pieces) != 1:
            raise RefusedError("view.data", "an object of one piece", f"{len(self.pieces)}", "use view.pieces")
        return self.pieces[0]


class Store:
    """One process's access to the objects of a tenant. Several threads may use it."""

    def __init__(self, node: str, *, tenant: str = "", connect_s: float = 1.0, call_s: float = 5.0) -> None:
        """Connect to `unix:/path`. `call_s` is how long one call may wait for the node, for lower tiers and for others
        that are writing the same key. Raises UnavailableError or RefusedError."""
        self._node, self._tenant, self._connect_s, self._call_s = node, tenant, connect_s, call_s
        self._root = tenant_root(tenant)
        self._names = Names(self._root)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._retry_from_s = 0.0
        self._closed = False
        self._used: dict[ChunkKey, None] = {}
        self._suspect: dict[ChunkKey, None] = {}
        self._tell_at_s = 0.0
        self._connection: Connection | None = Connection(node, tenant, connect_s, call_s)

    @classmethod
    def connect(cls, node: str, tenant: str = "") -> Self:
        """The same with the usual deadlines."""
        return cls(node, tenant=tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; what was pinned is released. Views must not be used any more."""
        if self._process != os.getpid():
            self._begin_anew()
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # ---- put ------------------------------------------------------------------------------------------

    def put(
        self,
        items: Mapping[Name, object] | Sequence[tuple[Name, object]],
        *,
        ttl_s: float | None = None,
        replicas: int = 1,
        pin: bool = False,
    ) -> list[PutResult]:
        """Store objects; a result each, in order. The buffers are the caller's again when this returns.

        DONE: everybody finds these bytes. EXISTS: there are others already, and they stay; of several that put one key
        at the same time, one is DONE, and the others are EXISTS unless their bytes are equal. `ttl_s` is how long the
        objects may be found. `pin` keeps them from leaving until `unpin`, or until this client is closed; a result says
        whether that was possible (half of the node's memory may be pinned). `replicas` asks for copies on so many
        nodes, which are made later and are not waited for.
        """
        pairs = list(items.items()) if isinstance(items, Mapping) else list(items)
        if ttl_s is not None and not 0.0 < ttl_s <= 10 * 365 * 86_400:
            raise RefusedError("ttl_s", "more than 0, at most ten years", f"{ttl_s}", "leave it out for no end")
        if not 1 <= replicas <= REPLICAS_MAX:
            raise RefusedError("replicas", f"1 to {REPLICAS_MAX}", f"{replicas}", "choose a number within that")
        keys = self._names.keys_of([name for name, _ in pairs])
        datas = [bytes_of(data, f"items[{at}]", writes=False) for at, (_, data) in enumerate(pairs)]
        puts = [Put(key, data, data) for key, data in zip(keys, datas, strict=True)]
        expires_ns = 0 if ttl_s is None else time.time_ns() + int(ttl_s * 1e9)
        terms = Terms(expires_ns, PIN_S if pin else 0.0, replicas, self._until_s())
        one = self._connected()
        put(one, self._root, puts, terms)
        return [it.result or PutResult(Outcome.ERROR, "nothing was said of it") for it in puts]

    # ---- get ------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[Name]) -> list[bytes | None]:
        """The objects' bytes, None for a miss. Raises UnavailableError also if an object that is there could not be
        read in time; of several, those whose bytes turned out not to be what was stored are misses, and the node drops
        them. `get_into` saves the allocation, which for large objects takes longer than the copy."""
        one = self._connected()
        wanted = self._names.keys_of(keys)
        found: list[bytes | None] = [self._get_small(one, key) for key in wanted]
        rest = [at for at, it in enumerate(found) if it is None]
        if rest and not self._surely_missing(one, [wanted[at] for at in rest]):
            targets: list[Bytes | None] = [None] * len(rest)
            plans = [listed(one, self._root, wanted[at]) for at in rest]
            results = self._read(one, [wanted[at] for at in rest], targets, plans, allocates=True)
            for at, result, target in zip(rest, results, targets, strict=True):
                if result.outcome is Outcome.DONE and target is not None:
                    found[at] = target.tobytes()
                elif result.outcome is not Outcome.MISS and (result.reason != CORRUPT or len(keys) == 1):
                    self._tell(one)
                    raise UnavailableError(f"keys[{at}]: {result.reason}")
        self._tell(one)
        return found

    def get_into(self, keys: Sequence[Name], buffers: Sequence[object]) -> list[GetResult]:
        """Read objects into the caller's memory, one copy each; a result for each, in order. A buffer may be longer
        than its object, not shorter (REFUSED, with the length needed). Nothing touches the buffers once this returns.
        """
        wanted = self._names.keys_of(keys)
        if len(wanted) != len(buffers):
            raise RefusedError("buffers", f"one for each of {len(wanted)} keys", f"{len(buffers)}", "pass as many")
        targets: list[Bytes | None] = [
            bytes_of(buffer, f"buffers[{at}]", writes=True) for at, buffer in enumerate(buffers)
        ]
        one = self._connected()
        plans = [listed(one, self._root, key) for key in wanted]
        results = [self._get_into_small(one, *it) for it in zip(wanted, plans, targets, strict=True)]
        rest = [at for at, it in enumerate(results) if it is None]
        if rest:
            found = self._read(
                one, [wanted[at] for at in rest], [targets[at] for at in rest], [plans[at] for at in rest]
            )
            for at, result in zip(rest, found, strict=True):
                results[at] = result
        self._tell(one)
        return [it or MISSED for it in results]

    @contextmanager
    def view(self, keys: Sequence[Name]) -> Iterator[list[View | None]]:
        """Objects where they lie, leased for the time of the block; None for a miss.

        Raises UnavailableError at the end of a block that lasted longer than the lease (`node.load_lease_s`): what was
        read may be somebody else's bytes and must be thrown away.
        """
        one = self._connected()
        wanted = self._names.keys_of(keys)
        leased = lease_all(one, self._root, wanted, self._until_s())
        try:
            yield [None if plan is None else self._view(one, plan) for plan in leased.plans]
        finally:
            late = leased.is_late
            one.release(leased.tickets)
        if late:
            raise UnavailableError("the lease ended before the block did; discard what was read")

    @staticmethod
    def _view(one: Connection, plan: Plan) -> View:
        return View(tuple(one.part(it.address, it.length_bytes).data.toreadonly() for it in plan))

    # ---- questions ------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[Name]) -> list[bool]:
        """Which objects are there; changes nothing."""
        one = self._connected()
        wanted = self._names.keys_of(keys)
        if len(wanted) <= FEW:
            found = [one.table.find(key) for key in wanted]
            kinds = [-1 if it is None else it[1][2] for it in found]
        else:
            kinds = one.table.kinds(pack_keys(wanted)).tolist()
        held = [
            kind >= 0 and (kind != Kind.SPLIT or listed(one, self._root, key) is not None)
            for key, kind in zip(wanted, kinds, strict=True)
        ]
        if not all(held) and not one.lists_all:
            rest = [at for at, it in enumerate(held) if not it]
            for at, there in zip(rest, known(one, [wanted[at] for at in rest], self._until_s()), strict=True):
                held[at] = there
        return held

    def size(self, keys: Sequence[Name]) -> list[int | None]:
        """The objects' lengths in bytes, None for a miss."""
        one = self._connected()
        wanted = self._names.keys_of(keys)
        plans = [listed(one, self._root, key) for key in wanted]
        sizes = [None if plan is None or not still(one, plan) else length_of(plan) for plan in plans]
        rest = [at for at, it in enumerate(sizes) if it is None]
        if rest and not self._surely_missing(one, [wanted[at] for at in rest]):

            def measure(turns: Sequence[int], found: Sequence[Plan | None]) -> None:
                for turn, plan in zip(turns, found, strict=True):
                    sizes[rest[turn]] = None if plan is None else length_of(plan)

            unread = read_leased(one, self._root, [wanted[at] for at in rest], self._until_s(), measure)
            for turn, reason in unread.items():
                raise UnavailableError(f"keys[{rest[turn]}]: {reason}")
        return sizes

    # ---- remove, pin ----------------------------------------------------------------------------------

    def remove(self, keys: Sequence[Name]) -> list[bool]:
        """Delete objects, from every tier of the node; which were there. Nobody finds them from then on; views of them
        stay as they are until their blocks end."""
        one = self._connected()
        wanted = self._names.keys_of(keys)
        until_s = self._until_s()
        parts = [part for key in wanted for part in split_parts(one, self._root, key, until_s)]
        flags = one.call(Remove(pack_keys([*wanted, *parts])), Contained).flags
        return [bool(it) for it in flags[: len(wanted)]]

    def pin(self, keys: Sequence[Name], ttl_s: float = PIN_S) -> list[bool]:
        """Keep objects in the node's memory for `ttl_s`, until `unpin`, or until this client is closed; which are kept.
        The others are not there, or half of the memory is pinned already."""
        return self._hold(keys, ttl_s)

    def unpin(self, keys: Sequence[Name]) -> list[bool]:
        """End this client's pins; which there were."""
        return self._hold(keys, 0.0)

    def _hold(self, keys: Sequence[Name], hold_s: float) -> list[bool]:
        one = self._connected()
        return [bool(it) for it in one.call(Hold(pack_keys(self._names.keys_of(keys)), hold_s), Kept).flags]

    # ---- inside ---------------------------------------------------------------------------------------

    def _until_s(self) -> float:
        return time.monotonic() + self._call_s

    def _connected(self) -> Connection:
        one = self._connection
        if one is not None and one.process == os.getpid() and not one.is_lost:
            return one
        if self._process != os.getpid():
            self._begin_anew()
        with self._lock:
            if self._closed:
                raise UnavailableError("this Store is closed")
            one = self._connection
            if one is not None and not one.is_lost:
                return one
            if one is not None:
                one.close()
                self._connection = None
            if time.monotonic() < self._retry_from_s:
                raise UnavailableError(f"no node at {self._node} a moment ago")
            self._retry_from_s = time.monotonic() + RETRY_S
            try:
                self._connection = Connection(self._node, self._tenant, self._connect_s, self._call_s)
            except ProtocolError as error:
                raise UnavailableError(f"the node at {self._node} is not one we know: {error}") from error
            return self._connection

    def _begin_anew(self) -> None:
        """In a child that was forked: leave its parent's connection alone."""
        # A thread of the parent may have had the old lock.
        self._lock = threading.Lock()
        self._used, self._suspect = {}, {}
        if self._connection is not None:
            self._connection.abandon()
        self._connection = None
        self._retry_from_s = 0.0
        self._process = os.getpid()

    def _get_small(self, one: Connection, key: ChunkKey) -> bytes | None:
        """An object that the table lists, in one slot; None for any other."""
        for _ in range(TRIES):
            plan = listed(one, self._root, key)
            if plan is None or len(plan) != 1:
                return None
            data = bytes(one.view(plan[0].address, plan[0].length_bytes))
            if still(one, plan):
                if not is_whole(plan, data):
                    return None
                self._used[key] = None
                return data
        return None

    def _get_into_small(
        self, one: Connection, key: ChunkKey, plan: Plan | None, target: Bytes | None
    ) -> GetResult | None:
        """The same for an object of at most `SMALL_BYTES`, which is not worth being copied together with others."""
        if plan is None or len(plan) != 1 or target is None:
            return None
        length = plan[0].length_bytes
        if length > SMALL_BYTES or length > len(target):
            return None
        room = target.data[:length]
        room[:] = one.view(plan[0].address, length)
        if not still(one, plan) or not is_whole(plan, room):
            return None
        self._used[key] = None
        return GetResult(Outcome.DONE, length)

    def _surely_missing(self, one: Connection, keys: Sequence[ChunkKey]) -> bool:
        """Whether none of these is anywhere."""
        return one.lists_all and not any(one.table.find(key) for key in keys)

    def _read(
        self,
        one: Connection,
        keys: Sequence[ChunkKey],
        targets: list[Bytes | None],
        plans: Sequence[Plan | None],
        *,
        allocates: bool = False,
    ) -> list[GetResult]:
        """Read objects into memory; if it `allocates`, the targets are those that it makes, of the right lengths."""
        results = [MISSED] * len(keys)
        left: Sequence[int] = range(len(keys))
        for _ in range(TRIES):
            left, unlisted = self._copy(one, left, plans, targets, results, keys, allocates)
            if unlisted and not self._surely_missing(one, [keys[at] for at in unlisted]):
                self._read_leased(one, unlisted, targets, results, keys, allocates)
            if not left:
                break
            plans = [listed(one, self._root, keys[at]) for at in left]
        for at in left:
            results[at] = GetResult(Outcome.ERROR, reason="it was replaced again and again while it was copied")
        return results

    def _copy(
        self,
        one: Connection,
        left: Sequence[int],
        plans: Sequence[Plan | None],
        targets: list[Bytes | None],
        results: list[GetResult],
        keys: Sequence[ChunkKey],
        allocates: bool,
    ) -> tuple[list[int], list[int]]:
        """Copy what there are plans for; those to be planned anew, and those without a plan."""
        again: list[int] = []
        copies: list[tuple[Plan, Bytes]] = []
        turns: list[int] = []
        for at, plan in zip(left, plans, strict=True):
            if plan is None:
                continue
            length = length_of(plan)
            target = targets[at]
            if target is None or allocates:
                target = targets[at] = empty(length)
            if len(target) < length and not still(one, plan):
                again.append(at)
                continue
            if len(target) < length:
                reason = f"buffers[{at}]: expected {length} bytes, given {len(target)}; pass a longer one"
                results[at] = GetResult(Outcome.REFUSED, length, reason)
                continue
            copies.append((plan, target[:length]))
            turns.append(at)
        copy(one, copies)
        for at, (plan, target) in zip(turns, copies, strict=True):
            if not still(one, plan):
                again.append(at)
            elif is_whole(plan, target.data):
                results[at] = GetResult(Outcome.DONE, len(target))
                self._used[keys[at]] = None
            else:
                results[at] = GetResult(Outcome.ERROR, len(target), CORRUPT)
                self._suspect[keys[at]] = None
        return again, [at for at, plan in zip(left, plans, strict=True) if plan is None]

    def _read_leased(
        self,
        one: Connection,
        left: Sequence[int],
        targets: list[Bytes | None],
        results: list[GetResult],
        keys: Sequence[ChunkKey],
        allocates: bool,
    ) -> None:
        """The same for what the table does not list."""

        def use(turns: Sequence[int], plans: Sequence[Plan | None]) -> None:
            for turn in turns:
                results[left[turn]] = MISSED
            self._copy(one, [left[turn] for turn in turns], plans, targets, results, keys, allocates)

        unread = read_leased(one, self._root, [keys[at] for at in left], self._until_s(), use)
        for turn, reason in unread.items():
            results[left[turn]] = GetResult(Outcome.ERROR, reason=reason)

    def _tell(self, one: Connection) -> None:
        """Now and then, tell the node what was read without asking it, so that it leaves later."""
        now = time.monotonic()
        if self._suspect:
            suspect, self._suspect = self._suspect, {}
            one.call_quietly(Used(b"", pack_keys(suspect)))
        if self._used and (now >= self._tell_at_s or len(self._used) >= TELL_MAX):
            self._tell_at_s = now + TELL_S
            used, self._used = self._used, {}
            one.call_quietly(Used(pack_keys(used)))
