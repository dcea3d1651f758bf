"""HTTP messages in one piece, in C and in Python: the same, whatever comes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headwater._kernels import messages
from headwater._kernels.messages import KEY_MAX, find, find_plain

NATIVE = pytest.param(find, id="c", marks=pytest.mark.skipif(not messages.NATIVE, reason="built without C"))
BOTH = pytest.mark.parametrize("find", [NATIVE, pytest.param(find_plain, id="plain")])
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nAccept: */*\r\n\r\n"
REST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAccept: */*"
LONGEST = b"a" * (KEY_MAX - len(HEAD) + 3)
HEADS = {it: it for it in (REST, b"", REST.replace(b"*/*", LONGEST))}
Find = Callable[[dict[bytes, bytes], bytes, int, int], tuple[bytes, bytes] | None]


@BOTH
@pytest.mark.parametrize(
    "head",
    [HEAD, HEAD.replace(b"Content-Length", b"content-length"), HEAD.replace(b"Content-Length: 5\r\n", b"", 1)[:-2]
     + b"Content-Length: 5\r\n\r\n"],
    ids=["usual", "lower", "last"],
)  # fmt: skip
def test_a_whole_message(find: Find, head: bytes) -> None:
    assert find(HEADS, head + b"hello", 1000, 100) == (REST, b"hello")


@BOTH
def test_no_body(find: Find) -> None:
    assert find(HEADS, HEAD.replace(b": 5", b": 0"), 1000, 100) == (REST, b"")
    assert find(HEADS, b"\r\nContent-Length: 0\r\n\r\n", 1000, 100) == (b"", b"")


OTHERS = {
    "nothing": b"",
    "a part of a head": HEAD[:-1],
    "a part of the body": HEAD + b"hell",
    "more than the body": HEAD + b"hello!",
    "no length": HEAD.replace(b"Content-Length: 5\r\n", b"") + b"hello",
    "another spelling": HEAD.replace(b"Content-Length", b"CONTENT-LENGTH") + b"hello",
    "no blank": HEAD.replace(b": 5", b":5") + b"hello",
    "a sign": HEAD.replace(b": 5", b": +5") + b"hello",
    "two lengths in a line": HEAD.replace(b": 5", b": 5, 5") + b"hello",
    "a lone CR": HEAD.replace(b": 5\r\n", b": 5\r \n") + b"hello",
    "not a number": HEAD.replace(b": 5", b": x") + b"hello",
    "an empty number": HEAD.replace(b": 5", b": ") + b"hello",
    "a number beyond all": HEAD.replace(b": 5", b": 0000000000000005") + b"hello",
    "a long head": HEAD.replace(b"*/*", b"a" * KEY_MAX) + b"hello",
}


@BOTH
@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS.keys())
def test_anything_else(find: Find, data: bytes) -> None:
    assert find(HEADS, data, 10_000, 100) is None


@BOTH
def test_limits(find: Find) -> None:
    assert find(HEADS, HEAD + b"hello", len(HEAD), 3)
    assert find(HEADS, HEAD + b"hello", len(HEAD) - 1, 3) is None
    assert find(HEADS, HEAD + b"hello", len(HEAD), 2) is None


@BOTH
def test_the_longest_head(find: Find) -> None:
    head = HEAD.replace(b"*/*", LONGEST)
    assert len(head) == KEY_MAX
    assert find(HEADS, head + b"hello", KEY_MAX, 100)
    assert find(HEADS, head.replace(b"a", b"aa", 1) + b"hello", 2 * KEY_MAX, 100) is None


class Learns(dict[bytes, bytes]):
    """Has every head that was looked up in it by Python, from then on also for C."""

    def get(self, head: bytes, default: object = None) -> bytes:
        return self.setdefault(head, head)


@BOTH
def test_a_head_that_is_not_known(find: Find) -> None:
    assert find({}, HEAD + b"hello", 1000, 100) is None


@pytest.mark.skipif(not messages.NATIVE, reason="built without C")
def test_both_do_the_same(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        b"\r\n",
        b"\n",
        b"\r",
        b"Content-Length: ",
        b"\r\ncontent-length: ",
        b"7",
        b":",
        b" ",
        b"a",
        b"\0",
        b"\xff",
    ]
    whole, heads = 0, Learns()
    for _ in range(20_000):
        body = b"x" * rng.randrange(12)
        name = rng.choice([b"Content-Length", b"content-length"])
        data = b"HTTP/1.1 200 OK\r\n%b: %d\r\na: b\r\n\r\n%b" % (name, len(body), body)
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(pieces) + data[at + rng.randrange(3) :]
        limits = rng.choice([1000, 30]), rng.choice([100, 2])
        expected = find_plain(heads, data, *limits)
        whole += expected is not None
        assert find(heads, data, *limits) == expected, data
    assert 1000 < whole < 19_000
