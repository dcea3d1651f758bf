"""The fleet that a trace is played on: its engines and their nodes, the tiers, and how it looks from outside."""

from __future__ import annotations

from headwater.fleet import Fleet, Instance, Place
from headwater.sim.fleet.config import FleetConfig, Group
from headwater.sim.fleet.engine import Engine
from headwater.sim.fleet.pool import Path
from headwater.sim.fleet.prepared import Prepared
from headwater.sim.fleet.tiers import Tiers
from headwater.types import Tier


class Stage:
    """Everything is known by an instance's number, which is that of its engine as well. `unit_tokens` is what prompts
    are told apart by: the trace's blocks, or the engines' where those are larger."""

    def __init__(self, prepared: Prepared, config: FleetConfig) -> None:
        self.prepared, self.config = prepared, config
        self.groups: list[Group] = [group for group in config.instances for _ in range(group.count)]
        unit = max(prepared.trace.block_tokens, *(group.block_tokens for group in config.instances))
        self.unit_tokens = unit
        self.tree = prepared.tree(unit)
        self.paths = {group.block_tokens: prepared.paths(unit, group.block_tokens) for group in config.instances}
        """Each prompt's blocks, by the size of an engine's."""
        self.unit_paths: list[Path] = prepared.paths(unit, unit)
        self.engines: list[Engine] = []
        self.nodes: list[int] = []
        """Of each instance. Groups do not share hosts."""
        first = node = 0
        for group in config.instances:
            for at in range(group.count):
                node = first + at // group.instances_per_host
                self.engines.append(Engine(len(self.engines), group.times, group.blocks, group.block_tokens))
                self.nodes.append(node)
            first = node + 1
        self.places = [Place(Tier.DEVICE, number) for number in range(len(self.engines))]
        self.tiers = Tiers(config, first, unit)
        self.live = self.instances()
        """What is so, which one Conductor alone knows at once."""

    def __repr__(self) -> str:
        return f"<Stage of {len(self.engines)} engines on {self.nodes[-1] + 1} nodes, {self.tiers.stores}>"

    def instances(self) -> dict[int, Instance]:
        """All of them, idle, as somebody may know them."""
        model, late_s = self.config.model, self.config.signals.load_lag_s
        return {
            number: Instance(
                number, group.times, group.capacity_tokens, group.role, self.nodes[number], model, late_s=late_s
            )
            for number, group in enumerate(self.groups)
        }

    def fleet(self, instances: dict[int, Instance]) -> Fleet:
        """What a policy looks at."""
        links = self.tiers.links if self.tiers.stores or self.config.link else {}
        return Fleet(instances, self.config.kv_bytes_per_token, links)
