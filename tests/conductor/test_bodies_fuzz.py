"""Whatever comes in OpenAI's words, or nearly, is read or refused with a 4xx; nothing else ever happens.

HEADWATER_FUZZ_BODIES=100000 makes more of them.
"""

import json
import os
from random import Random
from typing import Any

from headwater.conductor.bodies import read, read_any, read_usual
from headwater.conductor.http.exchange import Request
from headwater.conductor.job import BadRequest, Kind, Parsed
from headwater.conductor.tokens.content import Unrendered
from headwater.conductor.tokens.sandbox import OverBudget
from headwater.conductor.tokens.templates import Template
from headwater.fleetfile.model import Limits
from tests.conductor.tokens.chats import LLAMA, MISTRAL, QWEN

BODIES = int(os.environ.get("HEADWATER_FUZZ_BODIES", "20000"))
LIMITS = Limits(json_depth=16, messages=64, tools=16, prompt_tokens=64, body_bytes=1 << 16)

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.0, 1.5, -0.0, 1e308, 2**31, 2**32, 2**53, 2**63, 2**64, 10**40, -(2**63) - 1, "",
    "a", "auto", "none", "1", "\x00", "\ud83d\ude00", "e\u0301", "<|im_end|>", "{{ 7*7 }}", "../../etc/passwd",
    "%s%n", "a" * 2000, [], [[]], [None], [1], [True], ["a"], [1, "a"], [2**32], [[1], [2]], [{}], {}, {"a": None},
    {"": {}}, {"type": "text"}, {"__class__": 1}, [[[[[]]]]], [0] * 65, ["a"] * 65,
]  # fmt: skip

ROLES = ["system", "user", "assistant", "tool", "developer", "function", "ipython"]
PART = {
    "type": ["text", "image_url", "input_audio", "refusal", "thinking", "tool_reference", "file"],
    "text": ["a", " b\n"], "image_url": [{"url": "http://169.254.169.254/"}, "data:image/png;base64,AA=="],
    "refusal": ["no"], "thinking": ["hm"], "name": ["n"], "cache_control": [{"type": "ephemeral"}],
}  # fmt: skip
CALL = {
    "id": ["call_1"], "type": ["function", "custom"], "index": [0],
    "function": [{"name": "f", "arguments": "{}"}, {"name": "f", "arguments": "{"}, {"arguments": {"a": 1}}, {}],
}  # fmt: skip
TOOL = {
    "type": ["function", "custom"], "defer_loading": [True],
    "function": [{"name": "f"}, {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}],
}  # fmt: skip
COMMON = {
    "model": ["m"], "stream": [True, False], "stream_options": [{"include_usage": True}, {"x": 1}], "n": [1, 2],
    "max_tokens": [1, 99], "temperature": [0, 0.5], "top_p": [1.0], "top_k": [5], "min_p": [0.1], "seed": [1],
    "stop": ["a", ["a", "b"]], "presence_penalty": [0.1], "frequency_penalty": [0.1], "repetition_penalty": [1.1],
    "logit_bias": [{"5": 1}], "user": ["u"], "session_id": ["s"], "prompt_cache_key": ["k"], "cache_salt": ["s"],
    "priority": [0, -5], "return_token_ids": [True], "ignore_eos": [True], "min_tokens": [1], "stop_token_ids": [[1]],
    "skip_special_tokens": [True], "truncate_prompt_tokens": [5, -1], "truncation_side": ["left"],
    "add_special_tokens": [True], "prompt_logprobs": [1], "allowed_token_ids": [[1]], "bad_words": [["a"]],
    "response_format": [{"type": "json_object"}], "structured_outputs": [{"regex": "a"}], "request_id": ["r"],
    "kv_transfer_params": [{"remote_host": "10.0.0.1"}], "vllm_xargs": [{"a": 1}, {"kv_transfer_params": "x"}],
    "metadata": [{"a": "b"}], "service_tier": ["auto"], "store": [False], "echo": [True], "logprobs": [True, 1],
}  # fmt: skip
CHAT = COMMON | {
    "max_completion_tokens": [5], "top_logprobs": [1], "tool_choice": ["auto", {"type": "function"}],
    "parallel_tool_calls": [True], "reasoning_effort": ["low", "none"], "modalities": [["text"]],
    "chat_template": ["{{ 1 }}"], "chat_template_kwargs": [{"enable_thinking": False}, {"tokenize": True}],
    "add_generation_prompt": [True, False], "continue_final_message": [True, False], "documents": [[{"text": "a"}]],
    "functions": [[{"name": "f"}]], "function_call": ["auto"], "prediction": [{"type": "content"}], "audio": [{}],
}  # fmt: skip
COMPLETION = COMMON | {
    "prompt": ["a", ["a"], ["a", "b"], [1, 2], [[1, 2]], [[1], [2]]], "best_of": [3], "suffix": ["s"],
    "prompt_embeds": ["AA=="],
}  # fmt: skip


