"""What an operator may ask of a node: look at the tiers, explain, pin, prefetch, evict.

All of it is idempotent: asking twice does what asking once does. Namespaces are named by their roots, which `status`
and `namespaces` show, so that a program that is no engine can compute the keys of a prompt in any of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from headwater.core.cache import Cache
from headwater.core.fetch import Record
from headwater.core.levels import Level
from headwater.core.movement import Move
from headwater.errors import ProtocolError, RefusedError
from headwater.node.messages import FRAME_BYTES_MAX, KEYS_MAX, Evict, Explain, Namespaces, Pin, Pins, Prefetch, Tiers
from headwater.node.tiering import Tiering
from headwater.types import KEY_BYTES, ChunkKey, Outcome, TicketKind, split_keys

Local = Prefetch | Evict | Pin | Pins | Explain | Namespaces | Tiers
"""The wishes that one node can grant by itself."""
ASKED_MAX = 64
ANSWER_S = 10.0
"""How long a REMOTE tier's answer about keys is good enough for an explanation."""
EXPLAINED_KEYS_MAX = 8192
NAMESPACES_BYTES_MAX = FRAME_BYTES_MAX // 2
NAME_CHARS_SHOWN = 200
PINNED_SHARE = 0.5
PIN_S_MAX = 7 * 86400.0
PINS_SHOWN = 1000


class Asked:
    """What the REMOTE levels said about some keys: None until they have answered; those of `silent` never will."""

    def __init__(self, at_s: float, levels: Sequence[int]) -> None:
        self.at_s = at_s
        self.held: dict[int, set[ChunkKey] | None] = dict.fromkeys(levels)
        self.silent: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Whether some level has yet to answer."""
        return any(it is None and number not in self.silent for number, it in self.held.items())

    def told(self, level: int, move: Move, outcomes: list[Outcome], now: float) -> None:
        """A level has answered, or failed to; a chunk is there when all its groups' parts are."""
        if Outcome.FAILED in outcomes:
            self.silent.add(level)
            return
        missing = {part.key for part, it in zip(move.command.parts, outcomes, strict=True) if it is not Outcome.DONE}
        self.held[level] = {part.key for part in move.command.parts} - missing


