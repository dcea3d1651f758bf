"""The node's memory as the simulator has it: for each page, whose bytes it holds, or that they are torn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headwater.types import PAGE_BYTES, ChunkKey, KVLayout, align


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's part of one chunk in a slot: what a copy of one rank reads or writes at a time."""

    key: ChunkKey
    group: int
    shard: int
    pages: range

    def __str__(self) -> str:
        return f"{self.key.hex()[:6]}.{self.group}.{self.shard}@{self.pages.start:x}"


def part_of(layout: KVLayout, key: ChunkKey, group: int, shard: int, slot: int) -> Part:
    """A shard's part of the chunk whose slot starts at `slot`."""
    start = slot + layout.part_offset(group, shard)
    end = start + align(layout.part_bytes(group, shard))
    return Part(key, group, shard, range(start // PAGE_BYTES, end // PAGE_BYTES))


Content = tuple[ChunkKey, int, int, int, int]
"""The right bytes of a page: key, group, shard, number of the page in the part; and the ticket that saved them."""


class Memory:
    """Pages and what is in them; a page that was never written holds nothing."""

    def __init__(self, cleared: Collection[int] = ()) -> None:
        """`cleared` are the tickets whose bytes nobody must be given any more; the caller adds to it."""
        self.writes, self._cleared = 0, cleared
        self._pages: dict[int, Content | str] = {}

    def begin_write(self, part: Part, writer: str) -> None:
        """From now on the part is torn: no one can tell what a reader would see."""
        self.writes += 1
        for page in part.pages:
            self._pages[page] = f"torn by {writer}"

    def end_write(self, part: Part, ticket: int) -> None:
        """All bytes of the part are there."""
        self.writes += 1
        for number, page in enumerate(part.pages):
            self._pages[page] = (part.key, part.group, part.shard, number, ticket)

    def tear(self, pages: range, writer: str) -> None:
        """From now on these pages are torn."""
        self.writes += 1
        self._pages.update(dict.fromkeys(pages, f"torn by {writer}"))

    def get(self, pages: range) -> list[Content | str | None]:
        """What is in pages, to be put elsewhere."""
        return [self._pages.get(page) for page in pages]

    def put(self, pages: range, contents: Sequence[Content | str | None]) -> None:
        """Bring what was taken with `get` into other pages."""
        self.writes += 1
        for page, it in zip(pages, contents, strict=True):
            self._pages[page] = "unwritten" if it is None else it

    def flaw(self, part: Part) -> str | None:
        """What is wrong with the part's bytes, None if they are right."""
        for number, page in enumerate(part.pages):
            content = self._pages.get(page)
            if not isinstance(content, tuple) or content[:4] != (part.key, part.group, part.shard, number):
                return f"page {number} of {part} is {_said(content)}"
            if content[4] in self._cleared:
                return f"page {number} of {part} was stored by #{content[4]} before its namespace was cleared"
        return None


def _said(content: Content | str | None) -> str:
    if content is None:
        return "unwritten"
    if isinstance(content, str):
        return content
    return f"{content[0].hex()[:6]}.{content[1]}.{content[2]} page {content[3]}"
