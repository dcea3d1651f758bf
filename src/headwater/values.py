"""How one configuration value is read, whether it comes from a file, a variable, a flag or code.

Each reader takes text or a typed value, gives the typed value, and raises ConfigError with the reason and the
remedy; `config` adds the setting's name and where the value came from. Readers take their own results.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

from headwater.errors import ConfigError
from headwater.types import Namespace

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGEST_SIZE = 1 << 60
LONGEST_SOCKET_PATH = 107
"""Bytes of a Unix socket's path that the kernel takes (sun_path without its end)."""

_SIZE = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,20}))?\s*([a-z]*)", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZE_UNITS |= {_letter: 1024**_power, f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}
    _SIZE_UNITS[f"{_letter}b"] = 1000**_power
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-z]*)", re.IGNORECASE)
_DURATION_UNITS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like `name`, for error texts."""
    return max(known, key=lambda it: difflib.SequenceMatcher(None, name, it).ratio())


def parse_size(value: object) -> int:
    """Bytes from an int or from text: `5GiB`, `5G` and `0.5g` are powers of 1024, `5GB` is 5 * 10**9.

    Case and space before the unit do not matter; no unit is bytes; fractions of a byte are cut.
    Raises ConfigError for all else: signs, exponents, NaN, infinities, floats, unknown units, above 2**60.
    """
    size = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        whole, fraction, unit = match.groups(default="")
        if unit.lower() in _SIZE_UNITS:
            size = int(whole + fraction) * _SIZE_UNITS[unit.lower()] // 10 ** len(fraction)
    if size is None or not 0 <= size <= LARGEST_SIZE:
        raise ConfigError("not a size; write a whole number of bytes, or a number and a unit: 512MiB, 4GiB, 0.5g, 4GB")
    return size


def memory_size(value: object) -> int:
    """A size of at least 1 MiB: what is smaller has lost its unit."""
    if (size := parse_size(value)) < MIB:
        raise ConfigError(f"{size} bytes is below the least of 1MiB; is a unit missing, as in 4GiB?")
    return size


def size_or_auto(value: object) -> int | None:
    """A size, or None for `auto`: whoever needs it chooses."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    return parse_size(value)


def parse_duration(value: object) -> float:
    """Seconds from a number or from text: `30`, `30s`, `500ms`, `2m`, `1h`; above 0, at most a day.

    Raises ConfigError for all else.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = float(match.group(1)) * _DURATION_UNITS.get(match.group(2).lower(), math.nan)
    if not 0 < seconds <= 86400:
        raise ConfigError("not a duration above 0 and up to 24h; write seconds or a number and a unit: 30s, 500ms, 2m")
    return seconds


def whole_number(least: int, most: int) -> Callable[[object], int]:
    """A reader of whole numbers within limits, both included."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value.strip()):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"not a whole number from {least} to {most}")
        return value

    return parse


def truth(value: object) -> bool:
    """True or false, also as one of the usual words."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip().lower() not in _TRUTH:
        raise ConfigError("neither true nor false; write one of these two words")
    return _TRUTH[value.strip().lower()]


def one_of(*allowed: str) -> Callable[[object], str]:
    """A reader of one word out of a few."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in allowed:
            raise ConfigError(f"not one of {', '.join(allowed)}")
        return value.strip().lower()

    return parse


def text(value: object) -> str:
    """Text as it is."""
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError("not text")
    return value


def socket_address(value: object) -> str:
    """`unix:` and an absolute path that the kernel takes."""
    address = text(value).strip()
    path = address.removeprefix("unix:")
    if path == address or not path.startswith("/"):
        raise ConfigError("not a node's address; write unix: and an absolute path: unix:/run/headwater/node.sock")
    if (length := len(os.fsencode(path))) > LONGEST_SOCKET_PATH:
        raise ConfigError(f"the path has {length} bytes, the kernel takes {LONGEST_SOCKET_PATH}; shorten it")
    return address


