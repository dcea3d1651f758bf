"""What goes down, in which order, and what a move holds: with every answer that a tier can give."""

from __future__ import annotations

import random

import pytest

from headwater.core import movement
from headwater.core.levels import Admission, Command, Verb
from headwater.core.movement import FULL_S, USAGE_S
from headwater.types import Cleared, HitRule, Outcome, TicketKind, Usage
from tests.core.below import Node, placed
from tests.core.examples import chain, done_by_all, group, hybrid, namespace, reserve, save

DONE, FAILED, FULL = Outcome.DONE, Outcome.FAILED, Outcome.FULL


def writes(node: Node) -> list[Command]:
    return [it for it in node.commands if it.verb is Verb.WRITE]


def test_what_is_committed_goes_down_parents_first_in_batches() -> None:
    node, keys = Node(writers=1), chain(5)
    save(node.host, node.space, keys)
    written = []
    while node.settle():
        (command,) = node.commands
        assert placed(command)
        written += [part.key for part in command.parts]
        assert all(part.parent == (keys[at - 1] if (at := keys.index(part.key)) else b"") for part in command.parts)
        assert len(command.parts) <= 2
        node.end(command, [DONE] * len(command.parts))
    assert written == keys
    assert node.on_disk(keys) == [True] * 5
    assert node.levels[0].sums.written_chunks == 5
    node.assert_quiet()


def test_a_write_holds_its_chunks_in_host_and_their_slots_below() -> None:
    node, keys = Node(host_slots=2), chain(2)
    save(node.host, node.space, keys)
    (command,) = node.settle()
    # A full HOST cannot take them away while they are read.
    assert save(node.host, node.space, chain(2, seed=5)) == 0
    assert node.disk.pool.entry(command.parts[0].place) is not None
    assert node.on_disk(keys) == [False, False]
    node.end(command, [DONE, DONE])
    assert save(node.host, node.space, chain(2, seed=5)) == 2
    node.assert_quiet()


def test_a_failed_chunk_is_not_there_nor_what_hangs_on_it() -> None:
    node, keys = Node(batch_chunks=4), chain(4)
    save(node.host, node.space, keys)
    (command,) = node.settle()
    node.end(command, [DONE, FAILED, DONE, DONE])
    assert node.on_disk(keys) == [True, False, False, False]
    assert node.levels[0].sums.written_chunks == 1
    node.assert_quiet()


def test_a_write_whose_parent_fails_meanwhile_leaves_nothing() -> None:
    node, keys = Node(batch_chunks=2, writers=2), chain(4)
    save(node.host, node.space, keys)
    first, second = node.settle()
    node.end(second, [DONE, DONE])
    assert node.on_disk(keys) == [False, False, True, True]  # it hangs on what is being written
    node.end(first, [FAILED, FAILED])
    assert node.on_disk(keys) == [False] * 4
    node.assert_quiet()


def test_a_parent_that_fails_below_while_its_child_is_read_leaves_the_reader_its_slot() -> None:
    node, keys = Node(batch_chunks=2, writers=2), chain(4)
    save(node.host, node.space, keys)
    first, second = node.settle()
    node.end(second, [DONE, DONE])
    ticket, (place,) = node.disk.hold("", TicketKind.LOAD, 0, [(0, keys[3])], 1e9)
    node.end(first, None)
    assert node.on_disk(keys) == [False] * 4
    assert node.disk.pool.entry(place) is not None
    node.disk.check()
    node.disk.release("", ticket)
    assert node.disk.pool.taken_slots == 0
    node.assert_quiet()


def test_chunks_that_are_missing_before_one_go_down_first_however_many() -> None:
    node, keys = Node(admission=Admission.REUSED, batch_chunks=2, writers=1), chain(9)
    save(node.host, node.space, keys)
    assert node.settle() == []
    node.movement.used(node.space, keys[8:], node.now)
    node.run()
    assert node.on_disk(keys) == [True] * 9
    assert [len(it.parts) for it in node.done] == [2, 2, 2, 2, 1]
    node.assert_quiet()


@pytest.mark.parametrize("disk_slots", [1, 3, 6])
def test_a_prompt_that_is_longer_than_the_disk_ends(disk_slots: int) -> None:
    node, keys = Node(disk_slots=disk_slots, admission=Admission.REUSED, batch_chunks=2), chain(9)
    save(node.host, node.space, keys)
    node.movement.used(node.space, keys[8:], node.now)
    node.run()
    assert node.on_disk(keys) == [True] * disk_slots + [False] * (9 - disk_slots)
    assert not node.levels[0].queue
    assert node.levels[0].sums.dropped_chunks
    node.assert_quiet()


