"""What a thread does with a request: render it, and tokenise it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headwater.conductor.job import Kind, Parsed
from headwater.conductor.tokens.content import Unrendered
from headwater.conductor.tokens.sandbox import OverBudget
from headwater.conductor.tokens.tokenizers import LocalTokenizer, truncate


class Found(NamedTuple):
    """A prompt's ids, or in a word why there are none. `keep`: they are the same when asked for again."""

    ids: array[int] | None
    reason: str = ""
    keep: bool = True


def find_ids(tokenizer: LocalTokenizer, parsed: Parsed, size: int) -> Found:
    """The ids of a chat or of a single text, of at most `size` characters."""
    fields, keep = parsed.fields, True
    text = parsed.text
    if parsed.kind is Kind.CHAT:
        template = tokenizer.template(tools=fields.get("tools") is not None)
        if template is None:
            return Found(None, "template")
        keep = not template.timed
        try:
            text = template.render(fields, size)
        except (Unrendered, OverBudget):
            return Found(None, "template")
    if text is None:
        return Found(None, "prompts")
    if len(text) > size:
        return Found(None, "long")
    special = adds_special(parsed)
    whole = tokenizer.ids(text, special=special)
    ids = tokenizer.truncated(whole, fields, special=special)
    if ids is None:
        return Found(None, "truncate")
    return Found(ids if isinstance(ids, array) else array("I", ids), keep=keep)


def adds_special(parsed: Parsed) -> bool:
    """Whether the tokenizer adds its special tokens: to completions if not told otherwise, to chats if told so."""
    given = parsed.fields.get("add_special_tokens")
    return parsed.kind is Kind.COMPLETION if given is None else bool(given)


def cut_given(ids: Sequence[int], fields: Mapping[str, Any]) -> Sequence[int] | None:
    """Ids that a client gave, cut as it wants them."""
    return truncate(ids, fields.get("truncate_prompt_tokens"), fields.get("truncation_side"), whole=True)
