"""The Conductor's side of the watch protocol is the node's, field by field and byte by byte."""

from __future__ import annotations

import msgspec
import pytest

from headwater.conductor.events import frames
from headwater.conductor.events.namespaces import Base, Roots
from headwater.core.hashing import chunk_keys
from headwater.errors import ProtocolError
from headwater.node import conductors, messages
from headwater.types import Namespace
from headwater.version import VERSION

RECORD = Namespace("m", "bf16", "cpu", "g", tenant="t")
PAIRS = {
    "Hello": messages.Hello(2, "1", "i", maps=True),
    "Welcome": messages.Welcome(2, "1", "n", 7, (1, 2)),
    "Refused": messages.Refused("f", "e", "g", "r"),
    "Watch": messages.Watch(3, 4),
    "Watched": messages.Watched(
        3,
        4,
        "n",
        (messages.Moves("host", b"a" * 16, b""),),
        (messages.Registration("i", b"r" * 32, RECORD, 32, 9),),
        (messages.Figure("disk", "", None, 1.5),),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_mean_the_same(name: str) -> None:
    theirs = PAIRS[name]
    ours = msgspec.msgpack.decode(messages.encode(theirs)[4:], type=getattr(frames, name))
    assert frames.encode(ours) == messages.encode(theirs)
    assert ours.__struct_fields__ == theirs.__struct_fields__


def test_letters_are_read_as_they_are_written() -> None:
    letter = msgspec.msgpack.decode(frames.encode_letter(b"session", frames.Watch(3, 4)), type=messages.Letter)
    assert (letter.protocol, letter.version, letter.session) == (messages.PROTOCOL, VERSION, b"session")
    assert bytes(letter.request) == messages.body_of(PAIRS["Watch"])
    assert messages.Letter.__struct_fields__ == frames.Letter.__struct_fields__
    assert frames.TOPIC == conductors.TOPIC and frames.SESSION_BYTES <= conductors.MOST_SESSION_BYTES


def test_limits_and_versions_agree() -> None:
    for name in ("PROTOCOL", "FRAME_BYTES_MAX", "HEADER_BYTES"):
        assert getattr(frames, name) == getattr(messages, name)


def test_what_is_no_reply_is_refused() -> None:
    assert isinstance(frames.decode(messages.encode(PAIRS["Watched"])[4:]), frames.Watched)
    for body in (b"", b"\x91\x01", messages.encode(PAIRS["Hello"])[4:], b"\x92" * 5000):
        with pytest.raises(ProtocolError):
            frames.decode(body)
    with pytest.raises(ProtocolError):
        frames.body_bytes((frames.FRAME_BYTES_MAX + 1).to_bytes(4, "little"))


def test_roots_are_those_of_the_plug_in() -> None:
    roots, base = Roots(), Base(RECORD.root(), RECORD)
    assert roots.root(base, "") == RECORD.root()
    salted = Namespace("m", "bf16", "cpu", "g", tenant="t", salt="s")
    assert roots.root(base, "s") == roots.root(base, "s") == salted.root()
    for number in range(5000):
        roots.root(base, f"{number}")
    assert len(roots) <= 4096
    assert chunk_keys(roots.root(base, "s"), range(64), 32) == chunk_keys(salted.root(), range(64), 32)
