"""Lossless: each byte plane of the elements through zstd, for links slower than about 0.5 GB/s.

    0    number of planes p (u8: 1, 2 or 4) · zero (7)
    8    p times the stored length of a plane (u64); that of a whole plane says that it is stored as it is
    ..   the planes, least significant byte first

Floats do not repeat: all that can be gained is the entropy of the plane that holds sign and exponent. So the planes
are compressed one by one, a plane that does not shrink by a thirty-second stays as it is, and zstd looks for matches
in a table that fits the innermost cache (hash_log), which doubles its speed at the same ratio.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

from headwater._kernels import codec as kernels
from headwater.errors import ConfigError
from headwater.ports import Bytes
from headwater.tiers.elements import element_bytes
from headwater.tiers.header import Encoded
from headwater.tiers.scratch import Scratch
from headwater.types import Identity

if TYPE_CHECKING:
    import zstandard

LEVEL, WINDOW_LOG, HASH_LOG, MIN_MATCH = 1, 20, 12, 7
WORTH = 32
"""A plane is stored compressed if that saves one byte in so many."""

_table = {planes: struct.Struct(f"<B7x{planes}Q") for planes in (1, 2, 4)}


class Zstd:
    """See `Codec`. Decoding takes no more memory than the payload, whatever the stored bytes claim."""

    name, fixed, in_place = "zstd", False, False

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise ConfigError("codec zstd needs zstandard; run: pip install 'headwater[codecs]'") from None
        self._error: type[Exception] = zstandard.ZstdError
        self._machines = _Machines()
        self._scratch = Scratch()

    def stored_bytes(self, identity: Identity) -> int:
        """See `Codec`."""
        return _table[_planes(identity)].size + identity.length_bytes

    def encode(self, identity: Identity, payload: Bytes, target: Bytes) -> Encoded | None:
        """See `Codec`."""
        planes = _planes(identity)
        plane_bytes = len(payload) // planes
        split = payload
        if planes > 1:
            split = self._scratch.take(len(payload))
            kernels.shuffle(payload, split, element_bytes=planes)
        lengths, end = [], _table[planes].size
        for start in range(0, len(payload), plane_bytes):
            plane = split[start : start + plane_bytes]
            stored = self._shrink(plane, target[end : end + plane_bytes - plane_bytes // WORTH])
            if stored is None:
                stored = plane_bytes
                target[end : end + stored] = plane
            lengths.append(stored)
            end += stored
        _table[planes].pack_into(target.data, 0, planes, *lengths)
        return Encoded(end, self.name)

    def decode(self, identity: Identity, encoded: Encoded, stored: Bytes, target: Bytes) -> bool:
        """See `Codec`."""
        planes = _planes(identity)
        table = _table[planes]
        if encoded.codec != self.name or len(target) % planes or len(stored) < table.size:
            return False
        count, *lengths = table.unpack_from(stored.data)
        plane_bytes = len(target) // planes
        if count != planes or table.size + sum(lengths) != len(stored):
            return False
        split = self._scratch.take(len(target)) if planes > 1 else target
        start = table.size
        for index, length in enumerate(lengths):
            plane = split[index * plane_bytes : (index + 1) * plane_bytes]
            if length == plane_bytes:
                plane[:] = stored[start : start + length]
            elif not self._grow(stored[start : start + length], plane):
                return False
            start += length
        if planes > 1:
            kernels.unshuffle(split, target, element_bytes=planes)
        return True

    def has_key(self, identity: Identity, key_id: str) -> bool:
        """See `Codec`."""
        return True

    def _shrink(self, plane: Bytes, target: Bytes) -> int | None:
        """The length of a compressed plane at the start of `target`; None if it does not fit."""
        reader = self._machines.compressor.stream_reader(plane.data, size=len(plane))
        length = reader.readinto(target)
        return None if reader.read(1) else length

    def _grow(self, stored: Bytes, plane: Bytes) -> bool:
        """Whether `stored` is the whole of a plane; never writes more than that."""
        reader = self._machines.decompressor.stream_reader(stored.data)
        try:
            return reader.readinto(plane) == len(plane) and not reader.read(1)
        except self._error:
            return False


class _Machines(threading.local):
    """zstd's contexts, which no two threads may use at once."""

    compressor: zstandard.ZstdCompressor
    decompressor: zstandard.ZstdDecompressor

    def __init__(self) -> None:
        import zstandard

        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, window_log=WINDOW_LOG, hash_log=HASH_LOG, min_match=MIN_MATCH
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        # A frame that asks for a larger window than any of ours is refused before it is given memory.
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)


def _planes(identity: Identity) -> int:
    """Bytes of an element where the payload is a whole number of them, 1 where that is not known."""
    size = element_bytes(identity.origin.namespace.kv_dtype)
    return size if size in (2, 4) and identity.length_bytes % size == 0 else 1
