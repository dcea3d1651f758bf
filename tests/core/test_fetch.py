"""How far and how long a request's prefix is brought up, with every way in which that can end."""

from __future__ import annotations

import random

import pytest

from headwater.core import fetch as module
from headwater.core.fetch import FINAL_S, HOLD_S, Answer
from headwater.core.levels import Command, Verb
from headwater.types import HitRule, KVLayout, Outcome, Usage
from tests.core.below import RATE, Node
from tests.core.examples import CHUNK_TOKENS, chain, dense, done_by_all, group, hybrid, load, reserve, save

DONE, FAILED, MISSING, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT
CHUNK_S = CHUNK_TOKENS / RATE
HYBRID = hybrid(group(), group(HitRule.WINDOW, window_tokens=6))


def reads(node: Node) -> list[Command]:
    return [it for it in node.commands if it.verb is Verb.READ]


def why(node: Node, request: str = "r") -> str:
    return node.fetches.records[request].why


def test_what_is_on_disk_comes_up_while_the_request_asks() -> None:
    node, keys = Node(), chain(5)
    node.put_down(keys)
    assert node.ask(keys) == Answer(0, True)
    first, second, *_ = reads(node)
    assert [part.key for part in first.parts] == keys[:2]
    node.end(second, [DONE, DONE])
    assert node.ask(keys) == Answer(0, True)
    node.end(first, [DONE, DONE])
    assert node.ask(keys) == Answer(4, True, disk=4)
    node.run()
    assert node.ask(keys) == Answer(5, False, disk=5)
    record = node.fetches.records["r"]
    assert (record.here, record.brought, record.chunks, record.why) == (0, {"disk": 5}, 5, "")
    assert node.levels[0].sums.hit_tokens == 5 * CHUNK_TOKENS
    found = load(node.host, node.space, keys, now=node.now)
    assert found.chunks == 5
    done_by_all(node.host, node.space, found.ticket, now=node.now)
    node.assert_quiet()


def test_a_miss_and_a_full_hit_are_answered_at_once() -> None:
    node, keys = Node(), chain(3)
    assert node.ask(keys) == Answer(0, False)
    save(node.host, node.space, keys)
    node.run()
    assert node.ask(keys, request="s") == Answer(3, False)
    assert node.ask([], request="t") == Answer(0, False)
    assert node.fetches.begun == 1
    alone = Node(disk_slots=0)
    assert alone.ask(keys) == Answer(0, False)
    assert alone.fetches.begun == 0
    node.assert_quiet()


def test_remotes_are_asked_one_after_the_other_about_what_is_missing() -> None:
    node, keys = Node(remotes=2), chain(6)
    node.put_down(keys)
    node.disk.evict(0, keys[2:])
    node.stored[1] = {(0, key) for key in keys[2:4]}
    node.stored[2] = {(0, key) for key in keys[4:]}
    assert node.ask(keys).waiting
    assert [it.level for it in node.commands if it.verb is Verb.HOLDS] == [1]
    node.run()
    asked = {it.level: [part.key for part in it.parts] for it in node.done if it.verb is Verb.HOLDS}
    assert asked == {1: keys[2:], 2: keys[4:]}
    assert node.ask(keys) == Answer(6, False, disk=2, remote=4)
    assert node.fetches.records["r"].brought == {"disk": 2, "remote0": 2, "remote1": 2}
    # What came from a REMOTE tier is near now, and is not sent there again.
    assert node.on_disk(keys) == [True] * 6
    sent = [part.key for it in node.done if it.verb is Verb.WRITE and it.level == 1 for part in it.parts]
    assert [sent.count(key) for key in keys[2:4]] == [1, 1]
    node.assert_quiet()


def test_two_requests_of_one_prefix_read_it_once() -> None:
    node, keys = Node(), chain(4)
    node.put_down(keys)
    before = len(node.done)
    assert node.ask(keys, request="one").waiting
    assert node.ask(keys, request="two").waiting
    node.run()
    assert sum(len(it.parts) for it in node.done[before:] if it.verb is Verb.READ) == 4
    assert node.ask(keys, request="one") == Answer(4, False, disk=4)
    assert node.ask(keys, request="two") == Answer(4, False)
    node.assert_quiet()


def test_if_the_first_of_two_is_cancelled_the_second_still_gets_it() -> None:
    node, keys = Node(), chain(4)
    node.put_down(keys)
    node.ask(keys, request="one")
    node.ask(keys, request="two")
    assert node.fetches.forget("a", ["one", "unknown"], node.now) == 1
    assert why(node, "one") == "cancelled"
    node.run()
    assert node.ask(keys, request="two") == Answer(4, False)
    node.assert_quiet()


