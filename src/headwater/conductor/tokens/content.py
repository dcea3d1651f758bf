"""A chat request's messages and tools in the form in which vLLM hands them to a chat template.

Every difference would give other token ids. So this follows vLLM 0.32 step by step: the order of keys is that of its
models, absent descriptions of tools become null, parts of text are joined by newlines or kept, depending on the
template, and the arguments of past tool calls become objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

BILLING = "x-anthropic-billing-header"
"""vLLM drops this first line of system prompts: it differs in each request."""

PART_FIELDS = frozenset({
    "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
    "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
})  # fmt: skip
"""What vLLM knows of a part; it keeps what else there is."""

TEXT_FIELDS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip


class Unrendered(Exception):
    """A prompt cannot be made here; the engine may well refuse it. Says nothing about its content."""


def conversation(messages: Sequence[Mapping[str, Any]], *, parts: bool, developer: bool) -> list[Message]:
    """Messages for a template: content in `parts` or as one string; `developer` if the template knows that role.

    Raises Unrendered for what vLLM would refuse.
    """
    said = [convert(message, parts=parts) for message in messages]
    if not developer and any(it["role"] == "developer" for it in said):
        said = one_system(said)
    return said


def convert(message: Mapping[str, Any], *, parts: bool) -> Message:
    """One message."""
    role, content = message["role"], message.get("content")
    made: Message = {"role": role, "content": convert_content(role, content, parts=parts)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            made["tool_calls"] = [convert_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            made["reasoning"] = made["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if isinstance(made["content"], list) and all(it["type"] == "text" for it in made["content"]):
            made["content"] = "\n".join(it["text"] for it in made["content"])
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if role == "developer":
        tools = message.get("tools")
        made["tools"] = None if tools is None else [ordered(it, ("function", "type")) for it in tools]
    return made


def convert_content(role: str, content: Any, *, parts: bool) -> Any:
    """A message's content: one string, or a list of parts that are objects."""
    if content is None:
        given: list[Any] = []
    elif isinstance(content, str):
        given = [{"type": "text", "text": content}]
    else:
        given = list(content)
    if role == "system":
        given = without_billing(given)
    made = [it for it in (convert_part(part, parts=parts) for part in given) if it is not None]
    return made if parts else "\n".join(made)


def convert_part(part: Any, *, parts: bool) -> Any:
    """A part as an object or as its text; None for one without."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if parts else part
    kind = part.get("type")
    if kind == "tool_reference":
        name = part.get("name")
        return {"type": kind, "name": name} if parts else name
    field = TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise Unrendered
    text = part.get(field)
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise Unrendered
    if not parts:
        return text
    more = {key: value for key, value in part.items() if key not in PART_FIELDS}
    return {"type": "text", "text": text, **more}


def without_billing(parts: list[Any]) -> list[Any]:
    """A system prompt's parts without Claude Code's line of attribution."""
    kept = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
        if not (isinstance(text, str) and text.startswith(BILLING)):
            kept.append(part)
            continue
        rest = text.partition("\n")[2]
        if rest:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def convert_call(call: Mapping[str, Any]) -> Message:
    """A past tool call: keys in vLLM's order, arguments as an object ({} where they are none)."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise Unrendered
    made = ordered(call, ("id", "function", "type"))
    made["function"] = ordered(function, ("arguments", "name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    made["function"]["arguments"] = arguments if isinstance(arguments, dict) else {}
    return made


def ordered(fields: Mapping[str, Any], first: Sequence[str]) -> Message:
    """The same fields, some of them first."""
    made = {name: fields[name] for name in first if name in fields}
    return made | {name: value for name, value in fields.items() if name not in made}


def one_system(said: list[Message]) -> list[Message]:
    """Developers' messages as the system's, and all of the system's in one, in front."""
    renamed = []
    for message in said:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            message.pop("tools", None)
        renamed.append(message)
    at = [index for index, message in enumerate(renamed) if message["role"] == "system"]
    if at == [0]:
        return renamed
    texts = []
    for index in at:
        content = renamed[index]["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        if content:
            texts.append(content)
    rest = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def convert_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    """A request's tools as vLLM writes them. Raises Unrendered for what it would refuse."""
    if tools is None:
        return None
    made = []
    for tool in tools:
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise Unrendered
        written = {name: function.get(name) for name in ("name", "description", "parameters")}
        later = tool.get("defer_loading")
        for name, value in (("strict", None), ("defer_loading", later)):
            if function.get(name) is not None:
                value = function[name]
            if value is not None:
                written[name] = value
        outer: Message = {"type": "function", "function": written}
        if later is not None:
            outer["defer_loading"] = later
        made.append(outer)
    return made
