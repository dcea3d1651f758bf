"""Manifests are what Kubernetes and Compose take, hang together, have no secrets, and are always the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from headwater.errors import ConfigError
from headwater.fleetfile.model import FleetFile, MembersSpec
from headwater.fleetfile.read import read_fleet
from headwater.fleetfile.resolve import resolve
from headwater.up.compose import compose
from headwater.up.kubernetes import ON_CPUS, ON_GPUS, kubernetes, secrets_of
from headwater.up.machine import Machine
from headwater.up.manifests import Images, conductor_file
from tests.fleetfile.files import DIGEST, LEAST, WHOLE, written
from tests.up.schemas import COMPOSE, KUBERNETES

CANARY = "hf_canary"
URL = "redis://kv:6379"
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


MEMBERS = ("members-token", "members-cert", "members-key", "members-ca")


def conductors_own(folder: Path, found: list[dict[str, Any]]) -> FleetFile:
    """Its file, as it reads it in its pod."""
    text = of_kind(found, "ConfigMap")["blue-fleet"]["data"]["fleet.yaml"]
    assert "/etc/headwater/private/" in text
    for name in ("secret", "control-token", "node-token", "token", *MEMBERS):
        (folder / name).write_text("c0ffee" * 8)
        (folder / name).chmod(0o600)
    return read_fleet(written(folder, text.replace("/etc/headwater/private", str(folder))), look_up={"KV_URL": URL}.get)


def test_the_conductor_watches_the_nodes_that_the_directory_lists(tmp_path: Path) -> None:
    found = objects(kubernetes(kept(tmp_path, CLUSTER), Images(), ON_GPUS))
    own = conductors_own(tmp_path, found)
    assert own.nodes == () and own.directory == URL
    assert own.conductor.members == MembersSpec(token_file=str(tmp_path / "node-token"))
    nodes = {it.name: it.node for it in own.instances}
    assert nodes["chat-0"] == "near" and nodes["alone"] is None
    variables = of_kind(found, "Deployment")["blue-near"]["spec"]["template"]["spec"]["containers"][0]["env"]
    named = {it["name"]: it.get("value") for it in variables}
    assert named["HEADWATER_NODE_NAME"] == "near" and named["HEADWATER_NODE_CLUSTER"] == own.cluster
    # Who may come in at the pods of nodes.
    policy = of_kind(found, "NetworkPolicy")["blue-engines"]["spec"]
    peers = [it["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for it in policy["ingress"][0]["from"]]
    assert "conductor" in peers


def test_the_conductor_of_nodes_with_certificates_has_one(tmp_path: Path) -> None:
    tls = ", tls_cert: /c/cert.pem, tls_key: /c/cert.key, tls_ca: /c/ca.pem"
    text = CLUSTER.replace("host_memory: 1GiB", f"host_memory: 1GiB{tls}")
    with pytest.raises(ConfigError, match=r"conductor\.members: nodes have certificates"):
        kubernetes(kept(tmp_path, text), Images(), ON_GPUS)
    members = "members: {name: front, tls_cert: /f/cert.pem, tls_key: /f/cert.key, tls_ca: /c/ca.pem}"
    fleet = kept(tmp_path, text.replace("  tls: off", f"  tls: off\n  {members}"))
    own = conductors_own(tmp_path, objects(kubernetes(fleet, Images(), ON_GPUS)))
    assert own.conductor.members == MembersSpec("front", None, *(str(tmp_path / it) for it in MEMBERS[1:]))
    assert {"cert.pem", "cert.key", "ca.pem", *MEMBERS[1:]} < set(secrets_of(fleet)[0])
    pods = of_kind(objects(kubernetes(fleet, Images(), ON_GPUS)), "Deployment")
    assert {"cert.pem", "members-cert"} & mounted_files(pods["blue-near"]) == {"cert.pem"}
    assert {"cert.pem", "members-cert"} & mounted_files(pods["blue-conductor"]) == {"members-cert"}


def mounted_files(deployment: dict[str, Any]) -> set[str]:
    """What a pod gets of the secret's files."""
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    return {item["key"] for it in volumes for item in it.get("secret", {}).get("items", [])}


def test_a_token_is_not_the_fleets_secret_by_its_name(tmp_path: Path) -> None:
    text = CLUSTER.replace("  tls: off", "  tls: off\n  members: {token_file: /a/secret}")
    fleet = kept(tmp_path, text)
    found = objects(kubernetes(fleet, Images(), ON_GPUS))
    own = conductors_own(tmp_path, found)
    assert own.conductor.members == MembersSpec(token_file=str(tmp_path / "members-token"))
    pods = of_kind(found, "Deployment")
    assert mounted_files(pods["blue-conductor"]) == {"control-token", "members-token", "secret"}
    assert secrets_of(fleet)[0] == ["control-token", "members-token", "node-token", "secret"]


def test_the_conductor_has_the_one_token_of_all_nodes(tmp_path: Path) -> None:
    second = "  - {name: near2, token_file: /x/token}\n  - {name: far, socket"
    text = CLUSTER.replace("host_memory: 1GiB", "host_memory: 1GiB, token_file: /x/token")
    text = text.replace("  - {name: far, socket", second)
    found = objects(kubernetes(kept(tmp_path, text), Images(), ON_GPUS))
    assert conductors_own(tmp_path, found).conductor.members == MembersSpec(token_file=str(tmp_path / "token"))
    pods = of_kind(found, "Deployment")
    for name in ("near", "near2"):
        assert mounted_files(pods[f"blue-{name}"]) == {"token"}
    assert mounted_files(pods["blue-conductor"]) == {"control-token", "secret", "token"}
    for other in ("/y/token", "/x/other"):
        fleet = kept(tmp_path, text.replace("near2, token_file: /x/token", f"near2, token_file: {other}"))
        with pytest.raises(
            ConfigError, match=r"nodes: not all have the same token_file.*conductor\.members\.token_file"
        ):
            kubernetes(fleet, Images(), ON_GPUS)
    with pytest.raises(ConfigError, match="nodes: not all have the same token_file"):
        kubernetes(kept(tmp_path, text.replace("near2, token_file: /x/token", "near2")), Images(), ON_GPUS)


