"""Bodies of requests, read and checked; and the list of models.

Checked strictly is what the Conductor itself uses, and what would cost or endanger an engine; all else is the engine's
business, which names it better. Where a key comes twice the last one counts, as it does in the engines. A whole number
may be written 5.0, as some languages do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Annotated, Any

import msgspec

from headwater._kernels.keys import exact_ids, read_ids
from headwater.conductor.http.exchange import Request
from headwater.conductor.job import BadRequest, Kind, Parsed
from headwater.conductor.nesting import NESTING, check_counts, is_deeper
from headwater.fleetfile.model import Limits

PATHS = {"/v1/chat/completions": Kind.CHAT, "/v1/completions": Kind.COMPLETION}

VALUES = 1 << 18
"""In one body, beside those of a prompt of token ids."""
PROMPTS = 1024
"""In one request, as in vLLM."""
CHOICES = 128
STOPS = 64
NAME_CHARS = 256
SALT_CHARS = 1024
SESSION_CHARS = 256
COMPLETION_TOKENS = 16
"""What a completion that does not say gets, in OpenAI's interface and in engines."""
INT64 = 1 << 63
INT32 = 1 << 31

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Templates put roles between special tokens; models have roles of their own (ipython, observation)."""

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
MEDIA_KEYS = frozenset({
    "image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds", "video_url",
    "video_embeds", "prompt_embeds", "file",
})  # fmt: skip

TRANSFER = ("kv_transfer_params", "ec_transfer_params")
"""Between engines: a client that gave them could have an engine fetch from whatever it names."""
OPTIONS = frozenset({
    "return_token_ids", "stream_options", "cache_salt", "priority", "n", "vllm_xargs", "stop", *TRANSFER,
})  # fmt: skip
"""Whoever has none of these has nothing of what `read_options` reads."""
SESSION = b"x-session-id"
SESSIONS = frozenset({"session_id", "prompt_cache_key", "user"})

_decoder = msgspec.json.Decoder()
_NOTHING: dict[str, Any] = {}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Of a usual completion."""

    include_usage: bool = False


class Usual(msgspec.Struct, forbid_unknown_fields=True):
    """A completion as nearly all are: beside its prompt it says how long it may get, and how tokens are drawn."""

    prompt: str
    model: Annotated[str, msgspec.Meta(max_length=NAME_CHARS)] = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=INT32)] = COMPLETION_TOKENS
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None


_read_usual = msgspec.json.Decoder(Usual).decode
_PROMPT = b'"prompt":'
_IDS = token_hex()
"""Stands for a list of ids that was cut out; nobody can know it."""
_CUT = b'"%b"' % _IDS.encode()
USUAL_BYTES = 1 << 19
"""Larger bodies are read with care, which counts before it makes anything."""


def read(request: Request, limits: Limits) -> Parsed:
    """What a chat or completion request asks. `model` is '' if it names none, which means the only one that is served.

    Raises BadRequest, with a 4xx status.
    """
    kind = PATHS.get(request.path)
    if kind is Kind.COMPLETION and len(request.body) <= USUAL_BYTES:
        parsed = read_usual(request, limits)
        if parsed is not None:
            return parsed
    if kind is None:
        raise BadRequest("there is no such interface", status=404)
    return read_any(kind, request, limits)


def read_usual(request: Request, limits: Limits) -> Parsed | None:
    """The same of a completion that says nothing that is not usual; None: it is to be read with care.

    A list of ids is read from the text as it stands, without an object for each, and a word that nobody can know put in
    its place: if that is the prompt of what is left, by the rules by which any prompt is read, the list was.
    """
    body, ids = request.body, None
    begin = body.find(_PROMPT) + len(_PROMPT)
    if body[begin : begin + 1] == b" ":
        begin += 1
    try:
        if body[begin : begin + 1] != b"[":
            found = _read_usual(body)
        else:
            end = body.find(b"]", begin) + 1
            ids = read_ids(memoryview(body)[begin:end], limits.prompt_tokens)
            if not ids:
                return None
            found = _read_usual(b"%b%b%b" % (body[:begin], _CUT, body[end:]))
            if found.prompt != _IDS:
                return None
    except msgspec.MsgspecError:
        return None
    options, usage = found.stream_options, False
    if options is not None:
        if not found.stream:
            return None
        usage = options.include_usage
    text = found.prompt if ids is None else None
    session = read_session(request, _NOTHING) if SESSION in request.named else ""
    return Parsed(
        Kind.COMPLETION, None, found.model, found.stream, 1, ids, text, "", 0, found.max_tokens, session, False, usage,
        usual=True, body=body,
    )  # fmt: skip


def read_any(kind: Kind, request: Request, limits: Limits) -> Parsed:
    """The same of any request, field by field."""
    fields = decode(request.body, limits)
    parsed = Parsed(kind, fields, model=text(fields, "model", NAME_CHARS) or "")
    parsed.stream = flag(fields, "stream")
    parsed.session = read_session(request, fields)
    if not OPTIONS.isdisjoint(fields):
        read_options(parsed)
    if kind is Kind.CHAT:
        read_chat(parsed, limits)
    else:
        read_completion(parsed, limits)
    return parsed


