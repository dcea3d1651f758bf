"""How single values of a fleet file are read: names, addresses, flags, variables, digests of keys."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from headwater.errors import ConfigError
from headwater.fleetfile.secrets import PLACEHOLDER, SECRET_NAME, Secrets
from headwater.fleetfile.tables import as_table, inside
from headwater.values import node_name, parse_size, text

FLAGS_MAX = 200
VARIABLES_MAX = 200
LIMIT_BYTES = 1 << 32
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_API_KEY = re.compile(r"[!-~]{1,4096}")
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")
TAKEN = {
    "--port": "port",
    "--host": "port",
    "--served-model-name": "served_name",
    "--model": "model",
    "--data-parallel-size": "ranks",
    "-dp": "ranks",
}
"""Flags that are settings here; said twice, one of them would be wrong."""


def name(value: object) -> str:
    """What a process, a file and a host can be called."""
    found = text(value).strip()
    if not _NAME.fullmatch(found):
        raise ConfigError("not a name of up to 40 of a-z, 0-9 and dashes between them")
    return found


def member(value: object) -> str:
    """What a node can be called, also one that is not started here."""
    if not (found := node_name(value)):
        raise ConfigError("not a name")
    return found


def member_or_off(value: object) -> str | None:
    """The same, or off, which YAML reads as false."""
    return None if value is False or value == "off" else member(value)


def cluster(value: object) -> str:
    """A cluster's name."""
    if not (found := node_name(value)):
        raise ConfigError("not a name; leave it out for `headwater`")
    return found


def some_text(value: object) -> str:
    """Text that can be a single word of a command line."""
    found = text(value).strip()
    if not found or len(found) > 4096 or found.startswith("-") or not found.isprintable():
        raise ConfigError("not a name or a path")
    return found


def model(value: object, base: Path) -> str:
    """A model's folder, absolute (`./NAME` is beside the file), or its name, which has no such beginning."""
    found = some_text(value)
    return os.path.abspath(base / found) if found.startswith(("/", "./", "../")) else found


def _address(value: object, scheme: str, example: str) -> str:
    """SCHEME://HOST:PORT and nothing else."""
    url = text(value).strip().rstrip("/")
    try:
        parts = urlsplit(url)
        is_plain = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
        good = parts.scheme in scheme.split() and is_plain and parts.port and _HOST.fullmatch(parts.hostname or "")
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"not an address, as in {example}")
    return url


def http_url(value: object) -> str:
    """Where an engine answers. Without a path: requests' own paths are used."""
    return _address(value, "http https", "http://10.0.0.5:8000")


def tcp_url(value: object) -> str:
    """Where an engine publishes."""
    return _address(value, "tcp", "tcp://10.0.0.5:5557")


def events(value: object) -> str | Literal[False]:
    """The same, or off, which YAML reads as false."""
    return False if value is False or value == "off" else tcp_url(value)


def limit_bytes(value: object) -> int:
    """A size that is a limit."""
    if not 1024 <= (size := parse_size(value)) <= LIMIT_BYTES:
        raise ConfigError("not a size from 1KiB to 4GiB")
    return size


def key_digest(value: object) -> str:
    """The digest of an API key. What is wrong is not quoted: it may be the key itself."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value.strip().lower()):
        raise ConfigError("no digest of a key; write sha256: and 64 hexadecimal digits (`headwater conductor key`)")
    return value.strip().lower()


def api_key(content: str, place: str) -> str:
    """A key that goes into a header as it is. What is wrong is not quoted."""
    if PLACEHOLDER.fullmatch(content):
        raise ConfigError(f"{place}: the key is itself the name of a variable; put the key there")
    if not _API_KEY.fullmatch(content):
        raise ConfigError(f"{place}: no key of up to 4096 printable ASCII characters without spaces")
    return content


def as_text(value: object, between: str) -> object:
    """A node's setting as it would be in a variable of the environment, lists with `between` between their items."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        value = [f"{key}={content}" for key, content in value.items()]
    if isinstance(value, list | tuple) and all(isinstance(it, str) for it in value):
        return between.join(value)
    return value


def flag_name(flag: str) -> str:
    """A flag as vLLM understands it: `--a_b=3` and `--a_b.c` are `--a-b`."""
    first = re.split(r"[=.]", flag, maxsplit=1)[0]
    return first.replace("_", "-") if first.startswith("--") else first


def flags(value: object) -> tuple[str, ...]:
    """An engine's own flags: a list, or a line as in a shell."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError:
            raise ConfigError("a line of flags with a quote that does not end; write a list") from None
    if not isinstance(value, list | tuple) or len(value) > FLAGS_MAX:
        raise ConfigError(f"neither a line nor a list of up to {FLAGS_MAX} flags")
    found: list[str] = []
    for it in value:
        if isinstance(it, bool) or not isinstance(it, str | int | float) or "\0" in str(it):
            raise ConfigError(f"number {len(found) + 1} of the flags is neither text nor a number; put it in quotes")
        found.append(str(it))
        if (taken := TAKEN.get(flag_name(found[-1]))) is not None:
            raise ConfigError(f"{flag_name(found[-1])} among the flags: say it by `{taken}`")
        if flag_name(found[-1]) == "--api-key":
            raise ConfigError("--api-key among the flags: a secret is not written here; engines listen on loopback")
    return tuple(found)


def environment(value: object, place: str, secrets: Secrets) -> dict[str, str]:
    """Variables of an engine's environment."""
    given = as_table(value, place)
    if len(given) > VARIABLES_MAX:
        raise ConfigError(f"{place}: {len(given)} variables; at most {VARIABLES_MAX} are taken")
    return {it: _variable(it, content, inside(place, it), secrets) for it, content in given.items()}


def _variable(variable: str, value: object, place: str, secrets: Secrets) -> str:
    if not _VARIABLE.fullmatch(variable):
        raise ConfigError(f"{place}: not the name of a variable")
    if isinstance(value, str) and PLACEHOLDER.fullmatch(value.strip()):
        return secrets.named(value, place)
    if SECRET_NAME.search(variable):
        raise ConfigError(f"{place}: a secret is not written here; write ${{{variable}}}, and set that variable")
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
        raise ConfigError(f"{place}: neither text nor a number; put it in quotes")
    return str(value)


def network(value: object) -> str:
    """A network of addresses, as 10.0.0.0/8."""
    try:
        return str(ip_network(text(value).strip()))
    except ValueError:
        raise ConfigError("not a network like 10.0.0.0/8, with no bits of a host in it") from None
