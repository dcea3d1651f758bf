"""A directory of ours alone: of mode 0700, reached through no symbolic link, and owned by one process at a time.

One that is there already must have been made for this: nobody else may look into it, and it is empty or has our `owner`
in it. Nothing about a directory that we did not make is ever changed."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from headwater.errors import ConfigError
from headwater.tiers import direct_io

OWNER = "owner"
_OWNER = re.compile(rb" *(\d{1,10}) +(\d{1,18})\n")


class PrivateDirectory:
    """An open directory, locked until `close` or the end of this process, however it ends.

    The lock is on the directory itself: removing a file in it frees nothing. Who holds it, and how many did before,
    is in the file `owner`.
    """

    def __init__(self, path: Path, field: str) -> None:
        """Create it if need be, check it, lock it; `field` is the setting that errors name. Raises ConfigError."""
        self.path, self._field = path, field
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(f"{error.strerror}; it must be a directory, and no link to one") from error
        try:
            self._check()
            self.epoch = self._take()
        except OSError as error:
            os.close(self.descriptor)
            raise self._refused(f"{error.strerror or error}; choose a directory on a local file system") from error
        except ConfigError:
            os.close(self.descriptor)
            raise

    def names(self) -> list[str]:
        """What is in it, ours or not."""
        return sorted(os.listdir(self.descriptor))

    def regular(self, name: str) -> os.stat_result | None:
        """A file of ours; None if there is none. Raises ConfigError for whatever else has that name."""
        try:
            found = direct_io.stat_at(self.descriptor, name)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise self._refused(f"{name} in it is not a file of ours alone (a link, a directory?); remove it")
        return found

    def create(self, name: str) -> None:
        """Make an empty file of mode 0600 in the place of what has that name; raises OSError."""
        with suppress(FileNotFoundError):
            direct_io.unlink_at(self.descriptor, name)
        os.close(direct_io.open_at(self.descriptor, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def close(self) -> None:
        """Unlock it; its files stay."""
        os.close(self.descriptor)

    def _check(self) -> None:
        found = os.fstat(self.descriptor)
        if found.st_uid != os.geteuid():
            raise self._refused(f"it belongs to user {found.st_uid}; use a directory of your own")
        if found.st_mode & 0o077:
            mode = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
            raise self._refused(f"{mode}, open to others; {choose_another(self.path)}, or make it mode 0700")

    def _take(self) -> int:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, epoch = self._owner()
            who = f"another node (pid {pid or '?'}, epoch {epoch or '?'})"
            raise self._refused(f"{who} owns it; stop that one or choose another directory") from None
        if self.regular(OWNER) is None and (names := foreign(self.names())):
            raise self._refused(
                f"it has other files in it ({names[0][:40]!r}) and is not ours; {choose_another(self.path)}"
            )
        epoch = self._owner()[1] + 1
        owner = direct_io.open_at(self.descriptor, OWNER, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(owner, b"%10d %18d\n" % (os.getpid(), epoch), 0)
        finally:
            os.close(owner)
        return epoch

    def _owner(self) -> tuple[int, int]:
        """The process and epoch of the last owner; zeros if that is not known."""
        try:
            owner = direct_io.open_at(self.descriptor, OWNER, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return 0, 0
        try:
            found = _OWNER.match(os.pread(owner, 64, 0))
        except OSError:
            return 0, 0
        finally:
            os.close(owner)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self._field}={self.path}: {why}")


def foreign(names: Iterable[str]) -> list[str]:
    """What says that a directory without an owner is somebody's: all but what a file system puts there itself."""
    return [it for it in names if it != "lost+found"]


def choose_another(path: Path) -> str:
    """What to do about a directory that is somebody's."""
    return f"name one that does not exist yet, as {path / 'headwater'}"
