"""A model's tokenizer and chat template, for text that becomes token ids."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.errors import ConfigError
from headwater.traces.export import Messages, Tokenizer
from headwater.traces.fields import BadRecord


def load_tokenizer(model: str, flag: str) -> Tokenizer:
    """The tokenizer of a model in a folder or in the local cache; nothing is downloaded. Raises ConfigError.

    `flag` is what errors call the option that named the model.
    """
    try:
        from jinja2 import TemplateError
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{flag}: transformers is missing; pip install transformers") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"{flag} {model!r}: no tokenizer there ({first}); name the model's folder") from error

    def text(written: str) -> Sequence[int]:
        return list(tokenizer.encode(written))

    def chat(messages: Messages, tools: Messages | None) -> Sequence[int]:
        if not tokenizer.chat_template:
            raise ConfigError(f"{flag} {model!r}: the model has no chat template; give text or token ids")
        try:
            rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError):
            # What the template says may quote the messages.
            raise BadRecord("messages", "...", "the model's chat template does not take them") from None
        return list(tokenizer.encode(rendered, add_special_tokens=False))

    return Tokenizer(text, chat)
