"""A fleet file as plain values, for people and for other processes; and back."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgspec

from headwater.errors import ConfigError
from headwater.fleetfile.model import FleetFile
from headwater.fleetfile.secrets import MASK, PLACEHOLDER, SECRET_NAME
from headwater.places import mask


def dump(fleet: FleetFile) -> dict[str, Any]:
    """All of it as values that can be written as JSON or YAML, without secrets: keys and their digests, passwords,
    variables that hold secrets."""
    masked = replace(
        fleet,
        nodes=tuple(
            replace(it, settings={name: mask(text) for name, text in it.settings.items()}) for it in fleet.nodes
        ),
        instances=tuple(
            replace(
                it,
                environment={name: masked_variable(name, text) for name, text in it.environment.items()},
                api_key=masked_variable("API_KEY", it.api_key) if it.api_key else "",
            )
            for it in fleet.instances
        ),
        tenants=tuple(replace(it, keys=tuple(f"sha256:{MASK}" for _ in it.keys)) for it in fleet.tenants),
        directory=None if fleet.directory is None else mask(fleet.directory),
        secret=MASK,
    )
    found: dict[str, Any] = asdict(masked)
    return found


def masked_variable(name: str, value: str) -> str:
    """A variable's value as it may be shown."""
    return MASK if SECRET_NAME.search(name) and not PLACEHOLDER.fullmatch(value) else mask(value)


def encode(fleet: FleetFile) -> bytes:
    """All of it, secrets too, for a process that is given it by a pipe."""
    return msgspec.json.encode(fleet)


def decode(data: bytes) -> FleetFile:
    """What `encode` made. Raises ConfigError without any of it."""
    try:
        return msgspec.json.decode(data, type=FleetFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError("what came by the pipe is no fleet") from None
