"""Every implementation moves exactly the bytes that the definition says, and no other byte changes."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import _kernels as kernels
from headwater._kernels import Kernels
from tests.kernels.arena import IMPLEMENTATIONS, POISON, i64, memory, name, noise, u64

SIZE = 1 << 20
SOURCE, TARGET = noise(SIZE), memory(SIZE)
# Whole calls of this many bytes are streamed, and so are pieces above 1 KiB of such a call.
STREAMED = 256 << 10

lengths = st.one_of(
    st.integers(0, 200),
    st.integers(1000, 1100),
    st.integers(4000, 20_000),
    st.sampled_from([0, 1, 63, 64, 65, 127, 128, 1023, 1024, 4096, 8192, 12_288, 65_536]),
)
shifts = st.one_of(st.sampled_from([0, 64, 4096]), st.integers(0, 130))
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=name)


def test_the_machine_with_a_compiler_tests_the_c_code() -> None:
    if not shutil.which("cc"):
        pytest.skip("no compiler here")
    assert kernels.NATIVE
    assert kernels.ISAS[-1] == "plain"
    assert kernels.ISAS[0] == kernels.ISA


@st.composite
def piece_lists(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(target offset, source offset, length) with gaps between the targets, in shuffled order."""
    sizes = draw(st.lists(lengths, max_size=8))
    if draw(st.booleans()):
        sizes.append(STREAMED + draw(st.integers(0, 300)))
    pieces, end = [], 0
    for length in sizes:
        start = end + draw(shifts)
        pieces.append((start, draw(st.integers(0, SIZE - length)), length))
        end = start + length
    return draw(st.permutations(pieces))


@given(pieces=piece_lists())
def test_copyv(pieces: list[tuple[int, int, int]]) -> None:
    expected = np.full(SIZE, POISON, np.uint8)
    for target, source, length in pieces:
        expected[target : target + length] = SOURCE.array[source : source + length]
    targets = u64(*(TARGET.at(piece[0]) for piece in pieces))
    sources = u64(*(SOURCE.at(piece[1]) for piece in pieces))
    for implementation in IMPLEMENTATIONS:
        TARGET.poison()
        implementation.copyv(targets, sources, u64(*(piece[2] for piece in pieces)))
        assert np.array_equal(TARGET.array, expected), implementation.isa


@st.composite
def requests(draw: st.DrawFn) -> dict[str, int | list[int]]:
    """A request over pages in the first half and packed places in the second half of a memory of SIZE."""
    block_bytes = draw(st.sampled_from([1, 7, 64, 100, 1000, 1024, 4096, 12_288, 30_000]))
    stride_bytes = block_bytes + draw(shifts)
    most = min(16, SIZE // 2 // (stride_bytes + 130))
    layer_count = draw(st.integers(0, min(4, most)))
    page_count = most // max(layer_count, 1)
    blocks = draw(st.lists(st.integers(0, page_count - 1), max_size=page_count, unique=True))
    order = draw(st.permutations(range(len(blocks))))
    return {
        "block_bytes": block_bytes,
        "stride_bytes": stride_bytes,
        "layer_stride_bytes": max(block_bytes, len(blocks) * block_bytes) + draw(shifts),
        "bases": [layer * page_count * stride_bytes + draw(st.integers(0, 130)) for layer in range(layer_count)],
        "blocks": blocks,
        "places": [SIZE // 2 + 9 + slot * block_bytes for slot in order],
    }


def pairs(request: dict[str, int | list[int]]) -> list[tuple[int, int]]:
    """(paged offset, packed offset) of every piece, straight from the definition."""
    return [
        (base + block * request["stride_bytes"], place + layer * request["layer_stride_bytes"])
        for layer, base in enumerate(request["bases"])
        for block, place in zip(request["blocks"], request["places"], strict=True)
    ]


def overlaps(starts: list[int], length: int) -> bool:
    return any(after < before + length for before, after in pairwise(sorted(starts)))


@given(request=requests())
def test_gather_and_scatter(request: dict[str, int | list[int]]) -> None:
    length = request["block_bytes"]
    moves = pairs(request)
    assert not overlaps([packed for _, packed in moves], length)
    if overlaps([paged for paged, _ in moves], length):
        moves, request = [], request | {"bases": []}  # shifted layers met: not a legal scatter
    for direction in ("gather", "scatter"):
        expected = np.full(SIZE, POISON, np.uint8)
        for paged, packed in moves:
            source, target = (paged, packed) if direction == "gather" else (packed, paged)
            expected[target : target + length] = SOURCE.array[source : source + length]
        paged_side, packed_side = (SOURCE, TARGET) if direction == "gather" else (TARGET, SOURCE)
        for implementation in IMPLEMENTATIONS:
            TARGET.poison()
            getattr(implementation, direction)(
                u64(*map(paged_side.at, request["bases"])),
                i64(*request["blocks"]),
                u64(*map(packed_side.at, request["places"])),
                block_bytes=length,
                stride_bytes=request["stride_bytes"],
                layer_stride_bytes=request["layer_stride_bytes"],
            )
            assert np.array_equal(TARGET.array, expected), (direction, implementation.isa)


@each
@pytest.mark.parametrize("shift", [0, 16, 64, 80])
@pytest.mark.parametrize(("layers", "block_bytes"), [(30, 12_288), (4, 65_536), (30, 6144), (2, 200_000)])
def test_a_chunk_there_and_back(implementation: Kernels, layers: int, block_bytes: int, shift: int, seed: int) -> None:
    """Real shapes, all streamed: pages -> chunk -> other pages, where only the blocks of the chunk changed."""
    page_count, count = 12, 6
    pool_bytes = page_count * block_bytes
    pages, other = noise(layers * pool_bytes + 128), memory(layers * pool_bytes + 128)
    chunk = memory(layers * count * block_bytes + 128)
    blocks = np.random.default_rng(seed).permutation(page_count)[:count].astype(np.int64)
    offsets = np.arange(layers, dtype=np.uint64) * np.uint64(pool_bytes) + np.uint64(shift)
    places = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes) + np.uint64(chunk.at(shift))
    sizes = {"block_bytes": block_bytes, "stride_bytes": block_bytes, "layer_stride_bytes": count * block_bytes}

    implementation.gather(offsets + np.uint64(pages.at()), blocks, places, **sizes)
    implementation.scatter(offsets + np.uint64(other.at()), blocks, places, **sizes)

    def by_page(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return array[shift : shift + layers * pool_bytes].reshape(layers, page_count, block_bytes)

    packed = chunk.array[shift : shift + layers * count * block_bytes].reshape(layers, count, block_bytes)
    np.testing.assert_array_equal(packed, by_page(pages.array)[:, blocks])
    expected = np.full_like(by_page(other.array), POISON)
    expected[:, blocks] = packed
    np.testing.assert_array_equal(by_page(other.array), expected)
    for filled, size in ((chunk, packed.size), (other, layers * pool_bytes)):
        assert (filled.array[:shift] == POISON).all()
        assert (filled.array[shift + size :] == POISON).all()


@each
def test_empty_requests_are_legal(implementation: Kernels) -> None:
    TARGET.poison()
    sizes = {"block_bytes": 8, "stride_bytes": 8, "layer_stride_bytes": 8}
    base, place = u64(TARGET.at()), u64(TARGET.at(64))
    implementation.copyv(u64(), u64(), u64())
    implementation.copyv(u64(0), u64(0), u64(0))
    for verb in (implementation.gather, implementation.scatter):
        verb(base, i64(), u64(), **sizes)
        verb(u64(), i64(1), place, **sizes)
    assert (TARGET.array == POISON).all()
