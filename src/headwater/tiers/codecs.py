"""Which codecs there are, by the names that the configuration uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.errors import ConfigError
from headwater.tiers.aes import Aes
from headwater.tiers.codec import Codec, Plain
from headwater.tiers.int8 import Int8
from headwater.tiers.key_ring import KeyRing
from headwater.tiers.zstd import Zstd
from headwater.values import nearest

_PLAIN: dict[str, Callable[[], Codec]] = {"none": Plain, "zstd": Zstd, "int8": Int8}
_ENCRYPTED: dict[str, Callable[[], Codec]] = {"aes": Plain, "zstd+aes": Zstd, "int8+aes": Int8}
NAMES = (*_PLAIN, *_ENCRYPTED)


def make_codec(name: str, keys: Path | None) -> Codec:
    """The codec called `name`; `keys` is the file of those that encrypt.

    Raises ConfigError for an unknown name, a missing package, and keys that are missing, unusable or not needed.
    """
    if name in _PLAIN:
        return _PLAIN[name]()
    if name not in _ENCRYPTED:
        raise ConfigError(f"codec={name}: unknown; is {nearest(name, NAMES)} meant? There are {', '.join(NAMES)}")
    if keys is None:
        raise ConfigError(f"codec={name} encrypts and needs keys: set node.keys to a file of them")
    return Aes(_ENCRYPTED[name](), KeyRing.load(keys))
