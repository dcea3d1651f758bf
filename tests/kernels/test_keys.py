"""The keys made in C are those of `core.hashing`: SHA-256 by each way there is, chains, and what is refused."""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater._kernels import keys
from headwater.core import hashing
from headwater.core.engine_keys import EngineKeys
from headwater.core.hashing import KeyChain
from headwater.types import Media, Namespace

ROOT = Namespace("m", "bf16", "l", "g").root()
native = pytest.mark.skipif(not keys.NATIVE, reason="built without a compiler")
each = pytest.mark.parametrize("isa", keys.ISAS)

# The messages of FIPS 180-4's examples and of NIST's example values for SHA-256, with their digests.
NIST = {
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    ),
    b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
    b"ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu": (
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"
    ),
    b"a" * 1_000_000: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
    b"\xbd": "68325720aabd7c82f30f554b313d0570c95accbb7dc4b5aae11204c08ffe732b",
    b"\xc9\x8c\x8e\x55": "7abc22c0ae5af26ce93dbb94433a0e0b2e119d014f8e7f65bd56c61ccccd9504",
    bytes(55): "02779466cdec163811d078815c633f21901413081449002f24aa3e80f0b88ef7",
    bytes(56): "d4817aa5497628e7c77e6b606107042bbba3130888c5f47a375e6179be789fbb",
    bytes(57): "65a16cb7861335d5ace3c60718b5052e44660726da4cd13bb745381b235a1785",
    bytes(64): "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b",
    bytes(1000): "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53",
    b"\x41" * 1000: "c2e686823489ced2017f6059b8b239318b6364f6dcd835d0a519105a1eadd6e4",
    b"\x55" * 1005: "f4d62ddec0f3dd90ea1380fa16a5ff8dc4c54b21740650f24afc4120903552b0",
}


@pytest.mark.parametrize("isa", keys.ISAS)
def test_the_examples_of_the_standard(isa: str) -> None:
    for message, digest in NIST.items():
        assert keys._keys.sha256(message, isa).hex() == digest


@each
def test_every_length(isa: str) -> None:
    draw = random.Random(31)
    for length in [*range(301), 4095, 4096, 4097, 70_000]:
        message = draw.randbytes(length)
        assert keys._keys.sha256(message, isa) == sha256(message).digest(), f"{length} bytes"


@each
def test_random_chains(isa: str) -> None:
    draw = random.Random(32)
    for chunk_tokens in [*range(1, 40), 64, 100, 256]:
        tokens = [draw.choice([0, 1, 255, 256, 50_000, 2**31, 2**32 - 1, draw.randrange(2**32)]) for _ in range(600)]
        wanted = hashing.chain_digests(ROOT, tokens, chunk_tokens)
        if isa == "plain" and chunk_tokens > 64:
            assert keys._keys.chain(ROOT, tokens, chunk_tokens, 32, isa) is None, "the fallback is faster"
            continue
        for given_tokens in (tokens, tuple(tokens), array("I", tokens), np.array(tokens, np.uint32)):
            assert keys._keys.chain(ROOT, given_tokens, chunk_tokens, 32, isa) == wanted
        assert keys._keys.chain(ROOT, tokens, chunk_tokens, 16, isa) == [it[:16] for it in wanted]


def test_the_formula_itself() -> None:
    """Little-endian tokens after the digest before, whatever the machine's own order is."""
    tokens = [1, 2**32 - 2, 0x01020304, 7, 9]
    one = sha256(ROOT + b"\1\0\0\0\xfe\xff\xff\xff").digest()
    two = sha256(one + b"\4\3\2\1\7\0\0\0").digest()
    assert keys.chunk_keys(ROOT, tokens, 2) == [one[:16], two[:16]]
    assert keys.chain_digests(ROOT, tokens, 2) == [one, two]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=60),
    st.integers(1, 70),
    st.lists(st.builds(Media, st.text(max_size=3), st.integers(-3, 60), st.integers(0, 20)), max_size=2),
)
def test_the_same_as_without_c(tokens: list[int], chunk_tokens: int, media: list[Media]) -> None:
    assert keys.chunk_keys(ROOT, tokens, chunk_tokens, media) == hashing.chunk_keys(ROOT, tokens, chunk_tokens, media)
    found = keys.chain_digests(ROOT, tokens, chunk_tokens, media, 3)
    assert found == hashing.chain_digests(ROOT, tokens, chunk_tokens, media, 3)


