"""Where lower tiers are, as an operator writes it: `PATH:SIZE` for DISK, a URL for REMOTE, options behind a `?`.

    /nvme/kv:500GiB?codec=zstd
    redis://user:password@host:6379/0?cluster=blue&ttl=12h      valkey://, and rediss:// valkeys:// for TLS
    redis+unix:///run/valkey.sock?db=0
    s3://bucket/prefix?endpoint=http://10.0.0.5:9000&region=eu-1   gs://bucket/prefix   az://container/prefix?account=a
    file:///shared/nfs?shared=true

Credentials are kept apart from what is printed: `str()`, `repr()`, `name` and every error text are without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from headwater.errors import ConfigError
from headwater.values import memory_size, nearest, one_of, parse_duration, text, truth, whole_number

REDIS_PORT = 6379
REDIS_SCHEMES = ("redis", "valkey", "rediss", "valkeys", "redis+unix", "valkey+unix")
OBJECT_SCHEMES = ("s3", "gs", "az", "file")
SCHEMES = REDIS_SCHEMES + OBJECT_SCHEMES
_ALIASES = {"gcs": "gs", "azure": "az"}
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")
_SCHEME = re.compile(r"[a-z0-9+]{1,32}")
_AUTHORITY_END = re.compile("[/?#]")
_CODEC = re.compile(r"[a-z0-9][a-z0-9:+._-]{0,63}")
_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """A directory for the DISK tier, and how many bytes it may use."""

    path: str
    size_bytes: int
    codec: str = "none"
    admission: str = "auto"

    def __str__(self) -> str:
        return f"{self.path}:{self.size_bytes}" + _query({"codec": self.codec, "admission": self.admission})


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """One REMOTE tier. `host` is a host or a bucket, `path` a prefix, a directory or a socket.

    `name` is what logs and metrics call it; it has no credentials. `url` is the text it was read from, credentials
    included, for passing on to a child process; it is never printed.
    """

    scheme: str
    name: str
    host: str = ""
    port: int = 0
    path: str = ""
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    database: int = 0
    codec: str = "none"
    admission: str = "auto"
    ttl_s: float | None = None
    connections: int = 2
    capacity_bytes: int | None = None
    cluster: str = "default"
    ca: str = ""
    endpoint: str = ""
    region: str = ""
    account: str = ""
    shared: bool = False
    """Whether the group of a directory may read and write there, too."""
    url: str = field(default="", repr=False, compare=False)

    @property
    def is_redis(self) -> bool:
        """Whether it speaks the protocol of Redis and Valkey; an object store otherwise."""
        return self.scheme in REDIS_SCHEMES

    @property
    def has_tls(self) -> bool:
        """Whether a Redis or Valkey connection is encrypted."""
        return self.scheme in ("rediss", "valkeys")

    def __str__(self) -> str:
        return mask(self.url) or self.name


def mask(url: str) -> str:
    """A URL, or a text with URLs in it, with everything before an `@` replaced; for messages."""
    return _CREDENTIALS.sub("***@", url)


def parse_disk(value: object) -> DiskSpec:
    """`PATH:SIZE[?codec=…&admission=…]`, the path absolute. Raises ConfigError."""
    if isinstance(value, DiskSpec):
        return value
    place, _, query = text(value).strip().partition("?")
    path, colon, size = place.rpartition(":")
    if not colon or not path.startswith("/"):
        raise ConfigError("not PATH:SIZE with an absolute path, as in /nvme/kv:500GiB")
    return DiskSpec(path.rstrip("/") or "/", memory_size(size), **_options(query, _DISK_OPTIONS, "a disk"))


def parse_remote(value: object) -> RemoteSpec:
    """The URL of a REMOTE tier. Raises ConfigError, whose text never has the URL in it."""
    if isinstance(value, RemoteSpec):
        return value
    url = text(value).strip()
    if not url.isprintable() or " " in url:
        raise ConfigError("white space and control characters are written %20 and so on")
    scheme, separator, rest = url.partition("://")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if not separator or not _SCHEME.fullmatch(scheme):
        raise ConfigError("not a URL, as in redis://host:6379, s3://bucket/prefix or file:///directory")
    if scheme not in SCHEMES:
        near = nearest(scheme, SCHEMES)
        raise ConfigError(f"unknown scheme {scheme!r}; the nearest known one is {near!r}, all are {', '.join(SCHEMES)}")
    authority = _AUTHORITY_END.split(rest, maxsplit=1)[0]
    login = authority and (":" in authority or scheme in REDIS_SCHEMES)
    if (login and "@" in rest.removeprefix(authority)) or "@" in rest.partition("?")[2]:
        raise ConfigError("in user and password, write / ? # as %2F, %3F, %23; behind the '?', write @ as %40")
    try:
        parts = urlsplit(url)
        port = parts.port or 0
        host = parts.hostname or ""
    except ValueError:
        # Python's text may hold a part of the password.
        raise ConfigError("host and port cannot be read; in user and password, write : / ? # @ % as %XX") from None
    if parts.fragment:
        raise ConfigError("a '#' is not allowed in the URL of a tier; in a password it is written %23")
    read = _redis if scheme in REDIS_SCHEMES else _object_store
    where = read(scheme, host, port, unquote(parts.path), parts.netloc.rpartition("@")[2])
    options = _options(parts.query, _options_of(scheme), f"{scheme}://")
    credentials = {"user": unquote(parts.username or ""), "password": unquote(parts.password or "")}
    if scheme not in (*REDIS_SCHEMES, "s3", "az") and any(credentials.values()):
        raise ConfigError(f"{scheme}:// takes no user and password")
    return RemoteSpec(scheme=scheme, url=url, **(where | options | credentials))


def _redis(scheme: str, host: str, port: int, path: str, shown: str) -> dict[str, Any]:
    if scheme.endswith("+unix"):
        if host or not path.startswith("/"):
            raise ConfigError(f"not an absolute path of a socket, as in {scheme}:///run/valkey.sock")
        return {"name": f"{scheme}://{path}", "path": path}
    if not host:
        raise ConfigError(f"the host is missing, as in {scheme}://host:6379")
    number = path.strip("/")
    if not re.fullmatch(r"[0-9]{0,4}", number):
        raise ConfigError(f"what is behind the host is not the number of a database, as in {scheme}://host:6379/0")
    port = port or REDIS_PORT
    name = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    database = int(number or 0)
    return {"name": f"{name}/{database}" if database else name, "host": host, "port": port, "database": database}


def _object_store(scheme: str, host: str, port: int, path: str, shown: str) -> dict[str, Any]:
    if scheme == "file":
        if host or not path.startswith("/"):
            raise ConfigError("not an absolute path, as in file:///shared/nfs")
        path = path.rstrip("/") or "/"
        return {"name": f"file://{path}", "path": path}
    if port or not _BUCKET.fullmatch(shown):
        raise ConfigError(f"no name of a bucket, as in {scheme}://bucket/prefix; a server goes into ?endpoint=")
    prefix = path.strip("/")
    if ".." in prefix.split("/"):
        raise ConfigError("'..' is not allowed in a prefix")
    return {"name": f"{scheme}://{shown}/{prefix}".rstrip("/"), "host": shown, "path": prefix}


def _codec(value: object) -> str:
    if not _CODEC.fullmatch(name := text(value)):
        raise ConfigError("not the name of a codec, as in none, zstd or int8")
    return name


def _cluster(value: object) -> str:
    if not _CLUSTER.fullmatch(name := text(value)):
        raise ConfigError("not a name of up to 64 letters, digits, dots, dashes and underscores")
    return name


def _absolute(value: object) -> str:
    if not (path := text(value)).startswith("/"):
        raise ConfigError("not an absolute path")
    return path


def _endpoint(value: object) -> str:
    try:
        parts = urlsplit(text(value))
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.username and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError("not http:// or https:// and a host, without credentials, as in http://10.0.0.5:9000")
    return str(value).rstrip("/")


Reader = tuple[str, Callable[[object], Any]]
"""The field that an option fills, and how its value is read."""

_DISK_OPTIONS: dict[str, Reader] = {
    "codec": ("codec", _codec),
    "admission": ("admission", one_of("all", "reused", "auto")),
}
_REMOTE_OPTIONS: dict[str, Reader] = _DISK_OPTIONS | {
    "connections": ("connections", whole_number(1, 64)),
    "cluster": ("cluster", _cluster),
}
_REDIS_OPTIONS: dict[str, Reader] = _REMOTE_OPTIONS | {
    "ttl": ("ttl_s", parse_duration),
    "capacity": ("capacity_bytes", memory_size),
}
_MORE_OPTIONS: dict[str, dict[str, Reader]] = {
    "rediss": {"ca": ("ca", _absolute)},
    "valkeys": {"ca": ("ca", _absolute)},
    "redis+unix": {"db": ("database", whole_number(0, 9999))},
    "valkey+unix": {"db": ("database", whole_number(0, 9999))},
    "s3": {"endpoint": ("endpoint", _endpoint), "region": ("region", text), "ca": ("ca", _absolute)},
    "gs": {"ca": ("ca", _absolute)},
    "file": {"shared": ("shared", truth)},
    "az": {"endpoint": ("endpoint", _endpoint), "account": ("account", text), "ca": ("ca", _absolute)},
}


def _options_of(scheme: str) -> dict[str, Reader]:
    return (_REDIS_OPTIONS if scheme in REDIS_SCHEMES else _REMOTE_OPTIONS) | _MORE_OPTIONS.get(scheme, {})


def _options(query: str, known: Mapping[str, Reader], where: str) -> dict[str, Any]:
    """The fields that the part behind the `?` sets."""
    found: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=32) if query else []
    except ValueError:
        raise ConfigError("what is behind the '?' is not option=value&option=value") from None
    for option, value in pairs:
        if option not in known:
            raise ConfigError(_unknown(option, known, where))
        name, read = known[option]
        if name in found:
            raise ConfigError(f"option {option!r} is given twice")
        try:
            found[name] = read(value)
        except ConfigError as error:
            raise ConfigError(f"option {option}={value!r}: {error}") from None
    return found


def _unknown(option: str, known: Collection[str], where: str) -> str:
    if option == "ttl":
        return f"{where} has no option 'ttl': let the store's own life-cycle rules delete old objects"
    return f"{where} has no option {option!r}; the nearest is {nearest(option, known)!r}, all are {', '.join(known)}"


def _query(options: Mapping[str, str]) -> str:
    given = [f"{name}={value}" for name, value in options.items() if value not in ("none", "auto")]
    return "?" + "&".join(given) if given else ""
