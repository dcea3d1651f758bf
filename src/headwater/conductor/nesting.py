"""How many values a JSON text has, before it is decoded; how deep they are nested, after.

A decoder makes 16 to 60 bytes of objects of a byte like `{`: so large texts are counted first, in passes over the bytes
that make no objects. The depth is looked at afterwards, level by level: the decoder's own recursion is bounded (it
raises RecursionError), and ours goes no deeper than it is allowed to.
"""

from __future__ import annotations

from itertools import chain, compress
from typing import Any

from headwater.conductor.job import BadRequest

CONTAINERS = 1 << 18
"""Objects and arrays in one body: 16 MiB of memory, 64 for each of the 4096 messages that are allowed."""
STRINGS = 1 << 18
"""Likewise: an empty one takes 50 bytes, and is written in three."""
BIG_BYTES = 1 << 19
"""Smaller texts have too few values to matter."""

_OTHERS = bytes(it for it in range(256) if it not in b'",[{')
NESTING = frozenset((dict, list))
"""What adds a level."""
_is_nesting = NESTING.__contains__


def check_counts(body: bytes, values: int) -> None:
    """Raise BadRequest if a JSON text has more than `values` commas or CONTAINERS brackets outside of its strings, or
    more than STRINGS of these.

    Text that is not JSON may pass. Costs four counts, unless there are very many in the strings too.
    """
    if len(body) <= BIG_BYTES:
        return
    if body.count(b'"') > 2 * STRINGS and unescaped(body).count(b'"') > 2 * STRINGS:
        raise BadRequest(f"the body has more than {STRINGS} strings", status=413)
    if body.count(b"{") + body.count(b"[") <= CONTAINERS and body.count(b",") <= values:
        return
    bare = without_strings(body, values)
    if bare.count(b"{") + bare.count(b"[") > CONTAINERS:
        raise BadRequest(f"the body has more than {CONTAINERS} objects and arrays", status=413)
    if bare.count(b",") > values:
        raise BadRequest(f"the body has more than {values} values", status=413)


def unescaped(body: bytes) -> bytes:
    """A JSON text without quotes that are escaped; nothing else of its structure changes."""
    # Pairs first and from the left: what is left of a run of backslashes then escapes what follows it.
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def without_strings(body: bytes, strings: int) -> bytes:
    """The commas and opening brackets of a JSON text that are not in strings."""
    body = unescaped(body)
    # Two quotes next to each other can go, whether they open and close a string or close one and open the next: what is
    # left stays inside or outside. So only strings with something in them are cut out.
    quoted = body.translate(None, _OTHERS).replace(b'""', b"")
    if quoted.count(b'"') > 2 * strings:
        raise BadRequest(f"the body has more than {strings} strings", status=413)
    return b"".join(quoted.split(b'"')[::2])


def is_deeper(value: Any, depth: int) -> bool:
    """Whether a decoded value, which is an object or array itself, has more than `depth` levels of them."""
    level = [value]
    for _ in range(depth):
        below = list(chain.from_iterable([it.values() if type(it) is dict else it for it in level]))
        level = list(compress(below, map(_is_nesting, map(type, below))))
        if not level:
            return False
    return True
