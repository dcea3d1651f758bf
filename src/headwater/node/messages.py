"""What clients and a node say to each other: the protocol of one Unix socket.

A frame is a 4-byte little-endian length and a msgpack array whose first element is the message's tag. Every
request has exactly one reply, in order. Packed keys are runs of 16 bytes; packed addresses are u64
little-endian, one array for each KV group. `Welcome` carries the segments' file descriptors and, last, the
write end of the lifeline: the node takes its end-of-file to mean that no process of that client maps the
memory any more.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Iterable

import msgspec

from headwater.errors import ProtocolError
from headwater.types import KVLayout, Namespace

PROTOCOL = 2
FRAME_BYTES_MAX = 4 << 20
KEYS_MAX = 65_536
ADDRESSES_MAX = FRAME_BYTES_MAX // 8 - 4096
HEADER_BYTES = 4


class Verdict(enum.IntEnum):
    """What a node says to who wants to put an object."""

    YOURS = 1
    """Here is a slot."""
    HELD = 2
    BELOW = 3
    """It is held, in a lower tier: Find brings it up."""
    BUSY = 4
    """Somebody is writing it."""
    FULL = 5


class Lower(enum.IntEnum):
    """What a node says of an object that is not in HOST: that it is below, or that others are being asked."""

    THERE = 1
    SOUGHT = 2


class Leasing(enum.IntEnum):
    """Whether a node leases objects; if not, nothing is said of them."""

    OPEN = 0
    DRAINING = 1
    """Not any more."""
    EXHAUSTED = 2
    """Not until others have ended theirs."""


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
    """How long a prefix is held? `counts` marks a request's first lookup, for the hit rate.

    With the name of a `request`, the node brings up what lower tiers hold as far as that beats computing it;
    `tokens_s` is the engine's prefill rate, 0 while it is unknown.
    """

    space: int
    keys: bytes
    counts: bool
    request: str = ""
    tokens_s: float = 0.0


class Matched(Message, tag=6):
    """Usable leading chunks; whether it is worth asking again, because more is on its way; and how many of the chunks
    came from the DISK tier and from REMOTE tiers for this request."""

    chunks: int
    waiting: bool = False
    disk: int = 0
    remote: int = 0


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
    """Delete every chunk of a namespace that nobody uses; or, without `begins`, only ask which REMOTE tiers have yet
    to do it."""

    space: int
    begins: bool = True


class ClearReply(Message, tag=29):
    """See `types.Cleared`."""

    deleted: int
    kept: int
    pins: int
    pending: tuple[str, ...]


class Forget(Message, tag=21):
    """These requests are over: nothing more need be brought up for them."""

    requests: tuple[str, ...]


class Prefetch(Message, tag=22):
    """For an operator: bring a prompt's chunks up to HOST. Names a namespace by its root; so do all that follow.

    `is_prompt` says that the keys are those of one prompt, in order, from its start on; others are refused, because
    what a chunk hangs on cannot be told from its key.
    """

    root: bytes
    keys: bytes
    is_prompt: bool = False


class Evict(Message, tag=23):
    """For an operator: delete chunks and all that hangs on them, from HOST or, if `below`, from every tier; no keys =
    the whole namespace, from every tier; or, without `begins`, only ask which REMOTE tiers have yet to do that. The
    answer is `types.Cleared` as JSON."""

    root: bytes
    keys: bytes
    below: bool
    begins: bool = True


class Pin(Message, tag=24):
    """For an operator: keep chunks in HOST for `ttl_s` seconds, in `pinner`'s name; 0 ends all that it pinned of the
    namespace. Pinning again replaces the earlier pin of the same chunks."""

    root: bytes
    keys: bytes
    pinner: str
    ttl_s: float


class Explain(Message, tag=25):
    """For an operator: where chunks are, and what became of those that are gone; or, with a `request`'s name, what
    came of that request. The answer is JSON."""

    root: bytes
    keys: bytes
    request: str = ""


class Namespaces(Message, tag=26):
    """For an operator: the namespaces that the node knows, as JSON."""


class Tiers(Message, tag=27):
    """For an operator: every tier's room, speed, health and sums, as JSON."""


class Pins(Message, tag=28):
    """For an operator: who has pinned how much until when, as JSON."""


class Drain(Message, tag=30):
    """For an operator: have the other nodes of the cluster pull what only this node holds, before it is stopped.

    Nothing new is given to it meanwhile. Without `begins`, only ask how far that is. The answer is JSON."""

    begins: bool = True


class Watch(Message, tag=31):
    """For an operator, and a Conductor: what has changed since the last answer, whose `number` and `serial` this has.
    With others than those, everything is told from the beginning. The answer comes when there is something to tell, or
    after a second; until then nothing else may be asked on this connection."""

    number: int = 0
    serial: int = 0


class Registration(msgspec.Struct, array_like=True, gc=False):
    """An instance's namespace: its root, its record without the salt, how its chunks are cut."""

    instance: str
    root: bytes
    namespace: Namespace
    chunk_tokens: int
    kv_bytes_per_token: int


