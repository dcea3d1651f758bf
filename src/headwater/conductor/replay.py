"""How a stream goes on at another instance after its own has died: from what was said so far, the completion to ask
for, and what that answers in the words of the first.

    Story ── read (the first's events) ──► plan ──► Plan ── body ──► /v1/completions of another instance
      ▲                                              │
      └──────────── Translator.said ◄────────────────┘   its events, in the first's words; and the story goes on,
                                                          so that it can move again

Where to go on from. An engine may have sent ids whose text it still holds back: the first bytes of a character, or what
may become a stop string (of the longest one all but one character). To put all ids that were sent into the new prompt
would lose that text; and where a prompt ends within a character, vLLM's incremental decoder gives out the whole prompt
as if it were new text. So the stream goes on from the last place at which all text before is known to be sent:

    ids       |--- put into the prompt ---|-- said again --|
    their text|----------- T -------------|                           T: characters of all ids up to there
    sent      |------------------ E --------------|                   E = T where nothing is held back for stop strings
                                          |-------|                   else T - held back
                                           `skip`: comes again, is compared and not sent

T is known after an event that brought text with one id (with more, the last of them may have none): T = E + what is
held back. Ids after that place had no text that was sent; they are drawn anew, and counted once. Where text or ids that
the client has seen come out differently the second time (only with sampling, or with engines that do not agree), the
stream ends with an error. A stop string that began in text that was sent already is looked for again in the same way.
With sampling, an event of several ids is gone on from as well, and the prompt that may come out then is cut off.

Samplers start anew: with a temperature, what follows is drawn as it would be for that prompt, but `seed` gives other
draws; presence and frequency penalties count from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headwater.conductor.answers import LAST_EVENT
from headwater.conductor.job import Kind, Parsed
from headwater.conductor.sse import each, payload

SAMPLING = (
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "logit_bias", "return_tokens_as_token_ids",
    "repetition_detection", "stream_interval", "session_id", "user", "watermarking", "length_penalty",
    "vllm_xargs",
)  # fmt: skip
"""Fields that a completion has in common with a chat; logprobs are not among them."""
UNCERTAIN_IDS = 64
"""So many ids are drawn again at most where an event of several ids could be gone on from as well."""

_decode = msgspec.json.decode
_encode = msgspec.json.encode


class Unmovable(Exception):
    """This stream cannot go on elsewhere; `reason` is a word for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the stream cannot be moved: {reason}")
        self.reason = reason


class EngineError(Exception):
    """An engine sent an error instead of an answer, as an event of a stream."""


def obstacle(parsed: Parsed) -> str:
    """Why a stream that answers this could not be moved, in a word; '' if it could."""
    if parsed.usual:
        return ""
    fields = parsed.fields
    chat = parsed.kind is Kind.CHAT
    if parsed.n > 1 or fields.get("best_of", 1) not in (None, 1):
        return "choices"
    if parsed.media or fields.get("prompt_embeds") is not None:
        return "media"
    if not chat and parsed.ids is None and parsed.text is None:
        return "prompts"
    if chat and fields.get("tools") and fields.get("tool_choice") != "none":
        return "tools"
    form = fields.get("response_format")
    if fields.get("structured_outputs") or (form and not (isinstance(form, dict) and form.get("type") == "text")):
        return "structured"
    if fields.get("use_beam_search") or fields.get("suffix"):
        return "engine"
    if fields.get("thinking_token_budget") is not None:
        return "reasoning"
    if (
        fields.get("prompt_logprobs") is not None
        or fields.get("logprob_token_ids")
        or (chat and fields.get("logprobs"))
    ):
        return "logprobs"
    if fields.get("echo") and (chat or fields.get("stop")):
        return "echo"
    return ""


class Place(NamedTuple):
    """Somewhere to go on from: after so many ids, whose text has so many characters."""

    ids: int
    text: int


