"""All routing policies by name: ours, and those that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headwater.core import rivals
from headwater.core.routing import Headwater

if TYPE_CHECKING:
    from headwater.ports import RoutingPolicy

POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "headwater": Headwater,
    "round_robin": rivals.RoundRobin,
    "least_load": rivals.LeastLoad,
    "session": rivals.Session,
    "prefix": rivals.PrefixOnly,
    "dynamo": rivals.Dynamo,
    "dynamo_2": lambda: rivals.Dynamo(prefill_load_scale=2),
    "sticky": rivals.StickyUntilSaturated,
    "mooncake": rivals.Mooncake,
    "cache_aware": rivals.CacheAware,
}
"""A factory each: a policy keeps what it chose."""
