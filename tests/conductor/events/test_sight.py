"""Who holds what: what was routed, what events confirm, what nodes tell; by salt, by model, by rank."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from headwater.conductor.events.batches import Batch, read_batch
from headwater.conductor.events.device import CAPACITY_TOKENS
from headwater.conductor.events.hottest import Hottest
from headwater.conductor.events.namespaces import RECORDS_MAX, Base, Registration
from headwater.conductor.events.recent import PROMPTS_KEPT, TOKENS_KEPT
from headwater.conductor.job import Lens
from headwater.conductor.sight import Sight
from headwater.core.hashing import chunk_keys
from headwater.fleet import Place
from headwater.fleetfile.model import InstanceSpec
from headwater.types import Namespace, Tier

RECORD = Namespace("fingerprint", "bf16", "cpu", "g", tenant="t")
BASE = Base(RECORD.root(), RECORD)
IDS = list(range(100, 260))
DEVICE = [Place(Tier.DEVICE, number) for number in range(4)]


def spec(name: str = "a", **changes: object) -> InstanceSpec:
    return replace(InstanceSpec(name, "path", "m", node="n0", block_tokens=16), **changes)


def registration(instance: str = "a.x", chunk_tokens: int = 32, base: Base = BASE) -> Registration:
    return Registration(instance, base, chunk_tokens, 1000)


def stored(ids: list[int], *, first: int = 0, size: int = 16, parent: int | None = None, **more: object) -> Batch:
    """An event for these tokens' blocks, with names counted from `first`."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + len(ids) // size)),
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": size,
        "medium": "GPU",
        **more,
    }
    return read_batch(msgspec.msgpack.encode([1.0, [event], 0]))


def removed(*names: int, **more: object) -> Batch:
    event = {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **more}
    return read_batch(msgspec.msgpack.encode([1.0, [event], 0]))


def held(sight: Sight, ids: list[int] = IDS, salt: str = "", model: str = "m") -> dict[Place, int]:
    return dict(sight.held(model, sight.lenses(model, salt, ids)))


# ---- what was routed ----------------------------------------------------------------------------------------


def test_what_was_routed_is_held_at_once_and_lost_again() -> None:
    sight = Sight()
    sight.joined(0, spec())
    lenses = sight.lenses("m", "", IDS)
    sight.expect(0, lenses)
    assert held(sight) == {DEVICE[0]: 160}
    sight.expect(0, lenses)
    sight.unexpect(0, lenses)
    assert held(sight) == {DEVICE[0]: 160}
    sight.unexpect(0, lenses)
    assert held(sight) == {}
    sight.unexpect(0, lenses)


def test_what_events_confirm_stays_when_a_request_is_lost() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    lenses = sight.lenses("m", "", IDS)
    sight.expect(0, lenses)
    device.apply(0, stored(IDS[:64]))
    assert device.expected == 6
    sight.unexpect(0, lenses)
    assert held(sight) == {DEVICE[0]: 64}
    sight.expect(0, lenses)
    assert device.expected == 6
    device.apply(0, removed(3))
    sight.unexpect(0, lenses)
    assert held(sight) == {DEVICE[0]: 48}


def test_without_events_those_expected_longest_ago_go_first() -> None:
    sight = Sight()
    device = sight.joined(0, spec(capacity_tokens=320))
    prompts = [[number] * 160 for number in range(3)]
    for ids in (prompts[0], prompts[1], prompts[0], prompts[2]):
        sight.expect(0, sight.lenses("m", "", ids))
    assert [held(sight, ids).get(DEVICE[0], 0) for ids in prompts] == [160, 0, 160]
    assert device.expected == 20
    sight.expect(0, sight.lenses("m", "", prompts[1][:32]))
    # Of the one that is oldest now, the end goes first.
    assert [held(sight, ids).get(DEVICE[0], 0) for ids in prompts] == [128, 32, 160]


