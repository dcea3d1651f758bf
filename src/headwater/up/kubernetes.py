"""A fleet as Kubernetes manifests, for fleets beyond one host.

Deployment CLUSTER-NODE     one pod: a node and the engines that share its memory. They find each other by a socket
                            in a volume that both mount, and pass memory by its descriptor: no shared /dev/shm, no
                            host namespace, no privilege. Engines without a node are pods of their own.
Service CLUSTER-NODE        where the Conductor finds those engines and their events, ready or not: it asks itself
Deployment, Service CLUSTER-conductor
ConfigMap CLUSTER-fleet     the Conductor's own file, in which every instance has a URL. With a directory it names no
                            node: the Conductor watches those that are listed there, with their token
NetworkPolicy CLUSTER-...   only the Conductor and each other reach nodes and engines. Engines ask for a key only where
                            the file gives them one (VLLM_API_KEY), and not at all paths: this keeps others out
Secret CLUSTER-secrets      is not written, only referred to
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from headwater.config import variable
from headwater.errors import ConfigError
from headwater.fleetfile.model import FleetFile, InstanceSpec, MembersSpec
from headwater.fleetfile.read import VALKEY
from headwater.fleetfile.resolve import resolve
from headwater.places import parse_disk
from headwater.up.engine import GPUS, devices, engine_command, engine_environment
from headwater.up.kube_objects import (
    LEAVE_S,
    Object,
    container_of,
    copy_secrets,
    deployment,
    environment_of,
    http_probe,
    named_object,
    object_name,
)
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
    placeholders,
    to_yaml,
)
from headwater.up.plan import CONDUCTOR_GRACE_S, ENGINE_READY_S, ENGINE_STOP_S, NODE_TIERS_S
from headwater.values import parse_duration, split_address

PEER_PORT = 7420
TOKEN = "node-token"
CONTROL = "0.0.0.0:8001"
DISK = "/var/lib/headwater"
ON_GPUS = Machine(gpus=("0",))
ON_CPUS = Machine(cores=())
GPU_RESOURCE = "nvidia.com/gpu"


def kubernetes(fleet: FleetFile, images: Images, machine: Machine) -> dict[str, str]:
    """Files by name. `fleet` as it was read without its secrets; `machine` is ON_GPUS or ON_CPUS. Raises ConfigError
    for what only works on one host."""
    _check(fleet)
    whole = _clustered(resolve(fleet, Path(RUN)))
    _sources(fleet, whole)
    found: dict[str, list[Object]] = {}
    reachable = whole if whole.conductor.members is None else replace(whole, nodes=())
    for group in groups(fleet, whole):
        reachable = _reachable(reachable, group)
        found[f"{group.name}.yaml"] = [_pods(whole, group, images, machine), *_service(whole, group)]
    listen = f"0.0.0.0:{split_address(fleet.conductor.listen)[1]}"
    text = conductor_file(reachable, control=CONTROL, listen=listen)
    config = named_object("v1", "ConfigMap", fleet, "fleet") | {"data": {"fleet.yaml": text}}
    policies = [_engine_policy(fleet), _conductor_policy(fleet)]
    found["conductor.yaml"] = [config, _conductor(whole, images), _conductor_service(fleet), *policies]
    return {name: "---\n".join(map(to_yaml, objects)) for name, objects in found.items()}


def secrets_of(fleet: FleetFile) -> tuple[list[str], list[str]]:
    """What CLUSTER-secrets has to hold: files, and variables."""
    whole = _clustered(resolve(fleet, Path(RUN)))
    files = _sources(fleet, whole)
    texts = [f"${{{name}}}" for name in conductor_variables(fleet)]
    for group in groups(fleet, whole):
        if group.node is not None:
            texts += group.node.settings.values()
        texts += [text for it in group.instances for text in it.environment.values()]
    return sorted(files), placeholders(texts)


def _sources(fleet: FleetFile, whole: FleetFile) -> dict[str, Source]:
    """All files of the secret. Raises ConfigError where two would be one."""
    nodes = [_node_files(whole, it)[1] for it in groups(fleet, whole) if it.node is not None]
    return merged(conductor_secrets(whole, control=True), *nodes)


def _check(fleet: FleetFile) -> None:
    if fleet.directory == VALKEY:
        raise ConfigError("directory: valkey is started on one host only; write the URL of a server that runs")
    if not fleet.tenants:
        raise ConfigError("tenants: there are none, and a Service is open to others; add some with keys")
    given = [(it.name, it.node) for it in fleet.instances if it.url is None and it.node is not None]
    sockets = {it.name for it in fleet.nodes if it.socket}
    if odd := [name for name, node in given if node in sockets]:
        raise ConfigError(f"instances: {odd[0]}: its node is one that runs already, which a pod cannot reach")


def _clustered(fleet: FleetFile) -> FleetFile:
    """The same fleet, whose Conductor is a guest of the nodes' cluster if they are one: their sockets are in their
    pods. Raises ConfigError if only the file's author knows how."""
    given = fleet.conductor.members
    if fleet.directory is None or not fleet.nodes or given is not None:
        return fleet
    settings = [it.settings for it in fleet.nodes if it.settings]  # those that somebody else runs have none
    if any("tls_cert" in it for it in settings):
        raise ConfigError("conductor.members: nodes have certificates; name the Conductor's own there")
    tokens = {it.get("token_file", TOKEN) for it in settings}
    if len(tokens) > 1:
        raise ConfigError(
            "nodes: not all have the same token_file, and the Conductor has one; give each the same, or name the "
            "Conductor's own by conductor.members.token_file"
        )
    token = f"{PRIVATE}/{PurePosixPath(tokens.pop() if tokens else TOKEN).name}"
    nodes = tuple(
        replace(it, settings={**it.settings, "token_file": token}) if "token_file" in it.settings else it
        for it in fleet.nodes
    )
    return replace(fleet, nodes=nodes, conductor=replace(fleet.conductor, members=MembersSpec(token_file=token)))


