"""int8 per channel: every implementation gives the same bits, and they are what the definition says."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater._kernels.codec import CodecKernels
from tests.kernels.arena import POISON
from tests.kernels.codecs import (
    IMPLEMENTATIONS,
    INFINITY,
    SIGN,
    WORDS,
    Shape,
    as_bytes,
    floats,
    guards_hold,
    half_step,
    name,
    poisoned,
)

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=name)
elements = pytest.mark.parametrize("element", WORDS)
REFERENCE = IMPLEMENTATIONS[0]

shapes = st.builds(
    Shape,
    layers=st.integers(1, 3),
    blocks=st.integers(1, 6),
    span_blocks=st.integers(1, 8),
    runs=st.integers(1, 3),
    rows=st.integers(1, 5),
    channels=st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 1030])),
)


def values(shape: Shape, element: str, seed: int, kind: str) -> np.ndarray:
    """Finite numbers as words: any bits, one order of magnitude, or what lies at the edges of the format."""
    random = np.random.default_rng(seed)
    count, infinity, sign = shape.elements, INFINITY[element], SIGN[element]
    if kind == "bits":
        size = random.integers(0, infinity, count)
    elif kind == "gaussian":
        middle = {"bfloat16": 0x3F80, "float16": 0x3C00, "float32": 0x3F800000}[element]
        size = middle + (random.standard_normal(count) * infinity / 100).astype(np.int64)
    else:
        size = random.choice([0, 1, 2, 3, infinity // 2, infinity - 2, infinity - 1], count)
    return (size | np.where(random.integers(0, 2, count), sign, 0)).astype(WORDS[element])


def quantised(implementation: CodecKernels, source: np.ndarray, shape: Shape, element: str, shift: int = 0):
    scales, data = poisoned(shape.scales, np.float32, shift), poisoned(shape.elements, np.int8, shift)
    assert implementation.quantise(source, scales, data, **shape.arguments(element))
    assert guards_hold(scales, shift) and guards_hold(data, shift)
    return scales, data


def restored(implementation: CodecKernels, scales, data, shape: Shape, element: str, shift: int = 0) -> np.ndarray:
    words = poisoned(shape.elements, WORDS[element], shift)
    assert implementation.dequantise(words.view(np.uint8), scales, data, **shape.arguments(element))
    assert guards_hold(words, shift)
    return words


def by_element(scales: np.ndarray, shape: Shape) -> np.ndarray:
    """The scale of every element, in the elements' order: straight from the layout in the contract."""
    result = []
    spans = -(-shape.blocks // shape.span_blocks)
    grid = scales.reshape(shape.layers, spans, shape.runs, shape.channels)
    for layer in range(shape.layers):
        for block in range(shape.blocks):
            for run in range(shape.runs):
                result += [grid[layer, block // shape.span_blocks, run]] * shape.rows
    return np.concatenate(result)


@elements
@given(
    shape=shapes,
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["bits", "gaussian", "edges"]),
    shift=st.integers(0, 9),
)
def test_all_implementations_give_the_same_bits(element: str, shape: Shape, seed: int, kind: str, shift: int) -> None:
    words = values(shape, element, seed, kind)
    source = as_bytes(words, shift)
    scales, data = quantised(REFERENCE, source, shape, element)
    back = restored(REFERENCE, scales, data, shape, element)
    for implementation in IMPLEMENTATIONS[1:]:
        other_scales, other_data = quantised(implementation, source, shape, element, shift)
        np.testing.assert_array_equal(other_scales.view(np.uint32), scales.view(np.uint32), implementation.isa)
        np.testing.assert_array_equal(other_data, data, implementation.isa)
        np.testing.assert_array_equal(restored(implementation, scales, data, shape, element, shift), back)


@elements
@given(shape=shapes, seed=st.integers(0, 2**32), kind=st.sampled_from(["bits", "gaussian", "edges"]))
def test_what_comes_back_is_half_a_scale_away_at_most(element: str, shape: Shape, seed: int, kind: str) -> None:
    """Half a scale, half a step of the element type, and what a product of three float32 operations is off."""
    words = values(shape, element, seed, kind)
    exact = floats(words, element)
    for implementation in IMPLEMENTATIONS:
        scales, data = quantised(implementation, as_bytes(words), shape, element)
        back = floats(restored(implementation, scales, data, shape, element), element)
        scale = by_element(scales, shape).astype(np.float64)
        bound = scale / 2 * (1 + 2.0**-14) + half_step(np.abs(exact) + scale, element)
        assert (np.abs(back - exact) <= bound).all(), implementation.isa
        assert np.abs(data.astype(int)).max() <= 127


@elements
@given(shape=shapes, seed=st.integers(0, 2**32))
def test_a_scale_is_the_channels_greatest_size_over_127(element: str, shape: Shape, seed: int) -> None:
    words = values(shape, element, seed, "gaussian")
    sizes = np.abs(floats(words, element)).reshape(shape.layers, shape.blocks, shape.runs, shape.rows, shape.channels)
    spans = range(0, shape.blocks, shape.span_blocks)
    most = np.stack([sizes[:, at : at + shape.span_blocks].max(axis=(1, 3)) for at in spans], axis=1)
    for implementation in IMPLEMENTATIONS:
        scales, _ = quantised(implementation, as_bytes(words), shape, element)
        np.testing.assert_allclose(scales, most.ravel() / 127, rtol=2.0**-23)


@each
@elements
def test_ties_go_to_even(implementation: CodecKernels, element: str) -> None:
    """127 halves: the scale is exactly 1/2, so odd quarters lie between two steps."""
    shape = Shape(rows=9)
    numbers = np.array([63.5, 0.25, 0.75, 1.25, -0.25, -0.75, -1.25, 0.0, -0.0], np.float32)
    words = {
        "bfloat16": (numbers.view(np.uint32) >> 16).astype(np.uint16),
        "float16": numbers.astype(np.float16).view(np.uint16),
        "float32": numbers.view(np.uint32),
    }[element]
    scales, data = quantised(implementation, as_bytes(words), shape, element)
    assert scales.tolist() == [0.5]
    assert data.tolist() == [127, 0, 2, 2, 0, -2, -2, 0, 0]


@each
@pytest.mark.parametrize(
    ("element", "scale", "bits"),
    [
        ("bfloat16", 1 + 2.0**-8, 0x3F80),
        ("bfloat16", 1 + 3 * 2.0**-8, 0x3F82),
        ("float16", 1 + 2.0**-11, 0x3C00),
        ("float16", 1 + 3 * 2.0**-11, 0x3C02),
        ("float16", 2.0**-25, 0),  # below the least normal number
        ("float16", 3 * 2.0**-25, 2),
        ("float16", (1 - 2.0**-11) * 2.0**-14, 0x400),  # to the least normal number
        ("float32", 1 + 2.0**-23, 0x3F800001),
    ],
)
def test_ties_go_to_even_on_the_way_back(implementation: CodecKernels, element: str, scale: float, bits: int) -> None:
    shape = Shape(rows=20)
    data = np.resize(np.array([1, -1], np.int8), 20)
    back = restored(implementation, np.array([scale], np.float32), data, shape, element)
    assert back.tolist() == [bits, bits | SIGN[element]] * 10


@each
@elements
def test_channels_of_zeros_stay_zero(implementation: CodecKernels, element: str) -> None:
    shape = Shape(rows=3, channels=40)
    words = values(shape, element, 1, "gaussian").reshape(3, 40)
    words[:, 5] = 0
    words[:, 6] = SIGN[element]
    scales, data = quantised(implementation, as_bytes(words.ravel()), shape, element)
    back = restored(implementation, scales, data, shape, element).reshape(3, 40)
    assert not back[:, 5:7].any() and back[:, 4].all()
    assert scales[5] == scales[6] == 2.0**-126


@each
@elements
@given(shape=shapes, seed=st.integers(0, 2**32), negative=st.booleans(), nan=st.booleans(), data=st.data())
def test_what_is_not_finite_cannot_be_quantised(
    implementation: CodecKernels, element: str, shape: Shape, seed: int, negative: bool, nan: bool, data: st.DataObject
) -> None:
    words = values(shape, element, seed, "bits")
    at = data.draw(st.integers(0, shape.elements - 1))
    words[at] = INFINITY[element] + nan + negative * SIGN[element]
    scales, steps = poisoned(shape.scales, np.float32), poisoned(shape.elements, np.int8)
    assert not implementation.quantise(as_bytes(words), scales, steps, **shape.arguments(element))
    assert guards_hold(scales) and guards_hold(steps)


@each
@elements
@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-127, float("inf"), float("nan"), "above the greatest"])
def test_scales_that_were_never_written_are_refused(
    implementation: CodecKernels, element: str, scale: float | str
) -> None:
    shape = Shape(rows=2, channels=600)
    greatest = np.array([INFINITY[element] - 1], WORDS[element])
    if scale == "above the greatest":
        scale = np.nextafter(np.float32(floats(greatest, element)[0] / 127), np.float32(np.inf))
    scales, data = np.ones(600, np.float32), np.full(shape.elements, -128, np.int8)
    target = poisoned(shape.elements, WORDS[element]).view(np.uint8)
    assert implementation.dequantise(target, scales, data, **shape.arguments(element))
    assert (floats(target.view(WORDS[element]), element) == -127).all()  # a step that is never written, kept in range
    scales[599] = scale
    assert not implementation.dequantise(target, scales, data, **shape.arguments(element))