def test_a_level_that_fails_all_writes_is_not_tried_for_ever() -> None:
    node, keys = Node(admission=Admission.REUSED, batch_chunks=1), chain(9)
    save(node.host, node.space, keys)
    node.movement.used(node.space, keys, node.now)
    node.run(lambda it: [FAILED] * len(it.parts))
    assert len(node.done) == 4  # three in a row, and one that was begun before the third had ended
    assert not node.levels[0].well
    node.movement.tick(node.now + 1.0)
    node.run()
    node.movement.write(node.now)
    node.run()
    assert node.levels[0].well
    assert not node.levels[0].queue
    node.assert_quiet()


def test_a_chunk_that_left_host_before_its_turn_is_dropped_and_counted() -> None:
    node, keys = Node(host_slots=4), chain(2)
    node.levels[0].full_until_s = 5.0
    save(node.host, node.space, keys)
    node.settle()
    assert list(node.levels[0].queue) == [(node.space, key) for key in keys]
    save(node.host, node.space, chain(4, seed=9))
    node.settle()
    node.now = 6.0
    node.movement.write(node.now)
    node.run()
    assert node.on_disk(keys) == [False, False]
    assert node.on_disk(chain(4, seed=9)) == [True] * 4
    assert node.levels[0].sums.dropped_chunks == 2
    node.assert_quiet()


def test_what_was_committed_before_its_parent_goes_down_when_that_does() -> None:
    node, keys = Node(), chain(3)
    parent = reserve(node.host, node.space, keys[:1], owner="slow")
    save(node.host, node.space, keys[1:], parent=keys[0])
    node.run()
    assert node.on_disk(keys) == [False] * 3
    done_by_all(node.host, node.space, parent.ticket, owner="slow")
    node.run()
    assert node.on_disk(keys) == [True] * 3
    node.assert_quiet()


def test_a_companion_that_comes_later_goes_down_later() -> None:
    node = Node(hybrid(group(), group(HitRule.WINDOW, window_tokens=6)))
    keys = chain(2)
    save(node.host, node.space, keys, lacking=frozenset({(1, 0), (1, 1)}))
    node.run()
    assert (node.on_disk(keys), node.on_disk(keys, 1)) == ([True, True], [False, False])
    save(node.host, node.space, keys)
    node.run()
    assert node.on_disk(keys, 1) == [True, True]
    node.assert_quiet()


@pytest.mark.parametrize("lead", [HitRule.LAST, HitRule.WINDOW])
def test_without_full_attention_every_group_goes_down(lead: HitRule) -> None:
    window = group(HitRule.WINDOW, window_tokens=6)
    groups = (group(HitRule.LAST), window) if lead is HitRule.LAST else (window, group(HitRule.LAST))
    node, keys = Node(hybrid(*groups), remotes=1), chain(3)
    last = groups.index(group(HitRule.LAST))
    save(node.host, node.space, keys, lacking=frozenset({(last, 0), (last, 1)}))
    node.run()
    assert node.on_disk(keys, last) == [False, False, True]
    assert node.on_disk(keys, 1 - last) == [True] * 3
    assert len(node.stored[1]) == 4
    node.assert_quiet()


def test_full_makes_room_once_and_then_leaves_the_level_alone() -> None:
    node, old, keys = Node(disk_slots=8), chain(4, seed=3), chain(2)
    save(node.host, node.space, old)
    node.run()
    save(node.host, node.space, keys)
    (first,) = node.settle()
    node.end(first, [FULL, FULL])
    assert sum(node.on_disk(old)) == 3
    (again,) = node.commands
    assert [part.key for part in again.parts] == keys
    node.end(again, [FULL, FULL])
    assert node.commands == []
    assert sum(node.on_disk(old)) == 3
    assert node.levels[0].sums.dropped_chunks == 2
    more = chain(1, seed=4)
    save(node.host, node.space, more)
    assert node.settle() == []
    node.now += FULL_S + 0.1
    node.movement.write(node.now)
    node.run()
    assert node.on_disk(more) == [True]
    node.assert_quiet()


def test_full_in_the_middle_tries_the_rest_again_with_what_hung_on_it() -> None:
    node, keys = Node(disk_slots=8, batch_chunks=4), chain(4)
    save(node.host, node.space, chain(2, seed=7))
    node.run()
    save(node.host, node.space, keys)
    (command,) = node.settle()
    node.end(command, [DONE, FULL, DONE, DONE])
    (again,) = node.commands
    assert [part.key for part in again.parts] == keys[1:]
    node.run()
    assert node.on_disk(keys) == [True] * 4
    node.assert_quiet()


