"""What a fleet file means, and how it is refused: each message names the place and the remedy, and quotes no secret."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headwater.errors import ConfigError
from headwater.fleetfile.dump import decode, dump, encode
from headwater.fleetfile.model import MembersSpec
from headwater.fleetfile.read import read_fleet
from headwater.fleetfile.write import as_tree
from tests.conftest import ROOT
from tests.fleetfile.files import DIGEST, LEAST, OTHER, SECRET, WHOLE, read, written

NODE = "nodes: [{name: near}]\n"
CANARY = "s3cr3t-canary"


def test_a_small_file_is_a_fleet(tmp_path: Path) -> None:
    fleet = read(tmp_path, LEAST)
    assert [(it.name, it.model, it.served_name) for it in fleet.instances] == [("chat", "/models/smol", "/models/smol")]
    assert (fleet.nodes, fleet.tenants, fleet.directory, fleet.secret) == ((), (), None, "")
    assert fleet.conductor.listen == "127.0.0.1:8000" and fleet.cluster == "headwater"


def test_instances_inherit_what_they_do_not_say(tmp_path: Path) -> None:
    fleet = read(tmp_path, WHOLE)
    by_name = {it.name: it for it in fleet.instances}
    assert list(by_name) == ["chat-0", "chat-1", "chat-2", "long", "alone", "theirs"]
    chat, long, alone, theirs = (by_name[it] for it in ("chat-0", "long", "alone", "theirs"))
    assert chat.flags == ("--enforce-eager", "--max-model-len", "2048") and chat.node == "near"
    assert chat.environment == {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_canary"}
    assert long.flags == ("--max-model-len", "8192") and long.node == "far" and long.ranks == 2
    assert (alone.node, alone.events, alone.events_off) == (None, None, True)
    assert (theirs.flags, theirs.environment, theirs.node, theirs.served_name) == ((), {}, None, "smol")
    assert fleet.nodes[0].settings == {
        "host_memory": "1GiB",
        "prefault": "false",
        "labels": "zone=a",
        "remotes": "redis://kv:6379 s3://kv/a",
    }
    assert fleet.secret == SECRET and fleet.directory == "valkey"
    assert fleet.conductor.limits.body_bytes == 1 << 20 and fleet.conductor.times.drain_s == 3
    blue = fleet.tenants[0]
    assert blue.keys == (DIGEST, OTHER) and (blue.slo.ttft_s, blue.slo.tpot_s) == (1.0, 0.1)


def test_without_a_look_up_secrets_stay_where_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    (tmp_path / "secret").unlink()
    fleet = read_fleet(path, look_up=None)
    assert fleet.instances[0].environment["HF_TOKEN"] == "${HF_TOKEN}" and fleet.secret == ""


def test_a_model_beside_the_file_is_found_from_everywhere(tmp_path: Path) -> None:
    assert read(tmp_path, LEAST.replace("/models/smol", "./smol")).instances[0].model == str(tmp_path / "smol")
    assert read(tmp_path, LEAST.replace("/models/smol", "Org/smol")).instances[0].model == "Org/smol"


def test_the_example_is_a_fleet() -> None:
    fleet = read_fleet(ROOT / "examples" / "up.yaml", look_up=None)
    assert [it.name for it in fleet.instances] == ["chat-0", "chat-1"]


def test_what_the_example_only_mentions_can_be_read_too(tmp_path: Path) -> None:
    lines = []
    for line in (ROOT / "examples" / "up.yaml").read_text().splitlines():
        body = line.lstrip()
        is_setting = body.startswith(("# - {", "# directory", "# secret_file", "# tenants", "#   ", "# control_token"))
        lines.append(line.replace("# ", "", 1) if is_setting and "up.yaml" not in line else line)
    text = "\n".join(lines).replace("# directory", "directory")
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    fleet = read(tmp_path, text)
    assert [it.name for it in fleet.instances][-1] == "far" and fleet.tenants[0].name == "blue"
    assert fleet.directory == "valkey" and fleet.conductor.control_token_file == str(token)


TENANT = f"tenants: [{{name: a, keys: [{DIGEST}]}}]\n"
THEIRS = 'model: a\ninstances:\n  - {{name: c, url: "http://10.0.0.5:80", {}}}\n'
BAD = {
    "unknown at the top": (LEAST + "instnces: []\n", "instnces: no such setting; did you mean instances?"),
    "unknown of an instance": (
        "model: m\ninstances: [{name: chat, flgas: x}]\n",
        "instances.0.flgas: no such setting; did you mean flags?",
    ),
    "unknown of a node": (LEAST + "nodes: [{name: n, disc: x}]\n", "nodes.0.disc: no such setting; did you mean disk?"),
    "unknown limit": (
        LEAST + "conductor: {limits: {body: 1}}\n",
        "conductor.limits.body: no such setting; did you mean body_bytes?",
    ),
    "twice": ("model: a\nmodel: b\ninstances: []\n", "line 2: model is there twice; leave one of them"),
    "an alias": ("model: &m a\nserved_name: *m\ninstances: []\n", "line 2: an alias (*NAME)"),
    "no table": ("- a\n", "no table of settings; begin with `instances:`"),
    "no yaml": ("a: [", "not YAML: line 1, column 5"),
    "a python object": ("a: !!python/object/apply:os.system [x]\n", "not YAML: line 1"),
    "no instances": ("model: a\n", "instances: is missing; write it"),
    "instances of another kind": ("model: a\ninstances: chat\n", "instances: 'chat' is not a list"),
    "an instance of another kind": ("model: a\ninstances: [chat]\n", "instances.0: 'chat' is not a table"),
    "no name": ("model: a\ninstances: [{count: 2}]\n", "instances.0.name: is missing; write it"),
    "no model": ("instances: [{name: chat}]\n", "instances.0.model: is missing, here and at the top"),
    "an unsafe name": ("model: a\ninstances: [{name: ../x}]\n", "instances.0.name: '../x' is not a name of up to 40"),
    "a model that is a flag": ("model: --x\ninstances: []\n", "model: '--x' is not a name or a path"),
    "a role": ("model: a\ninstances: [{name: c, role: prefil}]\n", "instances.0.role: 'prefil' is not one of both"),
    "a size": (LEAST + "nodes: [{name: n, host_memory: 4QB}]\n", "nodes.0.host_memory: '4QB' is not a size"),
    "a duration": (LEAST + "slo: {ttft_s: 2 days}\n", "slo.ttft_s: '2 days' is not a duration"),
    "a count": ("model: a\ninstances: [{name: c, count: 0}]\n", "instances.0.count: 0 is not a whole number from 1"),
    "a port": ("model: a\ninstances: [{name: c, port: 70000}]\n", "instances.0.port: 70000 is not a whole number"),
    "one port for many": (
        "model: a\ninstances: [{name: c, port: 7000, count: 2}]\n",
        "instances.0.port: is of one instance, and there are 2",
    ),
    "too many": ("model: a\ninstances: [{name: c, count: 200}, {name: d, count: 57}]\n", "instances: 257 in all"),
    "a name twice": ("model: a\ninstances: [{name: c}, {name: c}]\n", "the name c is that of another one of the inst"),
    "a node's name": (
        NODE + "model: a\ninstances: [{name: near}]\n",
        "instances: the name near is that of another one of the nodes",
    ),
    "a name of ours": ("model: a\ninstances: [{name: conductor}]\n", "the name conductor is that of a part of every"),
    "no such node": (
        NODE + "model: a\ninstances: [{name: c, node: neer}]\n",
        "instances: c: there is no node neer; did you mean near?",
    ),
    "a node of the cluster, started here": (
        f"directory: redis://kv\nmodel: a\ninstances: [{{name: c, node: neer}}]\n{NODE}conductor: {{members: {{}}}}\n",
        "instances: c: there is no node neer",
    ),
    "members of no directory": (
        LEAST + "conductor: {members: {}}\n",
        "conductor.members: there is no `directory` that lists them",
    ),
    "members with half of TLS": (
        LEAST + "directory: redis://kv\nconductor: {members: {tls_cert: secret, tls_ca: secret}}\n",
        "conductor.members.tls_key: is missing",
    ),
    "unknown of members": (
        LEAST + "conductor: {members: {token: x}}\n",
        "conductor.members.token: no such setting; did you mean token_file?",
    ),
    "a name that no node has": (
        "model: a\ninstances: [{name: c, url: 'http://h:1', node: a b}]\n",
        "instances.0.node: 'a b' is not a name of up to 64 letters",
    ),
    "a name that is empty": (LEAST + "node: ''\n", "node: '' is not a name"),
    "members without a name": (
        LEAST + "directory: redis://kv\nconductor: {members: {name: ''}}\n",
        "conductor.members.name: '' is not a name",
    ),
    "no nodes": ("model: a\ninstances: [{name: c, node: n}]\n", "there is no node n; there are no `nodes`"),
    "settings of a node that runs": (
        LEAST + 'nodes: [{name: n, socket: "unix:/run/n", disk: "/kv:1GiB"}]\n',
        "nodes.0.disk: somebody else starts the node that has a `socket`",
    ),
    "flags of an instance that runs": (
        'model: a\ninstances: [{name: c, url: "http://h:1", flags: x}]\n',
        "instances.0.flags: somebody else starts the instance that has a `url`",
    ),
    "a url with a path": (
        'model: a\ninstances: [{name: c, url: "http://h:1/v1"}]\n',
        "instances.0.url: 'http://h:1/v1' is not an address",
    ),
    "a url with a user": (
        f'model: a\ninstances: [{{name: c, url: "http://u:{CANARY}@h:1"}}]\n',
        "instances.0.url: 'http://***@h:1' is not an address",
    ),
    "a flag that is a setting": (
        "model: a\ninstances: [{name: c, flags: --port=1}]\n",
        "instances.0.flags: --port among the flags: say it by `port`",
    ),
    "the same with an underscore": (
        "model: a\ninstances: [{name: c, flags: [--served_model_name, x]}]\n",
        "--served-model-name among the flags: say it by `served_name`",
    ),
    "an api key in flags": (
        f"model: a\ninstances: [{{name: c, flags: [--api-key, {CANARY}]}}]\n",
        "--api-key among the flags: a secret is not written here",
    ),
    "an open quote": ('model: a\nflags: "--x \'y"\ninstances: []\n', "flags: a line of flags with a quote that does"),
    "truth among flags": (
        "model: a\nflags: [yes]\ninstances: []\n",
        "flags: number 1 of the flags is neither text nor",
    ),
    "events in flags only": (
        "model: a\ninstances: [{name: c, flags: [--kv-events-config, '{}']}]\n",
        "instances: c: --kv-events-config among the flags; say by `events` where, or `off`",
    ),
    "replay without events": (
        'model: a\ninstances: [{name: c, replay: "tcp://127.0.0.1:1"}]\n',
        "instances: c: has `replay` and no `events`",
    ),
    "replay with events off": (
        'model: a\ninstances: [{name: c, events: off, replay: "tcp://127.0.0.1:1"}]\n',
        "instances.0.replay: there are no events to be replayed",
    ),
    "events open to others": (
        'model: a\ninstances: [{name: c, events: "tcp://10.0.0.1:5557"}]\n',
        "instances: c: `events` of an engine that is started here is on loopback",
    ),
    "replay open to others": (
        'model: a\ninstances: [{name: c, events: "tcp://127.0.0.1:5557", replay: "tcp://10.0.0.1:5558"}]\n',
        "instances: c: `replay` of an engine that is started here is on loopback",
    ),
    "two of one port": (
        "model: a\ninstances: [{name: c, port: 8000}]\n",
        "instances: c.port: port 8000 is that of conductor.listen too",
    ),
    "ranks over a port": (
        'model: a\ninstances: [{name: c, ranks: 3, events: "tcp://127.0.0.1:9000", replay: "tcp://127.0.0.1:9002"}]\n',
        "instances: c.replay: port 9002 is that of c.events too",
    ),
    "a port beyond": (
        'model: a\ninstances: [{name: c, ranks: 3, events: "tcp://127.0.0.1:65534"}]\n',
        "instances: c.events: port 65536 does not exist",
    ),
    "a port of a node's": (
        'model: a\ninstances: [{name: c, port: 7480}]\nnodes: [{name: n, metrics: "127.0.0.1:7480"}]\n',
        "instances: c.port: port 7480 is that of n.metrics too",
    ),
    "only prefill": (
        NODE + "model: a\nnode: near\ninstances: [{name: c, role: prefill}]\n",
        "instances: none of a has role decode; add one, or use role both",
    ),
    "only decode": (
        NODE + "model: a\nnode: near\ninstances: [{name: c, role: decode}]\n",
        "instances: none of a has role prefill",
    ),
    "a role without a node": (
        "model: a\ninstances: [{name: c, role: prefill}, {name: d}]\n",
        "instances: c: has role prefill and no node",
    ),
    "two models of one name": (
        "served_name: s\ninstances: [{name: c, model: a}, {name: d, model: b}]\n",
        "instances: d: s is another model elsewhere",
    ),
    "a directory": (LEAST + "directory: s3://bucket/b\n", "directory: a directory is kept by Redis or Valkey"),
    "an empty directory": (LEAST + "directory: ''\n", "directory: '' is not a URL, as in redis://host:6379; leave it"),
    "an empty directory of a variable": (LEAST + "directory: ${BLANK}\n", "directory: not a URL, as in redis://"),
    "a directory's password": (
        LEAST + f"directory: redis://u:{CANARY}@h:1\n",
        "directory: a password is not written here; write ${NAME}",
    ),
    "a remote's password": (
        LEAST + f'nodes: [{{name: n, remotes: ["redis://u:{CANARY}@h:1"]}}]\n',
        "nodes.0.remotes: a password is not written here",
    ),
    "an unset variable": (LEAST + "directory: ${NOWHERE}\n", "directory: the environment variable NOWHERE is not set"),
    "a variable that is no URL": (LEAST + "directory: ${BROKEN}\n", "directory: "),
    "a variable of ours": (
        LEAST + "directory: ${HEADWATER_X}\n",
        "directory: HEADWATER_X would be taken for a setting",
    ),
    "a secret": (LEAST + f"secret: {CANARY}\n", "secret: a secret is not written here; write ${NAME}"),
    "a short secret": (LEAST + "secret: ${SHORT}\n", "secret: shorter than 16 bytes"),
    "two secrets": (LEAST + "secret: ${LONG}\nsecret_file: secret\n", "secret: is there together with secret_file"),
    "no secret's file": (LEAST + "secret_file: nowhere\n", "nowhere: No such file or directory"),
    "a folder as a secret": (LEAST + "secret_file: .\n", "is not a file"),
    "a secret in the environment": (
        f"model: a\ninstances: [{{name: c, environment: {{HF_TOKEN: {CANARY}}}}}]\n",
        "instances.0.environment.HF_TOKEN: a secret is not written here; write ${HF_TOKEN}",
    ),
    "no variable's name": (
        "model: a\nenvironment: {a-b: 1}\ninstances: []\n",
        "environment.a-b: not the name of a var",
    ),
    "truth as a variable": (
        "model: a\nenvironment: {A: yes}\ninstances: []\n",
        "environment.A: neither text nor a num",
    ),
    "a policy": (LEAST + "conductor: {policy: luck}\n", "conductor.policy: 'luck' is not one of headwater"),
    "port 0": (LEAST + 'conductor: {listen: "127.0.0.1:0"}\n', "conductor.listen: port 0 is no port"),
    "open without tenants": (LEAST + 'conductor: {listen: "0.0.0.0:8000"}\n', "is open to others; add `tenants`"),
    "open without tenants, tls off": (
        LEAST + 'conductor: {listen: "0.0.0.0:8000", tls: off}\n',
        "is open to others; add `tenants` with keys",
    ),
    "open without tls": (
        LEAST + TENANT + 'conductor: {listen: "0.0.0.0:8000"}\n',
        "is open to others, and keys would be read on the way",
    ),
    "a host's name is open": (
        LEAST + 'conductor: {listen: "front.example:8000"}\n',
        "conductor.listen: front.example:8000 is open to others",
    ),
    "open control": (LEAST + 'conductor: {control: "0.0.0.0:8001"}\n', "is open to others; name a control_token_file"),
    "tls on": (LEAST + "conductor: {tls: on}\n", "conductor.tls: True is not off; for TLS, name tls_certificate"),
    "half of tls": (LEAST + "conductor: {tls_key: secret}\n", "conductor.tls_certificate: is missing"),
    "the other half of tls": (LEAST + "conductor: {tls_certificate: secret}\n", "conductor.tls_key: is missing"),
    "tls on and off": (
        LEAST + "conductor: {tls: off, tls_key: secret, tls_certificate: secret}\n",
        "conductor.tls: off, and there is a tls_certificate",
    ),
    "no certificate": (
        LEAST + "conductor: {tls_key: secret, tls_certificate: x}\n",
        "x is not a file that can be read",
    ),
    "a key itself": (
        LEAST + f"tenants: [{{name: a, keys: [{CANARY}]}}]\n",
        "tenants.0.keys.0: no digest of a key; write sha256:",
    ),
    "no keys": (LEAST + "tenants: [{name: a, keys: []}]\n", "tenants: a: has no keys"),
    "keys left out": (LEAST + "tenants: [{name: a}]\n", "tenants.0.keys: is missing"),
    "a tenant twice": (
        LEAST + f"tenants: [{{name: a, keys: [{DIGEST}]}}, {{name: a, keys: [{OTHER}]}}]\n",
        "tenants: a is there twice",
    ),
    "a key twice": (
        LEAST + f"tenants: [{{name: a, keys: [{DIGEST}]}}, {{name: b, keys: [{DIGEST}]}}]\n",
        "tenants: b: has a key that a has too",
    ),
    "a key twice of one": (
        LEAST + f"tenants: [{{name: a, keys: [{DIGEST}, {DIGEST}]}}]\n",
        "tenants: a: has a key that a has too",
    ),
    "an empty tenant": (LEAST + f'tenants: [{{name: "", keys: [{DIGEST}]}}]\n', "tenants: one has an empty name"),
    "a tenant's model": (
        LEAST + f"tenants: [{{name: a, keys: [{DIGEST}], models: [/models/smoll]}}]\n",
        "tenants: a: no instance serves /models/smoll; did you mean /models/smol?",
    ),
    "a cluster": (LEAST + "cluster: a/b\n", "cluster: 'a/b' is not a name"),
    "an API key in the file": (
        THEIRS.format(f"api_key: {CANARY}"),
        "instances.0.api_key: a secret is not written here; write ${NAME}",
    ),
    "an API key that is not set": (THEIRS.format('api_key: "${NONE}"'), "the environment variable NONE is not set"),
    "an API key that is no word": (THEIRS.format('api_key: "${SPACED}"'), "instances.0.api_key: no key of up to 4096"),
    "an API key that is blank": (THEIRS.format('api_key: "${BLANK}"'), "instances.0.api_key: no key of up to 4096"),
    "an API key that is a variable's name": (
        THEIRS.format('api_key: "${NAMED}"'),
        "instances.0.api_key: the key is itself the name of a variable",
    ),
    "an API key twice": (
        THEIRS.format('api_key: "${LONG}", api_key_file: secret'),
        "instances.0.api_key: is there together with api_key_file",
    ),
    "an API key of an engine that is started": (
        'model: a\ninstances: [{name: c, api_key: "${LONG}"}]\n',
        "instances.0.api_key: is for a `url`; start this engine with VLLM_API_KEY",
    ),
}
VARIABLES = {"BROKEN": f"redis://u:{CANARY}@[", "HEADWATER_X": "redis://h:1", "SHORT": "abc", "LONG": "x" * 32}
VARIABLES |= {"SPACED": f"{CANARY} x", "BLANK": " \t ", "NAMED": f"${{{CANARY.replace('-', '_')}}}"}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_used_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, VARIABLES)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/fleet.yaml: ") and message in said
    assert CANARY not in said


def test_nodes_of_the_cluster_need_not_be_listed(tmp_path: Path) -> None:
    text = """
