"""AES-256-GCM around another codec: compressed first, then encrypted; nothing is stored for a tenant without a key.

    stored   what the other codec stores, encrypted: as long as it was
    key id   which of the tenant's keys (see `key_ring`)
    extra    nonce (12) · tag (16) · zero (36)

The tag also covers what the chunk is: root, layout, KV group, key, lengths, codec and key id. So bytes of another chunk
or tenant, or in another place, are not decrypted, whoever moved them; an older copy of the same chunk is, and equal.

Nonces are drawn at random from 2**96. Up to 2**32 chunks a key, two are equal with a chance below 2**-32 (NIST SP
800-38D, 8.3): 16 PiB at 4 MiB a chunk. Give a tenant that writes more a new key before.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from headwater.errors import ConfigError
from headwater.ports import Bytes
from headwater.tiers.codec import Codec
from headwater.tiers.header import EXTRA_BYTES, Encoded
from headwater.tiers.key_ring import Key, KeyRing
from headwater.tiers.scratch import Scratch
from headwater.types import Identity

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext

NONCE_BYTES, TAG_BYTES = 12, 16
_STEP_BYTES = 1 << 20
"""At once: so that a version of the library which keeps the GIL meanwhile does not keep it for long."""
_identity = struct.Struct("<18s32s16sI16sQQ16s16s")


class Aes:
    """See `Codec`."""

    in_place = False

    def __init__(self, inner: Codec, keys: KeyRing) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise ConfigError("codec aes needs cryptography; run: pip install 'headwater[codecs]'") from None
        self.name = f"{inner.name}+aes" if not inner.in_place else "aes"
        self.fixed = inner.fixed
        self.keys = keys
        self._inner, self._scratch = inner, Scratch()
        self._cipher, self._aes, self._gcm, self._wrong_tag = Cipher, algorithms.AES, modes.GCM, InvalidTag

    def stored_bytes(self, identity: Identity) -> int:
        """See `Codec`."""
        return self._inner.stored_bytes(identity)

    def encode(self, identity: Identity, payload: Bytes, target: Bytes) -> Encoded | None:
        """See `Codec`."""
        key = self.keys.to_write(identity.origin.namespace.tenant)
        if key is None:
            return None
        plain = payload
        if not self._inner.in_place:
            plain = self._scratch.take(self._inner.stored_bytes(identity))
            inner = self._inner.encode(identity, payload, plain)
            if inner is None:
                return None
            assert not inner.key_id and not inner.extra, f"{self._inner.name} says more than how long"
            plain = plain[: inner.stored_bytes]
        nonce = os.urandom(NONCE_BYTES)
        context = self._cipher(self._aes(key.secret), self._gcm(nonce)).encryptor()
        context.authenticate_additional_data(self._described(identity, len(plain), key))
        _update(context, plain, target)
        context.finalize()
        return Encoded(len(plain), self.name, key.id, nonce + context.tag)

    def decode(self, identity: Identity, encoded: Encoded, stored: Bytes, target: Bytes) -> bool:
        """See `Codec`."""
        key = self.keys.to_read(identity.origin.namespace.tenant, encoded.key_id)
        if encoded.codec != self.name or key is None or len(stored) > self.stored_bytes(identity):
            return False
        extra = encoded.extra.ljust(EXTRA_BYTES, b"\0")
        nonce, tag = extra[:NONCE_BYTES], extra[NONCE_BYTES : NONCE_BYTES + TAG_BYTES]
        if any(extra[NONCE_BYTES + TAG_BYTES :]) or (self._inner.in_place and len(stored) != len(target)):
            return False
        plain = target if self._inner.in_place else self._scratch.take(len(stored))
        context = self._cipher(self._aes(key.secret), self._gcm(nonce, tag)).decryptor()
        context.authenticate_additional_data(self._described(identity, len(stored), key))
        _update(context, stored, plain)
        try:
            context.finalize()
        except self._wrong_tag:
            return False
        if self._inner.in_place:
            return True
        return self._inner.decode(identity, Encoded(len(plain), self._inner.name), plain, target)

    def has_key(self, identity: Identity, key_id: str) -> bool:
        """See `Codec`."""
        return self.keys.to_read(identity.origin.namespace.tenant, key_id) is not None

    def _described(self, identity: Identity, stored_bytes: int, key: Key) -> bytes:
        """What the tag covers besides the bytes."""
        origin = identity.origin
        return _identity.pack(
            b"headwater.chunk.1:",
            origin.root,
            bytes.fromhex(origin.layout.fingerprint()),
            identity.group,
            identity.key,
            identity.length_bytes,
            stored_bytes,
            self.name.encode("ascii"),
            key.id.encode("ascii"),
        )


def _update(context: AEADEncryptionContext | AEADDecryptionContext, source: Bytes, target: Bytes) -> None:
    """Encrypt or decrypt without a copy in between."""
    for start in range(0, len(source), _STEP_BYTES):
        piece = source[start : start + _STEP_BYTES]
        context.update_into(piece.data, target[start : start + len(piece)].data)
