"""Play seeds: `python -m headwater.sim --seeds 0:1000`, or one with its log: `python -m headwater.sim --seed 7`.

`python -m headwater.sim cluster ...` plays clusters of nodes instead of one node with its tiers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields

from headwater.sim.cluster import Cluster, ClusterError, ClusterOutcome
from headwater.sim.world import Outcome, SimulationError, World


def seed_range(text: str) -> range:
    """`A:B` as the seeds from A up to and without B."""
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seeds such as 0:1000")
    return range(int(first), int(end))


def replay(seed: int, kind: type[World | Cluster] = World) -> int:
    """Play one seed and write its log, event by event; the exit status."""
    world = kind(seed)
    status, end = 0, ""
    try:
        end = f"fine: {world.play()}"
    except (SimulationError, ClusterError) as error:
        status, end = 1, f"WRONG: {error}"
    sys.stdout.write(f"{world.plan}\n{world.faults}\n")
    sys.stdout.writelines(f"{line}\n" for line in world.schedule.log)
    sys.stdout.write(f"{end}\n")
    return status


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, object]:
    """The sums of many outcomes; `log_sha256` is equal wherever and however often the seeds are played."""
    digest = hashlib.sha256("".join(it.log_sha256 for it in outcomes).encode()).hexdigest()
    sums: dict[str, object] = {"seeds": len(outcomes)}
    for name in (it.name for it in fields(Outcome) if it.name not in ("seed", "log_sha256")):
        sums[name] = sum(getattr(it, name) for it in outcomes)
    return {**sums, "seconds": round(seconds, 1), "log_sha256": digest}


def cluster_summary(outcomes: Sequence[ClusterOutcome], seconds: float) -> dict[str, object]:
    """The same for clusters."""
    digest = hashlib.sha256("".join(it.log_sha256 for it in outcomes).encode()).hexdigest()
    sums: dict[str, object] = {"seeds": len(outcomes)}
    for name in ("nodes", "events", "messages", "lost"):
        sums[name] = sum(getattr(it, name) for it in outcomes)
    each = [asdict(it.sums) for it in outcomes]
    sums |= {name: sum(it[name] for it in each) for name in each[0]}
    return {**sums, "seconds": round(seconds, 1), "log_sha256": digest}


def play_all(seeds: range, *, as_json: bool, clusters: bool = False) -> int:
    """Play many seeds and write what came of them; stops at the first that is wrong; the exit status."""
    start_s = time.monotonic()
    outcomes: list[Outcome] = []
    of_clusters: list[ClusterOutcome] = []
    for count, seed in enumerate(seeds, 1):
        try:
            if clusters:
                of_clusters.append(Cluster(seed).play())
            else:
                outcomes.append(World(seed).play())
        except (SimulationError, ClusterError) as error:
            sys.stderr.write(f"WRONG: {error}\n")
            return 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{count} of {len(seeds)} seeds")
    took_s = time.monotonic() - start_s
    sums = cluster_summary(of_clusters, took_s) if clusters else summary(outcomes, took_s)
    sys.stdout.write(json.dumps(sums) + "\n" if as_json else f"\rfine: {sums}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status, 1 if a seed went wrong."""
    parser = argparse.ArgumentParser(prog="python -m headwater.sim", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("node", "cluster"), default="node", help="default: node")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="play this seed and write its log")
    which.add_argument("--seeds", type=seed_range, default=range(200), metavar="A:B", help="default: 0:200")
    parser.add_argument("--json", action="store_true", help="write the sums as JSON")
    options = parser.parse_args(arguments)
    clusters = options.what == "cluster"
    if options.seed is not None:
        return replay(options.seed, Cluster if clusters else World)
    return play_all(options.seeds, as_json=options.json, clusters=clusters)


if __name__ == "__main__":
    sys.exit(main())
