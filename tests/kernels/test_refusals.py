"""Arguments that cannot be right are refused before any byte is copied, whatever stands next to them."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from headwater import _kernels as kernels
from headwater._kernels import Kernels
from headwater.errors import ConfigError
from tests.kernels.arena import IMPLEMENTATIONS, POISON, i64, memory, name, noise, u64

SOURCE, TARGET = noise(1 << 16), memory(1 << 16)
LAST = 1 << 63  # the end of the address space
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=name)


def misaligned(count: int) -> memoryview:
    return memoryview(bytearray(8 * count + 1))[1:].cast("Q")


def copyv_arguments() -> dict[str, object]:
    """Legal: two pieces."""
    return {
        "targets": u64(TARGET.at(0), TARGET.at(100)),
        "sources": u64(SOURCE.at(0), SOURCE.at(100)),
        "lengths": u64(100, 100),
    }


def paged_arguments() -> dict[str, object]:
    """Legal in both directions: two layers, three blocks."""
    return {
        "bases": u64(TARGET.at(0), TARGET.at(1024)),
        "blocks": i64(1, 0, 2),
        "places": u64(SOURCE.at(0), SOURCE.at(100), SOURCE.at(200)),
        "block_bytes": 100,
        "stride_bytes": 128,
        "layer_stride_bytes": 300,
    }


BAD_COPYV = {
    "a list": (TypeError, {"targets": [TARGET.at(0), TARGET.at(100)]}),
    "None": (TypeError, {"sources": None}),
    "signed": (TypeError, {"lengths": i64(100, 100)}),
    "float": (TypeError, {"sources": np.array([1.0, 2.0])}),
    "32 bits": (TypeError, {"lengths": np.array([100, 100], np.uint32)}),
    "foreign byte order": (TypeError, {"lengths": np.array([100, 100], np.dtype(np.uint64).newbyteorder())}),
    "two dimensions": (ValueError, {"lengths": np.full((2, 1), 100, np.uint64)}),
    "no dimension": (ValueError, {"lengths": np.array(100, np.uint64)}),
    "strided": (ValueError, {"lengths": np.full(4, 100, np.uint64)[::2]}),
    "misaligned": (ValueError, {"lengths": misaligned(2)}),
    "fewer lengths": (ValueError, {"lengths": u64(100)}),
    "more sources": (ValueError, {"sources": u64(SOURCE.at(), SOURCE.at(), SOURCE.at())}),
    "target 0": (ValueError, {"targets": u64(TARGET.at(), 0)}),
    "source 0": (ValueError, {"sources": u64(SOURCE.at(), 0)}),
    "target past the end": (ValueError, {"targets": u64(TARGET.at(), LAST - 99)}),
    "source past the end": (ValueError, {"sources": u64(SOURCE.at(), 2**64 - 1)}),
    "length past the end": (ValueError, {"lengths": u64(100, LAST)}),
    "length that wraps": (ValueError, {"lengths": u64(100, 2**64 - 1)}),
    "sum past the end": (
        ValueError,
        {"targets": u64(TARGET.at(), 1), "sources": u64(SOURCE.at(), 1), "lengths": u64(100, LAST - 1)},
    ),
}

BAD_PAGED = {
    "signed bases": (TypeError, {"bases": i64(TARGET.at(0), TARGET.at(1024))}),
    "unsigned blocks": (TypeError, {"blocks": u64(1, 0, 2)}),
    "32-bit blocks": (TypeError, {"blocks": np.array([1, 0, 2], np.int32)}),
    "signed places": (TypeError, {"places": i64(1, 2, 3)}),
    "a list": (TypeError, {"blocks": [1, 0, 2]}),
    "float block_bytes": (TypeError, {"block_bytes": 100.0}),
    "no stride": (TypeError, {"stride_bytes": None}),
    "strided blocks": (ValueError, {"blocks": i64(1, 9, 0, 9, 2, 9)[::2]}),
    "fewer places": (ValueError, {"places": u64(SOURCE.at(), SOURCE.at(100))}),
    "negative block": (ValueError, {"blocks": i64(1, 0, -1)}),
    "block_bytes 0": (ValueError, {"block_bytes": 0}),
    "negative block_bytes": (ValueError, {"block_bytes": -1}),
    "huge block_bytes": (ValueError, {"block_bytes": 2**64}),
    "huge stride that block 0 never uses": (
        ValueError,
        {"stride_bytes": 2**64, "blocks": i64(0), "places": u64(SOURCE.at())},
    ),
    "stride below the block": (ValueError, {"stride_bytes": 99}),
    "layer stride below the block": (ValueError, {"layer_stride_bytes": 99}),
    "huge layer stride": (ValueError, {"layer_stride_bytes": LAST}),
    "product past the end": (
        ValueError,
        {"block_bytes": 1 << 61, "stride_bytes": 1 << 61, "layer_stride_bytes": 1 << 61, "blocks": i64(0, 0, 0)},
    ),
    "block past the end": (ValueError, {"blocks": i64(1, 0, 2**63 - 1)}),
    "block that wraps": (ValueError, {"blocks": i64(1, 0, 2), "stride_bytes": LAST}),
    "base 0": (ValueError, {"bases": u64(TARGET.at(), 0)}),
    "base past the end": (ValueError, {"bases": u64(TARGET.at(), LAST - 300)}),
    "place 0": (ValueError, {"places": u64(SOURCE.at(), SOURCE.at(100), 0)}),
    "place past the end": (ValueError, {"places": u64(SOURCE.at(), SOURCE.at(100), LAST - 399)}),
}


@each
@pytest.mark.parametrize("case", BAD_COPYV)
def test_copyv_refuses(implementation: Kernels, case: str) -> None:
    error, bad = BAD_COPYV[case]
    TARGET.poison()
    with pytest.raises(error):
        implementation.copyv(*(copyv_arguments() | bad).values())
    assert (TARGET.array == POISON).all()


@each
@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize("case", BAD_PAGED)
def test_paged_copies_refuse(implementation: Kernels, verb: str, case: str) -> None:
    error, bad = BAD_PAGED[case]
    TARGET.poison()
    before = SOURCE.array.copy()
    with pytest.raises(error):
        getattr(implementation, verb)(**(paged_arguments() | bad))
    assert (TARGET.array == POISON).all()
    np.testing.assert_array_equal(SOURCE.array, before)


@each
def test_a_negative_block_is_called_that(implementation: Kernels) -> None:
    with pytest.raises(ValueError, match="negative"):
        implementation.gather(**(paged_arguments() | {"blocks": i64(1, 0, -1)}))


@each
@pytest.mark.parametrize("missing", ["block_bytes", "stride_bytes", "layer_stride_bytes"])
def test_sizes_have_no_defaults(implementation: Kernels, missing: str) -> None:
    arguments = paged_arguments()
    del arguments[missing]
    with pytest.raises(TypeError, match=missing):
        implementation.scatter(**arguments)


@each
def test_the_legal_arguments_above_are_legal(implementation: Kernels) -> None:
    TARGET.poison()
    implementation.copyv(*copyv_arguments().values())
    np.testing.assert_array_equal(TARGET.array[:200], SOURCE.array[:200])
    TARGET.poison()
    implementation.scatter(**paged_arguments())
    np.testing.assert_array_equal(TARGET.array[1024 + 256 : 1024 + 356], SOURCE.array[500:600])


@each
def test_no_call_keeps_hold_of_its_arrays(implementation: Kernels) -> None:
    """An exported array.array refuses to grow; so these appends tell that every buffer was given back."""
    targets, sources = array("Q", [TARGET.at()]), array("Q", [SOURCE.at()])
    fine, short, bad = array("Q", [10]), array("Q"), array("q", [10])
    implementation.copyv(targets, sources, fine)
    with pytest.raises(ValueError, match="equally long"):
        implementation.copyv(targets, sources, short)
    with pytest.raises(TypeError, match="lengths"):
        implementation.copyv(targets, sources, bad)
    for descriptors in (targets, sources, fine, short, bad):
        descriptors.append(1)


def test_load_refuses_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.NATIVE:
        with pytest.raises(ConfigError, match="'mmx'"):
            kernels.load(True, "mmx")
    monkeypatch.setattr(kernels, "ISAS", ())
    with pytest.raises(ConfigError, match="compiler"):
        kernels.load(True)
    assert kernels.load(False).isa == "libc"
