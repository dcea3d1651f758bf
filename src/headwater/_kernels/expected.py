"""Keys that are expected somewhere: how many expect each, and in which order they were expected.

Theory of operation. A prompt's keys are taken one by one, the last of them first: one that is expected is expected by
one more, and becomes the youngest; one that is not becomes so, if it is among those that nobody holds yet. So of one
prompt the end is older than the beginning, and goes first when there are more than may be. In C where that was built,
with no object for each key, and none of a dict's pauses when it grows or is cleared of what was taken out of it: those
take tens of milliseconds for the keys of one engine's memory. Else of dicts, with the same answers.

A key has 16 bytes; one of another length is a ValueError, and nothing has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headwater.types import KEY_BYTES

try:
    from headwater._kernels import _expected
except ImportError:  # installed without a compiler
    NATIVE = False
else:
    NATIVE = True


class PlainExpected:
    """Without C."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def expect(self, keys: Sequence[bytes], held: int, most: int, /) -> list[bytes]:
        """A prompt with these keys is expected, of which the first `held` are held already. Those that have to go, so
        that no more than `most` are left, the oldest first."""
        _check(keys)
        counts, new = self._counts, len(keys) - held
        for at, key in enumerate(reversed(keys)):
            count = counts.get(key)
            if count is not None:
                counts[key] = count + 1
                counts.move_to_end(key)
            elif at < new:
                counts[key] = 1
        return [counts.popitem(last=False)[0] for _ in range(len(counts) - most)]

    def unexpect(self, keys: Sequence[bytes], /) -> list[bytes]:
        """A prompt is not expected any more. Those of its keys that nobody else expects, which are not expected now."""
        _check(keys)
        counts, lost = self._counts, []
        for key in keys:
            count = counts.get(key)
            if count == 1:
                del counts[key]
                lost.append(key)
            elif count is not None:
                counts[key] = count - 1
        return lost

    def discard(self, keys: Sequence[bytes], /) -> None:
        """Nobody expects these: more is known of them now."""
        _check(keys)
        for key in keys:
            self._counts.pop(key, None)

    def clear(self) -> None:
        """Nothing is expected."""
        self._counts.clear()


def _check(keys: Sequence[bytes]) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes here, not {len(key)}")


Expected = _expected.Expected if NATIVE else PlainExpected
"""What a `Device` has."""