def legal() -> dict[str, object]:
    shape = Shape(layers=2, blocks=3, span_blocks=2, runs=2, rows=2, channels=4)
    return {
        "source": as_bytes(values(shape, "bfloat16", 3, "gaussian")),
        "scales": poisoned(shape.scales, np.float32),
        "data": poisoned(shape.elements, np.int8),
        **shape.arguments("bfloat16"),
    }


MISALIGNED = np.zeros(4096, np.uint8)[1:]
BAD = {
    "a list": (TypeError, {"source": [0] * 192}),
    "words": (TypeError, {"source": np.zeros(96, np.uint16)}),
    "bytes for steps": (TypeError, {"data": np.zeros(96, np.uint8)}),
    "float64 scales": (TypeError, {"scales": np.zeros(32)}),
    "foreign byte order": (TypeError, {"scales": np.zeros(32, np.dtype(np.float32).newbyteorder())}),
    "two dimensions": (ValueError, {"data": np.zeros((2, 48), np.int8)}),
    "strided": (ValueError, {"data": np.zeros(192, np.int8)[::2]}),
    "short source": (ValueError, {"source": np.zeros(190, np.uint8)}),
    "long source": (ValueError, {"source": np.zeros(194, np.uint8)}),
    "short scales": (ValueError, {"scales": np.zeros(31, np.float32)}),
    "long scales": (ValueError, {"scales": np.zeros(33, np.float32)}),
    "short data": (ValueError, {"data": np.zeros(95, np.int8)}),
    "long data": (ValueError, {"data": np.zeros(97, np.int8)}),
    "misaligned source": (ValueError, {"source": MISALIGNED[:192]}),
    "misaligned scales": (ValueError, {"scales": memoryview(bytearray(129))[1:].cast("f")}),
    "another element": (ValueError, {"element": "float8"}),
    "a wider element": (ValueError, {"element": "float32"}),
    "no element": (TypeError, {"element": 2}),
    "no layers": (ValueError, {"layers": 0}),
    "negative blocks": (ValueError, {"blocks": -3}),
    "no span": (ValueError, {"span_blocks": 0}),
    "another span": (ValueError, {"span_blocks": 1}),
    "float runs": (TypeError, {"runs": 2.0}),
    "huge rows": (ValueError, {"rows": 2**64}),
    "a product that wraps": (ValueError, {"layers": 2**62, "blocks": 2**62, "span_blocks": 2**62}),
    "channels that are not there": (ValueError, {"channels": 5}),
}


