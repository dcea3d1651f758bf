"""A toy model and two toy tokenizers: the next token is a function of all ids before it, so that whoever goes on from a
prompt and k of the answer's ids says exactly what the first would have said.

Incremental decoding, stop strings and what is held back for them are as in vLLM's detokenizer, its traps included: an
incomplete character gives ids without text, and a prompt that ends within a character makes the whole prompt come out
as text.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END = 256, 257, 258, 259, 260, 261, 262
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
LETTERS = ("a", "e", "n", "t", " ", "é", "ß", "中", "文", "🦩", "🙂", '"', "\\", "\n", "]", "{")
ALPHABET = [it.encode() for it in LETTERS]
FIRST_WORD, WORDS = 1000, 30_000


class Toy(Protocol):
    """A tokenizer with the model that goes with it."""

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """What one id stands for; nothing for a special one."""

    def next(self, crc: int, ids: Sequence[int]) -> list[int]:
        """The ids that follow: at least one, more where they belong together. `crc` is that of all `ids`."""


class Words:
    """One id a word."""

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def token_bytes(self, token: int) -> bytes:
        return b" w%d" % token if token >= FIRST_WORD else b""

    def next(self, crc: int, ids: Sequence[int]) -> list[int]:
        return [FIRST_WORD + crc % WORDS]

    @staticmethod
    def _id(word: str) -> int:
        if word[:1] == "w" and word[1:].isdigit() and FIRST_WORD <= int(word[1:]) < FIRST_WORD + WORDS:
            return int(word[1:])
        return FIRST_WORD + zlib.crc32(word.encode()) % WORDS


class Bytes:
    """One id a byte, so that most of the alphabet's characters take several ids."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def next(self, crc: int, ids: Sequence[int]) -> list[int]:
        begun = _begun(ids)
        if begun:
            crc = checksum(ids[: len(ids) - len(begun)])
        letter = ALPHABET[(crc >> 3) % len(ALPHABET)]
        if not letter.startswith(begun):
            letter = begun + b"."
        return list(letter[len(begun) :])


def checksum(ids: Sequence[int], crc: int = 0) -> int:
    """Of all ids, or of those that follow what `crc` is of."""
    return zlib.crc32(array("I", ids).tobytes(), crc)


def chat_ids(toy: Toy, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
    """The toy's chat template."""
    ids = [BOS]
    for tool in tools:
        ids += [TOOL, *toy.encode(str(tool["function"]["name"])), END]
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        ids += [ROLES[message["role"]], *toy.encode(content), END]
    return [*ids, ASSISTANT]


class Writer:
    """One answer being written: ids, and the text that an engine would stream with each."""

    def __init__(self, toy: Toy, prompt: Sequence[int], stop: Sequence[str], fields: dict[str, Any], mix: int) -> None:
        self.toy, self.stop = toy, stop
        self.minimum = fields.get("min_tokens") or 0
        self.including = bool(fields.get("include_stop_str_in_output"))
        self.held = max((len(it) for it in stop), default=1) - 1 if stop and not self.including else 0
        self._ids = list(prompt)
        self._crc = checksum(self._ids)
        self._mix = mix
        self._ahead: list[int] = []
        self._raw = b"".join(map(toy.token_bytes, prompt))
        self._said = 0 if _is_cut(self._raw) else len(self._raw)
        self.text, self._shown, self.count = "", 0, 0

    def next(self) -> int:
        """The next id."""
        if not self._ahead:
            self._ahead = self.toy.next(self._crc ^ self._mix, self._ids)
        token = self._ahead.pop(0)
        self._ids.append(token)
        self._crc = checksum((token,), self._crc)
        self._raw += self.toy.token_bytes(token)
        self.count += 1
        before = len(self.text)
        if not _is_cut(self._raw):
            self.text += self._raw[self._said :].decode(errors="replace")
            self._raw, self._said = b"", 0
        self._new = len(self.text) - before
        return token

    def stopped(self) -> str | None:
        """The stop string that the last id completed; cuts the text."""
        if self.count <= self.minimum:
            return None
        best: tuple[int, int, str] | None = None
        for word in self.stop:
            at = self.text.find(word, max(len(self.text) - self._new - len(word) + 1, 0)) if self._new else -1
            if at >= 0 and (best is None or at + len(word) < best[0]):
                best = (at + len(word), at, word)
        if best is None:
            return None
        self.text = self.text[: best[0] if self.including else best[1]]
        return best[2]

    def delta(self, *, finished: bool) -> str:
        """The text that can be shown now and was not shown before."""
        until = len(self.text) - (0 if finished else self.held)
        if until <= self._shown:
            return ""
        text, self._shown = self.text[self._shown : until], until
        if self._shown > 4096:
            # Only the last of it can still be a part of a stop string.
            self.text, self._shown = self.text[self._shown - 256 :], 256
        return text


def _begun(ids: Sequence[int]) -> bytes:
    """The bytes of a character at the end that is not complete."""
    for back in range(1, min(4, len(ids) + 1)):
        if ids[-back] >= 256:
            return b""
        if ids[-back] & 0xC0 != 0x80:
            raw = bytes(ids[-back:])
            return raw if _is_cut(raw) else b""
    return b""


def _is_cut(raw: bytes) -> bool:
    return raw[-4:].decode(errors="replace").endswith("\ufffd")
