"""headwater: one KV cache for all the LLM serving engines of a host."""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from headwater.client import Client

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


def __getattr__(name: str) -> object:
    # The client brings numpy; whoever imports the core or the command line does not pay for it.
    if name == "Client":
        return import_module("headwater.client").Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
