"""See `messages`."""

from typing import TypeVar

Head = TypeVar("Head")

def find(heads: dict[bytes, Head], data: bytes, head_bytes: int, lines: int, /) -> tuple[Head, bytes] | None: ...
