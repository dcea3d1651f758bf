"""The keys of encrypting codecs, from a file that only its owner can read.

    [[key]]
    id = "2026-11"          # 1 to 16 printable ASCII characters, kept in the clear with each chunk
    tenant = "*"            # or a tenant's name
    secret = "…"            # 32 random bytes in base64: head -c 32 /dev/urandom | base64

The first of a tenant's keys writes, all read. Keys of `*` are for tenants that have none of their own to write with.
What encrypts is never a secret itself but one derived from it for the tenant, so that tenants never share a key.
Taking a key out makes all that it encrypted unreadable, from the next use on, wherever copies of it are: a file that
has changed is read again, at most once a second. While it cannot be read or trusted, the keys stay what they were.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
import os
import stat
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from headwater.errors import ConfigError

SECRET_BYTES = 32
ID_CHARS = 16
ANY_TENANT = "*"
_LONGEST_FILE = 1 << 20
_PURPOSE = b"headwater.aes-256-gcm.1:"
LOOK_S = 1.0
log = logging.getLogger(__name__)

Stamp = tuple[int, int, int, int, int, int]
"""What changes when a file does: its number and size, when it and its inode changed, its owner and mode."""


@dataclass(frozen=True, slots=True)
class Key:
    """One tenant's key."""

    id: str
    secret: bytes = field(repr=False)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=ID_CHARS)]
    tenant: str
    secret: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: list[_Entry] = []


class KeyRing:
    """The keys of a file, as it is now or was when it last could be read. Thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where the file cannot be read or trusted."""
        self.path, self._clock = path, clock
        self._looking = threading.Lock()
        self._look_from_s = clock() + LOOK_S
        self._stamp = _stamp(path)
        self._tenants = _read(path)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name!r}: {len(keys)}" for name, keys in self._tenants.items())
        return f"KeyRing({self.path}, {{{counts}}})"

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Read a file of keys, TOML or (`.json`) JSON; raises ConfigError where it cannot be read or trusted."""
        return cls(path)

    def reload(self) -> None:
        """Read the file again; raises ConfigError, and keeps the keys that it has, where that cannot be done."""
        self._tenants = _read(self.path)

    def to_write(self, tenant: str) -> Key | None:
        """The key that a tenant's chunks are encrypted with now; None if there is none."""
        tenants = self._fresh()
        keys = tenants.get(tenant) or tenants.get(ANY_TENANT)
        return _derive(keys[0], tenant) if keys else None

    def to_read(self, tenant: str, key_id: str) -> Key | None:
        """A tenant's key of that name; None if there is none, or none any more."""
        tenants = self._fresh()
        for key in (*tenants.get(tenant, ()), *tenants.get(ANY_TENANT, ())):
            if key.id == key_id:
                return _derive(key, tenant)
        return None

    def _fresh(self) -> dict[str, tuple[Key, ...]]:
        """The keys, read again if the file has changed; who comes while another thread looks takes those there are."""
        if self._clock() >= self._look_from_s and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._look_from_s = self._clock() + LOOK_S
                self._looking.release()
        return self._tenants

    def _look(self) -> None:
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return
        # Noted even if it cannot be read: once is enough to say so.
        self._stamp = stamp
        try:
            self.reload()
        except ConfigError as error:
            log.warning("%s; going on with the keys that were there before", error)
        else:
            log.info("%r was read again", self)


def _derive(key: Key, tenant: str) -> Key:
    return Key(key.id, hmac.digest(key.secret, _PURPOSE + tenant.encode("utf-8", "surrogatepass"), "sha256"))


def _stamp(path: Path) -> Stamp | None:
    """None where the file cannot be looked at."""
    try:
        it = path.stat()
    except OSError:
        return None
    return it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns, it.st_uid, it.st_mode


def _read(path: Path) -> dict[str, tuple[Key, ...]]:
    text = _text(path)
    try:
        file = msgspec.convert(json.loads(text) if path.suffix == ".json" else tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        # Not the parser's own words, and not its exception: they may quote the file.
        line = getattr(error, "lineno", None)
        where = "" if line is None else f", line {line}"
        raise ConfigError(f"keys={path}: not {kind}{where}") from None
    except msgspec.ValidationError as error:  # names fields and types, no values
        raise ConfigError(f"keys={path}: {error}; want tables [[key]] with id, tenant and secret") from None
    tenants: dict[str, list[Key]] = {}
    for index, entry in enumerate(file.key):
        tenants.setdefault(entry.tenant, []).append(_key(entry, f"keys={path}: key[{index}]"))
    shared = {it.id for it in tenants.get(ANY_TENANT, ())}
    for tenant, keys in tenants.items():
        ids = [it.id for it in keys]
        again = [it for it in ids if ids.count(it) > 1 or (tenant != ANY_TENANT and it in shared)]
        if again:
            raise ConfigError(f"keys={path}: id {again[0]!r} stands twice for tenant {tenant!r}; give each key its own")
    return {tenant: tuple(keys) for tenant, keys in tenants.items()}


def _key(entry: _Entry, where: str) -> Key:
    if not (entry.id.isascii() and entry.id.isprintable() and " " not in entry.id):
        raise ConfigError(f"{where}: id={entry.id!r} has other characters than printable ASCII ones")
    try:
        secret = base64.b64decode(entry.secret, validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{where}: secret is not {SECRET_BYTES} bytes in base64; make one with: head -c 32 /dev/urandom | base64"
        )
    return Key(entry.id, secret)


def _text(path: Path) -> str:
    """What the file says, if nobody but us could read or write it. What is checked is the file that was opened."""
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_owner(path, os.fstat(descriptor))
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(_LONGEST_FILE + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"keys={path}: {error.strerror}") from error
    if len(content) > _LONGEST_FILE:
        raise ConfigError(f"keys={path}: longer than {_LONGEST_FILE} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"keys={path}: not UTF-8") from None


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"keys={path}: not a regular file")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"keys={path}: belongs to user {status.st_uid}, not to us ({os.geteuid()}); chown it, or run the node as "
            "its owner"
        )
    if status.st_mode & 0o077:
        raise ConfigError(f"keys={path}: others may read or write it; run: chmod 600 {path}")
