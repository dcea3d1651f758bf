"""What only shows when one setting of a fleet file is held against another."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable
from urllib.parse import urlsplit

from headwater.errors import ConfigError
from headwater.fleet import Role
from headwater.fleetfile.model import ConductorSpec, FleetFile, InstanceSpec
from headwater.fleetfile.words import flag_name
from headwater.values import nearest, split_address

RESERVED = ("conductor", "directory", "up")
"""What parts of a fleet are called that have no name of their own."""


def check(fleet: FleetFile, *, is_open: bool) -> None:
    """Raises ConfigError. `is_open`: the file says that the Conductor needs no TLS of its own."""
    _names(fleet)
    _nodes(fleet)
    _members(fleet)
    _roles(fleet)
    _models(fleet)
    _ports(fleet)
    _tenants(fleet)
    _listens(fleet, is_open=is_open)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names(fleet: FleetFile) -> None:
    seen: dict[str, str] = dict.fromkeys(RESERVED, "a part of every fleet")
    for kind, them in (("nodes", fleet.nodes), ("instances", fleet.instances)):
        for it in them:
            if it.name in seen:
                raise ConfigError(f"{kind}: the name {it.name} is that of {seen[it.name]}; choose another one")
            seen[it.name] = f"another one of the {kind}"


def _nodes(fleet: FleetFile) -> None:
    known = [it.name for it in fleet.nodes]
    for it in fleet.instances:
        if it.node is not None and it.node not in known:
            if fleet.conductor.members is not None and not started(it):
                continue  # one that the directory lists
            hint = f"did you mean {nearest(it.node, known)}?" if known else "there are no `nodes`"
            raise ConfigError(f"instances: {it.name}: there is no node {it.node}; {hint}")
    sockets = [it.socket for it in fleet.nodes if it.socket]
    if twice := next((it for it in sockets if sockets.count(it) > 1), None):
        raise ConfigError(f"nodes: two have the socket {twice}; leave one of them")


def _members(fleet: FleetFile) -> None:
    members = fleet.conductor.members
    if members is None:
        return
    if fleet.directory is None:
        raise ConfigError("conductor.members: there is no `directory` that lists them; name the nodes' own")
    files = {"tls_cert": members.tls_cert, "tls_key": members.tls_key, "tls_ca": members.tls_ca}
    if any(files.values()) and (missing := next((it for it, path in files.items() if path is None), None)):
        raise ConfigError(f"conductor.members.{missing}: is missing; TLS needs tls_cert, tls_key and tls_ca")


def _roles(fleet: FleetFile) -> None:
    """Per model: who computes prompts needs someone who answers, and KV goes from the one to the other by nodes."""
    roles: dict[str, set[Role]] = defaultdict(set)
    for it in fleet.instances:
        roles[it.served_name].add(it.role)
        if it.role is not Role.BOTH and it.node is None:
            raise ConfigError(
                f"instances: {it.name}: has role {it.role.value} and no node, which KV goes through; name one"
            )
    for name, found in sorted(roles.items()):
        if Role.BOTH not in found and (missing := {Role.PREFILL, Role.DECODE} - found):
            raise ConfigError(f"instances: none of {name} has role {missing.pop().value}; add one, or use role both")


def _models(fleet: FleetFile) -> None:
    models: dict[str, str] = {}
    for it in fleet.instances:
        if models.setdefault(it.served_name, it.model) != it.model:
            raise ConfigError(
                f"instances: {it.name}: {it.served_name} is another model elsewhere; use another served_name"
            )
    for tenant in fleet.tenants:
        for name in tenant.models:
            if models and name not in models:
                raise ConfigError(
                    f"tenants: {tenant.name}: no instance serves {name}; did you mean {nearest(name, models)}?"
                )


def started(it: InstanceSpec) -> bool:
    """Whether `headwater up` starts it."""
    return it.url is None


def ports_of(it: InstanceSpec) -> Iterable[tuple[int, str]]:
    """The ports of this host that an instance which is started takes, and by which setting."""
    if not started(it):
        return
    if it.port is not None:
        yield it.port, f"{it.name}.port"
    for setting, url in (("events", it.events), ("replay", it.replay)):
        if url is not None:
            first = urlsplit(url).port or 0
            yield from ((first + rank, f"{it.name}.{setting}") for rank in range(it.ranks))


def ports_named(fleet: FleetFile) -> Iterable[tuple[int, str]]:
    """All ports of this host that a file names."""
    for setting, address in (("listen", fleet.conductor.listen), ("control", fleet.conductor.control)):
        yield int(split_address(address)[1]), f"conductor.{setting}"
    for node in fleet.nodes:
        for setting in ("metrics", "listen"):
            port = split_address(node.settings.get(setting, ""))[1]
            if port.isdigit():
                yield int(port), f"{node.name}.{setting}"
    for it in fleet.instances:
        yield from ports_of(it)


def _ports(fleet: FleetFile) -> None:
    seen: dict[int, str] = {}
    for port, where in ports_named(fleet):
        if port == 0 and where.startswith("conductor."):
            raise ConfigError(f"{where}: port 0 is no port that others can connect to")
        if port > 65535:
            raise ConfigError(f"instances: {where}: port {port} does not exist; begin lower")
        if port and port in seen:
            raise ConfigError(f"instances: {where}: port {port} is that of {seen[port]} too; choose another one")
        seen[port] = where
    for it in fleet.instances:
        _events(it)


def _events(it: InstanceSpec) -> None:
    own = any(flag_name(flag) == "--kv-events-config" for flag in it.flags)
    if own and it.events is None and not it.events_off:
        raise ConfigError(f"instances: {it.name}: --kv-events-config among the flags; say by `events` where, or `off`")
    if it.replay is not None and it.events is None:
        raise ConfigError(f"instances: {it.name}: has `replay` and no `events`; name both or neither")
    if started(it) and (url := it.events) is not None and not is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(f"instances: {it.name}: `events` of an engine that is started here is on loopback")
    if started(it) and (url := it.replay) is not None and not is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(f"instances: {it.name}: `replay` of an engine that is started here is on loopback")


def _tenants(fleet: FleetFile) -> None:
    names: set[str] = set()
    keys: dict[str, str] = {}
    for tenant in fleet.tenants:
        if not tenant.name:
            raise ConfigError("tenants: one has an empty name")
        if tenant.name in names:
            raise ConfigError(f"tenants: {tenant.name} is there twice; leave one of them")
        names.add(tenant.name)
        if not tenant.keys:
            raise ConfigError(f"tenants: {tenant.name}: has no keys, so nobody could be it; add one or leave it out")
        for key in tenant.keys:
            if key in keys:
                raise ConfigError(f"tenants: {tenant.name}: has a key that {keys[key]} has too; each key is of one")
            keys[key] = tenant.name


def _listens(fleet: FleetFile, *, is_open: bool) -> None:
    conductor: ConductorSpec = fleet.conductor
    if (conductor.tls_certificate is None) != (conductor.tls_key is None):
        missing = "tls_key" if conductor.tls_key is None else "tls_certificate"
        raise ConfigError(f"conductor.{missing}: is missing; TLS needs tls_certificate and tls_key")
    has_tls = conductor.tls_certificate is not None
    if has_tls and is_open:
        raise ConfigError("conductor.tls: off, and there is a tls_certificate; leave one of them")
    host = split_address(conductor.listen)[0]
    if not is_loopback(host):
        if not fleet.tenants:
            raise ConfigError(f"conductor.listen: {conductor.listen} is open to others; add `tenants` with keys")
        if not has_tls and not is_open:
            raise ConfigError(
                f"conductor.listen: {conductor.listen} is open to others, and keys would be read on the way; name "
                "tls_certificate and tls_key, or write `tls: off` where something in front of it has TLS"
            )
    if not is_loopback(split_address(conductor.control)[0]) and conductor.control_token_file is None:
        raise ConfigError(f"conductor.control: {conductor.control} is open to others; name a control_token_file")
