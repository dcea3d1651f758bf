"""How many tokens a block of a trace has, found out from the lengths of its prompts.

A prompt of n tokens in k blocks of b has  k = ceil(n / b),  so that  n / k <= b < n / (k - 1):  each line narrows the
range of b, and what is left at the end is compared with the sizes that are in use.
"""

from __future__ import annotations

from headwater.errors import ConfigError
from headwater.traces.fields import BadRecord

USUAL = (16, 32, 64, 128, 256, 512, 1024, 2048)
MOST = 1 << 20


class BlockSize:
    """The sizes that agree with all prompts so far; a size that is `given` has to agree with each."""

    def __init__(self, given: int | None = None) -> None:
        if given is not None and not 1 <= given <= MOST:
            raise ConfigError(f"block size {given}: write a whole number of tokens from 1 to {MOST}")
        self._given = given
        self._least, self._most = (1, MOST) if given is None else (given, given)
        self._why = ""
        self._seen = False

    def take(self, tokens: int, blocks: int, where: str) -> None:
        """One prompt with its number of blocks; raises BadRecord, and forgets it, if no size agrees."""
        if not blocks:
            return
        least = -(-tokens // blocks)
        most = MOST if blocks == 1 else -(-tokens // (blocks - 1)) - 1
        if max(least, self._least) > min(most, self._most):
            raise BadRecord("hash_ids", f"{blocks} for {tokens} tokens", self._remedy(least, most))
        if least > self._least or most < self._most:
            self._why = where
        self._least, self._most = max(least, self._least), min(most, self._most)
        self._seen = True

    def narrow(self, size: int) -> None:
        """The trace itself says its size; raises BadRecord if that does not agree with what is known."""
        if not self._least <= size <= self._most:
            known = f"{self._least}" if self._least == self._most else f"{self._least} to {self._most}"
            raise BadRecord("block_tokens", size, f"elsewhere it is {known}; a trace has one size")
        self._least = self._most = size
        self._seen, self._why = True, "the trace's block_tokens"

    def _remedy(self, least: int, most: int) -> str:
        fits = f"of {least} to {most} tokens" if least <= most else "of no size"
        so_far = f"{self._least}" if self._least == self._most else f"{self._least} to {self._most}"
        source = "the block size asked for is" if self._given else f"by {self._why or 'all lines'} it is"
        return f"these are blocks {fits}, but {source} {so_far}; one number for each started block is needed"

    def found(self) -> int | None:
        """The size; None if no prompt had blocks. Raises ConfigError if more than one size agrees with all."""
        if self._given is not None:
            return self._given
        if not self._seen:
            return None
        usual = [it for it in USUAL if self._least <= it <= self._most]
        if len(usual) == 1:
            return usual[0]
        if self._least == self._most:
            return self._least
        fit = ", ".join(map(str, usual)) if usual else f"all from {self._least} to {self._most}"
        raise ConfigError(f"block size: several agree with every line ({fit}); say which, as in --block-tokens 512")
