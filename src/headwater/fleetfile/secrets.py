"""Secrets of a fleet file: named there, never written there. A variable of the environment, as `${NAME}`, or a file
that nobody else may read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.config import secret
from headwater.errors import ConfigError
from headwater.fleetfile.tables import Read, plain, secretly
from headwater.places import parse_remote

SECRET_BYTES = 64 << 10
LEAST_BYTES = 16
PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]{0,127})\}")
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|_KEY)$", re.IGNORECASE)
"""Variables whose values are not written into a file."""
MASK = "***"


@dataclass(frozen=True, slots=True)
class Secrets:
    """Where they come from. Without `look_up` they are left where they are: `${NAME}` stays, and no file is opened."""

    base: Path
    """Paths in the file are relative to this folder."""
    look_up: Callable[[str], str | None] | None = secret

    def checked(self, read: Callable[[object], Any]) -> Read:
        """A reader that gives the text itself, once `read` takes it: written out, if there is no password in it, or
        `${NAME}`."""

        def at(value: object, place: str) -> str:
            if not isinstance(value, str) or (found := PLACEHOLDER.fullmatch(value.strip())) is None:
                plain(read)(_without_password(value, place), place)
                return str(value).strip()
            if self.look_up is None:
                return value.strip()
            content = self._variable(found[1], place).strip()
            secretly(read)(content, place)
            return content

        return at

    def named(self, value: object, place: str) -> str:
        """A secret, which has to be `${NAME}`."""
        if not isinstance(value, str) or (found := PLACEHOLDER.fullmatch(value.strip())) is None:
            raise ConfigError(f"{place}: a secret is not written here; write ${{NAME}}, and set that variable")
        return value.strip() if self.look_up is None else self._variable(found[1], place)

    def path(self, value: object, place: str) -> str:
        """The absolute path of a file, which has to be there."""
        path = self._absolute(value, place)
        if self.look_up is not None and not path.is_file():
            raise ConfigError(f"{place}: {path} is not a file that can be read")
        return str(path)

    def private_path(self, value: object, place: str) -> str:
        """The absolute path of a file that nobody else may read."""
        path = self._absolute(value, place)
        if self.look_up is not None:
            read_private(path, place)
        return str(path)

    def content(self, value: object, place: str) -> str:
        """What is in such a file."""
        path = self._absolute(value, place)
        return "" if self.look_up is None else read_private(path, place)

    def _absolute(self, value: object, place: str) -> Path:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise ConfigError(f"{place}: not the path of a file")
        return Path(os.path.abspath(self.base / value.strip()))

    def _variable(self, name: str, place: str) -> str:
        assert self.look_up is not None
        if name.startswith("HEADWATER_"):
            raise ConfigError(
                f"{place}: {name} would be taken for a setting of headwater; give the variable another name"
            )
        content = self.look_up(name)
        if content is None:
            raise ConfigError(f"{place}: the environment variable {name} is not set")
        return content


def _without_password(value: object, place: str) -> object:
    for url in value.split() if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
        try:
            has_password = bool(parse_remote(url).password)
        except ConfigError:
            has_password = "@" in str(url)
        if has_password:
            raise ConfigError(f"{place}: a password is not written here; write ${{NAME}}, and put the URL there")
    return value


def read_private(path: Path, place: str) -> str:
    """The text of a file, ours or root's, that others can neither read nor change. A group may read root's, which is
    how Kubernetes mounts secrets. Raises ConfigError without any of the text."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{place}: {path}: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{place}: {path} is not a file")
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{place}: {path} belongs to user {found.st_uid}; use a file of your own")
        shared = 0o037 if found.st_uid == 0 != os.geteuid() else 0o077
        if found.st_mode & shared:
            mode = stat.S_IMODE(found.st_mode)
            raise ConfigError(f"{place}: {path} has mode {mode:04o}, open to others; chmod 600 it")
        data = os.pread(descriptor, SECRET_BYTES + 1, 0)
    finally:
        os.close(descriptor)
    try:
        content = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        content = ""
    if not content or len(data) > SECRET_BYTES:
        raise ConfigError(f"{place}: {path} is empty, too long or no text")
    return content


def long_enough(content: str, place: str) -> str:
    """A secret that cannot be guessed by trying."""
    if content and not PLACEHOLDER.fullmatch(content) and len(content.encode()) < LEAST_BYTES:
        raise ConfigError(f"{place}: shorter than {LEAST_BYTES} bytes; make one with `openssl rand -hex 32`")
    return content
