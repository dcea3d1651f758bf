"""How a payload is changed on its way into a lower tier, and back."""

from __future__ import annotations

from typing import Protocol

from headwater.ports import Bytes
from headwater.tiers.header import Encoded
from headwater.types import Identity, Outcome


class Codec(Protocol):
    """One way to store payloads. Thread-safe; no state but keys.

    `fixed` says whether `stored_bytes` is what `encode` always produces, not only the most: what has slots of fixed
    size needs that. `in_place` says that stored bytes are the payload itself, so that no buffer is needed.

    Whatever becomes of a chunk, `encode` says its own `name`, and `decode` takes no other: bytes that another codec
    wrote, above all encrypted ones, are never taken for a payload. Who goes without `decode` looks at the name himself.
    """

    name: str
    fixed: bool
    in_place: bool

    def stored_bytes(self, identity: Identity) -> int:
        """The most bytes that `encode` can produce for this chunk."""

    def encode(self, identity: Identity, payload: Bytes, target: Bytes) -> Encoded | None:
        """Write the stored form to the start of `target`; None if this chunk cannot be encoded (no key for it)."""

    def decode(self, identity: Identity, encoded: Encoded, stored: Bytes, target: Bytes) -> bool:
        """Bring the payload back into `target`; False if it cannot be what was written, or its key is gone.

        After False the content of `target` is undefined.
        """

    def has_key(self, identity: Identity, key_id: str) -> bool:
        """Whether this chunk's key of that name is (still) there; true where no key is needed."""


def bring_back(codec: Codec, identity: Identity, encoded: Encoded, stored: Bytes, target: Bytes) -> Outcome:
    """Decode stored bytes whose checksum is right: DONE, REFUSED where the key is gone, CORRUPT where they cannot be
    what this codec wrote."""
    if codec.decode(identity, encoded, stored, target):
        return Outcome.DONE
    return Outcome.CORRUPT if codec.has_key(identity, encoded.key_id) else Outcome.REFUSED


class Plain:
    """The payload as it is."""

    name, fixed, in_place = "none", True, True

    def stored_bytes(self, identity: Identity) -> int:
        """See `Codec`."""
        return identity.length_bytes

    def encode(self, identity: Identity, payload: Bytes, target: Bytes) -> Encoded | None:
        """See `Codec`."""
        target[: len(payload)] = payload
        return Encoded(len(payload))

    def decode(self, identity: Identity, encoded: Encoded, stored: Bytes, target: Bytes) -> bool:
        """See `Codec`."""
        if encoded.codec != self.name or len(stored) != len(target):
            return False
        target[:] = stored
        return True

    def has_key(self, identity: Identity, key_id: str) -> bool:
        """See `Codec`."""
        return True
