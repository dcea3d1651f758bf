"""What the KV of every token must be: a fake model whose pages and outputs are a function of the token prefix.

The value at a position depends on all tokens up to it and on everything else that may not be shared (adapter, salt,
media), and differs between layers, shards, heads and channels. So a page that holds another prefix, another layer,
a stale or half-written block is recognised by comparing.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
VOCABULARY = 1000
POISON = 0x7FBADBAD
"""Fills pages that nobody has written; no value of the fake model equals it."""

NONSENSE = 1
"""What the fake model samples after reading wrong KV, and never else."""

Ints = NDArray[np.int32]


class WrongKV(AssertionError):
    """Attention would have read, or somebody has overwritten, bytes that are not what the fake model needs."""


@dataclass
class Prefix:
    """The token sequence of one request and the running digest at each of its positions.

    `identity` is everything besides the tokens that changes KV; `media` maps a position to the identifier of the
    item that covers it.
    """

    tokens: list[int]
    identity: str = ""
    media: dict[int, str] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)

    def digest(self, end: int) -> NDArray[np.uint64]:
        """The digests of the positions before `end`."""
        state = self.digests[-1] if self.digests else zlib.crc32(self.identity.encode()) * 0x9E3779B97F4A7C15 & MASK
        for position in range(len(self.digests), end):
            word = self.tokens[position] + 1 + (zlib.crc32(self.media.get(position, "").encode()) << 32)
            state = (state ^ word) * 0xD6E8FEB86659FD93 & MASK
            state ^= state >> 32
            self.digests.append(state)
        return np.array(self.digests[:end], dtype=np.uint64)

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        del self.tokens[end:]
        del self.digests[end:]

    def next_token(self) -> int:
        """What the fake model samples after the whole sequence."""
        return 3 + int(self.digest(len(self.tokens))[-1] >> np.uint64(20)) % (VOCABULARY - 3)


def identity(adapter: str = "", salt: str | None = None) -> str:
    """The oracle's name for what else than tokens a request's KV may not be shared across."""
    return f"{adapter}/{salt or ''}"


def covered(media: Iterable[tuple[str, int, int]]) -> dict[int, str]:
    """What each position of some (identifier, offset, length) items shows."""
    return {offset + n: f"{it}@{n}" for it, offset, length in media for n in range(length)}


def continuation(
    tokens: Sequence[int],
    count: int,
    adapter: str = "",
    salt: str | None = None,
    media: Iterable[tuple[str, int, int]] = (),
) -> list[int]:
    """The `count` tokens that the fake model generates after a prompt."""
    prefix = Prefix(list(tokens), identity(adapter, salt), covered(media))
    for _ in range(count):
        prefix.tokens.append(prefix.next_token())
    return prefix.tokens[len(tokens) :]


def values(digests: NDArray[np.uint64], layer: str, shard: int, heads: int, channels: int) -> Ints:
    """The KV of some positions of one layer of one shard, `[position, head, channel]`."""
    salt = np.uint64(zlib.crc32(f"{layer}/{shard}".encode()) * 0xBF58476D1CE4E5B9 & MASK)
    place = np.arange(1, heads * channels + 1, dtype=np.uint64) * np.uint64(0x94D049BB133111EB)
    mixed = (digests ^ salt)[:, None] * np.uint64(0x9FB21C651E98DF25) ^ place
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xC2B2AE3D27D4EB4F)
    return (mixed >> np.uint64(34)).astype(np.int32).reshape(-1, heads, channels)


def describe(wrong: Ints) -> str:
    """What is in a place that should hold something else, for the message."""
    return "poison: never written" if (wrong == POISON).all() else "something else"
