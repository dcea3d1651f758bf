"""Chunked bodies: every way of cutting them, and everything that is none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.conductor.http.chunks import LINE_BYTES, TRAILER_BYTES, Chunked
from headwater.conductor.http.parsing import Malformed

BODY = b"5\r\nhello\r\n1;a=b\r\n \r\nA\r\n0123456789\r\n0\r\nx: y\r\n\r\n"
PAYLOAD = b"hello 0123456789"


def decode(pieces: list[bytes]) -> tuple[bytes, Chunked]:
    chunked = Chunked()
    return b"".join(chunked.feed(piece) for piece in pieces if piece), chunked


def test_a_body_cut_at_every_two_places() -> None:
    data = BODY + b"rest"
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            chunked = Chunked()
            payload, rest = b"", b""
            for piece in (data[:first], data[first:second], data[second:]):
                if chunked.done:
                    rest += piece
                elif piece:
                    payload += chunked.feed(piece)
            assert (payload, chunked.done, chunked.rest + rest) == (PAYLOAD, True, b"rest")


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.lists(st.integers(0, 3000), max_size=12))
def test_what_was_chunked_comes_out(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(it), it) for it in pieces) + b"0\r\n\r\n"
    places = sorted({0, len(data), *(it for it in cuts if it < len(data))})
    payload, chunked = decode([data[a:b] for a, b in itertools.pairwise(places)])
    assert payload == b"".join(pieces)
    assert chunked.done
    assert chunked.rest == b""


def test_whole_chunks_in_one_piece_come_out_as_one() -> None:
    assert Chunked().feed(b"3\r\nabc\r\n2\r\nde\r\n") == b"abcde"


BAD = {
    "no size": b"\r\n",
    "not hex": b"g\r\n",
    "prefix": b"0x5\r\nhello\r\n",
    "underscore": b"1_0\r\n",
    "plus": b"+5\r\n",
    "minus": b"-5\r\n",
    "blank before": b" 5\r\n",
    "blank after": b"5 \r\n",
    "only LF": b"5\nhello\n",
    "too many digits": b"000000005\r\n",
    "control in extension": b"5;a\x01\r\n",
    "NUL in extension": b"5;a\0\r\n",
    "CR in extension": b"5;a\rb\r\n",
    "too long": b"5;" + b"a" * LINE_BYTES + b"\r\n",
    "data too long": b"5\r\nhello!\r\n",
    "data too short": b"5\r\nhell\r\n0\r\n\r\n",
    "only LF after data": b"5\r\nhello\n0\r\n\r\n",
    "CR and no LF after data": b"5\r\nhello\rx",
    "trailer without colon": b"0\r\nabc\r\n\r\n",
    "folded trailer": b"0\r\na: b\r\n c\r\n\r\n",
    "trailer only LF": b"0\r\n\n",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_chunk(name: str) -> None:
    data = BAD[name]
    with pytest.raises(Malformed):
        decode([data])
    with pytest.raises(Malformed):
        decode([data[i : i + 1] for i in range(len(data))])


def test_trailers_are_bounded() -> None:
    line = b"a: " + b"b" * 1000 + b"\r\n"
    with pytest.raises(Malformed) as caught:
        decode([b"0\r\n", *[line] * (TRAILER_BYTES // len(line) + 1)])
    assert caught.value.status == 431


def test_the_limit_is_looked_at_before_the_payload_comes() -> None:
    chunked = Chunked(limit_bytes=10)
    assert chunked.feed(b"a\r\n0123456789\r\n") == b"0123456789"
    with pytest.raises(Malformed) as caught:
        chunked.feed(b"1\r\n")
    assert caught.value.status == 413
    with pytest.raises(Malformed):
        Chunked(limit_bytes=10).feed(b"ffffffff\r\n")


def test_a_size_line_that_was_read_before_excuses_nothing() -> None:
    decode([b"7\r\nbefore \r\n"])
    with pytest.raises(Malformed):
        Chunked().feed(b"7\r\nbefore \n\n")
    with pytest.raises(Malformed) as caught:
        Chunked(limit_bytes=6).feed(b"7\r\nbefore \r\n")
    assert caught.value.status == 413
    chunked = Chunked()
    assert chunked.feed(b"7\r\n7\r\n") + chunked.feed(b"7\r\n1\r\n") == b"7\r\n7\r\n1", "within a chunk it is payload"
    chunked = Chunked()
    assert chunked.feed(b"1") + chunked.feed(b"7\r\nbefore \r\n") == b"before \r\n", "what is held comes before it"
