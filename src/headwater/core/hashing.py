"""Tokens to ChunkKeys: one chained SHA-256, shared by every engine, node and router.

    digest_0 = Namespace.root()
    digest_i = SHA-256(digest_{i-1} || chunk tokens as u32 little-endian || media part)
    key_i    = digest_i[:16]

The media part of a chunk lists the items that overlap it: 4-byte count, then for each a length-prefixed
identifier and its offset and length in tokens relative to the chunk (i64). Without media it is empty, so the
token part, whose length is fixed by the namespace's layout, keeps the encoding injective. 128 of 256 bits are
kept: collisions cannot be chosen by whoever picks the tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Protocol, cast

from headwater.types import KEY_BYTES, ChunkKey, Media

TOKEN_BYTES = 4
DIGEST_BYTES = 32


class ChainDigests(Protocol):
    """`chain_digests`, or the one in C that `_kernels.keys` has, with the same answers."""

    def __call__(
        self, digest: bytes, tokens: Sequence[int], chunk_tokens: int, media: Sequence[Media] = (), first: int = 0
    ) -> list[bytes]: ...


def media_part(media: Sequence[Media], start: int, end: int) -> bytes:
    """The canonical bytes of the media items that overlap tokens [start, end)."""
    here = [it for it in media if it.offset_tokens < end and it.offset_tokens + it.length_tokens > start]
    if not here:
        return b""
    parts = [len(here).to_bytes(4, "little")]
    for it in sorted(here, key=lambda it: (it.offset_tokens, it.length_tokens, it.identifier)):
        name = it.identifier.encode("utf-8", "surrogatepass")
        parts.append(len(name).to_bytes(4, "little") + name)
        parts.append((it.offset_tokens - start).to_bytes(8, "little", signed=True))
        parts.append(it.length_tokens.to_bytes(8, "little", signed=True))
    return b"".join(parts)


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as they are hashed. Raises OverflowError for a token id outside [0, 2**32)."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain_digests(
    digest: bytes, tokens: Sequence[int], chunk_tokens: int, media: Sequence[Media] = (), first: int = 0
) -> list[bytes]:
    """The whole digests of chunks that follow each other and `digest`; `first` is the number of the first of them, from
    which the media's offsets count.

    Raises OverflowError for a token id outside [0, 2**32).
    """
    packed, step = pack(tokens), chunk_tokens * TOKEN_BYTES
    digests = []
    for at in range(0, len(packed) // step * step, step):
        message = digest + packed[at : at + step]
        if media:
            start = first * chunk_tokens + at // TOKEN_BYTES
            message += media_part(media, start, start + chunk_tokens)
        digest = sha256(message).digest()
        digests.append(digest)
    return digests


def keys_of(digests: Sequence[bytes]) -> list[ChunkKey]:
    """The keys that begin these digests; ChunkKey(...) would be a call for each."""
    return cast("list[ChunkKey]", [digest[:KEY_BYTES] for digest in digests])


class KeyChain:
    """The ChunkKeys of one growing token sequence; extending it costs only the new chunks."""

    __slots__ = ("_chain", "_chunk_tokens", "_digest", "_media", "keys")

    def __init__(
        self, root: bytes, chunk_tokens: int, media: Sequence[Media] = (), chain: ChainDigests = chain_digests
    ) -> None:
        assert chunk_tokens > 0, f"chunk_tokens={chunk_tokens}"
        self._chain = chain
        self._digest = root
        self._chunk_tokens = chunk_tokens
        self._media = tuple(media)
        self.keys: list[ChunkKey] = []

    @property
    def tokens(self) -> int:
        """How many tokens the keys cover so far."""
        return len(self.keys) * self._chunk_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of all whole chunks of `tokens`, the sequence from its start; token ids fit in 32 bits.

        Raises OverflowError for a token id outside [0, 2**32).
        """
        size = self._chunk_tokens
        first, count = len(self.keys), len(tokens) // size
        if count <= first:
            return
        digests = self._chain(self._digest, tokens[first * size : count * size], size, self._media, first)
        self.keys += keys_of(digests)
        self._digest = digests[-1]


def chunk_keys(root: bytes, tokens: Sequence[int], chunk_tokens: int, media: Sequence[Media] = ()) -> list[ChunkKey]:
    """The keys of all whole chunks of a token sequence."""
    return keys_of(chain_digests(root, tokens, chunk_tokens, media))
