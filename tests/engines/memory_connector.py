"""The smallest connector that really shares KV: a dict in this process, exact keys, whole blocks.

It proves that the harness works, and with a fault named in its configuration that the harness notices. Loads are
synchronous, or asynchronous and finished some steps later; saves happen within the step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.engines.vllm_names import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SlidingWindowSpec,
    SupportsHMA,
    torch,
)

STORES: dict[str, dict[Any, np.ndarray]] = {}
"""Name of a store -> (block key, group, rank, layer) -> the bytes of one block."""


@dataclass
class Move:
    """One block of one group, and the key of the prefix that ends with it."""

    block: int
    group: int
    key: Any


@dataclass
class Plan(KVConnectorMetadata):
    loads: dict[str, list[Move]] = field(default_factory=dict)
    saves: list[Move] = field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """`extra`: store, asynchronous, delay_steps, fault, failing (the block, counted over all loads, that fails)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.store = STORES.setdefault(extra["store"], {})
        self.asynchronous = extra.get("asynchronous", True)
        self.delay_steps = extra.get("delay_steps", 1)
        self.fault = extra.get("fault", "")
        self.failing = extra.get("failing", -1)
        self.rank = vllm_config.parallel_config.rank
        self.specs = [it.kv_cache_spec for it in kv_cache_config.kv_cache_groups]
        self.block_tokens = self.specs[0].block_size
        self.requests: dict[str, Any] = {}
        self.saved_tokens: dict[str, int] = {}
        self.local_tokens: dict[str, int] = {}
        self.refused: set[str] = set()
        self.plan = Plan()
        self.pages: dict[str, np.ndarray] = {}
        self.waiting: dict[str, tuple[int, list[Move]]] = {}
        self.invalid: set[int] = set()
        self.failed: set[str] = set()
        self.moved = 0

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler side

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def key(self, request: Any, block: int) -> Any:
        end = (block + 1) * self.block_tokens
        salt = None if self.fault == "salt-blind" else request.cache_salt
        media = [(it.identifier, it.mm_position.offset) for it in request.mm_features if it.mm_position.offset < end]
        lora = request.lora_request.lora_path if request.lora_request else ""
        return (lora, salt, tuple(media), tuple(request.all_token_ids[:end]))

    def holds(self, request: Any, block: int, group: int) -> bool:
        ranks = self._vllm_config.parallel_config.world_size
        return all((self.key(request, block), group, rank) in self.store for rank in range(ranks))

    def needed(self, group: int, end: int) -> Iterable[int]:
        """The blocks of a group that a prefix of `end` blocks must have."""
        spec = self.specs[group]
        first = end * self.block_tokens - spec.sliding_window + 1 if isinstance(spec, SlidingWindowSpec) else 0
        return range(max(0, first) // self.block_tokens, end)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.local_tokens[request.request_id] = num_computed_tokens
        if request.request_id in self.refused or request.skip_reading_prefix_cache:
            return 0, False
        most = (request.num_tokens - (not self.asynchronous)) // self.block_tokens
        local = num_computed_tokens // self.block_tokens
        for end in range(most, local, -1):
            groups = range(len(self.specs))
            if all(self.holds(request, it, group) for group in groups for it in self.needed(group, end) if it >= local):
                return (end - local) * self.block_tokens, self.asynchronous
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        local = self.local_tokens[request.request_id] // self.block_tokens
        end = local + num_external_tokens // self.block_tokens
        self.plan.loads[request.request_id] = [
            Move(ids[n], group, self.key(request, n))
            for group, ids in enumerate(blocks.get_block_ids())
            for n in range(local, end)
            if ids[n]
        ]

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan, self.plan = self.plan, Plan()
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            tables = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            ready = min(request.num_computed_tokens + count, request.num_tokens) // self.block_tokens
            for n in range(self.saved_tokens.get(request_id, 0) // self.block_tokens, ready):
                key = self.key(request, n)
                plan.saves += [Move(ids[n], group, key) for group, ids in enumerate(tables) if ids[n]]
            self.saved_tokens[request_id] = ready * self.block_tokens
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        self.refused |= connector_output.failed_recving

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        for state in (self.requests, self.saved_tokens, self.local_tokens):
            state.pop(request.request_id, None)
        self.refused.discard(request.request_id)
        return self.fault == "never-freed", None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self.fault == "pinned":
            gpu_block_pool.get_new_blocks(1)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.pages = {name: tensor.view(torch.int32).numpy() for name, tensor in kv_caches.items()}

    def layers(self, group: int) -> Iterator[str]:
        yield from self._kv_cache_config.kv_cache_groups[group].layer_names

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, moves in self._get_connector_metadata().loads.items():
            if self.asynchronous:
                self.waiting[request_id] = (self.delay_steps, moves)
            else:
                self.load(request_id, moves)

    def load(self, request_id: str, moves: list[Move]) -> None:
        for n, move in enumerate(moves):
            self.moved += 1
            if self.moved - 1 == self.failing:
                if len(self.specs) == 1:
                    self.invalid.add(move.block)
                else:
                    self.failed.add(request_id)
                continue
            for layer in self.layers(move.group):
                data = self.store[move.key, move.group, self.rank][layer]
                self.put(layer, moves[n - 1].block if self.fault == "wrong-block" else move.block, data)
        if self.fault == "stray":
            free = len(next(iter(self.pages.values()))) - 1
            for pages in self.pages.values():
                pages[free] = 7

    def put(self, layer: str, block: int, data: np.ndarray) -> None:
        if self.fault == "not-written":
            return
        self.pages[layer][block] = data
        if self.fault == "flipped":
            self.pages[layer][block, 0, 3, 2] ^= 1

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for move in self._get_connector_metadata().saves:
            layers = {layer: self.pages[layer][move.block].copy() for layer in self.layers(move.group)}
            self.store[move.key, move.group, self.rank] = layers

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished = set()
        for request_id, (steps, moves) in list(self.waiting.items()):
            self.waiting[request_id] = (steps - 1, moves)
            if steps - 1 == (1 if self.fault == "told-early" else 0):
                finished.add(request_id)
            if steps == 1:
                self.load(request_id, moves)
                del self.waiting[request_id]
        failed, self.failed = self.failed, set()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid
