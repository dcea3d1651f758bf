"""The prefix index: events and questions beside Dynamo's RadixTree, in the same rounds; memory and scale of ours.

    python -m headwater.bench.index INSTANCES BLOCKS CHAIN_BLOCKS

is our side of `holdings`. Everything of both is timed from Python: what a router written in it pays.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headwater._kernels.index import make_table
from headwater.bench import holdings
from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Series, Spec, Unmeasured
from headwater.bench.holdings import Span, numbers_of
from headwater.bench.turns import Cell, Contest, Samples, Turner, peer_command, turner
from headwater.core.prefix import PrefixIndex
from headwater.errors import UnavailableError
from headwater.fleet import Place
from headwater.types import KEY_BYTES, Tier

US, MS = 1e6, 1e3
DYNAMO = "Dynamo RadixTree 1.6.1"
OURS, THEIRS = "ours", "dynamo"
ROUNDS_MAX = 12
BLOCKS, CHAIN = 100_000, 200
FLEET, PROMPT_BLOCKS, FLEET_BLOCKS = 1000, 250, 10_000
"""A prompt of 4,000 tokens in blocks of 16."""
IDLE, ONE_CORE = "idle", "one-core"
WHERE = {IDLE: "all", ONE_CORE: "one"}


class Ours:
    """Our index of instances."""

    def __init__(self) -> None:
        self._index = PrefixIndex(make_table=make_table)

    def stored(self, instance: int, span: Span) -> Callable[[], object]:
        """See `holdings.Index`."""
        return partial(self._index.stored, Place(Tier.DEVICE, instance), keys_of(span))

    def removed(self, instance: int, span: Span) -> Callable[[], object]:
        """See `holdings.Index`."""
        return partial(self._index.removed, Place(Tier.DEVICE, instance), keys_of(span))

    def question(self, spans: Sequence[Span]) -> Callable[[], Any]:
        """See `holdings.Index`."""
        return partial(self._index.find, [key for span in spans for key in keys_of(span)])

    def lengths(self, answer: Any) -> dict[int, int]:
        """See `holdings.Index`."""
        return {place.number: blocks for place, blocks in answer.items()}


class OursInSteps(Ours):
    """The same, asked for masks instead of places."""

    def question(self, spans: Sequence[Span]) -> Callable[[], Any]:
        """See `holdings.Index`."""
        return partial(self._index.steps, [key for span in spans for key in keys_of(span)])

    def lengths(self, answer: Any) -> dict[int, int]:
        """See `holdings.Index`."""
        return {place.number: blocks for blocks, mask in answer for place in self._index.places(mask)}


def keys_of(span: Span) -> list[bytes]:
    """Keys that nobody else has."""
    return [it.to_bytes(KEY_BYTES, "little") for it in numbers_of(span, 8 * KEY_BYTES)]


def _command(instances: int, blocks: int, chain: int = CHAIN, *words: str) -> list[str]:
    return [sys.executable, "-m", "headwater.bench.index", str(instances), str(blocks), str(chain), *words]


# ---- beside Dynamo ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of call: what it is, what it is timed as, what it must reach."""

    verb: str
    about: str
    goal: Goal | None = None
    blocks: int = CHAIN
    calls: int = 1000
    latency_us: float | None = None


KINDS = (
    Kind("everyone", "a prompt that all instances hold", Goal(at_least=True, plus=100e3), latency_us=8),
    Kind("somebody", "a prompt that one instance holds", Goal(at_least=True, plus=100e3), latency_us=8),
    Kind("half", "a prompt whose first half all instances hold", Goal(at_least=True, plus=100e3), latency_us=8),
    Kind("nobody", "a prompt that none holds", Goal(at_least=True, plus=100e3), latency_us=8),
    Kind("stored", f"stored events of {CHAIN} blocks", Goal(at_least=True, plus=4.6e6), calls=200),
    Kind("removed", f"removed events of {CHAIN} blocks", Goal(at_least=True, plus=7e6), calls=200),
    Kind("grown", "stored events of one block", Goal(at_least=True, factor=1.0), calls=1000),
)


def _unit(kind: Kind) -> str:
    return "queries/s" if kind.verb in holdings.QUESTIONS else "events/s" if kind.verb == "grown" else "blocks/s"


def _specs() -> Iterator[Spec]:
    words = {IDLE: "all cores for everybody", ONE_CORE: "everybody on one core"}
    for kind in KINDS:
        for condition, where in words.items():
            name = f"index/{kind.verb}/{condition}"
            about = f"{kind.about}, 8 instances of {BLOCKS:,} blocks, {where}"
            yield Spec(f"{name}/rate", _unit(kind), about, kind.goal, DYNAMO)
            if kind.latency_us is not None:
                goal = Goal(at_least=False, plus=kind.latency_us)
                yield Spec(f"{name}/p50", "us", f"{kind.about}, {where}", goal, DYNAMO)
                yield Spec(f"{name}/p99", "us", "99th percentile", None, DYNAMO)


