"""A peer's regions in our address space: mapped where it passed a descriptor that is safe to map, else by CMA.

A mapping of a file that shrinks ends its reader with SIGBUS. So only memory that is sealed against that is mapped, and
nothing is touched that is not inside of what was mapped, whatever the peer says.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headwater import _kernels
from headwater._kernels.checked import copy_checked
from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.ports import Bytes
from headwater.transports import cma
from headwater.transports.link import Asker
from headwater.transports.wire import NOWHERE, Kind, Mapped, Regions, decode_mapped, decode_refused, encode_message
from headwater.types import Extent

MOST_DESCRIPTORS = 253
"""As many come with one frame."""
REFRESH_S = 1.0
"""How often a peer that is used is asked which of its regions are gone."""


@dataclass(slots=True)
class Region:
    """One region of the peer: where its bytes are, if they can be had. Its mapping ends with the last who uses it."""

    size: int
    is_writable: bool = False
    readable: Bytes | None = None
    at: int = 0
    """The address of `readable`."""
    writable: Bytes | None = None
    descriptor: int | None = None
    base: int | None = None
    """Its address in the peer's process."""


class PeerMemory:
    """What one life of a peer lends from; shared by the links to it, from several threads."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self._process = cma.Process(pid)
        self._regions: dict[int, Region] = {}
        self._next = 0
        """Regions from this number on have not been asked for."""
        self._asked_s = 0.0
        self._lock = threading.Lock()
        """For who asks."""
        self._writing = threading.Lock()
        """For who needs descriptors."""

    def __repr__(self) -> str:
        return f"PeerMemory({self.name}, {len(self._regions)} regions, {self.mapped} mapped)"

    @property
    def mapped(self) -> int:
        """How many regions are mapped."""
        return sum(it.readable is not None for it in list(self._regions.values()))

    def learn(self, asker: Asker, until_s: float) -> None:
        """Ask for the regions that are not known yet. Raises UnavailableError if one of them is out of reach."""
        if not self._lock.acquire(timeout=max(until_s - time.monotonic(), 0.0)):
            raise UnavailableError(f"{self.name} did not say in time where its memory is")
        try:
            while self._learn(asker, until_s):
                pass
        finally:
            self._lock.release()

    def refresh(self, asker: Asker, until_s: float) -> None:
        """Let go of what the peer does not have any more, from time to time. Raises UnavailableError."""
        if time.monotonic() < self._asked_s + REFRESH_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._forget(_ask(asker, NOWHERE, until_s)[0].numbers)
        finally:
            self._lock.release()

    def _learn(self, asker: Asker, until_s: float) -> bool:
        """Whether there are more."""
        answer, descriptors = _ask(asker, self._next, until_s)
        numbers = answer.numbers[bisect_left(answer.numbers, self._next) :]
        found: dict[int, Region] = {}
        try:
            rest = iter(descriptors)
            for number, size, passed, writable in zip(
                numbers, answer.sizes, answer.passed, answer.writable, strict=False
            ):
                found[number] = _mapped(size, next(rest), writable) if passed else Region(size, writable)
        finally:
            for it in descriptors:
                os.close(it)
        last = max(found, default=self._next - 1)
        try:
            lacking = [number for number, it in found.items() if it.readable is None and it.size]
            if lacking:
                self._find(found, lacking, asker, until_s)
        except UnavailableError:
            self._close(found.values())
            raise
        self._forget(answer.numbers)
        self._regions |= found
        self._next = last + 1
        return len(numbers) > len(answer.sizes)

    def _find(self, found: dict[int, Region], lacking: Sequence[int], asker: Asker, until_s: float) -> None:
        """Where regions lie that could not be mapped, if we may go there; those that have gone meanwhile leave."""
        try:
            places = cma.decode_places(asker.ask(cma.TOPIC, b"", until_s))
        except (RefusedError, ProtocolError):
            places = cma.Places([], [], 0, b"")
        if not self._process.answers(places):
            raise UnavailableError(f"the memory of {self.name} can neither be mapped nor be copied by the kernel")
        bases = dict(zip(places.numbers, places.bases, strict=True))
        for number in lacking:
            if number in bases:
                found[number].base = bases[number]
            else:
                del found[number]

    def _forget(self, numbers: Sequence[int]) -> None:
        """Only these are left. Numbers come once, so what was lent from another is never looked for in these."""
        self._asked_s = time.monotonic()
        for number in self._regions.keys() - set(numbers):
            self._close([self._regions.pop(number)])

    def region(self, extent: Extent) -> Region | None:
        """Where the bytes of an extent are; None if there is no such place."""
        region = self._regions.get(extent.segment)
        if region is None:
            return None
        inside = extent.offset_bytes >= 0 and extent.offset_bytes + extent.length_bytes <= region.size
        return region if inside else None

    def knows(self, segment: int) -> bool:
        """Whether this region has been asked for."""
        return segment < self._next

    def view(self, extent: Extent) -> Bytes | None:
        """The bytes where they lie, read-only; None if they are not mapped."""
        region = self.region(extent)
        if region is None or region.readable is None:
            return None
        return region.readable[extent.offset_bytes : extent.offset_bytes + extent.length_bytes]

    def pull(self, region: Region, offset: int, target: Bytes, *, checked: bool) -> int | None:
        """Fill the target; its xxh3-64 if `checked`. Raises OSError."""
        if region.readable is None:
            assert region.base is not None or not region.size, "neither mapped nor found"
            return self._process.read((region.base or 0) + offset, target)
        source = region.at + offset
        if checked:
            return copy_checked(target.ctypes.data, source, len(target))
        places = np.array((target.ctypes.data, source, len(target)), np.uint64)
        _kernels.copyv(places[:1], places[1:2], places[2:])
        return None

    def push(self, region: Region, offset: int, source: Bytes, is_open: Callable[[], bool]) -> int:
        """Copy the source there, as long as the connection is open; its xxh3-64. Raises OSError."""
        if not region.is_writable:
            raise PermissionError(errno.EACCES, "it may not be written")
        if region.readable is None:
            assert region.base is not None or not region.size, "neither mapped nor found"
            return self._process.write((region.base or 0) + offset, source, is_open)
        with self._writing:
            if region.writable is None:
                if region.descriptor is None:
                    raise OSError(errno.ESTALE, "it is gone")
                region.writable = np.frombuffer(mmap.mmap(region.descriptor, region.size), np.uint8)
        return copy_checked(region.writable.ctypes.data + offset, source.ctypes.data, len(source))

    def close(self) -> None:
        """Let go. Views that are still looked at keep their mapping until they are dropped."""
        self._close(self._regions.values())
        self._regions.clear()

    def _close(self, regions: Iterable[Region]) -> None:
        """Close descriptors. Mappings are left to who may just use them, and end with the last."""
        with self._writing:
            for it in regions:
                if it.descriptor is not None:
                    os.close(it.descriptor)
                    it.descriptor = None


def _ask(asker: Asker, first: int, until_s: float) -> tuple[Mapped, list[int]]:
    """The regions from a number on, and the descriptors of those that were passed, which the caller closes."""
    descriptors: list[int] = []
    try:
        asker.stream.say(Kind.REGIONS, encode_message(Regions(first)), until_s)
        kind, body, descriptors = asker.stream.hear_with(until_s, MOST_DESCRIPTORS)
        if kind is Kind.REFUSED:
            raise UnavailableError(f"{asker.stream.name} does not share memory: {decode_refused(body)}")
        if kind is not Kind.MAPPED:
            raise asker.stream.nonsense(f"{kind.name} where {Kind.MAPPED.name} was due")
        answer = decode_mapped(body)
        later = len(answer.numbers) - bisect_left(answer.numbers, first)
        if sum(answer.passed) != len(descriptors) or not bool(later) <= len(answer.sizes) <= later:
            raise asker.stream.nonsense(f"{len(answer.sizes)} regions and {len(descriptors)} descriptors")
    except (ProtocolError, UnavailableError) as error:
        for it in descriptors:
            os.close(it)
        raise UnavailableError(str(error)) from None
    return answer, descriptors


def _mapped(size: int, descriptor: int, writable: bool) -> Region:
    """The region of a descriptor, mapped to be read if that is safe. The descriptor stays the caller's."""
    region = Region(size, writable)
    if size and _cannot_shrink(descriptor) and os.fstat(descriptor).st_size >= size:
        try:
            region.readable = np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
            region.at = region.readable.ctypes.data
            region.descriptor = os.dup(descriptor) if writable else None
        except OSError:  # no address space, no descriptors
            region.readable = None
    return region


def _cannot_shrink(descriptor: int) -> bool:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memory file
        return False
