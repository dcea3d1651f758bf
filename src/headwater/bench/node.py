"""`headwater bench node`: one node and one engine on this machine."""

from __future__ import annotations

from headwater.bench import calls, copies, footprint
from headwater.bench.harness import Suite

SUITE = Suite(
    "node",
    "saves, loads, lookups and calls between an engine and a node on this machine",
    (
        *copies.experiments(),
        calls.LOOKUPS,
        calls.KEY_CHECKS,
        calls.SMALL_CALL,
        footprint.START,
        footprint.BOOKKEEPING,
    ),
)