def test_reads_of_a_cancelled_request_end_and_hold_nothing() -> None:
    node, keys = Node(), chain(4)
    node.put_down(keys)
    node.ask(keys)
    node.fetches.forget_owner("a", node.now)
    assert node.fetches.active == 0
    assert node.host.tickets
    node.run()
    assert not node.host.tickets
    assert node.host.match(node.space, keys) == 4
    node.assert_quiet()


def test_what_an_engine_is_saving_is_waited_for_and_not_read() -> None:
    node, keys = Node(), chain(3)
    node.put_down(keys)
    saving = reserve(node.host, node.space, keys, owner="other")
    assert node.ask(keys) == Answer(0, True)
    assert node.commands == []
    done_by_all(node.host, node.space, saving.ticket, owner="other")
    assert node.ask(keys) == Answer(3, False)
    node.assert_quiet()


def test_a_save_that_fails_is_waited_for_no_longer() -> None:
    node, keys = Node(), chain(3)
    node.put_down(keys)
    saving = reserve(node.host, node.space, keys, owner="other")
    assert node.ask(keys).waiting
    node.host.release("other", saving.ticket)
    assert node.ask(keys) == Answer(0, False)
    assert why(node) == "evicted on the way"
    node.assert_quiet()


def test_what_disk_evicts_before_its_read_begins_cuts_there() -> None:
    node, keys = Node(readers=1), chain(8)
    node.put_down(keys)
    assert node.ask(keys).waiting
    assert len(reads(node)) == 2
    node.disk.evict(0, keys[5:])
    node.run()
    assert node.ask(keys) == Answer(5, False, disk=5)
    assert why(node) == "evicted from disk on the way"
    node.assert_quiet()


@pytest.mark.parametrize("outcome", [FAILED, MISSING, CORRUPT, Outcome.FOREIGN, Outcome.NEWER])
def test_a_chunk_that_does_not_come_cuts_the_prefix_there(outcome: Outcome) -> None:
    node, keys = Node(batch_chunks=8), chain(6)
    node.put_down(keys)
    assert node.ask(keys).waiting
    (read,) = reads(node)
    node.end(read, [DONE, DONE, outcome, DONE, DONE, DONE])
    assert node.ask(keys) == Answer(2, False, disk=2)
    assert why(node) == ("disk failed" if outcome is FAILED else f"{outcome.value} in disk")
    assert node.on_disk(keys)[2] == (outcome is FAILED)
    assert node.levels[0].sums.hit_tokens == 2 * CHUNK_TOKENS
    node.assert_quiet()


def test_a_level_that_falls_sick_ends_the_wait_at_once() -> None:
    node, keys = Node(readers=1, batch_chunks=1), chain(6)
    node.put_down(keys)
    assert node.ask(keys).waiting
    first, second = reads(node)
    node.end(first, [DONE])
    node.end(second, None)
    node.run(lambda it: None)
    assert node.ask(keys) == Answer(1, False, disk=1)
    assert why(node) == "disk failed"
    # While it is sick nobody waits for it.
    assert node.ask(keys, request="s") == Answer(1, False)
    node.assert_quiet()


def test_a_remote_that_is_sick_is_not_asked_and_one_that_does_not_answer_is_not_waited_for() -> None:
    node, keys = Node(disk_slots=0, remotes=2), chain(3)
    node.put_down(keys)
    assert node.ask(keys).waiting
    (asking,) = node.commands
    node.end(asking, None)
    assert [it.level for it in node.commands] == [1]
    assert node.levels[0].well, "one question more or less says little"
    node.movement.tick(node.now)
    (probe,) = [it for it in node.settle() if (it.level, it.verb) == (0, Verb.USAGE)]
    (other,) = [it for it in node.commands if (it.level, it.verb) == (1, Verb.USAGE)]
    node.end(other, Usage(None, None))
    node.end(probe, None)
    assert node.ask(keys, request="s").waiting
    assert [it.level for it in node.commands] == [1, 1]
    node.run()
    assert node.ask(keys) == Answer(3, False, remote=3)
    node.assert_quiet()


def test_patience_ends_when_waiting_cannot_pay_any_more() -> None:
    node, keys = Node(batch_chunks=1), chain(10)
    node.put_down(keys)
    assert node.ask(keys).waiting
    allowed_s = 0.1 * 10 * CHUNK_S
    began_s = node.now
    node.now = began_s + allowed_s
    assert node.ask(keys).waiting
    node.end(reads(node)[0], [DONE])
    node.now = began_s + allowed_s + CHUNK_S * 0.99
    assert node.ask(keys).waiting
    node.now = began_s + allowed_s + CHUNK_S * 1.01
    assert node.ask(keys) == Answer(1, False, disk=1)
    assert why(node) == "slower than expected"
    assert node.fetches.cut == 1
    # Final is final, also when more has come.
    node.run()
    assert not node.ask(keys).waiting
    node.assert_quiet()