class Plan(NamedTuple):
    """How to go on."""

    prompt: Sequence[int]
    place: Place
    skip: str
    """What was sent after that place."""
    owed: Sequence[int]
    """Ids after that place that the client has seen."""
    answer_tokens: int | None
    """How many tokens may follow; None: as many as the model has room for."""
    certain: bool
    """Whether all text before that place is known to be complete."""


class Story:
    """What one stream has said so far, as the client has it."""

    def __init__(self, parsed: Parsed) -> None:
        self.parsed = parsed
        self.chat = parsed.kind is Kind.CHAT
        self.sees_ids = parsed.wants_ids or _has_logprobs(parsed.fields)
        """Whether the client sees single tokens, not only their text."""
        self.head: dict[str, Any] = {}
        self.prompt: Sequence[int] | None = None
        self.ids: list[int] = []
        """Of the answer, as whoever writes it now has it; shorter than `seen` while it says again what was sent."""
        self.seen: list[int] = []
        """Those that the client has, where it asked for them."""
        self.text = ""
        self.finish = ""
        """The reason of its finish, once it has come."""
        self.counted = False
        """Whether usage was sent."""
        self.cached: int | None = None
        self.offset = 0
        """Of the text in logprobs."""
        self.stops = _stops(parsed.fields)
        self.held = 0 if _includes_stop(parsed.fields) else max([len(it) for it in self.stops], default=1) - 1
        self.places = [Place(0, 0)]
        self.uncertain: Place | None = None
        """After the last event that brought text with several ids."""

    def __repr__(self) -> str:
        return f"Story({len(self.ids)} ids, {len(self.text)} characters, {self.finish or 'unfinished'})"

    def read(self, events: bytes) -> None:
        """Take whole events of the first instance, as it sent them. Raises Unmovable if they cannot be followed."""
        for event in each(events):
            data = payload(event)
            if data and data != b"[DONE]":
                try:
                    self._take(_object(data))
                except EngineError:
                    raise Unmovable("malformed") from None

    def _take(self, body: dict[str, Any]) -> None:
        self.head = self.head or {name: body.get(name) for name in ("id", "object", "created", "model")}
        choices = body.get("choices")
        self.prompt = body.get("prompt_token_ids") or self.prompt
        if not choices:
            self.counted = self.counted or bool(body.get("usage"))
            return
        choice = choices[0]
        self.prompt = choice.get("prompt_token_ids") or self.prompt
        text = _text_of(choice, chat=self.chat)
        ids = choice.get("token_ids") or []
        if text and not ids:
            raise Unmovable("ids")
        self.said(text, ids, ids, self.held)
        self._see_logprobs(choice)
        self.finish = choice.get("finish_reason") or ""

    def said(self, text: str, ids: Sequence[int], shown: Sequence[int], held: int, before: int | None = None) -> None:
        """More text and ids were sent, of these the last ones `shown` for the first time. `before`: how many characters
        there would be without what came twice."""
        self.text += text
        self.ids += ids
        if self.sees_ids:
            self.seen += shown
        total = (len(self.text) if before is None else before) + held
        if not text and before is None:
            return
        place = Place(len(self.ids), total)
        if len(ids) == 1:
            self.places.append(place)
        elif ids:
            self.uncertain = place

    def _see_logprobs(self, choice: Mapping[str, Any]) -> None:
        marks = choice.get("logprobs")
        if marks and marks.get("tokens"):
            self.offset = marks["text_offset"][-1] + len(marks["tokens"][-1])

    def plan(self, known: Sequence[int] | None) -> Plan:
        """How to go on. `known` are the prompt's ids where the engine did not say them. Raises Unmovable."""
        prompt = self.prompt or known
        if not prompt:
            raise Unmovable("ids")
        place, certain = self._place()
        owed = self.seen[place.ids :]
        if owed and _has_logprobs(self.parsed.fields):
            raise Unmovable("logprobs")
        most = self.parsed.max_tokens
        left = None if most is None else most - place.ids
        if left is not None and left <= 0:
            raise Unmovable("length")
        prompt = [*prompt, *self.ids[: place.ids]]
        return Plan(prompt, place, self.text[place.text :], owed, left, certain)

    def _place(self) -> tuple[Place, bool]:
        """Where to go on from, and whether the text before it is known to be complete."""
        limit = len(self.text) - self._begun_stop()
        place = max(it for it in self.places if it.text <= limit)
        other = self.uncertain
        if other is None or other.ids <= place.ids or other.text != len(self.text) or self.stops:
            # A stop string might be in the prompt, should that come out.
            return place, True
        if _is_certain(self.parsed.fields) and other.ids - place.ids <= UNCERTAIN_IDS:
            return place, True
        return other, False

    def rewind(self, place: Place) -> None:
        """The ids after a place will be drawn anew."""
        del self.ids[place.ids :]
        self.places = [it for it in self.places if it.ids <= place.ids]
        self.uncertain = None

    def usage(self, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Of the whole stream, as an engine counts."""
        prompt, answer = len(self.prompt or ()), len(self.ids)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        if details and details.get("cached_tokens") is not None:
            self.cached = min(details["cached_tokens"], prompt)
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage

    def closing(self) -> bytes:
        """What is left to be sent of a stream that had finished."""
        usage = b""
        if self.parsed.include_usage and not self.counted:
            usage = self.event({"choices": [], "usage": self.usage()})
        return usage + LAST_EVENT

    def event(self, body: Mapping[str, Any]) -> bytes:
        """One of its events."""
        return b"data: " + _encode({**self.head, **body}) + b"\n\n"

    def _begun_stop(self) -> int:
        """How many of the last characters may be a stop string's first."""
        if self.held or not self.stops:
            return 0
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def body_of(plan: Plan, parsed: Parsed, room_tokens: int | None) -> dict[str, Any]:
    """The completion to ask for. `room_tokens` is the model's length, needed where the plan has no limit.

    Raises Unmovable.
    """
    fields = {name: parsed.fields[name] for name in SAMPLING if parsed.fields.get(name) is not None}
    if parsed.kind is Kind.COMPLETION and _has_logprobs(parsed.fields):
        fields["logprobs"] = parsed.fields["logprobs"]
    left = plan.answer_tokens
    if left is None:
        if room_tokens is None:
            raise Unmovable("length")
        left = room_tokens - len(plan.prompt)
    least = parsed.fields.get("min_tokens") or 0
    if least > plan.place.ids:
        fields["min_tokens"] = least - plan.place.ids
    options = {"include_usage": True}
    fields |= {"prompt": plan.prompt, "max_tokens": left, "stream": True, "stream_options": options}
    return {**fields, "return_token_ids": True}


class Translator:
    """What another instance answers, in the words of the first. Changes the story as it goes."""

    def __init__(self, story: Story, plan: Plan) -> None:
        self.done = False
        self._story, self._plan = story, plan
        self._skip, self._owed = plan.skip, list(plan.owed)
        self._own = 0
        """Characters that it said itself."""
        self._sent = len(story.text)
        self._options = story.parsed.fields.get("stream_options") or {}
        story.rewind(plan.place)
        if story.prompt is None:
            story.prompt = plan.prompt[: len(plan.prompt) - plan.place.ids]

    def said(self, event: bytes) -> bytes:
        """A whole event, translated; b'' for none. Raises Unmovable if it says something else than the first did, and
        EngineError; what came before stands."""
        data = payload(event)
        if not data or self.done:
            return b""
        if data == b"[DONE]":
            if not self._story.finish:
                raise EngineError
            self.done = True
            return self._story.closing()
        body = _object(data)
        if body.get("error"):
            raise EngineError
        choices = body.get("choices")
        return self._choice(choices[0]) if choices else self._usage(body.get("usage"))

    def _usage(self, usage: Mapping[str, Any] | None) -> bytes:
        story = self._story
        if not usage:
            return b""
        total = story.usage(usage.get("prompt_tokens_details"))
        if not story.parsed.include_usage:
            return b""
        story.counted = True
        return story.event({"choices": [], "usage": total})

    def _choice(self, choice: dict[str, Any]) -> bytes:
        story = self._story
        text, ids = self._fresh(choice.get("text") or ""), choice.get("token_ids") or []
        again = bool(self._skip)
        new, shown = self._unskipped(text), self._unowed(ids)
        finish = choice.get("finish_reason") or ""
        if finish and (self._skip or self._owed):
            raise Unmovable("differs")
        self._own += len(text)
        before = self._plan.place.text + self._own if text else None
        story.said(new, ids, shown, story.held, before)
        story.finish = finish
        if again and not new and not shown and not finish:
            return b""
        return story.event(self._words(choice, new, shown, finish))

    def _words(self, choice: Mapping[str, Any], text: str, ids: list[int], finish: str) -> dict[str, Any]:
        """A chunk as the first instance would have written it."""
        story = self._story
        out: dict[str, Any] = {"index": 0}
        out |= {"delta": {"content": text}} if story.chat else {"text": text}
        out |= {"logprobs": self._shifted(choice.get("logprobs")), "finish_reason": finish or None}
        if finish or not story.chat:
            out["stop_reason"] = choice.get("stop_reason")
        if not story.chat:
            out["prompt_token_ids"] = None
        out["token_ids"] = ids if story.parsed.wants_ids else None
        if self._options.get("continuous_usage_stats"):
            return {"choices": [out], "usage": story.usage()}
        return {"choices": [out]}

    def _shifted(self, marks: dict[str, Any] | None) -> dict[str, Any] | None:
        """Logprobs with offsets of the whole text."""
        if not marks:
            return None
        return {**marks, "text_offset": [it + self._story.offset for it in marks.get("text_offset") or ()]}

    def _fresh(self, text: str) -> str:
        """The text without the prompt, where the decoder gave it out because its end was not complete."""
        sent = self._story.text
        if self._plan.certain or self._own or len(text) <= len(sent):
            return text
        at = text.rfind(sent, 0, len(text) - 1)
        return text if at < 0 else text[at + len(sent) :]

    def _unskipped(self, text: str) -> str:
        size = min(len(self._skip), len(text))
        if text[:size] != self._skip[:size]:
            raise Unmovable("differs")
        self._skip = self._skip[size:]
        return text[size:]

    def _unowed(self, ids: list[int]) -> list[int]:
        size = min(len(self._owed), len(ids))
        if ids[:size] != self._owed[:size]:
            raise Unmovable("differs")
        self._owed = self._owed[size:]
        return ids[size:]


def _text_of(choice: Mapping[str, Any], *, chat: bool) -> str:
    if not chat:
        return choice.get("text") or ""
    delta = choice.get("delta") or {}
    if any(value for name, value in delta.items() if name not in ("role", "content")):
        raise Unmovable("reasoning")
    if delta.get("content") is None and choice.get("token_ids"):
        # A parser of the engine keeps text back, or drops it.
        raise Unmovable("reasoning")
    return delta.get("content") or ""


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = _decode(data)
    except msgspec.MsgspecError:
        raise EngineError from None
    if not isinstance(body, dict):
        raise EngineError
    return body


def _stops(fields: Mapping[str, Any]) -> list[str]:
    stop = fields.get("stop") or []
    return [stop] if isinstance(stop, str) else [it for it in stop if it]


def _has_logprobs(fields: Mapping[str, Any]) -> bool:
    # A completion's 0 asks for those of the tokens that were drawn.
    return fields.get("logprobs") is not None and fields["logprobs"] is not False


def _includes_stop(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("include_stop_str_in_output"))


def _is_certain(fields: Mapping[str, Any]) -> bool:
    """Whether an engine that is asked twice says the same."""
    return fields.get("temperature") == 0 or fields.get("top_k") == 1
