"""What one engine tells another to be reached: who it is, where, and which memory it lends.

Bytes to be handed over by any way that the user trusts (they hold no secret, and nobody is believed for having them):
a line with the format's name and a digest of what follows, then JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from headwater.errors import RefusedError
from headwater.types import Member

FORMAT = b"headwater-engine-1"
DESCRIPTOR_BYTES_MAX = 4 << 20
SEGMENTS_MAX = 65_536
LENGTH_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """Memory that an engine has registered."""

    number: int
    length_bytes: int
    readable: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What `Engine.descriptor` says."""

    cluster: str
    member: Member
    segments: tuple[RemoteSegment, ...] = field(default=())

    def encode(self) -> bytes:
        """As bytes to be handed over."""
        body = msgspec.json.encode(self)
        return b"%s %s\n%s" % (FORMAT, sha256(body).hexdigest().encode(), body)


_decoder = msgspec.json.Decoder(Descriptor, strict=True)


def parse_descriptor(data: bytes) -> Descriptor:
    """The reverse of `Descriptor.encode`; raises RefusedError for anything else."""
    remedy = "hand over what Engine.descriptor() returned, unchanged"
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RefusedError("descriptor", "bytes", type(data).__name__, remedy)
    data = bytes(data)
    if len(data) > DESCRIPTOR_BYTES_MAX:
        raise RefusedError("descriptor", f"at most {DESCRIPTOR_BYTES_MAX} bytes", f"{len(data)}", remedy)
    head, _, body = data.partition(b"\n")
    if head != b"%s %s" % (FORMAT, sha256(body).hexdigest().encode()):
        raise RefusedError(
            "descriptor", f"one that begins with {FORMAT.decode()!r} and is whole", f"{head[:40]!r}", remedy
        )
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise RefusedError("descriptor", "the fields of this version", f"{error}", remedy) from error
    for it in found.segments:
        if it.number < 0 or not 0 < it.length_bytes <= LENGTH_MAX:
            given = f"segment {it.number} of {it.length_bytes} bytes"
            raise RefusedError("descriptor.segments", "numbers from 0 on and lengths above 0", given, remedy)
    if len(found.segments) > SEGMENTS_MAX or len({it.number for it in found.segments}) != len(found.segments):
        raise RefusedError("descriptor.segments", "each segment once", f"{len(found.segments)} segments", remedy)
    return found
