"""The node's memory as the simulator has it: for each page, whose bytes it holds, or that they are torn."""

from __future__ import annotations

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


Content = tuple[ChunkKey, int, int, int]
"""The right bytes of a page: key, group, shard, number of the page in the part."""


class Memory:
    """Pages and what is in them; a page that was never written holds nothing."""

    def __init__(self) -> None:
        self.writes = 0
        self._pages: dict[int, Content | str] = {}

    def begin_write(self, part: Part, writer: str) -> None:
        """From now on the part is torn: no one can tell what a reader would see."""
        self.writes += 1
        for page in part.pages:
            self._pages[page] = f"torn by {writer}"

    def end_write(self, part: Part) -> None:
        """All bytes of the part are there."""
        self.writes += 1
        for number, page in enumerate(part.pages):
            self._pages[page] = (part.key, part.group, part.shard, number)

    def flaw(self, part: Part) -> str | None:
        """What is wrong with the part's bytes, None if they are right."""
        for number, page in enumerate(part.pages):
            content = self._pages.get(page)
            if content != (part.key, part.group, part.shard, number):
                return f"page {number} of {part} is {_said(content)}"
        return None


def _said(content: Content | str | None) -> str:
    if content is None:
        return "unwritten"
    if isinstance(content, str):
        return content
    return f"{content[0].hex()[:6]}.{content[1]}.{content[2]} page {content[3]}"
