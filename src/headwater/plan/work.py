"""The answers about time and money: speed, fetch or recompute, prefill and decode apart, cost."""

from __future__ import annotations

from headwater.plan.answer import Answer, Figure, Input, Origin, Unit
from headwater.plan.cost import Cost, instance_dollars_s, tiers_dollars_s, token_cost
from headwater.plan.fetch import changes, least_fetch_bytes_s, saved_s
from headwater.plan.links import WAYS, WayIn
from headwater.plan.question import Question
from headwater.plan.shapes import LayerKind
from headwater.plan.speed import Roofline
from headwater.plan.split import Load, Split, split

REUSED_TOKENS = 8192
"""The prefix for which the rate that pays is told."""
BATCHES = (1, 8, 64)
EVEN = 0.02
"""Less than this is no difference: the formulas are not that exact."""


def speed_inputs(ask: Question) -> tuple[Input, ...]:
    """What step times are made of."""
    if ask.times is not None:
        it = ask.times
        return (
            Input("prefill of a token", it.prefill_token_s, Unit.SECONDS, Origin.FILE),
            Input("decode step, fixed", it.decode_fixed_s, Unit.SECONDS, Origin.FILE),
            Input("decode step, a token of KV", it.decode_kv_s, Unit.SECONDS, Origin.FILE),
        )
    return (
        Input(f"FLOP/s of {ask.gpu.name}, bf16 dense", ask.gpu.flops_s, Unit.FLOPS_S, ask.gpu_origin),
        Input(f"memory bandwidth of {ask.gpu.name}", ask.gpu.memory_bytes_s, Unit.BYTES_S, ask.gpu_origin),
        ask.given("mfu", "mfu", Unit.SHARE),
        ask.given("mbu", "mbu", Unit.SHARE),
        ask.given("tp", "GPUs an instance (tp)", Unit.COUNT),
    )


def load(ask: Question, reuse: float) -> Load:
    """The plan's one kind of request when a share of its input is cached, in whole chunks, and fetched from HOST."""
    cached = int(ask.input_tokens * reuse) // ask.chunk_tokens * ask.chunk_tokens
    # At least one token is computed: the one that gives the first output token.
    cached = min(cached, ask.input_tokens - 1)
    fetch_s = WAYS[ask.gpu.host_way].seconds(ask.moved_bytes(cached), ask.tp) if cached else 0.0
    return Load(ask.input_tokens, cached, ask.output_tokens, ask.ttft_slo_s - fetch_s, ask.tpot_slo_s)


