"""The directory in a Redis (7.0 or later) or Valkey server; `scripts` says how it lies there and what a verb does.

The server's clock rules silence, so those of the nodes do not matter. What comes from the server is taken as written by
somebody else: a member that cannot be read is left out, and an answer of the wrong shape is UnavailableError.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from headwater.core.directory import (
    FORGET_S,
    MOST_HOLDERS,
    MOST_REPORT_BYTES,
    SILENT_S,
    TIERS,
    bit_of,
    check_batch,
    check_beat,
    check_member,
    check_names,
    newer_life,
    serial_gap,
    unknown_number,
)
from headwater.directory.scripts import (
    ANNOUNCE,
    BEAT,
    HOLDER_BYTES,
    JOIN,
    LEAVE,
    LIST,
    LOCATE,
    NUMBER_BYTES,
    PRESENT,
    SWEEP,
    Script,
)
from headwater.errors import RefusedError, UnavailableError
from headwater.tiers.connections import Connections
from headwater.tiers.endpoint import Endpoint
from headwater.tiers.resp import Connection, Reply, ServerError, command, explain
from headwater.types import NAME_BYTES, Announced, Beat, Listed, Member, Replica, Standing

CALL_NAMES = 2048
"""Names in one run of a script, which keeps a server from everybody else for some milliseconds."""
SWEEP_ENTRIES = 512
MOST_MEMBER_BYTES = 16 << 10
MOST_MEMBERS = 16_384
RIGHTS = (
    "~headwater:* +ping +select +evalsha +script|load +time +hget +hset +hsetnx +hmget +hdel +hscan +zscore "
    "+zadd +zrem +zrangebyscore +del"
)
"""What a user of ours must be allowed, in the words of ACL SETUSER; `~headwater:{CLUSTER}:dir:*` will do."""
_NO_RIGHT = ("user executing the script can't", "ACL failure in script")
"""What servers say instead of NOPERM to a script that does what its user may not."""
_STANDINGS = {it.value.encode(): it for it in Standing}
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Member)


class RedisDirectory:
    """See `ports.Directory`. `cluster` separates those that share a server and nothing else.

    Up to `connections` calls go on at a time, and a beat or a join waits for none of them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        cluster: str = "default",
        connections: int = 4,
        silent_s: float = SILENT_S,
        forget_s: float = FORGET_S,
    ) -> None:
        self.prefix = f"headwater:{{{cluster}}}:dir:"
        self._name = endpoint.name
        self._calls = Connections(endpoint, connections)
        self._beats = Connections(endpoint, 1)
        self._limits = [b"%d" % int(silent_s * 1000), b"%d" % int(forget_s * 1000)]

    def __repr__(self) -> str:
        return f"RedisDirectory({self._name}, {self.prefix}*)"

    def join(self, member: Member, until_s: float) -> int:
        """See `Directory`."""
        check_member(member)
        record = _encoder.encode(member)
        if len(record) > MOST_MEMBER_BYTES:
            raise RefusedError("member", f"at most {MOST_MEMBER_BYTES} bytes", str(len(record)), "give it fewer labels")
        words = member.name.encode(), b"%020d" % member.epoch, record, _token()
        match self._run(self._beats, JOIN, [self._call(JOIN, *words)], until_s)[0]:
            case [b"number", bytes(number)] if len(number) == NUMBER_BYTES:
                return int.from_bytes(number, "big")
            case [b"older", bytes(epoch)] if epoch.isdigit():
                raise newer_life(member, int(epoch))
            case reply:
                raise self._nonsense(reply)

    def beat(self, number: int, standing: Standing, report: bytes, until_s: float) -> Beat | None:
        """See `Directory`."""
        check_beat(standing, report)
        if (packed := _pack(number)) is None:
            return None
        call = self._call(BEAT, packed, standing.value.encode(), report, _token())
        match self._run(self._beats, BEAT, [call], until_s)[0]:
            case []:
                return None
            case [bytes(generation), bytes(serial), bytes(version)] if len(generation) <= 64:
                return Beat(generation.decode("ascii", "replace"), _whole(serial), _whole(version))
            case reply:
                raise self._nonsense(reply)

    def announce(self, number: int, serial: int, changes: Sequence[Announced], until_s: float) -> bytes:
        """See `Directory`; a serial that leaves some out is refused, too."""
        check_batch(serial, changes)
        if (packed := _pack(number)) is None:
            raise unknown_number(number)
        kinds = bytes([bit_of(it.tier) + it.present * PRESENT for it in changes])
        call = self._call(ANNOUNCE, packed, b"%d" % serial, kinds, names=[it.name for it in changes])
        match self._run(self._calls, ANNOUNCE, [call], until_s)[0]:
            case bytes(counts) if len(counts) == len(changes):
                return counts
            case -1:
                raise unknown_number(number)
            case int(last) if 0 <= last < serial:
                raise serial_gap(serial, last)
            case reply:
                raise self._nonsense(reply)

    def locate(self, names: Sequence[bytes], until_s: float) -> list[tuple[Replica, ...]]:
        """See `Directory`."""
        check_names(names)
        if not names:
            return []
        starts = range(0, len(names), CALL_NAMES)
        calls = [self._call(LOCATE, names=names[start : start + CALL_NAMES]) for start in starts]
        found: list[tuple[Replica, ...]] = []
        known: dict[bytes, tuple[Replica, ...]] = {b"": ()}
        for at, reply in enumerate(self._run(self._calls, LOCATE, calls, until_s)):
            if not isinstance(reply, bytes) or not _read_holders(reply, known, found):
                raise self._nonsense(reply)
            if len(found) != min((at + 1) * CALL_NAMES, len(names)):
                raise self._nonsense(reply)
        return found

    def members(self, until_s: float) -> list[Listed]:
        """See `Directory`; in the order of their numbers."""
        reply = self._run(self._calls, LIST, [self._call(LIST)], until_s)[0]
        if not isinstance(reply, list) or len(reply) > MOST_MEMBERS:
            raise self._nonsense(reply)
        return sorted(filter(None, map(_read_member, reply)), key=lambda it: it.number)

    def leave(self, number: int, until_s: float) -> None:
        """See `Directory`."""
        if (packed := _pack(number)) is not None:
            self._run(self._beats, LEAVE, [self._call(LEAVE, packed)], until_s)

    def sweep(self, until_s: float) -> bool:
        """Drop what ended lives have left behind, in small steps for half the time until then; whether there is more to
        do. All nodes share one round, and there is nothing to do while nobody has left since the last one."""
        stop_s = (time.monotonic() + until_s) / 2
        calls = [self._call(SWEEP, b"%d" % SWEEP_ENTRIES)]
        while (reply := self._run(self._calls, SWEEP, calls, until_s)[0]) == 1:
            if time.monotonic() >= stop_s:
                return True
        if reply != 0:
            raise self._nonsense(reply)
        return False

    def close(self) -> None:
        """See `Directory`."""
        self._calls.close()
        self._beats.close()

    def _call(self, script: Script, *words: bytes, names: Sequence[bytes] = ()) -> bytes:
        """A run of a script as it goes over the wire."""
        whole = command(b"EVALSHA", script.digest, b"1", self.prefix.encode(), *self._limits, *words)
        if not names:
            return whole
        # Hundreds of names of one length: a join is ten times as fast as one at a time.
        start = whole.index(b"\r\n")
        between = b"$%d\r\n" % NAME_BYTES
        count = b"*%d" % (6 + len(words) + len(names))
        return count + whole[start:] + between + (b"\r\n" + between).join(names) + b"\r\n"

    def _run(self, pool: Connections, script: Script, calls: Sequence[bytes], until_s: float) -> list[Reply]:
        """The replies to calls of a script, all sent at once. A server that does not have it is given it."""
        most = CALL_NAMES * (1 + MOST_HOLDERS * HOLDER_BYTES)
        with pool.one(until_s) as link:
            for _ in range(2):
                link.send(calls, until_s)
                replies = [link.reply(until_s, most) for _ in calls]
                failure = next((it for it in replies if isinstance(it, ServerError)), None)
                if failure is None:
                    return replies
                if failure.code != "NOSCRIPT":
                    break
                failure = self._load(link, script, until_s)
                if failure is not None:
                    break
        raise self._refusal(failure)

    def _load(self, link: Connection, script: Script, until_s: float) -> ServerError | None:
        reply = link.call(b"SCRIPT", b"LOAD", script.body, until_s=until_s)
        return reply if isinstance(reply, ServerError) else None

    def _refusal(self, error: ServerError | None) -> UnavailableError:
        remedies = {
            "NOSCRIPT": "it forgets scripts as fast as they are loaded",
            "NOPERM": f"the user may not do this; it needs {RIGHTS}",
            "OOM": "its maxmemory is used up; raise it, or give the directory a server of its own",
            "WRONGTYPE": f"another program has written to {self.prefix}*; delete those keys",
        }
        code = error.code if error else "NOSCRIPT"
        if error and any(it in error.text for it in _NO_RIGHT):
            code = "NOPERM"
        why = f"{code}: {remedies[code]}" if code in remedies or error is None else explain(error)
        return UnavailableError(f"the directory at {self._name}: {why}")

    def _nonsense(self, reply: Reply) -> UnavailableError:
        kind = type(reply).__name__
        return UnavailableError(
            f"the directory at {self._name} gave an answer that is none ({kind}); is it headwater's?"
        )


