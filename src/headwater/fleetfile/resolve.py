"""Fills in what a fleet file leaves open: ports, sockets and addresses of what is started on this host.

The same file and folder give the same answer in every process, so whoever starts engines and whoever connects to them
need not talk about it. Ports that the file names are kept; others count up from fixed ones and skip those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headwater.config import runtime_dir
from headwater.fleetfile.checks import check, ports_named, started
from headwater.fleetfile.model import FleetFile, InstanceSpec, NodeSpec
from headwater.fleetfile.read import VALKEY
from headwater.values import socket_address

FIRST_PORT = 8100
FIRST_EVENTS_PORT = 15_600
FIRST_METRICS_PORT = 7480
LOOPBACK = "127.0.0.1"


def fleet_folder(fleet: FleetFile, folder: str | Path | None = None) -> Path:
    """The folder of a running fleet: sockets, logs, lock. One for each cluster of this user."""
    return Path(folder).absolute() if folder else runtime_dir() / f"up-{fleet.cluster}"


def resolve(fleet: FleetFile, folder: Path) -> FleetFile:
    """The same fleet with nothing left open: every instance has a `url`, its events if it publishes any, every node a
    socket, and a directory that is started its URL. Raises ConfigError."""
    taken = {port for port, _ in ports_named(fleet)}
    ports, events, metrics = (_free(taken, it) for it in (FIRST_PORT, FIRST_EVENTS_PORT, FIRST_METRICS_PORT))
    resolved = replace(
        fleet,
        nodes=tuple(_node(it, folder, metrics) for it in fleet.nodes),
        instances=tuple(_instance(it, ports, events) for it in fleet.instances),
        directory=f"redis+unix://{folder}/directory.sock" if fleet.directory == VALKEY else fleet.directory,
    )
    check(resolved, is_open=fleet.conductor.tls_certificate is None)
    return resolved


def _free(taken: set[int], first: int) -> Iterator[int]:
    """Ports from `first` on that nobody has; each is taken once it is given out."""
    port = first
    while True:
        if port not in taken:
            taken.add(port)
            yield port
        port += 1


def _run(free: Iterator[int], length: int) -> int:
    """The first of so many ports in a row."""
    found = [next(free)]
    while len(found) < length:
        port = next(free)
        found = [*found, port] if port == found[-1] + 1 else [port]
    return found[0]


def _node(it: NodeSpec, folder: Path, metrics: Iterator[int]) -> NodeSpec:
    if it.socket:
        return it
    settings = dict(it.settings)
    settings.setdefault("metrics", f"{LOOPBACK}:{next(metrics)}")
    return replace(it, socket=socket_address(f"unix:{folder}/{it.name}.sock"), settings=settings)


def _instance(it: InstanceSpec, ports: Iterator[int], events: Iterator[int]) -> InstanceSpec:
    if not started(it):
        return it
    port = it.port or next(ports)
    it = replace(it, port=port, url=f"http://{LOOPBACK}:{port}")
    if it.events_off or it.events is not None:
        return it
    return replace(
        it,
        events=f"tcp://{LOOPBACK}:{_run(events, it.ranks)}",
        replay=f"tcp://{LOOPBACK}:{_run(events, it.ranks)}",
    )
