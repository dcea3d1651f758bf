"""Unique prompts and instances that come and go: what is remembered stays within its bounds.

HEADWATER_TEST_PROMPTS and HEADWATER_TEST_JOINS make it as long as one likes; the whole is 1000000 and 200.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import deque
from itertools import count

import pytest

from headwater.fleetfile.model import Limits
from tests.conductor.brain.rig import BrainRig, Client, prompt, spec

PROMPTS = int(os.environ.get("HEADWATER_TEST_PROMPTS", "8000"))
JOINS = int(os.environ.get("HEADWATER_TEST_JOINS", "50"))
SEED = 20240909
MOST_BYTES = 12 << 20
"""What the second half may add: a million requests of which 25 bytes each were kept would take as much."""


def resident_bytes() -> int:
    """Of this process, now."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_a_million_prompts_and_hundreds_of_joins_reach_a_plateau() -> None:
    rig = BrainRig(6, quiet=True, explained=2000, limits=Limits(requests=200))
    rig.sight.most = 20_000
    draw, numbers, names = random.Random(SEED), count(), count()
    under_way: deque[Client] = deque()
    joined: deque[str] = deque()
    threads = threading.active_count()

    def serve(prompts: int, joins: int) -> None:
        for at in range(prompts):
            client = rig.take(prompt(next(numbers), 64 + at % 64), output=8)
            rig.timers.run(0.002)
            if client.targets:
                under_way.append(client)
            if len(under_way) > 60:
                done = under_way.popleft()
                rig.start(done)
                if draw.random() < 0.02:
                    rig.lose(done, "late")
                    rig.start(done)
                rig.finish(done, 8)
            if at % max(prompts // joins, 1) == 0:
                joined.append(f"n{next(names)}")
                rig.roster.register(spec(joined[-1], node=f"node{next(names) % 50}"), next(numbers))
                if len(joined) > 4:
                    rig.roster.unregister(joined.popleft(), next(numbers))

    serve(PROMPTS // 2, JOINS // 2)
    middle = resident_bytes()
    serve(PROMPTS // 2, JOINS // 2)
    grown = resident_bytes() - middle
    print(f"{middle >> 20} MiB after half of {PROMPTS} prompts and {JOINS} joins, {grown >> 10} KiB more at the end")
    while under_way:
        rig.finish(under_way.popleft())
    rig.timers.run(60.0)
    assert rig.is_still() and threading.active_count() == threads
    assert len(rig.roster.instances()) <= 10 and len(rig.brain.explanations) == 2000
    assert max(rig.roster.instances()) < 12, "numbers are used again"
    assert rig.timers.pending() == 0
    assert grown < MOST_BYTES, f"{grown >> 20} MiB"
