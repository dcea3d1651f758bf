"""A model's chat templates, rendered as transformers does for vLLM.

A client's own template is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes

from headwater.conductor.tokens.content import Message, Unrendered, conversation, convert_tools
from headwater.conductor.tokens.formats import takes_parts
from headwater.conductor.tokens.sandbox import BUDGET, DIRECTIVE, Budget, OverBudget, compile_template

TAG = "CONTINUE_FINAL_MESSAGE_TAG "

TAKEN = frozenset({
    "chat_template", "conversation", "conversations", "messages", "model_config", "return_assistant_tokens_mask",
    "return_dict", "return_tensors", "self", "tokenize", "tokenizer", "tools",
})  # fmt: skip
"""Names of `chat_template_kwargs` that mean something else to vLLM on the way to the template, or that it refuses."""

FAILURES = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    MemoryError,
)
"""How templates fail on what they are given. RecursionError is a RuntimeError."""


class Template:
    """One template, ready to render."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special` has the tokenizer's bos_token and so on. Raises jinja2.TemplateError if it is no template."""
        self._source = source
        self._special = dict(special)
        self._compiled, tree = compile_template(source)
        self.parts = takes_parts(tree)
        self.developer = '"developer"' in source or "'developer'" in source
        self.dated = "strftime_now" in source
        """Whether it asks for the date."""
        self.timed = self.dated and not asks_for_days(tree)
        """Whether it may ask for the time of day: what it renders is then not to be remembered."""

    def render(self, fields: Mapping[str, Any], size: int) -> str:
        """The prompt of a chat request, of at most `size` characters.

        Raises Unrendered if it has none, OverBudget if that takes too much.
        """
        variables = {**self._special, **template_variables(fields)}
        going_on = variables.pop("continue_final_message", False)
        if going_on and variables.get("add_generation_prompt"):
            raise Unrendered
        try:
            messages = conversation(fields["messages"], parts=self.parts, developer=self.developer)
            variables["tools"] = convert_tools(fields.get("tools"))
            end = self._mark_end(messages, going_on) if going_on else ""
            text = self._generate(messages, variables, size)
        except FAILURES:
            raise Unrendered from None  # their texts quote prompts
        return cut_at_end(text, end) if going_on else text

    def _generate(self, messages: list[Message], variables: Mapping[str, Any], size: int) -> str:
        budget = Budget(size)
        pieces, length = [], 0
        for piece in self._compiled.generate({**variables, "messages": messages, BUDGET: budget}):
            length += len(piece)
            budget.step(0)
            if length > size:
                raise OverBudget
            pieces.append(piece)
        return "".join(pieces)

    def _mark_end(self, messages: list[Message], going_on: Any) -> str:
        """Mark where the last message, which the model is to continue, ends; what it says is returned."""
        field = going_on if isinstance(going_on, str) else "content"
        said = messages[-1].get(field)
        if said is None or field not in self._source:
            raise Unrendered
        if not isinstance(said, list):
            messages[-1][field] = said + TAG
            return str(said)
        for part in reversed(said):
            if "text" in part:
                text: str = part["text"]
                part["text"] = text + TAG
                return text
        raise Unrendered


def template_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM gives a template for a request, but for messages and tools. Raises Unrendered where we cannot know."""
    given = fields.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping) or not TAKEN.isdisjoint(given):
        raise Unrendered
    effort = fields.get("reasoning_effort")
    asked = {
        **given,
        "add_generation_prompt": fields.get("add_generation_prompt", True),
        "continue_final_message": fields.get("continue_final_message", False),
    }
    asked |= {name: fields[name] for name in ("documents", "reasoning_effort") if fields.get(name) is not None}
    if effort is not None and "enable_thinking" not in given:
        asked["enable_thinking"] = effort != "none"
    # vLLM drops what has these values; a template sees the difference between null and nothing.
    return {"documents": None, **{name: value for name, value in asked.items() if value not in (None, "auto")}}


def cut_at_end(text: str, said: str) -> str:
    """What was rendered, up to the mark; without the space before it if the template has stripped the message."""
    mark = TAG.strip()
    if said.strip() not in text or mark not in text:
        raise Unrendered
    at = text.rindex(mark)
    return text[:at] if text[at : at + len(TAG)] == TAG else text[:at].rstrip()


def asks_for_days(tree: nodes.Template) -> bool:
    """Whether all that a template asks of strftime_now is the same for a whole day."""
    names = [it for it in tree.find_all(nodes.Name) if it.name == "strftime_now"]
    calls = [it for it in tree.find_all(nodes.Call) if any(it.node is name for name in names)]
    plain = [it.args[0].value for it in calls if len(it.args) == 1 and isinstance(it.args[0], nodes.Const)]
    # Elsewhere it may only be asked whether it is defined: a variable would hide what it is called with.
    tests = [it for it in tree.find_all(nodes.Test) if any(it.node is name for name in names)]
    if len(plain) < len(calls) or len(names) > len(calls) + len(tests):
        return False
    return all("%" not in DIRECTIVE.sub("", str(it)) for it in plain)


def today() -> str:
    """The local date, for what is remembered of templates that ask for it."""
    return date.today().isoformat()
