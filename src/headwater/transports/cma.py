"""Another process's memory, copied by the kernel (process_vm_readv, process_vm_writev): where it cannot be mapped.

It needs the right to trace that process, which containers and Yama often withhold; so it is tried out first, on bytes
that the exporter has named: whoever has them at that address is the process that we talk to.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from xxhash import xxh3_64

from headwater.errors import ProtocolError
from headwater.ports import Bytes, Memory
from headwater.transports.wire import LOCAL_TOPIC, decode_with, encode_message

TOPIC = f"{LOCAL_TOPIC}cma"
"""Asks where regions are; only over Unix sockets, as nobody else has any use for it."""
PROBE_TOPIC = "headwater.cma.probe"
"""Asks for the probe alone."""
STEP_BYTES = 1 << 20
"""What is copied at once is hashed while it is in the cache."""
PROBE_BYTES = 32


class Places(msgspec.Struct, array_like=True):
    """Where an exporter's regions begin in its own address space, and where a probe lies that only it can have."""

    numbers: list[int]
    bases: list[int]
    probe_at: int
    probe: bytes


class Probe:
    """The exporter's side: says where its memory is."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(secrets.token_bytes(PROBE_BYTES), np.uint8)

    def places(self, regions: Sequence[Memory]) -> bytes:
        """The answer to TOPIC, or without regions that to PROBE_TOPIC."""
        numbers, bases = [it.number for it in regions], [it.memory.ctypes.data for it in regions]
        return encode_message(Places(numbers, bases, self._bytes.ctypes.data, self._bytes.tobytes()))


_places = msgspec.msgpack.Decoder(Places)


def decode_places(body: bytes) -> Places:
    """Raises ProtocolError."""
    it = decode_with(_places, body)
    if len(it.numbers) != len(it.bases):
        raise ProtocolError(f"{len(it.numbers)} regions in {len(it.bases)} places")
    return it


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_types = (ctypes.c_int, ctypes.POINTER(_Span), ctypes.c_ulong, ctypes.POINTER(_Span), ctypes.c_ulong, ctypes.c_ulong)
_read, _write = _libc.process_vm_readv, _libc.process_vm_writev
for _call in (_read, _write):
    _call.argtypes, _call.restype = _types, ctypes.c_ssize_t


class Process:
    """One other process, by its id, which stays its own as long as a connection to it is open."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def answers(self, places: Places) -> bool:
        """Whether we may read there, and it is the one that named these places."""
        found = np.empty(PROBE_BYTES, np.uint8)
        try:
            self.read(places.probe_at, found)
        except OSError:
            return False
        return found.tobytes() == places.probe

    def read(self, address: int, target: Bytes) -> int:
        """Fill the target from there; its xxh3-64. Raises OSError: no right, no such process, no such memory."""
        hashed = xxh3_64()
        for start in range(0, len(target), STEP_BYTES):
            step = target[start : start + STEP_BYTES]
            self._move(_read, address + start, step)
            hashed.update(step.data)
        return hashed.intdigest()

    def write(self, address: int, source: Bytes, is_open: Callable[[], bool]) -> int:
        """Copy the source to there; its xxh3-64. Raises OSError as `read` does, and when the connection that vouches
        for the process is not open any more: another one may have its id."""
        hashed = xxh3_64()
        for start in range(0, len(source), STEP_BYTES):
            step = source[start : start + STEP_BYTES]
            hashed.update(step.data)
            if not is_open():
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._move(_write, address + start, step)
        return hashed.intdigest()

    def _move(self, call: ctypes._NamedFuncPointer, address: int, memory: Bytes) -> None:
        done = 0
        while done < len(memory):
            mine = _Span(memory.ctypes.data + done, len(memory) - done)
            theirs = _Span(address + done, len(memory) - done)
            moved = call(self.pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
            if moved <= 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            done += moved
