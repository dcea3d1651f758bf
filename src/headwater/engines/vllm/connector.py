"""HeadwaterConnector: the class that vLLM loads; a thin shim over the scheduler side and the rank side.

vLLM makes one object in the scheduler's process and one in each rank's. Method names and signatures are vLLM's
(0.29 to 0.32 are tested, back to 0.23 imports); what they decide is in `scheduler.py`, what they copy in `worker.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.kv_cache_interface import KVCacheConfig

from headwater.config import EngineConfig, embedded_node, engine_config, runtime_dir
from headwater.engines.cuda_kv import open_paged_kv
from headwater.engines.vllm import identity
from headwater.engines.vllm.metadata import NodeInfo, RankLayout, SavesEnded, StepMetadata
from headwater.engines.vllm.scheduler import SchedulerSide
from headwater.engines.vllm.stats import HeadwaterPromMetrics, HeadwaterStats
from headwater.engines.vllm.worker import Outcome, WorkerSide
from headwater.errors import ConfigError, HeadwaterError
from headwater.node.address import sweep
from headwater.node.client import Session, Supervisor, open_session
from headwater.node.driver import Node
from headwater.node.server import EmbeddedServer
from headwater.types import HitRule

log = logging.getLogger(__name__)

EMBEDDED_PREFIX = "embedded-"


class HeadwaterConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector for a headwater node, shared or embedded."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Read the configuration; raises ConfigError for what cannot work. Connects to nothing yet."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        policy = getattr(transfer, "kv_load_failure_policy", "recompute")
        if policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy={policy}: a cache miss would fail requests; "
                'set "kv_load_failure_policy":"recompute" in --kv-transfer-config'
            )
        self._config = engine_config(transfer.kv_connector_extra_config or {})
        # The engine's id may come from a configuration that several engines share; vLLM's id of this start does not.
        self._instance = f"{transfer.engine_id}.{getattr(vllm_config, 'instance_id', '')}"
        self._kv_cache = kv_cache_config
        self._ranks = identity.ranks_of(vllm_config, kv_cache_config)
        self._chunk_tokens = identity.chunk_tokens_for(kv_cache_config, self._config.chunk_tokens)
        rules = [identity.hit_rule(group.kv_cache_spec)[0] for group in kv_cache_config.kv_cache_groups]
        # vLLM takes failed blocks for one group only, and recomputes from the first of them on: what lies before it
        # must be there, which is so only where every block is kept. Elsewhere a failed load fails as a whole.
        self._fails_by_block = rules == [HitRule.ALL]
        self._reported: dict[tuple[int, int], RankLayout] = {}
        self._decider: SchedulerSide | None = None
        self._embedded: EmbeddedServer | None = None
        self._block_pool: Any = None
        self._copier: WorkerSide | None = None
        self._begun: StepMetadata | None = None
        self._ended: StepMetadata | None = None
        self._last: Outcome = Outcome()
        if role == KVConnectorRole.WORKER:
            self._copier = WorkerSide(self._config, self._ranks, *_my_ranks(vllm_config))

    # ---- class-level answers --------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may forget: nobody waits for a save."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeadwaterStats:
        """vLLM's factory of our sums."""
        return HeadwaterStats(dict(data)) if data else HeadwaterStats()  # vLLM adds to it, and has other readers

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> HeadwaterPromMetrics:
        """vLLM's factory of our Prometheus metrics."""
        return HeadwaterPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler side -------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, RankLayout]) -> None:
        """The ranks' layouts by tensor-parallel rank, from a vLLM that knows no pipeline ranks here."""
        self._reported = {(0, tp_rank): it for tp_rank, it in metadata.items()}

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], RankLayout]) -> None:
        """The ranks' layouts by (pipeline rank, tensor-parallel rank)."""
        self._reported = dict(metadata)
        self._scheduling()  # connect now, so that the first request does not pay for it

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The pool whose references pin blocks during saves."""
        self._block_pool = gpu_block_pool
        if self._decider is not None:
            self._decider.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """See `SchedulerSide.arrived`."""
        self._scheduling().arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.match_tokens`."""
        return self._scheduling().match_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerSide.allocated`."""
        self._scheduling().allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """See `SchedulerSide.hit_tokens`; vLLM asks since 0.32."""
        return self._scheduling().hit_tokens(request, num_external_tokens).sources()

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See `SchedulerSide.step`."""
        return self._scheduling().step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks report after a step."""
        decider = self._scheduling()
        ended = getattr(connector_output, "kv_connector_worker_meta", None)
        decider.step_ended(ended.step if ended is not None else 0)
        if ended is not None:
            decider.ranks_ended(ended)
        decider.load_failed(getattr(connector_output, "failed_recving", None) or ())
        decider.invalid_blocks(getattr(connector_output, "invalid_block_ids", None) or ())
        decider.received(connector_output.finished_recving or ())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Blocks of saves are pinned, so vLLM may free the request at once."""
        self._scheduling().finished(request, block_ids)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same for a vLLM without the hybrid memory allocator."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping while saves are under way."""
        return self._decider is not None and self._decider.saving

    def has_pending_block_frees(self) -> bool:
        """Tells the scheduler that pinned blocks will come back without a preemption."""
        return self._decider is not None and self._decider.saving

    def reset_cache(self) -> bool | None:
        """Delete what the node holds of this engine's namespace."""
        return self._scheduling().clear()

    # ---- rank side ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's pages: measure them and make their copies possible; raises RefusedError."""
        groups = [{name: kv_caches[name] for name in group.layer_names} for group in self._kv_cache.kv_cache_groups]
        pages = open_paged_kv(groups, self._kv_cache.num_blocks, threads=self._config.copy_threads)
        first = next(iter(kv_caches.values()))
        mine = RankLayout(
            layers=tuple(layers for layers, _ in pages.shapes),
            block_bytes=tuple(size for _, size in pages.shapes),
            dtype=str(first.dtype).removeprefix("torch."),
            layout=getattr(self._kv_cache, "kv_cache_layout", None) or "default",
        )
        self._copying.register(pages, mine, self._instance)

    def get_handshake_metadata(self) -> RankLayout | None:
        """What this rank's tensors look like, for the scheduler side."""
        return self._copying.layout

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Comes before the forward pass: the earliest moment for loads."""
        self._begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are asynchronous and under way already, unless this vLLM has no earlier call."""
        self._begin(self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole requests are loaded before they are scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole chunks are saved after the step."""

    def wait_for_save(self) -> None:
        """The forward pass is over: its saves may start, nobody waits for them."""
        self._end(self._meta())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose loads ended since the last step."""
        meta = self._meta()
        if meta.idle:
            self._end(meta)  # vLLM before 0.31 leaves wait_for_save out of empty steps
        self._last = self._copying.collect(idle=meta.idle)
        return None, self._last.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, with failed requests for models of several KV groups (vLLM 0.31 and newer)."""
        _, received = self.get_finished(finished_req_ids)
        results = base.KVConnectorTransferResults()
        results.finished_recving = set(received or ())
        if not self._fails_by_block:
            results.failed_recving = self._last.failed & self._last.received
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that a load should have filled and did not; vLLM takes them for one KV group only."""
        return self._last.invalid if self._fails_by_block else set()

    def get_kv_connector_stats(self) -> HeadwaterStats | None:
        """This side's sums since the last step."""
        side = self._copier or self._decider
        return side.sums.take() if side is not None else None

    def build_connector_worker_meta(self) -> Any:
        """The saves that this rank has ended, and the step, if the scheduler side wants to know."""
        ended, step = self._copying.take_ended(), self._meta().step
        if step:
            ended = ended or SavesEnded()
            ended.step = step
        return ended

    def shutdown(self) -> None:
        """Leave: release, unmap, stop threads and the embedded node."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        if self._decider is not None:
            self._decider.close()
            self._decider = None
        if self._embedded is not None:
            self._embedded.close()
            self._embedded = None

    # ---- inside ---------------------------------------------------------------------------------------

    @property
    def _copying(self) -> WorkerSide:
        assert self._copier is not None, "a rank's method was called on the scheduler's object"
        return self._copier

    def _meta(self) -> StepMetadata:
        meta = self._connector_metadata
        assert isinstance(meta, StepMetadata), f"vLLM bound {type(meta).__name__}"
        return meta

    def _begin(self, meta: Any) -> None:
        if isinstance(meta, StepMetadata) and meta is not self._begun:
            self._begun = meta
            self._copying.before_forward(meta.loads, meta.node)

    def _end(self, meta: StepMetadata) -> None:
        if meta is not self._ended:
            self._ended = meta
            self._copying.after_forward(meta.saves, meta.node)

    def _scheduling(self) -> SchedulerSide:
        """The scheduler side, made when first needed: the ranks' layouts are known by then."""
        if self._decider is None:
            reported = self._reported
            if not reported:
                dtype = str(self._vllm_config.model_config.dtype).removeprefix("torch.")
                alike = identity.rank_layout_from_config(self._kv_cache, dtype)
                reported = {(pp, tp): alike for pp in range(self._ranks.pp) for tp in range(self._ranks.tp)}
            self._decider = self._make_decider(reported)
            if self._block_pool is not None:
                self._decider.bind_pool(self._block_pool)
        return self._decider

    def _make_decider(self, reported: Mapping[tuple[int, int], RankLayout]) -> SchedulerSide:
        lossy = self._config.lossy
        layout = identity.kv_layout(self._kv_cache, self._ranks, self._chunk_tokens, reported, lossy)
        space = identity.namespace(
            self._vllm_config,
            self._ranks,
            layout,
            next(iter(reported.values())),
            self._config.tenant,
            self._config.fingerprint,
            lossy,
        )
        address = self._config.node or self._start_embedded()
        info = NodeInfo(address, "", 0, self._instance, space, layout)
        node = Supervisor(_connect(self._config, info), _log_refusal)
        # A model with several KV groups needs the report of failed requests, which vLLM has since 0.31.
        can_fail = self._fails_by_block or hasattr(base, "KVConnectorTransferResults")
        step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        return SchedulerSide(
            self._config, space, layout, self._ranks, node, info, can_fail=can_fail, step_tokens=step_tokens
        )

    def _start_embedded(self) -> str:
        directory = runtime_dir()
        sweep(directory, EMBEDDED_PREFIX)
        name = hashlib.sha256(self._instance.encode()).hexdigest()[:16]
        address = f"unix:{directory}/{EMBEDDED_PREFIX}{name}.sock"
        node = Node(embedded_node(self._config, address))
        self._embedded = EmbeddedServer(node, address)
        return address


def _connect(config: EngineConfig, info: NodeInfo) -> Callable[[], Session]:
    return partial(
        open_session,
        info.address,
        info.instance,
        info.namespace,
        info.layout,
        maps=False,
        connect_s=config.connect_s,
        call_s=config.metadata_s,
    )


def _log_refusal(error: HeadwaterError) -> None:
    log.error("headwater is off for this engine: %s", error)


def _my_ranks(config: VllmConfig) -> tuple[int, int]:
    """This process's (pipeline rank, tensor-parallel rank)."""
    parallel = config.parallel_config
    tp = parallel.tensor_parallel_size
    return parallel.rank // tp % parallel.pipeline_parallel_size, parallel.rank % tp