def test_a_full_remote_is_left_alone_at_once() -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(1)
    save(node.host, node.space, keys)
    (command,) = node.settle()
    node.end(command, [FULL])
    assert node.levels[0].full_until_s == FULL_S
    node.assert_quiet()


def test_admission_auto_takes_everything_up_to_the_watermark() -> None:
    node = Node(disk_slots=20, admission=Admission.AUTO, batch_chunks=1)
    for seed in range(18):
        save(node.host, node.space, chain(1, seed=seed))
        node.run()
    assert node.levels[0].fill == 0.9
    one, other = chain(1, seed=50), chain(1, seed=51)
    save(node.host, node.space, one)
    save(node.host, node.space, other)
    node.run()
    assert node.on_disk([*one, *other]) == [False, False]
    node.movement.used(node.space, one, node.now)
    node.run()
    assert node.on_disk([*one, *other]) == [True, False]
    node.assert_quiet()


def test_remotes_are_filled_by_what_they_say() -> None:
    node = Node(disk_slots=0, remotes=1, admission=Admission.AUTO)
    level = node.levels[0]
    for used, fill in [(None, 0.0), (50, 0.5), (95, 0.95)]:
        level.usage = Usage(100, used)
        assert level.fill == fill
    save(node.host, node.space, chain(1))
    assert node.settle() == []
    node.assert_quiet()


def test_a_remote_that_lost_a_chunk_gets_it_again() -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(2)
    node.put_down(keys)
    node.stored[0].clear()  # its server has evicted it
    assert node.ask(keys).waiting
    node.run()
    assert not node.ask(keys).waiting
    save(node.host, node.space, keys)
    node.run()
    assert len(node.stored[0]) == 2
    node.assert_quiet()


def test_a_namespace_that_has_no_place_on_disk_is_left_out() -> None:
    node, keys = Node(remotes=1), chain(3)
    node.levels[0].spaces.clear()
    save(node.host, node.space, keys)
    node.movement.used(node.space, keys, node.now)
    node.run()
    assert {it.level for it in node.done} == {1}
    assert node.movement.clear(node.space, node.now).deleted == 3
    assert node.movement.evict(node.space, keys, node.now, True) == Cleared(0, 0)
    node.assert_quiet()


@pytest.mark.parametrize("result", [None, [], [DONE], [DONE] * 3, Usage(1, 1)])
def test_an_answer_that_is_none_leaves_nothing_behind(result: list[Outcome] | Usage | None) -> None:
    node, keys = Node(), chain(2)
    save(node.host, node.space, keys)
    (command,) = node.settle()
    node.end(command, result)
    assert node.on_disk(keys) == [False, False]
    assert not node.levels[0].well
    node.movement.tick(node.now + 1.0)
    (probe,) = [it for it in node.settle() if it.verb is Verb.USAGE]
    node.end(probe, [DONE])
    assert not node.levels[0].well
    node.movement.tick(node.now + 6.0)
    node.run()
    assert node.levels[0].well
    node.assert_quiet()


def test_usage_is_asked_now_and_then_and_never_twice_at_once() -> None:
    node = Node()
    for second in range(30):
        node.movement.tick(float(second))
    assert len(node.settle()) == 1
    node.now = 30.0
    node.run()
    asked = 0
    for second in range(30, 30 + 4 * int(USAGE_S)):
        node.now = float(second)
        node.movement.tick(node.now)
        asked += len(node.settle())
        node.run(took_s=0.0)
    assert asked == 4


def test_a_long_queue_of_what_has_left_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "TURNS_MAX", 100)
    node = Node(host_slots=1)
    node.levels[0].queue.update({(node.space, key): False for seed in range(10) for key in chain(90, seed=seed)})
    count = len(node.levels[0].queue)
    node.movement.write(node.now)
    assert len(node.levels[0].queue) == count - 100
    while node.levels[0].queue:
        node.movement.write(node.now)
    assert node.levels[0].sums.dropped_chunks == count
    node.assert_quiet()


def test_clear_leaves_nothing_anywhere_not_even_what_was_on_its_way() -> None:
    node, keys, other = Node(remotes=1, batch_chunks=8), chain(3), chain(3, seed=2)
    node.put_down(keys)
    assert node.ask(keys).waiting
    (read,) = node.commands
    assert read.verb is Verb.READ
    save(node.host, node.space, other)
    assert {it.verb for it in node.settle()} == {Verb.READ, Verb.WRITE}
    node.fetches.clear(node.space, node.now)
    node.run()
    for cache in (node.host, node.disk):
        assert len(cache.entries) == 0
    assert node.stored[1] == set()
    node.assert_quiet()


