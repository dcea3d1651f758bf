"""The one registry of what `headwater bench` can measure."""

from __future__ import annotations

from headwater.bench import burst, node, proxy, route, store, tiers, transfer, vllm
from headwater.bench.harness import Suite

SUITES: dict[str, Suite] = {
    it.name: it
    for it in (node.SUITE, tiers.SUITE, transfer.SUITE, store.SUITE, route.SUITE, proxy.SUITE, burst.SUITE, vllm.SUITE)
}