def test_with_an_unknown_rate_patience_ends_after_a_while_without_progress() -> None:
    node, keys = Node(batch_chunks=1), chain(3)
    node.put_down(keys)
    assert node.ask(keys, rate=None).waiting
    node.now += 0.09
    node.end(reads(node)[0], [DONE])
    node.now += 0.09
    assert node.ask(keys, rate=None) == Answer(1, True, disk=1)
    node.now += 0.02
    assert not node.ask(keys, rate=None).waiting
    node.assert_quiet()


def test_a_level_that_was_slow_is_not_chosen() -> None:
    node, keys = Node(), chain(4)
    node.put_down(keys)
    for _ in range(3):
        node.levels[0].reading.observe(2 * 4096, 1.0)
    assert node.ask(keys) == Answer(0, False)
    assert why(node) == "slower than computing it"
    assert node.levels[0].sums.declined == 1
    node.assert_quiet()


def test_a_host_that_is_full_of_what_is_read_takes_what_fits() -> None:
    node, keys = Node(host_slots=4), chain(4)
    node.put_down(keys)
    save(node.host, node.space, chain(3, seed=8))
    held = load(node.host, node.space, chain(3, seed=8))
    assert node.ask(keys) == Answer(0, True)
    node.run()
    assert node.ask(keys) == Answer(1, False, disk=1)
    assert why(node) == "no room in HOST"
    done_by_all(node.host, node.space, held.ticket)
    node.assert_quiet()


def test_a_host_without_any_room_is_a_final_answer() -> None:
    node, keys = Node(host_slots=4), chain(4)
    node.put_down(keys)
    save(node.host, node.space, chain(4, seed=8))
    held = load(node.host, node.space, chain(4, seed=8))
    node.ask(keys)
    node.settle()
    assert node.ask(keys) == Answer(0, False)
    assert why(node) == "no room in HOST"
    done_by_all(node.host, node.space, held.ticket)
    node.assert_quiet()


def test_what_was_brought_up_stays_until_it_can_be_loaded() -> None:
    node, keys = Node(host_slots=16), chain(3)
    node.put_down(keys)
    node.ask(keys)
    node.run()
    assert node.ask(keys).chunks == 3
    for seed in range(20):
        save(node.host, node.space, chain(13, seed=seed))
    node.settle()
    assert node.host.match(node.space, keys) == 3
    node.now += HOLD_S + 0.1
    node.fetches.tick(node.now)
    for seed in range(20, 40):
        save(node.host, node.space, chain(16, seed=seed))
    assert node.host.match(node.space, keys) == 0
    node.assert_quiet()


def test_the_prompts_own_reads_do_not_take_the_room_of_its_beginning() -> None:
    node, keys = Node(hybrid(group(), group(HitRule.LAST)), host_slots=12), chain(6)
    node.put_down(keys)
    save(node.host, node.space, keys[:2])
    save(node.host, node.space, chain(4, seed=3))
    node.run()
    node.ask(keys)
    node.run()
    assert node.ask(keys).chunks == 6
    node.assert_quiet()


# ---- several groups -------------------------------------------------------------------------------------


def test_only_the_windows_that_the_prefix_needs_are_read() -> None:
    node, keys = Node(HYBRID), chain(6)
    node.put_down(keys)
    node.ask(keys)
    node.run()
    read = [part for it in node.done if it.verb is Verb.READ for part in it.parts]
    assert {part.key for part in read if part.group == 0} == set(keys)
    assert {part.key for part in read if part.group == 1} == set(keys[4:])
    assert node.ask(keys) == Answer(6, False, disk=6)
    node.assert_quiet()


def test_companions_may_come_from_another_level() -> None:
    node, keys = Node(HYBRID, remotes=1), chain(4)
    node.put_down(keys)
    for key in keys:
        row = node.disk.spaces[0].index[1][key]
        node.disk.drop(0, 1, key, node.disk.entries.address[row], "corrupt")
    node.ask(keys)
    node.run()
    assert node.ask(keys) == Answer(4, False, disk=4)
    assert {it.level for it in node.done if it.verb is Verb.READ} == {0, 1}
    node.assert_quiet()


