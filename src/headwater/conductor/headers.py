"""What a client is told of where its request went: the `x-headwater-...` lines, made once for each way to go."""

from __future__ import annotations

from headwater.conductor.http.parsing import lines_of
from headwater.fleet import Choice, Place
from headwater.fleetfile.model import InstanceSpec

HEADERS_MOST = 4096
"""Of so many ways the headers are kept."""


class Said:
    """The headers of choices. Instances are told apart by their numbers, as long as these are theirs."""

    def __init__(self) -> None:
        self._labels: dict[int, tuple[bytes, bytes]] = {}
        """Of an instance, its name and its node's."""
        self._made: dict[tuple[int, int, int, int, Place | None], bytes] = {}

    def __repr__(self) -> str:
        return f"Said({len(self._labels)} instances, {len(self._made)} ways)"

    def joined(self, number: int, spec: InstanceSpec) -> None:
        """An instance is there, and nobody's labels are those of who had its number before."""
        self._labels[number] = spec.name.encode(), (spec.node or "").encode()
        self._made.clear()

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self._labels.pop(number, None)

    def of(self, choice: Choice) -> bytes:
        """What is said of a choice: header lines, as they are sent."""
        key = (choice.prefill, choice.decode, choice.cached_tokens, choice.fetched_tokens, choice.source)
        lines = self._made.get(key)
        if lines is None:
            if len(self._made) >= HEADERS_MOST:
                self._made.clear()
            lines = self._made[key] = self._make(choice)
        return lines

    def _make(self, choice: Choice) -> bytes:
        instance, node = self._labels[choice.decode]
        reuse = f"device={choice.cached_tokens}"
        if choice.source is not None:
            reuse = f"{reuse}, {choice.source.tier.name.lower()}={choice.fetched_tokens}"
        prefill = self._labels[choice.prefill][0] if choice.prefill != choice.decode else b""
        return said(instance, reuse, prefill, node)


def said(instance: bytes, reuse: str, prefill: bytes = b"", node: bytes = b"") -> bytes:
    """The lines; those of names that are empty are left out. Raises UnsafeHeader."""
    headers = [(b"x-headwater-instance", instance), (b"x-headwater-reuse", reuse.encode())]
    if prefill:
        headers.append((b"x-headwater-prefill", prefill))
    if node:
        headers.append((b"x-headwater-node", node))
    return lines_of(headers)