TWICE = {
    "a node's and the fleet's": ("keys: /x/secret", "", "nodes.near.keys: /x/secret would be secret among the secrets"),
    "two of a node": ("keys: /x/a, token_file: /y/a", "", "would be a among the secrets, and so would nodes.near."),
    "two of nodes": ("keys: /x/a", "  - {name: near2, keys: /y/a}\n", "would be a among the secrets"),
}


@pytest.mark.parametrize(("first", "second", "message"), TWICE.values(), ids=TWICE)
def test_two_files_of_one_name_are_refused(tmp_path: Path, first: str, second: str, message: str) -> None:
    text = CLUSTER.replace("host_memory: 1GiB", f"host_memory: 1GiB, {first}")
    text = text.replace("  - {name: far, socket", f"{second}  - {{name: far, socket")
    text = text.replace("  tls: off", "  tls: off\n  members: {}")
    with pytest.raises(ConfigError, match=f"{message}.*give one of the files another name"):
        kubernetes(kept(tmp_path, text), Images(), ON_GPUS)
    with pytest.raises(ConfigError, match=f"{message}.*give one of the files another name"):
        compose(kept(tmp_path, text), Images(), ON_CPUS)


def test_nodes_that_are_no_cluster_stay_in_their_pods(tmp_path: Path) -> None:
    text = CLUSTER.replace("directory: ${KV_URL}", "")
    found = objects(kubernetes(kept(tmp_path, text), Images(), ON_GPUS))
    tree = yaml.safe_load(of_kind(found, "ConfigMap")["blue-fleet"]["data"]["fleet.yaml"])
    assert "members" not in tree["conductor"]
    assert [it["name"] for it in tree["nodes"]] == ["near", "far"]


def test_compose_carries_what_the_conductor_proves_itself_with(tmp_path: Path) -> None:
    text = CLUSTER.replace("  tls: off", "  tls: off\n  members: {token_file: /etc/hw/token}")
    files = compose(kept(tmp_path, text), Images(), ON_CPUS)
    tree = yaml.safe_load(files["compose.yaml"])
    mounted = {"source": "members-token", "target": "/etc/headwater/private/members-token"}
    assert mounted in tree["services"]["conductor"]["secrets"]
    assert tree["secrets"]["members-token"] == {"file": "./secrets/members-token"}
    own = yaml.safe_load(files["fleet.yaml"])
    assert own["conductor"]["members"] == {"token_file": "/etc/headwater/private/members-token"}
    assert [it["name"] for it in own["nodes"]] == ["near", "far"]  # by their sockets: it is on their host


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
    conductor = of_kind(found, "Deployment")["blue-conductor"]["spec"]["template"]["spec"]["volumes"]
    mounted = next(it["secret"]["items"] for it in conductor if "secret" in it)
    assert [it["key"] for it in mounted] == ["control-token", "node-token", "secret"]
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


def test_engines_api_keys_are_only_referred_to(tmp_path: Path) -> None:
    theirs = """  - {name: keyed, url: "http://10.0.0.5:8000", api_key: "${THEIR_KEY}"}
  - {name: others, url: "http://10.0.0.6:8000", api_key_file: /etc/keys/key}
  - {name: guarded, environment: {VLLM_API_KEY: "${OWN_KEY}"}}
conductor:"""
    fleet = kept(tmp_path, CLUSTER.replace("conductor:", theirs, 1))
    files, variables = secrets_of(fleet)
    assert {"api-key-others"} <= set(files) and {"THEIR_KEY", "OWN_KEY"} <= set(variables)
    for made in (kubernetes(fleet, Images(), ON_GPUS), compose(fleet, Images(), ON_CPUS)):
        found = next(it for it in made.values() if "THEIR_KEY}" in it)
        assert "/etc/headwater/private/api-key-others" in found and "/etc/keys" not in "".join(made.values())
    pods = of_kind(objects(kubernetes(fleet, Images(), ON_GPUS)), "Deployment")["blue-conductor"]["spec"]["template"]
    env = {it["name"]: it for it in pods["spec"]["containers"][0]["env"]}
    for name in ("THEIR_KEY", "OWN_KEY"):
        assert env[name]["valueFrom"]["secretKeyRef"] == {"name": "blue-secrets", "key": name}
    own = of_kind(objects(kubernetes(fleet, Images(), ON_GPUS)), "ConfigMap")["blue-fleet"]["data"]["fleet.yaml"]
    keys = {it["name"]: it.get("api_key") for it in yaml.safe_load(own)["instances"]}
    assert (keys["keyed"], keys["guarded"], keys["others"]) == ("${THEIR_KEY}", "${OWN_KEY}", None)
    tree = yaml.safe_load(compose(fleet, Images(), ON_CPUS)["compose.yaml"])
    assert tree["services"]["conductor"]["environment"]["THEIR_KEY"] == "${THEIR_KEY:?}"
    assert "api-key-others" in {it["source"] for it in tree["services"]["conductor"]["secrets"]}


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