def read_options(parsed: Parsed) -> None:
    """What most requests say nothing of; all names are in OPTIONS."""
    fields = parsed.fields
    parsed.wants_ids = flag(fields, "return_token_ids")
    parsed.include_usage = read_stream_options(fields, stream=parsed.stream)
    parsed.salt = text(fields, "cache_salt", SALT_CHARS, empty=False) or ""
    parsed.priority = whole(fields, "priority", -INT64, INT64 - 1) or 0
    parsed.n = whole(fields, "n", 1, CHOICES) or 1
    refuse_transfer(fields)
    check_stop(fields.get("stop"))


def models(names: Iterable[str], created: int = 0) -> bytes:
    """The answer to /v1/models. `created` is in seconds since 1970."""
    return msgspec.json.encode({"object": "list", "data": [describe(name, created) for name in names]})


def model(name: str, created: int = 0) -> bytes:
    """The answer to /v1/models/NAME."""
    return msgspec.json.encode(describe(name, created))


def describe(name: str, created: int) -> dict[str, str | int]:
    """One model, in OpenAI's words."""
    return {"id": name, "object": "model", "created": created, "owned_by": "headwater"}


def decode(body: bytes, limits: Limits) -> dict[str, Any]:
    """A body's fields, within the limits of size, depth and counts."""
    if len(body) > limits.body_bytes:
        raise BadRequest(f"the body has more than {limits.body_bytes} bytes", status=413)
    check_counts(body, limits.prompt_tokens + VALUES)
    try:
        fields = _decoder.decode(body)
    except RecursionError:
        raise BadRequest(f"the body is nested more than {limits.json_depth} levels deep") from None
    except msgspec.MsgspecError:
        raise BadRequest("the body is not valid JSON in UTF-8") from None
    if type(fields) is not dict:
        raise BadRequest("the body must be a JSON object")
    # Most bodies have no levels but one, or fewer brackets than they may have levels.
    if (
        not NESTING.isdisjoint(map(type, fields.values()))
        and body.count(b"{") + body.count(b"[") > limits.json_depth
        and is_deeper(fields, limits.json_depth)
    ):
        raise BadRequest(f"the body is nested more than {limits.json_depth} levels deep")
    return fields


def read_chat(parsed: Parsed, limits: Limits) -> None:
    """Messages, tools and what else only chats have."""
    fields = parsed.fields
    messages = fields.get("messages")
    if type(messages) is not list or not messages:
        raise BadRequest("expected a list of at least one message", "messages")
    if len(messages) > limits.messages:
        raise BadRequest(f"expected at most {limits.messages} messages", "messages")
    for index, message in enumerate(messages):
        if check_message(message, index):
            parsed.media = True
    tools = fields.get("tools")
    if tools is not None:
        check_tools(tools, limits.tools)
    table(fields, "chat_template_kwargs")
    flag(fields, "logprobs")
    whole(fields, "top_logprobs", -1, INT32)
    # Both may be there; as in the engines, the newer name wins.
    old = whole(fields, "max_tokens", 1, INT32)
    new = whole(fields, "max_completion_tokens", 1, INT32)
    parsed.max_tokens = old if new is None else new


def has_template(parsed: Parsed) -> bool:
    """Whether a chat brings its own template, a program that engines run, by either way that they take it."""
    more = parsed.fields.get("chat_template_kwargs") or {}
    return parsed.fields.get("chat_template") is not None or more.get("chat_template") is not None


def check_message(message: Any, index: int) -> bool:
    """Whether a message has parts that are no text. Raises BadRequest if it is no message."""
    if type(message) is not dict:
        raise BadRequest("expected an object", f"messages[{index}]")
    role = message.get("role")
    if type(role) is not str or (role not in ROLES and ROLE.fullmatch(role) is None):
        raise BadRequest("expected a role: system, developer, user, assistant, tool, ...", f"messages[{index}].role")
    calls = message.get("tool_calls")
    if calls is not None and (type(calls) is not list or not all(type(it) is dict for it in calls)):
        raise BadRequest("expected a list of objects", f"messages[{index}].tool_calls")
    content = message.get("content")
    if content is None or type(content) is str:
        return message.get("audio") is not None
    if type(content) is not list:
        raise BadRequest("expected a string, a list of parts or null", f"messages[{index}].content")
    media = message.get("audio") is not None
    for part in content:
        if type(part) is dict:
            kind = part.get("type", "text")
            media = media or type(kind) is not str or kind not in TEXT_PARTS or not MEDIA_KEYS.isdisjoint(part)
        elif type(part) is not str:
            raise BadRequest("expected parts that are objects or strings", f"messages[{index}].content")
    return media