def _token() -> bytes:
    """The generation, should the directory be empty: a new one each time."""
    return secrets.token_hex(8).encode()


def _pack(number: int) -> bytes | None:
    return number.to_bytes(NUMBER_BYTES, "big") if 0 < number < 1 << 8 * NUMBER_BYTES else None


def _whole(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) <= 20 else 0


def _read_holders(reply: bytes, known: dict[bytes, tuple[Replica, ...]], found: list[tuple[Replica, ...]]) -> bool:
    """The answers for some names: for each a count and so many holders. Whether it is that."""
    at, end = 0, len(reply)
    while at < end:
        stop = at + 1 + reply[at] * HOLDER_BYTES
        packed = reply[at + 1 : stop]
        replicas = known.get(packed)
        if replicas is None:
            if stop > end:
                return False
            replicas = known[packed] = _replicas(packed)
        found.append(replicas)
        at = stop
    return at == end


def _replicas(packed: bytes) -> tuple[Replica, ...]:
    holders = (packed[at : at + HOLDER_BYTES] for at in range(0, len(packed), HOLDER_BYTES))
    return tuple(
        Replica(int.from_bytes(it[:NUMBER_BYTES], "big"), tier) for it in holders for tier in TIERS.get(it[-1], ())
    )


def _read_member(reply: Reply) -> Listed | None:
    """One member; None if it is not one that we could have written."""
    match reply:
        case [bytes(number), int(heard_ms), bytes(record), bytes(standing), bytes(report)]:
            if len(number) != NUMBER_BYTES or standing not in _STANDINGS or len(report) > MOST_REPORT_BYTES:
                return None
        case _:
            return None
    if len(record) > MOST_MEMBER_BYTES:
        return None
    try:
        member = _decoder.decode(record)
        check_member(member)
    except (msgspec.MsgspecError, RefusedError, UnicodeError, RecursionError):
        return None
    return Listed(int.from_bytes(number, "big"), member, _STANDINGS[standing], max(heard_ms, 0) / 1000, report)
