"""A fleet as one Compose file: what `headwater up` starts, each in a container, all on this host's own network.

The host's network keeps loopback what it is: engines, events and control are reached from this host only, and the
Conductor's `listen` decides as it does without containers. Sockets are in a volume in memory. All run as the user in
HEADWATER_UID and HEADWATER_GID, so that they may read the files that are named under `secrets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.config import variable
from headwater.fleetfile.model import FleetFile, InstanceSpec
from headwater.fleetfile.read import VALKEY
from headwater.fleetfile.resolve import resolve
from headwater.fleetfile.secrets import PLACEHOLDER
from headwater.up.engine import GPUS, engine_command, engine_environment, share_out
from headwater.up.machine import Machine
from headwater.up.manifests import (
    CACHE,
    FLEET,
    PRIVATE,
    RUN,
    Group,
    Images,
    Source,
    conductor_file,
    conductor_secrets,
    conductor_variables,
    groups,
    merged,
    model_folder,
    node_disk,
    node_memory,
    node_settings,
    to_yaml,
)
from headwater.up.plan import CONDUCTOR_GRACE_S, DIRECTORY_MEMORY, ENGINE_READY_S, ENGINE_STOP_S, NODE_TIERS_S
from headwater.values import split_address

Service = dict[str, Any]
USER_TEXT = "${HEADWATER_UID:-1000}:${HEADWATER_GID:-1000}"
PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)"
SHM_BYTES = 1 << 30


def compose(fleet: FleetFile, images: Images, machine: Machine) -> dict[str, str]:
    """Files by name: `compose.yaml` and the Conductor's `fleet.yaml`. `fleet` as it was read without its secrets.
    Raises ConfigError."""
    whole = resolve(fleet, Path(RUN))
    services: dict[str, Service] = {}
    if fleet.directory == VALKEY:
        services["directory"] = _directory(images)
    started = [it for given, it in zip(fleet.instances, whole.instances, strict=True) if given.url is None]
    shares = share_out(started, machine)
    files = conductor_secrets(fleet, control=False)
    folders = sorted({folder for it in whole.instances if (folder := model_folder(it.model))})
    for group in groups(fleet, whole):
        if group.node is not None:
            services[group.name], its_files = _node(
                whole, group, images, ["directory"] if "directory" in services else []
            )
            files = merged(files, its_files)
        for it in group.instances:
            services[it.name] = _engine(it, whole, group, images, machine, shares[it.name], len(started))
    services["conductor"] = _conductor(whole, images, folders, list(services))
    tree = {
        "name": fleet.cluster.lower(),
        "services": services,
        "volumes": {"run": _memory()},
        "configs": {"fleet": {"file": "./fleet.yaml"}},
        "secrets": {name: {"file": f"./secrets/{name}"} for name in sorted(files)},
    }
    return {"compose.yaml": to_yaml(tree), "fleet.yaml": conductor_file(whole)}


def escaped(text: str) -> str:
    """Text in which Compose sees no variable, or the variable that the fleet file names."""
    found = PLACEHOLDER.fullmatch(text)
    return f"${{{found[1]}:?}}" if found else text.replace("$", "$$")


def _common(image: str, command: list[str], environment: Mapping[str, str], stop_s: float) -> Service:
    return {
        "image": image,
        "command": [escaped(it) for it in command],
        "environment": {name: escaped(text) for name, text in environment.items()},
        "network_mode": "host",
        "user": USER_TEXT,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp"],
        "volumes": [{"type": "volume", "source": "run", "target": RUN}],
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop_s:.0f}s",
    }


def _memory() -> Service:
    options = "uid=${HEADWATER_UID:-1000},gid=${HEADWATER_GID:-1000},mode=0700,size=16m"
    return {"driver": "local", "driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": options}}


def _bound(path: str, *, read_only: bool) -> Service:
    """A folder of the host, at the same place; Docker must not make it, for it would be root's."""
    text = escaped(path)
    options = {"create_host_path": False}
    return {"type": "bind", "source": text, "target": text, "read_only": read_only, "bind": options}


