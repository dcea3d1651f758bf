"""Reads a fleet file: YAML to `FleetFile`, every value checked and every default of the file's top level handed down.

    model, served_name, flags, environment, node    are for instances that do not say otherwise
    instances: {name: chat, count: 3}               are chat-0, chat-1 and chat-2

Whatever is no setting, or cannot be read, is refused with its place. `checks` holds one setting against another,
`secrets` says where secrets are; `resolve` fills in ports and addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.config import SETTINGS, directory_place, secret
from headwater.core.policies import POLICIES
from headwater.errors import ConfigError
from headwater.fleet import Role
from headwater.fleetfile import words
from headwater.fleetfile.checks import check
from headwater.fleetfile.model import (
    ConductorSpec,
    FleetFile,
    InstanceSpec,
    Limits,
    MembersSpec,
    NodeSpec,
    Slo,
    TenantSpec,
    Times,
)
from headwater.fleetfile.secrets import Secrets, long_enough
from headwater.fleetfile.tables import (
    Read,
    as_rows,
    inside,
    number,
    plain,
    read_table,
    read_yaml,
    rows,
    shown,
    table,
)
from headwater.values import host_and_port, node_name, one_of, parse_duration, socket_address, truth, whole_number

INSTANCES_MAX = 256
TENANTS_MAX = 10_000
VALKEY = "valkey"
"""A directory that `headwater up` starts."""
OWN = ("socket", "name", "cluster")
"""A node's settings that the file says elsewhere, or that are ours."""

_COUNT = plain(whole_number(1, 1 << 40))
_SECONDS = plain(parse_duration)


def read_fleet(path: str | Path, look_up: Callable[[str], str | None] | None = secret) -> FleetFile:
    """A fleet from its file; its `secret` is empty where the file names none.

    `look_up` finds variables of the environment; None leaves `${NAME}` as it is and opens no other file, for what is
    only shown or exported. Raises ConfigError, which says the place and quotes no secret."""
    tree = read_yaml(Path(path))
    try:
        return parse_fleet(tree, str(path), Secrets(Path(path).resolve().parent, look_up))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_fleet(tree: Mapping[str, Any], path: str, secrets: Secrets) -> FleetFile:
    """A fleet from a table."""
    found = read_table(tree, "", _top(secrets), ("instances",))
    slo: Slo = found.get("slo", Slo())
    conductor, is_open = found.get("conductor", (ConductorSpec(), False))
    tenants = tuple(replace(it, slo=_or(it.slo, slo)) for it in found.get("tenants", ()))
    if "secret" in found and "secret_file" in found:
        raise ConfigError("secret: is there together with secret_file; leave one of them")
    key = "secret" if "secret" in found else "secret_file"
    fleet = FleetFile(
        path=path,
        nodes=found.get("nodes", ()),
        instances=_instances(found),
        conductor=conductor,
        slo=slo,
        tenants=tenants,
        directory=found.get("directory"),
        cluster=found.get("cluster", "headwater"),
        secret=long_enough(found.get(key, ""), key),
    )
    check(fleet, is_open=is_open)
    return fleet


def _top(secrets: Secrets) -> dict[str, Read]:
    return {
        "cluster": plain(words.cluster),
        "directory": secrets.checked(_directory),
        "secret": secrets.named,
        "secret_file": secrets.content,
        "slo": _slo,
        "nodes": rows(lambda value, place: _node(value, place, secrets)),
        "instances": rows(lambda value, place: read_table(value, place, _instance(secrets), ("name",))),
        "conductor": lambda value, place: _conductor(value, place, secrets),
        "tenants": _tenants,
        **_defaults(secrets),
    }


def _directory(value: object) -> str:
    if value != VALKEY and not directory_place(value):
        raise ConfigError("not a URL, as in redis://host:6379; leave it out where there is no directory")
    return str(value)


def _slo(value: object, place: str) -> Slo:
    return Slo(**read_table(value, place, {"ttft_s": _SECONDS, "tpot_s": _SECONDS}))


def _or(own: Slo, default: Slo) -> Slo:
    return Slo(own.ttft_s or default.ttft_s, own.tpot_s or default.tpot_s)


