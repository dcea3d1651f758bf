"""Every decoder takes what its encoder made, and nothing else brings it to more than a ProtocolError."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from headwater.errors import ProtocolError, RefusedError
from headwater.ports import Lent
from headwater.transports import wire
from headwater.transports.handshake import _challenge, _hello, _proof
from headwater.transports.payloads import PIECE_BYTES, Sums, checksum, runs
from headwater.transports.wire import Batch, Kind, Place
from headwater.types import Extent, Outcome


def names(*lengths: int) -> list[bytes]:
    return [bytes([at % 256]) * length for at, length in enumerate(lengths)]


@pytest.mark.parametrize(
    "batch",
    [
        Batch(b"", [], [], 1.0),
        Batch(b"realm", names(17, 17, 17), [1, 0, 1 << 39], 1.5, checked=False),
        Batch(b"r" * 64, names(0, 64, 1), [5, 6, 7], 0.0),
        Batch(b"r", names(0, 0), [5, 6], 60.0),
        Batch(b"r", names(*[17] * 512), [2 << 20] * 512, 2.0),
    ],
)
def test_batches(batch: Batch) -> None:
    it = wire.decode_batch(memoryview(wire.encode_batch(batch)))
    assert (it.realm, list(it.names), list(it.sizes)) == (batch.realm, list(batch.names), list(batch.sizes))
    assert (it.budget_s, it.checked) == (batch.budget_s, batch.checked)


def test_batches_that_are_too_much_are_not_even_sent() -> None:
    for batch in (
        Batch(b"", names(65), [1], 1.0),
        Batch(b"r" * 65, [], [], 1.0),
        Batch(b"", [b""] * (wire.MOST_NAMES + 1), [0] * (wire.MOST_NAMES + 1), 1.0),
        Batch(b"", [bytes(64)] * wire.MOST_NAMES, [0] * wire.MOST_NAMES, 1.0),
    ):
        with pytest.raises(RefusedError, match="names"):
            wire.encode_batch(batch)
    most = Batch(b"", [bytes(17)] * wire.MOST_NAMES, [0] * wire.MOST_NAMES, 1.0)
    assert len(wire.encode_batch(most)) <= wire.MOST_BODY


def test_a_batch_cannot_promise_more_than_there_is() -> None:
    head = struct.Struct("<BBHIQ")
    for lie in (
        head.pack(1, 17, 0, 65535, 0),
        head.pack(1, 0, 0, 65535, 0),
        head.pack(1, 17, 0, wire.MOST_NAMES + 1, 0) + bytes(1 << 20),
        head.pack(1, 65, 0, 0, 0),
        head.pack(1, 1, 65, 0, 0) + bytes(65),
        head.pack(2, 1, 0, 0, 0),
        head.pack(1, 1, 0, 2, 0) + struct.pack("<QQ", 1 << 40, 1) + b"ab",
        wire.encode_batch(Batch(b"", names(4, 4), [1, 1], 1.0)) + b"x",
        wire.encode_batch(Batch(b"", names(4, 4), [1, 1], 1.0)) + b"xxxx",
        wire.encode_batch(Batch(b"", names(4, 5), [1, 1], 1.0)) + b"x",
    ):
        with pytest.raises(ProtocolError):
            wire.decode_batch(lie)


def test_outcomes_and_trailers() -> None:
    for outcomes in ([], [Outcome.DONE] * 5, list(Outcome)):
        assert wire.decode_statuses(wire.encode_statuses(outcomes), len(outcomes)) == outcomes
    for wrong in (b"\x00", b"\x00\x00\xff"):
        with pytest.raises(ProtocolError):
            wire.decode_statuses(wrong, 3)
    sums = [0, 1, (1 << 64) - 1]
    late, found = wire.decode_trailer(wire.encode_trailer(True, sums), 3, True)
    assert late and list(found) == sums
    assert wire.decode_trailer(wire.encode_trailer(False, ()), 3, False) == (False, ())
    for body, checked in ((wire.encode_trailer(False, sums), False), (b"\x00", True), (b"\x02", False)):
        with pytest.raises(ProtocolError):
            wire.decode_trailer(body, 3, checked)


def test_loans() -> None:
    memory = np.zeros(10, np.uint8)
    parts = [Lent(memory, Extent(3, 1 << 39, 10), 99), Outcome.MISSING, Lent(memory), Lent(memory, Extent(0, 0, 10))]
    grant = wire.decode_grant(wire.encode_grant(7, 1.5, parts), [10, 20, 10, 10])
    assert (grant.number, grant.left_s) == (7, 1.5)
    assert list(grant.parts) == [
        Place(Extent(3, 1 << 39, 10), 99),
        Outcome.MISSING,
        Outcome.FAILED,
        Place(Extent(0, 0, 10), None),
    ]
    assert wire.decode_given(wire.encode_given(7, [True, False])) == (7, [True, False])
    assert wire.decode_commit(wire.encode_commit(7, [True, False, True], [5, 6])) == (7, [True, False, True], (5, 6))
    assert wire.decode_commit(wire.encode_commit(7, [True, False], ())) == (7, [True, False], ())
    with pytest.raises(ProtocolError):
        wire.decode_grant(wire.encode_grant(7, 1.5, parts), [10])


def test_messages() -> None:
    ask = wire.Ask("topic", 1.5, b"body")
    assert wire.decode_ask(wire.encode_message(ask)) == ask
    assert wire.decode_regions(wire.encode_message(wire.Regions(3))).first == 3
    mapped = wire.Mapped([0, 3, 9], [4096, 0], [True, False], [False, True])
    assert wire.decode_mapped(wire.encode_message(mapped)) == mapped
    error = wire.decode_refused(wire.encode_message(wire.Refused.of(RefusedError("f" * 999, "e", "g", "r"))))
    assert (len(error.field), error.expected, error.remedy) == (wire.MOST_TEXT, "e", "r")
    for wrong in (wire.Ask("t" * 65, 1.0, b""), wire.Ask("t", -1.0, b""), wire.Ask("t", float("nan"), b"")):
        with pytest.raises(ProtocolError):
            wire.decode_ask(wire.encode_message(wrong))
    with pytest.raises(ProtocolError):
        wire.decode_regions(wire.encode_message(wire.Regions(-1)))
    with pytest.raises(ProtocolError):
        wire.decode_mapped(wire.encode_message(wire.Mapped([0], [1], [], [])))
    for numbers in ([1, 1], [2, 1], [-1], [wire.NOWHERE], list(range(wire.MOST_REGIONS + 1)), []):
        with pytest.raises(ProtocolError):
            wire.decode_mapped(wire.encode_message(wire.Mapped(numbers, [1], [False], [False])))


def frame(kind: Kind = Kind.READ, body: bytes = b"body", protocol: int = 1, serial: int = 5, seed: int = 9) -> bytes:
    return b"".join(wire.encode_frame(protocol, kind, serial, body, seed))


@pytest.mark.parametrize("size", [0, 1, 39, 40, 41, 5000, 9000])
def test_frames_are_whole_lines(size: int) -> None:
    whole = frame(body=bytes(size))
    assert len(whole) % wire.ALIGN_BYTES == 0 and len(whole) == wire.HEADER_BYTES + size + wire.padding(size)


def test_a_frame_is_only_what_it_should_be() -> None:
    whole = frame()
    header = whole[: wire.HEADER_BYTES]
    kind, length, content = wire.decode_header(header, 1, 5, 100, 9)
    assert (kind, length) == (Kind.READ, 4)
    wire.check_body(whole[wire.HEADER_BYTES :], content, 9)
    for words in ((2, 5, 100, 9), (1, 4, 100, 9), (1, 6, 100, 9), (1, 5, 3, 9), (1, 5, 100, 8)):
        with pytest.raises(ProtocolError):
            wire.decode_header(header, *words)
    with pytest.raises(ProtocolError, match="kind"):
        unknown = wire.encode_header(1, 99, 5, 4, content, 9)  # type: ignore[arg-type]
        wire.decode_header(unknown, 1, 5, 100, 9)


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    whole = frame()
    for bit in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            _, _, content = wire.decode_header(flipped[: wire.HEADER_BYTES], 1, 5, 100, 9)
            wire.check_body(flipped[wire.HEADER_BYTES :], content, 9)


DECODERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "header": (lambda it: wire.decode_header(it.ljust(24, b"\0")[:24], 1, 5, 1 << 20, 9), frame()[:24]),
    "batch": (wire.decode_batch, wire.encode_batch(Batch(b"realm", names(3, 9, 2), [1, 2, 3], 1.0))),
    "uniform batch": (wire.decode_batch, wire.encode_batch(Batch(b"realm", names(4, 4, 4), [1, 2, 3], 1.0))),
    "statuses": (lambda it: wire.decode_statuses(it, 9), wire.encode_statuses(list(Outcome))),
    "trailer": (lambda it: wire.decode_trailer(it, 2, True), wire.encode_trailer(False, [1, 2])),
    "grant": (
        lambda it: wire.decode_grant(it, [4, 4]),
        wire.encode_grant(7, 1.0, [Outcome.MISSING, Lent(np.zeros(4, np.uint8), Extent(0, 0, 4))]),
    ),
    "given": (wire.decode_given, wire.encode_given(7, [True, False])),
    "commit": (wire.decode_commit, wire.encode_commit(7, [True, True], [1, 2])),
    "ask": (wire.decode_ask, wire.encode_message(wire.Ask("topic", 1.0, b"body"))),
    "regions": (wire.decode_regions, wire.encode_message(wire.Regions(2))),
    "mapped": (wire.decode_mapped, wire.encode_message(wire.Mapped([4, 5], [1, 2], [True, False], [True, True]))),
    "refused": (wire.decode_refused, wire.encode_message(wire.Refused("a", "b", "c", "d"))),
    "hello": (lambda it: wire.decode_with(_hello, it), b"\x99\xa1c\x01\x01\xa1n\x03\xa1m\x07\xc4\x01x\xa3tcp"),
    "challenge": (lambda it: wire.decode_with(_challenge, it), b"\x92\x01\xc4\x01x"),
    "proof": (lambda it: wire.decode_with(_proof, it), b"\x91\xc4\x01x"),
}


@pytest.mark.parametrize("name", DECODERS)
def test_garbage_is_only_ever_a_protocol_error(name: str, seed: int) -> None:
    decode, right = DECODERS[name]
    decode(right)
    rng = random.Random(f"{seed} {name}")
    begun_s = time.monotonic()
    for _ in range(1500):
        words = bytearray(right)
        for _ in range(rng.randrange(4)):
            if words:
                words[rng.randrange(len(words))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        choice = rng.random()
        if choice < 0.3:
            words = words[: rng.randrange(len(words) + 1)]
        elif choice < 0.5:
            words += rng.randbytes(rng.randrange(40))
        elif choice < 0.6:
            words = bytearray(rng.randbytes(rng.randrange(80)))
        try:
            decode(bytes(words))
        except ProtocolError:
            continue
    assert time.monotonic() - begun_s < 30, "garbage costs too much time"


# ---- runs of payloads -----------------------------------------------------------------------------------


def test_runs_are_all_payloads_in_order_and_their_checksums(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5, 2 * PIECE_BYTES, 7, 0, PIECE_BYTES - 1]
    whole = np.random.default_rng(seed).integers(0, 256, 2 * PIECE_BYTES + 9, np.uint8)
    for _ in range(4):
        rng.shuffle(sizes)
        memories = [whole[9 : 9 + size] for size in sizes]
        sums, moved = Sums(), 0
        for run in runs(memories):
            sums.take(run)
            moved += sum(map(len, run[0]))
        assert moved == sum(sizes)
        assert sums.found == [checksum(it) for it in memories] == [xxh3_64_intdigest(it.tobytes()) for it in memories]