@pytest.mark.parametrize("bad", range(6))
@pytest.mark.parametrize("of_group", [0, 1])
def test_a_shorter_prefix_gets_the_windows_that_it_needs(bad: int, of_group: int) -> None:
    node, keys = Node(HYBRID, batch_chunks=8), chain(6)
    node.put_down(keys)
    node.ask(keys)

    def answer(command: Command) -> list[Outcome] | Usage | None:
        if command.verb is not Verb.READ:
            return node.answer(command)
        return [CORRUPT if (part.group, part.key) == (of_group, keys[bad]) else DONE for part in command.parts]

    node.run(answer)
    # A window's part that is not needed for 6 chunks, nor for fewer, is never read.
    expected = bad if of_group == 0 or bad >= 4 else 6
    assert node.ask(keys) == Answer(expected, False, disk=expected)
    node.assert_quiet()


def test_without_full_attention_only_the_end_is_read() -> None:
    node, keys = Node(hybrid(group(HitRule.WINDOW, window_tokens=6), group(HitRule.LAST))), chain(8)
    node.put_down(keys)
    node.ask(keys)
    node.run()
    assert node.ask(keys) == Answer(8, False, disk=2)
    read = [(part.group, part.key) for it in node.done if it.verb is Verb.READ for part in it.parts]
    assert sorted(read) == sorted([(0, keys[6]), (0, keys[7]), (1, keys[7])])
    node.assert_quiet()


def test_a_companion_that_nobody_brings_is_not_waited_for() -> None:
    """The main part is there, so that the chunk looks as if it were on its way; its window is not."""
    node, keys = Node(HYBRID), chain(3)
    node.put_down(keys)
    save(node.host, node.space, keys, lacking=frozenset((1, at) for at in range(3)))
    assert node.ask(keys).waiting
    (read,) = reads(node)
    node.end(read, [FAILED] * len(read.parts))
    # One chunk could still be used, with another window.
    (read,) = reads(node)
    assert [(part.group, part.key) for part in read.parts] == [(1, keys[0])]
    node.end(read, [FAILED])
    assert node.ask(keys) == Answer(0, False)
    node.assert_quiet()


# ---- many, and for long ---------------------------------------------------------------------------------


def test_reads_are_given_to_requests_in_turn() -> None:
    node = Node(readers=1, batch_chunks=1, host_slots=256, disk_slots=256)
    prompts = {name: chain(8, seed=at) for at, name in enumerate("xyz")}
    for keys in prompts.values():
        node.put_down(keys)
    for name, keys in prompts.items():
        node.ask(keys, request=name)
    order = []
    while reads(node):
        (part,) = reads(node)[0].parts
        order.append(next(name for name, keys in prompts.items() if part.key in keys))
        node.end(reads(node)[0], [DONE])
    assert sorted(order) == sorted("xyz" * 8)
    # The first took the two reads that were free; from then on it goes round.
    assert {*order[2:5]} == {*order[5:8]} == set("xyz")
    node.assert_quiet()


def test_too_many_requests_are_answered_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FETCHES_MAX", 3)
    node, keys = Node(), chain(3)
    node.put_down(keys)
    for number in range(3):
        assert node.ask(keys, request=f"r{number}").waiting
    assert node.ask(keys, request="r3") == Answer(0, False)
    assert node.fetches.prefetch("", "p", node.space, keys, node.now) == 0
    node.run()
    for number in range(3):
        assert not node.ask(keys, request=f"r{number}").waiting
    # Those that are over give way to new ones.
    node.host.clear(node.space)
    node.now += HOLD_S + 1
    node.host.expire(node.now)
    node.host.clear(node.space)
    assert node.ask(keys, request="r4").waiting
    node.assert_quiet()


def test_final_answers_are_forgotten_in_the_end() -> None:
    node, keys = Node(), chain(2)
    node.ask(keys)
    assert repr(node.fetches).startswith("Fetches(0 active of 1")
    node.now += FINAL_S + 1
    node.fetches.tick(node.now)
    assert repr(node.fetches).startswith("Fetches(0 active of 0")


def test_a_request_that_nobody_asks_for_any_more_ends() -> None:
    node, keys = Node(), chain(2)
    node.put_down(keys)
    assert node.ask(keys).waiting
    node.now += 10.0
    node.fetches.tick(node.now)
    assert node.fetches.active == 0
    node.assert_quiet()


