"""The one registry of what `headwater bench` can measure."""

from __future__ import annotations

from headwater.bench import node, vllm
from headwater.bench.harness import Suite

SUITES: dict[str, Suite] = {it.name: it for it in (node.SUITE, vllm.SUITE)}
