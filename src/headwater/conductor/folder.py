"""The private folder of a running fleet: of mode 0700 and ours, with a lock for each who may be there only once."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from headwater.errors import ConfigError

PID_BYTES = 32


def private_folder(path: Path, setting: str) -> Path:
    """Make it if need be, and check it: what is in it is nobody else's business. Raises ConfigError that names
    `setting`; nothing of a folder that was there before is changed."""
    try:
        for part in (path.parent, path):
            if not part.is_dir():
                part.mkdir(mode=0o700, parents=part == path.parent, exist_ok=True)
        _check_above(path.parent, setting)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}; it must be a folder, and no link to one") from error
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{setting} {path}: it belongs to user {found.st_uid}; use a folder of your own")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"{setting} {path}: its mode is {mode:04o}, open to others; chmod 700 it, or name another one"
        )
    return path


def _check_above(path: Path, setting: str) -> None:
    """Nobody else may put another folder in the place of ours."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{setting}: {path} belongs to user {found.st_uid}, who could replace what is in it")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(f"{setting}: others may replace what is in {path}; chmod go-w it, or name another folder")


class Lock:
    """A lock that ends with this process, however it ends; the file stays."""

    def __init__(self, path: Path, who: str) -> None:
        """Take it; raises ConfigError if another process has it, and says which."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._descriptor, PID_BYTES, 0).decode("ascii", errors="replace").strip()
            os.close(self._descriptor)
            raise ConfigError(
                f"{path.parent}: {who} runs here already (pid {pid or '?'}); stop that one first"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)
