"""What a fleet file means on this host: which processes to start, how, in which order, and when they are ready.

Pure: the same file, host and programs give the same plan. Who is listed earlier is started earlier and stopped later:
directory, nodes, engines, Conductor. `engine` says how a vLLM is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from headwater.config import variable
from headwater.errors import ConfigError
from headwater.fleetfile.checks import is_loopback, started
from headwater.fleetfile.dump import masked_variable
from headwater.fleetfile.model import FleetFile, NodeSpec
from headwater.fleetfile.read import VALKEY
from headwater.fleetfile.resolve import resolve
from headwater.places import mask
from headwater.up.engine import engine_command, engine_environment, share_out
from headwater.up.machine import Machine, Programs
from headwater.values import parse_duration, split_address

DIRECTORY_MEMORY = "1gb"
NODE_READY_S, ENGINE_READY_S, CONDUCTOR_READY_S, DIRECTORY_READY_S = 120.0, 1800.0, 60.0, 20.0
ENGINE_STOP_S, DIRECTORY_STOP_S = 30.0, 10.0
NODE_TIERS_S, CONDUCTOR_GRACE_S = 12.0, 5.0
"""What a node may take after its drain for its tiers' threads; what the Conductor may take after its own."""


class Kind(StrEnum):
    """What a process is."""

    DIRECTORY = "directory"
    NODE = "node"
    ENGINE = "engine"
    CONDUCTOR = "conductor"


@dataclass(frozen=True, slots=True)
class Probe:
    """How to ask a process whether it is ready: `kind` http (`http://HOST:PORT/PATH` answers 200), node (a node's
    socket) or redis (a Unix socket that answers PING)."""

    kind: str
    address: str


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start."""

    name: str
    kind: Kind
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    """What is different in it from our own; None removes."""
    probe: Probe
    ready_s: float
    """It must be ready within this."""
    stop_s: float
    """How long it may take to end."""
    after: tuple[str, ...] = ()
    """Who has to be ready before."""
    ports: tuple[int, ...] = ()
    """Of loopback or more, which it takes."""

    def shown(self) -> dict[str, object]:
        """What `--dry-run` prints: no secrets."""
        return {
            "name": self.name,
            "kind": self.kind.value,
            "command": [mask(it) for it in self.command],
            "environment": {
                name: None if text is None else masked_variable(name, text) for name, text in self.environment.items()
            },
            "ports": list(self.ports),
            "probe": self.probe.address,
            "ready_s": self.ready_s,
            "stop_s": self.stop_s,
            "after": list(self.after),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it."""

    url: str
    """What clients use."""
    folder: Path
    fleet: FleetFile = field(repr=False)
    """With all addresses filled in."""
    processes: tuple[Process, ...]


def make_plan(fleet: FleetFile, folder: Path, machine: Machine, programs: Programs) -> Plan:
    """The plan for a fleet as it was read, not resolved. Raises ConfigError for what this host cannot do."""
    whole = resolve(fleet, folder)
    first = [_directory(folder, programs)] if fleet.directory == VALKEY else []
    nodes = [
        _node(whole, it, programs, [each.name for each in first])
        for it, given in zip(whole.nodes, fleet.nodes, strict=True)
        if not given.socket
    ]
    engines = _engines(fleet, whole, machine, programs, [it.name for it in nodes])
    conductor = _conductor(whole, folder, programs, [it.name for it in [*first, *nodes, *engines]])
    processes = (*first, *nodes, *engines, conductor)
    _check_ports(processes)
    return Plan(url_of(whole), folder, whole, processes)


def url_of(fleet: FleetFile) -> str:
    """The base URL for OpenAI's clients."""
    host, port = split_address(fleet.conductor.listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    scheme = "http" if fleet.conductor.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _directory(folder: Path, programs: Programs) -> Process:
    socket = f"{folder}/directory.sock"
    return Process(
        name="directory",
        kind=Kind.DIRECTORY,
        command=(
            programs.directory, "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700",
            "--dir", str(folder), "--save", "", "--appendonly", "no",
            "--maxmemory", DIRECTORY_MEMORY, "--maxmemory-policy", "allkeys-lru",
        ),
        environment={},
        probe=Probe("redis", socket),
        ready_s=DIRECTORY_READY_S,
        stop_s=DIRECTORY_STOP_S,
    )  # fmt: skip


def _node(fleet: FleetFile, it: NodeSpec, programs: Programs, after: list[str]) -> Process:
    settings = {"name": it.name, "cluster": fleet.cluster}
    if fleet.directory is not None:
        settings["directory"] = fleet.directory
    settings |= it.settings
    addresses = [settings.get(name, "") for name in ("metrics", "listen")]
    return Process(
        name=it.name,
        kind=Kind.NODE,
        command=(programs.python, "-m", "headwater", "node", "--socket", it.socket),
        environment={variable(f"node.{name}"): text for name, text in sorted(settings.items())},
        probe=Probe("node", it.socket),
        ready_s=NODE_READY_S,
        stop_s=parse_duration(settings.get("drain_s", "10s")) + NODE_TIERS_S,
        after=tuple(after),
        ports=tuple(int(port) for port in (split_address(a)[1] for a in addresses) if port.isdigit() and int(port)),
    )


def _engines(
    fleet: FleetFile, whole: FleetFile, machine: Machine, programs: Programs, nodes: list[str]
) -> list[Process]:
    sockets = {it.name: it.socket for it in whole.nodes}
    mine = [it for it, given in zip(whole.instances, fleet.instances, strict=True) if started(given)]
    shares = share_out(mine, machine)
    found = []
    for it in mine:
        assert it.port is not None
        socket = None if it.node is None else sockets[it.node]
        publishes = tuple(
            int(split_address(url)[1]) + rank for url in (it.events, it.replay) if url for rank in range(it.ranks)
        )
        found.append(
            Process(
                name=it.name,
                kind=Kind.ENGINE,
                command=(programs.vllm, *engine_command(it, socket, machine)),
                environment=engine_environment(it, machine, shares[it.name], len(mine)),
                probe=Probe("http", f"http://127.0.0.1:{it.port}/health"),
                ready_s=ENGINE_READY_S,
                stop_s=ENGINE_STOP_S,
                after=(it.node,) if it.node in nodes else (),
                ports=(it.port, *publishes),
            )
        )
    return found


def _conductor(fleet: FleetFile, folder: Path, programs: Programs, after: list[str]) -> Process:
    host, port = split_address(fleet.conductor.control)
    host = host if is_loopback(host) else "127.0.0.1"
    return Process(
        name="conductor",
        kind=Kind.CONDUCTOR,
        command=(programs.python, "-m", "headwater", "conductor", fleet.path, "--runtime-dir", str(folder)),
        environment={},
        probe=Probe("http", f"http://{f'[{host}]' if ':' in host else host}:{port}/ready"),
        ready_s=CONDUCTOR_READY_S,
        stop_s=fleet.conductor.times.drain_s + 2 * CONDUCTOR_GRACE_S,
        after=tuple(after),
        ports=(int(split_address(fleet.conductor.listen)[1]), int(port)),
    )


def _check_ports(processes: tuple[Process, ...]) -> None:
    seen: dict[int, str] = {}
    for process in processes:
        for port in process.ports:
            if port in seen:
                raise ConfigError(f"{process.name}: port {port} is that of {seen[port]} too; name others in the file")
            seen[port] = process.name