def measure_beside(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See BESIDE."""
    blocks = BLOCKS // 10 if effort.quick else BLOCKS
    plan = {}
    for kind in KINDS:
        for condition, where in WHERE.items():
            if any(it.startswith(f"index/{kind.verb}/{condition}/") for it in wanted):
                calls = min(kind.calls, blocks // (4 * CHAIN)) if effort.quick else kind.calls
                cell = Cell(kind.blocks, 1, calls, kind.verb, where)
                plan[f"{kind.verb}/{condition}"] = dict.fromkeys((OURS, THEIRS), cell)
    readings: dict[str, Reading | Unmeasured] = {}
    with _contest(blocks) as it:
        samples = it.run(plan, min(effort.rounds, ROUNDS_MAX), effort.after_turn)
        for name, sides in plan.items():
            readings |= _compared(name, sides[OURS], samples, it.reasons)
    return readings


@contextmanager
def _contest(blocks: int) -> Iterator[Contest]:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name, Contest() as found:
        sizes = [str(8), str(blocks), str(CHAIN)]
        found.add(OURS, "our index", lambda: _command(8, blocks), Path(name, "ours.log"))
        theirs = partial(peer_command, THEIRS, "dynamo_index.py")
        found.add(THEIRS, "Dynamo's index", lambda: [*theirs(), *sizes], Path(name, "dynamo.log"))
        yield found


def _compared(
    name: str, cell: Cell, samples: Mapping[tuple[str, str], Samples], reasons: Mapping[str, str]
) -> Readings:
    figures = [f"index/{name}/{it}" for it in ("rate", "p50", "p99")]
    if reason := reasons.get(OURS):
        return {it: Unmeasured(reason) for it in figures}
    amount = float(cell.block_bytes if cell.verb in ("stored", "removed") else 1)
    means, calls = {}, {}
    for who in (OURS, THEIRS):
        if who not in reasons:
            means[who] = Series(amount, samples[name, who].series.seconds)
            calls[who] = Series(1.0, samples[name, who].calls)
    rate = means[OURS].rate(means.get(THEIRS))
    latencies = [calls[OURS].latency(US, percent, calls.get(THEIRS)) for percent in (50, 99)]
    return dict(zip(figures, (rate, *latencies), strict=True))


BESIDE = Experiment("The prefix index: who holds how much of a prompt", tuple(_specs()), measure_beside)

# ---- memory and scale ---------------------------------------------------------------------------------------


def measure_scale(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See SCALE."""
    readings: dict[str, Reading | Unmeasured] = {}
    sizes = {"8": (8, BLOCKS, CHAIN), str(FLEET): (FLEET, FLEET_BLOCKS, PROMPT_BLOCKS)}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name:
        for title, (instances, blocks, chain) in sizes.items():
            if any(it.startswith(f"index/{title}/") for it in wanted):
                scaled = (instances // 10 or 1, blocks, chain) if effort.quick else (instances, blocks, chain)
                log = Path(name, f"{title}.log")
                try:
                    with turner("our index", _command(*scaled), log) as it:
                        readings |= _scale(title, it, chain, effort)
                    if title == str(FLEET):
                        with turner("our index", _command(*scaled, "steps"), log) as it:
                            readings |= _masks(title, it, chain, effort)
                except UnavailableError as error:
                    readings |= {spec.name: Unmeasured(str(error)) for spec in SCALE.specs if title in spec.name}
    return readings


def _scale(title: str, it: Turner, blocks: int, effort: Effort) -> Readings:
    filled = it.ask("filled")
    size = filled["bytes"] / filled["held"]
    longest = filled["longest_s"] * MS
    seconds = _asked(it, blocks, effort)
    return {
        f"index/{title}/memory": Reading(size, size, size, 1),
        f"index/{title}/longest": Reading(longest, longest, longest, 1),
        f"index/{title}/find/p50": seconds.latency(US),
        f"index/{title}/find/p99": seconds.latency(US, 99),
    }


def _masks(title: str, it: Turner, blocks: int, effort: Effort) -> Readings:
    seconds = _asked(it, blocks, effort)
    return {f"index/{title}/steps/p50": seconds.latency(US), f"index/{title}/steps/p99": seconds.latency(US, 99)}


def _asked(it: Turner, blocks: int, effort: Effort) -> Series:
    calls = 50 if effort.quick else 500
    series = Series(1.0)
    it.turn(Cell(blocks, 1, calls, "everyone", "all"))
    for _ in range(min(effort.rounds, ROUNDS_MAX)):
        series.seconds += it.turn(Cell(blocks, 1, calls, "everyone", "all")).seconds
        effort.after_turn()
    return series


def _scale_specs() -> Iterator[Spec]:
    for title, about in {
        "8": f"8 instances of {BLOCKS:,} blocks",
        str(FLEET): f"{FLEET:,} of {FLEET_BLOCKS:,}",
    }.items():
        memory = Goal(at_least=False, plus=100)
        yield Spec(
            f"index/{title}/memory", "B/block", f"resident memory for each block of each instance, {about}", memory
        )
        yield Spec(f"index/{title}/longest", "ms", "the longest event while it grew", Goal(at_least=False, plus=10))
        yield Spec(f"index/{title}/find/p50", "us", f"a prompt that all hold, as places, {about}")
        yield Spec(f"index/{title}/find/p99", "us", "99th percentile")
    yield Spec(f"index/{FLEET}/steps/p50", "us", "the same, as masks")
    yield Spec(f"index/{FLEET}/steps/p99", "us", "99th percentile", Goal(at_least=False, plus=200))


SCALE = Experiment("The prefix index: memory and scale", tuple(_scale_specs()), measure_scale)

EXPERIMENTS = (BESIDE, SCALE)


if __name__ == "__main__":
    holdings.main(OursInSteps() if "steps" in sys.argv else Ours(), *map(int, sys.argv[1:4]))