class Wishes:
    """An operator's side of a node. For the node's loop."""

    def __init__(self, host: Cache, tiering: Tiering, spaces: Mapping[bytes, int]) -> None:
        self._host, self._tiering, self._spaces = host, tiering, spaces
        self._pins: dict[tuple[str, int, bytes], int] = {}
        self._asked: OrderedDict[tuple[int, bytes], Asked] = OrderedDict()

    def grant(self, wish: Local, now: float) -> dict[str, object]:
        """The answer, JSON-able; raises RefusedError or ProtocolError."""
        if isinstance(wish, Tiers):
            return {"tiers": self.tiers(now), "fetches": self.fetches()}
        if isinstance(wish, Namespaces):
            return {"namespaces": self._namespaces()}
        if isinstance(wish, Pins):
            return {"pins": self._list_pins(now)}
        if isinstance(wish, Explain) and wish.request:
            return {"request": self._request(wish.request, now)}
        space = self._space(wish.root)
        keys = _keys(wish.keys)
        if isinstance(wish, Explain):
            return self._explain(space, keys, now)
        if isinstance(wish, Prefetch):
            if not wish.is_prompt:
                whole = "those of one prompt, in order, from its start"
                raise RefusedError("keys", whole, "keys alone", "name the prompt itself, by its tokens or text")
            name = f"prefetch/{space}/{wish.keys[-KEY_BYTES:].hex()}"
            return {"chunks": self._tiering.fetches.prefetch("", name, space, keys, now)}
        if isinstance(wish, Pin):
            return self._pin(wish, space, keys, now)
        movement = self._tiering.movement
        if not wish.begins:
            return {"pending": list(movement.pending(space))}
        self._asked.clear()
        if not keys:
            it = self._tiering.clear(space, now)
            return {"deleted": it.deleted, "kept": it.kept, "pins": it.pins, "pending": list(it.pending)}
        self._tiering.fetches.let_go_all()
        it = movement.evict(space, keys, now, below=wish.below)
        return {"deleted": it.deleted, "kept": it.kept}

    # ---- looking --------------------------------------------------------------------------------------

    def tiers(self, now: float) -> list[dict[str, object]]:
        """Every tier, nearest first."""
        lookups = sum(space.lookup_tokens for space in self._host.spaces)
        hits = sum(space.hit_tokens for space in self._host.spaces)
        below = sum(level.sums.hit_tokens for level in self._tiering.levels)
        pool = self._host.pool
        host: dict[str, object] = {
            "name": "host",
            "tier": "host",
            "health": "well",
            "capacity_bytes": pool.capacity_bytes,
            "used_bytes": pool.taken_bytes,
            "lookup_tokens": lookups,
            "hit_tokens": max(hits - below, 0),
        }
        levels = enumerate(self._tiering.levels)
        return [host, *(_level(level, lookups, now) | self._trouble(number, level, now) for number, level in levels)]

    def _trouble(self, number: int, level: Level, now: float) -> dict[str, object]:
        """Why a level last failed, and how its book-keeping on disk does."""
        error = self._tiering.last_error(number)
        told: dict[str, object] = {
            "last_error": None if error is None else {"reason": error[1], "seconds_ago": round(now - error[0], 3)}
        }
        journal = self._tiering.journal
        if level.disk is not None and journal is not None:
            told |= {
                "recovered_chunks": self._tiering.recovered_chunks,
                "journal_failures": journal.failures,
                "journal_forgotten_chunks": journal.forgotten,
                "journal_broken": journal.broken,
            }
        return told

    def fetches(self) -> dict[str, object]:
        """What came of all fetches together, and how far their estimates were off."""
        fetches = self._tiering.fetches
        calibration = fetches.calibration
        return {
            "begun": fetches.begun,
            "cut": fetches.cut,
            "estimates": calibration.count,
            "estimate_error": round(calibration.error, 4),
            "estimate_bias": round(calibration.bias, 4),
        }

    def _namespaces(self) -> list[dict[str, object]]:
        """The namespaces, those first that hold most, as many as fit into an answer."""
        spaces = self._host.spaces
        room_bytes, told = NAMESPACES_BYTES_MAX, []
        for root, space in sorted(self._spaces.items(), key=lambda it: spaces[it[1]].held_bytes, reverse=True):
            it = self._namespace(root, space)
            room_bytes -= len(msgspec.json.encode(it))
            if room_bytes < 0:
                break
            told.append(it)
        return told

    def _namespace(self, root: bytes, space: int) -> dict[str, object]:
        origin = self._tiering.origin(space)
        it = self._host.spaces[space]
        names: dict[str, str] = msgspec.to_builtins(origin.namespace)
        return {
            "root": root.hex(),
            "namespace": {field: name[:NAME_CHARS_SHOWN] for field, name in names.items()},
            "chunk_tokens": origin.layout.chunk_tokens,
            "layout": msgspec.to_builtins(origin.layout),
            "held_bytes": it.held_bytes,
        }

    def _explain(self, space: int, keys: Sequence[ChunkKey], now: float) -> dict[str, object]:
        if len(keys) > EXPLAINED_KEYS_MAX:
            most = f"at most {EXPLAINED_KEYS_MAX} in one question"
            raise RefusedError("keys", most, f"{len(keys)}", "ask for a part of the prompt")
        asked = self._ask(space, keys, now)
        levels = self._tiering.levels
        if not asked.waiting:
            self._asked.pop((space, b"".join(keys)), None)
        return {
            "waiting": asked.waiting,
            "tiers": [level.name for level in levels],
            "chunks": [self._chunk(space, key, asked, now) for key in keys],
        }

    def _chunk(self, space: int, key: ChunkKey, asked: Asked, now: float) -> dict[str, object]:
        groups = range(len(self._host.spaces[space].index))
        levels = self._tiering.levels
        event = self._tiering.history.last(key)
        last = None
        if event is not None:
            last = {
                "event": event.what,
                "tier": event.where,
                "seconds_ago": round(now - event.at_s, 3),
                "for_namespace": None if event.cause < 0 else self._tiering.origin(event.cause).root.hex(),
            }
        return {
            "key": key.hex(),
            "host": all(self._host.is_ready(space, group, key) for group in groups),
            "disk": any(all(level.serves(space, group, key) for group in groups) for level in levels),
            "remotes": [None if held is None else key in held for held in asked.held.values()],
            "queued": [level.name for level in levels if (space, key) in level.queue],
            "last": last,
        }

    def _ask(self, space: int, keys: Sequence[ChunkKey], now: float) -> Asked:
        """Ask the REMOTE levels, unless they were asked the same a moment ago."""
        name = (space, b"".join(keys))
        known = self._asked.get(name)
        if known is not None and now - known.at_s < ANSWER_S:
            return known
        levels = self._tiering.levels
        remotes = [number for number, level in enumerate(levels) if level.disk is None]
        asked = self._asked[name] = Asked(now, remotes)
        while len(self._asked) > ASKED_MAX:
            self._asked.popitem(last=False)
        parts = [(group, key) for key in keys for group in range(len(self._host.spaces[space].index))]
        for number in remotes:
            if parts and levels[number].well and space not in levels[number].clearing:
                self._tiering.movement.ask(number, space, parts, now, partial(asked.told, number))
            elif parts and space not in levels[number].clearing:
                asked.silent.add(number)
            else:
                asked.held[number] = set()
        return asked

    def _request(self, request: str, now: float) -> dict[str, object]:
        records = self._tiering.fetches.records
        record = records.get(request)
        if record is None:
            # vLLM adds a suffix to the names that its API shows, so a beginning is enough if it is unique.
            found = [name for name in records if name.startswith(request)]
            if len(found) != 1:
                given = f"{len(found)} of the last {len(records)} requests begin so"
                raise RefusedError("request", "one of the last requests", given, "give the whole name, sooner")
            record = records[found[0]]
        return self._record(record, now)

    def _record(self, record: Record, now: float) -> dict[str, object]:
        return {
            "request": record.request,
            "namespace": self._tiering.origin(record.space).root.hex(),
            "keys": [key.hex() for key in record.keys],
            "chunks": record.chunks,
            "host": record.here,
            "brought": dict(record.brought),
            "planned": record.planned,
            "waited_s": round(record.waited_s, 6),
            "estimate_s": record.estimate_s,
            "tokens_s": record.tokens_s,
            "why": record.why,
            "seconds_ago": round(now - record.at_s, 3),
        }

    # ---- changing -------------------------------------------------------------------------------------

    def _pin(self, wish: Pin, space: int, keys: Sequence[ChunkKey], now: float) -> dict[str, object]:
        if not 0.0 <= wish.ttl_s <= PIN_S_MAX:
            raise RefusedError("ttl", f"0 to {PIN_S_MAX:.0f} s", f"{wish.ttl_s}", "choose a time within that")
        name = (wish.pinner, space, wish.keys)
        self._forget_ended_pins()
        old = [it for it in self._pins if it == name or (not wish.ttl_s and it[:2] == name[:2])]
        for it in old:
            self._host.release("", self._pins.pop(it))
        if not wish.ttl_s:
            return {"pinned": 0, "released": len(old)}
        slots = self._host.spaces[space].slot_bytes
        pinned = sum(
            self._host.pool.slot_bytes(self._host.entries.address[row])
            for ticket in self._pins.values()
            for row in self._host.tickets[ticket].rows
        )
        most = int(PINNED_SHARE * self._host.pool.capacity_bytes)
        if pinned + len(keys) * sum(slots) > most:
            given = f"{pinned + len(keys) * sum(slots)} bytes"
            raise RefusedError("pins", f"at most {most} bytes, half of the host memory", given, "unpin something first")
        parts = [(group, key) for key in keys for group in range(len(slots))]
        ticket, _ = self._host.hold("", TicketKind.PIN, space, parts, now + wish.ttl_s)
        if ticket:
            self._pins[name] = ticket
        held = self._host.contains(space, keys)
        return {"pinned": sum(held), "released": len(old)}

    def _forget_ended_pins(self) -> None:
        self._pins = {it: ticket for it, ticket in self._pins.items() if ticket in self._host.tickets}

    def _list_pins(self, now: float) -> list[dict[str, object]]:
        """Those that last longest first, as many as fit into an answer."""
        self._forget_ended_pins()
        told: list[tuple[float, dict[str, object]]] = []
        for (pinner, space, _), number in self._pins.items():
            ticket = self._host.tickets[number]
            rows = [self._host.entries.address[row] for row in ticket.rows]
            left_s = round(max(ticket.deadline_s - now, 0.0), 3)
            it: dict[str, object] = {
                "pinner": pinner,
                "namespace": self._tiering.origin(space).root.hex(),
                "tenant": self._tiering.origin(space).namespace.tenant[:NAME_CHARS_SHOWN],
                "chunks": len({self._host.entries.keys[row] for row in ticket.rows}),
                "bytes": sum(map(self._host.pool.slot_bytes, rows)),
                "seconds_left": left_s,
            }
            told.append((left_s, it))
        told.sort(key=lambda it: it[0], reverse=True)
        return [it for _, it in told[:PINS_SHOWN]]

    def _space(self, root: bytes) -> int:
        space = self._spaces.get(root)
        if space is None:
            raise RefusedError("namespace", "one that this node knows", root.hex()[:12], "see `headwater status`")
        return space


