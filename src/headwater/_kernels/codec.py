"""How payloads are changed on their way into a lower tier: in C where that was built, else by numpy; same results.

shuffle(source, target, *, element_bytes)
    Byte b of all elements one after another, for b = 0, 1, ...: `target` as a matrix of `element_bytes` rows is the
    transpose of `source` as a matrix of `element_bytes` columns. 2 or 4 bytes an element.
unshuffle(source, target, *, element_bytes)
    The exact reverse.
quantise(source, scales, data, *, element, layers, blocks, span_blocks, runs, rows, channels) -> bool
    int8 with one scale for each channel of a span of `span_blocks` blocks (the last span of a layer may have fewer):

        source  uint8    [layer][block][run][row][channel], elements of type `element`
        scales  float32  [layer][span][run][channel]
        data    int8     [layer][block][run][row][channel]

        scale = greatest |x| / 127, but at least 2**-126      q = round-half-even(x * (1 / scale))

    False if there is an infinity or a NaN; the targets are then undefined.
dequantise(source, scales, data, *, ...) -> bool
    `source` is filled with `round-half-even(q * scale)` from the other two, same arguments. So what comes back is at
    most scale / 2 from what was, and half a step of the element type. False if there is a scale that `quantise` cannot
    have written; `source` is then undefined.

`element` is bfloat16, float16 or float32. Arrays are 1-D, contiguous, aligned, of exactly the sizes that the shape
says; they stay the caller's, must not change during a call, and what is written may not overlap anything else.
Arguments that do not fit raise TypeError or ValueError before any byte is written. The C code runs without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headwater._kernels import codec_fallback as fallback
from headwater.errors import ConfigError
from headwater.ports import Bytes

try:
    from headwater._kernels import _codec
except ImportError:  # installed without a compiler
    ISAS: tuple[str, ...] = ()
else:
    ISAS = _codec.ISAS

Scales = npt.NDArray[np.float32]
Steps = npt.NDArray[np.int8]


class Planes(Protocol):
    """The shape of `shuffle` and `unshuffle`."""

    def __call__(self, source: Bytes, target: Bytes, *, element_bytes: int) -> None: ...


class Quantise(Protocol):
    """The shape of `quantise` and `dequantise`."""

    def __call__(
        self,
        source: Bytes,
        scales: Scales,
        data: Steps,
        *,
        element: str,
        layers: int,
        blocks: int,
        span_blocks: int,
        runs: int,
        rows: int,
        channels: int,
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class CodecKernels:
    """One implementation."""

    isa: str
    shuffle: Planes
    unshuffle: Planes
    quantise: Quantise
    dequantise: Quantise


def load(native: bool, isa: str | None = None) -> CodecKernels:
    """The C implementation for one of ISAS (the first is the machine's best), or that in numpy.

    Raises ConfigError where the C extension was not built.
    """
    if not native:
        return CodecKernels("numpy", fallback.shuffle, fallback.unshuffle, fallback.quantise, fallback.dequantise)
    if not ISAS:
        raise ConfigError("native codecs: not built; install headwater again with a C compiler, or allow others")
    name = isa or ISAS[0]
    if name not in ISAS:
        raise ConfigError(f"instruction set {name!r}: not on this machine, which has {', '.join(ISAS)}")
    verbs: list[Callable[..., object]] = [_codec.shuffle, _codec.unshuffle, _codec.quantise, _codec.dequantise]
    return CodecKernels(name, *(partial(verb, isa=name) for verb in verbs))  # type: ignore[arg-type]


_best = load(bool(ISAS))
ISA = _best.isa
shuffle, unshuffle, quantise, dequantise = _best.shuffle, _best.unshuffle, _best.quantise, _best.dequantise