def test_what_was_expected_is_void_when_an_engine_has_cleared_its_cache() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    sight.expect(0, sight.lenses("m", "", IDS))
    device.apply(0, read_batch(msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0])))
    assert (held(sight), device.expected) == ({}, 0)


def test_expectations_are_bounded_without_a_capacity() -> None:
    sight = Sight()
    device = sight.joined(0, spec(block_tokens=1024))
    for number in range(4):
        sight.expect(0, sight.lenses("m", "", range(number * 100_000, number * 100_000 + 100_000)))
    assert device.expected == CAPACITY_TOKENS // 1024


# ---- events -------------------------------------------------------------------------------------------------


def test_salts_are_caches_of_their_own() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    device.apply(0, stored(IDS, extra_keys=[["s"], *[None] * 9]))
    device.apply(0, stored(IDS[:32], first=50, extra_keys=[[["cache_salt", "tagged"]], None]))
    assert held(sight) == {}
    assert held(sight, salt="s") == {DEVICE[0]: 160}
    assert held(sight, salt="tagged") == {DEVICE[0]: 32}
    assert held(sight, salt="t") == {}
    device.apply(0, stored([1] * 16, first=20, parent=9))
    assert held(sight, [*IDS, *[1] * 16], "s") == {DEVICE[0]: 176}


@pytest.mark.parametrize(
    "more",
    [
        {"lora_name": "l"},
        {"lora_id": 3},
        {"extra_keys": [[["image", 5]], None]},
        {"extra_keys": [["s", ["image", 5]], None]},
        {"extra_keys": [[b"embeds"], None]},
    ],
    ids=["lora_name", "lora_id", "media", "salt_and_media", "embeds"],
)
def test_what_cannot_be_keyed_is_counted_and_left_out_with_what_follows(more: dict[str, object]) -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    device.apply(0, stored(IDS[:32], **more))
    device.apply(0, stored(IDS[32:48], first=2, parent=1))
    assert (device.sums.passed, device.sums.orphans, device.sums.malformed, len(sight.index)) == (3, 0, 0, 0)
    device.apply(0, removed(0, 1, 2))
    device.apply(0, stored(IDS[:32]))
    assert held(sight) == {DEVICE[0]: 32}


def test_what_was_left_out_is_remembered_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.conductor.events.device.PASSED_MAX", 5)
    device = Sight().joined(0, spec())
    device.apply(0, stored(IDS, lora_name="l"))
    assert list(device._passed) == [5, 6, 7, 8, 9]


def test_a_name_that_is_given_to_another_block_takes_the_first_away() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    device.apply(0, stored(IDS))
    device.apply(0, stored([7] * 16, first=9))
    assert held(sight) == {DEVICE[0]: 144}
    assert held(sight, [7] * 16) == {DEVICE[0]: 16}


def test_records_of_a_model_are_few() -> None:
    sight = Sight(["n0"])
    sight.joined(0, spec())
    sight.registered(0, [registration(f"a.{size}", size) for size in range(20, 60)])
    assert len(sight.lenses("m", "", IDS)) == RECORDS_MAX + 1


def test_media_end_what_can_be_keyed() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    device.apply(0, stored(IDS[:64], extra_keys=[None, None, [["image", 5]], None]))
    assert held(sight) == {DEVICE[0]: 32}
    assert device.sums.passed == 2


def test_only_the_engines_own_memory_and_one_kv_group_count() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    for medium in ("CPU", "STORAGE"):
        device.apply(0, stored(IDS, medium=medium))
    device.apply(0, stored(IDS, group_idx=1))
    device.apply(0, stored(IDS, group_idx=1, kv_cache_spec_kind="sliding_window"))
    assert held(sight) == {}
    assert device.sums.foreign == 40
    device.apply(0, stored(IDS[:32], group_idx=0, kv_cache_spec_kind="sliding_window", medium=None))
    assert held(sight) == {DEVICE[0]: 32}
    device.apply(0, stored(IDS[:64], group_idx=1, kv_cache_spec_kind="full_attention"))
    assert held(sight) == {DEVICE[0]: 64}
    device.apply(0, removed(0, group_idx=0))
    assert held(sight) == {DEVICE[0]: 64}
    device.apply(0, removed(0, group_idx=1))
    assert held(sight) == {}


