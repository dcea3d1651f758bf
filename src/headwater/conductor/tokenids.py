"""Token ids in an engine's events: counted, and taken out of what a client did not ask for.

Why it is safe to look for bytes. In JSON a quote within a string is always written \\", so in `,"token_ids":[` neither
quote is within one: the first follows a comma, the second an `s`. A quote that ends a string is followed by one of
`, : ] }`, so the first begins a string, and the second ends it: this is a member named token_ids with an array, and
nothing else. The same holds with `{` instead of the comma, and with white space between the parts.

What is left is `"token_ids":null`: what vLLM writes where nobody asked.
"""

from __future__ import annotations

import re

_IDS = b',"token_ids":['
_PROMPT = b',"prompt_token_ids":['
_LOOSE = re.compile(rb'([,{]\s*"(?:prompt_)?token_ids"\s*:\s*)\[[\d,\s]*\]')
_LOOSE_IDS = re.compile(rb'[,{]\s*"token_ids"\s*:\s*\[([\d,\s]*)\]')


def count(events: bytes) -> int:
    """How many ids of answers there are in these events."""
    total, at = 0, events.find(_IDS)
    if at < 0 and b'token_ids"' in events:
        return sum(_length(match[1]) for match in _LOOSE_IDS.finditer(events))
    while at >= 0:
        start = at + len(_IDS)
        end = events.find(b"]", start)
        total += events.count(b",", start, end) + (end > start)
        at = events.find(_IDS, end)
    return total


def without(events: bytes) -> bytes:
    """The events without ids, those of prompts included."""
    if b'token_ids"' not in events:
        return events
    return _LOOSE.sub(rb"\1null", _cut(_cut(events, _IDS), _PROMPT))


def _cut(events: bytes, mark: bytes) -> bytes:
    at = events.find(mark)
    if at < 0:
        return events
    parts, start = [], 0
    while at >= 0:
        at += len(mark) - 1
        parts.append(events[start:at])
        start = events.find(b"]", at) + 1
        at = events.find(mark, start)
    return b"null".join([*parts, events[start:]])


def _length(inner: bytes) -> int:
    return inner.count(b",") + 1 if inner.strip() else 0
