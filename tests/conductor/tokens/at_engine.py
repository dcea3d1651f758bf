"""What a real engine must agree with us about in tokens: each function is one fact, told by its name.

`tests/e2e/test_up` runs them at one of its engines, which has to have been started with --block-size 32 and
--trust-request-chat-template.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.conductor.job import Kind, Parsed
from headwater.conductor.tokens import asked
from headwater.conductor.tokens.local import find_ids
from headwater.conductor.tokens.samples import samples
from headwater.conductor.tokens.tokenizers import LocalTokenizer
from headwater.core.hashing import chunk_keys
from tests.conductor.tokens.chats import CASES, all_templates, chat, folder, text, user

BLOCK = 32
SIZE = 1 << 20
STYLES = ("smollm", "llama", "mistral", "qwen")
LONG = "You are a guide to the rivers of the world; you know where each of them rises, and what it meets. " * 4


class AtEngine:
    """A vLLM that renders whatever template a request brings, and our tokenizers with the same templates."""

    def __init__(self, port: int, served_name: str, model: Path, at: Path) -> None:
        self.port, self.served_name = port, served_name
        self.templates = all_templates(model)
        self.tokenizers = {
            name: LocalTokenizer(folder(at / name, model, source, whole=True))
            for name, source in self.templates.items()
        }

    def post(self, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
        body = json.dumps({**fields, "model": self.served_name}).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=120
            ) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def ask(self, path: str, **fields: Any) -> Any:
        status, body = self.post(path, {"temperature": 0, **fields})
        assert status == 200, body
        return json.loads(body)

    def theirs(self, style: str, parsed: Parsed) -> list[int] | None:
        question = json.loads(asked.question(parsed))
        if style != "smollm":
            question["chat_template"] = self.templates[style]
        status, body = self.post(asked.PATH, question)
        assert status in (200, 400), body
        ids = asked.answer(body)
        return None if ids is None else list(ids)

    def ours(self, style: str, parsed: Parsed) -> list[int] | None:
        ids = find_ids(self.tokenizers[style], parsed, SIZE).ids
        return None if ids is None else list(ids)


def chats_have_the_same_ids(engine: AtEngine) -> None:
    for style in STYLES:
        ours = {name: engine.ours(style, chat(fields)) for name, fields in CASES.items()}
        theirs = {name: engine.theirs(style, chat(fields)) for name, fields in CASES.items()}
        assert ours == theirs, style
        assert sum(ids is not None for ids in ours.values()) >= len(CASES) - 2


def samples_have_the_same_ids(engine: AtEngine) -> None:
    for parsed in samples("model"):
        assert engine.ours("smollm", parsed) == engine.theirs("smollm", parsed)


def chats_are_answered_from_the_same_ids(engine: AtEngine) -> None:
    """Not only what /tokenize says, which reads requests by a model of its own."""
    for style in ("mistral", "qwen"):
        for name in ("calls", "thoughts", "parts", "tools"):
            fields = {**CASES[name], "tool_choice": "none"} if "tools" in CASES[name] else CASES[name]
            reply = engine.ask(
                "/v1/chat/completions", **fields, max_tokens=1, return_token_ids=True,
                chat_template=engine.templates[style],
            )  # fmt: skip
            assert reply["prompt_token_ids"] == engine.ours(style, chat(fields)), (style, name)


def completions_have_the_same_ids(engine: AtEngine) -> None:
    prompt = "Rivers: <|im_start|>a b  c\n日本 " * 3
    for fields in (
        {},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 7},
        {"truncate_prompt_tokens": 7, "truncation_side": "right"},
        {"truncate_prompt_tokens": 7, "truncation_side": "left"},
        {"truncate_prompt_tokens": 2000},
    ):
        reply = engine.ask("/v1/completions", prompt=prompt, max_tokens=1, return_token_ids=True, **fields)
        assert reply["choices"][0]["prompt_token_ids"] == engine.ours("smollm", text(prompt, **fields)), fields


def hits_are_as_foreseen(engine: AtEngine) -> None:
    for style in ("llama", "mistral", "qwen"):
        _hits_are_as_foreseen(engine, style)


def _hits_are_as_foreseen(engine: AtEngine, style: str) -> None:
    messages = [user(LONG + "Where does the Rhine rise?")]
    cached, held = [], set()
    for follow_up in ("And the Danube? <|im_end|>", "日本の川は?", ""):
        fields = {"messages": messages}
        ids = engine.ours(style, Parsed(Kind.CHAT, fields, "model"))
        assert ids is not None
        keys = chunk_keys(b"root", ids[:-1], BLOCK)
        foreseen = BLOCK * next((at for at, key in enumerate(keys) if key not in held), len(keys))
        reply = engine.ask(
            "/v1/chat/completions", **fields, max_tokens=20, return_token_ids=True, cache_salt=style,
            chat_template=engine.templates[style],
        )  # fmt: skip
        details = reply["usage"]["prompt_tokens_details"] or {}
        cached.append((foreseen, details.get("cached_tokens") or 0))
        said = reply["choices"][0]
        # The last token that was drawn is not computed yet.
        held.update(chunk_keys(b"root", [*ids, *said["token_ids"][:-1]], BLOCK))
        messages = [*messages, said["message"], user(follow_up)]
    assert all(foreseen == found for foreseen, found in cached), (style, cached)
    assert cached[0] == (0, 0) and cached[1][0] > 3 * BLOCK and cached[2][0] > cached[1][0], (style, cached)


FACTS: dict[str, Callable[[AtEngine], None]] = {
    it.__name__: it
    for it in (
        chats_have_the_same_ids,
        samples_have_the_same_ids,
        chats_are_answered_from_the_same_ids,
        completions_have_the_same_ids,
        hits_are_as_foreseen,
    )
}