def test_blocks_whose_parents_nobody_has_heard_of_are_left_out_until_they_come_again() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    device.apply(0, stored(IDS[16:], first=1, parent=0))
    assert (device.sums.orphans, held(sight)) == (9, {})
    device.apply(0, stored(IDS))
    assert held(sight) == {DEVICE[0]: 160}


def test_a_block_size_is_learned_and_blocks_that_are_not_full_are_left_out() -> None:
    sight = Sight()
    device = sight.joined(0, spec(block_tokens=None))
    device.apply(0, stored(IDS, size=32))
    assert held(sight) == {DEVICE[0]: 160}
    device.apply(0, stored(IDS[:8], first=90, size=8, parent=4))
    assert device.sums.passed == 1
    assert held(sight) == {DEVICE[0]: 160}
    device.apply(0, stored(IDS[:64], size=64))
    assert held(sight) == {DEVICE[0]: 64}


def test_what_an_instance_says_of_itself_counts_until_events_do() -> None:
    sight = Sight()
    again: list[int] = []
    sight.on_again = again.append
    device = sight.joined(0, spec(block_tokens=None))
    sight.learned(0, block_tokens=32, capacity_tokens=64)
    sight.learned(0, block_tokens=32)
    sight.learned(9, block_tokens=32)
    assert (again, device.capacity_tokens, sight.lenses("m", "", IDS)[0].tokens) == ([0], 64, 32)
    device.apply(0, stored(IDS, size=16))
    sight.learned(0, block_tokens=32)
    assert held(sight) == {DEVICE[0]: 160}
    sight.restarted(0)
    assert (again, held(sight)) == ([0, 0], {})


def test_what_comes_after_an_instance_has_left_is_passed_over() -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    newer = sight.joined(0, spec())
    device.apply(0, stored(IDS))
    assert held(sight) == {}
    newer.apply(0, stored(IDS))
    assert held(sight) == {DEVICE[0]: 160}


@pytest.mark.parametrize(
    "bad",
    [stored(IDS, block_size=17), stored(IDS[:16], size=16, token_ids=[-1] * 16), stored([], size=1, block_size=0)],
    ids=["tokens", "negative", "no_tokens"],
)
def test_events_that_mean_nothing_leave_nothing(bad: Batch) -> None:
    sight = Sight()
    device = sight.joined(0, spec())
    device.apply(0, stored(IDS))
    device.apply(0, bad)
    assert device.sums.malformed == 1
    assert held(sight) == {}
    device.apply(0, stored(IDS))
    assert held(sight) == {DEVICE[0]: 160}


def test_the_best_rank_counts_for_its_instance() -> None:
    sight = Sight()
    device = sight.joined(2, spec(ranks=2))
    device.apply(0, stored(IDS[:32]))
    device.apply(1, stored(IDS[:96]))
    assert held(sight) == {DEVICE[2]: 96}
    assert sight.query("m", IDS)["a"]["DP"] == {"0": 32, "1": 96}
    assert sight.by_rank(2, sight.lenses("m", "", IDS)) == [32, 96]
    assert sight.by_rank(3, sight.lenses("m", "", IDS)) == sight.by_rank(2, ()) == ()
    assert sight.query_by_hash(list(range(10)))["a"] == {
        "longest_matched": 96,
        "GPU": 96,
        "CPU": 0,
        "DISK": 0,
        "DP": {"0": 32, "1": 96},
    }
    sight.expect(2, sight.lenses("m", "", IDS))
    assert held(sight) == {DEVICE[2]: 160}
    device.apply(0, stored(IDS))
    assert held(sight) == {DEVICE[2]: 160}
    device.apply(1, removed(5))
    assert device.expected == 9
    assert sight.query("m", IDS)["a"]["DP"] == {"0": 160, "1": 80}
    device.apply(1, stored(IDS[80:96], first=5, parent=4))
    sight.expect(2, sight.lenses("m", "", IDS))
    assert held(sight) == {DEVICE[2]: 160}
    device.forget(0)
    assert held(sight) == {DEVICE[2]: 96}
    sight.left(2)
    assert held(sight) == {}