def socket_or_embedded(value: object) -> str:
    """A socket's address, or nothing for a node inside the engine."""
    return "" if value == "" else socket_address(value)


def memory_backing(value: object) -> str:
    """`memfd`, or the absolute path of a directory."""
    place = text(value).strip()
    if place != "memfd" and not place.startswith("/"):
        raise ConfigError("neither memfd nor the absolute path of a directory on tmpfs or hugetlbfs")
    return place


def absolute_path(value: object) -> str:
    """An absolute path, or nothing."""
    path = text(value).strip()
    if path and not path.startswith("/"):
        raise ConfigError("not an absolute path; it must not depend on where the process was started")
    return path


def split_address(address: str) -> tuple[str, str]:
    """Host and port of `HOST:PORT` or `[HOST]:PORT`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def loopback_address(value: object) -> str:
    """`off`, or HOST:PORT that only this host can reach."""
    address = text(value).strip()
    if address.lower() == "off":
        return "off"
    host, port = split_address(address)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or not host:
        raise ConfigError("neither off nor HOST:PORT, as in 127.0.0.1:7480")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            "not a loopback address; what is served there has no credentials yet, so use 127.0.0.1:PORT or "
            "[::1]:PORT and let an agent on this host read it"
        )
    return address


def host_and_port(value: object) -> str:
    """HOST:PORT or [HOST]:PORT, port 0 for any."""
    address = text(value).strip()
    host, port = split_address(address)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or not re.fullmatch(r"[A-Za-z0-9._:%-]{1,255}", host):
        raise ConfigError("not HOST:PORT, as in 10.0.0.5:7420 or [fd00::5]:7420")
    return address


def host_and_port_or_none(value: object) -> str:
    """The same with a real port, or nothing."""
    if value == "":
        return ""
    address = host_and_port(value)
    if split_address(address)[1].strip("0") == "":
        raise ConfigError("port 0 is no port that others can connect to")
    return address


def node_name(value: object) -> str:
    """The name of a node or a cluster, or nothing."""
    name = text(value).strip()
    if name and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError("not a name of up to 64 letters, digits, dots, dashes and underscores")
    return name


def label_values(value: object) -> dict[str, str]:
    """A few labels and their values."""
    found = named_values(value, "label=value, as in zone=a")
    if len(found) > 16 or any(not re.fullmatch(r"[A-Za-z0-9._/-]{1,64}", str(it)) for it in [*found, *found.values()]):
        raise ConfigError("not up to 16 labels of up to 64 letters, digits and . _ / -")
    return {str(name): str(content) for name, content in found.items()}


def named_values(value: object, example: str) -> dict[str, object]:
    """Names and values, unread: a table, `name=value,…`, or a list of `name=value`."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        pairs = [str(part).partition("=") for part in value]
        if missing := [name for name, equals, _ in pairs if not equals]:
            raise ConfigError(f"{missing[0]!r} has no value; write {example}")
        names = [name.strip() for name, _, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]!r} is there twice; leave one of them")
        value = {name: content.strip() for name, (_, _, content) in zip(names, pairs, strict=True)}
    if not isinstance(value, Mapping):
        raise ConfigError(f"neither a table nor pairs; write {example}")
    return dict(value)


def namespace_fields(value: object) -> dict[str, str]:
    """Fields of a Namespace and their values."""
    found = named_values(value, "field=value, as in kv_dtype=float32")
    known = [it.name for it in fields(Namespace)]
    for name in found:
        if name not in known:
            raise ConfigError(f"a Namespace has no field {name!r}; the nearest is {nearest(str(name), known)!r}")
    return {name: text(content) for name, content in found.items()}


def tenant_sizes(value: object) -> dict[str, int]:
    """Tenants and a size for each; the name of engines without a tenant is empty, as in `=4GiB`."""
    found = named_values(value, "tenant=size, as in blue=8GiB")
    return {text(tenant): memory_size(size) for tenant, size in found.items()}
