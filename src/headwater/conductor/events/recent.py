"""The keys of prompts that were asked for lately: one whose ids are remembered by its text is not hashed twice.

Those have their ids in arrays, the same one for each request. Ids that a client gave are in a list of that request's
own, which nobody asks for again: to keep it would only keep its memory.
"""

from __future__ import annotations

from array import array
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
        """Remember a prompt in an array, unless it alone takes a good part of the room."""
        size, prompts = len(ids), self._prompts
        if not isinstance(ids, array) or size > TOKENS_KEPT // 16:
            return
        before = prompts.pop(id(ids), None)
        self.tokens += size - (0 if before is None else size)
        prompts[id(ids)] = _Prompt(ids, salt, ways, lenses)
        while len(prompts) > PROMPTS_KEPT or self.tokens > TOKENS_KEPT:
            oldest = prompts.pop(next(iter(prompts)))
            self.tokens -= len(oldest.ids)