def _node(value: object, place: str, secrets: Secrets) -> NodeSpec:
    names = [name.partition(".")[2] for name in SETTINGS if name.startswith("node.")]
    readers: dict[str, Read] = {it: _setting(it, secrets) for it in names if it not in OWN}
    readers |= {"name": plain(words.name), "socket": plain(socket_address)}
    found = read_table(value, place, readers, ("name",))
    name, socket = found.pop("name"), found.pop("socket", "")
    if socket and found:
        raise ConfigError(f"{inside(place, next(iter(found)))}: somebody else starts the node that has a `socket`")
    return NodeSpec(name=name, socket=socket, settings=found)


def _setting(name: str, secrets: Secrets) -> Read:
    """A node's setting as the text of its variable; it is read to be checked."""
    read = secrets.checked(SETTINGS[f"node.{name}"].metadata["parse"])
    between = " " if name == "remotes" else ","
    return lambda value, place: read(words.as_text(value, between), place)


def _defaults(secrets: Secrets) -> dict[str, Read]:
    """What instances inherit."""
    return {
        "model": plain(lambda value: words.model(value, secrets.base)),
        "served_name": plain(words.some_text),
        "flags": plain(words.flags),
        "environment": lambda value, place: words.environment(value, place, secrets),
        "node": plain(words.member_or_off),
    }


def _instance(secrets: Secrets) -> dict[str, Read]:
    return {
        "name": plain(words.name),
        "count": plain(whole_number(1, INSTANCES_MAX)),
        "role": plain(lambda value: Role(one_of(*(it.value for it in Role))(value))),
        "url": plain(words.http_url),
        "port": plain(whole_number(1, 65535)),
        "events": plain(words.events),
        "replay": plain(words.tcp_url),
        "ranks": plain(whole_number(1, 64)),
        "capacity_tokens": _COUNT,
        "block_tokens": plain(whole_number(1, 65536)),
        "api_key": lambda value, place: _key(secrets.named(value, place).strip(), place, secrets),
        "api_key_file": lambda value, place: _key_file(value, place, secrets),
        **_defaults(secrets),
    }


def _key_file(value: object, place: str, secrets: Secrets) -> tuple[str, str]:
    """Where a key is, and the key."""
    return secrets.private_path(value, place), _key(secrets.content(value, place), place, secrets)


def _key(content: str, place: str, secrets: Secrets) -> str:
    """What was found; there is nothing to be checked yet where nothing was looked up."""
    return content if secrets.look_up is None else words.api_key(content, place)


KEYS = ("api_key", "api_key_file")
STARTED = ("flags", "environment", "port", "count")
ONE = ("port", "events", "replay", "url")


def _instances(top: Mapping[str, Any]) -> tuple[InstanceSpec, ...]:
    """All of them, with what they inherit and by their own names."""
    made: list[InstanceSpec] = []
    for at, given in enumerate(top["instances"]):
        place = f"instances.{at}"
        if "url" in given and (odd := [it for it in STARTED if it in given]):
            raise ConfigError(f"{place}.{odd[0]}: somebody else starts the instance that has a `url`")
        if "url" not in given and (odd := [it for it in KEYS if it in given]):
            raise ConfigError(f"{place}.{odd[0]}: is for a `url`; start this engine with VLLM_API_KEY by `environment`")
        count = given.get("count")
        if count is not None and (odd := [it for it in ONE if given.get(it)]):
            raise ConfigError(f"{place}.{odd[0]}: is of one instance, and there are {count}; leave it out")
        whole = _inherited(given, top, place)
        names = [whole["name"]] if count is None else [f"{whole['name']}-{it}" for it in range(count)]
        made += [InstanceSpec(**(whole | {"name": it})) for it in names]
    if len(made) > INSTANCES_MAX:
        raise ConfigError(f"instances: {len(made)} in all; at most {INSTANCES_MAX} are taken")
    return tuple(made)


