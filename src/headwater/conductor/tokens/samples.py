"""A few prompts by which a model's own tokenizer and ours are compared before ours is trusted."""

from __future__ import annotations

from typing import Any

from headwater.conductor.job import Kind, Parsed

TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.\n\n\tIt's 25 °C; naïve façade, 東京, 🙂.",
    "  def f(x):\n    return x ** 2  # <|end|> </s> [INST]\r\n",
)

TURNS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "  What is 2+2? "},
    {"role": "assistant", "content": "It is 4.\n"},
    {"role": "user", "content": "And in 日本語?"},
)
SYSTEM: dict[str, Any] = {"role": "system", "content": "You are terse. "}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    ],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call12345", "content": "7 °C"}


def samples(model: str) -> list[Parsed]:
    """Texts and chats: with a system prompt, with several turns, with tools. A template may refuse some of them."""
    chats: list[dict[str, Any]] = [
        {"messages": [*TURNS]},
        {"messages": [SYSTEM, TURNS[0]]},
        {"messages": [TURNS[0], CALL, RESULT], "tools": [TOOL]},
    ]
    made = [Parsed(Kind.COMPLETION, {"prompt": text}, model, text=text) for text in TEXTS]
    return made + [Parsed(Kind.CHAT, fields, model) for fields in chats]
