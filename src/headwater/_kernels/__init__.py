"""Lists of copies between addresses of this process: in C where that was built, else by libc through ctypes.

copyv(targets, sources, lengths)
    For every k, copies `lengths[k]` bytes from address `sources[k]` to address `targets[k]`.
gather(bases, blocks, places, *, block_bytes, stride_bytes, layer_stride_bytes)
    For every layer l and every i, copies `block_bytes` bytes from `bases[l] + blocks[i] * stride_bytes` to
    `places[i] + l * layer_stride_bytes`. `places[i]` is where layer 0 of block i belongs, so one call serves a
    whole request: several chunks at several places, or only some blocks of a chunk.
scatter(bases, blocks, places, *, block_bytes, stride_bytes, layer_stride_bytes)
    The exact reverse of `gather` with the same arguments.
touch(address, length)
    Has the pages of a range present and writable, changing no byte even while others write there. OSError if
    they cannot be had (tmpfs full, range unmapped or read-only); what was populated until then stays.

Arrays are 1-D, contiguous, native uint64, only `blocks` int64. They must not change during a call; nothing that is
written may overlap anything else of the same call; the memory stays the caller's. The GIL is released while bytes
move (by libc: for each piece). When a call returns, whoever is told so afterwards sees every byte.

Arguments that cannot be right (a wrong type; unequal array lengths, a negative block, a stride below `block_bytes`,
a piece that leaves the address space) raise TypeError or ValueError before any byte is copied. Whether an address
is mapped is not checked: that is what leases are for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from headwater._kernels import fallback
from headwater.errors import ConfigError
from headwater.ports import Addresses, BlockIds

try:
    from headwater._kernels import _copy
except ImportError:  # installed without a compiler
    ISAS: tuple[str, ...] = ()
else:
    ISAS = _copy.ISAS

__all__ = ["ISA", "ISAS", "NATIVE", "Kernels", "PagedCopy", "copyv", "gather", "load", "scatter", "touch"]


class PagedCopy(Protocol):
    """The shape of `gather` and `scatter`."""

    def __call__(
        self,
        bases: Addresses,
        blocks: BlockIds,
        places: Addresses,
        *,
        block_bytes: int,
        stride_bytes: int,
        layer_stride_bytes: int,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of the copies."""

    native: bool
    isa: str
    copyv: Callable[[Addresses, Addresses, Addresses], None]
    gather: PagedCopy
    scatter: PagedCopy
    touch: Callable[[int, int], None]


def load(native: bool, isa: str | None = None) -> Kernels:
    """The C implementation for one of ISAS (the first is the machine's best), or the one without C.

    Raises ConfigError where the C extension was not built.
    """
    if not native:
        return Kernels(False, "libc", fallback.copyv, fallback.gather, fallback.scatter, fallback.touch)
    if not ISAS:
        raise ConfigError("native copies: not built; install headwater again with a C compiler, or allow others")
    name = isa or ISAS[0]
    if name not in ISAS:
        raise ConfigError(f"instruction set {name!r}: not on this machine, which has {', '.join(ISAS)}")
    return Kernels(
        True,
        name,
        partial(_copy.copyv, isa=name),
        partial(_copy.gather, isa=name),
        partial(_copy.scatter, isa=name),
        _copy.touch,
    )


NATIVE = bool(ISAS)
_best = load(NATIVE)
ISA = _best.isa
copyv, gather, scatter, touch = _best.copyv, _best.gather, _best.scatter, _best.touch