def both_ways(ask: Question, reuse: float) -> Split:
    """Prefill and decode together and apart."""
    it = load(ask, reuse)
    longest = ask.input_tokens + ask.output_tokens
    batch = min(ask.batch_max, ask.room_bytes // ask.device_bytes(longest))
    if ask.times is not None:
        batch = min(batch, ask.times.requests_max)
    size = ask.moved_bytes(ask.input_tokens)
    handoff_s = ask.handoff.seconds(size, ask.tp)
    return split(ask.speed, it, batch, handoff_s, ask.handoff.rate_bytes_s(ask.tp) / size)


def speed_answer(ask: Question) -> Answer:
    """Prefill and decode of the plan's request."""
    tokens, context = ask.input_tokens, load(ask, 0.0).mean_context
    prefill_s = ask.speed.prefill_s(tokens)
    measured = not isinstance(ask.speed, Roofline)
    figures = [
        Figure(f"prefill of {tokens:,} tokens", prefill_s, Unit.SECONDS),
        Figure("prefill tokens a second", tokens / prefill_s, Unit.COUNT),
        *(
            Figure(f"decode step of {batch}", ask.speed.decode_s(batch, batch * context), Unit.SECONDS)
            for batch in BATCHES
        ),
    ]
    return Answer(
        "speed",
        "Step times, measured" if measured else "Step times, by roofline",
        tuple(figures),
        "EngineTimes: prefill = fixed + n * (token + token2 * n + context * c), step by step; decode = fixed + "
        "request * r + kv * t + kv2 * t^2"
        if measured
        else "prefill = max((2 * active weights * n + attention) / (tp * FLOP/s * mfu), weights / (tp * bandwidth * "
        "mbu)), attention = layers * 4 * heads * head_dim * n^2 / 2; decode = max((weights + batch * KV) / (tp * "
        "bandwidth * mbu), operations / (tp * FLOP/s * mfu))",
        (
            ask.given("input_tokens", "input", Unit.TOKENS),
            ask.given("output_tokens", "output", Unit.TOKENS),
            *speed_inputs(ask),
        ),
    )


def fetch_answer(ask: Question) -> Answer:
    """From which length on fetching wins, by link; and the rate that pays."""
    lengths = range(ask.chunk_tokens, max(ask.length_tokens, ask.chunk_tokens) + 1, ask.chunk_tokens)
    compute = {tokens: saved_s(ask.speed, tokens) for tokens in lengths}
    figures = [_fetch_figure(ask, way, lengths, compute) for way in ask.ways]
    tokens = -(-REUSED_TOKENS // ask.chunk_tokens) * ask.chunk_tokens
    rate = ask.moved_bytes(tokens) / saved_s(ask.speed, tokens)
    figures.append(Figure(f"rate that pays for {tokens:,} tokens", rate, Unit.BYTES_S, "bytes / prefill that is saved"))
    if (theirs := _mooncake(ask, tokens)) is not None:
        figures.append(Figure("the same by Mooncake's condition", theirs, Unit.BYTES_S, "at full FLOP/s"))
    return Answer(
        "fetch",
        "Fetching is quicker than computing",
        tuple(figures),
        "latency + bytes(n) / rate < prefill(n + 1) - prefill(1 after n), for n of whole chunks up to the length; "
        "Mooncake (FAST'25, section 3): "
        "rate > FLOP/s * 2ds / (gqa * (4pd + 22d^2))",
        (
            ask.given("length_tokens", "length", Unit.TOKENS),
            *speed_inputs(ask),
            *(Input(f"latency of {it.name}", it.latency_s, Unit.SECONDS, _origin(ask, it)) for it in ask.ways),
        ),
    )


def _origin(ask: Question, way: WayIn) -> Origin:
    return ask.origins.get(f"way {way.name}", Origin.TABLE)


def _fetch_figure(ask: Question, way: WayIn, lengths: range, compute: dict[int, float]) -> Figure:
    found = changes(lengths, lambda tokens: way.seconds(ask.moved_bytes(tokens), ask.tp), compute.__getitem__)
    if len(found) == 1 and not found[0].fetching:
        return Figure(way.name, None, Unit.TOKENS, f"never up to {lengths[-1]:,} tokens ({way.source})")
    first = next(it for it in found if it.fetching)
    later = [f"{'again ' if it.fetching else 'not '}from {it.tokens:,}" for it in found if it.tokens > first.tokens]
    return Figure(
        way.name,
        first.tokens,
        Unit.TOKENS,
        ", ".join(["and longer" if not later else "", *later, way.source]).strip(", "),
    )


def _mooncake(ask: Question, tokens: int) -> float | None:
    group, *others = ask.shape.groups
    if others or group.kind is not LayerKind.FULL or ask.times is not None or ask.shape.weights.routed:
        return None
    gqa = 2 * ask.shape.hidden_size / group.token_elements
    return least_fetch_bytes_s(tokens, ask.shape.hidden_size, gqa, ask.kv_width, ask.gpu.flops_s * ask.tp)


def split_answer(ask: Question) -> Answer:
    """Whether prefill and decode should be apart."""
    found = both_ways(ask, ask.reuse)
    late = "no load meets the SLOs"
    figures = [
        Figure("prefill of what is not cached", found.prefill_s, Unit.SECONDS),
        Figure("hand-off", found.handoff_s, Unit.SECONDS, f"over {ask.handoff.name}"),
        Figure("together, an instance", found.together, Unit.REQUESTS_S, _batch(found.together, found.together_batch)),
        Figure("a prefill instance", found.prefill, Unit.REQUESTS_S, "" if found.prefill else late),
        Figure("a decode instance", found.decode, Unit.REQUESTS_S, _batch(found.decode, found.decode_batch)),
        Figure("apart, an instance at the best ratio", found.apart, Unit.REQUESTS_S, "" if found.apart else late),
    ]
    prefills = found.best_prefills(ask.instances)
    figures.append(Figure("prefill instances a decode instance", found.ratio, Unit.COUNT, "" if found.ratio else late))
    fleet, apart = f"the {ask.instances} instances", found.fleet_apart(ask.instances)
    together = ask.instances * found.together if found.together else None
    figures.append(Figure(f"{fleet}, together", together, Unit.REQUESTS_S, "" if together else late))
    ratio = f"P:D = {prefills}:{ask.instances - prefills}" if prefills else late
    figures.append(Figure(f"{fleet}, apart", apart, Unit.REQUESTS_S, ratio))
    figures.append(Figure("does it pay", verdict(together, apart), Unit.TEXT))
    return Answer(
        "split",
        "Prefill and decode apart",
        tuple(figures),
        "P = prefill of what is not cached, m = output; together: tpot = step(b) + b * P / m, rate = 1 / (P + m * "
        "step(b) / b); apart: rates busy / P and b / (m * step(b)), an instance 1 / (1/p + 1/d); "
        "busy <= 2s / (P + 2s), s = TTFT - P - hand-off - fetch; b the largest within TPOT and memory",
        (
            ask.given("input_tokens", "input", Unit.TOKENS),
            ask.given("output_tokens", "output", Unit.TOKENS),
            ask.given("reuse", "reuse", Unit.SHARE),
            ask.given("ttft_slo_s", "TTFT SLO", Unit.SECONDS),
            ask.given("tpot_slo_s", "TPOT SLO", Unit.SECONDS),
            ask.given("batch_max", "largest batch", Unit.COUNT),
            ask.given("instances", "instances", Unit.COUNT),
            Input(
                f"rate of {ask.handoff.name}", ask.handoff.effective_bytes_s, Unit.BYTES_S, _origin(ask, ask.handoff)
            ),
            *speed_inputs(ask),
        ),
    )


def _batch(rate: float | None, batch: int) -> str:
    return f"batch of {batch}" if rate else "no load meets the SLOs"


def verdict(together: float | None, apart: float | None) -> str:
    """Whether a fleet serves more apart, in words; None is a way that does not meet the SLOs."""
    if apart is None:
        return "neither way meets the SLOs" if together is None else "no: apart does not meet the SLOs"
    if together is None:
        return "yes: together does not meet the SLOs"
    gain = apart / together - 1
    if abs(gain) < EVEN:
        return "hardly: both serve about as much"
    return f"{'yes' if gain > 0 else 'no'}: it serves {100 * abs(gain):.0f} % {'more' if gain > 0 else 'less'}"


def costs(ask: Question) -> tuple[Cost, Cost] | None:
    """Without and with the cache; None if no load meets the SLOs."""
    dollars_s, found = instance_dollars_s(ask.prices, ask.tp), []
    tiers_s = tiers_dollars_s(ask.prices, ask.host_share_bytes, ask.disk_share_bytes)
    for reuse, below_s in ((ask.device_reuse, 0.0), (ask.reuse, tiers_s)):
        way = both_ways(ask, reuse)
        if not way.together:
            return None
        batch = way.together_batch
        step_s = ask.speed.decode_s(batch, batch * load(ask, reuse).mean_context)
        found.append(
            token_cost(dollars_s, below_s, ask.input_tokens, way.prefill_s, step_s, batch, way.together, ask.busy)
        )
    return found[0], found[1]


def cost_answer(ask: Question) -> Answer:
    """Dollars for a million tokens."""
    found = costs(ask)
    figures: list[Figure] = []
    if found is None:
        figures.append(Figure("a million tokens", None, Unit.DOLLARS, "no load meets the SLOs"))
    else:
        for name, it in zip(("without the cache", "with it"), found, strict=True):
            figures.append(Figure(f"a million input tokens, {name}", it.input, Unit.DOLLARS))
            figures.append(Figure(f"a million output tokens, {name}", it.output, Unit.DOLLARS))
        figures.append(Figure("the tiers, a million input tokens", found[1].cache, Unit.DOLLARS))
        before, after = (it.mixed(ask.input_tokens, ask.output_tokens) for it in found)
        figures.append(Figure("a million tokens of both, without the cache", before, Unit.DOLLARS))
        figures.append(Figure("a million tokens of both, with it", after, Unit.DOLLARS))
        saved = 1 - after / before if before else None
        figures.append(Figure("saved", saved, Unit.SHARE, "" if before else "GPUs cost nothing"))
    prices, priced = ask.prices, ask.origins.get
    return Answer(
        "cost",
        "Cost of a million tokens",
        tuple(figures),
        "input = $ a second * P / input; output = $ a second * step(b) / b; tiers = their $ a second / (rate * input); "
        "all / busy; $ a second = tp * GPU hour / 3600; b and rate as together serves",
        (
            Input("a GPU hour", prices.gpu_hour, Unit.DOLLARS, priced("gpu_price", Origin.ASSUMED)),
            Input("a GB of DRAM a month", prices.dram_gb_month, Unit.DOLLARS, priced("dram_price", Origin.ASSUMED)),
            Input("a GB of SSD a month", prices.ssd_gb_month, Unit.DOLLARS, priced("ssd_price", Origin.ASSUMED)),
            ask.given("reuse", "reuse with the cache", Unit.SHARE),
            ask.given("device_reuse", "reuse without", Unit.SHARE),
            ask.given("busy", "busy", Unit.SHARE),
            ask.given("tp", "GPUs an instance (tp)", Unit.COUNT),
            ask.given("dram_bytes", "HOST, a host", Unit.BYTES),
            ask.given("ssd_bytes", "DISK, a host", Unit.BYTES),
        ),
    )
