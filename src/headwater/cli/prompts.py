"""Which chunks a command is about: a namespace, a prompt's tokens or text, or keys themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headwater.cli.show import plain
from headwater.cli.tokenizing import load_tokenizer
from headwater.core.hashing import chunk_keys
from headwater.errors import ConfigError
from headwater.traces.fields import BadRecord
from headwater.types import KEY_BYTES, ChunkKey, Namespace

TOKENS_MAX = 4 << 20
NAME_DIGITS = 12
_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")
_TOKEN = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class Known:
    """A namespace that the node knows: its root, its record without the salt, the chunk size."""

    root: bytes
    record: Namespace
    chunk_tokens: int

    @classmethod
    def read(cls, state: dict[str, Any]) -> Known:
        """From the node's answer; fields that this version does not know are left out."""
        names = [it.name for it in fields(Namespace)]
        record = Namespace(**{name: str(it) for name, it in state["namespace"].items() if name in names})
        return cls(bytes.fromhex(state["root"]), record, state["chunk_tokens"])

    @property
    def name(self) -> str:
        """What `headwater status` calls it: those that differ only in who asks have the same name."""
        return replace(self.record, adapter="", tenant="", salt="").root().hex()[:NAME_DIGITS]

    def keys(self, tokens: Sequence[int], adapter: str = "", salt: str = "") -> list[ChunkKey]:
        """The keys of a prompt's whole chunks, as engines compute them for a request with this adapter and salt."""
        root = replace(self.record, adapter=adapter, salt=salt).root() if adapter or salt else self.root
        return chunk_keys(root, tokens, self.chunk_tokens)


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The options that name a prompt and where it was asked."""
    group = parser.add_argument_group("a prompt")
    group.add_argument("--tokens", metavar="IDS|@FILE", help="its token ids, 1,2,3 or a file with them")
    group.add_argument("--text", metavar="TEXT|@FILE", help="its text, read by the tokenizer of --model")
    group.add_argument("--model", metavar="PATH", help="the model's folder or name, for its tokenizer (not downloaded)")
    group.add_argument(
        "--chat", action="store_true", help="the text is a user's message: use the model's chat template"
    )
    group.add_argument("--salt", default="", metavar="TEXT", help="the cache_salt that the request had")
    group.add_argument(
        "--adapter", default="", metavar="ID", help="the content id of the LoRA adapter that the request had"
    )


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """`--namespace` and `--tenant`."""
    parser.add_argument("--namespace", metavar="HEX", help="only this one: the start of its name in `headwater status`")
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's; empty for engines without one")


def namespaces(arguments: argparse.Namespace, known: Sequence[Known]) -> list[Known]:
    """The namespaces that a command line names, all if it names none. Raises ConfigError if there is none such."""
    found = list(known)
    if arguments.namespace is not None:
        start = arguments.namespace.lower()
        found = [it for it in found if it.name.startswith(start) or it.root.hex().startswith(start)]
        if not start or len({it.name for it in found}) != 1:
            names = ", ".join(sorted({it.name for it in (found or known)})) or "none"
            what = "more than one namespace starts" if found else "no namespace starts"
            raise ConfigError(f"--namespace {plain(arguments.namespace)!r}: {what} so; known are {names}")
    if arguments.tenant is not None:
        tenants = ", ".join(sorted({repr(plain(it.record.tenant)) for it in found})) or "none"
        found = [it for it in found if it.record.tenant == arguments.tenant]
        if not found:
            raise ConfigError(f"--tenant {plain(arguments.tenant)!r}: no namespace of it here; tenants are {tenants}")
    return found


def prompt_tokens(arguments: argparse.Namespace) -> list[int] | None:
    """The prompt of a command line as token ids; None if it names none. Raises ConfigError."""
    if arguments.tokens is not None and arguments.text is not None:
        raise ConfigError("--tokens and --text: a prompt is the one or the other")
    if arguments.tokens is not None:
        return _token_ids(_content("--tokens", arguments.tokens))
    if arguments.text is None:
        return None
    if arguments.model is None:
        raise ConfigError("--text: the tokenizer is missing; name the model's folder with --model, or give --tokens")
    return _tokenize(arguments.model, _content("--text", arguments.text), chat=arguments.chat)


def read_keys(texts: Sequence[str]) -> list[ChunkKey]:
    """Chunk keys from hex, several with commas or spaces between. Raises ConfigError."""
    words = [word for text in texts for word in re.split(r"[,\s]+", text) if word]
    for word in words:
        if not _KEY.fullmatch(word):
            raise ConfigError(f"--key {plain(word[:80])!r}: not a key; write {2 * KEY_BYTES} hex digits")
    return [ChunkKey(key) for key in dict.fromkeys(map(bytes.fromhex, words))]


def _content(flag: str, value: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {value}: {error}") from error


def _token_ids(text: str) -> list[int]:
    words = re.split(r"[,\s]+", text.strip().removeprefix("[").removesuffix("]").strip())
    if words == [""] or len(words) > TOKENS_MAX:
        raise ConfigError(f"--tokens: {len(words) - (words == [''])} token ids; write 1 to {TOKENS_MAX}, as in 1,2,3")
    for word in words:
        if not _TOKEN.fullmatch(word) or int(word) >= 1 << 32:
            raise ConfigError(f"--tokens: {plain(word[:80])!r} is not a token id; write them as 1,2,3")
    return [int(word) for word in words]


def _tokenize(model: str, text: str, *, chat: bool) -> list[int]:
    tokenizer = load_tokenizer(model, "--model")
    if not chat:
        return list(tokenizer.text(text))
    try:
        return list(tokenizer.chat([{"role": "user", "content": text}], None))
    except BadRecord as error:
        raise ConfigError(f"--chat: {error.remedy}; leave --chat out") from None
