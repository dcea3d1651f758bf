"""A tenant's quota over the whole cluster, as a line for each node that all nodes draw for themselves.

Every node knows, from the members' reports, how much each holds of a tenant. Of n nodes, one may hold

    line = kept + (quota - sum of kept) / n

    kept    what it holds; if that is more than (1 - SHIFT) of the quota for all together, scaled down to that, for all
            alike

With equal reports everywhere, the lines of all nodes add up to the quota. What the scaling frees is offered to all
alike. So room moves, a tenth a round, from nodes where the tenant's chunks lie to those where it is asked for; and a
node may always hold a tenth of its even share, whatever others say or have said long ago.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

SHIFT = 0.1


def line_bytes(quota_bytes: int, own_bytes: int, others_bytes: Sequence[int]) -> int:
    """How much of a tenant a node may hold that holds `own_bytes`, given what each other node holds."""
    held = own_bytes + sum(others_bytes)
    scale = min(1.0, (1 - SHIFT) * quota_bytes / held) if held > 0 else 1.0
    return int(scale * own_bytes + (quota_bytes - scale * held) / (len(others_bytes) + 1))


class Quotas:
    """One node's lines for all tenants that have a quota over the cluster."""

    def __init__(self, quotas: Mapping[str, int]) -> None:
        """`quotas` are bytes by tenant."""
        self._quotas = dict(quotas)
        self._reports: dict[int, dict[str, int]] = {}

    def __repr__(self) -> str:
        return f"Quotas({len(self._quotas)} tenants, {len(self._reports)} other members)"

    def listed(self, numbers: Collection[int]) -> None:
        """All other members: reports of those that are not among them are forgotten, the others count from now on."""
        self._reports = {number: self._reports.get(number, {}) for number in numbers}

    def reported(self, number: int, held: Mapping[str, int]) -> None:
        """What a listed member holds, in bytes by tenant."""
        if number in self._reports:
            self._reports[number] = {it: max(held.get(it, 0), 0) for it in self._quotas}

    def lines(self, held: Mapping[str, int]) -> dict[str, int]:
        """How much of each tenant we may hold, who hold so much now."""
        found: dict[str, int] = {}
        for tenant, quota_bytes in self._quotas.items():
            others = [it.get(tenant, 0) for it in self._reports.values()]
            found[tenant] = line_bytes(quota_bytes, held.get(tenant, 0), others)
        return found