class Maker:
    """Makes bodies: mostly right, with a wrong value here and there, and sometimes broken as text."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def value(self, good: list[Any]) -> Any:
        return self.random.choice(HOSTILE if self.random.random() < 0.06 else good)

    def some(self, table: dict[str, list[Any]], chance: float) -> dict[str, Any]:
        return {name: self.value(good) for name, good in table.items() if self.random.random() < chance}

    def message(self) -> Any:
        random = self.random
        made = {"role": self.value(ROLES), "content": self.value(["a", " b\n", None])}
        if random.random() < 0.3:
            made["content"] = [self.value([self.some(PART, 0.4), "a"]) for _ in range(random.randrange(4))]
        if random.random() < 0.2:
            made["tool_calls"] = self.value([[self.some(CALL, 0.8) for _ in range(random.randrange(3))]])
        for name in ("name", "tool_call_id", "reasoning", "reasoning_content", "refusal", "audio", "tools", "task"):
            if random.random() < 0.05:
                made[name] = self.value(["a"])
        return self.value([made])

    def fields(self) -> tuple[str, dict[str, Any]]:
        random = self.random
        if random.random() < 0.3:
            return "/v1/completions", self.some(COMPLETION, 0.1) | {"prompt": self.value(COMPLETION["prompt"])}
        fields = self.some(CHAT, 0.1)
        fields["messages"] = self.value([[self.message() for _ in range(random.randrange(1, 6))]])
        if random.random() < 0.2:
            fields["tools"] = self.value([[self.some(TOOL, 0.9) for _ in range(random.randrange(1, 3))]])
        return "/v1/chat/completions", fields

    def request(self) -> Request:
        random = self.random
        path, fields = self.fields()
        body = bytearray(json.dumps(fields, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass"))
        if random.random() < 0.3:
            for _ in range(random.randrange(1, 4)):
                at = random.randrange(len(body) + 1)
                cut = random.choice([0, 0, 1, random.randrange(9)])
                body[at : at + cut] = random.choice(
                    [b"", b'"', b"\\", b"[", b"{", b"]", b",", b"NaN", b"1e999", b"\xff", b"\\ud800", b"[" * 300]
                )
        headers = [(b"x-session-id", random.randbytes(3))]
        return Request("POST", path, "", headers, bytes(body), "127.0.0.1", dict(headers))


def outcome(request: Request) -> Parsed | BadRequest:
    try:
        return read(request, LIMITS)
    except BadRequest as refused:
        assert 400 <= refused.status < 500
        assert refused.message.isascii() and len(refused.message) < 120
        return refused


def test_everything_is_read_or_refused(seed: int) -> None:
    maker = Maker(Random(seed))
    templates = [Template(source, {"bos_token": "<s>", "eos_token": "</s>"}) for source in (LLAMA, MISTRAL, QWEN)]
    read_well = rendered = unrendered = 0
    for index in range(BODIES):
        parsed = outcome(maker.request())
        if isinstance(parsed, BadRequest):
            continue
        read_well += 1
        assert parsed.n >= 1 and (parsed.max_tokens is None or parsed.max_tokens >= 1)
        if "messages" not in parsed.fields or parsed.media or index % 8:
            continue
        try:
            assert isinstance(templates[index // 8 % 3].render(parsed.fields, 1 << 16), str)
            rendered += 1
        except (Unrendered, OverBudget):
            unrendered += 1
    print(f"seed {seed}: of {BODIES} bodies {read_well} read; of those {rendered} rendered, {unrendered} not")
    assert read_well > BODIES // 20 and rendered > unrendered // 20


MEMBERS = (
    '"prompt":[1,2]', '"prompt": [3]', '"prompt":"a"', r'"prompt":"\"prompt\":[1]"', '"prompt":0', '"prompt":[]',
    '"prompt":[1,4294967296]', '"prompt":[5.0]', '"prompt":"["', '"model":"m"', r'"model":"\"prompt\":[1]"',
    '"model":{"prompt":[1]}', '"max_tokens":5', '"max_tokens":null', '"max_tokens":0', '"stream":true',
    '"temperature":0', '"temperature":0.5', '"seed":[1]', '"user":"u"', '"n":1', '"x":[5]', '"cache_salt":"s"',
    r'"\"prompt":[1]', r'"a\\"prompt":[1]', '"top_k":1', '"stream_options":{"include_usage":false}',
    '"stream_options": {"include_usage": true}', '"stream_options":null', '"stream_options":{}',
    '"stream_options":{"x":1}', '"stream":false',
)  # fmt: skip
WORDS = ("{", "}", '"prompt"', ":", "[1,2]", "[", "]", ",", '"', "\\", r"\"", '"a"', " ", "0", "null", '{"prompt":[1]}')


def completion(random: Random) -> bytes:
    """Nearly a usual one, or nearly JSON."""
    if random.random() < 0.2:
        return ("{" + "".join(random.choice(WORDS) for _ in range(random.randrange(9))) + "}").encode()
    members = [random.choice(MEMBERS) for _ in range(random.randrange(1, 5))]
    body = "{" + random.choice((",", ", ")).join(members) + "}"
    if random.random() < 0.3:
        at = random.randrange(len(body))
        body = body[:at] + random.choice('"\\,:{}[]0 ') + body[at + 1 :]
    return body.encode()


def test_what_is_usual_is_read_as_all_else_is(seed: int) -> None:
    random, usual = Random(seed), {True: 0, False: 0}
    for _ in range(2 * BODIES):
        request = Request("POST", "/v1/completions", "", [], completion(random), "", {})
        quickly = read_usual(request, LIMITS)
        if quickly is None:
            continue
        with_care = read_any(Kind.COMPLETION, request, LIMITS)
        usual[quickly.ids is not None] += 1
        assert quickly.usual and not with_care.usual
        assert quickly.fields == with_care.fields == json.loads(request.body)
        assert list(quickly.ids or ()) == list(with_care.ids or ()), request.body
        quickly.ids, quickly.body, quickly.usual = with_care.ids, b"", False
        assert quickly == with_care, request.body
    assert min(usual.values()) > BODIES // 200, usual