def test_what_is_on_its_way_when_a_namespace_is_cleared_is_gone_at_once() -> None:
    """Nobody finds what moves read or write, its slots wait for them, and the same chunks can be saved again."""
    node, keys, other = Node(batch_chunks=8), chain(3), chain(3, seed=2)
    node.put_down(keys)
    assert node.ask(keys).waiting
    save(node.host, node.space, other)
    read, write = node.settle()
    assert (read.verb, write.verb) == (Verb.READ, Verb.WRITE)
    cleared = node.fetches.clear(node.space, node.now)
    assert cleared == Cleared(6, 0), "three on disk, three in HOST"
    assert not node.ask(keys).waiting
    assert (node.host.pool.taken_slots, node.disk.pool.taken_slots) == (6, 6)
    save(node.host, node.space, [*keys])
    save(node.host, node.space, other)
    node.run()
    for prompt in (keys, other):
        assert node.host.match(node.space, prompt) == 3
        assert node.on_disk(prompt) == [True] * 3
    assert node.levels[0].sums.read_chunks == 0
    assert (node.host.pool.taken_slots, node.disk.pool.taken_slots) == (6, 6)
    node.assert_quiet()


def test_a_remote_is_left_alone_until_it_has_deleted() -> None:
    node, keys = Node(disk_slots=0, remotes=2), chain(2)
    node.put_down(keys)
    for level in node.levels:
        level.breaker.failed(node.now, 0.5, unavailable=True)
    assert node.fetches.clear(node.space, node.now).pending == ("remote0", "remote1")
    assert node.settle() == [], "they are sick"
    save(node.host, node.space, keys)
    node.now = 10.0
    node.movement.tick(node.now)
    for _ in range(3):  # a probe heals, the deletion fails, and is repeated later
        node.run(lambda it: None if it.verb is Verb.CLEAR else node.answer(it))
        assert node.movement.pending(node.space) == ("remote0", "remote1")
        node.now += 10.0
        node.movement.tick(node.now)
    assert {it.verb for it in node.done if it.level == 0} == {Verb.WRITE, Verb.USAGE, Verb.CLEAR}
    assert len(node.stored[0]) == 2, "as before"
    node.done.clear()
    node.run()
    node.movement.tick(node.now)
    node.run()
    verbs = [it.verb for it in node.done if it.level == 0 and it.verb is not Verb.USAGE]
    assert verbs == [Verb.CLEAR, Verb.WRITE]
    assert node.movement.pending(node.space) == ()
    assert len(node.stored[0]) == len(node.stored[1]) == 2, "what was saved since"
    node.assert_quiet()


def test_a_deletion_waits_for_the_last_write_and_for_its_turn() -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(1)
    second = node.host.add_space(namespace(node.layout, "other"), node.layout)
    save(node.host, node.space, keys)
    (write,) = node.settle()
    assert node.fetches.clear(node.space, node.now).pending
    assert node.settle() == [write]
    assert node.fetches.clear(second, node.now).pending
    assert [it.verb for it in node.settle()] == [Verb.WRITE, Verb.CLEAR], "the other's is not held up"
    node.end(write, [DONE])
    (first,) = node.settle()
    node.end(first, [])
    (last,) = node.settle()
    assert (last.verb, first.space, last.space) == (Verb.CLEAR, second, node.space)
    node.end(last, [])
    assert not node.levels[0].clearing
    node.assert_quiet()


def test_evict_reaches_below_only_when_told_to() -> None:
    node, keys = Node(remotes=1), chain(3)
    save(node.host, node.space, keys)
    node.run()
    assert node.movement.evict(node.space, keys[1:], node.now, False) == Cleared(2, 0)
    node.run()
    assert (node.host.match(node.space, keys), sum(node.on_disk(keys)), len(node.stored[1])) == (1, 3, 3)
    assert node.movement.evict(node.space, keys[1:], node.now, True) == Cleared(2, 0)
    node.run()
    assert (node.host.match(node.space, keys), sum(node.on_disk(keys)), len(node.stored[1])) == (1, 1, 1)
    node.assert_quiet()