def _inherited(given: Mapping[str, Any], top: Mapping[str, Any], place: str) -> dict[str, Any]:
    whole = {name: content for name, content in given.items() if name != "count"}
    handed = ("model", "served_name") if "url" in given else ("model", "served_name", "flags", "environment", "node")
    for name in handed:
        if name in top and name not in whole:
            whole[name] = top[name]
    if "environment" in given and "environment" in top:
        whole["environment"] = {**top["environment"], **given["environment"]}
    if "model" not in whole:
        raise ConfigError(f"{place}.model: is missing, here and at the top; write it")
    whole.setdefault("served_name", whole["model"])
    if "api_key_file" in whole:
        if "api_key" in whole:
            raise ConfigError(f"{place}.api_key: is there together with api_key_file; leave one of them")
        whole["api_key_file"], whole["api_key"] = whole["api_key_file"]
    if whole.get("events") is False:
        whole |= {"events": None, "events_off": True}
        if whole.pop("replay", None):
            raise ConfigError(f"{place}.replay: there are no events to be replayed; leave it out")
    return whole


def _limits(value: object, place: str) -> Limits:
    sizes = ("body_bytes", "header_bytes", "event_bytes", "answer_bytes", "replay_bytes", "buffered_bytes")
    counts = ("headers", "json_depth", "messages", "tools", "prompt_tokens", "connections", "requests", "waiting")
    readers: dict[str, Read] = {it: plain(words.limit_bytes) for it in sizes}
    return Limits(**read_table(value, place, readers | {it: plain(whole_number(1, 1 << 30)) for it in counts}))


def _times(value: object, place: str) -> Times:
    return Times(**read_table(value, place, dict.fromkeys(Times.__slots__, _SECONDS)))


def _conductor(value: object, place: str, secrets: Secrets) -> tuple[ConductorSpec, bool]:
    """The Conductor, and whether the file says in so many words that it needs no TLS."""
    found = read_table(
        value,
        place,
        {
            "listen": plain(host_and_port),
            "control": plain(host_and_port),
            "control_token_file": secrets.private_path,
            "workers": plain(whole_number(1, 64)),
            "policy": plain(one_of(*POLICIES)),
            "admission": plain(truth),
            "migrate": plain(truth),
            "retries": plain(whole_number(0, 16)),
            "tokens": plain(one_of("local", "engine", "none")),
            "tls": _tls_off,
            "tls_certificate": secrets.path,
            "tls_key": secrets.private_path,
            "explained": plain(whole_number(0, 10_000_000)),
            "index_keys": plain(whole_number(1024, 1 << 28)),
            "members": lambda value, place: _members(value, place, secrets),
            "networks": rows(plain(words.network)),
            "limits": _limits,
            "times": _times,
        },
    )
    is_open = found.pop("tls", None) is not None
    return ConductorSpec(**found), is_open


def _members(value: object, place: str, secrets: Secrets) -> MembersSpec:
    files: dict[str, Read] = {"token_file": secrets.private_path, "tls_key": secrets.private_path}
    files |= {"tls_cert": secrets.path, "tls_ca": secrets.path}
    return MembersSpec(**read_table(value, place, {"name": plain(words.member)} | files))


def _tls_off(value: object, place: str) -> bool:
    if value is not False and value != "off":
        raise ConfigError(f"{place}: {shown(value)} is not off; for TLS, name tls_certificate and tls_key")
    return False


_TENANT: dict[str, Read] = {
    "name": plain(node_name),
    "keys": rows(plain(words.key_digest)),
    "weight": plain(number(0.001, 1000)),
    "priority": plain(whole_number(0, 1000)),
    "concurrency": _COUNT,
    "requests_per_minute": _COUNT,
    "tokens_per_minute": _COUNT,
    "models": rows(plain(words.some_text)),
    "slo": _slo,
}


def _tenants(value: object, place: str) -> tuple[TenantSpec, ...]:
    given = as_rows(value, place)
    if len(given) > TENANTS_MAX:
        raise ConfigError(f"{place}: {len(given)}; at most {TENANTS_MAX} are taken")
    found = rows(table(_TENANT, ("name", "keys")))(given, place)
    return tuple(TenantSpec(**it) for it in found)
