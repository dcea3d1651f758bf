"""What callers may hand over as memory: anything that shows its bytes in one piece."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headwater.errors import RefusedError
from headwater.ports import Bytes


def bytes_of(buffer: object, field: str, *, writes: bool) -> Bytes:
    """The bytes of a buffer, a NumPy array or a tensor in this host's memory as uint8[n], without a copy: it has to be
    contiguous, and writable if we are to write it. Raises RefusedError, which names `field`."""
    if type(buffer) is np.ndarray and buffer.dtype == np.uint8 and buffer.ndim == 1 and len(buffer):
        flags = buffer.flags
        if flags.c_contiguous and (flags.writeable or not writes):
            return buffer
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(buffer, torch.Tensor):
        buffer = _tensor(buffer, field, torch.uint8)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError:
        view = _through_numpy(buffer, field)
    except ValueError:  # an array of a type that buffers cannot tell of
        view = _as_bytes(buffer, field)
    if isinstance(buffer, np.generic):  # a number, whose memory is nobody's
        raise _unknown(buffer, field)
    if "O" in view.format:
        raise _unknown(buffer, field)
    if not view.c_contiguous:
        raise RefusedError(field, "contiguous memory", f"strides of {view.strides} bytes", "pass a contiguous copy")
    if writes and view.readonly:
        raise RefusedError(field, "memory that can be written", "a read-only buffer", "pass a bytearray or an array")
    if not view.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B"), np.uint8)


def _through_numpy(buffer: object, field: str) -> memoryview:
    """Tensors show their memory to NumPy only; those of a type that NumPy lacks, as integers of the same width."""
    if isinstance(buffer, (int, float, str, list, tuple, dict, set)) or buffer is None:
        raise _unknown(buffer, field)
    try:
        array = np.asarray(buffer)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RefusedError(
            field, "memory of this host", f"{type(buffer).__name__}: {error}", "view it as bytes on the CPU first"
        ) from error
    if array.dtype.hasobject or not hasattr(buffer, "__array__"):
        raise _unknown(buffer, field)
    try:
        return array.data
    except ValueError:
        return _as_bytes(array, field)


def _as_bytes(array: object, field: str) -> memoryview:
    """The memory of an array whose type has no name among buffers (dates, bfloat16)."""
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise _unknown(array, field)
    if not array.flags.c_contiguous:
        given = f"strides of {array.strides} bytes"
        raise RefusedError(field, "contiguous memory", given, "pass a contiguous copy")
    return array.reshape(-1).view(np.uint8).data


def _tensor(tensor: Any, field: str, byte: Any) -> object:
    """The memory of a tensor of any type, also of those that NumPy lacks (bfloat16, float8), and of those with a
    gradient, which does not learn of what is written."""
    if tensor.device.type != "cpu":
        raise RefusedError(field, "memory of this host", f"a tensor on {tensor.device}", "copy it to the CPU first")
    if not tensor.is_contiguous():
        given = f"strides of {tuple(tensor.stride())} elements"
        raise RefusedError(field, "contiguous memory", given, "pass tensor.contiguous()")
    try:
        return tensor.detach().reshape(-1).view(byte).numpy()
    except (TypeError, RuntimeError) as error:
        given = f"{type(tensor).__name__}: {error}"
        raise RefusedError(field, "memory of this host", given, "view it as bytes on the CPU first") from error


def _unknown(buffer: object, field: str) -> RefusedError:
    return RefusedError(field, "a buffer, an array or a tensor", type(buffer).__name__, "pass something with memory")
