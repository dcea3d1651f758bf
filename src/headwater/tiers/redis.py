"""Keeps chunks in one Redis or Valkey server; `redis_chunks` says how they lie there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headwater.errors import UnavailableError
from headwater.ports import Piece
from headwater.tiers.codec import Codec, Plain
from headwater.tiers.connections import Connections
from headwater.tiers.endpoint import Endpoint
from headwater.tiers.header import Header
from headwater.tiers.redis_chunks import HEADER_END, RedisChunks
from headwater.tiers.resp import Connection, ServerError, command, explain
from headwater.types import Identity, Origin, Outcome, Usage

_INFO_BYTES = 1 << 20
_log = logging.getLogger(__name__)


_Move = Callable[[Connection, Sequence[Piece], list[Outcome], float], None]


class RedisTier:
    """One server. `cluster` separates those that share a server and no chunks; `ttl_s` is counted from the last use.

    Up to `connections` reads go on at a time, half as many writes, a question before each of those and two others, two
    deletions, and one probe, which waits for nobody. A connection is made when it is needed.
    `capacity_bytes` is what the server may hold where it has no `maxmemory` of its own. `warning` is what an operator
    should change about the server, once `usage` has seen it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        codec: Codec | None = None,
        *,
        cluster: str = "default",
        connections: int = 2,
        ttl_s: float | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self.warning: str | None = None
        self._endpoint, self._capacity_bytes, self._has_ttl = endpoint, capacity_bytes, ttl_s is not None
        self._chunks = RedisChunks(endpoint.name, cluster, codec or Plain(), ttl_s)
        # A read does not wait behind a write, and a question of a hundred bytes not behind a hundred megabytes.
        self._reads = Connections(endpoint, connections)
        self._writes = Connections(endpoint, max(connections // 2, 1))
        self._questions = Connections(endpoint, max(connections // 2, 1) + 2)
        self._upkeep = Connections(endpoint, 2)
        self._probes = Connections(endpoint, 1)

    def __repr__(self) -> str:
        return f"RedisTier({self._endpoint.name}, {self._chunks.prefix}*)"

    def holds(self, identities: Sequence[Identity], until_s: float) -> list[bool]:
        """See `LowerTier`."""
        if not identities:
            return []
        with self._questions.one(until_s) as link:
            link.send([self._chunks.questions(identities)], until_s)
            found = link.integers(len(identities), until_s)
            for it in found:
                if isinstance(it, ServerError):
                    raise UnavailableError(f"{self._endpoint.name}: {explain(it)}")
            return [it == 1 for it in found]

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        return self._each(self._reads, pieces, until_s, self._chunks.read)

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        return self._each(self._writes, pieces, until_s, self._chunks.write)

    def delete(self, identities: Sequence[Identity], until_s: float) -> None:
        """See `LowerTier`."""
        if not identities:
            return
        with self._upkeep.one(until_s) as link:
            names: list[bytes] = []
            for it, header in zip(identities, self._chunks.headers(link, identities, until_s), strict=True):
                # The header goes first: what is half deleted is not found.
                names.append(self._chunks.header_name(it))
                if isinstance(header, Header):
                    names += self._chunks.names(it, header)
            self._chunks.unlink(link, names, until_s)

    def clear(self, origin: Origin, until_s: float) -> int:
        """See `LowerTier`; asks the server for all its keys, which slows nobody down but takes long."""
        found, cursor = 0, b"0"
        pattern = self._chunks.pattern(origin)
        with self._upkeep.one(until_s) as link:
            while True:
                page = link.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000", until_s=until_s)
                match page:
                    case ServerError():
                        raise UnavailableError(f"{self._endpoint.name}: {explain(page)}")
                    case [bytes() as cursor, list() as keys]:
                        names = [it for it in keys if isinstance(it, bytes)]
                    case _:
                        raise UnavailableError(f"{self._endpoint.name} gave no list of keys")
                self._chunks.unlink(link, names, until_s)
                found += sum(it.endswith(HEADER_END) for it in names)
                if cursor == b"0":
                    return found

    def usage(self, until_s: float) -> Usage:
        """See `LowerTier`; proves with a key that expires that the server takes writes."""
        with self._probes.one(until_s) as link:
            probe = link.call(b"SET", self._chunks.prefix.encode() + b"probe", b"1", b"PX", b"60000", until_s=until_s)
            if isinstance(probe, ServerError) and probe.code != "OOM":
                raise UnavailableError(f"{self._endpoint.name}: {explain(probe)}")
            link.send([command(b"INFO", b"memory")], until_s)
            told = link.reply(until_s, _INFO_BYTES)
        # Who may not ask (a managed service, an ACL) knows less, and goes on.
        info = _fields(told) if isinstance(told, bytes) else {}
        self._advise(info)
        used, most = info.get("used_memory", ""), info.get("maxmemory", "")
        known = [it for it in (int(most) if most.isdigit() else 0, self._capacity_bytes or 0) if it]
        return Usage(min(known) if known else None, int(used) if used.isdigit() else None)

    def close(self) -> None:
        """See `LowerTier`."""
        for it in (self._reads, self._writes, self._questions, self._upkeep, self._probes):
            it.close()

    def _each(self, pool: Connections, pieces: Sequence[Piece], until_s: float, move: _Move) -> list[Outcome]:
        outcomes = [Outcome.FAILED] * len(pieces)
        try:
            if pieces:
                with pool.one(until_s) as link:
                    move(link, pieces, outcomes, until_s)
        except UnavailableError:
            if outcomes.count(Outcome.FAILED) == len(outcomes):
                raise
        return outcomes

    def _advise(self, info: dict[str, str]) -> None:
        """Say once what about this server will hurt its operator."""
        if self.warning is not None or not info:
            return
        policy = info.get("maxmemory_policy", "")
        if info.get("maxmemory") == "0" and not self._capacity_bytes:
            self.warning = "it has no maxmemory and grows until the machine is full; set it, or ?capacity="
        elif info.get("maxmemory") != "0" and not self._has_ttl:
            if policy == "noeviction":
                self.warning = "it keeps everything (maxmemory-policy noeviction) and takes nothing once it is full; "
                self.warning += "set allkeys-lru, or ?ttl="
            elif policy.startswith("volatile-"):
                self.warning = (
                    f"it evicts only what has an end (maxmemory-policy {policy}), which chunks have not, and "
                )
                self.warning += "takes nothing once it is full; set ?ttl=, or allkeys-lru"
        if self.warning:
            _log.warning("%s: %s", self._endpoint.name, self.warning)


def _fields(info: bytes) -> dict[str, str]:
    """INFO's `name:value` lines."""
    lines = info.decode("utf-8", "replace").splitlines()
    return {name: value for name, colon, value in (it.partition(":") for it in lines) if colon}
