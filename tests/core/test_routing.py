"""Our policy: its seconds by hand, that more load, less prefix and slower links never attract, and how it spreads."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.routing import Headwater, Knobs, Weighed, can_decode
from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Choice, Fleet, Held, Instance, Link, Parts, Place, Role
from headwater.types import Tier
from tests.core.fleets import TIMES, ask_of, asks, fleet_of, fleets, helds, meshed, on_device, on_host, prefer

PLAIN = Knobs(work=0.0, decode=0.0, late=0.0)
"""What the request itself waits for, and nothing else."""


def chosen(policy: Headwater, ask: Ask, held: Held, fleet: Fleet) -> Choice:
    choice = policy.choose(ask, held, fleet)
    assert choice is not None
    return choice


def weighed(policy: Headwater, ask: Ask, held: Held, fleet: Fleet) -> dict[int, Weighed]:
    return {it.instance: it for it in policy.explain(ask, held, fleet)}


# ---- the seconds


def test_seconds_by_hand() -> None:
    fleet = fleet_of(2)
    first = fleet.instances[0]
    first.waiting_requests, first.waiting_tokens = 2, 3000
    first.running_requests, first.running_tokens = 3, 4000
    found = weighed(Headwater(PLAIN), ask_of(5000), on_device({0: 1000}), fleet)
    # Two requests of 1,500 tokens: 2 x (10 ms + 150 ms). 4,000 tokens are one step: 10 ms + 400 ms.
    assert found[0].queue_s == pytest.approx(0.32)
    assert found[0].prefill_s == pytest.approx(0.41)
    # 100 steps of four requests with 9,000 tokens: 5 ms + 0.4 ms + 9 ms.
    assert found[0].decode_s == pytest.approx(100 * 0.0144)
    assert found[0].parts == (found[0].queue_s, 0.0, found[0].prefill_s, found[0].decode_s, 0.0)
    assert found[0].cost_s == pytest.approx(0.73)
    # 5,000 tokens are two steps.
    assert found[1].cost_s == pytest.approx(found[1].prefill_s) == pytest.approx(0.52)
    choice = chosen(Headwater(PLAIN), ask_of(5000), on_device({0: 1000}), fleet)
    assert (choice.prefill, choice.decode, choice.cached_tokens) == (1, 1, 0)
    assert choice.tpot_s == pytest.approx(5e-3 + 1e-4 + 5e-3)
    assert choice.parts.ttft_s == pytest.approx(0.52)


@pytest.mark.parametrize("tokens", [1500, 4096, 5000, 20_000])
def test_a_queue_of_equal_requests_takes_what_they_take(tokens: int) -> None:
    times = EngineTimes(0.01, 1e-4, 1e-8, 5e-9, step_tokens=4096)
    fleet = fleet_of(1, times)
    fleet.instances[0].waiting_requests, fleet.instances[0].waiting_tokens = 3, 3 * tokens
    queue_s = weighed(Headwater(), ask_of(10), {}, fleet)[0].queue_s
    # Taken as tokens, not as steps: of the fixed part only one is counted, and the last step as long as the others.
    assert queue_s == pytest.approx(3 * times.prefill_s(tokens), rel=0.05)


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize(
    "odd", [{}, {"prefill_token2_s": -1e-9}, {"decode_kv_s": -1e-7}], ids=["fit", "prefill", "decode"]
)
def test_who_is_passed_over_is_not_the_best(links: bool, odd: dict[str, float]) -> None:
    """Among many instances, against all of them weighed; also where times are fits with negative parts."""
    draw, policy, fleet = random.Random(5), Headwater(Knobs(stall=0.01, evict=0.5)), fleet_of(60)
    kinds = [replace(EngineTimes(0.01, 1e-4, 1e-9, 2e-9, 5e-3, 1e-4, 1e-8, 0.0, 4096), **odd) for _ in range(2)]
    for number, it in fleet.instances.items():
        it.times = kinds[number // 7 % 2]
        it.node = None if number % 9 == 0 else number // 4
        it.waiting_requests, it.waiting_tokens = (waits := draw.randrange(4)), waits * draw.randrange(6000)
        it.running_requests, it.running_tokens = (runs := draw.randrange(20)), runs * draw.randrange(4000)
        it.draining = draw.random() < 0.1
    if links:
        meshed(fleet, bytes_s=1e8)
    for number in range(60):
        ask = ask_of(draw.choice([17, 900, 5000, 20_000]), f"r{number}", draw.choice([1, 100, 400]))
        most = range(1, 2 * ask.tokens)
        held = on_device({it: draw.choice(most) for it in draw.sample(range(60), 20)})
        held = {**held, **on_host({it: draw.choice(most) for it in draw.sample(range(15), 4)})}
        best, choice = policy.explain(ask, held, fleet)[0], chosen(policy, ask, held, fleet)
        assert choice.parts == best.parts
        assert (choice.prefill, choice.cached_tokens, choice.fetched_tokens) == (
            best.instance, best.cached_tokens, best.fetched_tokens,
        )  # fmt: skip
        policy.routed(ask, choice, fleet)
        fleet.instances[choice.prefill].waiting_requests += 1
        fleet.instances[choice.prefill].waiting_tokens += ask.tokens - choice.cached_tokens


def test_a_full_instance_is_waited_for() -> None:
    fleet = fleet_of(1, capacity_tokens=10_000)
    it = fleet.instances[0]
    it.running_requests, it.running_tokens = 4, 8000
    # 1,000 of the 8,000 tokens have to go; all are gone after 100 steps of 5 requests: 5 ms + 0.5 ms + 8 ms.
    found = weighed(Headwater(PLAIN), ask_of(3000), {}, fleet)[0]
    assert found.queue_s == pytest.approx(100 * 0.0135 * 1000 / 8000)
    assert weighed(Headwater(PLAIN), ask_of(2000), {}, fleet)[0].queue_s == 0.0


def test_what_a_choice_costs_others() -> None:
    fleet = fleet_of(1)
    it = fleet.instances[0]
    it.running_requests, it.running_tokens = 2, 1000
    ask = ask_of(1000)  # 110 ms; decoding 100 x (5 ms + 0.3 ms + 2 ms)

    def cost_s(knobs: Knobs) -> float:
        return weighed(Headwater(knobs), ask, {}, fleet)[0].cost_s

    assert cost_s(Knobs(work=0.5, decode=0, late=0)) == pytest.approx(0.11 * 1.5)
    assert cost_s(Knobs(work=0, decode=0.1, late=0)) == pytest.approx(0.11 + 0.073)
    assert cost_s(Knobs(work=0, decode=0, late=0, stall=0.5)) == pytest.approx(0.11 * 2)
    it.times = EngineTimes(0.010, 1e-4, decode_kv2_s=-1.0)  # a fit that is out of its range
    assert cost_s(Knobs(work=0, decode=1, late=0)) == pytest.approx(0.11)


def test_late_work_is_paid_beyond_the_mean() -> None:
    fleet, policy = fleet_of(2), Headwater(Knobs(work=0, decode=0, late=0.5, late_over=1.5, late_requests=10))
    ask = ask_of(1000)
    policy.routed(ask, chosen(policy, ask, {}, fleet), fleet)
    # The first has 110 ms, 1.5 x the mean is 82.5 ms.
    found = weighed(policy, ask, {}, fleet)
    assert found[0].cost_s == pytest.approx(0.11 + 0.5 * (0.11 - 0.0825))
    assert found[1].cost_s == pytest.approx(0.11)
    # A choice makes what was before it count 1 / (1 + 1 / 20).
    for _ in range(4):
        policy.routed(ask, Choice(1, 1, Parts(prefill_s=0.11)), fleet)
    old, new = 0.11 / 1.05**4, 0.11 * (1 + 1 / 1.05 + 1 / 1.05**2 + 1 / 1.05**3)
    assert weighed(policy, ask, {}, fleet)[1].cost_s == pytest.approx(0.11 + 0.5 * (new - 0.75 * (old + new)))
    policy.left(0)
    assert weighed(policy, ask, {}, fleet)[1].cost_s == pytest.approx(0.11 + 0.5 * 0.25 * new)


def test_late_work_counts_on_after_very_many_choices() -> None:
    fleet, policy = fleet_of(2), Headwater(Knobs(late_requests=1))
    for _ in range(2000):  # the unit grows by half each time
        policy.routed(ask_of(1000), Choice(0, 0, Parts(prefill_s=0.11)), fleet)
    found = weighed(policy, ask_of(1000), {}, fleet)
    # 110 ms, of which each choice leaves two thirds: 330 ms, 1.25 x 165 ms of which are free.
    assert found[0].cost_s - found[1].cost_s == pytest.approx(0.33 - 1.25 * 0.165)


@pytest.mark.parametrize("links", [False, True])
def test_the_last_token_is_always_computed(links: bool) -> None:
    fleet = fleet_of(2)
    held = {**on_device({0: 1000}), **on_host({1: 1000})}
    found = weighed(Headwater(), ask_of(1000), held, meshed(fleet, bytes_s=1e12) if links else fleet)
    assert (found[0].cached_tokens, found[0].prefill_s) == (999, pytest.approx(0.0101))
    assert (found[1].fetched_tokens, found[1].prefill_s) == ((999, pytest.approx(0.0101)) if links else (0, 0.11))


def test_kv_that_is_pushed_out() -> None:
    fleet = fleet_of(2, capacity_tokens=10_000)
    policy = Headwater(Knobs(work=0, decode=0, late=0, evict=2, evict_s=100))
    policy.routed(ask_of(5000), prefer(0), fleet)
    found = weighed(policy, ask_of(1000), {}, fleet)
    # 5,000 tokens a while: what is there lasts two whiles, and e^-2 of it would still be asked for.
    assert found[0].cost_s - found[1].cost_s == pytest.approx(2 * 1000 * 1e-4 * 2.718281828**-2)
    fleet.now = 100.0
    found = weighed(policy, ask_of(1000), {}, fleet)
    assert found[0].cost_s - found[1].cost_s == pytest.approx(2 * 0.1 * 2.718281828 ** (-2 * 2.718281828), rel=1e-6)


# ---- sources


def test_fetching_by_hand() -> None:
    fleet = meshed(fleet_of(3, kv_bytes=1000), latency_s=0.01, bytes_s=1e8)
    ask = ask_of(4000)  # 410 ms; fetched at 10 us a token, computed at 100 us
    held = {**on_device({0: 1000}), **on_host({1: 3000}), Place(Tier.DISK, 0): 2000}
    fleet.links = {**fleet.links, (Place(Tier.DISK, 0), 0): Link(0.0, 1e9)}
    found = weighed(Headwater(PLAIN), ask, held, fleet)
    # From its own DISK 1,000 tokens at 1 us, or 2,000 at 10 us from node 1, which spares 100 ms more.
    assert (found[0].source, found[0].fetched_tokens) == (Place(Tier.HOST, 1), 2000)
    assert found[0].fetch_s == pytest.approx(0.01 + 0.02)
    assert found[0].prefill_s == pytest.approx(0.11)
    assert found[2].fetch_s == pytest.approx(0.01 + 0.03)
    # A queue on the link turns it to the DISK, or to nothing.
    fleet.links[(Place(Tier.HOST, 1), 0)].queued_bytes = 10_000_000
    fleet.links[(Place(Tier.HOST, 1), 2)].queued_bytes = 100_000_000
    found = weighed(Headwater(PLAIN), ask, held, fleet)
    assert (found[0].source, found[0].fetch_s) == (Place(Tier.DISK, 0), pytest.approx(1e-3))
    assert (found[2].source, found[2].fetch_s, found[2].prefill_s) == (None, 0.0, pytest.approx(0.41))
    assert chosen(Headwater(PLAIN), ask, held, fleet).prefill == 1


@settings(max_examples=25)
@given(asks(), helds(), fleets(roles=False))
def test_no_source_would_have_been_better(ask: Ask, held: Held, fleet: Fleet) -> None:
    """Against every source and every length of it, looked at one by one."""
    for it in Headwater(Knobs(work=0, decode=0, late=0, peers_max=99)).explain(ask, held, fleet):
        instance = fleet.instances[it.instance]
        times, most = instance.times, ask.tokens - 1
        least = times.prefill_s(ask.tokens - it.cached_tokens, it.cached_tokens)
        for (place, node), link in fleet.links.items():
            if node == instance.node and held.get(place, 0) > it.cached_tokens:
                whole = min(held[place], most)
                for until in {whole, (whole + it.cached_tokens) // 2, it.cached_tokens + 1}:
                    if it.cached_tokens < until <= whole:
                        fetch_s = link.seconds((until - it.cached_tokens) * fleet.kv_bytes_per_token)
                        # A step less is a fixed part less, which the argument for all or nothing leaves out.
                        spared = times.prefill_s(ask.tokens - until, until) + times.prefill_fixed_s
                        least = min(least, fetch_s + (spared if until < whole else spared - times.prefill_fixed_s))
        assert it.fetch_s + it.prefill_s <= least + 1e-9


def test_a_slow_link_is_for_what_is_not_there() -> None:
    fleet = fleet_of(1)
    slow = fleet.links = {(Place(Tier.HOST, 0), 0): Link(0.0, 1e5)}  # 10 ms a token
    held = {**on_device({0: 1000}), **on_host({0: 900})}
    assert weighed(Headwater(), ask_of(4000), held, fleet)[0].fetch_s == 0.0
    # At 80 us a token all 3,900 would take longer than computing 1,000, but 900 of them do not.
    slow[(Place(Tier.HOST, 0), 0)].bytes_s = 1000 / 80e-6
    held = {**on_device({0: 3000}), **on_host({0: 3900})}
    found = weighed(Headwater(), ask_of(4000), held, fleet)[0]
    assert (found.fetched_tokens, found.fetch_s) == (900, pytest.approx(0.072))


def test_only_the_longest_of_the_peers_are_looked_at() -> None:
    fleet = meshed(fleet_of(5))
    held = on_host({1: 500, 2: 600, 3: 700, 4: 800})
    for source in (3, 4):
        del fleet.links[(Place(Tier.HOST, source), 0)]
    assert weighed(Headwater(Knobs(peers_max=2)), ask_of(1000), held, fleet)[0].source is None
    assert weighed(Headwater(Knobs(peers_max=3)), ask_of(1000), held, fleet)[0].source == Place(Tier.HOST, 2)
    # Its own node's, and REMOTE, always.
    held = {**held, Place(Tier.HOST, 0): 100}
    assert weighed(Headwater(Knobs(peers_max=1)), ask_of(1000), held, fleet)[0].source == Place(Tier.HOST, 0)
    held[Place(Tier.REMOTE, 0)] = 300
    fleet.links = {**fleet.links, (Place(Tier.REMOTE, 0), 0): Link(0.0, 1e9)}
    assert weighed(Headwater(Knobs(peers_max=1)), ask_of(1000), held, fleet)[0].source == Place(Tier.REMOTE, 0)


# ---- what never attracts


def cost_s(policy: Headwater, ask: Ask, held: Held, fleet: Fleet, number: int) -> float:
    return weighed(policy, ask, held, fleet)[number].cost_s


@settings(max_examples=25)
@given(ask=asks(), held=helds(), fleet=fleets(), more=st.integers(1, 20_000), what=st.integers(0, 3))
def test_load_never_attracts(ask: Ask, held: Held, fleet: Fleet, more: int, what: int) -> None:
    policy = Headwater(Knobs(stall=0.1))
    choice = policy.choose(ask, held, fleet)
    if choice is None:
        return
    it = fleet.instances[choice.prefill]
    before = cost_s(policy, ask, held, fleet, choice.prefill)
    others = [n for n in fleet.instances if n != choice.prefill]
    it.waiting_tokens += more
    if what == 1:
        it.waiting_requests += 1
    elif what == 2:
        it.running_tokens += more
    elif what == 3:
        it.running_requests += 1
    assert cost_s(policy, ask, held, fleet, choice.prefill) >= before
    # Who was not chosen before is not chosen for its load.
    for number in others:
        fleet.instances[number].waiting_tokens += more
    it.waiting_tokens -= more
    it.running_tokens -= more if what == 2 else 0
    it.running_requests -= 1 if what == 3 else 0
    it.waiting_requests -= 1 if what == 1 else 0
    again = policy.choose(ask, held, fleet)
    assert again is not None and again.prefill == choice.prefill


@settings(max_examples=25)
@given(ask=asks(), held=helds(), fleet=fleets(roles=False), more=st.integers(1, 5000), data=st.data())
def test_more_prefix_and_faster_links_attract(
    ask: Ask, held: Held, fleet: Fleet, more: int, data: st.DataObject
) -> None:
    policy = Headwater()
    found = weighed(policy, ask, held, fleet)
    if not found:
        return
    number = data.draw(st.sampled_from(sorted(found)))
    place = Place(Tier.DEVICE, number)
    longer = {**held, place: held.get(place, 0) + more}
    assert cost_s(policy, ask, longer, fleet, number) <= found[number].cost_s + 1e-9
    choice = chosen(policy, ask, held, fleet)
    place = Place(Tier.DEVICE, choice.prefill)
    assert chosen(policy, ask, {**held, place: held.get(place, 0) + more}, fleet).prefill == choice.prefill
    for (_, node), link in fleet.links.items():
        if node == fleet.instances[number].node:
            link.bytes_s *= 2
    assert cost_s(policy, ask, held, fleet, number) <= found[number].cost_s + 1e-9


# ---- spreading and staying


@pytest.mark.parametrize(("system", "own"), [(500, 500), (1024, 1000), (4000, 500), (8000, 500)])
def test_an_idle_fleet_spreads_around_one_system_prompt(system: int, own: int) -> None:
    policy, fleet = Headwater(), fleet_of(4)
    counts, held = [0] * 4, {}
    for number in range(400):
        ask = ask_of(system + own, f"r{number}")
        choice = chosen(policy, ask, held, fleet)
        policy.routed(ask, choice, fleet)
        policy.finished(ask, choice)
        counts[choice.prefill] += 1
        held[Place(Tier.DEVICE, choice.prefill)] = system
        fleet.now += 10.0
    assert max(counts) / 100 <= 1.5, counts


def test_sessions_stay_where_they_are() -> None:
    policy, fleet, draw = Headwater(), fleet_of(4), random.Random(3)
    home: dict[int, tuple[int, int]] = {}
    moves = turns = 0
    for number in range(600):
        session = draw.randrange(60)
        where, length = home.get(session, (-1, 0))
        ask = ask_of(length + 1000, f"r{number}")
        choice = chosen(policy, ask, on_device({where: length}) if length else {}, fleet)
        policy.routed(ask, choice, fleet)
        turns += length > 0
        moves += length > 0 and choice.prefill != where
        home[session] = choice.prefill, length + 1000
    assert moves <= 0.02 * turns, f"{moves} of {turns}"


def test_sticky_until_moving_is_worth_it() -> None:
    fleet = fleet_of(2)
    ask, held = ask_of(4000), on_device({0: 2500})
    it = fleet.instances[0]
    it.waiting_requests = 1
    sticky = Headwater(Knobs(work=0, decode=0, late=0, sticky_s=0.1))
    # 410 ms there, 160 ms here and what waits: from 240 ms on it would be better there, from 340 ms on it is worth it.
    for waiting, loose, home in ((2300, 0, 0), (2700, 1, 0), (3200, 1, 0), (3600, 1, 1)):
        it.waiting_tokens = waiting
        assert chosen(Headwater(PLAIN), ask, held, fleet).prefill == loose
        assert chosen(sticky, ask, held, fleet).prefill == home
    # What is held of less than half of a prompt makes nobody stay.
    it.waiting_tokens = 2700
    assert chosen(sticky, ask_of(5200), held, fleet).prefill == 1


def test_equal_ones_take_turns() -> None:
    policy, fleet = Headwater(PLAIN), fleet_of(3)
    order = []
    for number in range(6):
        ask = ask_of(1000, f"r{number}")
        choice = chosen(policy, ask, {}, fleet)
        policy.routed(ask, choice, fleet)
        order.append(choice.prefill)
    assert order == [0, 1, 2, 0, 1, 2]
    policy.left(2)  # whoever gets its number is new
    assert chosen(policy, ask_of(1000), {}, fleet).prefill == 2


def test_loads_that_lag_far_behind_are_not_believed() -> None:
    """Whom they call idle has been given everything since."""
    fleet = fleet_of(3)
    loaded = fleet.instances[0]
    loaded.waiting_requests, loaded.waiting_tokens, loaded.running_requests, loaded.running_tokens = (
        3,
        50_000,
        8,
        90_000,
    )
    for late_s, expected in ((PLAIN.stale_s, [1, 2, 1, 2]), (PLAIN.stale_s + 1, [0, 1, 2, 0])):
        policy, order = Headwater(PLAIN), []
        for it in fleet.instances.values():
            it.late_s = late_s
        for number in range(4):
            ask = ask_of(1000, f"r{number}")
            choice = chosen(policy, ask, {}, fleet)
            policy.routed(ask, choice, fleet)
            order.append(choice.prefill)
        assert order == expected, late_s


# ---- prefill and decode apart


def apart(prefills: int, decodes: int) -> Fleet:
    fleet = meshed(fleet_of(prefills + decodes, kv_bytes=1000), latency_s=0.01, bytes_s=1e8)
    for number, it in fleet.instances.items():
        it.role = Role.PREFILL if number < prefills else Role.DECODE
    return fleet


def test_a_pair_by_hand() -> None:
    fleet = apart(2, 2)
    fleet.instances[0].waiting_requests, fleet.instances[0].waiting_tokens = 1, 2000  # 210 ms
    fleet.links[(Place(Tier.HOST, 1), 2)].queued_bytes = 100_000_000  # 1 s
    fleet.links[(Place(Tier.HOST, 1), 3)].queued_bytes = 10_000_000  # 100 ms
    choice = chosen(Headwater(PLAIN), ask_of(1000), {}, fleet)
    assert (choice.prefill, choice.decode) == (1, 3)
    assert choice.parts == (0.0, 0.0, pytest.approx(0.11), pytest.approx(100 * 6.1e-3), pytest.approx(0.12))
    assert choice.parts.ttft_s == pytest.approx(0.23)
    fleet.links[(Place(Tier.HOST, 1), 3)].queued_bytes = 30_000_000  # 300 ms: now waiting is less
    assert chosen(Headwater(PLAIN), ask_of(1000), {}, fleet).prefill == 0


def test_a_pair_on_one_node_or_in_one_instance_hands_off_at_once() -> None:
    fleet = apart(2, 2)
    fleet.instances[1].node = fleet.instances[3].node = 9
    choice = chosen(Headwater(), ask_of(1000), {}, fleet)
    assert (choice.prefill, choice.decode, choice.parts.handoff_s) == (1, 3, 0.0)
    fleet = apart(2, 2)
    fleet.instances[1].role = Role.BOTH
    fleet.links = {}
    choice = chosen(Headwater(), ask_of(1000), {}, fleet)
    assert (choice.prefill, choice.decode, choice.parts.handoff_s) == (1, 1, 0.0)
    fleet.instances[1].alive = False
    assert Headwater().choose(ask_of(1000), {}, fleet) is None


def test_decoding_is_evened_out_among_decodes() -> None:
    fleet, policy = apart(1, 3), Headwater()
    for number in range(9):
        ask = ask_of(1000, f"r{number}")
        choice = chosen(policy, ask, {}, fleet)
        policy.routed(ask, choice, fleet)
        it = fleet.instances[choice.decode]
        it.running_requests, it.running_tokens = it.running_requests + 1, it.running_tokens + 1000
    assert [fleet.instances[number].running_requests for number in (1, 2, 3)] == [3, 3, 3]


def test_pairs_beyond_the_best_are_tried_where_those_do_not_meet() -> None:
    fleet = apart(6, 6)
    for number in range(5):
        fleet.instances[number + 1].waiting_tokens = fleet.instances[11 - number].running_tokens = 5000
    fleet.links = {(Place(Tier.HOST, 5), 11): Link(0.0, 1e9)}
    choice = chosen(Headwater(Knobs(pairs_max=2)), ask_of(1000), {}, fleet)
    assert (choice.prefill, choice.decode) == (5, 11)


@settings(max_examples=25)
@given(ask=asks(), held=helds(), fleet=fleets())
def test_no_pair_would_have_been_better(ask: Ask, held: Held, fleet: Fleet) -> None:
    knobs = Knobs(late=0, pairs_max=99)
    choice = Headwater(knobs).choose(ask, held, fleet)
    if choice is None or all(it.role is Role.BOTH for it in fleet.instances.values()):
        return

    def total(first: Weighed, last: Instance) -> float | None:
        source = fleet.instances[first.instance]
        link = fleet.links.get((Place(Tier.HOST, source.node if source.node is not None else -1), last.node or 0))
        if source is last or (source.node is not None and source.node == last.node):
            handoff = 0.0
        elif link is None or last.node is None:
            return None
        else:
            handoff = link.seconds(ask.tokens * fleet.kv_bytes_per_token)
        tpot_s = last.times.decode_s(last.running_requests + 1, last.running_tokens + ask.tokens)
        return first.cost_s + handoff + knobs.decode * ask.output_tokens * tpot_s

    found = weighed(Headwater(knobs), ask, held, fleet)
    totals = [
        (sum_s, first.instance, last.number)
        for first in found.values()
        for last in fleet.instances.values()
        if can_decode(ask, last) and (sum_s := total(first, last)) is not None
    ]
    mine = total(found[choice.prefill], fleet.instances[choice.decode])
    assert mine is not None and mine <= min(totals)[0] + 1e-9


def test_times_of_one_instance_are_not_taken_for_anothers() -> None:
    fleet = fleet_of(3)
    fleet.instances[1].times = EngineTimes(0.010, 0.5e-4, step_tokens=4096)
    found = weighed(Headwater(PLAIN), ask_of(1000), {}, fleet)
    assert [found[it].prefill_s for it in range(3)] == [pytest.approx(it) for it in (0.11, 0.06, 0.11)]
    assert TIMES.prefill_s(1000) == pytest.approx(0.11)
