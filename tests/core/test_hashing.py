"""Chunk keys: fixed for ever, different for everything that changes KV bytes, equal in every process."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from dataclasses import fields, replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.hashing import KeyChain, chunk_keys, media_part
from headwater.types import Media, Namespace, pack_keys, split_keys

PLAIN = Namespace("sha256:0123", "bfloat16", "flash.nhd.16", "g0")
FULL = Namespace("m\u00fc", "fp8_e4m3", "cpu.avx2.128", "g1", "tp2.pp2", "lora:7", "tenant\n1", "s:a:l\u00e9t")
IMAGES = (Media("sha256:cat", 3, 6), Media("sha256:dog", 12, 2))

GOLDEN_ROOTS = [
    (PLAIN, "da73103d5e2fb7c994e76bbc6b92a1fad8c1dc5b639913b2efd8981eb965b2f4"),
    (FULL, "6fe1192ce8525e762f593148c0176c7ee1c5cb455cc11b87b5b965dd1a37e3b9"),
    (Namespace("", "", "", "", ""), "2b19b9661a21083b1e4d31a179aa63c20ef5f279c519f3093868ac6c3b92b0c8"),
    (
        Namespace("\ud800", "\udc00", "\ud800\udc00", "\U00010000"),
        "c4a9f53f20b91593e2f9de44a67ed13ce69c03ca41855b891ec240283a18f350",
    ),
]

GOLDEN_KEYS = [
    (
        PLAIN,
        list(range(8)),
        4,
        (),
        [
            "b6f6b48bdb3c2ccba75859e97b1198a3",
            "309f8053841ae227f7ecdf00997bdb28",
        ],
    ),
    (
        PLAIN,
        [0] * 7,
        3,
        (),
        [
            "7ba056071794dca1188c527681f299db",
            "430d3e1ff9e8b343e32dee62f681cefc",
        ],
    ),
    (
        PLAIN,
        [2**32 - 1, 0, 151643],
        1,
        (),
        [
            "fd69c579b5ce1729aaa158f26ab48a96",
            "4e8b5ff5a7d7bf52d51a348bc12aef2b",
            "97514fe23b4f799908357cee244fe893",
        ],
    ),
    (
        FULL,
        list(range(8)),
        4,
        (),
        [
            "41c4ac56da97e105ed7486728a3cabde",
            "f00e9d8c4c2a4d3aa478b09ad7feb269",
        ],
    ),
    (
        PLAIN,
        list(range(16)),
        4,
        IMAGES,
        [
            "9cd9d81f80a7ca7f9faea85767d326cd",
            "48a68fd56059b8f29ae7e22c76021546",
            "ab637acbdb3fead62bb4d356a8fe9ec3",
            "4903a8a258e8d92ec778ced48e48dcf4",
        ],
    ),
    (
        FULL,
        list(range(16)),
        8,
        IMAGES,
        [
            "0400a3a3c0ea0bea95e2801f38442537",
            "500c6c91c0555196340d418092e7f083",
        ],
    ),
]

AWKWARD = (
    "", "a", "aa", "a\n", "\n", ":", "1:a", "model:1:a", "\nmodel:1:a", "tenant", "salt:0:", "\x00", "\x00\x00", "0",
    "\u00e9", "e\u0301", "\ud800", "\udc00", "\ud800\udc00", "\U00010000", "\ufeff", "\u202e", " ", "A", "None",
)  # fmt: skip


@pytest.mark.parametrize(("namespace", "root"), GOLDEN_ROOTS)
def test_golden_roots(namespace: Namespace, root: str) -> None:
    assert namespace.root().hex() == root


@pytest.mark.parametrize(("namespace", "tokens", "chunk_tokens", "media", "keys"), GOLDEN_KEYS)
def test_golden_keys(
    namespace: Namespace, tokens: list[int], chunk_tokens: int, media: tuple[Media, ...], keys: list[str]
) -> None:
    assert [key.hex() for key in chunk_keys(namespace.root(), tokens, chunk_tokens, media)] == keys


def test_keys_are_what_the_documentation_says() -> None:
    # An independent reading of the docstring of core.hashing, so that other languages can follow it.
    digest, expected = FULL.root(), []
    tokens = list(range(100, 120))
    for start in range(0, 20, 5):
        message = digest + struct.pack("<5I", *tokens[start : start + 5])
        here = [it for it in IMAGES if it.offset_tokens < start + 5 and it.offset_tokens + it.length_tokens > start]
        if here:
            message += struct.pack("<I", len(here))
            for it in here:
                name = it.identifier.encode()
                message += struct.pack("<I", len(name)) + name
                message += struct.pack("<qq", it.offset_tokens - start, it.length_tokens)
        digest = sha256(message).digest()
        expected.append(digest[:16])
    assert chunk_keys(FULL.root(), tokens, 5, IMAGES) == expected


def test_hundred_thousand_namespaces_have_as_many_roots() -> None:
    seed = 20260901
    rng = random.Random(seed)
    names = [it.name for it in fields(Namespace)]
    records = {tuple(rng.choice(AWKWARD) for _ in names) for _ in range(100_000)}
    roots = {Namespace(*record).root() for record in records}
    assert len(records) > 99_000
    assert len(roots) == len(records), f"seed {seed}"


texts = st.one_of(st.sampled_from(AWKWARD), st.text(st.characters(exclude_categories=()), max_size=8))
namespaces = st.builds(Namespace, *(texts for _ in fields(Namespace)))


@given(namespaces, namespaces)
def test_roots_are_equal_exactly_for_equal_records(one: Namespace, other: Namespace) -> None:
    assert (one.root() == other.root()) == (one == other)


@given(namespaces, st.sampled_from(fields(Namespace)), texts)
def test_changing_one_field_changes_the_root(one: Namespace, field: object, value: str) -> None:
    other = replace(one, **{field.name: value})  # type: ignore[attr-defined]
    assert (one.root() == other.root()) == (one == other)


@given(namespaces, st.permutations(range(len(fields(Namespace)))))
def test_swapping_values_between_fields_changes_the_root(one: Namespace, order: list[int]) -> None:
    values = [getattr(one, it.name) for it in fields(Namespace)]
    other = Namespace(*(values[position] for position in order))
    assert (one.root() == other.root()) == (one == other)


def test_moving_a_byte_between_fields_changes_the_root() -> None:
    assert replace(PLAIN, tenant="ab", salt="c").root() != replace(PLAIN, tenant="a", salt="bc").root()
    assert replace(PLAIN, adapter="x", tenant="").root() != replace(PLAIN, adapter="", tenant="x").root()


def test_a_hundred_images_under_equal_tokens_have_distinct_chains() -> None:
    tokens = [7] * 40
    chains = [chunk_keys(PLAIN.root(), tokens, 4, [Media(f"sha256:{i:03}", 9, 6)]) for i in range(100)]
    text = chunk_keys(PLAIN.root(), tokens, 4)
    for position in range(10):
        distinct = {keys[position] for keys in chains}
        # Tokens 0..7 come before the image: their chunks stay shareable with each other and with plain text.
        assert distinct == {text[position]} if position < 2 else len(distinct) == 100
        assert position < 2 or text[position] not in distinct


def test_media_are_told_apart_by_place_order_and_count() -> None:
    tokens = [7] * 8
    items = [
        (),
        (Media("a", 0, 2),),
        (Media("a", 1, 2),),
        (Media("a", 0, 3),),
        (Media("a", 0, 2), Media("a", 0, 2)),
        (Media("a", 0, 2), Media("b", 2, 2)),
        (Media("b", 0, 2), Media("a", 2, 2)),
        (Media("a" * 2, 0, 2),),
        (Media("", 0, 2),),
    ]
    assert len({chunk_keys(PLAIN.root(), tokens, 4, media)[0] for media in items}) == len(items)
    # The order in which a caller lists the items says nothing.
    assert chunk_keys(PLAIN.root(), tokens, 4, items[5]) == chunk_keys(PLAIN.root(), tokens, 4, items[5][::-1])


def test_a_medium_counts_in_every_chunk_that_it_overlaps_and_in_no_other() -> None:
    item = Media("a", 3, 6)
    assert [bool(media_part([item], start, start + 4)) for start in (0, 4, 8, 12)] == [True, True, True, False]
    assert media_part([Media("a", 4, 4)], 0, 4) == b""
    assert media_part([Media("a", 0, 4)], 4, 8) == b""


PROMPTS = """
import random, sys
from headwater.core.hashing import chunk_keys
from headwater.types import Media, Namespace, pack_keys
rng = random.Random(5)
for number in range(100):
    space = Namespace("m", "bf16", "l", "g", salt=str(number % 3))
    tokens = [rng.randrange(1 << 32) for _ in range(rng.randrange(200))]
    media = [Media(f"image{number}", rng.randrange(50), 4)] if number % 2 else []
    sys.stdout.write(pack_keys(chunk_keys(space.root(), tokens, 16, media)).hex() + "\\n")
