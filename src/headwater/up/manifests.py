"""What manifests of every kind have in common: the images, the user, the file for the Conductor, secrets by name.

A manifest has no secret in it, only where secrets come from: files of a secret by their names (`Secrets.files`), and
variables that the fleet file names as `${NAME}` (`Secrets.variables`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from headwater.config import SETTINGS
from headwater.errors import ConfigError
from headwater.fleetfile.model import FleetFile, InstanceSpec, MembersSpec, NodeSpec
from headwater.fleetfile.secrets import PLACEHOLDER
from headwater.fleetfile.write import as_tree
from headwater.places import parse_disk
from headwater.values import absolute_path, memory_size
from headwater.version import VERSION

RUN = "/run/headwater"
"""Where sockets are, in every container of a host."""
PRIVATE = "/etc/headwater/private"
"""Where files with secrets are, readable by the user of the container only."""
FLEET = "/etc/headwater/fleet"
CACHE = "/var/cache/headwater"
USER = 10001
SECRET, CONTROL_TOKEN, TLS_CERTIFICATE, TLS_KEY = "secret", "control-token", "tls.crt", "tls.key"
NODE_ROOM_BYTES = 1 << 30
"""What a node needs besides its memory for KV."""
DEFAULT_HOST_MEMORY = 4 << 30


@dataclass(frozen=True, slots=True)
class Images:
    """What containers run. Engines need vLLM with headwater beside it."""

    headwater: str = f"headwater:{VERSION}"
    engine: str = f"headwater-vllm:{VERSION}"
    directory: str = "valkey/valkey:8"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a file of the secret is from."""

    setting: str
    path: str
    """'' where only the setting's reader has it, or nobody yet."""


def merged(*files: Mapping[str, Source]) -> dict[str, Source]:
    """Files of the secret by their names. Raises ConfigError where two files have one name."""
    found: dict[str, Source] = {}
    for name, source in (pair for each in files for pair in each.items()):
        if (other := found.setdefault(name, source)).path != source.path:
            raise ConfigError(
                f"{source.setting}: {source.path} would be {name} among the secrets, and so would {other.setting}; "
                "give one of the files another name"
            )
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """A node and the engines that share its memory, so one host; or engines without any."""

    name: str
    node: NodeSpec | None
    instances: tuple[InstanceSpec, ...]


def groups(fleet: FleetFile, resolved: FleetFile) -> list[Group]:
    """What is started, by host; whoever somebody else runs is left out. Engines without a node are alone."""
    pairs = list(zip(fleet.instances, resolved.instances, strict=True))
    mine = [whole for given, whole in pairs if given.url is None]
    found = []
    for given, whole in zip(fleet.nodes, resolved.nodes, strict=True):
        beside = tuple(it for it in mine if it.node == given.name)
        if not given.socket or beside:
            found.append(Group(given.name, None if given.socket else whole, beside))
    return found + [Group(it.name, None, (it,)) for it in mine if it.node is None]


def placeholders(texts: Iterable[str]) -> list[str]:
    """The variables that texts name."""
    return sorted({found[1] for it in texts if (found := PLACEHOLDER.fullmatch(it))})


def conductor_file(fleet: FleetFile, *, control: str | None = None, listen: str | None = None) -> str:
    """The Conductor's own file, whose secrets are files in PRIVATE."""
    spec = fleet.conductor
    has_tls = spec.tls_certificate is not None
    spec = replace(
        spec,
        listen=listen or spec.listen,
        control=control or spec.control,
        control_token_file=f"{PRIVATE}/{CONTROL_TOKEN}" if control or spec.control_token_file else None,
        tls_certificate=f"{PRIVATE}/{TLS_CERTIFICATE}" if has_tls else None,
        tls_key=f"{PRIVATE}/{TLS_KEY}" if has_tls else None,
        members=None if spec.members is None else _in_container(spec.members),
    )
    instances = tuple(
        it if it.api_key_file is None else replace(it, api_key_file=f"{PRIVATE}/{key_name(it)}")
        for it in fleet.instances
    )
    return to_yaml(as_tree(replace(fleet, conductor=spec, instances=instances), f"{PRIVATE}/{SECRET}"))


