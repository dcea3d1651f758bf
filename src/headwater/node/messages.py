"""What clients and a node say to each other: the protocol of one Unix socket.

A frame is a 4-byte little-endian length and a msgpack array whose first element is the message's tag. Every
request has exactly one reply, in order. Packed keys are runs of 16 bytes; packed addresses are u64
little-endian, one array for each KV group. `Welcome` carries the segments' file descriptors and, last, the
write end of the lifeline: the node takes its end-of-file to mean that no process of that client maps the
memory any more.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable

import msgspec

from headwater.errors import ProtocolError
from headwater.types import KVLayout, Namespace

PROTOCOL = 1
FRAME_BYTES_MAX = 4 << 20
KEYS_MAX = 65_536
ADDRESSES_MAX = FRAME_BYTES_MAX // 8 - 4096
HEADER_BYTES = 4


class Message(msgspec.Struct, array_like=True, gc=False):
    """The base of all messages."""


class Hello(Message, tag=1):
    """The first frame: who I am. `instance` names the serving engine; its ranks use the same name."""

    protocol: int
    version: str
    instance: str
    maps: bool


class Welcome(Message, tag=2):
    """The node's answer to Hello; file descriptors come with it if the client maps memory."""

    protocol: int
    version: str
    node: str
    epoch: int
    segments_bytes: tuple[int, ...]


class Register(Message, tag=3):
    """This instance's cache: equal namespaces share; all sessions of an instance must agree."""

    namespace: Namespace
    layout: KVLayout


class Registered(Message, tag=4):
    """The handle of the namespace in later calls."""

    space: int


class Match(Message, tag=5):
    """How long a prefix is held? `counts` marks a request's first lookup, for the hit rate."""

    space: int
    keys: bytes
    counts: bool


class Matched(Message, tag=6):
    """Usable leading chunks."""

    chunks: int


class Contains(Message, tag=7):
    """Which of these chunks are held?"""

    space: int
    keys: bytes


class Contained(Message, tag=8):
    """One byte a key: 1 held, 0 not."""

    flags: bytes


class Load(Message, tag=9):
    """Lease the usable prefix from chunk `first` on, to be read by these shards."""

    space: int
    keys: bytes
    first: int
    shards: tuple[int, ...]


class Loaded(Message, tag=10):
    """See `types.Loadable`."""

    ticket: int
    chunks: int
    addresses: tuple[bytes, ...]
    deadline_s: float


class Reserve(Message, tag=11):
    """Slots for keys not yet held; `parent` is the key before them, empty at the start of a prompt."""

    space: int
    parent: bytes
    keys: bytes
    lacking: tuple[tuple[int, int], ...]
    shards: tuple[int, ...]


class Reserved(Message, tag=12):
    """See `types.Reservation`."""

    ticket: int
    covered: int
    addresses: tuple[bytes, ...]
    deadline_s: float


class Done(Message, tag=13):
    """A shard has finished its copy; `failed` are positions whose bytes are not good."""

    ticket: int
    shard: int
    failed: tuple[int, ...]


class Release(Message, tag=14):
    """The holder gives tickets up."""

    tickets: tuple[int, ...]


class Ended(Message, tag=15):
    """How many of the named tickets were known and open."""

    count: int


class Clear(Message, tag=16):
    """Delete every chunk of a namespace that nobody uses."""

    space: int


class Status(Message, tag=17):
    """What does the node hold?"""


class StatusReply(Message, tag=18):
    """The node's state as JSON."""

    state: bytes


class Refused(Message, tag=19):
    """Why a request cannot be served: the field, both values, what to do."""

    field: str
    expected: str
    given: str
    remedy: str


class Keep(Message, tag=20):
    """Of this instance's tickets, these are known to it; the others are freed: the reply that named them was lost, so
    nobody can have used them."""

    tickets: tuple[int, ...]


Request = Hello | Register | Match | Contains | Load | Reserve | Done | Release | Keep | Clear | Status
Reply = Welcome | Registered | Matched | Contained | Loaded | Reserved | Ended | StatusReply | Refused

UNDECODABLE = (msgspec.DecodeError, msgspec.ValidationError, OverflowError, UnicodeError, RecursionError)
"""What msgspec raises for bytes that are not a message; the last for arrays nested without end."""

_header = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """A message as one frame."""
    body = _encoder.encode(message)
    return _header.pack(len(body)) + body


def body_bytes(header: bytes | bytearray | memoryview) -> int:
    """The length of the body that a header announces; raises ProtocolError above the limit."""
    length: int = _header.unpack_from(header)[0]
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {length} bytes announced, at most {FRAME_BYTES_MAX} are allowed")
    return length


def decode_request(body: bytes | memoryview) -> Request:
    """A client's message; raises ProtocolError for anything else."""
    try:
        return _requests.decode(body)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a request: {error}") from error


def decode_reply(body: bytes | memoryview) -> Reply:
    """A node's message; raises ProtocolError for anything else."""
    try:
        return _replies.decode(body)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a reply: {error}") from error


def pack_addresses(groups: Iterable[Iterable[int]]) -> tuple[bytes, ...]:
    """Addresses for the wire (the hosts of one socket share their byte order)."""
    return tuple(array("Q", group).tobytes() for group in groups)


def unpack_addresses(groups: Iterable[bytes]) -> tuple[tuple[int, ...], ...]:
    """The reverse of `pack_addresses`."""
    return tuple(tuple(array("Q", group)) for group in groups)
