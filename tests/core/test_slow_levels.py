"""Levels that do not answer, break in places, or hold what nobody can use; and the lines in which chunks wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headwater.core import levels, movement
from headwater.core.cost import Source, Step, TierSpeed, best_prefix
from headwater.core.health import Health
from headwater.core.levels import ASKING_MAX, Command, Verb
from headwater.core.movement import ASK_S, LATE_S, READ_S
from headwater.core.pool import QUARANTINE_SHARE, Pool
from headwater.core.waiting import Waiting
from headwater.types import PAGE_BYTES, ChunkKey, Outcome, Usage
from tests.core.below import Node
from tests.core.examples import chain, dense, namespace, save

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
CORRUPT, DAMAGED, REFUSED = Outcome.CORRUPT, Outcome.DAMAGED, Outcome.REFUSED


def reads(node: Node) -> list[Command]:
    return [it for it in node.commands if it.verb is Verb.READ]


def only(node: Node, verb: Verb) -> Command:
    (found,) = [it for it in node.settle() if it.verb is verb]
    return found


# ---- what does not end ---------------------------------------------------------------------------------


def test_reads_that_never_end_make_a_level_sick_and_the_next_fetch_does_not_wait() -> None:
    node, keys = Node(readers=2, batch_chunks=1), chain(8)
    node.put_down(keys)
    node.movement.tick(node.now)
    node.run()
    assert node.ask(keys).waiting
    stuck = reads(node)
    assert len(stuck) == 4
    node.now += READ_S + LATE_S - 0.01
    node.movement.tick(node.now)
    assert node.levels[0].breaker.slow_operations == 0
    node.now += 0.02
    node.movement.tick(node.now)
    assert node.levels[0].breaker.slow_operations == 4, "each of them counts, once"
    assert not node.levels[0].well
    node.movement.tick(node.now + 0.01)
    assert node.levels[0].breaker.slow_operations == 4
    assert not node.ask(keys, request="other").waiting
    node.fetches.forget("a", ["r"], node.now)
    node.now += 1.0
    node.movement.tick(node.now)
    node.end(only(node, Verb.USAGE), Usage(None, None))
    assert node.levels[0].breaker.state is Health.WELL
    assert not node.levels[0].well, "as long as no thread is left that could read"
    assert node.levels[0].health is Health.SICK
    for command in stuck:
        node.end(command, [DONE] * len(command.parts))
    assert node.levels[0].well
    assert node.host.match(node.space, keys) == 4, "late results count"
    node.assert_quiet()


def test_one_command_that_never_ends_says_little_until_the_probe_does_not_end_either() -> None:
    node, keys = Node(readers=2), chain(1)
    node.put_down(keys)
    node.movement.tick(node.now)
    node.run()
    node.ask(keys)
    (stuck,) = reads(node)
    node.now += READ_S + LATE_S
    node.movement.tick(node.now)
    assert node.levels[0].well
    probe = only(node, Verb.USAGE)
    node.now += ASK_S + LATE_S
    node.movement.tick(node.now)
    assert not node.levels[0].well
    node.now += 20.0
    node.movement.tick(node.now)
    assert only(node, Verb.USAGE) is probe, "no second probe while the first is out"
    node.end(probe, Usage(None, None))
    assert node.levels[0].well
    slow = node.levels[0].breaker.slow_operations
    node.end(stuck, [FAILED])
    assert node.levels[0].breaker.slow_operations == slow, "it was counted when it was late"
    node.assert_quiet()


def test_a_write_that_ends_late_and_well_heals() -> None:
    node, keys = Node(writers=1), chain(1)
    save(node.host, node.space, keys)
    command = only(node, Verb.WRITE)
    node.now = command.until_s + LATE_S
    for _ in range(3):
        node.levels[0].breaker.slow(node.now, 0.5)
    assert not node.levels[0].well
    node.end(command, [DONE])
    assert node.levels[0].well
    assert node.on_disk(keys) == [True]
    node.assert_quiet()


# ---- questions -----------------------------------------------------------------------------------------


def test_questions_go_together_and_each_gets_its_own_answer() -> None:
    node = Node(disk_slots=0, remotes=1)
    prompts = [chain(3, seed=seed) for seed in range(6)]
    # Two of them share their first chunk.
    prompts.append([prompts[5][0], *chain(2, seed=9)])
    told: dict[int, list[tuple[ChunkKey, Outcome]]] = {}
    other = node.host.add_space(replace(namespace(dense()), tenant="other"), dense())
    for number, keys in enumerate(prompts):

        def ended(move: movement.Move, outcomes: list[Outcome], now: float, number: int = number) -> None:
            parts = move.command.parts
            told[number] = [(part.key, it) for part, it in zip(parts, outcomes, strict=True)]

        space = other if number == 3 else node.space
        node.movement.ask(0, space, [(0, key) for key in keys], node.now, ended)
    node.settle()
    assert [len(it.parts) for it in node.commands] == [3, 3]
    first = node.commands[0]
    node.end(first, [DONE, MISSING, MISSING])
    assert [len(it.parts) for it in node.commands] == [3, 14], "all that waited, and nothing twice"
    merged = node.commands[1]
    assert {part.space for part in merged.parts} == {node.space, other}
    node.end(merged, [DONE if part.key == prompts[5][0] else MISSING for part in merged.parts])
    assert told[0] == [(prompts[0][0], DONE), (prompts[0][1], MISSING), (prompts[0][2], MISSING)]
    assert told[6] == [(prompts[6][0], DONE), (prompts[6][1], MISSING), (prompts[6][2], MISSING)]
    assert [it for _, it in told[3]] == [MISSING] * 3
    assert set(told) == {0, 2, 3, 4, 5, 6}
    node.run()
    assert set(told) == set(range(7))
    assert node.levels[0].asking == 0


def test_many_questions_cost_few_round_trips() -> None:
    """60 new prompts a second over 50 ms: a question of its own for each would need three connections."""
    node = Node(disk_slots=0, remotes=1)
    due: list[tuple[float, Command]] = []
    known: set[int] = set()
    asked = 0
    for step in range(2000):
        node.now = step * 0.005
        if step % 3 == 0:
            node.ask(chain(4, seed=step), request=f"r{step}", rate=20.0)
            asked += 1
        for command in node.commands:
            if command.number not in known:
                known.add(command.number)
                due.append((node.now + 0.05, command))
        for at_s, command in list(due):
            if at_s <= node.now:
                due.remove((at_s, command))
                node.end(command, node.answer(command))
        if step % 100 == 0:
            node.movement.tick(node.now)
            node.settle()
        assert sum(it.verb is Verb.HOLDS for it in node.commands) <= ASKING_MAX
    assert node.levels[0].breaker.opened == 0
    assert node.levels[0].breaker.slow_operations == 0
    assert asked == 667
    assert sum(it.verb is Verb.HOLDS for it in node.done) < 10.0 / 0.05 * ASKING_MAX + 2


@pytest.mark.parametrize("late", [True, False])
def test_a_question_that_fails_is_slow_and_only_a_broken_one_forgets(late: bool) -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(2)
    node.put_down(keys)
    node.movement.tick(node.now)
    node.run()
    level = node.levels[0]
    assert level.has(node.space, 0, keys[0])
    node.ask(keys)
    command = only(node, Verb.HOLDS)
    node.now += ASK_S if late else 0.1
    node.end(command, None)
    assert (level.well, level.breaker.slow_operations, level.breaker.opened) == (True, 1, 0)
    assert level.has(node.space, 0, keys[0]) == late
    node.movement.tick(node.now)
    assert only(node, Verb.USAGE), "whether it works at all is asked at once"
    node.run()
    for number in range(3):
        node.ask(keys, request=f"again {number}")
        node.now += ASK_S
        node.end(only(node, Verb.HOLDS), None)
    assert not level.well, "three in a row are too many"
    node.run()
    node.assert_quiet()


def test_questions_that_wait_too_long_or_for_a_sick_level_end_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(disk_slots=0, remotes=1)
    told: list[list[Outcome]] = []

    def ask(seed: int) -> None:
        parts = [(0, key) for key in chain(3, seed=seed)]
        node.movement.ask(0, node.space, parts, node.now, lambda move, outcomes, now: told.append(outcomes))

    for seed in range(4):
        ask(seed)
    assert len(node.settle()) == 2
    node.now += ASK_S + 0.1
    node.movement.tick(node.now)
    assert told == [[FAILED] * 3] * 2
    monkeypatch.setattr(movement, "WAITING_PARTS_MAX", 7)
    for seed in range(4):
        ask(10 + seed)
    assert len(told) == 4, "and no more than so many wait"
    for _ in range(3):
        node.levels[0].breaker.slow(node.now, 0.5)
    node.movement.tick(node.now)
    assert len(told) == 6
    node.run()
    assert len(told) == 8
    node.assert_quiet()


# ---- bad places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [CORRUPT, DAMAGED])
def test_a_bad_place_is_dropped_and_never_used_again(outcome: Outcome) -> None:
    node, keys = Node(disk_slots=40), chain(3)
    node.put_down(keys)
    assert node.ask(keys).waiting
    places = {part.key: part.place for it in reads(node) for part in it.parts}
    node.run(lambda it: [outcome if part.key == keys[1] else DONE for part in it.parts])
    assert node.on_disk(keys) == [True, False, True]
    assert node.levels[0].well
    pool = node.disk.pool
    slot = node.disk.spaces[0].slot_bytes[0]
    assert pool.quarantined_bytes == slot
    for seed in range(20):
        save(node.host, node.space, chain(4, seed=seed + 1))
        node.run()
    used = {node.disk.entries.address[row] for row in node.disk.spaces[0].index[0].values()}
    assert len(used) == 39, "all others are"
    assert places[keys[1]] not in used
    node.disk.check()
    node.assert_quiet()


def test_several_bad_places_in_a_row_are_a_sick_tier() -> None:
    node, prompts = Node(), [chain(1, seed=seed) for seed in range(4)]
    for keys in prompts:
        node.put_down(keys)
    for number, keys in enumerate(prompts[:3]):
        assert node.levels[0].well
        node.ask(keys, request=f"{number}")
        node.end(reads(node)[0], [DAMAGED])
    assert not node.levels[0].well
    node.now += 1.0
    node.movement.tick(node.now)
    node.run()
    assert node.ask(prompts[3], request="healed").waiting
    node.assert_quiet()


def test_a_write_to_a_bad_place_is_tried_once_elsewhere() -> None:
    node, keys = Node(disk_slots=32), chain(1)
    save(node.host, node.space, keys)
    first = only(node, Verb.WRITE)
    node.end(first, [DAMAGED])
    (again,) = node.commands
    assert again.parts[0].place != first.parts[0].place
    node.end(again, [DAMAGED])
    assert node.commands == []
    assert node.levels[0].sums.dropped_chunks == 1
    assert node.disk.pool.quarantined_bytes == 2 * node.disk.spaces[0].slot_bytes[0]
    node.assert_quiet()


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_with_bad_places_gives_every_other_page_away(seed: int) -> None:
    rng = random.Random(seed)
    slab = 8 * PAGE_BYTES
    pool = Pool([64 * slab], slab)
    held: dict[int, int] = {}
    bad: set[int] = set()
    for step in range(600):
        size = rng.choice([1, 2, 3, 8]) * PAGE_BYTES
        if held and (rng.random() < 0.4 or step > 560):
            address = rng.choice(sorted(held))
            size = held.pop(address)
            before = pool.quarantined_bytes
            if rng.random() < 0.2:
                pool.condemn(address)
            pool.free(address)
            if pool.quarantined_bytes > before:
                bad.update(range(address // PAGE_BYTES, (address + size) // PAGE_BYTES))
            continue
        found = pool.allocate(size, step)
        if found is not None:
            pages = set(range(found // PAGE_BYTES, (found + size) // PAGE_BYTES))
            assert not pages & bad, f"{found:x} of {size} is bad"
            held[found] = size
        pool.check()
    assert bad
    assert pool.quarantined_bytes <= QUARANTINE_SHARE * pool.capacity_bytes
    for address in list(held):
        pool.free(address)
    pool.check()
    assert (pool.taken_bytes, pool.taken_slots) == (0, 0)
    free = 0
    while pool.allocate(PAGE_BYTES, free) is not None:
        free += 1
    assert free == 64 * 8 - len(bad)


# ---- what nobody can use -------------------------------------------------------------------------------


def test_what_the_disk_cannot_bring_back_is_dropped_and_written_anew() -> None:
    node, keys = Node(), chain(2)
    node.put_down(keys)
    node.ask(keys)
    node.run(lambda it: [REFUSED] * len(it.parts))
    assert node.on_disk(keys) == [False, False]
    assert node.disk.pool.quarantined_bytes == 0, "nothing is wrong with the place"
    save(node.host, node.space, keys)
    node.run()
    assert node.on_disk(keys) == [True, True]
    node.assert_quiet()


def test_what_a_remote_cannot_bring_back_is_not_read_again_and_written_anew() -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(2)
    node.put_down(keys)
    node.ask(keys)
    node.end(only(node, Verb.HOLDS), [DONE, DONE])
    node.end(only(node, Verb.READ), [DONE, REFUSED])
    assert not node.settle(), "another node may have its key: it is not deleted"
    node.ask(keys, "again")
    node.end(only(node, Verb.HOLDS), [DONE, DONE][: len(only(node, Verb.HOLDS).parts)])
    assert not node.settle(), "nor read again"
    save(node.host, node.space, keys)
    write = only(node, Verb.WRITE)
    assert [(part.key, part.anew) for part in write.parts] == [(keys[1], True)]
    node.run()
    node.host.clear(node.space)
    node.settle()
    assert node.levels[0].has(node.space, 0, keys[1])
    assert not node.levels[0].is_useless(node.space, 0, keys[1])
    node.assert_quiet()


def test_a_remote_that_may_not_be_cleared_serves_the_others_and_is_asked_again_now_and_then() -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(2)
    node.put_down(keys)
    node.movement.clear(node.space, node.now)
    clears = 0
    for _ in range(600):
        for command in list(node.settle()):
            clears += command.verb is Verb.CLEAR
            node.end(command, None if command.verb is Verb.CLEAR else node.answer(command))
            assert node.levels[0].well
        node.now += 0.1
        node.movement.tick(node.now)
    assert 5 <= clears <= 13
    assert node.levels[0].breaker.opened == 0


# ---- the cap, and whose turn it is ---------------------------------------------------------------------


def test_no_more_is_planned_than_fits_the_longest_wait() -> None:
    speed = TierSpeed()
    for _ in range(20):
        speed.observe(1000, 1.0)
        speed.observe(2000, 2.0)
    steps = [Step(100, 1000, 0)] * 10
    free = best_prefix(steps, 0, 10.0, [Source(speed)])
    assert (free.steps, free.limited) == (10, False)
    bound = best_prefix(steps, 0, 10.0, [Source(speed)], 5.2)
    assert (bound.steps, bound.limited) == (5, True)
    assert bound.fetch_s <= 5.2
    unknown = best_prefix(steps, 0, None, [Source(speed)], 5.2)
    assert (unknown.steps, unknown.limited) == (5, True)
    none = best_prefix(steps, 0, 1e6, [Source(speed)], 5.2)
    assert (none.steps, none.limited) == (0, False), "what does not pay is not cut by the limit"


def test_a_fetch_is_cut_by_the_longest_wait_and_says_so() -> None:
    node, keys = Node(batch_chunks=1, readers=1), chain(8)
    node.put_down(keys)
    size = node.host.spaces[node.space].slot_bytes[0]
    for _ in range(20):
        node.levels[0].reading.observe(size, 1.5)
        node.levels[0].reading.observe(2 * size, 3.0)
    node.ask(keys, rate=0.1)
    record = None
    for _ in range(8):
        for command in reads(node):
            node.now += 1.6
            node.end(command, [DONE])
            node.ask(keys, rate=0.1)
        record = node.fetches.records.get("r")
    assert record is not None
    assert (record.why, record.planned) == ("longer than 5 s", 3)
    assert record.waited_s < 5.0
    node.assert_quiet()


def test_the_tenant_that_has_most_waiting_gives_way_and_all_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "QUEUE_KEYS_MAX", 6)
    level = Node().levels[0]
    level.queue = Waiting()
    level.queue.tenant_of = {0: "flood", 1: "calm", 2: "flood"}.__getitem__
    flood, calm = chain(20), chain(2, seed=1)
    for key in flood[:5]:
        level.enqueue(0, key)
    for key in calm:
        level.enqueue(1, key)
    for key in flood[5:]:
        level.enqueue(2 if key[0] % 2 else 0, key)
    assert level.sums.dropped_chunks == 16
    assert [key for space, key in level.queue if space == 1] == calm
    assert len(level.queue) == 6
    turns = [level.queue.take_next()[0][1] for _ in range(6)]
    assert turns == [flood[-4], calm[0], flood[-3], calm[1], flood[-2], flood[-1]]
    assert not level.queue