directory: redis://kv
model: a
instances: [{name: c, node: far, url: "http://10.0.0.5:8000"}]
conductor: {members: {name: front, token_file: secret}}
"""
    fleet = read(tmp_path, text)
    assert fleet.conductor.members == MembersSpec("front", str(tmp_path / "secret"))
    assert fleet.instances[0].node == "far" and fleet.nodes == ()
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(as_tree(fleet, None)))
    assert read_fleet(tmp_path / "again.yaml").conductor == fleet.conductor
    assert decode(encode(fleet)) == fleet
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"conductor\.members\.token_file: .* has mode 0644"):
        read_fleet(tmp_path / "fleet.yaml")


@pytest.mark.parametrize("name", ["Host_5.example", "h" * 55 + "-0123abcd"])
def test_a_node_of_the_cluster_has_any_name_that_nodes_have(tmp_path: Path, name: str) -> None:
    text = f"""
directory: redis://kv
model: a
instances: [{{name: c, node: {name}, url: "http://10.0.0.5:8000"}}]
conductor: {{members: {{name: {name}}}}}
"""
    fleet = read(tmp_path, text)
    assert fleet.instances[0].node == name and fleet.conductor.members == MembersSpec(name)
    with pytest.raises(ConfigError, match=f"instances: c: there is no node {name}"):
        read(tmp_path, text.replace('url: "http://10.0.0.5:8000"', "port: 9000"))  # which is started here
    with pytest.raises(ConfigError, match=f"instances: c: there is no node {name}"):
        read(tmp_path, text.split("conductor:")[0])


def test_an_engines_api_key_is_read_and_never_shown(tmp_path: Path) -> None:
    text = THEIRS.format('api_key: "${LONG}"') + '  - {name: d, url: "http://10.0.0.6:80", api_key_file: secret}\n'
    fleet = read(tmp_path, text, VARIABLES)
    assert [it.api_key for it in fleet.instances] == ["x" * 32, SECRET]
    assert decode(encode(fleet)) == fleet
    for shown in (repr(fleet), str(dump(fleet)), str(as_tree(fleet, None))):
        assert "x" * 32 not in shown and SECRET not in shown
    assert as_tree(fleet, None)["instances"][1]["api_key_file"] == str(tmp_path / "secret")
    kept = read_fleet(tmp_path / "fleet.yaml", look_up=None)
    assert [it.api_key for it in kept.instances] == ["${LONG}", ""]
    assert [it.get("api_key") for it in as_tree(kept, None)["instances"]] == ["${LONG}", None]
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"instances\.1\.api_key_file: .* has mode 0644"):
        read_fleet(tmp_path / "fleet.yaml", look_up=VARIABLES.get)


def test_files_that_are_too_long_or_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read(tmp_path, LEAST + "#" * (1 << 20))
    with pytest.raises(ConfigError, match="nested too deeply"):
        read(tmp_path, "a: " + "[" * 5000)
    with pytest.raises(ConfigError, match="No such file"):
        read_fleet(tmp_path / "nowhere.yaml")
    (tmp_path / "fleet.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_fleet(tmp_path / "fleet.yaml")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o666])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, LEAST + "secret_file: secret\n")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}, open to others; chmod 600 it") as caught:
        read_fleet(path)
    assert SECRET not in str(caught.value)
