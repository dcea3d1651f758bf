"""A vLLM engine without a model: the real Scheduler, the real connector, workers whose KV is checked byte for byte.

    engine = Engine(Shape(blocks=64), "headwater.engines.vllm.HeadwaterConnector", {"node": "unix:/tmp/node"})
    engine.add("a", prompt, max_tokens=8)
    engine.run()
    assert engine.outputs["a"] == continuation(prompt, 8)
    engine.close()

`step` does what EngineCore does in one turn of its loop; several engines may live in one process. Wrong bytes raise
`oracle.WrongKV` in the step that would have used them. `close` runs the engine idle and checks that nothing leaked.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engines.fake_worker import NULL_BLOCK, FakeWorker
from tests.engines.oracle import VOCABULARY, identity
from tests.engines.shape import DENSE, Shape, allow_media, block_hash, layers_of, make_config
from tests.engines.vllm_names import (
    AsyncScheduler,
    KVConnectorFactory,
    KVConnectorRole,
    KVOutputAggregator,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    StructuredOutputManager,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)

__all__ = ["Engine", "Load", "Shape"]


@dataclass
class Load:
    """One load that the connector has promised and the scheduler has made room for."""

    local_tokens: int
    external_tokens: int
    asynchronous: bool
    blocks: set[int] = field(default_factory=set)


class Engine:
    """One serving engine. `connector` is a dotted class path; `asynchronous` schedules one step ahead, as GPUs do."""

    def __init__(
        self,
        shape: Shape = DENSE,
        connector: str | None = None,
        extra: dict[str, Any] | None = None,
        *,
        policy: str = "recompute",
        asynchronous: bool = False,
        second_runner: bool = False,
    ) -> None:
        self.shape = shape
        self.config = make_config(shape, connector, extra or {}, policy, asynchronous)
        kv_configs = get_kv_cache_configs(self.config, layers_of(shape), [1 << 28] * shape.tp * shape.pp)
        kv_config = generate_scheduler_kv_cache_config(kv_configs)
        self.config.cache_config.num_gpu_blocks = kv_config.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_config, self.config)
        for it in (*kv_configs, kv_config):
            it.kv_cache_layout = self.config.cache_config.kv_cache_layout
            it.hash_block_size = hash_block_size
        self.hasher = get_request_block_hasher(hash_block_size, block_hash())
        self.identities: dict[str, str] = {}
        self.workers = [self.start_worker(rank, it, second_runner) for rank, it in enumerate(kv_configs)]
        make = AsyncScheduler if asynchronous else Scheduler
        structured = StructuredOutputManager(self.config)
        self.scheduler = make(self.config, kv_config, structured, block_size, hash_block_size, log_stats=True)
        self.scheduler.use_v2_model_runner = second_runner
        allow_media(self.scheduler, shape.max_tokens)
        self.connector = self.scheduler.connector
        self.aggregator: Any = None
        self.loads: dict[str, Load] = {}
        self.load_log: list[tuple[str, Load]] = []
        if self.connector is not None:
            self.meet_connector()
        self.depth = 2 if asynchronous else 1
        self.in_flight: deque[tuple[Any, list[Any], list[str]]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.computed_tokens: dict[str, int] = {}
        self.preemptions = 0
        self.stats: list[dict[str, Any]] = []
        self.free_blocks = self.pool.get_num_free_blocks()

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def start_worker(self, rank: int, kv_config: Any, second_runner: bool) -> FakeWorker:
        config = copy.deepcopy(self.config)
        config.parallel_config.rank = rank
        worker = FakeWorker(config, kv_config, self.identities, second_runner)
        if config.kv_transfer_config is not None:
            with worker.as_this_rank():
                connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
            worker.attach(connector)
        return worker

    def meet_connector(self) -> None:
        """What EngineCore does once, and taps that note what the connector promises."""
        if len(self.workers) > 1:
            self.aggregator = KVOutputAggregator.from_connector(self.connector, len(self.workers))
        told = {(it.pp_rank, it.tp_rank): it.connector.get_handshake_metadata() for it in self.workers}
        if any(it is not None for it in told.values()):
            self.connector.set_xfer_handshake_metadata_pp_aware(told)
        match, update = self.connector.get_num_new_matched_tokens, self.connector.update_state_after_alloc
        promises: dict[str, tuple[int, bool]] = {}

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            external, asynchronous = match(request, num_computed_tokens)
            promises[request.request_id] = (num_computed_tokens, asynchronous)
            assert external is None or num_computed_tokens + external <= request.num_tokens - (not asynchronous)
            assert external or not asynchronous, "asynchronous must be False where nothing is loaded"
            return external, asynchronous

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                self.note_load(request, blocks, num_external_tokens, *promises[request.request_id])
            update(request, blocks, num_external_tokens)

        self.connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        self.connector.update_state_after_alloc = update_state_after_alloc

    def note_load(self, request: Any, blocks: Any, external: int, local: int, asynchronous: bool) -> None:
        load = Load(local, external, asynchronous)
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        for group, ids in zip(groups, blocks.get_block_ids(), strict=True):
            size = group.kv_cache_spec.block_size
            load.blocks |= set(ids[local // size : -(-(local + external) // size)]) - {NULL_BLOCK}
        self.loads[request.request_id] = load
        self.load_log.append((request.request_id, load))

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int = 1,
        *,
        adapter: str = "",
        salt: str | None = None,
        media: Iterable[tuple[str, int, int]] = (),
        transfer: dict[str, Any] | None = None,
        skip_reading: bool = False,
        lora: LoRARequest | None = None,
        fields: dict[str, Any] | None = None,
    ) -> None:
        """Queue a request. `media` are (identifier, offset, length) items; `transfer` is `kv_transfer_params`.

        With `lora`, `adapter` names what its weights are, which only the oracle sees. `fields` go to vLLM's Request.
        """
        assert all(0 <= it < VOCABULARY for it in tokens)
        extra = {"kv_transfer_params": transfer} if transfer is not None else None
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra)
        params.skip_reading_prefix_cache = skip_reading
        if adapter and lora is None:
            lora = LoRARequest(adapter, len(adapter), f"/adapters/{adapter}")
        features = [
            MultiModalFeatureSpec(data=None, modality="image", identifier=it, mm_position=PlaceholderRange(at, size))
            for it, at, size in media
        ]
        self.identities[request_id] = identity(adapter, salt)
        self.outputs[request_id] = []
        self.scheduler.add_request(
            Request(
                request_id,
                list(tokens),
                params,
                None,
                lora_request=lora,
                cache_salt=salt,
                mm_features=features,
                block_hasher=self.hasher,
                **(fields or {}),
            )
        )

    def preempt(self, *request_ids: str) -> None:
        """Take running requests off the device between two steps, as a reset of the prefix cache does."""
        for it in [it for it in self.scheduler.running if it.request_id in request_ids]:
            self.scheduler.running.remove(it)
            self.scheduler._preempt_request(it, 0.0, drop_stale_output=True)
            self.scheduler.prev_step_scheduled_req_ids.discard(it.request_id)
            self.preemptions += 1

    def abort(self, *request_ids: str) -> None:
        """Abort between two steps; `step(abort=...)` does it while the model runs."""
        for it in self.scheduler.finish_requests(set(request_ids), RequestStatus.FINISHED_ABORTED):
            self.finished[it.request_id] = "abort"

    def step(self, abort: Sequence[str] = ()) -> bool:
        """One turn of the engine's loop; False if it had nothing to do."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.preemptions += len(scheduled.preempted_req_ids or ())
            for it, count in scheduled.num_scheduled_tokens.items():
                self.computed_tokens[it] = self.computed_tokens.get(it, 0) + count
            self.in_flight.append(self.send(scheduled))
            if len(self.in_flight) < self.depth and self.scheduler.has_requests():
                return True
        elif not self.in_flight:
            return False
        scheduled, sent, ends = self.in_flight.popleft()
        output = self.execute(sent)
        self.abort(*abort)
        self.update(scheduled, output, ends)
        if not scheduled.total_num_scheduled_tokens and self.scheduler.has_requests():
            threading.Event().wait(0.001)  # as EngineCore does, so that background copies get on
        return True

    def send(self, scheduled: Any) -> tuple[Any, list[Any], list[str]]:
        """A step, a copy of it for each worker as if sent to another process, and the sync loads that it completes."""
        now = scheduled.num_scheduled_tokens
        ends = [it for it, load in self.loads.items() if not load.asynchronous and it in now]
        return scheduled, [copy.deepcopy(scheduled) for _ in self.workers], ends

    def execute(self, sent: list[Any]) -> Any:
        loading = {block for load in self.loads.values() for block in load.blocks}
        outputs = [copy.copy(worker.execute(it, loading)) for worker, it in zip(self.workers, sent, strict=True)]
        return outputs[0] if self.aggregator is None else self.aggregator.aggregate(outputs)

    def update(self, scheduled: Any, output: Any, ends: Iterable[str]) -> None:
        told = output.kv_connector_output
        if told is not None:
            self.check_reported(told)
            ends = [*ends, *(told.finished_recving or ())]
        for it in ends:
            load = self.loads.pop(it, None)
            for worker in self.workers:
                worker.refresh(load.blocks if load else set())
        for client in self.scheduler.update_from_output(scheduled, output).values():
            for it in client.outputs:
                self.outputs[it.request_id] += it.new_token_ids
                if it.finish_reason is not None:
                    self.finished[it.request_id] = str(it.finish_reason)
            stats = client.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.stats.append(copy.deepcopy(stats.kv_connector_stats))

    def check_reported(self, told: Any) -> None:
        """What the workers say must be about loads that are going on."""
        unknown = set(told.finished_recving or ()) - {it for it, load in self.loads.items() if load.asynchronous}
        assert not unknown, f"finished loads that nobody started: {unknown}"
        loading = {block for load in self.loads.values() for block in load.blocks}
        stray = told.invalid_block_ids - loading
        assert not stray, f"failed blocks that were not being loaded: {stray}"

    def run(self, limit: int = 20_000, until: Callable[[], bool] = lambda: False) -> None:
        """Step until idle, or until the condition holds."""
        for _ in range(limit):
            if until() or not self.step():
                return
        raise AssertionError(f"still busy after {limit} steps: {list(self.scheduler.requests)}")

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that only the connector can have anything."""
        assert self.scheduler.reset_prefix_cache()

    def loaded_tokens(self, request_id: str) -> int:
        """Tokens that the connector supplied to a request, over all its loads."""
        return sum(load.external_tokens for it, load in self.load_log if it == request_id)

    def close(self, leftovers: Callable[["Engine"], object] = lambda engine: None) -> None:
        """Run idle, check that nothing is held, shut down. `leftovers` looks at the connector; falsy is clean."""
        self.run()
        assert not self.loads, f"loads without an end: {self.loads}"
        assert not leftovers(self), leftovers(self)
        self.check_empty()
        self.scheduler.shutdown()
        for worker in self.workers:
            if worker.connector is not None:
                worker.connector.shutdown()

    def check_empty(self) -> None:
        it = self.scheduler
        for name in ("requests", "running", "waiting", "kv_holding_waiting", "deferred_waiting", "_inflight_prefills"):
            assert not getattr(it, name), f"{name}: {getattr(it, name)}"
        for name in ("finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "deferred_frees", "finished_req_ids"):
            assert not getattr(it, name), f"{name}: {getattr(it, name)}"
        for manager in it.kv_cache_manager.coordinator.single_type_managers:
            assert not manager.req_to_blocks, dict(manager.req_to_blocks)
        missing = self.free_blocks - self.pool.get_num_free_blocks()
        held = [(block.block_id, block.ref_cnt) for block in self.pool.blocks if block.ref_cnt and not block.is_null]
        assert not missing, f"{missing} blocks are not back in the pool: {held}"
