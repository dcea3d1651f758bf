"""A file of keys as an operator would write it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path


class Keys:
    """Writes the file; the secret of an id stays the same until it is forgotten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forgotten: dict[str, int] = {}

    def secret(self, key_id: str) -> str:
        text = f"{key_id}/{self._forgotten.get(key_id, 0)}"
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")

    def forget(self, key_id: str) -> None:
        self._forgotten[key_id] = self._forgotten.get(key_id, 0) + 1

    def write(self, *keys: tuple[str, str]) -> None:
        """One (id, tenant) a key, the newest first."""
        text = "".join(
            f'[[key]]\nid = "{key_id}"\ntenant = "{tenant}"\nsecret = "{self.secret(key_id)}"\n'
            for key_id, tenant in keys
        )
        self.text(text)

    def text(self, text: str) -> None:
        self.path.touch(0o600)
        self.path.write_text(text, "utf-8")
