"""Where a node listens: `unix:/path/to/socket`, and who may own that path."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import time
from pathlib import Path

from headwater.errors import ConfigError

SCHEME = "unix:"
PATH_BYTES_MAX = 107
_credentials = struct.Struct("3i")  # pid, user, group
LOCK_TRIES, LOCK_WAIT_S = 20, 0.02


def socket_path(address: str) -> Path:
    """The path of a node address; raises ConfigError for anything but an absolute `unix:` path that fits."""
    if not address.startswith(SCHEME):
        raise ConfigError(f"node address {address!r}: expected unix:/path/to/socket")
    path = Path(address[len(SCHEME) :])
    if not path.is_absolute():
        raise ConfigError(f"node address {address!r}: the path must be absolute")
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(f"node address {address!r}: a socket path has at most {PATH_BYTES_MAX} bytes")
    return path


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket."""
    user: int = _credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size))[1]
    return user


class Listener:
    """A listening Unix socket that one node owns: mode 0600, in a private directory, guarded by a lock file."""

    def __init__(self, address: str) -> None:
        """Bind and listen; raises ConfigError if another node is there or the directory is not private."""
        self.path = socket_path(address)
        try:
            self._check_directory()
            self._lock = self._take_lock()
        except OSError as error:
            raise ConfigError(f"node.socket={address}: {error}; choose a path in a directory of your own") from error
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.path.unlink(missing_ok=True)  # ours by the lock: a stale socket of a node that was killed
            # The mode of the file to be: set before it exists, and without a umask that other threads would meet.
            os.fchmod(self.socket.fileno(), 0o600)
            self.socket.bind(str(self.path))
            self.socket.listen(512)
        except OSError as error:
            self.close()
            raise ConfigError(f"node.socket={address}: cannot bind: {error}") from error

    def close(self) -> None:
        """Stop listening and leave nothing behind."""
        self.socket.close()
        self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _check_directory(self) -> None:
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"node.socket: {directory} belongs to user {found.st_uid}; use a directory of your own")
        sticky = bool(found.st_mode & stat.S_ISVTX)
        if found.st_mode & 0o022 and not sticky:
            raise ConfigError(f"node.socket: {directory} is writable by others; use a directory of mode 0700")
        if self.path.is_symlink() or self._lock_path.is_symlink():
            raise ConfigError(f"node.socket: {self.path} or its lock is a symbolic link; remove it")
        if self.path.exists() and not self.path.is_socket():
            raise ConfigError(f"node.socket: {self.path} is there and is not a socket; choose another node.socket")

    def _take_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        patience = LOCK_TRIES
        while True:
            lock = os.open(self._lock_path, flags, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(lock, 32).decode("ascii", "replace").strip()
                os.close(lock)
                if not owner and patience:
                    # Nobody has signed it: a sweep, or a node that is just starting, holds it for a moment.
                    patience -= 1
                    time.sleep(LOCK_WAIT_S)
                    continue
                who = f"another node (pid {owner or '?'})"
                raise ConfigError(
                    f"node.socket: {who} serves {self.path}; stop it or choose another node.socket"
                ) from None
            if self._still_there(lock):
                try:
                    os.ftruncate(lock, 0)
                    os.write(lock, b"%d\n" % os.getpid())
                except OSError:  # the file system is full
                    os.close(lock)
                    raise
                return lock
            os.close(lock)  # a node that was just stopping removed the file between our open and our lock

    def _still_there(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), self._lock_path.stat())
        except FileNotFoundError:
            return False


def sweep(directory: Path, prefix: str) -> None:
    """Remove sockets and locks that killed nodes left in a directory: those whose lock nobody holds."""
    for path in directory.glob(f"{prefix}*.lock"):
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or not one of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_name(path.name.removesuffix(".lock")).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # its node is alive
            continue
        finally:
            os.close(lock)
