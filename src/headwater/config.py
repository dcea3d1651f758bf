"""Configuration: one tree of frozen dataclasses, and where each of its values came from.

Lowest to highest: default < TOML file (`--config FILE`, else HEADWATER_CONFIG) < environment < flags.

    node.host_memory    file: [node] host_memory = "32GiB"
                        environment: HEADWATER_NODE_HOST_MEMORY=32GiB      flag: --host-memory 32GiB

A key that is not in the tree, or a value that does not parse, is refused with its name, where it came from
and the remedy. This is the only file of the package that reads the environment or a configuration file.

The URLs of remote tiers may hold passwords. `public` is how values are shown: refusals, `headwater config` and the
node's log use it, and `repr` of a configuration leaves the URLs out.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from headwater.errors import ConfigError
from headwater.places import mask, parse_disk, parse_remote
from headwater.types import PAGE_BYTES
from headwater.values import (
    GIB,
    MIB,
    absolute_path,
    host_and_port,
    host_and_port_or_none,
    label_values,
    loopback_address,
    memory_backing,
    memory_size,
    namespace_fields,
    nearest,
    node_name,
    one_of,
    parse_duration,
    parse_size,
    size_or_auto,
    socket_address,
    socket_or_embedded,
    split_address,
    tenant_sizes,
    text,
    truth,
    whole_number,
)

__all__ = [
    "SETTINGS",
    "Config",
    "Effective",
    "EngineConfig",
    "LogConfig",
    "NodeConfig",
    "child_environment",
    "default_socket",
    "default_value",
    "directory_place",
    "disk_place",
    "embedded_node",
    "engine_config",
    "load_config",
    "parse_duration",
    "parse_size",
    "public",
    "remote_places",
    "runtime_dir",
    "search_path",
    "secret",
    "variable",
]

PREFIX = "HEADWATER_"
FILE_VARIABLE = "HEADWATER_CONFIG"
TEST_PREFIX = "HEADWATER_TEST_"
"""Variables of the test suite."""
EXTRA = "kv_connector_extra_config"
_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""The end of variables that Kubernetes gives every pod for a Service named headwater…; not ours."""


def runtime_dir(env: Mapping[str, str] | None = None) -> Path:
    """The user's directory for sockets; whoever needs it first creates it with mode 0700."""
    base = (os.environ if env is None else env).get("XDG_RUNTIME_DIR", "")
    if base.startswith("/") and os.path.isdir(base):
        return Path(base, "headwater")
    return Path(f"/tmp/headwater-{os.getuid()}")


def default_socket(env: Mapping[str, str] | None = None) -> str:
    """The address where a node listens, and engines look for it, unless told otherwise."""
    return f"unix:{runtime_dir(env)}/node.sock"


def search_path() -> str:
    """Where this process finds programs."""
    return os.environ.get("PATH", os.defpath)


def secret(name: str) -> str | None:
    """What the environment variable of a name holds that a user gave, as a command line is no place for a key."""
    return os.environ.get(name) or None


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a process that we start: ours without HEADWATER_*, then `changes` (None removes)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def _about(parse: Callable[[object], Any], purpose: str) -> dict[str, Any]:
    """What the tree knows of a field: how its value is read and what it is for."""
    return {"parse": parse, "help": purpose}


def _setting(default: Any, parse: Callable[[object], Any], purpose: str) -> Any:
    return field(default=default, metadata=_about(parse, purpose))


def disk_place(value: object) -> str:
    """A disk tier's place as it was written, or nothing; `places.parse_disk` says what it means."""
    place = text(value).strip()
    if place:
        parse_disk(place)
    return place


