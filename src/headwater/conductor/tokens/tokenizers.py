"""A model's tokenizer and chat templates, from the files in its folder, as transformers sets them up for vLLM.

Nothing is downloaded, and no code of a model's is run. Some of transformers' classes change what tokenizer.json says in
ways of their own; those are found by the comparison with the engine (`service.verify`), not imitated.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from headwater.conductor.tokens.templates import Template

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that templates are given."""

OWN_RENDERING = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3", "inkling"})
"""Model types whose chats vLLM renders by code of its own, whatever their template says."""

FILE_BYTES = 256 << 20


class NoTokenizer(Exception):
    """A model's folder has no tokenizer that can be used here."""


class LocalTokenizer:
    """Text to ids, and chats to text."""

    def __init__(self, folder: Path) -> None:
        """Raises NoTokenizer, or what `tokenizers` raises for a file that it cannot read."""
        config = read_json(folder / "tokenizer_config.json") or {}
        special = special_tokens(folder, config)
        self._tokenizer = open_tokenizer(folder / "tokenizer.json", config, special)
        self._adds = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        model = read_json(folder / "config.json") or {}
        sources = {} if model.get("model_type") in OWN_RENDERING else template_sources(folder, config)
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = Template(source, special)
            except TemplateError:
                continue  # as if it were not there: chats go without ids, and are counted

    def template(self, *, tools: bool) -> Template | None:
        """The template for a chat with or without tools."""
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default")

    def ids(self, text: str, *, special: bool) -> array[int]:
        """A text's ids; `special` adds what the model wants in front and behind. Gives the lock of Python free."""
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        return array("I", encoding.ids)

    def truncated(self, ids: Sequence[int], fields: Mapping[str, Any], *, special: bool) -> Sequence[int] | None:
        """A prompt cut to `truncate_prompt_tokens` as vLLM cuts it; None where that depends on what only it knows."""
        most = fields.get("truncate_prompt_tokens")
        return truncate(ids, most, fields.get("truncation_side"), whole=not (special and self._adds))


def truncate(ids: Sequence[int], most: Any, side: Any, *, whole: bool) -> Sequence[int] | None:
    """The last `most` ids, or the first where `side` says so.

    `whole`: there are no special tokens, which would be kept and not cut. None if it cannot be told here.
    """
    if most is None:
        return ids
    if type(most) is not int or most < 0 or side not in (None, "left", "right"):
        return None  # -1 means the engine's own limit
    if most >= len(ids):
        return ids
    if side is None and not whole:
        return None
    return ids[:most] if side == "right" else ids[len(ids) - most :]


def read_json(path: Path) -> dict[str, Any] | None:
    """An object from a file; None if there is none. Raises NoTokenizer if there is something else."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise NoTokenizer(f"{path.name} is too large")
        fields = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise NoTokenizer(f"{path.name} cannot be read") from error
    if not isinstance(fields, dict):
        raise NoTokenizer(f"{path.name} is not an object")
    return fields


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens' texts."""
    given = dict(config)
    if "added_tokens_decoder" not in config:
        given |= read_json(folder / "special_tokens_map.json") or {}
    found = {}
    for name in NAMED:
        token = given.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def open_tokenizer(path: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    """The tokenizer without truncation and padding, and with all special tokens that the configuration names.

    The configuration's add_bos_token and add_eos_token count for nothing beside a tokenizer.json, as in transformers 5.
    """
    if not path.is_file():
        raise NoTokenizer(f"there is no {path.name}")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added = config.get("added_tokens_decoder") or {}
    missing = [token for _, token in sorted(added.items(), key=lambda it: int(it[0])) if token["content"] not in known]
    tokenizer.add_tokens([AddedToken(**token) for token in missing])
    known.update(token["content"] for token in missing)
    tokenizer.add_special_tokens([text for text in dict.fromkeys(special.values()) if text not in known])
    return tokenizer


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by name: `default`, and perhaps `tool_use`. Files win over the configuration."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {}
    for name, path in files.items():
        try:
            found[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise NoTokenizer(f"{path.name} cannot be read") from error
    given = config.get("chat_template")
    if found or given is None:
        return found
    if isinstance(given, str):
        return {"default": given}
    return {row["name"]: row["template"] for row in given}
