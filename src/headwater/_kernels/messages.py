"""HTTP messages that came whole, in one piece: nearly all that are not streamed. In C where that was built.

find(heads, data, head_bytes, lines) -> (what `heads` has for the head without its Content-Length line, body), or None
    If `data` is one message: a head of up to KEY_MAX and `head_bytes` bytes with its empty line, in which up to `lines`
    lines end, one that states the length of the body as most write it, and just that body. None: anything else, which
    then is read with care, or a head that `heads` does not have. What the head says is not looked at.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["KEY_MAX", "NATIVE", "find", "find_plain"]

KEY_MAX = 2048

_END = b"\r\n\r\n"
_STATED = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_STATED_BYTES = len(_STATED[0])
_DIGITS_MAX = 15


Head = TypeVar("Head")


def find_plain(heads: dict[bytes, Head], data: bytes, head_bytes: int, lines: int, /) -> tuple[Head, bytes] | None:
    """The same without C."""
    end = data.find(_END, 0, KEY_MAX)
    if end < 0 or end + len(_END) > head_bytes or data.count(b"\n", 0, end) > lines:
        return None
    stated = data.find(_STATED[0], 0, end)
    if stated < 0:
        stated = data.find(_STATED[1], 0, end)
        if stated < 0:
            return None
    after = data.find(b"\r\n", stated + _STATED_BYTES, end)
    if after < 0:
        after = end
    digits = data[stated + _STATED_BYTES : after]
    body = data[end + len(_END) :]
    if not digits.isdigit() or len(digits) > _DIGITS_MAX or int(digits) != len(body):
        return None
    head = heads.get(data[:stated] + data[after:end])
    return None if head is None else (head, body)


try:
    from headwater._kernels._messages import find
except ImportError:  # installed without a compiler
    NATIVE = False
    find = find_plain
else:
    NATIVE = True