def conductor_secrets(fleet: FleetFile, *, control: bool) -> dict[str, Source]:
    """The files that the Conductor's own file names, by their names in the secret. Raises ConfigError."""
    spec = fleet.conductor
    own = {SECRET: Source("secret_file", "")}
    if control or spec.control_token_file is not None:
        own[CONTROL_TOKEN] = Source("conductor.control_token_file", spec.control_token_file or "")
    if spec.tls_certificate is not None:
        own[TLS_CERTIFICATE] = Source("conductor.tls_certificate", spec.tls_certificate)
        own[TLS_KEY] = Source("conductor.tls_key", spec.tls_key or "")
    members = {} if spec.members is None else _files(spec.members)
    theirs = [{_member_name(name, path): Source(f"conductor.members.{name}", path)} for name, path in members.items()]
    keys = {
        key_name(it): Source(f"instances: {it.name}.api_key_file", it.api_key_file)
        for it in fleet.instances
        if it.api_key_file is not None
    }
    return merged(own, *theirs, keys)


def conductor_variables(fleet: FleetFile) -> list[str]:
    """The variables that the Conductor's own file names."""
    keys = [it.api_key or it.environment.get("VLLM_API_KEY", "") for it in fleet.instances if it.api_key_file is None]
    return placeholders([fleet.directory or "", *keys])


def key_name(it: InstanceSpec) -> str:
    """What the file with an instance's API key is called among the secrets: each its own."""
    return f"api-key-{it.name}"


def _files(members: MembersSpec) -> dict[str, str]:
    """What the Conductor proves itself with to nodes, by settings."""
    given = {name: getattr(members, name) for name in ("token_file", "tls_cert", "tls_key", "tls_ca")}
    return {name: path for name, path in given.items() if path is not None}


def _member_name(setting: str, path: str) -> str:
    """What such a file is called among the secrets: its own, or as it is called there already, being nodes' too."""
    place = PurePosixPath(path)
    if str(place.parent) == PRIVATE:
        return place.name
    return f"members-{setting.removesuffix('_file').removeprefix('tls_')}"


def _in_container(members: MembersSpec) -> MembersSpec:
    paths = {name: f"{PRIVATE}/{_member_name(name, path)}" for name, path in _files(members).items()}
    return replace(members, **paths)


def node_settings(fleet: FleetFile, node: NodeSpec) -> tuple[dict[str, str], dict[str, Source]]:
    """A node's settings in a container, and the files with secrets that they name, which are in PRIVATE there."""
    settings = {"name": node.name, "cluster": fleet.cluster}
    if fleet.directory is not None:
        settings["directory"] = fleet.directory
    settings |= node.settings
    files: dict[str, Source] = {}
    for name, text in settings.items():
        if SETTINGS[f"node.{name}"].metadata["parse"] is absolute_path and text:
            called = PurePosixPath(text).name
            files = merged(files, {called: Source(f"nodes.{node.name}.{name}", text)})
            settings[name] = f"{PRIVATE}/{called}"
    return settings, files


def node_memory(settings: Mapping[str, str]) -> int:
    """How many bytes of memory a node's container takes."""
    given = settings.get("host_memory")
    return (memory_size(given) if given else DEFAULT_HOST_MEMORY) + NODE_ROOM_BYTES


def node_disk(settings: Mapping[str, str]) -> tuple[str, int] | None:
    """The directory and size of a node's disk tier."""
    text = settings.get("disk", "")
    if not text or PLACEHOLDER.fullmatch(text):
        return None
    spec = parse_disk(text)
    return spec.path, spec.size_bytes


def model_folder(model: str) -> str | None:
    """Where the files of a model are, if it is a folder."""
    return model if model.startswith("/") else None


class _Dumper(yaml.SafeDumper):
    """Plain YAML: no anchors, and lists indented below their names."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """See PyYAML."""
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(value: Any) -> str:
    """The same text for the same value, always."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return text
