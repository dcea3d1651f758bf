"""Names that a DISK tier must not know any more: those under which namespaces were stored before they were cleared.

Theory of operation. Clearing does not touch the slots: what a crash leaves of a journal may still list them, and a scan
finds their headers. Instead, the *name* that a namespace has in this directory is retired: written to a file and synced
before anybody is told that the namespace was cleared. What has a retired name is not recovered, whatever says that it
is there. From then on the namespace is stored under its next name:

    base root R (what engines and REMOTE tiers use)  ─►  sha256(tag + R)  ─►  sha256(tag + that)  ─►  …
    its name on disk: the first of these that is not retired

The file is a row of records, each with its own checksum; it only grows, by one record for each clear.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import struct

import xxhash

from headwater.tiers import direct_io
from headwater.tiers.private_directory import PrivateDirectory

log = logging.getLogger(__name__)

FILE = "retired"
ROOT_BYTES = 32
_TAG = b"headwater.cleared"
_record = struct.Struct("<8s32sQ")
_MAGIC = b"HWRTIR1\n"


class Retired:
    """The retired names of one directory, which the caller owns. Not thread-safe."""

    def __init__(self, directory: PrivateDirectory) -> None:
        """Read the file, if there is one; raises ConfigError for one that is not ours, OSError if it cannot be read.

        What is no whole record of this version is left out: the end of a file that a crash cut, or a newer record.
        """
        self._directory = directory
        self._roots: set[bytes] = set()
        self._before: dict[bytes, bytes] = {}
        self._size_bytes = 0
        if directory.regular(FILE) is None:
            return
        file = direct_io.open_at(directory.descriptor, FILE, os.O_RDONLY)
        try:
            data = b"".join(iter(lambda: os.read(file, 1 << 20), b""))
        finally:
            os.close(file)
        self._size_bytes = len(data) // _record.size * _record.size
        wrong = 0
        for magic, root, checksum in _record.iter_unpack(data[: self._size_bytes]):
            if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(root):
                wrong += 1
                continue
            self._note(root)
        if wrong:
            log.warning("%s/%s: %d records are damaged or of a newer headwater", directory.path, FILE, wrong)

    def __len__(self) -> int:
        return len(self._roots)

    def __contains__(self, root: bytes) -> bool:
        return root in self._roots

    def __repr__(self) -> str:
        return f"Retired({len(self)} names)"

    def add(self, root: bytes) -> None:
        """Retire a name, for good once this returns; raises OSError, and then it may or may not be."""
        if root in self._roots:
            return
        assert len(root) == ROOT_BYTES, f"a root of {len(root)} bytes"
        fresh = self._directory.regular(FILE) is None
        file = direct_io.open_at(self._directory.descriptor, FILE, os.O_WRONLY | os.O_CREAT)
        try:
            record = _record.pack(_MAGIC, root, xxhash.xxh3_64_intdigest(root))
            if os.pwrite(file, record, self._size_bytes) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            direct_io.sync(file)
        finally:
            os.close(file)
        if fresh or not self._size_bytes:
            direct_io.sync(self._directory.descriptor)
        self._size_bytes += _record.size
        self._note(root)

    def current(self, base: bytes) -> bytes:
        """The name under which a namespace is stored now, by its base root."""
        while base in self._roots:
            base = _next(base)
        return base

    def base(self, root: bytes) -> bytes:
        """The reverse of `current`."""
        while root in self._before:
            root = self._before[root]
        return root

    def _note(self, root: bytes) -> None:
        self._roots.add(root)
        self._before[_next(root)] = root


def _next(root: bytes) -> bytes:
    return hashlib.sha256(_TAG + root).digest()
