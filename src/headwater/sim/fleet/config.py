"""The description of a fleet, as its file says it: instances, tiers and links, the policy, admission, what goes wrong.

    kv_bytes_per_token: 128KiB
    instances:
      - {count: 8, blocks: 16384, block_tokens: 64, times: mocker, instances_per_host: 4}
    tiers:
      host: {size: 64GiB, bytes_s: 20GB, latency_s: 100us}
      remote: {size: 512GiB, bytes_s: 10GB, latency_s: 1ms, keeping: demand, saving: evicted}
    link: {bytes_s: 10GB, latency_s: 1ms}
    policy: headwater

A tier is told when it is written and what stays in it. `saving: computed` writes KV once it is computed, and so holds
what DEVICEs hold as well; `saving: evicted` writes it when a DEVICE is about to evict it, and so adds to them, but
loses what its link is too slow for. `keeping` is by last use (`lru`), or by a rule of `core`: `learned` counts every
use, `demand` only those that no DEVICE served, and is told by `saving` how old what comes is.

Whatever is not in the tree below, or does not parse, is refused with its place, the reason and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headwater.enginetimes import EngineTimes
from headwater.errors import ConfigError
from headwater.fleet import Role
from headwater.fleetfile.tables import read_yaml
from headwater.sim.fleet.tables import (
    by,
    each,
    number,
    rate,
    reader,
    seconds,
    section,
    shown,
    size_bytes,
    table,
    within,
)
from headwater.values import nearest, one_of, text, truth, whole_number

INSTANCES_MAX = 10_000


def _role(value: object) -> Role:
    return Role(one_of(*(it.value for it in Role))(value))


@dataclass(frozen=True, slots=True)
class Group:
    """Instances that are all alike."""

    blocks: int = field(metadata=by(whole_number(1, 100_000_000)))
    """How many blocks of KV each has."""
    times: EngineTimes = field(metadata=by(lambda value: value))
    """A name of KNOWN_TIMES (mocker if nothing is said), the fields of EngineTimes, or the path of a file that has them
    under `times`."""
    count: int = field(default=1, metadata=by(whole_number(1, INSTANCES_MAX)))
    role: Role = field(default=Role.BOTH, metadata=by(_role))
    block_tokens: int = field(default=64, metadata=by(whole_number(1, 65536)))
    instances_per_host: int = field(default=1, metadata=by(whole_number(1, INSTANCES_MAX)))
    """Groups do not share hosts."""
    startup_s: float = field(default=0.0, metadata=by(seconds))
    """How long an instance takes to come back after its death, on top of the time it is away."""

    @property
    def capacity_tokens(self) -> int:
        """Of one instance."""
        return self.blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A tier below DEVICE: of each node (HOST, DISK), or the one that all share (REMOTE)."""

    size: int = field(metadata=by(size_bytes))
    bytes_s: int = field(metadata=by(rate))
    """Between a node and the tier, either way."""
    latency_s: float = field(default=0.0, metadata=by(seconds))
    keeping: str = field(default="lru", metadata=by(one_of("lru", "learned", "demand")))
    """What stays when space is short: what was used last, what `core/learned` says, or `core/keeping` (`demand`)."""
    saving: str = field(default="computed", metadata=by(one_of("computed", "evicted")))
    """When KV is saved: once it is computed, or when a DEVICE is about to evict it, which is what engines do that show
    their queue of free blocks."""
    total_bytes_s: int = field(default=0, metadata=by(size_bytes))
    """Of REMOTE: what all nodes together get; 0 is no limit."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Between any two nodes, each way; a node has this once, for all others together."""

    bytes_s: int = field(metadata=by(rate))
    latency_s: float = field(default=0.0, metadata=by(seconds))


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Tiers below the instances' DEVICE; those that are not named do not exist."""

    host: TierConfig | None = field(default=None, metadata=by(lambda value: _tier(value)))
    disk: TierConfig | None = field(default=None, metadata=by(lambda value: _tier(value)))
    remote: TierConfig | None = field(default=None, metadata=by(lambda value: _tier(value)))


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """A routing policy by its name, and what it is told to do differently."""

    name: str = field(default="headwater", metadata=by(text))
    knobs: dict[str, Any] = field(default_factory=dict, metadata=by(table))


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Whether requests that would miss their SLO are rejected, and whether they may wait for their turn."""

    enabled: bool = field(default=False, metadata=by(truth))
    long_share: float | None = field(default=None, metadata=by(number(0, 1)))
    """See `core/admission`; its default if nothing is said."""
    quantum: int | None = field(default=None, metadata=by(whole_number(1, 1 << 30)))
    """What a tenant may take in one turn, in tokens of work; see `core/shares`."""


@dataclass(frozen=True, slots=True)
class SloConfig:
    """What every request is asked for; a goal only, if admission is off."""

    ttft_s: float = field(default=2.0, metadata=by(seconds))
    tpot_s: float = field(default=0.1, metadata=by(seconds))


@dataclass(frozen=True, slots=True)
class ConductorsConfig:
    """Who routes: requests go to them in turn, and each tells the others its loads now and then."""

    count: int = field(default=1, metadata=by(whole_number(1, 64)))
    exchange_s: float = field(default=0.1, metadata=by(seconds))


@dataclass(frozen=True, slots=True)
class Death:
    """An instance dies with all that it holds, and may come back empty."""

    instance: int = field(metadata=by(whole_number(0, INSTANCES_MAX)))
    at_s: float = field(metadata=by(seconds))
    back_s: float | None = field(default=None, metadata=by(seconds))
    """When it is back, on the same clock; never if nothing is said."""


@dataclass(frozen=True, slots=True)
class SignalsConfig:
    """What Conductors hear, and how late."""

    event_lag_s: float = field(default=0.0, metadata=by(seconds))
    """From a change of what an instance or a tier holds until Conductors know."""
    load_lag_s: float = field(default=0.0, metadata=by(seconds))
    """How late first tokens and ends are known; what a Conductor routed itself it knows at once."""
    events: str = field(default="live", metadata=by(one_of("live", "missing")))


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """All of it."""

    instances: tuple[Group, ...] = field(metadata=by(lambda value: _groups(value)))
    model: str = field(default="", metadata=by(text))
    kv_bytes_per_token: int = field(default=0, metadata=by(size_bytes))
    tiers: TiersConfig = field(default_factory=TiersConfig, metadata=by(reader(TiersConfig)))
    link: LinkConfig | None = field(default=None, metadata=by(reader(LinkConfig)))
    policy: PolicyConfig = field(default_factory=PolicyConfig, metadata=by(lambda value: _policy(value)))
    admission: AdmissionConfig = field(default_factory=AdmissionConfig, metadata=by(lambda value: _admission(value)))
    slo: SloConfig = field(default_factory=SloConfig, metadata=by(reader(SloConfig)))
    conductors: ConductorsConfig = field(
        default_factory=ConductorsConfig, metadata=by(lambda value: _conductors(value))
    )
    deaths: tuple[Death, ...] = field(default=(), metadata=by(lambda value: _deaths(value)))
    signals: SignalsConfig = field(default_factory=SignalsConfig, metadata=by(reader(SignalsConfig)))
    load: float = field(default=1.0, metadata=by(number(1e-6, 1e6)))
    """Arrivals come so many times as fast as in the trace."""
    retries: int = field(default=3, metadata=by(whole_number(0, 100)))
    """How often a request that was lost with its instance is sent to another."""
    sample_s: float = field(default=0.0, metadata=by(seconds))
    """How often loads are sampled for the plots; 0 is SAMPLES times over the trace."""

    @property
    def instance_count(self) -> int:
        """Of all groups."""
        return sum(group.count for group in self.instances)

    def plain(self) -> dict[str, Any]:
        """As values that can be written to JSON or YAML."""
        return asdict(self)


def _mocker(capacity_tokens: int) -> EngineTimes:
    """The polynomial of ai-dynamo-runtime 1.6's mock engine, whose decoding depends on the share of KV in use."""
    return EngineTimes(
        prefill_fixed_s=16.50142e-3,
        prefill_token_s=1.518344e-5,
        prefill_token2_s=4.209989e-10,
        decode_fixed_s=5.74e-3,
        decode_kv_s=54.01e-3 / capacity_tokens,
        decode_kv2_s=-25.74e-3 / capacity_tokens**2,
    )


