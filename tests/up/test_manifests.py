"""Manifests are what Kubernetes and Compose take, hang together, have no secrets, and are always the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from headwater.errors import ConfigError
from headwater.fleetfile.model import FleetFile
from headwater.fleetfile.read import read_fleet
from headwater.fleetfile.resolve import resolve
from headwater.up.compose import compose
from headwater.up.kubernetes import ON_CPUS, ON_GPUS, kubernetes, secrets_of
from headwater.up.machine import Machine
from headwater.up.manifests import Images, conductor_file
from tests.fleetfile.files import DIGEST, LEAST, WHOLE, written
from tests.up.schemas import COMPOSE, KUBERNETES

CANARY = "hf_canary"
KINDS = {kind: Draft202012Validator(schema) for kind, schema in KUBERNETES.items()}
COMPOSED = Draft202012Validator(COMPOSE)
CLUSTER = WHOLE.replace("directory: valkey", "directory: ${KV_URL}").replace("node: far, ", "node: near, ")
DISKS = CLUSTER.replace("host_memory: 1GiB", 'host_memory: 1GiB, disk: "/nvme/kv:4GiB", keys: /etc/hw/keys')


def kept(folder: Path, text: str) -> FleetFile:
    """A fleet whose secrets stay where they are."""
    return read_fleet(written(folder, text), look_up=None)


def objects(files: dict[str, str]) -> list[dict[str, Any]]:
    """All objects of all files, each checked by its kind."""
    found = []
    for text in files.values():
        for it in yaml.safe_load_all(text):
            KINDS[it["kind"]].validate(it)
            found.append(it)
    return found


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {it["metadata"]["name"]: it for it in found if it["kind"] == kind}


@pytest.mark.parametrize("text", [CLUSTER, DISKS], ids=["cluster", "disks"])
@pytest.mark.parametrize("machine", [ON_GPUS, ON_CPUS], ids=["gpus", "cpus"])
def test_kubernetes_takes_it(tmp_path: Path, text: str, machine: Machine) -> None:
    fleet = kept(tmp_path, text)
    files = kubernetes(fleet, Images(), machine)
    assert files == kubernetes(kept(tmp_path, text), Images(), machine)
    found = objects(files)
    names = [(it["kind"], it["metadata"]["name"]) for it in found]
    assert len(names) == len(set(names))
    assert [it for kind, it in names if kind == "Deployment"] == ["blue-near", "blue-alone", "blue-conductor"]
    for it in of_kind(found, "Deployment").values():
        spec = it["spec"]
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        pod = spec["template"]["spec"]
        volumes = {each["name"] for each in pod["volumes"]}
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        assert len({each["name"] for each in containers}) == len(containers)
        mounted = [mount["name"] for each in containers for mount in each["volumeMounts"]]
        assert set(mounted) == volumes  # nothing is mounted that is not there, and nothing is there for nobody
        for each in containers:
            paths = [mount["mountPath"] for mount in each["volumeMounts"]]
            assert len(paths) == len(set(paths))


def test_a_node_and_its_engines_share_a_pod(tmp_path: Path) -> None:
    found = objects(kubernetes(kept(tmp_path, CLUSTER), Images(), ON_GPUS))
    pod = of_kind(found, "Deployment")["blue-near"]["spec"]["template"]["spec"]
    by_name = {it["name"]: it for it in pod["containers"]}
    assert list(by_name) == ["node", "chat-0", "chat-1", "chat-2", "long"]
    run = {"name": "run", "mountPath": "/run/headwater"}
    assert all(run in it["volumeMounts"] for it in by_name.values())
    assert "unix:/run/headwater/near.sock" in " ".join(by_name["chat-0"]["command"])
    assert [by_name[it]["resources"]["limits"]["nvidia.com/gpu"] for it in ("chat-0", "long")] == ["1", "2"]
    assert by_name["node"]["resources"]["limits"]["memory"] == str(2 << 30)
    variables = {it["name"]: it for it in by_name["node"]["env"]}
    assert variables["HEADWATER_NODE_DIRECTORY"]["valueFrom"]["secretKeyRef"] == {
        "name": "blue-secrets",
        "key": "KV_URL",
    }
    assert variables["HEADWATER_NODE_ADVERTISE"]["value"] == "blue-near:7420"
    assert variables["HEADWATER_NODE_TOKEN_FILE"]["value"] == "/etc/headwater/private/node-token"
    token = {it["name"]: it for it in by_name["chat-0"]["env"]}["HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["key"] == "HF_TOKEN"


def test_the_conductor_finds_what_services_offer(tmp_path: Path) -> None:
    found = objects(kubernetes(kept(tmp_path, CLUSTER), Images(), ON_GPUS))
    config = of_kind(found, "ConfigMap")["blue-fleet"]["data"]["fleet.yaml"]
    services = of_kind(found, "Service")
    offered = {(name, each["port"]) for name, it in services.items() for each in it["spec"]["ports"]}
    tree = yaml.safe_load(config)
    urls = [
        it[name] for it in tree["instances"] for name in ("url", "events", "replay") if it.get(name, "off") != "off"
    ]
    asked = {(host, int(port)) for host, port in (url.split("//")[1].split(":") for url in urls)}
    assert asked - {("10.0.0.5", 8000), ("10.0.0.5", 5557)} <= offered
    assert ("blue-near", 7420) in offered and ("blue-conductor", 8000) in offered
    listening = {
        (it["metadata"]["name"], port["containerPort"])
        for it in of_kind(found, "Deployment").values()
        for each in it["spec"]["template"]["spec"]["containers"]
        for port in each.get("ports", [])
    }
    assert {("blue-near", 8100), ("blue-alone", 8103), ("blue-conductor", 8000), ("blue-conductor", 8001)} <= listening
    assert tree["conductor"]["listen"] == "0.0.0.0:8000"


def test_the_conductors_own_file_is_the_same_fleet(tmp_path: Path) -> None:
    whole = resolve(kept(tmp_path, WHOLE), Path("/run/hw"))
    text = conductor_file(whole).replace("/etc/headwater/private/secret", str(tmp_path / "secret"))
    (tmp_path / "again.yaml").write_text(text)
    again = read_fleet(tmp_path / "again.yaml")
    assert again.conductor == whole.conductor and again.tenants == whole.tenants and again.slo == whole.slo
    assert [it.socket for it in again.nodes] == [it.socket for it in whole.nodes]
    seen = ("name", "model", "served_name", "role", "node", "url", "events", "replay", "events_off", "ranks",
            "capacity_tokens", "block_tokens")  # fmt: skip
    for new, old in zip(again.instances, whole.instances, strict=True):
        assert [getattr(new, it) for it in seen] == [getattr(old, it) for it in seen]


def test_the_secret_that_is_to_be_made_has_all_that_is_referred_to(tmp_path: Path) -> None:
    fleet = kept(tmp_path, DISKS)
    files, variables = secrets_of(fleet)
    found = objects(kubernetes(fleet, Images(), ON_GPUS))
    keys = {
        each["key"]
        for it in of_kind(found, "Deployment").values()
        for volume in it["spec"]["template"]["spec"]["volumes"]
        for each in volume.get("secret", {}).get("items", [])
    }
    node = of_kind(found, "Deployment")["blue-near"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "HEADWATER_NODE_DISK", "value": f"/var/lib/headwater/kv:{4 << 30}"} in node["env"]
    assert {"name": "disk", "mountPath": "/var/lib/headwater"} in node["volumeMounts"]
    assert keys == set(files) == {"control-token", "keys", "node-token", "secret"}
    named = {
        each["valueFrom"]["secretKeyRef"]["key"]
        for it in of_kind(found, "Deployment").values()
        for container in it["spec"]["template"]["spec"]["containers"]
        for each in container["env"]
        if "valueFrom" in each
    }
    assert named == set(variables) == {"HF_TOKEN", "KV_URL"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE.replace("node: far, ", ""), "directory: valkey is started on one host only"),
        (LEAST, "tenants: there are none, and a Service is open to others"),
        (WHOLE.replace("directory: valkey", ""), "instances: long: its node is one that runs already"),
    ],
    ids=["valkey", "no tenants", "a node that runs"],
)
def test_what_works_on_one_host_only_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kubernetes(kept(tmp_path, text), Images(), ON_GPUS)


@pytest.mark.parametrize("text", [LEAST, WHOLE, DISKS], ids=["least", "whole", "disks"])
@pytest.mark.parametrize("machine", [Machine(gpus=tuple("012345")), ON_CPUS], ids=["gpus", "cpus"])
def test_compose_takes_it(tmp_path: Path, text: str, machine: Machine) -> None:
    files = compose(kept(tmp_path, text), Images(), machine)
    assert files == compose(kept(tmp_path, text), Images(), machine)
    tree = yaml.safe_load(files["compose.yaml"])
    COMPOSED.validate(tree)
    for name, it in tree["services"].items():
        assert set(it.get("depends_on", {})) <= set(tree["services"]) - {name}
        assert {each["source"] for each in it.get("secrets", [])} <= set(tree["secrets"])
        assert {each["source"] for each in it["volumes"] if each["type"] == "volume"} <= set(tree["volumes"])
    assert set(tree["services"]["conductor"]["depends_on"]) == set(tree["services"]) - {"conductor"}


def test_compose_knows_variables_from_text(tmp_path: Path) -> None:
    text = "model: m\ninstances: [{name: c, flags: [--x, 'a$b${c}'], environment: {T: '${HF_TOKEN}'}}]\n"
    service = yaml.safe_load(compose(kept(tmp_path, text), Images(), ON_CPUS)["compose.yaml"])["services"]["c"]
    assert service["command"][-1] == "a$$b$${c}" and service["environment"]["T"] == "${HF_TOKEN:?}"
    gpus = compose(kept(tmp_path, LEAST), Images(), Machine(gpus=("3",)))
    device = yaml.safe_load(gpus["compose.yaml"])["services"]["chat"]["deploy"]["resources"]["reservations"]["devices"]
    assert device[0]["device_ids"] == ["3"]


def test_no_manifest_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("KV_URL", f"redis://u:{CANARY}@h:1")
    secret = "c0ffee" * 8
    for files in (
        kubernetes(kept(tmp_path, DISKS), Images(), ON_GPUS),
        compose(kept(tmp_path, DISKS), Images(), ON_CPUS),
    ):
        text = "\n".join(files.values())
        assert CANARY not in text and secret not in text
        assert DIGEST in text  # a digest is no secret: that is what it is for