def _health(test: list[str], start_s: float) -> Service:
    return {
        "test": ["CMD", *test],
        "interval": "5s",
        "timeout": "5s",
        "retries": 3,
        "start_period": f"{start_s:.0f}s",
        "start_interval": "1s",
    }


def _after(names: list[str]) -> Service:
    return {name: {"condition": "service_healthy"} for name in names}


def _directory(images: Images) -> Service:
    socket = f"{RUN}/directory.sock"
    command = [
        "valkey-server", "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700", "--save", "",
        "--appendonly", "no", "--maxmemory", DIRECTORY_MEMORY, "--maxmemory-policy", "allkeys-lru", "--dir", "/tmp",
    ]  # fmt: skip
    return _common(images.directory, command, {}, 10.0) | {
        "healthcheck": _health(["valkey-cli", "-s", socket, "ping"], 10.0)
    }


def _node(fleet: FleetFile, group: Group, images: Images, after: list[str]) -> tuple[Service, dict[str, Source]]:
    assert group.node is not None
    settings, files = node_settings(fleet, group.node)
    command = ["headwater", "node", "--socket", group.node.socket]
    environment = {variable(f"node.{name}"): text for name, text in sorted(settings.items())}
    service = _common(images.headwater, command, environment, 10.0 + NODE_TIERS_S)
    service["mem_limit"] = node_memory(settings)
    service["healthcheck"] = _health(["headwater", "status", "--json", "--node", group.node.socket], 60.0)
    if (disk := node_disk(settings)) is not None:
        service["volumes"].append(_bound(disk[0], read_only=False))
    if files:
        service["secrets"] = [{"source": name, "target": f"{PRIVATE}/{name}"} for name in sorted(files)]
    if after:
        service["depends_on"] = _after(after)
    return service, files


def _engine(
    it: InstanceSpec,
    fleet: FleetFile,
    group: Group,
    images: Images,
    machine: Machine,
    share: tuple[str, ...],
    count: int,
) -> Service:
    socket = next((node.socket for node in fleet.nodes if node.name == it.node), None)
    environment = engine_environment(it, machine, share, count) | {"HF_HOME": CACHE, "XDG_CACHE_HOME": CACHE}
    gpus = environment.pop(GPUS, "") if machine.gpus else ""
    service = _common(images.engine, ["vllm", *engine_command(it, socket, machine)], environment, ENGINE_STOP_S)
    service["shm_size"] = SHM_BYTES
    service["volumes"].append({"type": "bind", "source": "./cache", "target": CACHE})
    if (folder := model_folder(it.model)) is not None:
        service["volumes"].append(_bound(folder, read_only=True))
    service["healthcheck"] = _health(["python3", "-c", PROBE, f"http://127.0.0.1:{it.port}/health"], ENGINE_READY_S)
    if gpus:
        service["deploy"] = {
            "resources": {
                "reservations": {
                    "devices": [{"driver": "nvidia", "device_ids": gpus.split(","), "capabilities": ["gpu"]}]
                }
            }
        }
    if group.node is not None:
        service["depends_on"] = _after([group.name])
    return service


def _conductor(fleet: FleetFile, images: Images, folders: list[str], names: list[str]) -> Service:
    spec = fleet.conductor
    named = conductor_variables(fleet)
    command = ["headwater", "conductor", f"{FLEET}/fleet.yaml", "--runtime-dir", f"{RUN}/conductor"]
    environment = {name: f"${{{name}}}" for name in named}
    service = _common(images.headwater, command, environment, spec.times.drain_s + 2 * CONDUCTOR_GRACE_S)
    service["volumes"] += [_bound(it, read_only=True) for it in folders]
    service["configs"] = [{"source": "fleet", "target": f"{FLEET}/fleet.yaml"}]
    service["secrets"] = [
        {"source": name, "target": f"{PRIVATE}/{name}"} for name in sorted(conductor_secrets(fleet, control=False))
    ]
    port = split_address(spec.control)[1]
    service["healthcheck"] = _health(["python3", "-c", PROBE, f"http://127.0.0.1:{port}/ready"], 60.0)
    service["depends_on"] = _after(names)
    return service