class Odd(int):
    """Still a number."""


class Index:
    def __init__(self, value: object) -> None:
        self.value = value

    def __index__(self) -> object:
        return self.value


ODD: dict[str, object] = {
    "bools": [True, False, True],
    "a kind of int": [Odd(5), 2, 3],
    "what is like a number": [Index(5), 2, 3],
    "numbers of numpy's": [np.int64(5), 2, 3],
    "64 bits": np.arange(4),
    "signed": array("i", [1, 2, 3]),
    "signed and negative": array("i", [1, -2, 3]),
    "a range": range(5),
    "every other one": np.arange(10, dtype=np.uint32)[::2],
    "the other byte order": np.arange(4, dtype=np.dtype(np.uint32).newbyteorder()),
    "two dimensions": np.zeros((2, 2), np.uint32),
    "a view": memoryview(array("I", [1, 2, 3])),
    "floats": [1, 2.0, 3],
    "an array of floats": array("f", [1, 2, 3]),
    "text": "abcdefgh",
    "texts": ["1", "2"],
    "bytes": b"12345678",
    "bytes that are no tokens": b"12345",
    "None": None,
    "Nones": [1, None],
    "a number": 5,
    "negative": [1, -1],
    "negative behind the last chunk": [1, 2, 3, -1, 4],
    "too large": [1, 2**32],
    "larger than any": [1, 2**64],
    "minus that": [1, -(2**64)],
    "an index that is none": [Index("x")],
    "an index that is negative": [Index(-1)],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("pair", ["chunk_keys", "chain_digests"])
def test_what_is_odd_is_done_or_refused_as_without_c(pair: str, name: str) -> None:
    for chunk_tokens in (1, 2, 4):
        assert outcome(getattr(keys, pair), ROOT, ODD[name], chunk_tokens) == outcome(
            getattr(hashing, pair), ROOT, ODD[name], chunk_tokens
        )


@pytest.mark.parametrize("root", [b"", b"root", ROOT + b"x", bytearray(ROOT), "x" * 32, None])
@pytest.mark.parametrize("tokens", [[], [1, 2, 3]])
def test_odd_roots(root: bytes, tokens: list[int]) -> None:
    assert outcome(keys.chunk_keys, root, tokens, 2) == outcome(hashing.chunk_keys, root, tokens, 2)


@pytest.mark.parametrize("chunk_tokens", [0, -1, 2**61, 2**62, 2**64, 2.0, None, True])
def test_odd_sizes(chunk_tokens: int) -> None:
    for tokens in ([], [1, 2, 3]):
        assert outcome(keys.chunk_keys, ROOT, tokens, chunk_tokens) == outcome(
            hashing.chunk_keys, ROOT, tokens, chunk_tokens
        )


@native
def test_c_refuses_what_no_caller_says() -> None:
    with pytest.raises(ValueError, match="isa mmx"):
        keys._keys.chain(ROOT, [1], 1, 16, "mmx")
    with pytest.raises(ValueError, match="isa mmx"):
        keys._keys.sha256(b"", "mmx")
    for kept_bytes in (0, 33):
        with pytest.raises(ValueError, match="kept_bytes"):
            keys._keys.chain(ROOT, [1], 1, kept_bytes)


@native
def test_nothing_is_left_to_the_fallback_that_callers_have() -> None:
    """Otherwise all of this would pass with C that does nothing."""
    for tokens in ([1, 2, 3], (1, 2, 3), array("I", [1, 2, 3]), []):
        assert keys._keys.chain(ROOT, tokens, 2, 16) == hashing.chunk_keys(ROOT, tokens, 2)
    assert keys._keys.chain(ROOT, [1, -1], 2, 16) is None


@pytest.mark.parametrize("exact", [keys.exact_ids_without_c, keys.exact_ids])
def test_exact_ids(exact: Callable[[list[object]], array[int] | None]) -> None:
    for good in ([], [0], [1, 2**32 - 1, 300]):
        assert exact(good) == array("I", good)
    for bad in (True, -1, 2**32, 2**64, -(2**64), 1.0, "1", None, Odd(5), Index(5), np.int64(5)):
        assert exact([1, bad, 2]) is None


READERS = pytest.mark.parametrize("reader", [keys.read_ids_without_c, keys.read_ids])
BLANKS = st.text(" \t\n\r", max_size=2)


def as_json_says(text: bytes) -> array[int] | None:
    """The ids of an array of whole numbers without signs."""
    try:
        ids = json.loads(text)
    except ValueError:
        return None
    if type(ids) is not list or not all(type(it) is int and 0 <= it < 2**32 for it in ids) or b"-" in text:
        return None
    return array("I", ids)


@READERS
@given(st.lists(st.tuples(BLANKS, st.integers(0, 32).flatmap(lambda bits: st.integers(0, 2**bits - 1)), BLANKS)))
def test_ids_are_read_from_json(reader: Callable[..., object], ids: list[tuple[str, int, str]]) -> None:
    text = f" [{','.join(f'{before}{it}{after}' for before, it, after in ids)}]\n".encode()
    wanted = array("I", [it for _, it, _ in ids])
    found = reader(text, len(ids))
    assert type(found) is array and found.typecode == "I" and found == wanted
    assert reader(memoryview(text), 1 << 40) == wanted
    assert reader(text, len(ids) - 1) is None, "more than may be"


@READERS
def test_ids_of_all_lengths_at_all_ends(reader: Callable[..., object]) -> None:
    """Numbers are read eight bytes at a time, but for those near the text's end."""
    edges = [0, 1, 9, 2**32 - 1, *(10**at + add for at in range(1, 10) for add in (-1, 0, 1))]
    for one in edges:
        for two in edges:
            assert reader(b"[%d,%d]" % (one, two), 2) == array("I", [one, two])
            assert reader(b"[%d,%d" % (one, two), 2) is None


@READERS
@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"[", b"]", b"[]]", b"[[]]", b"[,]", b"[1,]", b"[,1]", b"[1,,2]", b"[1 2]", b"[1]x", b"x[1]",
        b"[01]", b"[00]", b"[0000000]", b"[01,2,3,4,5]", b"[-0]", b"[-1]", b"[+1]", b"[1.0]", b"[1.0,2,3,4,5]",
        b"[1e1]", b"[1E1,2,3,4,5]", b"[.1]", b"[4294967296]", b"[4294967296,1]", b"[18446744073709551616,1]",
        b"[99999999999999999999999999999999]", b"[" + b"9" * 5000 + b"]", b"[1,2\0]", b"[1\v]", b"[\f1]",
        b"[1,2,3]\xa0", "[\u0661]".encode(), b"[true]", b"[null]", b'["1"]', b"[[1]]", b"{}", b"1", b"1,2",
        b"[1:2]", b"[/]", b"[1/,2,3,4,5]", b"[:,1,2,3,4]", b"\xef\xbb\xbf[1]", b"[1_0]", b"[1,2,3,4,5\xff]",
    ],
)  # fmt: skip
def test_what_is_no_array_of_ids_is_not_read(reader: Callable[..., object], text: bytes) -> None:
    assert reader(text, 100) is None


