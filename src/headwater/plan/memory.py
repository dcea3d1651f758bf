"""The answers about bytes: the model, KV per token and per chunk, transfers, what fits, tiers for a hit rate."""

from __future__ import annotations

from headwater.plan.answer import Answer, Figure, Input, Origin, Unit
from headwater.plan.kv import chunk_bytes, growing_bytes, state_bytes, token_bytes
from headwater.plan.question import Question
from headwater.plan.shapes import LayerKind

SHARES_OF_MOST = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""The hit rates asked for where none is: parts of the highest there is."""


def model_answer(ask: Question) -> Answer:
    """Layers and weights."""
    shape, origin = ask.shape, ask.origins.get("shape", Origin.TABLE)
    return Answer(
        "model",
        f"The model {shape.name}",
        (
            *(Figure(f"layers with {it.kind.value}", it.layers, Unit.COUNT) for it in shape.groups),
            Figure("parameters", shape.weights.total, Unit.COUNT),
            Figure("of them active for a token", shape.weights.active, Unit.COUNT),
            Figure("weights", shape.weight_bytes, Unit.BYTES),
        ),
        "the sum of all matrices; active: of routed experts chosen / experts; weights = parameters * width",
        (
            Input("hidden size", shape.hidden_size, Unit.COUNT, origin),
            Input("width of weights", shape.dense_width, Unit.BYTES, ask.origins.get("weight_dtype", origin)),
            Input("width of routed experts", shape.routed_width, Unit.BYTES, ask.origins.get("weight_dtype", origin)),
        ),
    )


def _layer_inputs(ask: Question) -> tuple[Input, ...]:
    origin, found = ask.origins.get("shape", Origin.TABLE), []
    for it in ask.shape.groups:
        found.append(Input(f"layers, {it.kind.value}", it.layers, Unit.COUNT, origin))
        if it.kind is LayerKind.STATE:
            found.append(Input("state elements a layer", it.state_elements, Unit.COUNT, origin))
        else:
            found.append(Input("elements a token and layer", it.token_elements, Unit.COUNT, origin))
        if it.window_tokens:
            found.append(Input("window", it.window_tokens, Unit.TOKENS, origin))
    return (*found, ask.given("kv_width", "width of KV", Unit.BYTES))


def token_answer(ask: Question) -> Answer:
    """KV bytes per token."""
    shape, width = ask.shape, ask.kv_width
    figures = [Figure("a token", token_bytes(shape, width), Unit.BYTES)]
    if any(it.window_tokens for it in shape.groups):
        figures.append(Figure("a token beyond all windows", growing_bytes(shape, width), Unit.BYTES))
    if state := state_bytes(shape, width):
        figures.append(Figure("state of a request", state, Unit.BYTES))
    tokens = ask.length_tokens
    figures.append(Figure(f"a request of {tokens:,} tokens on its GPUs", ask.device_bytes(tokens), Unit.BYTES))
    return Answer(
        "kv_token",
        "KV of a token",
        tuple(figures),
        "token = sum over kinds of layers * elements * width (elements = 2 * kv_heads * head_dim, or latent + rope); "
        "request = sum of layers * (min(tokens, window) * elements + state) * width * copies; "
        "copies = tp / kv_heads if above 1, tp for a latent",
        (
            *_layer_inputs(ask),
            ask.given("tp", "GPUs an instance (tp)", Unit.COUNT),
            ask.given("length_tokens", "length", Unit.TOKENS),
        ),
    )


def chunk_answer(ask: Question) -> Answer:
    """Bytes of a chunk in the cache."""
    stored, size = ask.stored, chunk_bytes(ask.stored)
    return Answer(
        "kv_chunk",
        f"A chunk of {ask.chunk_tokens} tokens in the cache",
        (
            Figure("all ranks", size, Unit.BYTES),
            Figure("one rank", sum(stored.part_bytes(group, 0) for group in range(len(stored.groups))), Unit.BYTES),
            Figure("a token in the cache", size / ask.chunk_tokens, Unit.BYTES),
        ),
        "sum over groups and ranks of layers * blocks * block bytes, in whole pages of 4 KiB; a latent once; "
        "one state a chunk where the model has states",
        (
            ask.given("chunk_tokens", "chunk", Unit.TOKENS),
            ask.given("block_tokens", "block", Unit.TOKENS),
            ask.given("tp", "ranks (tp)", Unit.COUNT),
        ),
    )


def transfer_answer(ask: Question) -> Answer:
    """How long a prefix is on its way."""
    tokens = ask.transfer_tokens
    size = ask.moved_bytes(tokens)
    return Answer(
        "transfer",
        f"Moving {tokens:,} tokens",
        (
            Figure("bytes", size, Unit.BYTES),
            *(Figure(it.name, it.seconds(size, ask.tp), Unit.SECONDS, it.source) for it in ask.ways),
        ),
        "latency + bytes / (rate * tp where each GPU has its own link); bytes = whole chunks, of a window those in it, "
        "of a state the last",
        (
            ask.given("transfer_tokens", "tokens", Unit.TOKENS),
            *(
                Input(f"rate of {it.name}", it.effective_bytes_s, Unit.BYTES_S, _way_origin(ask, it.name))
                for it in ask.ways
            ),
        ),
    )


def _way_origin(ask: Question, name: str) -> Origin:
    return ask.origins.get(f"way {name}", Origin.TABLE)


def capacity_answer(ask: Question) -> Answer:
    """How many requests fit, with and without tiers below."""
    tokens, fit = ask.length_tokens, ask.fit(ask.length_tokens)
    return Answer(
        "capacity",
        f"Requests of {tokens:,} tokens",
        (
            Figure("memory for KV, an instance", ask.room_bytes, Unit.BYTES),
            Figure("one request", ask.device_bytes(tokens), Unit.BYTES),
            Figure("without offload, an instance", fit.running, Unit.REQUESTS),
            Figure("without offload, a GPU", fit.running / ask.tp, Unit.REQUESTS),
            Figure("with HOST, a GPU", (fit.running + fit.host) / ask.tp, Unit.REQUESTS),
            Figure("with HOST and DISK, a GPU", fit.sessions / ask.tp, Unit.REQUESTS),
        ),
        "memory = tp * (GPU memory * utilization - reserve) - weights; without = memory / request, rounded down; "
        "with = without + tier * tp / GPUs a host / what a request needs to go on: sessions that wait are below, those "
        "that run are as many as without",
        (
            Input("GPU memory", ask.gpu.memory_bytes, Unit.BYTES, ask.gpu_origin),
            ask.given("tp", "GPUs an instance (tp)", Unit.COUNT),
            ask.given("utilization", "utilization", Unit.SHARE),
            ask.given("reserve_bytes", "reserve for activations, a GPU", Unit.BYTES),
            Input("weights", ask.shape.weight_bytes, Unit.BYTES, Origin.COMPUTED),
            ask.given("dram_bytes", "HOST, a host", Unit.BYTES),
            ask.given("ssd_bytes", "DISK, a host", Unit.BYTES),
            ask.given("host_gpus", "GPUs a host", Unit.COUNT),
        ),
    )


def device_tokens(ask: Question) -> int:
    """Tokens of KV that an instance's GPUs hold, as requests of the asked length have them."""
    return int(ask.room_bytes * ask.length_tokens // ask.device_bytes(ask.length_tokens))


def tier_tokens(ask: Question) -> tuple[int, int, int]:
    """Tokens that the fleet's tiers hold together: DEVICE, with HOST, with HOST and DISK."""
    stored = chunk_bytes(ask.stored) / ask.chunk_tokens
    device = ask.instances * device_tokens(ask)
    host = ask.instances * ask.host_share_bytes / stored
    disk = ask.instances * ask.disk_share_bytes / stored
    return device, int(device + host), int(device + host + disk)


def tiers_answer(ask: Question) -> Answer | None:
    """Tier sizes for hit rates on a trace; None without one."""
    curve = ask.curve
    if curve is None:
        return None
    stored = chunk_bytes(ask.stored) / ask.chunk_tokens
    figures = [Figure("the most there is to hit", curve.most, Unit.SHARE)]
    for rate in ask.hit_rates or tuple(share * curve.most for share in SHARES_OF_MOST):
        blocks, name = curve.blocks_for(rate), f"for {100 * rate:.1f} %"
        if blocks is None:
            figures.append(Figure(name, None, Unit.BYTES, f"no cache reaches it: the most is {100 * curve.most:.1f} %"))
        else:
            tokens = blocks * curve.block_tokens
            figures.append(Figure(name, tokens * stored, Unit.BYTES, f"{tokens:,} tokens"))
    for name, tokens in zip(("DEVICE", "DEVICE and HOST", "DEVICE, HOST and DISK"), tier_tokens(ask), strict=True):
        rate = curve.rate(tokens // curve.block_tokens)
        figures.append(
            Figure(f"hit rate of {name}", rate, Unit.SHARE, f"{tokens:,} tokens of {ask.instances} instances")
        )
    return Answer(
        "tiers",
        "Tier sizes for a hit rate",
        tuple(figures),
        "a block hits in an LRU cache of at least its stack distance, the blocks used since it was; size = blocks * "
        "tokens of a block * bytes of a token in the cache; one cache that all instances share",
        (
            Input("input tokens of the trace", curve.input_tokens, Unit.TOKENS, Origin.FILE),
            Input("block of the trace", curve.block_tokens, Unit.TOKENS, Origin.FILE),
            Input("a token in the cache", stored, Unit.BYTES, Origin.COMPUTED),
            ask.given("instances", "instances", Unit.COUNT),
        ),
    )
