"""Opens the directory that a URL names."""

from __future__ import annotations

import re

from headwater.directory.memory import MemoryDirectory
from headwater.directory.redis import RedisDirectory
from headwater.errors import ConfigError
from headwater.places import REDIS_SCHEMES, RemoteSpec, parse_remote
from headwater.tiers.remote import endpoint_of

CONNECTIONS = 4
MEMORY = ("", "memory")
_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_UNUSED = ("codec", "admission", "ttl_s", "capacity_bytes", "cluster")
"""What a URL may say of a tier and not of a directory."""


def open_directory(
    url: str, cluster: str = "default", connections: int = CONNECTIONS
) -> MemoryDirectory | RedisDirectory:
    """The directory of a URL like those of REMOTE tiers, redis:// and its kin; without one, or with `memory`, one of
    this process. It connects when it is first used. Raises ConfigError, whose text has no credentials in it."""
    if url.strip() in MEMORY:
        return MemoryDirectory()
    if not _CLUSTER.fullmatch(cluster):
        raise ConfigError(f"cluster {cluster!r}: not a name of up to 64 letters, digits, dots, dashes and underscores")
    spec = parse_remote(url)
    if not spec.is_redis:
        raise ConfigError(f"{spec.name}: a directory is kept by one of {', '.join(REDIS_SCHEMES)}, or memory")
    plain = RemoteSpec(spec.scheme, spec.name)
    odd = [it.removesuffix("_s").removesuffix("_bytes") for it in _UNUSED if getattr(spec, it) != getattr(plain, it)]
    if odd:
        raise ConfigError(f"{spec.name}: the URL of a directory has no option {odd[0]!r}")
    return RedisDirectory(endpoint_of(spec), cluster, connections)