def _level(level: Level, lookups: int, now: float) -> dict[str, object]:
    disk = level.disk
    errors = {it.value: level.sums.outcomes[it] for it in Outcome if it is not Outcome.DONE}
    return {
        "name": level.name,
        "tier": level.tier.value,
        "health": level.health.value,
        "admission": level.admission.value,
        "capacity_bytes": disk.pool.capacity_bytes if disk is not None else level.usage.capacity_bytes,
        "used_bytes": disk.pool.taken_bytes if disk is not None else level.usage.used_bytes,
        "quarantined_bytes": 0 if disk is None else disk.pool.quarantined_bytes,
        "full": now < level.full_until_s,
        "lookup_tokens": lookups,
        "hit_tokens": level.sums.hit_tokens,
        "read_bytes": level.sums.read_bytes,
        "read_chunks": level.sums.read_chunks,
        "read_bytes_s": level.reading.bytes_s,
        "read_latency_s": level.reading.latency_s,
        "written_bytes": level.sums.written_bytes,
        "written_chunks": level.sums.written_chunks,
        "write_bytes_s": level.writing.bytes_s,
        "write_latency_s": level.writing.latency_s,
        "queued_chunks": len(level.queue),
        "clearing": len(level.clearing),
        "moving_bytes": level.reading_bytes + level.writing_bytes,
        "dropped_chunks": level.sums.dropped_chunks,
        "declined": level.sums.declined,
        "errors": errors,
        "opened": level.breaker.opened,
        "probes": level.breaker.probes,
    }


def _keys(packed: bytes) -> list[ChunkKey]:
    if len(packed) > KEYS_MAX * KEY_BYTES:
        raise ProtocolError(f"{len(packed) // KEY_BYTES} keys in one call, at most {KEYS_MAX} are allowed")
    try:
        return list(dict.fromkeys(split_keys(packed)))
    except ValueError as error:
        raise ProtocolError(str(error)) from error
