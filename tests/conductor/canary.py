"""Words that must not be seen anywhere but where they belong: keys, salts, words of prompts.

canary = Canary()
... a request with canary.key, canary.salt, canary.words ...
canary.sees(caplog.text, "the log")
canary.sees_none({"metrics": text, "fleet": body, "command lines": command_lines()})
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

WORDS = 3


class Canary:
    """Secrets of one test, and a look for them in whatever came out."""

    def __init__(self) -> None:
        self.key = "sk-hw-" + secrets.token_urlsafe(32)
        self.salt = "salt-" + secrets.token_hex(12)
        self.engine_key = "ek-hw-" + secrets.token_urlsafe(32)
        self.secret = "secret-" + secrets.token_hex(16)
        self.words = " ".join("word" + secrets.token_hex(8) for _ in range(WORDS))
        self.ids = [100_000 + secrets.randbelow(10**9) for _ in range(WORDS)]

    def __repr__(self) -> str:
        return "Canary()"

    def marks(self) -> dict[str, str]:
        """Everything to look for, and what it is: as it is, and as programs would write it."""
        found: dict[str, str] = {}
        plain = {"the key": self.key, "the salt": self.salt, "the secret": self.secret}
        plain["an engine's key"] = self.engine_key
        plain |= {f"word {place} of the prompt": word for place, word in enumerate(self.words.split())}
        for what, text in plain.items():
            found[text] = what
            found[text[6:]] = f"{what} without its beginning"
            found[base64.b64encode(text.encode()).decode().rstrip("=")] = f"{what} in base 64"
            found[text.encode().hex()] = f"{what} in hex"
            found[quote(text, safe="")] = f"{what} in a URL"
            found[json.dumps(text)[1:-1]] = f"{what} in JSON"
        found[hashlib.sha256(self.key.encode()).hexdigest()] = "the key's digest"
        found |= {str(token): f"token id {place}" for place, token in enumerate(self.ids)}
        return found

    def sees(self, text: str | bytes, where: str) -> None:
        """Fail if anything of it is in a text; the message says what, and repeats none of it."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        lower = text.lower()
        seen = sorted({what for mark, what in self.marks().items() if mark.lower() in lower})
        assert not seen, f"{where} has {', '.join(seen)}"

    def sees_none(self, texts: Mapping[str, str | bytes | object]) -> None:
        """The same for several; what is no text is looked through as JSON and as repr."""
        for where, it in texts.items():
            if isinstance(it, str | bytes):
                self.sees(it, where)
            else:
                self.sees(json.dumps(it, default=repr), where)
                self.sees(repr(it), where)


def command_lines() -> str:
    """The command lines and environments of all processes of this user."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            for name in ("cmdline", "environ"):
                try:
                    found.append((path / name).read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:  # it ended meanwhile, or is somebody else's
                    continue
    return "\n".join(found)