@READERS
def test_texts_of_the_same_characters(reader: Callable[..., object]) -> None:
    """Nearly all of them are no arrays; whatever they are, it is what JSON says."""
    draw, good = random.Random(34), 0
    for _ in range(20_000):
        text = bytes(draw.choices(b"0123456789,,, [] -.e", k=draw.randrange(14)))
        if draw.random() < 0.8:
            text = b"[%b]" % text
        wanted = as_json_says(text)
        good += wanted is not None
        assert reader(text, 100) == wanted, text
    assert good > 100


@READERS
def test_texts_with_one_byte_changed(reader: Callable[..., object]) -> None:
    draw = random.Random(35)
    for _ in range(4000):
        ids = [draw.randrange(2 ** draw.randrange(1, 33)) for _ in range(draw.randrange(1, 9))]
        text = bytearray(json.dumps(ids).encode())
        text[draw.randrange(len(text))] = (
            draw.choice(b"0123456789,,[] -.e") if draw.random() < 0.7 else draw.randrange(256)
        )
        assert reader(bytes(text), 100) == as_json_says(bytes(text)), bytes(text)


def test_nothing_behind_a_text_is_read() -> None:
    """Nobody may read the page behind this one."""
    room, page = mmap.mmap(-1, 2 * mmap.PAGESIZE), mmap.PAGESIZE
    begin = ctypes.c_char.from_buffer(room)
    behind = ctypes.c_void_p(ctypes.addressof(begin) + page)
    mprotect = ctypes.CDLL(None).mprotect
    assert mprotect(behind, ctypes.c_size_t(page), 0) == 0
    for text in (b"[1,23]", b"[1,23", b"[", b"[123456789"):
        room[page - len(text) : page] = text
        with memoryview(room) as whole, whole[page - len(text) : page] as view:
            assert keys.read_ids(view, 9) == (array("I", [1, 23]) if text.endswith(b"]") else None)
    del begin
    assert mprotect(behind, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE) == 0
    room.close()


