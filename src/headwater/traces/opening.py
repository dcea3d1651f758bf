"""A file's lines one after the other, plain or gzip, each of bounded length."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from headwater.errors import ConfigError

LINE_BYTES_MAX = 64 << 20
"""A longer line is no record: it is a file without line ends."""
GZIP = b"\x1f\x8b"
BOM = "\ufeff"
Advance = Callable[[int, int], None]
"""Told how many bytes of the file have been read, and how many it has."""


def lines(path: str | os.PathLike[str], advance: Advance | None = None) -> Iterator[tuple[int, str]]:
    """The lines that hold something, with their numbers from 1. Raises ConfigError for what cannot be read."""
    where = Path(path)
    try:
        size_bytes = where.stat().st_size
        with where.open("rb") as raw:
            packed = raw.read(2) == GZIP
            raw.seek(0)
            source: BinaryIO = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            number = 0
            while line := source.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{where}, line {number}: longer than {LINE_BYTES_MAX >> 20} MiB; write one record a line"
                    )
                if advance is not None:
                    advance(raw.tell(), size_bytes)
                text = line.decode("utf-8")
                if number == 1:
                    text = text.removeprefix(BOM)
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}, line {number}: not UTF-8 ({error.reason}); is it compressed? gzip is read"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where}: {reason}; name a file that can be read, plain or gzip") from error
