"""Inputs for a node that no honest client sends: not the protocol, or the protocol with values that cannot be meant."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from headwater.node.messages import (
    FRAME_BYTES_MAX,
    KEYS_MAX,
    PROTOCOL,
    Clear,
    Contains,
    Done,
    Evict,
    Explain,
    Forget,
    Hello,
    Load,
    Match,
    Namespaces,
    Pin,
    Pins,
    Prefetch,
    Register,
    Release,
    Request,
    Reserve,
    Status,
    Tiers,
    encode,
)
from headwater.types import HitRule, KVGroup, KVLayout, pack_keys
from tests.node.peers import LAYOUT, keys, namespace

KEYS = keys(2000, "fuzz")
INTS = (0, 1, 2, -1, 255, 65_536, 2**31, 2**32 - 1, 2**40, 2**63 - 1, -(2**63), 2**64 - 1)
PACK = msgspec.msgpack.Encoder().encode


def frame(body: bytes) -> bytes:
    """A body with the length that it has."""
    return struct.pack("<I", len(body)) + body


class Inputs:
    """Draws inputs, always the same ones for a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tickets: list[int] = []
        self._kinds: Sequence[Callable[[], bytes]] = (
            self.random_bytes,
            self.mutated,
            self.mutated,
            self.mutated,
            self.long_header,
            self.truncated,
            self.wrong_types,
            self.wrong_types,
            self.nested,
            self.counted_wrongly,
        )

    # ---- what is not the protocol ------------------------------------------------------------------------

    def garbage(self) -> bytes:
        """Bytes that are probably no message."""
        return self.draw.choice(self._kinds)()

    def random_bytes(self) -> bytes:
        """Noise, with or without a length that fits."""
        body = self.draw.randbytes(self.draw.choice((0, 1, 3, 4, 5, 17, 200)))
        return frame(body) if self.draw.random() < 0.7 else body

    def mutated(self) -> bytes:
        """A good message with some bytes changed, inserted, left out or doubled."""
        body = bytearray(encode(self.hostile())[4:])
        for _ in range(self.draw.randint(1, 4)):
            at = self.draw.randrange(len(body) + 1)
            change = self.draw.randrange(4)
            if change == 0 and at < len(body):
                body[at] ^= 1 << self.draw.randrange(8)
            elif change == 1:
                body[at:at] = self.draw.randbytes(self.draw.randint(1, 8))
            elif change == 2:
                del body[at : at + self.draw.randint(1, 8)]
            else:
                body += body[at : at + 64]
        return frame(bytes(body)) if self.draw.random() < 0.9 else bytes(body)

    def long_header(self) -> bytes:
        """An announcement of more than is allowed."""
        length = self.draw.choice(
            (FRAME_BYTES_MAX + 1, 2**31, 2**32 - 1, self.draw.randint(FRAME_BYTES_MAX, 2**32 - 1))
        )
        return struct.pack("<I", length) + self.draw.randbytes(self.draw.randint(0, 100))

    def truncated(self) -> bytes:
        """The beginning of a good message."""
        whole = encode(self.hostile())
        return bytes(whole[: self.draw.randrange(len(whole))])

    def wrong_types(self) -> bytes:
        """A good tag, and anything after it."""
        return frame(PACK([self.draw.randint(0, 20), *(self.value(3) for _ in range(self.draw.randint(0, 8)))]))

    def nested(self) -> bytes:
        """Arrays or maps in each other, as far as a frame goes or only deep."""
        depth = self.draw.choice((10, 100, 900, 1100, 5000, 50_000))
        opening = self.draw.choice((b"\x91", b"\x81\x01", b"\xdc\x00\x01"))
        head = self.draw.choice((b"", b"\x92\x11", b"\x92\x0e", b"\x94\x05\x00\xc4\x00", b"\x93\x03"))
        return frame(head + opening * depth + b"\xc0")

    def counted_wrongly(self) -> bytes:
        """Arrays, maps, strings and byte runs that say they are longer than they are."""
        size = struct.pack(">I", self.draw.choice((2**16, 2**24, 2**31, 2**32 - 1)))
        kind = self.draw.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"))
        head = self.draw.choice((b"", b"\x92\x0e", b"\x95\x01\x01", b"\x94\x05\x00", b"\x93\x03", b"\x92\x11"))
        return frame(head + kind + size + self.draw.randbytes(20))

    def value(self, depth: int) -> Any:
        """Anything that msgpack can say."""
        kind = self.draw.randrange(9 if depth else 7)
        if kind == 0:
            return self.draw.choice(INTS)
        if kind == 1:
            return self.draw.choice((True, False, None))
        if kind == 2:
            return self.draw.choice((0.5, -1e308, float("inf"), float("nan")))
        if kind == 3:
            return self.draw.choice(("", "x" * 300, "\x00", "é\U0001f600"))
        if kind in (4, 5):
            return self.draw.randbytes(self.draw.choice((0, 1, 15, 16, 48)))
        if kind == 6:
            return msgspec.msgpack.Ext(self.draw.randrange(-128, 128), b"xyz")
        if kind == 7:
            return [self.value(depth - 1) for _ in range(self.draw.randint(0, 5))]
        return {str(key): self.value(depth - 1) for key in range(self.draw.randint(0, 3))}

    # ---- the protocol, with values that cannot be meant ----------------------------------------------------

    def hostile(self) -> Request:
        """A message that decodes; its values range from good to absurd."""
        kinds = (self._question, self._question, self._load, self._reserve, self._reserve, self._end, self._end)
        return self.draw.choice((*kinds, *kinds, self._register, self._rest))()

    def big(self) -> Request:
        """A message as large as one can be."""
        return self.draw.choice(BIG)()

    def _space(self) -> int:
        return 0 if self.draw.random() < 0.995 else self.draw.choice(INTS)

    def _packed(self) -> bytes:
        shape = self.draw.randrange(100)
        if shape == 0:
            return self.draw.randbytes(self.draw.randint(1, 50))
        if shape == 1:
            return b""
        start = self.draw.randrange(len(KEYS))
        run = KEYS[start : start + self.draw.choice((1, 2, 8, 40))]
        if shape == 2:
            run = run + run[::-1]
        return pack_keys(run)

    def _shards(self) -> tuple[int, ...]:
        if self.draw.random() < 0.98:
            return (0,)
        return self.draw.choice(((), (0, 0), (1,), (-1,), (10**9,), tuple(range(100)), (0, 2**63)))

    def _question(self) -> Request:
        if self.draw.random() < 0.5:
            request = self.draw.choice(("", "", "r", f"{self.draw.randrange(50)}", "x" * 1025, "\x00"))
            rate = self.draw.choice((0.0, 1e4, -1.0, float("inf"), float("nan"), 1e308))
            return Match(self._space(), self._packed(), self.draw.random() < 0.5, request, rate)
        return Contains(self._space(), self._packed())

    def _load(self) -> Request:
        first = 0 if self.draw.random() < 0.7 else self.draw.choice(INTS[:-1])
        return Load(self._space(), self._packed(), first, self._shards())

    def _reserve(self) -> Request:
        parent = b"" if self.draw.random() < 0.6 else self.draw.choice(KEYS)
        if self.draw.random() < 0.005:
            parent = self.draw.randbytes(self.draw.choice((1, 15, 17, 32)))
        lacking: tuple[tuple[int, int], ...] = ()
        if self.draw.random() < 0.1:
            lacking = tuple(
                (self.draw.choice((0, 1, -1, 2**63)), self.draw.choice((0, 1, 5, -1, 2**62)))
                for _ in range(self.draw.randint(1, 5))
            )
        return Reserve(self._space(), parent, self._packed(), lacking, self._shards())

    def _ticket(self) -> int:
        if self.tickets and self.draw.random() < 0.8:
            return self.draw.choice(self.tickets[-40:])
        return self.draw.choice(INTS)

    def _end(self) -> Request:
        if self.draw.random() < 0.7:
            shard = 0 if self.draw.random() < 0.9 else self.draw.choice(INTS)
            failed = () if self.draw.random() < 0.7 else tuple(self.draw.choices(INTS, k=self.draw.randint(1, 6)))
            return Done(self._ticket(), shard, failed)
        return Release(tuple(self._ticket() for _ in range(self.draw.randint(0, 4))))

    def _register(self) -> Request:
        group = LAYOUT.groups[0]
        layout = self.draw.choice(
            (
                LAYOUT,
                LAYOUT,
                LAYOUT,
                replace(LAYOUT, chunk_tokens=self.draw.choice(INTS)),
                KVLayout(16, ()),
                KVLayout(16, (replace(group, block_bytes=self.draw.choice(INTS)),)),
                KVLayout(16, (replace(group, block_tokens=self.draw.choice(INTS)),)),
                KVLayout(16, (replace(group, shard_layers=(self.draw.choice(INTS),) * self.draw.choice((0, 1, 9))),)),
                KVLayout(16, (replace(group, window_tokens=self.draw.choice(INTS), rule=HitRule.WINDOW),)),
                KVLayout(16, LAYOUT.groups * self.draw.choice((2, 64, 65, 300))),
            )
        )
        groups = layout.fingerprint() if self.draw.random() < 0.9 else self.draw.choice(("", "x" * 5000))
        field = self.draw.choice(("model", "salt", "tenant"))
        value = self.draw.choice(("m", "m", "", "\x00", "x" * 1025, "é"))
        return Register(replace(namespace(groups=groups), **{field: value}), layout)

    def _rest(self) -> Request:
        root = self.draw.choice((namespace().root(), bytes(32), b"", b"x" * 100))
        ttl_s = self.draw.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 1e308))
        rest: tuple[Request, ...] = (
            Clear(self._space(), self.draw.random() < 0.5),
            Forget(tuple(f"{number}" for number in range(self.draw.randrange(5)))),
            Prefetch(root, self._packed(), self.draw.random() < 0.9),
            Evict(root, self._packed(), self.draw.random() < 0.5, self.draw.random() < 0.8),
            Pin(root, self._packed(), self.draw.choice(("", "me", "x" * 5000)), ttl_s),
            Explain(root, self._packed(), self.draw.choice(("", "", "1", "x" * 5000))),
            Namespaces(),
            Pins(),
            Tiers(),
        )
        return self.draw.choice(rest) if self.draw.random() < 0.2 else Status()


BIG: tuple[Callable[[], Request], ...] = (
    lambda: Match(0, bytes(16 * KEYS_MAX), False),
    lambda: Contains(0, bytes(16 * KEYS_MAX + 16)),
    lambda: Load(0, bytes(16), 0, tuple(range(4096))),
    lambda: Load(0, bytes(16), 0, tuple(range(100_000))),
    lambda: Reserve(0, b"", pack_keys(KEYS), tuple((0, index) for index in range(60_000)), (0,)),
    lambda: Reserve(0, b"", bytes(16), tuple((0, index) for index in range(200_000)), (0,)),
    lambda: Done(0, 0, tuple(range(KEYS_MAX))),
    lambda: Done(0, 0, tuple(range(300_000))),
    lambda: Release(tuple(range(KEYS_MAX))),
    lambda: Release((2**64 - 1,) * 400_000),
    lambda: Register(namespace(model="x" * 1_000_000), LAYOUT),
    lambda: Register(namespace(), KVLayout(16, (KVGroup(16, 4096, (1,) * 1_000_000),))),
    lambda: Register(namespace(), KVLayout(16, LAYOUT.groups * 50_000)),
    lambda: Hello(PROTOCOL, "x" * 1_000_000, "i" * 1_000_000, False),
)
