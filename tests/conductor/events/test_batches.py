"""What is read of payloads: new fields and kinds are passed over, everything else that is odd is refused, quietly."""

from __future__ import annotations

import random

import msgspec
import pytest

from headwater.conductor.events import batches
from headwater.conductor.events.batches import Cleared, Removed, Stored, read_batch
from headwater.errors import ProtocolError

encode = msgspec.msgpack.encode
STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [7], "block_size": 1}


def test_fields_and_kinds_that_are_not_known_are_passed_over() -> None:
    events = [STORED | {"newer": [1, {}]}, {"type": "Newer", "block_hashes": 5}, ["Newer", 1], ["AllBlocksCleared", 1]]
    batch = read_batch(encode([1, events, 3, "newer"]))
    assert isinstance(batch.events[0], Stored)
    assert isinstance(batch.events[1], Cleared)
    assert (batch.rank, batch.unknown, len(batch.events)) == (3, 2, 2)


def test_names_are_integers_of_64_bits_or_bytes() -> None:
    names = [(1 << 64) - 1, -(1 << 63), b"x" * 32]
    batch = read_batch(encode([1.0, [{"type": "BlockRemoved", "block_hashes": names}]]))
    (event,) = batch.events
    assert isinstance(event, Removed)
    assert event.block_hashes == names


BAD = {
    "empty": b"",
    "cut": encode([1.0, [STORED]])[:-1],
    "more": encode([1.0, [STORED]]) + b"\x00",
    "a map": encode({"ts": 1}),
    "no time": encode([float("nan"), []]),
    "endless time": encode([float("inf"), [["Newer"]]]),
    "a number": encode([1.0, [3]]),
    "no kind": encode([1.0, [{"kind": 1}]]),
    "an empty array": encode([1.0, [[]]]),
    "a lacking field": encode([1.0, [{"type": "BlockStored"}]]),
    "a wrong field": encode([1.0, [STORED | {"token_ids": "secret prompt"}]]),
    "a wrong array": encode([1.0, [["BlockRemoved", "secret prompt"]]]),
    "nested without end": b"\x91" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_batch_is_refused_without_quoting_it(name: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_batch(BAD[name])
    assert "secret" not in str(caught.value)


def test_too_many_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "EVENTS_MAX", 2)
    for event in (STORED, ["Newer"]):
        assert read_batch(encode([1.0, [event] * 2]))
        with pytest.raises(ProtocolError):
            read_batch(encode([1.0, [event] * 3]))


def test_ten_thousand_damaged_payloads_are_read_or_refused() -> None:
    draw = random.Random(5)
    payloads = [encode([1.0, [STORED, {"type": "AllBlocksCleared"}], 0]), encode([1.0, [["BlockRemoved", [1, b"a"]]]])]
    for _ in range(10_000):
        damaged = bytearray(draw.choice(payloads))
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            read_batch(bytes(damaged[: draw.randrange(len(damaged) + 1)] if draw.random() < 0.3 else damaged))
        except ProtocolError:
            continue