KNOWN_TIMES: dict[str, Callable[[int], EngineTimes]] = {"mocker": _mocker}
"""Step times by name, of an engine that holds so many tokens."""


def parse_fleet(
    tree: Mapping[str, Any], *, base: Path = Path(), kv_bytes: Callable[[str], int] | None = None
) -> FleetConfig:
    """A fleet from a table; paths in it are relative to `base`. Raises ConfigError."""
    groups = tree.get("instances")
    if isinstance(groups, list):
        tree = {**tree, "instances": [_with_times(group, base, at) for at, group in enumerate(groups)]}
    config = section(FleetConfig, tree)
    if config.model and not config.kv_bytes_per_token and kv_bytes is not None:
        config = section(FleetConfig, {**tree, "kv_bytes_per_token": kv_bytes(config.model)})
    _check(config)
    return config


def _check(config: FleetConfig) -> None:
    """What only shows when one setting is held against another."""
    tiers = config.tiers
    named = [name for name in ("host", "disk", "remote") if getattr(tiers, name) is not None]
    roles = {group.role for group in config.instances}
    if not config.kv_bytes_per_token and (named or config.link is not None):
        what = f"tiers.{named[0]}" if named else "link"
        raise ConfigError(f"kv_bytes_per_token: is not given, and {what} needs it; write it, as in 128KiB")
    if config.instance_count > INSTANCES_MAX:
        raise ConfigError(f"instances: {config.instance_count} in all; at most {INSTANCES_MAX} can be simulated")
    if Role.BOTH not in roles and len(roles) < 2:
        missing = next(iter({Role.PREFILL, Role.DECODE} - roles))
        raise ConfigError(f"instances: none with role {missing.value}; add a group, or use role both")
    if roles != {Role.BOTH} and config.link is None:
        raise ConfigError("link: is not given, and KV goes from prefill to decode over it; write {bytes_s: 10GB}")
    for at, death in enumerate(config.deaths):
        if death.instance >= config.instance_count:
            last = config.instance_count - 1
            raise ConfigError(f"deaths[{at}].instance: {death.instance} does not exist; the last one is {last}")
        if death.back_s is not None and death.back_s < death.at_s:
            raise ConfigError(
                f"deaths[{at}].back_s: {death.back_s:g} is before at_s, {death.at_s:g}; write a later time"
            )