@each
@pytest.mark.parametrize("verb", ["quantise", "dequantise"])
@pytest.mark.parametrize("case", BAD)
def test_refusals(implementation: CodecKernels, verb: str, case: str) -> None:
    error, bad = BAD[case]
    arguments = legal() | bad
    before = {key: np.copy(arguments[key]) for key in ("source", "scales", "data")}
    with pytest.raises(error):
        call(getattr(implementation, verb), arguments)
    for key, array in before.items():
        np.testing.assert_array_equal(arguments[key], array)


@each
@pytest.mark.parametrize(
    ("verb", "read_only"), [("quantise", "scales"), ("quantise", "data"), ("dequantise", "source")]
)
def test_targets_must_be_writable(implementation: CodecKernels, verb: str, read_only: str) -> None:
    arguments = legal()
    arguments[read_only].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call(getattr(implementation, verb), arguments)


@each
def test_the_legal_arguments_above_are_legal(implementation: CodecKernels) -> None:
    arguments = legal()
    for sources in (("source",), ("scales", "data")):
        for key in ("source", "scales", "data"):
            arguments[key].flags.writeable = key not in sources
        assert call(implementation.quantise if sources == ("source",) else implementation.dequantise, arguments)
    assert not (arguments["data"] == POISON).all()


@each
@pytest.mark.parametrize("missing", ["element", "layers", "blocks", "span_blocks", "runs", "rows", "channels"])
def test_nothing_has_a_default(implementation: CodecKernels, missing: str) -> None:
    arguments = legal()
    del arguments[missing]
    with pytest.raises(TypeError, match=missing):
        call(implementation.quantise, arguments)


def call(verb, arguments: dict[str, object]) -> bool:
    named = {key: value for key, value in arguments.items() if key not in ("source", "scales", "data")}
    return verb(arguments["source"], arguments["scales"], arguments["data"], **named)


@pytest.fixture
def nobody_is_made_to_yield():
    """The interpreter takes the GIL from nobody: a thread runs only when another gives it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], ids=name)
@pytest.mark.usefixtures("nobody_is_made_to_yield")
def test_another_thread_runs_meanwhile(implementation: CodecKernels) -> None:
    shape = Shape(layers=64, blocks=4, span_blocks=4, rows=128, channels=512)
    source = np.zeros(shape.elements * 2, np.uint8)
    scales, data = np.empty(shape.scales, np.float32), np.empty(shape.elements, np.int8)

    def runs_meanwhile() -> bool:
        go, ran = threading.Lock(), threading.Event()
        go.acquire()
        thread = threading.Thread(target=lambda: (go.acquire(), ran.set()))
        thread.start()
        go.release()
        assert implementation.quantise(source, scales, data, **shape.arguments("bfloat16"))
        implementation.shuffle(source, np.empty_like(source), element_bytes=2)
        seen = ran.is_set()
        thread.join()
        return seen

    # A busy machine may leave the other thread without a core for one call; without the GIL it never runs in any.
    assert any(runs_meanwhile() for _ in range(10))