@READERS
def test_the_fewest_that_may_be(reader: Callable[..., object]) -> None:
    assert reader(b"[]", 0) == array("I")
    for most in (-1, -(2**40)):
        assert reader(b"[]", most) is None
    assert reader(b"[1]", 0) is None


@native
def test_no_call_keeps_hold_of_an_array() -> None:
    """An exported array refuses to grow."""
    for made in (array("I", [1, 2]), array("i", [1, 2])):
        keys.chunk_keys(ROOT, made, 2)
        made.append(3)


def test_chains_that_are_given_it_have_the_same_keys() -> None:
    tokens, media = list(range(100)), [Media("image", 40, 9)]
    for shown in ((), media):
        chain = KeyChain(ROOT, 8, shown, keys.chain_digests)
        for until in (5, 16, 50, 100):
            chain.extend(tokens[:until])
        assert chain.keys == hashing.chunk_keys(ROOT, tokens, 8, shown)
    named = EngineKeys(ROOT, 8, chain=keys.chain_digests)
    assert named.stored([1, 2], None, tokens[:16]) == hashing.chunk_keys(ROOT, tokens[:16], 8)
    assert named.stored([3], 2, tokens[16:24]) == hashing.chunk_keys(ROOT, tokens[:24], 8)[2:]


@native
@pytest.mark.usefixtures("nobody_is_made_to_yield")
def test_another_thread_runs_only_during_long_inputs() -> None:
    long, short = array("I", bytes(4 << 20)), array("I", bytes((1 << 20) - 4))

    def another_ran(tokens: Sequence[int]) -> bool:
        go, ran = threading.Lock(), threading.Event()
        go.acquire()
        thread = threading.Thread(target=lambda: (go.acquire(), ran.set()))
        thread.start()
        go.release()
        keys.chunk_keys(ROOT, tokens, 1 << 15)
        seen = ran.is_set()
        thread.join()
        return seen

    assert any(another_ran(long) for _ in range(20))
    assert not any(another_ran(short) for _ in range(5))


def outcome(call: object, *given_: object) -> object:
    """What a call gives, or how it fails."""
    try:
        return call(*given_)  # type: ignore[operator]
    except (ArithmeticError, TypeError, ValueError) as error:
        return type(error), str(error)
