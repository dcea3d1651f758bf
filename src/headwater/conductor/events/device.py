"""One instance's DEVICE: its engine's events in keys, put into the index; and what was routed there, until they say so.

Theory of operation. A key of an instance is *expected* (a prompt was sent there that has it), *confirmed* (an event
said so), or not there. The index knows no difference: both are held.

    expect     not held -> expected; expected by one more
    stored     -> confirmed, whatever it was
    removed    -> not there, whatever it was
    unexpect   expected by nobody else -> not there; what is confirmed stays
    forget     all -> not there

Expected keys are at most as many as the DEVICE holds; those that were expected longest ago go first, the end of a
prompt before its beginning. Of instances without events that is all that is known.

What is counted, and what is not: blocks of the engine's own memory, of one KV group (the first with full attention that
publishes, group 0 until there is one), without adapters and media, whose parents are known. The rest is counted in
`sums` and passed over, with all that hangs on it. The salt of a request stands in the extra keys of its first block.

vLLM says that a block is removed for each copy that it has of it, and has several where equal prompts were computed at
the same time: then less is known to be held than is. The data-parallel ranks of an instance are places of their own in
the index, and so is what is expected of them all; whoever asks it takes the best of these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headwater._kernels.expected import Expected
from headwater._kernels.keys import chain_digests
from headwater.conductor.events.batches import Batch, Cleared, Event, Stored
from headwater.core.engine_keys import EngineHash, EngineKeys
from headwater.core.prefix import PrefixIndex
from headwater.errors import ProtocolError
from headwater.fleet import Place
from headwater.types import Tier

OWN_MEDIA = frozenset({None, "GPU", "DEVICE", "XPU", "HPU", "TPU", "NPU"})
"""What engines call the memory that they compute in."""
FULL = ("full_attention", "mla", "sink_full")
"""How the kinds of KV group begin that need every block of a prefix."""
PASSED_MAX = 1 << 16
BLOCK_TOKENS = 16
"""Of an engine that does not say."""
CAPACITY_TOKENS = 1 << 18
RANK_SHIFT = 20
"""Rank r of an instance with several is number `r + 1 << RANK_SHIFT | number` in the index."""


@dataclass(slots=True)
class Sums:
    """What became of events."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    foreign: int = 0
    """Blocks of other memory or of other KV groups: nodes, or nobody, say what they hold."""
    passed: int = 0
    """Blocks with an adapter or media, that are not full, or that follow such ones."""
    orphans: int = 0
    """Blocks whose parents were never heard of."""
    malformed: int = 0
    unknown: int = 0
    """Events of kinds that are not known here."""


