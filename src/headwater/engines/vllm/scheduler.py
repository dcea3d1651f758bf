"""The scheduler side of the plug-in: decides what is loaded and saved, and talks to the node.

Theory of operation, one request (all calls come from vLLM's scheduler, in this order):

    arrived         the node may bring up what lower tiers hold, while the request queues
    match_tokens    how much does the node hold? may be asked again: "wait", or   -> tokens beyond the local hit
    allocated       blocks exist: lease the hit                                   -> LoadJob in the next step
    step            tokens of this step complete chunks: reserve slots, pin blocks -> SaveJob in this step
    ranks_ended     all ranks have ended a save: unpin its blocks
    finished        the request is over: save what is complete, forget it

A save's source blocks are pinned in vLLM's block pool (a reference, as prefix caching takes it) until every rank has
ended, so finish, abort and preemption need no special case: nobody can write to a pinned block. A load is vLLM's
own asynchronous load: its blocks belong to the request until the ranks report it, cancelled or not. The node ends
the tickets itself when the ranks say done, which they do only for what went well; the others are released here, once
all ranks have ended, and so is what never reaches the ranks.

Without a node every answer is "nothing held", at once.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater._kernels.keys import chain_digests
from headwater.config import EngineConfig
from headwater.core.cost import PrefillSpeed
from headwater.core.hashing import KeyChain
from headwater.engines.vllm.asking import Questions, StepTimes
from headwater.engines.vllm.identity import Adapters, Ranks
from headwater.engines.vllm.metadata import NULL_BLOCK, LoadJob, NodeInfo, Part, SaveJob, SavesEnded, StepMetadata
from headwater.engines.vllm.stats import CopySums, HitTokens
from headwater.errors import HeadwaterError, ProtocolError, RefusedError, UnavailableError
from headwater.node.client import Session, Supervisor
from headwater.types import ABSENT, ChunkKey, HitRule, KVLayout, Loadable, Media, Namespace

log = logging.getLogger(__name__)

OPT_OUT = "headwater.skip"
"""A true value under this name in a request's `kv_transfer_params` keeps the request out of the cache."""

CLEAR_S, CLEAR_POLL_S = 1.0, 0.005
"""How long a clear waits for REMOTE tiers, and how often it asks."""

Blocks = Sequence[Sequence[int]]


@dataclass(slots=True)
class Tracked:
    """What is known of a request: its keys, how many leading chunks need no saving, and its last match, of which `disk`
    and `remote` tokens were brought up for it.

    `outdated` marks KV that was computed before the cache was cleared.
    """

    request: Any
    chain: KeyChain
    held: int = 0
    local_tokens: int = 0
    matched: int = 0
    disk: int = 0
    remote: int = 0
    hit: HitTokens = field(default_factory=HitTokens)
    counted: bool = False
    load_failed: bool = False
    outdated: bool = False
    table: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Pinned:
    """A save under way: which blocks it reads, and how many ranks have ended it."""

    blocks: list[int]
    ended: int = 0
    failed: bool = False