def _tier(value: object) -> TierConfig | None:
    tier = None if value is None else section(TierConfig, value)
    return tier if tier is not None and tier.size else None


def _policy(value: object) -> PolicyConfig:
    return PolicyConfig(value) if isinstance(value, str) else section(PolicyConfig, value)


def _admission(value: object) -> AdmissionConfig:
    return AdmissionConfig(value) if isinstance(value, bool) else section(AdmissionConfig, value)


def _conductors(value: object) -> ConductorsConfig:
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"count": value}
    return section(ConductorsConfig, value)


def _deaths(value: object) -> tuple[Death, ...]:
    return each(Death, value, "deaths")


def _groups(value: object) -> tuple[Group, ...]:
    groups = each(Group, value, "groups of instances")
    if not groups:
        raise ConfigError("there is no group of instances; write at least one")
    return groups


def _with_times(group: Any, base: Path, at: int) -> Any:
    """A group with its `times` as EngineTimes, whatever they are in the file."""
    if not isinstance(group, Mapping):
        return group
    place = f"instances[{at}].times"
    value = group.get("times", "mocker")
    try:
        blocks = whole_number(1, 100_000_000)(group.get("blocks", 1))
        capacity = blocks * whole_number(1, 65536)(group.get("block_tokens", 64))
    except ConfigError:
        return {**group, "times": None}  # the group itself will be refused
    try:
        return {**group, "times": read_times(value, capacity, base)}
    except ConfigError as error:
        is_path = isinstance(value, str)
        raise (ConfigError(f"{place}: {error}") if is_path else within(place, error)) from None


def read_times(value: object, capacity_tokens: int, base: Path = Path()) -> EngineTimes:
    """Step times from a name, a table, or the path of a file that has one under `times`. Raises ConfigError."""
    if isinstance(value, EngineTimes):
        return value
    if isinstance(value, str):
        if value in KNOWN_TIMES:
            return KNOWN_TIMES[value](capacity_tokens)
        if not value.endswith((".yaml", ".yml")):
            known = ", ".join(KNOWN_TIMES)
            raise ConfigError(
                f"{value!r} is neither one of {known} nor the path of a .yaml file; write either, or a table"
            )
        tree = read_yaml(base / value)
        value = tree.get("times", tree)
    given = table(value)
    known_fields = {it.name: it for it in fields(EngineTimes)}
    found: dict[str, Any] = {}
    for name, content in given.items():
        if name not in known_fields:
            raise ConfigError(f"{name}: is not a step time; the nearest is {nearest(name, known_fields)}")
        try:
            whole = name in ("step_tokens", "requests_max")
            found[name] = whole_number(1, 1 << 30)(content) if whole else _plain_number(content)
        except ConfigError as error:
            raise ConfigError(f"{name}: {shown(content)} is {error}") from None
    for name in ("prefill_fixed_s", "prefill_token_s"):
        if found.get(name, -1.0) < 0 or (name == "prefill_token_s" and found[name] == 0):
            raise ConfigError(f"{name}: is missing or below what a step can take; write seconds")
    times = EngineTimes(**found)
    if times.step_tokens <= times.requests_max:
        raise ConfigError("step_tokens: must be above requests_max, or prompts would starve while answers are decoded")
    if times.decode_s(1, 1) <= 0:
        raise ConfigError("decode_fixed_s: a decode step takes no time with these; write seconds above 0")
    return times


def _plain_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError("not a number")
    return float(value)
