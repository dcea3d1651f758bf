"""The keys of prompts that were asked for lately: one whose ids are remembered by its text is not hashed each time.

Those have the same array of ids in each request. Ids that a client gave are that request's own, and those of most texts
are never asked for again: to keep the keys of such would only keep their memory, which then is never what the
processor's caches have, and make the garbage collector look at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.conductor.events.namespaces import Way
from headwater.conductor.job import Lens

PROMPTS_KEPT, TOKENS_KEPT = 256, 1 << 20
"""Prompts whose keys are kept, by the very object with ids that they were asked for with; and their tokens together."""


class _Prompt(NamedTuple):
    """The lenses of a prompt that was asked for; holding the ids keeps their address theirs."""

    ids: Sequence[int]
    salt: str
    ways: tuple[Way, ...]
    lenses: tuple[Lens, ...]


class Recent:
    """Of one worker. Ids that it was given are not changed afterwards."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self.tokens = 0
        """Of all that are kept."""

    def __repr__(self) -> str:
        return f"Recent({len(self._prompts)} prompts, {self.tokens} tokens)"

    def __len__(self) -> int:
        return len(self._prompts)

    def find(self, ids: Sequence[int], salt: str, ways: tuple[Way, ...]) -> tuple[Lens, ...] | None:
        """The lenses of this very object, if it was asked for in the same ways."""
        prompt = self._prompts.get(id(ids))
        if prompt is not None and prompt.ids is ids and prompt.ways is ways and prompt.salt == salt:
            return prompt.lenses
        return None

    def keep(self, ids: Sequence[int], salt: str, ways: tuple[Way, ...], lenses: tuple[Lens, ...]) -> None:
        """Remember a prompt, unless it alone takes a good part of the room."""
        size, prompts = len(ids), self._prompts
        if size > TOKENS_KEPT // 16:
            return
        before = prompts.pop(id(ids), None)
        self.tokens += size - (0 if before is None else size)
        prompts[id(ids)] = _Prompt(ids, salt, ways, lenses)
        while len(prompts) > PROMPTS_KEPT or self.tokens > TOKENS_KEPT:
            oldest = prompts.pop(next(iter(prompts)))
            self.tokens -= len(oldest.ids)
