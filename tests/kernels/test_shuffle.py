"""Byte planes are the transpose of the elements' bytes, in every implementation, and come back exactly."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater._kernels import codec as kernels
from headwater._kernels.codec import CodecKernels
from headwater.errors import ConfigError
from tests.kernels.arena import POISON, noise
from tests.kernels.codecs import IMPLEMENTATIONS, guards_hold, name, poisoned

NOISE = noise(1 << 16).array
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=name)
counts = st.one_of(st.integers(0, 200), st.sampled_from([255, 256, 257, 1023, 1024, 4096, 12_289]))


def test_the_machine_with_a_compiler_tests_the_c_code() -> None:
    if not shutil.which("cc"):
        pytest.skip("no compiler here")
    assert kernels.ISAS[-1] == "plain"
    assert kernels.ISAS[0] == kernels.ISA


@given(count=counts, element_bytes=st.sampled_from([2, 4]), start=st.integers(0, 70), shift=st.integers(0, 70))
def test_planes_and_back(count: int, element_bytes: int, start: int, shift: int) -> None:
    size = count * element_bytes
    source = NOISE[start : start + size]
    expected = [source[k * element_bytes + b] for b in range(element_bytes) for k in range(count)]
    for implementation in IMPLEMENTATIONS:
        planes, back = poisoned(size, np.uint8, shift), poisoned(size, np.uint8, start)
        implementation.shuffle(source, planes, element_bytes=element_bytes)
        assert planes.tolist() == expected, implementation.isa
        implementation.unshuffle(planes, back, element_bytes=element_bytes)
        assert np.array_equal(back, source), implementation.isa
        assert guards_hold(planes, shift) and guards_hold(back, start), implementation.isa


BAD = {
    "bytes as target": (ValueError, {"target": bytes(8)}),
    "read-only": (ValueError, {"target": np.frombuffer(bytes(8), np.uint8)}),
    "a list": (TypeError, {"source": [0] * 8}),
    "None": (TypeError, {"target": None}),
    "signed": (TypeError, {"source": np.zeros(8, np.int8)}),
    "words": (TypeError, {"source": np.zeros(4, np.uint16)}),
    "two dimensions": (ValueError, {"source": np.zeros((2, 4), np.uint8)}),
    "strided": (ValueError, {"source": np.zeros(16, np.uint8)[::2]}),
    "backwards": (ValueError, {"source": np.zeros(8, np.uint8)[::-1]}),
    "shorter": (ValueError, {"source": np.zeros(6, np.uint8)}),
    "longer": (ValueError, {"source": np.zeros(10, np.uint8)}),
    "half an element": (ValueError, {"source": np.zeros(7, np.uint8), "target": np.zeros(7, np.uint8)}),
    "1 byte": (ValueError, {"element_bytes": 1}),
    "3 bytes": (ValueError, {"element_bytes": 3}),
    "8 bytes": (ValueError, {"element_bytes": 8}),
    "0 bytes": (ValueError, {"element_bytes": 0}),
    "negative": (ValueError, {"element_bytes": -2}),
    "huge": (ValueError, {"element_bytes": 2**64 + 2}),
    "float": (TypeError, {"element_bytes": 2.0}),
    "nothing": (TypeError, {"element_bytes": None}),
}


@each
@pytest.mark.parametrize("verb", ["shuffle", "unshuffle"])
@pytest.mark.parametrize("case", BAD)
def test_refusals(implementation: CodecKernels, verb: str, case: str) -> None:
    error, bad = BAD[case]
    target = poisoned(8, np.uint8)
    arguments = {"source": NOISE[:8], "target": target, "element_bytes": 2} | bad
    with pytest.raises(error):
        getattr(implementation, verb)(
            arguments["source"], arguments["target"], element_bytes=arguments["element_bytes"]
        )
    assert (target == POISON).all()


@each
def test_the_legal_arguments_above_are_legal(implementation: CodecKernels) -> None:
    target = poisoned(8, np.uint8)
    implementation.shuffle(NOISE[:8], target, element_bytes=2)
    assert target.tolist() == [*NOISE[:8:2], *NOISE[1:8:2]]


@each
def test_the_element_size_has_no_default(implementation: CodecKernels) -> None:
    with pytest.raises(TypeError, match="element_bytes"):
        implementation.shuffle(NOISE[:8], poisoned(8, np.uint8))  # type: ignore[call-arg]


@each
def test_no_call_keeps_hold_of_its_arrays(implementation: CodecKernels) -> None:
    """An exported bytearray refuses to grow; so these appends tell that every buffer was given back."""
    source, target, short = bytearray(8), bytearray(8), bytearray(6)
    implementation.shuffle(source, target, element_bytes=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="equally long"):
        implementation.shuffle(source, short, element_bytes=2)  # type: ignore[arg-type]
    for array in (source, target, short):
        array.append(1)


def test_load_refuses_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.ISAS:
        with pytest.raises(ConfigError, match="'mmx'"):
            kernels.load(True, "mmx")
    monkeypatch.setattr(kernels, "ISAS", ())
    with pytest.raises(ConfigError, match="compiler"):
        kernels.load(True)
    assert kernels.load(False).isa == "numpy"
