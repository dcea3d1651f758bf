"""What callers call their objects, and the keys that headwater has for these names."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.errors import RefusedError
from headwater.node.messages import KEYS_MAX
from headwater.node.object_format import KEY_BYTES_MAX, object_key
from headwater.types import ChunkKey

Name = bytes | str
REMEMBERED_MAX = 1 << 16


class Names(dict[Name, ChunkKey]):
    """The keys of names, computed once while they are in use: a digest costs ten times as much as looking here."""

    def __init__(self, root: bytes) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: Name) -> ChunkKey:
        if isinstance(name, str):
            data = name.encode("utf-8", "surrogatepass")
        elif isinstance(name, bytes):
            data = name
        else:
            raise RefusedError("key", "bytes or str", type(name).__name__, "encode it")
        if len(data) > KEY_BYTES_MAX:
            raise RefusedError("key", f"at most {KEY_BYTES_MAX} bytes", f"{len(data)} bytes", "use a digest of it")
        if len(self) >= REMEMBERED_MAX:
            self.clear()
        key = self[name] = object_key(self._root, data)
        return key

    def keys_of(self, names: Sequence[Name]) -> list[ChunkKey]:
        """The keys of many names; raises RefusedError for what cannot be a name."""
        if isinstance(names, (str, bytes)):
            raise RefusedError("keys", "a list of keys", f"one {type(names).__name__}", "put it into a list")
        if len(names) > KEYS_MAX:
            raise RefusedError("keys", f"at most {KEYS_MAX} in one call", f"{len(names)}", "split the batch")
        try:
            return list(map(self.__getitem__, names))
        except TypeError as error:
            raise RefusedError("key", "bytes or str", f"{error}", "encode it") from error