def test_a_request_that_asks_for_something_else_begins_anew() -> None:
    node, keys, other = Node(), chain(3), chain(3, seed=1)
    node.put_down(keys)
    node.put_down(other)
    assert node.ask(keys).waiting
    assert node.ask(other).waiting
    assert why(node) == "asked for something else"
    node.run()
    assert node.ask(other) == Answer(3, False, disk=3)
    assert node.ask(other[:2]) == Answer(2, False)
    node.assert_quiet()


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORDS_MAX", 4)
    monkeypatch.setattr(module, "RECORDED_KEYS_MAX", 20)
    node = Node(host_slots=256)
    for number in range(10):
        node.ask(chain(3, seed=number), request=f"r{number % 7}")
    assert list(node.fetches.records) == ["r6", "r0", "r1", "r2"]
    node.ask(chain(19, seed=30), request="long")
    assert list(node.fetches.records) == ["long"]
    node.ask(chain(50, seed=31), request="longer")
    assert list(node.fetches.records) == ["longer"]


def test_a_prefetch_brings_everything_and_asking_twice_is_asking_once() -> None:
    node, keys = Node(remotes=1), chain(6)
    node.put_down(keys)
    node.levels[0].reading.observe(4096, 100.0)
    assert node.fetches.prefetch("", "p", node.space, keys, node.now) == 6
    assert node.fetches.prefetch("", "p", node.space, keys, node.now) == 6
    assert node.fetches.active == 1
    node.settle()
    node.now += 100.0
    node.fetches.tick(node.now)
    assert node.fetches.active == 1
    node.run()
    assert node.host.match(node.space, keys) == 6
    assert node.fetches.prefetch("", "p", node.space, keys, node.now) == 0
    assert [level.sums.hit_tokens for level in node.levels] == [0, 0]
    node.host.clear(node.space)
    node.now += 3.0
    node.host.expire(node.now)
    node.host.clear(node.space)
    assert node.fetches.prefetch("", "p", node.space, keys, node.now) == 6
    node.assert_quiet()


def test_a_prefetch_from_a_level_that_falls_sick_ends() -> None:
    node, keys = Node(readers=1, batch_chunks=1), chain(6)
    node.put_down(keys)
    node.fetches.prefetch("", "p", node.space, keys, node.now)
    node.run(lambda it: None)
    node.now += 1.0
    node.fetches.tick(node.now)
    assert node.fetches.active == 0
    assert why(node, "p") == "disk failed"
    node.assert_quiet()


def test_a_long_way_is_planned_in_few_steps() -> None:
    node, keys = Node(dense(), host_slots=1024, disk_slots=1024, batch_chunks=64), chain(700)
    node.put_down(keys)
    node.ask(keys, rate=1e6)
    plan = node.fetches._fetches["a", "r"].plan
    assert plan is not None
    assert plan.steps <= module.STEPS_MAX
    node.run(took_s=1e-7)
    assert node.ask(keys, rate=1e6).chunks == 700
    node.assert_quiet()


LAYOUTS: dict[str, KVLayout] = {
    "dense": dense(),
    "window": HYBRID,
    "state": hybrid(group(HitRule.LAST), group()),
    "no full": hybrid(group(HitRule.WINDOW, window_tokens=6), group(HitRule.LAST)),
}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_wait_costs_more_than_a_tenth_of_the_prompt(name: str, seed: int) -> None:
    """waited <= 0.1 prefill(all) + prefill(arrived), whatever comes when; and the answer is what is there."""
    rng = random.Random(seed)
    node, keys = Node(LAYOUTS[name], remotes=1, host_slots=64), chain(6)
    node.put_down(keys)
    node.disk.evict(0, rng.sample(keys, rng.randrange(3)))
    node.stored[1] -= {(0, key) for key in rng.sample(keys, rng.randrange(3))}
    if rng.random() < 0.3:  # HOST is short of room
        held = load(node.host, node.space, keys, now=0.0)
        save(node.host, node.space, chain(50, seed=7))
        assert not held.ticket
        load(node.host, node.space, chain(50, seed=7), now=node.now)
        node.settle()
    rate = rng.choice([10.0, 100.0, 1000.0])
    began_s = node.now
    limit_s = 0.1 * 6 * CHUNK_TOKENS / rate
    for _ in range(200):
        answer = node.ask(keys, rate=rate)
        if not answer.waiting:
            break
        assert node.now - began_s <= limit_s + answer.chunks * CHUNK_TOKENS / rate + 1e-9
        if node.commands and rng.random() < 0.5:
            command = rng.choice(node.commands)
            fine = node.answer(command)
            assert isinstance(fine, list)
            node.end(command, rng.choice([fine, fine, None, [FAILED] * len(fine)]))
        node.now += rng.choice([0.0, 0.001, 0.01, 0.1])
    else:
        raise AssertionError(f"it waits for ever: {node.fetches!r}")
    assert not node.ask(keys, rate=rate).waiting
    node.run(lambda it: None)
    node.assert_quiet()
