"""A worker whose model is the oracle: real KV tensors, real connector, real order of calls, no weights.

The steps around the forward are vLLM's own code (the mixin of its first model runner, `ActiveKVConnector` of its
second), so the connector is called exactly as in production. The forward itself writes the oracle's values for the
scheduled positions and checks everything that attention would read.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.engines import oracle
from tests.engines.vllm_names import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ActiveKVConnector,
    KVConnectorModelRunnerMixin,
    ModelRunnerOutput,
    SchedulerOutput,
    SlidingWindowSpec,
    allocate_kv_cache,
    kv_transfer_state,
    parallel_state,
    set_forward_context,
    torch,
)

NULL_BLOCK = 0


@dataclass
class Running:
    """What a model runner keeps of one request."""

    prefix: oracle.Prefix
    prompt_tokens: int
    blocks: list[list[int]]


@dataclass
class Span:
    """The positions of one request that one step computes."""

    request_id: str
    request: Running
    start: int
    end: int


class FakeWorker:
    """One rank. `identities` maps a request id to what else than tokens its KV depends on; the engine owns it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, identities: dict[str, str], second_runner: bool) -> None:
        self.config = vllm_config
        self.kv = kv_cache_config
        self.identities = identities
        self.second_runner = second_runner
        parallel = vllm_config.parallel_config
        self.tp_rank = parallel.rank % parallel.tensor_parallel_size
        self.pp_rank = parallel.rank // parallel.tensor_parallel_size
        self.shard = self.tp_rank // kv_cache_config.kv_tp_replicas
        self.running: dict[str, Running] = {}
        self.written: set[int] = set()
        self.spoilt: dict[str, tuple[set[int], str]] = {}
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        self.tensors = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        self.pages = {name: tensor.view(torch.int32).numpy() for name, tensor in self.tensors.items()}
        for pages in self.pages.values():
            pages.fill(oracle.POISON)
        self.known = {name: pages.copy() for name, pages in self.pages.items()}
        self.groups = {name: n for n, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        self.connector: Any = None
        self.second: Any = None

    def attach(self, connector: Any) -> None:
        """Give the worker its side of the connector."""
        self.connector = connector
        with self.as_this_rank():
            if self.second_runner:
                self.second = ActiveKVConnector(self.config, self.tensors)
            else:
                connector.register_kv_caches(self.tensors)
                connector.set_host_xfer_buffer_ops(lambda *arguments: None)

    @contextlib.contextmanager
    def as_this_rank(self) -> Iterator[None]:
        """Make vLLM's process-wide state say that this is the worker's process."""
        parallel = self.config.parallel_config
        group = lambda rank, size: SimpleNamespace(rank_in_group=rank, world_size=size)  # noqa: E731
        old = (kv_transfer_state._KV_CONNECTOR_AGENT, parallel_state._TP, parallel_state._PP)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        parallel_state._TP = group(self.tp_rank, parallel.tensor_parallel_size)
        parallel_state._PP = group(self.pp_rank, parallel.pipeline_parallel_size)
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT, parallel_state._TP, parallel_state._PP = old

    def execute(self, scheduled: SchedulerOutput, loading: set[int]) -> ModelRunnerOutput:
        """One step. `loading` are the blocks that the connector may write to."""
        self.written, self.spoilt = set(), {}
        with self.as_this_rank():
            output = self.execute_second(scheduled) if self.second_runner else self.execute_first(scheduled)
        told = output.kv_connector_output
        failed = told.invalid_block_ids if told is not None else set()
        for blocks, message in self.spoilt.values():
            if not blocks <= failed:
                raise oracle.WrongKV(message)
        self.check_untouched(loading)
        return output

    def execute_first(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        if self.connector is not None:
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        spans = self.update(scheduled)
        if not spans:
            if self.connector is None:
                return EMPTY_MODEL_RUNNER_OUTPUT
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
        with (
            set_forward_context({}, self.config, num_tokens=scheduled.total_num_scheduled_tokens),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as connector_output,
        ):
            self.forward(spans)
        return self.sample(spans, connector_output)

    def execute_second(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        spans = self.update(scheduled)
        if self.second is None:
            self.forward(spans)
            return self.sample(spans, None)
        if not spans:
            return self.second.no_forward(scheduled)
        ids = [span.request_id for span in spans]
        batch = SimpleNamespace(
            idx_mapping=torch.arange(len(ids)), req_ids=ids, num_tokens=scheduled.total_num_scheduled_tokens
        )
        self.second.pre_forward(scheduled, batch, {})
        with set_forward_context({}, self.config, num_tokens=scheduled.total_num_scheduled_tokens):
            self.forward(spans)
        self.second.finish_forward()
        output = self.sample(spans, None)
        output.kv_connector_output = self.second.post_forward(scheduled.finished_req_ids)
        return output

    def update(self, scheduled: SchedulerOutput) -> list[Span]:
        """Bring the request states up to date, as `_update_states` does; returns what to compute."""
        for request_id in scheduled.finished_req_ids:
            self.running.pop(request_id, None)
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.running[new.req_id] = self.admit(new)
        cached = scheduled.scheduled_cached_reqs
        for n, request_id in enumerate(cached.req_ids):
            starts[request_id] = cached.num_computed_tokens[n]
            request = self.running[request_id]
            # Tokens sampled in a step that the scheduler has thrown away, after a load failed.
            request.prefix.cut(request.prompt_tokens + cached.num_output_tokens[n])
            new_blocks = cached.new_block_ids[n]
            if request_id in cached.resumed_req_ids:
                request.blocks = [list(ids) for ids in new_blocks]
                if request_id in cached.all_token_ids:
                    request.prefix.cut(0)
                    request.prefix.tokens.extend(cached.all_token_ids[request_id])
            elif new_blocks is not None:
                for blocks, ids in zip(request.blocks, new_blocks, strict=True):
                    blocks.extend(ids)
        counts = scheduled.num_scheduled_tokens
        return [Span(it, self.running[it], starts[it], starts[it] + count) for it, count in counts.items()]

    def admit(self, new: Any) -> Running:
        tokens = list(new.prefill_token_ids or new.prompt_token_ids)
        places = [(it.identifier, it.mm_position.offset, it.mm_position.length) for it in new.mm_features]
        prefix = oracle.Prefix(tokens, self.identities[new.req_id], oracle.covered(places))
        return Running(prefix, len(new.prompt_token_ids), [list(ids) for ids in new.block_ids])

    def forward(self, spans: list[Span]) -> None:
        """Layer by layer: let the connector wait, write the new positions of all requests, check all that is read.

        A request that has read wrong KV computes nonsense, as a model would. That is forgiven in `execute` if the
        connector says in the same step that just these blocks have failed: the scheduler then drops the result.
        """
        for layer, tensor in self.tensors.items():
            if self.connector is not None:
                self.connector.wait_for_layer_load(layer)
            for span in spans:
                self.write(layer, span)
            for span in spans:
                self.check(layer, span)
            if self.connector is not None:
                self.connector.save_kv_layer(layer, tensor, {})
        for span in spans:
            if span.request_id in self.spoilt:
                for layer, pages in self.pages.items():
                    _, blocks, offsets = self.places(layer, span.request, span.start, span.end)
                    pages[blocks, :, offsets, :] = oracle.POISON

    def places(self, layer: str, request: Running, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, and the block and the place in it of each."""
        group = self.groups[layer]
        block_tokens = self.kv.kv_cache_groups[group].kv_cache_spec.block_size
        positions = np.arange(start, end)
        blocks = np.array(request.blocks[group], dtype=np.int64)[positions // block_tokens]
        return positions, blocks, positions % block_tokens

    def write(self, layer: str, span: Span) -> None:
        _, blocks, offsets = self.places(layer, span.request, span.start, span.end)
        if (blocks == NULL_BLOCK).any():
            raise oracle.WrongKV(f"{span.request_id} computes into the null block, {layer}")
        self.pages[layer][blocks, :, offsets, :] = self.expected(layer, span.request, span.start, span.end)
        self.written |= set(blocks.tolist())

    def check(self, layer: str, span: Span) -> None:
        """Compare everything that attention reads for the span with the oracle."""
        spec = self.kv.kv_cache_groups[self.groups[layer]].kv_cache_spec
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else span.end
        first = max(0, span.start - window + 1)
        positions, blocks, offsets = self.places(layer, span.request, first, span.end)
        found = self.pages[layer][blocks, :, offsets, :]
        expected = self.expected(layer, span.request, first, span.end)
        wrong = (found != expected).any(axis=(1, 2)) | (blocks == NULL_BLOCK)
        if wrong.any():
            n = int(wrong.argmax())
            spoilt, message = self.spoilt.get(span.request_id, (set(), ""))
            message = message or (
                f"request {span.request_id} computing [{span.start}, {span.end}) reads wrong KV at {int(wrong.sum())} "
                f"positions, the first is {positions[n]} in block {blocks[n]}, layer {layer}, rank "
                f"{self.config.parallel_config.rank}: {oracle.describe(found[n])}"
            )
            self.spoilt[span.request_id] = (spoilt | set(blocks[wrong].tolist()), message)

    def expected(self, layer: str, request: Running, start: int, end: int) -> oracle.Ints:
        _, heads, _, channels = self.pages[layer].shape
        return oracle.values(request.prefix.digest(end)[start:], layer, self.shard, heads, channels)

    def sample(self, spans: list[Span], connector_output: Any) -> ModelRunnerOutput:
        sampled = []
        for span in spans:
            prefix = span.request.prefix
            ready = span.end == len(prefix.tokens)
            token = oracle.NONSENSE if span.request_id in self.spoilt else prefix.next_token()
            sampled.append([token] if ready else [])
            prefix.tokens.extend(sampled[-1])
        ids = [span.request_id for span in spans]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={it: n for n, it in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def check_untouched(self, loading: set[int]) -> None:
        """No block has changed that was neither computed in this step nor is being loaded."""
        for layer, pages in self.pages.items():
            changed = set(np.flatnonzero((pages != self.known[layer]).any(axis=(1, 2, 3))).tolist())
            stray = changed - self.written - loading
            if stray:
                raise oracle.WrongKV(f"somebody has written to blocks {sorted(stray)} of {layer}")
        self.refresh(self.written)

    def refresh(self, blocks: set[int]) -> None:
        """Take the present content of some blocks as right."""
        these = sorted(blocks)
        for layer, pages in self.pages.items():
            self.known[layer][these] = pages[these]