# ---- nodes --------------------------------------------------------------------------------------------------


def test_nodes_count_in_chunks_and_engines_in_blocks() -> None:
    sight = Sight(["n0", "n1"])
    device = sight.joined(0, spec())
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16]
    sight.registered(0, [registration()])
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16, 32]
    device.apply(0, stored(IDS[:48]))
    keys = chunk_keys(RECORD.root(), IDS, 32)
    sight.node_changed(0, Tier.HOST, keys, [])
    sight.node_changed(0, Tier.DISK, keys[:3], [])
    sight.node_changed(1, Tier.REMOTE, keys[:2], [])
    assert held(sight) == {
        DEVICE[0]: 48,
        Place(Tier.HOST, 0): 160,
        Place(Tier.DISK, 0): 96,
        Place(Tier.REMOTE, 0): 64,
    }
    assert sight.query("m", IDS)["a"] == {"longest_matched": 160, "GPU": 48, "CPU": 160, "DISK": 96, "DP": {"0": 48}}
    sight.node_changed(0, Tier.HOST, [], keys[1:])
    assert held(sight)[Place(Tier.HOST, 0)] == 32
    sight.node_forgotten(0)
    assert held(sight) == {DEVICE[0]: 48, Place(Tier.REMOTE, 0): 64}
    assert sight.kv_bytes_per_token("m") == 1000


def test_whether_a_prompt_is_stored_for_others() -> None:
    sight = Sight(["n0", "n1"])
    sight.joined(0, spec())
    sight.joined(1, spec("b", node=None))
    assert sight.stored(0, "m", sight.lenses("m", "", IDS)) is None, "its node has said nothing"
    sight.registered(0, [registration()])
    lenses = sight.lenses("m", "", IDS)
    assert [sight.stored(number, "m", lenses) for number in (0, 1, 2)] == [False, None, None]
    keys = chunk_keys(RECORD.root(), IDS, 32)
    sight.node_changed(1, Tier.HOST, keys, [])
    sight.node_changed(0, Tier.HOST, keys[:-1], [])
    assert sight.stored(0, "m", lenses) is False
    sight.node_changed(0, Tier.HOST, keys[-1:], [])
    assert sight.stored(0, "m", lenses) is True
    assert sight.stored(0, "m", sight.lenses("m", "", IDS[:31])) is True, "it has no whole chunk"
    sight.node_forgotten(0)
    assert sight.stored(0, "m", lenses) is None
    sight.registered(0, [registration()])
    sight.node_changed(0, Tier.DISK, keys, [])
    assert sight.stored(0, "m", lenses) is True


def test_one_way_of_counting_does_where_blocks_are_chunks() -> None:
    sight = Sight(["n0"])
    device = sight.joined(0, spec())
    sight.registered(0, [registration(chunk_tokens=16)])
    device.apply(0, stored(IDS))
    sight.node_changed(0, Tier.HOST, chunk_keys(RECORD.root(), IDS, 16)[:4], [])
    (lens,) = sight.lenses("m", "", IDS)
    assert list(lens.keys) == chunk_keys(RECORD.root(), IDS, 16)
    assert held(sight) == {DEVICE[0]: 160, Place(Tier.HOST, 0): 64}