def remote_places(value: object) -> tuple[str, ...]:
    """The URLs of remote tiers: a list, or text with spaces between; `places.parse_remote` says what they mean."""
    urls = value.split() if isinstance(value, str) else value
    if not isinstance(urls, list | tuple):
        raise ConfigError("neither a list of URLs nor text with URLs, as in redis://host:6379")
    known: dict[str, None] = {}
    for position, url in enumerate(urls, 1):
        try:
            name = parse_remote(url).name
        except ConfigError as error:
            raise ConfigError(f"number {position}: {error}") from None
        if name in known:
            raise ConfigError(f"number {position}: {name} is there twice; leave one of them")
        known[name] = None
    return tuple(url.strip() for url in urls)


def directory_place(value: object) -> str:
    """The URL of a cluster's directory, or nothing for a node on its own."""
    url = text(value).strip()
    if url and not parse_remote(url).is_redis:
        raise ConfigError("a directory is kept by Redis or Valkey, as in redis://host:6379")
    return url


def _remotes() -> Any:
    purpose = "remote tiers below it, nearest first: redis://, valkey://, s3://, gs://, az:// or file:// URLs"
    return field(default=(), repr=False, metadata=_about(remote_places, purpose))


DISK_SLAB_BYTES = 256 * MIB


def slab_of_disk(size_bytes: int, slab: int) -> int:
    """The slab of a DISK tier of this size: an eighth of it as a power of two, at most 256 MiB; or `slab`, the setting,
    if that is more. The memory's size has no part in it: what is on the disk is dropped when its slab changes."""
    return max(min(DISK_SLAB_BYTES, 1 << (size_bytes // 8).bit_length() - 1), slab)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node: its memory, its socket, its limits. Sizes are bytes."""

    socket: str = field(
        default_factory=default_socket,
        metadata=_about(socket_address, "address that engines connect to, unix:/PATH"),
    )
    host_memory: int = _setting(4 * GIB, memory_size, "memory for KV, shared with this host's engines")
    slab: int = _setting(
        0, parse_size, "unit in which memory moves between models of different shapes; 0 = by host_memory"
    )
    eviction: Literal["learned", "lru", "s3fifo"] = _setting(
        "learned", one_of("learned", "lru", "s3fifo"), "which chunk leaves a full memory: learned, lru or s3fifo"
    )
    quotas: dict[str, int] = field(
        default_factory=dict,
        metadata=_about(
            tenant_sizes,
            "tenant and the host memory that it is entitled to when room is short, with that share of the disk tier; "
            "the other tenants share the rest",
        ),
    )
    disk: str = _setting("", disk_place, "disk tier, DIRECTORY:SIZE[?codec=NAME]; empty = none")
    disk_reserve: int | None = _setting(
        None, size_or_auto, "room to leave free on the disk tier's file system; auto = a share of it"
    )
    disk_threads: int = _setting(2, whole_number(1, 64), "threads that read and write the disk tier")
    remotes: tuple[str, ...] = _remotes()
    keys: str = _setting("", absolute_path, "file with the keys of encrypting codecs, readable by its owner only")
    transfer_bytes: int = _setting(
        256 * MIB, memory_size, "bytes on their way to and from a lower tier at a time, for each tier"
    )
    load_lease_s: float = _setting(30.0, parse_duration, "how long a load may take before its lease ends")
    save_lease_s: float = _setting(60.0, parse_duration, "how long a save may take; later it cannot commit")
    drain_s: float = _setting(10.0, parse_duration, "how long SIGTERM waits for running loads and saves")
    metrics: str = _setting("127.0.0.1:7480", loopback_address, "loopback address of /metrics and /status, or off")
    backing: str = _setting(
        "memfd", memory_backing, "memfd, or a directory on tmpfs or hugetlbfs that holds the memory"
    )
    prefault: bool = _setting(True, truth, "touch all memory at start, so that a lack of it shows then")
    lock_memory: bool = _setting(False, truth, "keep the memory out of swap (needs RLIMIT_MEMLOCK)")
    name: str = _setting("", node_name, "this node's name in its cluster, also after a restart; empty = by its host")
    cluster: str = _setting("default", node_name, "the cluster; others that use the same directory never meet")
    directory: str = field(
        default="",
        repr=False,
        metadata=_about(directory_place, "the cluster's directory, redis:// or valkey:// URL; empty = a node alone"),
    )
    listen: str = _setting("127.0.0.1:0", host_and_port, "HOST:PORT where other nodes connect, port 0 = any free one")
    advertise: str = _setting("", host_and_port_or_none, "HOST:PORT that others are told; empty = by node.listen")
    token_file: str = _setting("", absolute_path, "file with the cluster's token, readable by its owner only")
    tls_cert: str = _setting("", absolute_path, "this node's certificate, for mutual TLS between nodes")
    tls_key: str = _setting("", absolute_path, "the key of node.tls_cert")
    tls_ca: str = _setting("", absolute_path, "certificates of the authority that signs every node's")
    labels: dict[str, str] = field(
        default_factory=dict,
        metadata=_about(label_values, "where this node is, as in zone=a,switch=s1,nic=mlx5_0"),
    )
    nixl: bool = _setting(False, truth, "read peers by RDMA where both do (pip install 'headwater[nixl]')")
    host_id: str = _setting("", text, "equal for nodes that can share memory; empty = by boot and network namespace")
    cluster_quotas: dict[str, int] = field(
        default_factory=dict,
        metadata=_about(tenant_sizes, "tenant and the host memory that it may hold on all nodes together"),
    )
    replicas: int = _setting(3, whole_number(1, 16), "copies of a hot prefix that nodes make on their own, at most")
    max_sessions: int = _setting(1024, whole_number(1, 65536), "connections at a time")
    require: dict[str, str] = field(
        default_factory=dict,
        metadata=_about(
            namespace_fields, "Namespace field and the value that every client must have: kv_dtype=float32"
        ),
    )

    def __post_init__(self) -> None:
        _check("node", self)
        if self.slab % PAGE_BYTES or self.slab > self.host_memory:
            raise ConfigError(
                f"node.slab = {self.slab}: not a multiple of {PAGE_BYTES} that fits "
                f"node.host_memory = {self.host_memory}; use 0 to have it chosen"
            )
        if not self.cluster:
            raise ConfigError("node.cluster = '': a cluster needs a name")
        if self.tls_cert or self.tls_key or self.tls_ca:
            for name in ("tls_cert", "tls_key", "tls_ca"):
                if not getattr(self, name):
                    raise ConfigError(f"node.{name} = '': mutual TLS needs node.tls_cert, node.tls_key and node.tls_ca")
        if (promised := sum(self.quotas.values())) > self.host_memory:
            raise ConfigError(
                f"node.quotas = {public('node.quotas', self.quotas)}: {promised} bytes are more than "
                f"node.host_memory = {self.host_memory}; lower a quota or raise the memory"
            )

    @property
    def slab_bytes(self) -> int:
        """The slab in use: `slab`, or an eighth of the memory within 16 MiB and 256 MiB; whole pages."""
        chosen = self.slab or min(256 * MIB, max(self.host_memory // 8, 16 * MIB), self.host_memory)
        return chosen // PAGE_BYTES * PAGE_BYTES

    @property
    def disk_slab_bytes(self) -> int:
        """The DISK tier's slab; see `slab_of_disk`."""
        return slab_of_disk(parse_disk(self.disk).size_bytes, self.slab)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of the metrics server; None when it is off."""
        if self.metrics == "off":
            return None
        host, port = split_address(self.metrics)
        return host, int(port)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: where its cache is and how it uses it; what `kv_connector_extra_config` may hold."""

    node: str = _setting("", socket_or_embedded, "the node, unix:/PATH; empty = one embedded in the engine")
    host_memory: int = _setting(4 * GIB, memory_size, "memory of the embedded node")
    disk: str = _setting("", disk_place, "disk tier of the embedded node, DIRECTORY:SIZE[?codec=NAME]; empty = none")
    remotes: tuple[str, ...] = _remotes()
    keys: str = _setting("", absolute_path, "file with the keys of encrypting codecs, for the embedded node")
    chunk_tokens: int = _setting(
        256, whole_number(1, 1 << 20), "tokens cached as one piece, a multiple of the block size"
    )
    save: bool = _setting(True, truth, "save what this engine computes")
    save_decode: bool = _setting(True, truth, "also save generated tokens, for a conversation's next turn")
    tenant: str = _setting("", text, "who shares with whom: caches of different tenants never meet")
    copy_threads: int = _setting(1, whole_number(1, 64), "threads that copy between the engine and the node's memory")
    min_load_tokens: int = _setting(0, whole_number(0, 1 << 30), "hits shorter than this are computed, not loaded")
    lossy: Literal["none", "int8"] = _setting(
        "none", one_of("none", "int8"), "codec of lower tiers that may change this engine's KV: none or int8"
    )
    fingerprint: str = _setting("", text, "identity of the model's weights; empty = from the model's files")
    connect_s: float = _setting(1.0, parse_duration, "how long connecting to the node may take")
    metadata_s: float = _setting(1.0, parse_duration, "how long a call without bytes may take")
    load_s: float = _setting(5.0, parse_duration, "how long all loads of one request may take")

    def __post_init__(self) -> None:
        _check("engine", self)
        if self.node and (self.disk or self.remotes or self.keys):
            raise ConfigError(
                f"engine.node = {self.node!r} with engine.disk, engine.remotes or engine.keys: these are for the node "
                "inside the engine; give them to that node as --disk, --remote and --keys"
            )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is logged."""

    level: str = _setting("info", one_of("debug", "info", "warning", "error"), "debug, info, warning or error")

    def __post_init__(self) -> None:
        _check("log", self)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree."""

    node: NodeConfig = field(default_factory=NodeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class Effective:
    """The values in use; `origin["node.host_memory"]` is `default`, `file PATH`, `env NAME` or `flag`."""

    config: Config
    origin: dict[str, str]

    def value(self, name: str) -> object:
        """The value of a setting by its dotted name."""
        section, _, key = name.partition(".")
        found: object = getattr(getattr(self.config, section), key)
        return found


Section = NodeConfig | EngineConfig | LogConfig
SECTIONS: dict[str, type[Section]] = {"node": NodeConfig, "engine": EngineConfig, "log": LogConfig}
SETTINGS: dict[str, Field[Any]] = {
    f"{name}.{it.name}": it for name, section in SECTIONS.items() for it in fields(section)
}
"""Every setting by its dotted name; `metadata["help"]` says what it is for."""


def variable(name: str) -> str:
    """The environment variable of a setting: HEADWATER_NODE_SOCKET for `node.socket`."""
    return PREFIX + name.replace(".", "_").upper()


def default_value(name: str) -> object:
    """What a setting is when nobody says anything."""
    it = SETTINGS[name]
    return it.default if it.default_factory is MISSING else it.default_factory()


def load_config(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    overrides_from: str = "flag",
) -> Effective:
    """The effective configuration and the origin of each value.

    `overrides` maps dotted names (`node.host_memory`) to values; None stands for "not given". `env` is read
    instead of the process's own environment. Raises ConfigError.
    """
    env = os.environ if env is None else env
    values: dict[str, object] = {"node.socket": default_socket(env)}
    origin = dict.fromkeys(SETTINGS, "default")

    def take(name: str, value: object, source: str) -> None:
        values[name], origin[name] = _parse(_known(name, source), value, source), source

    file = file or env.get(FILE_VARIABLE)
    if file:
        for name, value in _read_file(Path(file)).items():
            take(name, value, f"file {os.fspath(file)}")
    for name, value in _read_environment(env).items():
        take(name, value, f"env {variable(name)}")
    for name, value in (overrides or {}).items():
        if value is not None:
            take(name, value, overrides_from)

    def section(name: str) -> dict[str, Any]:
        mine = [it.name for it in fields(SECTIONS[name]) if f"{name}.{it.name}" in values]
        return {key: values[f"{name}.{key}"] for key in mine}

    config = Config(NodeConfig(**section("node")), EngineConfig(**section("engine")), LogConfig(**section("log")))
    return Effective(config, origin)


def engine_config(extra: Mapping[str, object], env: Mapping[str, str] | None = None) -> EngineConfig:
    """An engine's settings: its `kv_connector_extra_config` over environment and file. Raises ConfigError."""
    known = [it.name for it in fields(EngineConfig)]
    for name in extra:
        if name not in known:
            raise ConfigError(f"unknown key {name!r} ({EXTRA}); the nearest known key is {nearest(name, known)!r}")
    overrides = {f"engine.{name}": value for name, value in extra.items()}
    return load_config(env=env, overrides=overrides, overrides_from=EXTRA).config.engine


def embedded_node(config: EngineConfig, address: str) -> NodeConfig:
    """The settings of the node inside an engine, which listens at `address`."""
    return NodeConfig(
        socket=address,
        host_memory=config.host_memory,
        disk=config.disk,
        remotes=config.remotes,
        keys=config.keys,
        metrics="off",
    )


def public(name: str, value: object) -> object:
    """A setting's value, read or not, as it may be shown: without the passwords of URLs."""
    if SETTINGS[name].metadata["parse"] not in (remote_places, directory_place):
        return value
    if isinstance(value, str):
        return " ".join(_public_urls(value.split()))
    return _public_urls([str(it) for it in value]) if isinstance(value, list | tuple) else type(value).__name__


def _public_urls(urls: Sequence[str]) -> list[str]:
    """URLs without credentials. Where one cannot be read and has signs of any, they may be anywhere: then nothing is
    left of any of the URLs but the scheme."""
    try:
        return [str(parse_remote(it)) for it in urls]
    except ConfigError:
        if not re.search("[:@?]", "".join(it.partition("://")[2] or it for it in urls)):
            return list(urls)
        schemes = [it.partition("://") for it in urls]
        return [f"{scheme}://..." if found and scheme.isalnum() else "..." for scheme, found, _ in schemes]


def _read_file(path: Path) -> dict[str, object]:
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"configuration file {path}: {error}; check --config and {FILE_VARIABLE}") from error
    found: dict[str, object] = {}
    for name, table in tree.items():
        if name not in SECTIONS:
            near = nearest(name, SECTIONS)
            raise ConfigError(f"unknown section [{name}] (file {path}); the nearest known one is [{near}]")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} (file {path}): not a section; write [{name}] and keys below it")
        found |= {f"{name}.{key}": value for key, value in table.items()}
    return found


def _read_environment(env: Mapping[str, str]) -> dict[str, object]:
    names = {variable(name): name for name in SETTINGS}
    found: dict[str, object] = {}
    for name, value in sorted(env.items()):
        if name in names:
            found[names[name]] = value
        elif name.startswith(PREFIX) and name != FILE_VARIABLE and not _is_foreign(name):
            near = nearest(name, [*names, FILE_VARIABLE])
            raise ConfigError(f"unknown environment variable {name}; the nearest known one is {near}")
    return found


def _is_foreign(name: str) -> bool:
    return name.startswith(TEST_PREFIX) or _KUBERNETES.search(name) is not None


def _known(name: str, source: str) -> str:
    if name not in SETTINGS:
        raise ConfigError(f"unknown key {name} ({source}); the nearest known key is {nearest(name, SETTINGS)}")
    return name


def _parse(name: str, value: object, source: str) -> object:
    try:
        parsed: object = SETTINGS[name].metadata["parse"](value)
    except ConfigError as error:
        # A URL may have been given to a setting that takes none.
        raise ConfigError(f"{name} = {mask(repr(public(name, value)))} ({source}): {error}") from None
    return parsed


def _check(section: str, config: Section) -> None:
    """Read every value once more: a configuration built in code gets the same refusals and the same spelling."""
    for it in fields(config):
        parsed = _parse(f"{section}.{it.name}", getattr(config, it.name), "in code")
        object.__setattr__(config, it.name, parsed)