class SchedulerSide:
    """One engine's decisions; called by one thread."""

    def __init__(
        self,
        config: EngineConfig,
        namespace: Namespace,
        layout: KVLayout,
        ranks: Ranks,
        node: Supervisor,
        info: NodeInfo,
        *,
        can_fail: bool,
        step_tokens: int,
    ) -> None:
        """`node` keeps the session; `info` is what ranks need to reach it (name and epoch are filled in).
        `can_fail` says whether this vLLM can be told of a failed load; without it nothing is loaded.
        `step_tokens` is how many tokens the engine computes in one step at the most.
        """
        self._config, self._namespace, self._layout, self._ranks = config, namespace, layout, ranks
        self._node, self._info = node, info
        self._can_fail = can_fail
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[LoadJob] = []
        self._saves: list[SaveJob] = []
        self._pinned: dict[int, Pinned] = {}
        self._loading: dict[str, LoadJob] = {}
        self._reconciled: Session | None = None
        self._failed: set[str] = set()
        self._owed: list[int] = []
        self._roots: dict[tuple[str, str], bytes] = {}
        self._adapters = Adapters()
        self._pool: Any = None
        self.sums = CopySums()
        self.speed = PrefillSpeed(step_tokens)
        self._times = StepTimes(self.speed)
        self._questions = Questions(node, self.speed, layout.chunk_tokens, config.load_s, self._lost, self.sums)

    def __repr__(self) -> str:
        return (
            f"SchedulerSide({len(self._tracked)} requests, {len(self._pinned)} saves under way, {self._questions!r}, "
            f"{self.speed!r})"
        )

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool, whose references pin blocks."""
        self._pool = pool

    # ---- load -----------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request is in the queue: let the node bring up what it may need, unless the engine has it all."""
        it = self._track(request)
        if it is None or getattr(request, "skip_reading_prefix_cache", False):
            return
        it.chain.extend(request.all_token_ids)
        local_tokens = self._local_tokens(request)
        if local_tokens < it.chain.tokens:
            self._ask(it, local_tokens)

    def match_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix hit the node can supply, which always come asynchronously; None if
        more is on its way from lower tiers: vLLM asks again in the next step, and schedules others meanwhile."""
        it = self._track(request)
        if it is None:
            return 0, False
        it.local_tokens, it.matched = local_tokens, 0
        it.outdated = False  # vLLM asks only before anything is computed
        if it.load_failed or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        it.chain.extend(request.all_token_ids)
        if it.chain.tokens <= local_tokens:
            # Nothing to ask for, but what the engine holds itself may have left the node: let `step` save it.
            return 0, False
        if self._ask(it, local_tokens):
            self._questions.told_to_wait(request.request_id)
            return None, False
        tokens = it.matched * self._layout.chunk_tokens - local_tokens
        if not self._can_fail or tokens < max(self._config.min_load_tokens, 1):
            return 0, False
        return tokens, True

    def _ask(self, it: Tracked, local_tokens: int) -> bool:
        """Ask what the node holds of a request; whether it is worth waiting for more."""
        beyond = it.chain.tokens - local_tokens
        fetches = self._can_fail and beyond >= self._config.min_load_tokens
        answer = self._questions.ask(
            it.request.request_id, it.chain.keys, local_tokens, counts=not it.counted, fetches=fetches
        )
        it.counted |= not answer.waiting and self._node.session is not None
        it.matched = answer.chunks
        it.disk, it.remote = answer.disk * self._layout.chunk_tokens, answer.remote * self._layout.chunk_tokens
        it.held = max(it.held, it.matched)
        return answer.waiting

    def _local_tokens(self, request: Any) -> int:
        """How much of a prompt the engine has itself, as far as that is easily seen: it need not be brought up."""
        if self._pool is None or len(self._layout.groups) > 1:
            return 0
        hashes = getattr(request, "block_hashes", ())
        # vLLM evicts the last blocks of a prompt first, so that what it has is nearly always a prefix.
        count = bisect_left(hashes, True, key=lambda it: self._pool.get_cached_block(it, [0]) is None)
        return count * self._layout.groups[0].block_tokens

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM has given the request its blocks, `external_tokens` of them for us to fill."""
        it = self._tracked.get(request.request_id)
        if it is None:
            return
        it.table = [list(group) for group in blocks.get_block_ids()]
        if external_tokens <= 0:
            self._questions.end(request.request_id)
            return
        end = it.local_tokens + external_tokens
        first = it.local_tokens // self._layout.chunk_tokens
        chunks = -(-end // self._layout.chunk_tokens)
        held, epoch = self._lease(it.chain.keys[:chunks], first)
        parts, missing = self._load_parts(it, held, first, end)
        if missing:
            self.sums.short_loads += 1
        give_up_s = time.monotonic() + self._config.load_s
        job = LoadJob(request.request_id, held.ticket, epoch, parts, missing, held.deadline_s, give_up_s)
        self._loading[request.request_id] = job
        self._loads.append(job)
        it.hit = HitTokens.of(external_tokens, it.disk, it.remote)
        self._questions.end(request.request_id)

    def hit_tokens(self, request: Any, external_tokens: int) -> HitTokens:
        """Which tiers supply a load that was just allocated."""
        it = self._tracked.get(request.request_id)
        return HitTokens(host=external_tokens) if it is None else it.hit

    def load_failed(self, request_ids: Iterable[str]) -> None:
        """These requests' loads brought nothing or not all: compute, and do not ask again."""
        for request_id in request_ids:
            if request_id in self._loading:
                self._failed.add(request_id)
            it = self._tracked.get(request_id)
            if it is not None:
                it.load_failed = True
                it.held = 0

    def invalid_blocks(self, blocks: Iterable[int]) -> None:
        """Blocks that some load did not fill: the same for the requests that are being loaded into them."""
        invalid = set(blocks)
        if invalid:
            self.load_failed([name for name, job in self._loading.items() if not invalid.isdisjoint(job.blocks)])

    def received(self, request_ids: Iterable[str]) -> None:
        """These requests' loads have ended on all ranks."""
        for request_id in request_ids:
            job = self._loading.pop(request_id, None)
            it = self._tracked.get(request_id)
            if it is not None and request_id not in self._failed:
                self.sums.supplied(it.hit)
            if request_id in self._failed:
                self._failed.discard(request_id)
                if job is not None and job.ticket:
                    self._release([job.ticket])

    def _lease(self, keys: Sequence[ChunkKey], first: int) -> tuple[Loadable, int]:
        """A lease and the node's epoch."""
        session = self._node.session
        if session is not None:
            try:
                return session.load(keys, first, range(self._ranks.world)), session.link.node[1]
            except (UnavailableError, ProtocolError, RefusedError) as error:
                self._lost(session, error)
        return Loadable(0, 0, tuple(() for _ in self._layout.groups), 0.0), 0

    def _load_parts(
        self, it: Tracked, held: Loadable, first: int, end: int
    ) -> tuple[tuple[Part, ...], tuple[int, ...]]:
        """The copies of a lease, and the blocks in [local, end) that it does not cover."""
        parts, missing = [], []
        for group, rule in enumerate(self._layout.groups):
            per_chunk = self._layout.blocks_per_chunk(group)
            slots = held.addresses[group] if group < len(held.addresses) else ()
            blocks = [NULL_BLOCK] * (len(slots) * per_chunk)
            table = it.table[group]
            for position in range(it.local_tokens // rule.block_tokens, min(-(-end // rule.block_tokens), len(table))):
                block, at = table[position], position - first * per_chunk
                if block == NULL_BLOCK:
                    continue
                if at < len(blocks) and slots[at // per_chunk] != ABSENT:
                    blocks[at] = block
                else:
                    missing.append(block)
            parts.append(Part(group, tuple(slots), tuple(blocks)))
        return tuple(parts), tuple(missing)

    # ---- save -----------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepMetadata:
        """The jobs of one step, from vLLM's SchedulerOutput."""
        self._update_tables(output)
        self._reconcile()
        self._release([])
        if self._config.save:
            drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
            for request_id, before in _scheduled(output):
                it = self._tracked.get(request_id)
                if it is not None:
                    count = output.num_scheduled_tokens.get(request_id, 0) - len(drafts.get(request_id, ()))
                    self._save_complete(it, before + count)
        loads, self._loads = self._loads, []
        saves, self._saves = self._saves, []
        idle = not output.total_num_scheduled_tokens
        session = self._node.session
        node = None
        if session is not None:
            name, epoch = session.link.node
            node = replace(self._info, name=name, epoch=epoch)
        return StepMetadata(node, saves, loads, idle, self._times.began(output))

    def step_ended(self, step: int) -> None:
        """A step's result is there; `step` is its number, if it has one."""
        self._times.ended(step)

    def _reconcile(self) -> None:
        """On a new session, tell the node which tickets we know: the reply that named another was lost with the old."""
        session = self._node.session
        if session is None or session is self._reconciled:
            return
        known = [*self._pinned, *self._owed, *(job.ticket for job in self._loading.values())]
        try:
            session.keep(known)
            self._reconciled = session
        except (UnavailableError, ProtocolError, RefusedError) as error:
            self._lost(session, error)

    def finished(self, request: Any, blocks: Blocks) -> None:
        """A request ended in whatever way: save the chunks that are complete, and forget it."""
        it = self._tracked.pop(request.request_id, None)
        self._questions.end(request.request_id)
        if it is None:
            return
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        if self._config.save and request.request_id not in self._loading and computed > 0:
            it.table = [list(group) for group in blocks]
            self._save_complete(it, computed)

    def ranks_ended(self, ended: SavesEnded) -> None:
        """Ranks report saves; what all ranks have ended is unpinned."""
        for ticket, count in ended.ended.items():
            it = self._pinned.get(ticket)
            if it is None:
                continue
            it.ended += count
            it.failed |= ticket in ended.failed
            if it.ended >= self._ranks.world:
                self._unpin(ticket)

    @property
    def saving(self) -> bool:
        """Whether saves are under way whose end the engine must stay awake for."""
        return bool(self._pinned or self._saves)

    def clear(self) -> bool:
        """Delete what the node and its tiers hold of this namespace; False if it could not be asked, if loads and
        saves are under way, whose chunks stay, or if a REMOTE tier has yet to do it: then ask again.

        Whoever asks may have changed the weights: what running requests have computed by now is not saved any more.
        """
        session = self._node.session
        if session is None:
            return False
        try:
            cleared = session.clear()
            pending = cleared.pending
            until_s = time.monotonic() + CLEAR_S
            while pending and time.monotonic() < until_s:
                time.sleep(CLEAR_POLL_S)
                pending = session.still_clearing()
        except RefusedError as error:
            log.error("clearing the cache: %s", error)
            return False
        except (UnavailableError, ProtocolError) as error:
            self._lost(session, error)
            return False
        finally:
            for it in self._tracked.values():
                it.held, it.outdated = 0, True
        if cleared.kept or pending:
            say = "clearing the cache: %d parts of chunks are in use and stay; tiers that have yet to delete: %s"
            log.warning(say, cleared.kept, ", ".join(pending) or "none")
        return not (self.saving or self._loading or cleared.kept or pending)

    def close(self) -> None:
        """Release what the ranks never saw and forget everything."""
        self._questions.close()
        session = self._node.session
        tickets = [*self._owed, *(it.ticket for it in self._saves), *(it.ticket for it in self._loads if it.ticket)]
        if session is not None and tickets:
            try:
                session.release(tickets)
            except HeadwaterError as error:
                log.info("shutting down without the node: %s", error)
        for ticket in list(self._pinned):
            self._free_blocks(self._pinned.pop(ticket).blocks)
        self._tracked.clear()
        self._loading.clear()
        self._node.close()

    def _save_complete(self, it: Tracked, computed: int) -> None:
        """Save the chunks that are complete once `computed` tokens have their KV."""
        request = it.request
        known = min(computed, request.num_tokens)
        if not self._config.save_decode:
            known = min(known, request.num_prompt_tokens)
        chunks = known // self._layout.chunk_tokens
        if chunks <= it.held or it.outdated:
            return
        it.chain.extend(request.all_token_ids)
        keys = it.chain.keys[:chunks]
        first = it.held
        covered = self._reserve(it, keys, first)
        if not covered and first:
            # The chunk before is not held any more: start again from the first one that is missing.
            first, covered = 0, self._reserve(it, keys, 0)
        if covered < chunks - first:
            self.sums.short_saves += 1
        it.held = chunks

    def _reserve(self, it: Tracked, keys: Sequence[ChunkKey], first: int) -> int:
        """Reserve keys[first:] and queue the copy; how many are held or reserved now (all, without a node)."""
        session = self._node.session
        if session is None:
            return len(keys) - first
        lacking = self._lacking(it, first, len(keys))
        try:
            got = session.reserve(keys[first:], keys[first - 1] if first else None, lacking, range(self._layout.shards))
        except (UnavailableError, ProtocolError, RefusedError) as error:
            self._lost(session, error)
            return len(keys) - first
        if got.ticket:
            parts = self._save_parts(it, got.addresses, first)
            blocks = [block for part in parts for block in part.blocks if block != NULL_BLOCK]
            self._pool.touch([self._pool.blocks[block] for block in blocks])
            self._pinned[got.ticket] = Pinned(blocks)
            self._saves.append(SaveJob(got.ticket, session.link.node[1], parts, got.deadline_s))
        return got.covered

    def _lacking(self, it: Tracked, first: int, end: int) -> list[tuple[int, int]]:
        """Parts that cannot be saved because the engine has dropped the blocks (outside a sliding window)."""
        lacking = []
        for group, rule in enumerate(self._layout.groups):
            if rule.rule is HitRule.ALL:
                continue
            for chunk in range(first, end):
                blocks = self._chunk_blocks(it, group, chunk)
                needed = blocks[-1:] if rule.rule is HitRule.LAST else blocks
                if not needed or NULL_BLOCK in needed:
                    lacking.append((group, chunk - first))
        return lacking

    def _save_parts(self, it: Tracked, addresses: Sequence[Sequence[int]], first: int) -> tuple[Part, ...]:
        parts = []
        for group, slots in enumerate(addresses):
            taken = [(offset, slot) for offset, slot in enumerate(slots) if slot != ABSENT]
            blocks = [block for offset, _ in taken for block in self._chunk_blocks(it, group, first + offset)]
            parts.append(Part(group, tuple(slot for _, slot in taken), tuple(blocks)))
        return tuple(parts)

    def _chunk_blocks(self, it: Tracked, group: int, chunk: int) -> list[int]:
        count = self._layout.blocks_per_chunk(group)
        return it.table[group][chunk * count : (chunk + 1) * count]

    def _unpin(self, ticket: int) -> None:
        it = self._pinned.pop(ticket)
        self._free_blocks(it.blocks)
        if it.failed:
            self._release([ticket])

    def _release(self, tickets: Sequence[int]) -> None:
        """Give up tickets that all ranks have ended and not all have said done for; what fails is tried again."""
        self._owed.extend(tickets)
        session = self._node.session
        if session is None or not self._owed:
            return
        # A node's tickets are numbered from its epoch on: those of an earlier life have gone with it.
        self._owed = [ticket for ticket in self._owed if ticket > session.link.node[1]]
        try:
            if self._owed:
                session.release(self._owed)
            self._owed = []
        except (UnavailableError, ProtocolError, RefusedError) as error:
            self._lost(session, error)

    def _free_blocks(self, blocks: Sequence[int]) -> None:
        if self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    # ---- bookkeeping ----------------------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked | None:
        """The request's record, made when first seen; None for a request that has nothing to do with us."""
        it = self._tracked.get(request.request_id)
        if it is not None:
            return it
        params = getattr(request, "kv_transfer_params", None) or {}
        if params.get(OPT_OUT) or getattr(request, "prompt_embeds", None) is not None:
            return None
        if getattr(request, "resumable", False):
            return None  # a streaming session rewrites its own tokens
        media = [
            Media(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in getattr(request, "mm_features", None) or ()
        ]
        adapter = self._adapters.content_id(getattr(request, "lora_request", None))
        if adapter is None:
            return None
        root = self._root(adapter, getattr(request, "cache_salt", None) or "")
        it = Tracked(request, KeyChain(root, self._layout.chunk_tokens, media, chain_digests))
        self._tracked[request.request_id] = it
        return it

    def _root(self, adapter: str, salt: str) -> bytes:
        if len(self._roots) > 4096:
            self._roots.clear()
        root = self._roots.get((adapter, salt))
        if root is None:
            root = self._roots[adapter, salt] = replace(self._namespace, adapter=adapter, salt=salt).root()
        return root

    def _update_tables(self, output: Any) -> None:
        """Follow the block tables: vLLM's own where it shows them, else from what it hands out."""
        state = getattr(output, "kv_connector_block_state", None)
        for new in output.scheduled_new_reqs:
            it = self._tracked.get(new.req_id)
            if it is not None:
                it.table = [list(group) for group in new.block_ids]
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            it = self._tracked.get(request_id)
            if it is None:
                continue
            new_blocks = cached.new_block_ids[index]
            if new_blocks is None:
                continue
            if request_id in cached.resumed_req_ids:
                it.table = [list(group) for group in new_blocks]
            else:
                for group, blocks in zip(it.table, new_blocks, strict=True):
                    group.extend(blocks)
        if state is not None and len(self._layout.groups) > 1:
            # Windows drop blocks without telling: only vLLM's own table knows which are null by now.
            for request_id, _ in _scheduled(output):
                it = self._tracked.get(request_id)
                if it is not None:
                    it.table = [list(group) for group in state.get_block_ids(request_id)]

    def _lost(self, session: Session, error: HeadwaterError) -> None:
        log.warning("going on without the node: %s", error)
        self._node.lost(session)


def _scheduled(output: Any) -> list[tuple[str, int]]:
    """(request id, tokens computed before this step) of all requests that run in it."""
    cached = output.scheduled_cached_reqs
    return [
        *((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
        *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
    ]