def test_a_wrong_chunk_is_dropped_only_where_it_was() -> None:
    node, keys = Node(), chain(1)
    node.put_down(keys)
    assert node.ask(keys).waiting
    (read,) = node.commands
    # Meanwhile somebody found it wrong and it was written again, elsewhere.
    place = read.parts[0].place
    assert node.disk.drop(0, 0, keys[0], place, "corrupt")
    save(node.disk, 0, keys)
    assert node.on_disk(keys) == [True]
    node.end(read, [Outcome.CORRUPT])
    assert node.on_disk(keys) == [True]
    assert not node.disk.drop(0, 0, keys[0], place, "corrupt")
    node.assert_quiet()


def test_a_corrupt_chunk_of_a_remote_is_deleted_there() -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(2)
    node.put_down(keys)
    node.ask(keys)
    node.run(lambda it: [DONE, Outcome.CORRUPT] if it.verb is Verb.READ else node.answer(it))
    assert {key for _, key in node.stored[0]} == {keys[0]}
    assert node.history.last(keys[1]) is not None
    node.assert_quiet()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_tiers_say_nothing_is_lost_and_nothing_hangs(seed: int) -> None:
    """Any outcomes in any order: leases end, the tree holds, what is on DISK was written."""
    rng = random.Random(seed)
    node = Node(disk_slots=rng.choice([2, 5, 40]), host_slots=12, remotes=rng.randrange(2))
    prompts = [chain(6), chain(6, seed=1, stem=[1000, 1001]), chain(4, seed=2)]
    written: set[bytes] = set()
    for step in range(40):
        kind = rng.choice(["save", "save", "ask", "ask", "end", "end", "end", "clear", "spill", "evict", "tick"])
        keys = rng.choice(prompts)
        if kind == "save":
            save(node.host, node.space, keys, now=node.now)
        elif kind == "ask":
            node.ask(keys, request=f"r{step % 3}")
        elif kind == "clear":
            node.fetches.clear(node.space, node.now)
        elif kind == "spill":
            node.host.clear(node.space)
        elif kind == "evict":
            node.movement.evict(node.space, keys[2:3], node.now, rng.random() < 0.5)
        elif kind == "tick":
            node.movement.tick(node.now)
            node.fetches.tick(node.now)
        elif node.commands:
            command = rng.choice(node.commands)
            count = len(command.parts)
            mixed = rng.choices([DONE, *Outcome], k=count)
            outcomes = rng.choice([None, [DONE] * count, [DONE] * count, mixed])
            if command.verb is Verb.USAGE and outcomes is not None:
                node.end(command, Usage(100, 50))
                continue
            if command.verb is Verb.WRITE and outcomes is not None and placed(command):
                written |= {part.key for part, it in zip(command.parts, outcomes, strict=True) if it is DONE}
            node.end(command, outcomes)
        node.settle()
        node.now += rng.choice([0.0, 0.01, 0.3, 3.0])
        node.disk.check()
        assert set(node.disk.spaces[0].index[0]) <= written | {
            part.key for it in node.commands if it.verb is Verb.WRITE for part in it.parts
        }
        for level in node.levels:
            assert level.reads <= 2 * level.readers
            assert level.writes <= level.writers
    node.run(lambda it: Usage(None, None) if it.verb is Verb.USAGE else [FAILED] * len(it.parts))
    node.assert_quiet()


def test_what_is_only_read_from_is_told_last_and_never_written_to() -> None:
    """Peers read from the other tiers: told before those, they could have it again."""
    node, keys = Node(disk_slots=0, remotes=2), chain(2)
    node.levels[0].admission = Admission.NONE
    node.put_down(keys)
    assert [len(node.stored[number]) for number in (0, 1)] == [0, 2]
    assert node.fetches.clear(node.space, node.now).pending == ("remote0", "remote1")
    (first,) = node.settle()
    assert (first.verb, first.level) == (Verb.CLEAR, 1)
    node.end(first, [])
    (second,) = node.settle()
    assert (second.verb, second.level) == (Verb.CLEAR, 0)
    node.end(second, [])
    assert node.movement.pending(node.space) == ()
    node.assert_quiet()


def test_a_namespace_that_is_cleared_here_only_is_left_to_the_others_elsewhere() -> None:
    node, keys = Node(disk_slots=0, remotes=1), chain(2)
    node.put_down(keys)
    save(node.host, node.space, keys)
    assert node.fetches.clear(node.space, node.now, here_only=True).pending == ()
    assert node.host.match(node.space, keys) == 0
    assert not [it for it in node.settle() if it.verb is Verb.CLEAR]
    assert len(node.stored[0]) == 2