class Letter(msgspec.Struct, array_like=True, gc=False):
    """What a Conductor of another host says to a node, as a peer's message about `conductor`: a Watch or a Prefetch,
    whose answer is the body of the same reply as on a Unix socket.

    `session` is drawn by who watches, for as long as its connection lasts. What comes first never changes: by it
    versions that do not fit find out that they do not.
    """

    protocol: int
    version: str
    session: bytes
    request: msgspec.Raw


class Moves(msgspec.Struct, array_like=True, gc=False):
    """Chunks that a tier has stored or removed: packed keys. Each tier's key is in one answer once at most."""

    tier: str
    stored: bytes
    removed: bytes


class Figure(msgspec.Struct, array_like=True, gc=False):
    """How fast a tier is read (`peer` is empty), or a peer's HOST memory; None where nobody has measured it."""

    tier: str
    peer: str
    latency_s: float | None
    bytes_s: float | None


class Watched(Message, tag=32):
    """What has changed. With another `number` than before, what was told before is void. `node` is the node's name in
    its cluster; `instances` and `figures` are complete lists, None where nothing new is to be said of them."""

    number: int
    serial: int
    node: str
    moves: tuple[Moves, ...] = ()
    instances: tuple[Registration, ...] | None = None
    figures: tuple[Figure, ...] | None = None


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


class Enter(Message, tag=40):
    """This client works on objects (`node.objects`), which are this tenant's."""

    tenant: str


class Entered(Message, tag=41):
    """The address and the size of the table of objects, and the largest slot there can be."""

    table: int
    table_bytes: int
    slab_bytes: int


class Place(Message, tag=42):
    """Slots for objects of these lengths (u64 each)."""

    keys: bytes
    lengths: bytes


class Placed(Message, tag=43):
    """A `Verdict` for each key, and the slots' addresses (u64 each), to be written before `deadline_s`."""

    placing: int
    verdicts: bytes
    addresses: bytes
    deadline_s: float


class Publish(Message, tag=44):
    """A placing's objects are whole, but for the `failed` positions. `pin_s` and `replicas` say what is wanted."""

    placing: int
    failed: tuple[int, ...] = ()
    pin_s: float = 0.0
    replicas: int = 1


class Published(Message, tag=45):
    """One byte a key each: 1 where everybody finds the object from now on, and where it is pinned."""

    done: bytes
    pinned: bytes


class Find(Message, tag=46):
    """Lease these objects, or, without `leases`, only say which are here; `brings` has the node bring up what only
    lower tiers hold."""

    keys: bytes
    brings: bool = False
    leases: bool = True


class Found(Message, tag=47):
    """The tickets that hold them, their slots' addresses and sizes (u64 each), and a byte a key: `Lower`, or 0
    where there is nothing to be waited for."""

    tickets: tuple[int, ...]
    addresses: bytes
    sizes: bytes
    waits: bytes
    deadline_s: float
    leasing: int = Leasing.OPEN


class Remove(Message, tag=48):
    """Delete objects from every tier. The answer is Contained: which were there."""

    keys: bytes


class Hold(Message, tag=49):
    """Keep objects in HOST for `hold_s` seconds, at most as long as this client lives; 0 ends that. `replicas` asks for
    copies on so many nodes besides; with `hold_s` below 0 that is all."""

    keys: bytes
    hold_s: float
    replicas: int = 1


class Kept(Message, tag=50):
    """One byte a key: 1 where it is kept from now on, or, when that was to end, where it was."""

    flags: bytes


class Used(Message, tag=51):
    """These objects were read without asking: they leave later. The `suspect` ones were not what their checksums say:
    the node looks at them, and drops what is not."""

    keys: bytes
    suspect: bytes = b""


Wish = Prefetch | Evict | Pin | Pins | Explain | Namespaces | Tiers | Drain
"""What only an operator may ask: the node's own user or root."""
Objects = Enter | Place | Publish | Find | Remove | Hold | Used
"""What clients of the Store ask."""
Engines = Register | Match | Contains | Load | Reserve | Done | Release | Keep | Clear | Forget
Request = Hello | Engines | Objects | Wish | Watch | Status
Reply = (
    Welcome
    | Registered
    | Matched
    | Contained
    | Loaded
    | Reserved
    | Ended
    | ClearReply
    | StatusReply
    | Entered
    | Placed
    | Published
    | Found
    | Kept
    | Watched
    | Refused
)

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


def body_of(message: Message) -> bytes:
    """A message without its length, for where something else frames it."""
    return _encoder.encode(message)


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


def pack_words(words: Iterable[int]) -> bytes:
    """Numbers for the wire, u64 each."""
    return array("Q", words).tobytes()


def unpack_words(packed: bytes) -> list[int]:
    """The reverse of `pack_words`; raises ValueError when the length is not a multiple of 8."""
    return array("Q", packed).tolist()
