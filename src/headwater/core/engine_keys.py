"""EngineKeys: the names that engines give their blocks, told in ChunkKeys.

An engine announces `(block hashes, hash of the parent, token ids, block size)` with hashes that mean nothing outside
of it, and evicts by hash alone. From the parent's digest and the tokens the same chain follows that `hashing` computes
for a prompt, so what an engine holds can be compared with what a request asks for. For every hash the whole 32-byte
digest is kept, because a later block may build on it.

    stored(hashes, parent, tokens) ──► keys     the parent is None at the start of a sequence: then it is `root`
    removed(hashes)                ──► keys     what is not known is left out
    lapsed()                       ──► keys     whose hashes were forgotten, or mean another block now: nobody else will
                                                say that they are removed
    cleared()

One EngineKeys is one life of one instance and one namespace and block size, whose chain starts with `root`. A parent
that is not known means that events were lost: `stored` says None, and the caller clears the instance and asks for
everything again. `lapsed` is asked after every `stored`, and told after what that said: of more blocks than there is
room for, the first have lapsed already.

Memory is bounded by `limit` hashes, about 200 bytes each: those that were announced or built upon least recently are
forgotten, a sixteenth at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

from headwater.core.hashing import ChainDigests, chain_digests, keys_of
from headwater.types import KEY_BYTES, ChunkKey, Media

EngineHash: TypeAlias = int | bytes
"""Integers of any sign, or bytes; vLLM has either, by its configuration."""

LIMIT = 1 << 20


class EngineKeys:
    """What an engine's hashes mean; one caller at a time."""

    __slots__ = ("_block_tokens", "_chain", "_digests", "_lapsed", "_limit", "_root", "forgotten", "unknown")

    def __init__(self, root: bytes, block_tokens: int, limit: int = LIMIT, chain: ChainDigests = chain_digests) -> None:
        assert block_tokens > 0 and limit > 0, f"block_tokens={block_tokens} limit={limit}"
        self._chain = chain
        self._root, self._block_tokens, self._limit = root, block_tokens, limit
        self._digests: dict[EngineHash, bytes] = {}
        self._lapsed: list[ChunkKey] = []
        self.forgotten = 0
        """Hashes that there was no room for any more."""
        self.unknown = 0
        """Parents and removed hashes that nobody had announced."""

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, name: EngineHash) -> bool:
        return name in self._digests

    def __repr__(self) -> str:
        return (
            f"EngineKeys({len(self)} of at most {self._limit} hashes of {self._block_tokens} tokens, "
            f"{self.unknown} unknown, {self.forgotten} forgotten)"
        )

    def stored(
        self,
        hashes: Sequence[EngineHash],
        parent: EngineHash | None,
        tokens: Sequence[int],
        media: Sequence[Media] = (),
        root: bytes | None = None,
    ) -> list[ChunkKey] | None:
        """The keys of blocks that follow each other and their parent; None if the parent is not known. A sequence that
        begins here may have another `root`: that of its salt.

        `media` has offsets relative to the first of these tokens. Raises ValueError unless there are exactly the
        tokens of so many blocks, OverflowError for a token id outside [0, 2**32); nothing has changed then.
        """
        if len(tokens) != len(hashes) * self._block_tokens:
            raise ValueError(f"{len(hashes)} blocks of {self._block_tokens} tokens: not {len(tokens)} tokens")
        digest = (self._root if root is None else root) if parent is None else self._digests.get(parent)
        if digest is None:
            self.unknown += 1
            return None
        chain = self._chain(digest, tokens, self._block_tokens, media)
        if parent is not None:
            self._digests[parent] = self._digests.pop(parent)  # to the end: it is in use
        for name, digest in zip(hashes, chain, strict=True):
            before = self._digests.pop(name, None)
            if before is not None and before != digest:
                self._lapsed.append(_key(before))
            self._digests[name] = digest
        if len(self._digests) > self._limit:
            self._forget()
        return keys_of(chain)

    def removed(self, hashes: Sequence[EngineHash]) -> list[ChunkKey]:
        """The keys of blocks that are no more, as far as they are known; their hashes mean nothing after."""
        found = [digest for name in hashes if (digest := self._digests.pop(name, None)) is not None]
        self.unknown += len(hashes) - len(found)
        return keys_of(found)

    def lapsed(self) -> list[ChunkKey]:
        """The keys whose hashes were forgotten, or given to other blocks, since this was last asked."""
        found, self._lapsed = self._lapsed, []
        return found

    def cleared(self) -> None:
        """The engine holds nothing more."""
        self._digests.clear()
        self._lapsed.clear()

    def _forget(self) -> None:
        many = len(self._digests) - self._limit + self._limit // 16
        for name in list(islice(self._digests, many)):
            self._lapsed.append(_key(self._digests.pop(name)))
        self.forgotten += many


def _key(digest: bytes) -> ChunkKey:
    return ChunkKey(digest[:KEY_BYTES])