class Device:
    """What one instance's DEVICE holds. `root` gives the start of a salt's key chain."""

    def __init__(
        self,
        number: int,
        index: PrefixIndex,
        root: Callable[[str], bytes],
        *,
        block_tokens: int | None = None,
        capacity_tokens: int | None = None,
        ranks: int = 1,
    ) -> None:
        """`block_tokens` None: events will tell."""
        assert 0 <= number < 1 << RANK_SHIFT and ranks > 0, f"number={number} ranks={ranks}"
        self.number, self.ranks = number, ranks
        self.place = Place(Tier.DEVICE, number)
        self.places = [
            self.place if ranks == 1 else Place(Tier.DEVICE, rank + 1 << RANK_SHIFT | number) for rank in range(ranks)
        ]
        self.block_tokens = block_tokens or BLOCK_TOKENS
        self.capacity_tokens = capacity_tokens or CAPACITY_TOKENS
        self.on_block_tokens: Callable[[], None] = _nobody
        """Told when events name another block size."""
        self.sums = Sums()
        self._index, self._root = index, root
        self._known = [self._empty() for _ in range(ranks)]
        self._passed: OrderedDict[EngineHash, None] = OrderedDict()
        self._group = 0
        self._group_is_full = False
        self._expected = Expected()
        self._is_gone = False

    def __repr__(self) -> str:
        return f"Device({self.number}, {self.block_tokens} tokens a block, {len(self._expected)} keys expected)"

    @property
    def hashes(self) -> int:
        """How many blocks are known by the engine's names."""
        return sum(map(len, self._known))

    @property
    def expected(self) -> int:
        """How many keys are expected."""
        return len(self._expected)

    # ---- events -----------------------------------------------------------------------------------------

    def apply(self, rank: int, batch: Batch) -> None:
        """What a rank's engine has published; what it cannot mean is counted and left out."""
        if self._is_gone:
            return
        self.sums.unknown += batch.unknown
        for event in batch.events:
            try:
                self._heard(rank, event)
            except (ValueError, OverflowError, ProtocolError):
                # We do not know what it wanted to say: what it named may be there or not.
                self.sums.malformed += 1
                self.forget(rank)

    def forget(self, rank: int) -> None:
        """Nothing is known of what a rank holds."""
        self._index.cleared(self.places[rank])
        self._known[rank].cleared()
        self._passed.clear()
        self._expected.clear()
        if self.ranks > 1:
            self._index.cleared(self.place)

    def forget_all(self) -> None:
        """Nothing is known of any rank: keys have another root, or another length, from now on."""
        self._known = [self._empty() for _ in range(self.ranks)]
        for rank in range(self.ranks):
            self.forget(rank)

    def gone(self) -> None:
        """The instance is no more; what its events say from now on is passed over."""
        self._is_gone = True
        for place in {self.place, *self.places}:
            self._index.gone(place)

    # ---- what was routed --------------------------------------------------------------------------------

    def expect(self, keys: Sequence[bytes]) -> None:
        """A prompt with these keys was sent there."""
        held = self._index.find(keys).get(self.place, 0)
        gone = self._expected.expect(keys, held, max(self.capacity_tokens // self.block_tokens, 1))
        if held < len(keys):
            self._index.stored(self.place, keys[held:] if held else keys)
        if gone:
            self._index.removed(self.place, gone)

    def unexpect(self, keys: Sequence[bytes]) -> None:
        """It was lost there."""
        lost = self._expected.unexpect(keys)
        if lost:
            self._index.removed(self.place, lost)

    # ---- names ------------------------------------------------------------------------------------------

    def matched(self, hashes: Sequence[EngineHash]) -> list[int]:
        """How many leading blocks of these names each rank holds."""
        return [next((at for at, name in enumerate(hashes) if name not in known), len(hashes)) for known in self._known]

    # ---- inside -----------------------------------------------------------------------------------------

    def _empty(self) -> EngineKeys:
        return EngineKeys(self._root(""), self.block_tokens, chain=chain_digests)

    def _heard(self, rank: int, event: Event) -> None:
        if isinstance(event, Cleared):
            self.sums.cleared += 1
            self.forget(rank)
            return
        if event.medium not in OWN_MEDIA or not self._is_ours(event):
            self.sums.foreign += len(event.block_hashes)
        elif isinstance(event, Stored):
            self._stored(rank, event)
        else:
            for name in event.block_hashes:
                self._passed.pop(name, None)
            self.sums.removed += len(event.block_hashes)
            self._take_away(rank, self._known[rank].removed(event.block_hashes))

    def _is_ours(self, event: Event) -> bool:
        """Whether it is of the KV group that counts; the first one with full attention is, from then on."""
        group = getattr(event, "group_idx", None) or 0
        kind = event.kv_cache_spec_kind if isinstance(event, Stored) else None
        if kind is not None and kind.startswith(FULL) and not self._group_is_full:
            self._group_is_full = True
            if group != self._group:
                self._group = group
                self.forget_all()
        return group == self._group

    def _stored(self, rank: int, event: Stored) -> None:
        names, salt = event.block_hashes, ""
        if event.block_size != self.block_tokens and not self._learn(event.block_size):
            plain = 0
        else:
            salt, plain = _extra(event)
        if event.parent_block_hash is not None and event.parent_block_hash in self._passed:
            plain = 0
        if plain < len(names):
            self._pass(names[plain:])
            self.sums.passed += len(names) - plain
        if not plain:
            return
        known = self._known[rank]
        root = self._root(salt) if salt else None
        tokens = event.token_ids if plain == len(names) else event.token_ids[: plain * event.block_size]
        keys = known.stored(names[:plain], event.parent_block_hash, tokens, root=root)
        if keys is None:
            self._pass(names[:plain])
            self.sums.orphans += plain
            return
        self.sums.stored += plain
        self._index.stored(self.places[rank], keys)
        self._confirm(keys)
        if lapsed := known.lapsed():
            self._take_away(rank, lapsed)

    def _learn(self, block_tokens: int) -> bool:
        """Whether blocks have this size from now on; those that are not full have a smaller one, and no key."""
        if block_tokens <= 0:
            raise ProtocolError("blocks of no tokens")
        if self.hashes and block_tokens < self.block_tokens:
            return False
        self.block_tokens = block_tokens
        self.forget_all()
        self.on_block_tokens()
        return True

    def _confirm(self, keys: Sequence[bytes]) -> None:
        # Where ranks are places of their own, what is expected keeps its own place: a prefix must be whole in one.
        if self._expected and self.ranks == 1:
            self._expected.discard(keys)

    def _take_away(self, rank: int, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        self._expected.discard(keys)
        self._index.removed(self.places[rank], keys)
        if self.ranks > 1:
            self._index.removed(self.place, keys)

    def _pass(self, names: Iterable[EngineHash]) -> None:
        for name in names:
            self._passed[name] = None
        while len(self._passed) > PASSED_MAX:
            self._passed.popitem(last=False)


def _extra(event: Stored) -> tuple[str, int]:
    """The salt of these blocks, if they begin a sequence with one, and how many of them are plain tokens otherwise."""
    if event.lora_id is not None or event.lora_name is not None:
        return "", 0
    salt = ""
    for at, entries in enumerate(event.extra_keys or ()):
        if at >= len(event.block_hashes):
            break
        for entry in entries if isinstance(entries, list) else () if entries is None else (entries,):
            found = _salt(entry)
            if found is None or at or event.parent_block_hash is not None or salt:
                return salt, at
            salt = found
    return salt, len(event.block_hashes)


def _salt(entry: object) -> str | None:
    """vLLM publishes a salt as it is; tagged, as it hashes it, it is understood as well."""
    if isinstance(entry, list) and len(entry) == 2 and entry[0] == "cache_salt":
        entry = entry[1]
    return entry if isinstance(entry, str) else None


def _nobody() -> None:
    """Nobody wants to know."""
