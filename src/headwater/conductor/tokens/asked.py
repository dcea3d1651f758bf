"""Asking an engine for a prompt's ids: the body of vLLM's POST /tokenize, and its answer."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from headwater.conductor.job import Kind, Parsed

PATH = "/tokenize"

PASSED = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "tools")
OWN = ("reasoning_effort", "documents")
"""What chats have and /tokenize has not, but takes as variables of the template."""


class _Answer(msgspec.Struct):
    tokens: list[int]


def question(parsed: Parsed, model: str | None = None) -> bytes:
    """The body that asks for this prompt's ids; `model` as the engine calls it. Only for a chat or a single text."""
    fields = parsed.fields
    asked: dict[str, Any] = {"model": model or parsed.model}
    asked |= {name: fields[name] for name in PASSED if fields.get(name) is not None}
    if parsed.kind is Kind.COMPLETION:
        asked.pop("tools", None)
        return msgspec.json.encode({**asked, "prompt": parsed.text})
    variables = dict(fields.get("chat_template_kwargs") or {})
    variables |= {name: fields[name] for name in OWN if fields.get(name) is not None}
    effort = fields.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
    asked["messages"] = [with_reasoning(message) for message in fields["messages"]]
    if variables:
        asked["chat_template_kwargs"] = variables
    return msgspec.json.encode(asked)


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the older name of what the model thought replaced, which /tokenize does not do itself."""
    if message.get("reasoning_content") is None or message.get("reasoning") is not None:
        return message
    return {**message, "reasoning": message["reasoning_content"]}


def answer(body: bytes) -> array[int] | None:
    """The ids in an answer; None if it is no answer."""
    try:
        return array("I", msgspec.json.decode(body, type=_Answer).tokens)
    except (msgspec.MsgspecError, OverflowError):
        return None
