"""The pool of runs against a model that has every block, its requests and its age, one by one."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.sim.fleet.pool import Held, Path, Pool

# A tree: run 0 forks into 1 and 2, run 1 into 3 and 4.
PATHS: tuple[Path, ...] = (
    ((0, 3), (1, 4), (3, 5)),
    ((0, 3), (1, 4), (3, 2)),
    ((0, 3), (1, 4), (4, 3)),
    ((0, 3), (2, 6)),
    ((0, 2),),
    ((5, 7),),
)


class Blocks:
    """One block at a time: references, and idle ones from the oldest on."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self.refs: dict[tuple[int, int], int] = {}
        self.idle: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.made = 0

    def keys(self, path: Path) -> list[tuple[int, int]]:
        return [(run, at) for run, blocks in path for at in range(blocks)]

    def find(self, path: Path) -> tuple[int, int]:
        found = held = 0
        for key in self.keys(path):
            if key not in self.refs and key not in self.idle:
                break
            found += 1
            held += key in self.refs
        return found, held

    def take(self) -> None:
        if self.free:
            self.free -= 1
        else:
            self.idle.popitem(last=False)

    def hold(self, key: tuple[int, int]) -> None:
        if key in self.idle:
            del self.idle[key]
            self.refs[key] = 1
        elif key in self.refs:
            self.refs[key] += 1
        else:
            self.take()
            self.refs[key] = 1

    def release(self, keys: list[tuple[int, int]], private: int, generated: int) -> None:
        self.free += private - generated
        for _ in range(generated):
            self.made += 1
            self.idle[(-1, self.made)] = None
        for key in reversed(keys):
            self.refs[key] -= 1
            if not self.refs[key]:
                del self.refs[key]
                self.idle[key] = None


Step = st.tuples(st.integers(0, 3), st.integers(0, len(PATHS) - 1), st.integers(1, 6))


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(4, 24), steps=st.lists(Step, max_size=40))
def test_every_block_is_where_the_model_has_it(capacity: int, steps: list[tuple[int, int, int]]) -> None:
    pool, model = Pool(capacity), Blocks(capacity)
    pool.told = []
    resident: dict[int, int] = {}
    live: list[Held] = []
    for what, which, count in steps:
        active = sum(it.private for it in live) + len(model.refs)
        if what == 0:
            held = Held(PATHS[which])
            live.append(held)
        if what <= 1 and live:
            held = live[which % len(live)]
            keys = model.keys(held.path)[held.blocks : held.blocks + count]
            if sum(key not in model.refs for key in keys) <= capacity - active:
                for key in keys:
                    model.hold(key)
                pool.grow(held, len(keys))
        elif what == 2 and live:
            held = live[which % len(live)]
            if count <= capacity - active:
                pool.take(count)
                held.private += count
                for _ in range(count):
                    model.take()
        elif what == 3 and live:
            held = live.pop(which % len(live))
            generated = min(count - 1, held.private)
            model.release(model.keys(held.path)[: held.blocks], held.private, generated)
            pool.release(held, generated)
        assert [pool.find(path) for path in PATHS] == [model.find(path) for path in PATHS]
        assert pool.active == sum(it.private for it in live) + len(model.refs)
        assert pool.free == model.free
        for run, before, after in pool.told:
            assert resident.get(run, 0) == before
            resident[run] = after
        pool.told.clear()
        assert {run: blocks for run, blocks in resident.items() if blocks} == dict(pool.resident())


def test_what_was_evicted_is_told_and_what_is_cleared_too() -> None:
    pool = Pool(4)
    pool.told = []
    for path in (((0, 3),), ((1, 3),)):
        held = Held(path)
        pool.grow(held, 3)
        pool.release(held)
    assert pool.told == [(0, 0, 3), (0, 3, 1), (1, 0, 3)]
    pool.told.clear()
    pool.clear()
    assert sorted(pool.told) == [(0, 1, 0), (1, 3, 0)]
    assert (pool.free, pool.active) == (4, 0)


def test_taken_pieces_do_not_pile_up() -> None:
    pool = Pool(8)
    for _ in range(20_000):
        held = Held(((0, 4),))
        pool.grow(held, 4)
        pool.release(held)
    assert len(pool.queue) < 10_000
    assert pool.find(((0, 4),)) == (4, 0)