"""


def test_keys_are_equal_in_every_process_whatever_its_hash_seed() -> None:
    seen = []
    for hash_seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        run = subprocess.run([sys.executable, "-c", PROMPTS], env=env, capture_output=True, text=True, check=True)
        seen.append(run.stdout)
    assert len(seen[0].splitlines()) == 100
    assert len(set(seen[0].split())) > 90
    assert seen[0] == seen[1] == seen[2]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=60),
    st.integers(1, 9),
    st.lists(st.integers(0, 60), max_size=6),
    st.lists(st.builds(Media, texts, st.integers(-3, 60), st.integers(0, 20)), max_size=3),
)
def test_extending_in_steps_gives_the_keys_of_one_go(
    tokens: list[int], chunk_tokens: int, steps: list[int], media: list[Media]
) -> None:
    chain = KeyChain(PLAIN.root(), chunk_tokens, media)
    for length in sorted(steps):
        chain.extend(tokens[:length])
        assert chain.tokens == min(length, len(tokens)) // chunk_tokens * chunk_tokens
    chain.extend(tokens)
    chain.extend(tokens[:3])
    assert chain.keys == chunk_keys(PLAIN.root(), tokens, chunk_tokens, media)
    assert len(chain.keys) == len(tokens) // chunk_tokens


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_key_names_its_whole_prefix(one: list[int], other: list[int]) -> None:
    left, right = chunk_keys(PLAIN.root(), one, 2), chunk_keys(PLAIN.root(), other, 2)
    for position, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        end = 2 * position + 2
        assert (mine == theirs) == (one[:end] == other[:end])


def test_other_chunk_sizes_share_no_key() -> None:
    tokens = [5] * 64
    keys = [key for size in (1, 2, 4, 8, 16) for key in chunk_keys(PLAIN.root(), tokens, size)]
    assert len(set(keys)) == len(keys) == 64 + 32 + 16 + 8 + 4


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64])
def test_a_token_id_beyond_32_bits_is_an_error_and_changes_nothing(bad: int) -> None:
    chain = KeyChain(PLAIN.root(), 2)
    chain.extend([1, 2])
    with pytest.raises(OverflowError):
        chain.extend([1, 2, 3, bad])
    chain.extend([1, 2, 3, 4])
    assert chain.keys == chunk_keys(PLAIN.root(), [1, 2, 3, 4], 2)
    assert chunk_keys(PLAIN.root(), [0, 2**32 - 1], 2)


def test_packed_keys_split_again_and_odd_lengths_are_refused() -> None:
    keys = chunk_keys(PLAIN.root(), list(range(12)), 4)
    assert split_keys(pack_keys(keys)) == keys
    assert split_keys(b"") == []
    for count in (1, 63, 64, 65, 128, 200):
        packed = bytes(range(256)) * 13
        assert b"".join(split_keys(packed[: 16 * count])) == packed[: 16 * count]
        assert {len(key) for key in split_keys(packed[: 16 * count])} == {16}
    with pytest.raises(ValueError, match="17 bytes"):
        split_keys(b"x" * 17)