def check_tools(tools: Any, most: int) -> None:
    """Raises BadRequest if these are no tools."""
    if type(tools) is not list or not tools or not all(type(it) is dict for it in tools):
        raise BadRequest("expected a list of at least one object, or none", "tools")
    if len(tools) > most:
        raise BadRequest(f"expected at most {most} tools", "tools")


def read_completion(parsed: Parsed, limits: Limits) -> None:
    """The prompt or prompts, and what else only completions have."""
    fields = parsed.fields
    if fields.get("prompt_embeds") is not None:
        parsed.media = True
    else:
        read_prompt(parsed, fields.get("prompt"), limits.prompt_tokens)
    if "best_of" in fields or "logprobs" in fields:
        best = whole(fields, "best_of", 1, CHOICES)
        if best is not None and best < parsed.n:
            raise BadRequest("expected at least n", "best_of")
        whole(fields, "logprobs", -1, INT32)
    parsed.max_tokens = whole(fields, "max_tokens", 1, INT32)
    if "max_tokens" not in fields:
        parsed.max_tokens = COMPLETION_TOKENS


def read_prompt(parsed: Parsed, prompt: Any, most: int) -> None:
    """One prompt as text or ids, or several of one kind; a list of one is that one."""
    if type(prompt) is str:
        parsed.text = prompt
        return
    if type(prompt) is not list or not prompt:
        raise BadRequest("expected a string, a list of strings, of token ids or of lists of token ids", "prompt")
    kind = type(prompt[0])
    if kind is int:
        parsed.ids = token_ids(prompt, most)
        return
    if kind not in (str, list) or not all(type(it) is kind for it in prompt):
        raise BadRequest("expected strings, or token ids, or lists of token ids", "prompt")
    if len(prompt) > PROMPTS:
        raise BadRequest(f"expected at most {PROMPTS} prompts", "prompt")
    if kind is list:
        for ids in prompt:
            token_ids(ids, most)
    if len(prompt) == 1:
        parsed.text, parsed.ids = (prompt[0], None) if kind is str else (None, prompt[0])


def token_ids(ids: list[Any], most: int) -> Sequence[int]:
    """A prompt's ids: whole numbers of 32 bits, and not booleans."""
    if not ids or len(ids) > most:
        raise BadRequest(f"expected 1 to {most} token ids", "prompt")
    found = exact_ids(ids)
    if found is None:
        raise BadRequest("expected token ids: whole numbers from 0 to 4294967295", "prompt")
    return found


def read_stream_options(fields: dict[str, Any], *, stream: bool) -> bool:
    """Whether the client wants the usage at the end of its stream."""
    options = fields.get("stream_options")
    if options is None:
        return False
    if type(options) is not dict:
        raise BadRequest("expected an object", "stream_options")
    if not stream:
        raise BadRequest("expected only where stream is true", "stream_options")
    return flag(options, "include_usage", "stream_options.include_usage")


def read_session(request: Request, fields: dict[str, Any]) -> str:
    """What requests that belong together have in common, in up to SESSION_CHARS; the narrowest name that is given."""
    is_named = not SESSIONS.isdisjoint(fields)
    if is_named:
        for name in ("session_id", "prompt_cache_key"):
            value = text(fields, name, INT32)
            if value:
                return value[:SESSION_CHARS]
    header = request.named.get(SESSION)
    if header:
        return header[:SESSION_CHARS].decode("latin-1")
    return (text(fields, "user", INT32) or "")[:SESSION_CHARS] if is_named else ""


def refuse_transfer(fields: dict[str, Any]) -> None:
    """Raise BadRequest if a client gives what only engines tell each other, by either way that engines take it."""
    more = table(fields, "vllm_xargs")
    for name in TRANSFER:
        if fields.get(name) is not None or name in more:
            raise BadRequest("expected none from clients", name)


def check_stop(stop: Any) -> None:
    """Raises BadRequest if these are no strings to stop at."""
    if stop is None or type(stop) is str:
        return
    if type(stop) is not list or len(stop) > STOPS or not all(type(it) is str for it in stop):
        raise BadRequest(f"expected a string or a list of at most {STOPS} strings", "stop")


def text(fields: dict[str, Any], name: str, most: int, *, empty: bool = True) -> str | None:
    """A field that is a string, if it is there."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not str:
        raise BadRequest("expected a string", name)
    if len(value) > most or not (value or empty):
        raise BadRequest(f"expected {0 if empty else 1} to {most} characters", name)
    return value


def flag(fields: dict[str, Any], name: str, param: str | None = None) -> bool:
    """A field that is true or false; absent and null are false."""
    value = fields.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        raise BadRequest("expected true or false", param or name)
    return value


def table(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object; absent and null are an empty one."""
    value = fields.get(name)
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadRequest("expected an object", name)
    return value


def whole(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """A field that is a whole number from `low` to `high`, if it is there; 5.0 is put right in place."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = fields[name] = int(value)
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"expected a whole number from {low} to {high}", name)
    return value
