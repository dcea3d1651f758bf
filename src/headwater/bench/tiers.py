"""`headwater bench tiers`: the tiers below DRAM on this machine."""

from __future__ import annotations

from headwater.bench import disk, remote, restart, rivals
from headwater.bench.harness import Suite

SUITE = Suite(
    "tiers",
    "disk, Redis/Valkey and restarts, against fio, redis-benchmark and LMCache",
    (
        disk.TRANSFER,
        disk.CHECKSUM,
        remote.TRANSFER,
        remote.LOOKUP,
        restart.RESTART,
        restart.LOOKUP,
        *rivals.EXPERIMENTS,
    ),
)
