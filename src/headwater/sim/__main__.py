"""Play seeds: `python -m headwater.sim --seeds 0:1000`, or one with its log: `python -m headwater.sim --seed 7`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from headwater.sim.world import Outcome, SimulationError, World


def seed_range(text: str) -> range:
    """`A:B` as the seeds from A up to and without B."""
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seeds such as 0:1000")
    return range(int(first), int(end))


def replay(seed: int) -> int:
    """Play one seed and write its log, event by event; the exit status."""
    world = World(seed)
    status, end = 0, ""
    try:
        end = f"fine: {world.play()}"
    except SimulationError as error:
        status, end = 1, f"WRONG: {error}"
    sys.stdout.write(f"{world.plan}\n{world.faults}\n")
    sys.stdout.writelines(f"{line}\n" for line in world.schedule.log)
    sys.stdout.write(f"{end}\n")
    return status


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, object]:
    """The sums of many outcomes; `log_sha256` is equal wherever and however often the seeds are played."""
    digest = hashlib.sha256("".join(it.log_sha256 for it in outcomes).encode()).hexdigest()
    sums: dict[str, object] = {"seeds": len(outcomes)}
    for name in ("events", "requests", "lookup_tokens", "hit_tokens", "reads", "stored", "evicted", "expired"):
        sums[name] = sum(asdict(it)[name] for it in outcomes)
    return {**sums, "seconds": round(seconds, 1), "log_sha256": digest}


def play_all(seeds: range, *, as_json: bool) -> int:
    """Play many seeds and write what came of them; stops at the first that is wrong; the exit status."""
    start_s = time.monotonic()
    outcomes: list[Outcome] = []
    for seed in seeds:
        try:
            outcomes.append(World(seed).play())
        except SimulationError as error:
            sys.stderr.write(f"WRONG: {error}\n")
            return 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{len(outcomes)} of {len(seeds)} seeds")
    sums = summary(outcomes, time.monotonic() - start_s)
    sys.stdout.write(json.dumps(sums) + "\n" if as_json else f"\rfine: {sums}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status, 1 if a seed went wrong."""
    parser = argparse.ArgumentParser(prog="python -m headwater.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="play this seed and write its log")
    which.add_argument("--seeds", type=seed_range, default=range(200), metavar="A:B", help="default: 0:200")
    parser.add_argument("--json", action="store_true", help="write the sums as JSON")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed)
    return play_all(options.seeds, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
