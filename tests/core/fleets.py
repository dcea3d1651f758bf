"""Fleets and requests to route, made for tests."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Choice, Fleet, Held, Instance, Link, Parts, Place, Role
from headwater.ports import RoutingPolicy
from headwater.types import Tier

# Easy to compute with: 10 ms a step of 4,096 tokens, 0.1 ms a token; decoding 5 ms, 0.1 ms a request, 1 us a KV token.
TIMES = EngineTimes(0.010, 1e-4, decode_fixed_s=5e-3, decode_request_s=1e-4, decode_kv_s=1e-6, step_tokens=4096)


def fleet_of(count: int, times: EngineTimes = TIMES, capacity_tokens: int = 1 << 20, kv_bytes: int = 1000) -> Fleet:
    return Fleet({it: Instance(it, times, capacity_tokens, node=it) for it in range(count)}, kv_bytes)


def ask_of(tokens: int, name: str = "r", output_tokens: int = 100, session: str = "", model: str = "") -> Ask:
    return Ask(name, tokens, (), 16, output_tokens=output_tokens, session=session, model=model)


def on_device(tokens: Mapping[int, int]) -> Held:
    return {Place(Tier.DEVICE, number): count for number, count in tokens.items()}


def on_host(tokens: Mapping[int, int]) -> Held:
    return {Place(Tier.HOST, number): count for number, count in tokens.items()}


def meshed(fleet: Fleet, latency_s: float = 1e-3, bytes_s: float = 1e9) -> Fleet:
    """With a link from each node's HOST to each node."""
    nodes = {it.node for it in fleet.instances.values() if it.node is not None}
    fleet.links = {(Place(Tier.HOST, source), it): Link(latency_s, bytes_s) for source in nodes for it in nodes}
    return fleet


def route(policy: RoutingPolicy, ask: Ask, held: Held, fleet: Fleet) -> Choice | None:
    """Choose, and do as it says, with the loads that a driver keeps."""
    choice = policy.choose(ask, held, fleet)
    if choice is not None:
        it = fleet.instances[choice.prefill]
        it.waiting_requests += 1
        it.waiting_tokens += ask.tokens - choice.cached_tokens - choice.fetched_tokens
        policy.routed(ask, choice, fleet)
    return choice


def prefer(number: int) -> Choice:
    """A choice made without a policy."""
    return Choice(number, number, Parts())


@st.composite
def fleets(draw: st.DrawFn, roles: bool = True) -> Fleet:
    """Fleets of all kinds: unlike instances, some of them down, loaded, full, of other models; links or none."""
    count = draw(st.integers(1, 6))
    kinds = st.sampled_from(list(Role)) if roles else st.just(Role.BOTH)
    instances = {}
    for number in draw(st.lists(st.integers(0, 40), min_size=count, max_size=count, unique=True)):
        waiting, running = draw(st.integers(0, 9)), draw(st.integers(0, 40))
        step = draw(st.sampled_from([512, 8192]))
        token2, kv = draw(st.sampled_from([0.0, 1e-9])), draw(st.sampled_from([0.0, 1e-8]))
        times = EngineTimes(0.01, draw(st.sampled_from([1e-5, 1e-4])), token2, 1e-9, 5e-3, 1e-4, kv, 0.0, step)
        instances[number] = Instance(
            number,
            times,
            draw(st.sampled_from([1000, 100_000, 1 << 20, 1 << 20])),
            draw(kinds),
            draw(st.sampled_from([None, 0, 1, 2])),
            draw(st.sampled_from(["", "", "", "other"])),
            draw(st.integers(0, 4)) > 0,
            draw(st.integers(0, 4)) == 0,
            draw(st.floats(0, 100)),
            waiting,
            waiting * draw(st.integers(0, 5000)),
            running,
            running * draw(st.integers(0, 5000)),
        )
    fleet = Fleet(instances, draw(st.sampled_from([0, 1000, 100_000])), now=100.0)
    if draw(st.booleans()):
        meshed(fleet, draw(st.floats(0, 0.1)), draw(st.sampled_from([1e6, 1e10])))
    return fleet


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    tokens = draw(st.sampled_from([1, 17, 900, 1001, 30_000, 120_000]))
    return ask_of(tokens, f"r{draw(st.integers(0, 99))}", draw(st.integers(1, 500)), draw(st.sampled_from(["", "s"])))


@st.composite
def helds(draw: st.DrawFn) -> Held:
    """Places, also of instances and nodes that there are not, and also longer than the prompt."""
    places = st.builds(Place, st.sampled_from(list(Tier)), st.integers(0, 40))
    return draw(st.dictionaries(places, st.integers(1, 250_000), max_size=8))