def _reachable(fleet: FleetFile, group: Group) -> FleetFile:
    """The same fleet with this group's instances where its Service is."""
    host, mine = object_name(fleet, group.name), {it.name for it in group.instances}

    def moved(it: InstanceSpec) -> InstanceSpec:
        at = {name: url.replace("127.0.0.1", host) for name in ("events", "replay") if (url := getattr(it, name))}
        return replace(it, url=f"http://{host}:{it.port}", **at)

    return replace(fleet, instances=tuple(moved(it) if it.name in mine else it for it in fleet.instances))


# ---- pods


def _pods(fleet: FleetFile, group: Group, images: Images, machine: Machine) -> Object:
    containers: list[Object] = []
    files: dict[str, Source] = {}
    volumes: list[Object] = []
    grace_s = ENGINE_STOP_S
    if group.node is not None:
        settings, files = _node_files(fleet, group)
        containers.append(_node_container(fleet, group, images, settings, has_files=bool(files)))
        if (disk := node_disk(settings)) is not None:
            volumes.append({"name": "disk", "emptyDir": {"sizeLimit": str(disk[1] + (1 << 30))}})
        grace_s = max(grace_s, parse_duration(settings.get("drain_s", "10s")) + NODE_TIERS_S)
    containers += [_engine_container(fleet, it, images, machine) for it in group.instances]
    if group.instances:
        volumes += [
            {"name": "cache", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
            *_model_volumes(group.instances),
        ]
    spec: Object = {"initContainers": [copy_secrets(images.headwater)]} if files else {}
    return deployment(fleet, group.name, spec | {"containers": containers}, grace_s, volumes, sorted(files))


def _model_volumes(instances: tuple[InstanceSpec, ...]) -> list[Object]:
    folders = sorted({folder for it in instances if (folder := model_folder(it.model)) is not None})
    return [
        {"name": f"model-{at}", "hostPath": {"path": folder, "type": "Directory"}} for at, folder in enumerate(folders)
    ]


def _model_mounts(volumes: list[Object]) -> list[Object]:
    return [{"name": it["name"], "mountPath": it["hostPath"]["path"], "readOnly": True} for it in volumes]


def _node_files(fleet: FleetFile, group: Group) -> tuple[dict[str, str], dict[str, Source]]:
    """A node's settings in a pod; in a cluster others reach it, so it has a token."""
    assert group.node is not None
    settings, files = node_settings(fleet, group.node)
    if (disk := node_disk(settings)) is not None:
        # The volume's own folder is root's and open; the node makes one of its own in it.
        settings["disk"] = str(replace(parse_disk(settings["disk"]), path=f"{DISK}/{PurePosixPath(disk[0]).name}"))
    if fleet.directory is not None:
        settings.setdefault("listen", f"0.0.0.0:{PEER_PORT}")
        settings.setdefault("advertise", f"{object_name(fleet, group.name)}:{split_address(settings['listen'])[1]}")
        if not {"token_file", "tls_cert"} & settings.keys():
            settings["token_file"] = f"{PRIVATE}/{TOKEN}"
            files = merged(files, {TOKEN: Source(f"nodes.{group.name}.token_file", settings["token_file"])})
    return settings, files


def _node_container(
    fleet: FleetFile, group: Group, images: Images, settings: dict[str, str], *, has_files: bool
) -> Object:
    assert group.node is not None
    by_variable = {variable(f"node.{name}"): text for name, text in settings.items()}
    command = ["headwater", "node", "--socket", group.node.socket]
    container = container_of("node", images.headwater, command, environment_of(fleet, by_variable))
    memory = str(node_memory(settings))
    asked = {"exec": {"command": ["headwater", "status", "--json", "--node", group.node.socket]}, "timeoutSeconds": 5}
    container |= {
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
        "startupProbe": asked | {"periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": asked | {"periodSeconds": 30, "failureThreshold": 3},
    }
    if has_files:
        container["volumeMounts"].append({"name": "private", "mountPath": PRIVATE, "readOnly": True})
    if node_disk(settings) is not None:
        container["volumeMounts"].append({"name": "disk", "mountPath": DISK})
    if "listen" in settings and fleet.directory is not None:
        container["ports"] = [{"name": "peers", "containerPort": int(split_address(settings["listen"])[1])}]
    return container


def _engine_container(fleet: FleetFile, it: InstanceSpec, images: Images, machine: Machine) -> Object:
    assert it.port is not None
    socket = next((node.socket for node in fleet.nodes if node.name == it.node), None)
    publishing = {name: url.replace("127.0.0.1", "*") for name in ("events", "replay") if (url := getattr(it, name))}
    command = ["vllm", *engine_command(replace(it, **publishing), socket, machine, host="0.0.0.0")]  # noqa: S104
    environment = engine_environment(it, machine, ()) | {"HF_HOME": CACHE, "XDG_CACHE_HOME": CACHE}
    environment.pop(GPUS, None)
    container = container_of(it.name, images.engine, command, environment_of(fleet, environment))
    container |= {
        "ports": [{"containerPort": it.port}],
        "startupProbe": http_probe("/health", it.port, every_s=5, failures=round(ENGINE_READY_S / 5)),
        "readinessProbe": http_probe("/health", it.port, every_s=5, failures=2),
        "livenessProbe": http_probe("/health", it.port, every_s=10, failures=6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
    }
    if machine.gpus:
        container["resources"] = {"limits": {GPU_RESOURCE: str(devices(it))}}
    container["volumeMounts"] += [
        {"name": "cache", "mountPath": CACHE},
        {"name": "shm", "mountPath": "/dev/shm"},
        *_model_mounts(_model_volumes((it,))),
    ]
    return container


def _conductor(fleet: FleetFile, images: Images) -> Object:
    spec = fleet.conductor
    files = sorted(conductor_secrets(fleet, control=True))
    named = {name: f"${{{name}}}" for name in conductor_variables(fleet)}
    command = ["headwater", "conductor", f"{FLEET}/fleet.yaml", "--runtime-dir", f"{RUN}/conductor"]
    container = container_of("conductor", images.headwater, command, environment_of(fleet, named))
    port, control = int(split_address(spec.listen)[1]), int(split_address(CONTROL)[1])
    models = _model_volumes(fleet.instances) if spec.tokens == "local" else []
    container |= {
        "ports": [{"name": "http", "containerPort": port}, {"name": "control", "containerPort": control}],
        "resources": {"requests": {"cpu": str(spec.workers), "memory": f"{spec.workers}Gi"}},
        "startupProbe": http_probe("/health", control, every_s=2, failures=60),
        "readinessProbe": http_probe("/ready", control, every_s=2, failures=2),
        "livenessProbe": http_probe("/health", control, every_s=10, failures=6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
    }
    container["volumeMounts"] += [
        {"name": "fleet", "mountPath": FLEET, "readOnly": True},
        {"name": "private", "mountPath": PRIVATE, "readOnly": True},
        *_model_mounts(models),
    ]
    volumes = [{"name": "fleet", "configMap": {"name": object_name(fleet, "fleet")}}, *models]
    inner = {"initContainers": [copy_secrets(images.headwater)], "containers": [container]}
    grace_s = spec.times.drain_s + 2 * CONDUCTOR_GRACE_S
    return deployment(fleet, "conductor", inner, grace_s, volumes, files)


# ---- who reaches whom


def _service(fleet: FleetFile, group: Group) -> list[Object]:
    """All ports of a group, if it has any. Not ready is not gone: the Conductor asks engines itself."""
    ports: list[Object] = []
    for it in group.instances:
        assert it.port is not None
        numbers = [it.port]
        for url in filter(None, (it.events, it.replay)):
            numbers += [int(split_address(url)[1]) + rank for rank in range(it.ranks)]
        ports += [{"name": f"p-{number}", "port": number, "targetPort": number} for number in numbers]
    if group.node is not None and fleet.directory is not None:
        port = int(split_address(group.node.settings.get("listen", f":{PEER_PORT}"))[1])
        ports.append({"name": "peers", "port": port, "targetPort": port})
    selector = {"app.kubernetes.io/instance": object_name(fleet, group.name)}
    spec = {"selector": selector, "publishNotReadyAddresses": True, "ports": ports}
    return [named_object("v1", "Service", fleet, group.name) | {"spec": spec}] if ports else []


def _conductor_service(fleet: FleetFile) -> Object:
    port = int(split_address(fleet.conductor.listen)[1])
    selector = {"app.kubernetes.io/instance": object_name(fleet, "conductor")}
    return named_object("v1", "Service", fleet, "conductor") | {
        "spec": {"selector": selector, "ports": [{"name": "http", "port": port, "targetPort": "http"}]}
    }


def _pods_of(fleet: FleetFile, component: str) -> Object:
    part_of = object_name(fleet, "fleet")
    return {"matchLabels": {"app.kubernetes.io/part-of": part_of, "app.kubernetes.io/component": component}}


def _engine_policy(fleet: FleetFile) -> Object:
    sources = [{"podSelector": _pods_of(fleet, it)} for it in ("conductor", "engines")]
    return named_object("networking.k8s.io/v1", "NetworkPolicy", fleet, "engines") | {
        "spec": {
            "podSelector": _pods_of(fleet, "engines"),
            "policyTypes": ["Ingress"],
            "ingress": [{"from": sources}],
        }
    }


def _conductor_policy(fleet: FleetFile) -> Object:
    port = int(split_address(fleet.conductor.listen)[1])
    return named_object("networking.k8s.io/v1", "NetworkPolicy", fleet, "conductor") | {
        "spec": {
            "podSelector": _pods_of(fleet, "conductor"),
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"protocol": "TCP", "port": port}]}],
        }
    }
