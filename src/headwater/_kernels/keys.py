"""The keys of `core.hashing`, the same ones: in C where that was built, else made there.

Tokens in lists, tuples and arrays of "I" are hashed in C, several times as fast. It answers None for all else, for ids
that are no 32-bit numbers, and for chunks with media, which then are done, or refused, as they always were. Tokens must
not change during a call; the GIL is released only for a quarter of a million of them and more. Before that, the ids
themselves are read from a request here.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from typing import cast

from headwater.core import hashing
from headwater.core.hashing import DIGEST_BYTES, ChainDigests
from headwater.types import KEY_BYTES, ChunkKey, Media

try:
    from headwater._kernels import _keys
except ImportError:  # installed without a compiler
    ISAS: tuple[str, ...] = ()
else:
    ISAS = _keys.ISAS

NATIVE = bool(ISAS)
_FLAT = re.compile(rb"[ \t\n\r]*\[[ \t\n\r0-9,]*\][ \t\n\r]*")


def _chunk_keys(root: bytes, tokens: Sequence[int], chunk_tokens: int, media: Sequence[Media] = ()) -> list[ChunkKey]:
    found = None if media else _keys.chain(root, tokens, chunk_tokens, KEY_BYTES)
    return hashing.chunk_keys(root, tokens, chunk_tokens, media) if found is None else cast("list[ChunkKey]", found)


def _chain_digests(
    digest: bytes, tokens: Sequence[int], chunk_tokens: int, media: Sequence[Media] = (), first: int = 0
) -> list[bytes]:
    found = None if media else _keys.chain(digest, tokens, chunk_tokens, DIGEST_BYTES)
    return hashing.chain_digests(digest, tokens, chunk_tokens, media, first) if found is None else found


def exact_ids_without_c(ids: list[object]) -> array[int] | None:
    """See `exact_ids`."""
    if not set(map(type, ids)) <= {int}:
        return None
    try:
        return array("I", cast("list[int]", ids))
    except OverflowError:
        return None


def _exact_ids(ids: list[object]) -> array[int] | None:
    packed = _keys.exact(ids)
    return None if packed is None else array("I", packed)


def read_ids_without_c(text: bytes | memoryview, most: int) -> array[int] | None:
    """See `read_ids`."""
    text = bytes(text)
    # Of nothing else is made what is no flat array of whole numbers without signs, fractions and exponents.
    if _FLAT.fullmatch(text) is None or text.count(b",") >= max(most, 1):
        return None
    try:
        ids = array("I", json.loads(text))
    except (ValueError, OverflowError):
        return None
    return ids if len(ids) <= most else None


def _read_ids(text: bytes | memoryview, most: int) -> array[int] | None:
    packed = _keys.read_ids(text, most)
    return None if packed is None else array("I", packed)


read_ids = _read_ids if NATIVE else read_ids_without_c
"""The token ids that a JSON text is an array of, without making an object of each; None if it is anything else (with
numbers that are no whole ones of 32 bits or have signs, fractions or exponents), or has more than `most`."""
exact_ids = _exact_ids if NATIVE else exact_ids_without_c
"""Token ids as an array; None if anything is among them but whole numbers from 0 to 2**32 - 1, booleans included."""
chunk_keys = _chunk_keys if NATIVE else hashing.chunk_keys
"""The keys of all whole chunks of a token sequence."""
chain_digests: ChainDigests = _chain_digests if NATIVE else hashing.chain_digests
"""What `KeyChain` and `EngineKeys` are given."""
