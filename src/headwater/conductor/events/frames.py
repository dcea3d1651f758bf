"""What a Conductor and a node say to each other: its side of the few messages of `node.messages` that it needs.

The two packages are on one floor and import nothing of each other; a test holds the two sides together. A frame is a
4-byte little-endian length and a msgpack array whose first element is the message's tag. To nodes of other hosts, which
listen for peers, a message goes in a letter on the topic TOPIC, and the answer has no length of its own.
"""

from __future__ import annotations

import struct

import msgspec

from headwater.errors import ProtocolError
from headwater.types import Namespace
from headwater.version import VERSION

PROTOCOL = 2
FRAME_BYTES_MAX = 4 << 20
HEADER_BYTES = 4
TOPIC = "conductor"
SESSION_BYTES = 8


class Message(msgspec.Struct, array_like=True, gc=False):
    """The base of all messages."""


class Hello(Message, tag=1):
    """Who I am; the first frame."""

    protocol: int
    version: str
    instance: str
    maps: bool


class Welcome(Message, tag=2):
    """Who the node is."""

    protocol: int
    version: str
    node: str
    epoch: int
    segments_bytes: tuple[int, ...]


class Refused(Message, tag=19):
    """Why not."""

    field: str
    expected: str
    given: str
    remedy: str


class Prefetch(Message, tag=22):
    """Bring these first chunks of a prompt up to HOST."""

    root: bytes
    keys: bytes
    is_prompt: bool = False


class Done(Message, tag=18):
    """It is being done; as JSON, how."""

    body: bytes


class Watch(Message, tag=31):
    """What has changed since the answer with this number and serial?"""

    number: int = 0
    serial: int = 0


class Letter(msgspec.Struct, array_like=True, gc=False):
    """A message to a node of another host. `session` is drawn for each connection."""

    protocol: int
    version: str
    session: bytes
    request: msgspec.Raw


class Registered(msgspec.Struct, array_like=True, gc=False):
    """An instance's namespace."""

    instance: str
    root: bytes
    namespace: Namespace
    chunk_tokens: int
    kv_bytes_per_token: int


class Moves(msgspec.Struct, array_like=True, gc=False):
    """Packed keys that a tier has stored and removed."""

    tier: str
    stored: bytes
    removed: bytes


class Figure(msgspec.Struct, array_like=True, gc=False):
    """How fast a tier, or a peer's HOST memory, is read."""

    tier: str
    peer: str
    latency_s: float | None
    bytes_s: float | None


class Watched(Message, tag=32):
    """What has changed; with another number than before, what was told before is void."""

    number: int
    serial: int
    node: str
    moves: tuple[Moves, ...] = ()
    instances: tuple[Registered, ...] | None = None
    figures: tuple[Figure, ...] | None = None


Reply = Welcome | Refused | Watched | Done
UNDECODABLE = (msgspec.DecodeError, msgspec.ValidationError, OverflowError, UnicodeError, RecursionError)
_header = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """A message as one frame."""
    body = _encoder.encode(message)
    return _header.pack(len(body)) + body


def encode_letter(session: bytes, message: Message) -> bytes:
    """A message as a letter."""
    return _encoder.encode(Letter(PROTOCOL, VERSION, session, msgspec.Raw(_encoder.encode(message))))


def body_bytes(header: bytes) -> int:
    """The length of the body that a header announces; raises ProtocolError above the limit."""
    length: int = _header.unpack(header)[0]
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes announced, at most {FRAME_BYTES_MAX} are allowed")
    return length


def decode(body: bytes) -> Reply:
    """A node's message; raises ProtocolError for anything else."""
    try:
        return _replies.decode(body)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a reply: {type(error).__name__}") from None