def test_salts_are_caches_of_their_own_in_nodes_too() -> None:
    sight = Sight(["n0"])
    sight.joined(0, spec())
    sight.registered(0, [registration()])
    sight.node_changed(0, Tier.HOST, chunk_keys(replace(RECORD, salt="s").root(), IDS, 32), [])
    assert held(sight) == {}
    assert held(sight, salt="s") == {Place(Tier.HOST, 0): 160}
    assert held(sight, salt="other") == {}


def test_another_tenants_record_is_another_cache() -> None:
    sight = Sight(["n0"])
    sight.joined(0, spec())
    other = replace(RECORD, tenant="u")
    sight.registered(0, [registration()])
    sight.node_changed(0, Tier.HOST, chunk_keys(other.root(), IDS, 32), [])
    assert held(sight) == {}


def test_engines_are_asked_again_when_their_keys_get_another_root() -> None:
    sight = Sight(["n0"])
    again: list[int] = []
    sight.on_again = again.append
    devices = [sight.joined(number, spec("ab"[number])) for number in range(2)]
    devices[0].apply(0, stored(IDS))
    sight.registered(0, [registration()])
    assert again == [0, 1]
    assert held(sight) == {}
    devices[0].apply(0, stored(IDS))
    assert held(sight) == {DEVICE[0]: 160}
    sight.registered(0, [registration(), registration("b.y")])
    sight.registered(0, [])  # the node restarts
    assert again == [0, 1]
    newer = replace(RECORD, layout="other")
    sight.registered(0, [registration("a.x"), registration("b.z", base=Base(newer.root(), newer))])
    assert again == [0, 1]
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16, 32, 32]
    sight.registered(0, [registration("b.z", base=Base(newer.root(), newer))])
    assert again == [0, 1, 0, 1]
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16, 32]


def test_whose_registration_it_is() -> None:
    sight = Sight(["n0", "n1"])
    sight.joined(0, spec("a"))
    sight.joined(1, spec("b", served_name="other", node="n1"))
    sight.registered(0, [registration("b_dp1.x", 64)])
    sight.registered(1, [registration("unheard-of", 128)])
    assert [it.tokens for it in sight.lenses("other", "", IDS)] == [16, 64, 128]
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16]
    sight.joined(2, spec("c", node="n1"))
    assert sight._model_of(1, "unheard-of") is None


def other_base(layout: str) -> Base:
    record = replace(RECORD, layout=layout)
    return Base(record.root(), record)


def test_another_fleets_instance_of_the_same_name_is_not_ours() -> None:
    sight = Sight(["mine", "theirs"])
    sight.joined(0, spec("chat-0", node="mine"))
    sight.member_joined(0)
    sight.member_joined(1)
    sight.registered(1, [registration("chat-0.x", 64)])
    assert not sight.state()["models"]["m"]["registered"]
    sight.registered(0, [registration("chat-0.y")])
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16, 32]
    sight.joined(1, spec("chat-1", node=None))  # nobody says where it is
    sight.registered(1, [registration("chat-0.x", 64), registration("chat-1.x", 128)])
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16, 32, 128]


def test_what_nodes_had_registered_that_left_counts_no_more() -> None:
    sight = Sight([f"n{number}" for number in range(RECORDS_MAX + 4)])
    again: list[int] = []
    sight.on_again = again.append
    sight.joined(0, spec(node=None))
    for number in range(RECORDS_MAX + 3):
        sight.member_joined(number)
        sight.registered(number, [registration(base=other_base(f"g{number}"))])
    assert len(sight.lenses("m", "", IDS)) == 1 + RECORDS_MAX and again == [0]
    last, keys = RECORDS_MAX + 3, chunk_keys(bytes(32), IDS, 32)
    sight.registered(last, [registration(chunk_tokens=64, base=other_base("now"))])
    for number in range(last):
        sight.node_changed(number, Tier.HOST, keys, [])
        sight.member_left(number)
    assert not sight.index.find(keys, 32) and not sight._listed and list(sight._registrations) == [last]
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16, 64]
    assert sight.root("m", "") == other_base("now").root
    sight.member_left(last)  # a node that restarts forgets its engines for a moment, and is away for one
    assert sight.root("m", "") == other_base("now").root


