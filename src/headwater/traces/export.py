"""A production log becomes a trace that tells nobody what was said: hashes, lengths and relative times.

    block i of a prompt   digest_i = BLAKE2b(secret; digest_{i-1}, token ids of block i), then a number by first use
    a session, a tenant   BLAKE2b(secret; name)

The secret is drawn anew for each export and never leaves the process: from the numbers nothing can be tried out, and
two exports cannot be put side by side. Errors name a field and show no text that it holds.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater.errors import ConfigError
from headwater.traces.fields import TOKENS_MAX, BadRecord, moment, name, show, whole
from headwater.traces.model import TraceRequest
from headwater.traces.read import decode

SECRET_BYTES = 32
DIGEST_BYTES = 16
NAME_DIGITS = 12
EPOCH_S = (1e9, 1e10)
"""Seconds since 1970 from 2001 to 2286; a thousand times as much is milliseconds."""
FIELDS = {
    "timestamp": "timestamp",
    "prompt_token_ids": "prompt_token_ids",
    "prompt": "prompt",
    "messages": "messages",
    "tools": "tools",
    "hash_ids": "hash_ids",
    "input_length": "input_length",
    "completion_tokens": "usage.completion_tokens",
    "output_length": "output_length",
    "completion": "completion",
    "session": "session",
    "user": "user",
    "tenant": "tenant",
    "priority": "priority",
}
"""What is looked for, and where in a record: names with dots between lead into objects and lists."""
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """How text becomes token ids; `chat` takes messages and the tools offered with them, and raises BadRecord."""

    text: Callable[[str], Sequence[int]]
    chat: Callable[[Messages, Messages | None], Sequence[int]]


@dataclass(slots=True)
class Exporter:
    """Makes requests from records of one log."""

    block_tokens: int
    tokenizer: Tokenizer | None = None
    time_unit: str | None = None
    """"s" or "ms" of numbers; without it they are times since 1970."""
    paths: Mapping[str, str] = field(default_factory=lambda: FIELDS)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    _numbers: dict[bytes, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= TOKENS_MAX:
            raise ConfigError(f"--block-tokens {self.block_tokens}: write 16, or 512 for a smaller file")

    def take(self, line: str) -> TraceRequest:
        """The request of one line of the log; `arrival_s` is as the log says it. Raises BadRecord."""
        try:
            return self._request(decode(line))
        except BadRecord as error:  # that it is not JSON is said by position, so no remedy quotes the line
            value = error.value if isinstance(error.value, int | float | None) else "..."
            raise BadRecord(error.field, value, error.remedy) from None

    def _request(self, record: Mapping[str, Any]) -> TraceRequest:
        found = {it: value for it, path in self.paths.items() if (value := _at(record, path)) is not None}
        tokens, blocks = self._prompt(found)
        return TraceRequest(
            arrival_s=self._moment(found),
            input_tokens=tokens,
            output_tokens=self._output(found),
            blocks=blocks,
            session=self._hidden("session", found),
            tenant=self._hidden("tenant", found) or self._hidden("user", found),
            priority=whole(found, "priority", -TOKENS_MAX, TOKENS_MAX, default=0),
        )

    def _moment(self, found: Mapping[str, Any]) -> float:
        value = found.get("timestamp")
        if isinstance(value, str):
            return moment(value, "timestamp")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < EPOCH_S[1] * 1000:
            raise BadRecord("timestamp", value, "write seconds, milliseconds or an ISO 8601 time")
        if self.time_unit is not None:
            return value / 1000 if self.time_unit == "ms" else float(value)
        if EPOCH_S[0] <= value < EPOCH_S[1]:
            return float(value)
        if EPOCH_S[0] * 1000 <= value:
            return value / 1000
        raise BadRecord("timestamp", value, "no time since 1970; say what the numbers are with --time-unit s or ms")

    def _prompt(self, found: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
        """Tokens and blocks, from the first of token ids, hashes, messages and text that the record has."""
        if "prompt_token_ids" in found:
            ids = found["prompt_token_ids"]
        elif "hash_ids" in found:
            return self._hashed(found)
        elif isinstance(found.get("prompt"), list):
            ids = found["prompt"]
        elif self.tokenizer is not None and "messages" in found:
            ids = self.tokenizer.chat(_messages("messages", found["messages"]), _tools(found))
        elif self.tokenizer is not None and "prompt" in found:
            ids = self.tokenizer.text(_text(found, "prompt"))
        elif "messages" in found or "prompt" in found:
            raise BadRecord("prompt", "...", "it is text; name the model's tokenizer with --tokenizer DIRECTORY")
        else:
            places = ", ".join(self.paths[it] for it in ("prompt_token_ids", "hash_ids", "messages", "prompt"))
            raise BadRecord("prompt", None, f"none of {places} is there; say where it is with --field prompt=PATH")
        encoded = _token_ids("prompt_token_ids", ids)
        return len(encoded), self._blocks(encoded)

    def _blocks(self, ids: np.ndarray[Any, np.dtype[np.uint32]]) -> tuple[int, ...]:
        blocks, before = [], b""
        for start in range(0, len(ids), self.block_tokens):
            content = ids[start : start + self.block_tokens].tobytes()
            before = hashlib.blake2b(before + content, digest_size=DIGEST_BYTES, key=self._secret).digest()
            blocks.append(self._number(before))
        return tuple(blocks)

    def _hashed(self, found: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
        """Blocks that the log has as hashes of a whole prefix each, of all started blocks or of the full ones."""
        tokens = whole(found, "input_length", 1, TOKENS_MAX)
        hashes = found["hash_ids"]
        if not isinstance(hashes, list) or not all(isinstance(it, int | str) for it in hashes):
            raise BadRecord("hash_ids", "...", "write a list of numbers or texts, one for each block")
        started, full = -(-tokens // self.block_tokens), tokens // self.block_tokens
        if len(hashes) not in (started, full):
            raise BadRecord(
                "hash_ids",
                "...",
                f"{len(hashes)} for {tokens} tokens, which are {started} blocks of {self.block_tokens}; say their size "
                "with --block-tokens",
            )
        numbers = [self._number(self._digest(f"{type(it).__name__}:{it}")) for it in hashes]
        if len(numbers) < started:  # nobody hashed the partial block, so nothing is known to share it
            numbers.append(self._number(secrets.token_bytes(DIGEST_BYTES)))
        return tokens, tuple(numbers)

    def _output(self, found: Mapping[str, Any]) -> int:
        for key in ("completion_tokens", "output_length"):
            if key in found:
                return whole(found, key, 0, TOKENS_MAX)
        completion = found.get("completion")
        if isinstance(completion, list):
            return len(_token_ids("completion", completion, least=0))
        if isinstance(completion, str) and self.tokenizer is not None:
            return len(self.tokenizer.text(completion))
        places = f"{self.paths['completion_tokens']}, {self.paths['output_length']}"
        raise BadRecord("output", None, f"the answer's length is missing; one of {places}, or completion, is needed")

    def _hidden(self, key: str, found: Mapping[str, Any]) -> str:
        said = name(found, key)
        return self._digest(f"{key}:{said}").hex()[:NAME_DIGITS] if said else ""

    def _digest(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES, key=self._secret).digest()

    def _number(self, digest: bytes) -> int:
        return self._numbers.setdefault(digest, len(self._numbers))


def read_paths(texts: Sequence[str]) -> dict[str, str]:
    """Where fields are, from `NAME=PATH`; the others are where they are by default. Raises ConfigError."""
    paths = dict(FIELDS)
    for text in texts:
        key, _, path = text.partition("=")
        if key not in FIELDS or not path:
            raise ConfigError(
                f"--field {show(text)}: write NAME=PATH, as in prompt=request.prompt; names are {', '.join(FIELDS)}"
            )
        paths[key] = path
    return paths


def _at(record: object, path: str) -> object:
    """What is at `a.b.0.c` of nested objects and lists; None if nothing is."""
    found = record
    for step in path.split("."):
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def _token_ids(key: str, ids: object, least: int = 1) -> np.ndarray[Any, np.dtype[np.uint32]]:
    remedy = "write a list of at least one token id, each a whole number of 32 bits"
    if not isinstance(ids, list | tuple) or not least <= len(ids) <= TOKENS_MAX:
        raise BadRecord(key, "...", remedy)
    if not all(type(it) is int and 0 <= it < 1 << 32 for it in ids):
        raise BadRecord(key, "...", remedy)
    return np.asarray(ids, dtype="<u4")


def _text(found: Mapping[str, Any], key: str) -> str:
    if not isinstance(found[key], str) or not found[key]:
        raise BadRecord(key, "...", "write text, or a list of token ids")
    return str(found[key])


def _messages(key: str, value: object) -> Messages:
    """The messages of a chat, with contents of several texts as one."""
    if not isinstance(value, list) or not value or not all(isinstance(it, dict) and "role" in it for it in value):
        raise BadRecord(key, "...", "write a list of objects with role and content")
    return [{**it, "content": _content(it["content"])} if "content" in it else it for it in value]


def _tools(found: Mapping[str, Any]) -> Messages | None:
    tools = found.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(it, dict) for it in tools)):
        raise BadRecord("tools", "...", "write a list of objects, or leave it out")
    return tools or None


def _content(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [None]
    texts = [it.get("text") if isinstance(it, dict) and it.get("type") == "text" else None for it in parts]
    if not all(isinstance(it, str) for it in texts):
        raise BadRecord("messages", "...", "a content is text or a list of text parts; skip others with --skip-bad")
    return "".join(map(str, texts))
