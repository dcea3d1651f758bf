"""headwater: one KV cache for all the LLM serving engines of a host."""

from headwater.client import Client
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    ProtocolError,
    RefusedError,
    ResourceError,
    UnavailableError,
)
from headwater.types import ChunkKey, HitRule, KVGroup, KVLayout, Media, Namespace, Tier
from headwater.version import VERSION as __version__

__all__ = [
    "ChunkKey",
    "Client",
    "ConfigError",
    "HeadwaterError",
    "HitRule",
    "KVGroup",
    "KVLayout",
    "Media",
    "Namespace",
    "ProtocolError",
    "RefusedError",
    "ResourceError",
    "Tier",
    "UnavailableError",
    "__version__",
]