def test_a_registration_that_came_before_its_instance_counts() -> None:
    sight = Sight(["n0"])
    sight.registered(0, [registration()])
    sight.joined(0, spec())
    assert [it.tokens for it in sight.lenses("m", "", IDS)] == [16, 32]


# ---- the rest -----------------------------------------------------------------------------------------------


def test_models_and_instances_come_and_go() -> None:
    sight = Sight(["n0"])
    for number in range(200):
        device = sight.joined(number % 4, spec(f"i{number}", served_name=f"m{number % 3}"))
        device.apply(0, stored(IDS))
        sight.left((number + 2) % 4)
    for number in range(4):
        sight.left(number)
    while sight.index.tidy():
        pass
    assert len(sight.index) == 0
    assert sight.lenses("m0", "", IDS) == ()
    assert sight.state()["models"] == {}
    sight.left(9)
    sight.expect(9, [])


def test_ids_that_are_none_have_no_keys() -> None:
    sight = Sight()
    sight.joined(0, spec())
    for ids in ([-1] * 20, [1 << 32] * 20, [1.5] * 20):
        assert sight.lenses("m", "", ids) == ()
    assert sight.unkeyable == 3
    assert sight.lenses("nobody", "", IDS) == ()


def test_short_prompts_are_held_by_nobody() -> None:
    sight = Sight()
    sight.joined(0, spec())
    lenses = sight.lenses("m", "", IDS[:15])
    sight.expect(0, lenses)
    assert held(sight, IDS[:15]) == {}


def test_the_same_ids_are_not_hashed_twice_and_what_is_kept_is_bounded() -> None:
    sight = Sight(["n0"])
    sight.joined(0, spec())
    ids = array("I", IDS)

    def again(ids: array[int], salt: str = "") -> Sequence[Lens]:
        return sight.lenses("m", salt, ids, again=True)

    first = again(ids)
    assert again(ids) is first
    assert again(ids, "s") is not first
    assert list(again(array("I", ids))) == list(sight.lenses("m", "", IDS)) == list(first)
    assert len(sight._recent) == 2, "one request's own are not kept"
    sight.registered(0, [registration()])
    assert len(again(ids)) == 2
    for _ in range(PROMPTS_KEPT * 2):
        again(array("I", ids))
    assert len(sight._recent) == PROMPTS_KEPT
    large = array("I", range(TOKENS_KEPT // 16))
    for number in range(40):
        again(large[number:])
    assert len(sight._recent) == 16
    assert sight._recent.tokens == sum(len(it.ids) for it in sight._recent._prompts.values()) <= TOKENS_KEPT
    huge = array("I", range(TOKENS_KEPT // 16 + 1))
    again(huge)
    assert id(huge) not in sight._recent._prompts


def test_state_tells_of_the_hottest_without_whole_keys() -> None:
    sight = Sight(["n0"])
    sight.joined(0, spec())
    sight.expect(0, sight.lenses("m", "", IDS))
    for _ in range(3):
        held(sight)
    state = sight.state()
    key = bytes(sight.lenses("m", "", IDS)[0].keys[-1]).hex()
    assert state["hottest"] == [{"key": key[:12], "tokens": 160, "hits": 3, "places": ["device:a"]}]
    assert state["devices"]["a"]["expected"] == 10
    assert key not in msgspec.json.encode(state).decode()


def test_the_hottest_are_those_met_most() -> None:
    draw = random.Random(1)
    hottest = Hottest(16)
    for _ in range(4000):
        number = min(int(draw.expovariate(0.3)), 200)
        hottest.met(bytes([number]), 16)
    assert len(hottest) == 16
    assert [it.key[0] for it in hottest.top(4)] == [0, 1, 2, 3]
