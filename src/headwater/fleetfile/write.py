"""The fleet file of a fleet whose parts run already: what a Conductor needs to know, and no more.

`read` makes the same fleet of it. Instances have a `url` and nodes a `socket`, so nothing is started by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headwater.fleetfile.model import ConductorSpec, FleetFile, InstanceSpec, Slo, TenantSpec
from headwater.fleetfile.secrets import PLACEHOLDER


def as_tree(fleet: FleetFile, secret_file: str | None) -> dict[str, Any]:
    """The tables of such a file for a resolved fleet. `secret_file` is where its secret is; tenants' keys are digests.
    Variables that were not looked up stay `${NAME}`; raises nothing, and knows no other secret."""
    conductor = _changed(fleet.conductor, ConductorSpec())
    if fleet.conductor.tls_certificate is None:
        conductor["tls"] = "off"
    found: dict[str, Any] = {"cluster": fleet.cluster}
    if fleet.directory is not None:
        found["directory"] = fleet.directory
    if secret_file is not None:
        found["secret_file"] = secret_file
    if fleet.slo != Slo():
        found["slo"] = _changed(fleet.slo, Slo())
    found["nodes"] = [{"name": it.name, "socket": it.socket} for it in fleet.nodes]
    found["instances"] = [_instance(it) for it in fleet.instances]
    found["conductor"] = conductor
    if fleet.tenants:
        found["tenants"] = [_changed(it, TenantSpec("")) for it in fleet.tenants]
    return found


def _instance(it: InstanceSpec) -> dict[str, Any]:
    found = _changed(it, InstanceSpec("", "", ""))
    for name in ("port", "flags", "environment", "events_off", "api_key"):
        found.pop(name, None)
    # An engine that is started with a key wants it from whoever asks.
    key = it.api_key or it.environment.get("VLLM_API_KEY", "")
    if it.api_key_file is None and PLACEHOLDER.fullmatch(key):
        found["api_key"] = key
    if it.events_off:
        found["events"] = "off"
    return found


def _changed(it: Any, default: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are by default, as plain values."""
    found = {}
    for each in fields(it):
        value, usual = getattr(it, each.name), getattr(default, each.name)
        if value == usual:
            continue
        found[each.name] = _changed(value, usual or type(value)()) if hasattr(value, "__slots__") else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, str) else value
