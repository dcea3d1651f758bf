"""See `messages`."""

from typing import TypeVar, final

from headwater._kernels.events import Transport

Head = TypeVar("Head")

def find(heads: dict[bytes, Head], data: bytes, head_bytes: int, lines: int, /) -> tuple[Head, bytes] | None: ...

@final
class Writer:
    def __init__(self, transport: Transport, fd: int, /) -> None: ...
    def write(self, head: bytes, body: bytes = b"", /) -> None: ...
