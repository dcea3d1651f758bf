"""The worker's Tokens: each prompt's ids, from wherever they are quickest to be had.

Theory of operation. `known` answers what was given as ids, is remembered or cannot be found. With `find` another prompt
becomes a Search, by the digest of all that its ids depend on; who asks for the same prompt meanwhile joins it. A search
is made in a thread (rendering and tokenising release the loop, the latter also Python's lock), or by asking an engine.
Threads are few and searches in them bounded; what finds no place goes without ids, and is routed by load. A search ends
exactly once: when the thread ends, the engine answers, its time is up, or the service is closed.

Per model: LOCAL until `verify` finds that the engine counts otherwise; then ENGINE, for good.
"""

from __future__ import annotations

import logging
from array import array
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from headwater.conductor.counts import Counts
from headwater.conductor.job import How, Kind, Parsed, Tokenised
from headwater.conductor.tokens.local import Found, cut_given, find_ids
from headwater.conductor.tokens.memo import Memo
from headwater.conductor.tokens.samples import samples
from headwater.conductor.tokens.templates import today
from headwater.conductor.tokens.tokenizers import LocalTokenizer

log = logging.getLogger(__name__)

Done = Callable[[Tokenised], None]
Ask: TypeAlias = "Callable[[Parsed, Callable[[array[int] | None], None]], None]"
"""Asks an engine for the ids of a prompt of this model; the answer (None: it gave none) comes in the loop."""

MEMO_BYTES = 64 << 20
MODELS = 1024
SEARCHES = 1024
"""In threads, at a time: a client waits for at most so many others."""
ASK_S = 5.0
LOAD_S = 60.0
SIZE_CHARS = 8 << 20
"""Of a prompt. Longer ones would keep a thread for seconds."""

PROMPT_FIELDS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents",
    "reasoning_effort", "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
)  # fmt: skip
"""What a prompt's ids depend on, beside its text."""
NONE_GIVEN = [None] * len(PROMPT_FIELDS)

_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class Model:
    """How one model's prompts are found."""

    name: str
    mode: str
    loading: Future[LocalTokenizer] | None = None
    verified: bool | None = None
    """Whether ours are the engine's; None: not compared."""


@dataclass(slots=True)
class Search:
    """A prompt whose ids are being found."""

    parsed: Parsed
    how: How
    started_s: float
    waiting: list[Done] = field(default_factory=list)
    late: TimerHandle | None = None


class TokensService:
    """Made, called and closed in the loop's thread."""

    def __init__(
        self,
        models: Mapping[str, str | Path],
        mode: str,
        counts: Counts,
        loop: AbstractEventLoop,
        *,
        ask: Ask | None = None,
        threads: int = 1,
        searches: int = SEARCHES,
        memo_bytes: int = MEMO_BYTES,
    ) -> None:
        """`models` has each served name's folder; `mode` is local, engine or none. A thread loads the tokenizers."""
        self._counts, self._loop, self._ask = counts, loop, ask
        self._asks_engines = mode != "none"
        self._memo = Memo(memo_bytes)
        self._searches: dict[bytes, Search] = {}
        self._room = searches
        self._closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokens")
        self._models: dict[str, Model] = {}
        folders: dict[Path, Future[LocalTokenizer]] = {}
        for name, folder in models.items():
            self._models[name] = model = Model(name, mode)
            if mode == "local":
                path = Path(folder)
                if path not in folders:
                    folders[path] = self._pool.submit(LocalTokenizer, path)
                model.loading = folders[path]
                model.loading.add_done_callback(partial(self._say_failure, model))

    def known(self, parsed: Parsed, salt: str = "") -> Tokenised | None:
        """A prompt's ids where they are known, or nobody can find them; None: `find` them.

        `salt` keeps tenants apart: nobody is answered faster because another tenant sent the same prompt.
        """
        if parsed.ids is not None:
            ids = parsed.ids if parsed.usual else cut_given(parsed.ids, parsed.fields)
            return Tokenised(ids, How.GIVEN) if ids is not None else nothing("truncate")
        model = self._models.get(parsed.model) or self._without_folder(parsed.model)
        if model is not None and model.mode == "none":
            return OFF
        reason = self._hopeless(parsed, model)
        if model is None or reason:
            return nothing(reason)
        parsed.digest = digest_of(parsed, salt)
        known = self._memo.get(parsed.digest)
        return None if known is None else Tokenised(known, How.KNOWN)

    def find(self, parsed: Parsed, done: Done) -> None:
        """Find what was just not known; `done` is called in the loop, mostly later."""
        digest, model = parsed.digest, self._models[parsed.model]
        search = self._searches.get(digest)
        if search is not None:
            search.waiting.append(done)
        elif model.mode == "engine":
            self._begin(digest, Search(parsed, How.ENGINE, self._loop.time(), [done]))
        elif len(self._searches) >= self._room or self._closed:
            done(nothing("busy"))
        else:
            self._begin(digest, Search(parsed, How.LOCAL, self._loop.time(), [done]))

    def verify(self, name: str, done: Callable[[bool | None], None] | None = None) -> None:
        """Compare our ids of some fixed prompts with the engine's; where they differ, it is the engine that is asked.

        `done` is told whether they are the same; None if nothing could be compared.
        """
        model = self._models[name]
        if model.mode != "local" or self._ask is None:
            if done is not None:
                done(model.verified)
            return
        Verification(self, model, self._ask, done or (lambda same: None)).begin()

    def state(self) -> dict[str, Any]:
        """For `headwater fleet`."""
        models = {it.name: {"mode": it.mode, "verified": it.verified} for it in self._models.values()}
        return {"models": models, "remembered": len(self._memo), "remembered_bytes": self._memo.used_bytes}

    def close(self) -> None:
        """End all searches without ids, and the threads with what they are at."""
        self._closed = True
        for digest in list(self._searches):
            self._end(digest, Found(None, "closed"))
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _hopeless(self, parsed: Parsed, model: Model | None) -> str:
        """In a word why a prompt's ids cannot be found; '' if they may be."""
        if model is None:
            return "no_tokenizer"
        if model.mode == "engine" and self._ask is None:
            return "off"
        if parsed.media:
            return "media"
        if parsed.kind is Kind.CHAT:
            fields = parsed.fields
            variables = fields.get("chat_template_kwargs")
            own = fields.get("chat_template") or (isinstance(variables, dict) and variables.get("chat_template"))
            return "client_template" if own else ""
        return "prompts" if parsed.text is None else ""

    def _begin(self, digest: bytes, search: Search) -> None:
        """Have a search made."""
        self._searches[digest] = search
        if search.how is How.ENGINE:
            assert self._ask is not None
            search.late = self._loop.call_later(ASK_S, self._end, digest, Found(None, "engine"))
            self._ask(search.parsed, lambda ids: self._end_asked(digest, search, ids))
            return
        self._submit(search.parsed, lambda found: self._end(digest, found))

    def _submit(self, parsed: Parsed, then: Callable[[Found], None]) -> None:
        """Find a prompt's ids in a thread; `then` is called in the loop."""
        model = self._models[parsed.model]
        assert model.loading is not None
        made = self._pool.submit(in_thread, model.loading, parsed)
        made.add_done_callback(lambda future: self._from_thread(future, then))

    def _from_thread(self, future: Future[Found], then: Callable[[Found], None]) -> None:
        """Called in the thread, or in the loop if the search was called off."""
        if self._closed or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            # Its text may quote the prompt.
            log.error("tokenising failed: %s", type(error).__name__)
        found = Found(None, "error") if error is not None else future.result()
        self._loop.call_soon_threadsafe(then, found)

    def _end_asked(self, digest: bytes, search: Search, ids: array[int] | None) -> None:
        """The engine has answered, perhaps too late."""
        if self._searches.get(digest) is not search:
            return
        cut = None if ids is None else cut_given(ids, search.parsed.fields)
        if cut is None:
            self._end(digest, Found(None, "engine"))
            return
        # Whether its template asks for the time is not known here.
        self._end(digest, Found(cut if isinstance(cut, array) else array("I", cut), keep=False))

    def _end(self, digest: bytes, found: Found) -> None:
        """A search is over: remember what it found, and tell all who wait."""
        search = self._searches.pop(digest, None)
        if search is None:
            return
        if search.late is not None:
            search.late.cancel()
        seconds = self._loop.time() - search.started_s
        if found.ids is not None and found.keep:
            self._memo.put(digest, found.ids)
        how = How.NONE if found.ids is None else search.how
        result = Tokenised(found.ids, how, found.reason, seconds)
        for done in search.waiting[1:]:
            self._loop.call_soon(done, result)
        search.waiting[0](result)

    def _without_folder(self, name: str) -> Model | None:
        """A model that came while we run: its engines are asked."""
        if self._ask is None or not self._asks_engines or len(self._models) >= MODELS:
            return None
        model = self._models[name] = Model(name, "engine")
        return model

    def _say_failure(self, model: Model, loading: Future[LocalTokenizer]) -> None:
        """Called in the thread: there is no tokenizer where the model is said to be, which may be a name on a hub."""
        if loading.cancelled() or loading.exception() is None:
            return
        log.warning("no tokenizer for model %s, its engines are asked: %s", model.name, loading.exception())
        if self._ask is not None and not self._closed:
            self._loop.call_soon_threadsafe(self._ask_engines, model)

    def _ask_engines(self, model: Model) -> None:
        model.mode = "engine"

    def differs(self, model: Model) -> None:
        """Ours are not the engine's: from now on it is asked."""
        model.mode = "engine"
        self._memo.clear()
        self._counts.add("tokens_mismatch", model.name)
        log.warning("model %s: the engine tokenises otherwise than we do; it will be asked for token ids", model.name)


class Verification:
    """Compares sample after sample, both ways at once."""

    def __init__(self, service: TokensService, model: Model, ask: Ask, done: Callable[[bool | None], None]) -> None:
        self._service, self._model, self._ask, self._done = service, model, ask, done
        self._left = samples(model.name)
        self._same: bool | None = None

    def begin(self) -> None:
        """Compare the next sample, or end."""
        if not self._left or self._same is False:
            self._model.verified = self._same
            if self._same is False:
                self._service.differs(self._model)
            self._done(self._same)
            return
        parsed = self._left.pop()
        answers: dict[str, array[int] | None] = {}

        def come(which: str, ids: array[int] | None) -> None:
            if which in answers:
                return
            answers[which] = ids
            if len(answers) == 2:
                late.cancel()
                self._compare(answers["ours"], answers["theirs"])

        late = self._service._loop.call_later(ASK_S, lambda: come("theirs", None))
        self._service._submit(parsed, lambda found: come("ours", found.ids))
        self._ask(parsed, lambda ids: come("theirs", ids))

    def _compare(self, ours: array[int] | None, theirs: array[int] | None) -> None:
        # A template that refuses a sample has both refuse it, or us go without ids: neither makes wrong ones.
        if ours is not None and theirs is not None:
            self._same = ours == theirs
        self.begin()


def in_thread(loading: Future[LocalTokenizer], parsed: Parsed) -> Found:
    """Find a prompt's ids, once the model's tokenizer is there."""
    if loading.exception(LOAD_S) is not None:
        return Found(None, "no_tokenizer")
    return find_ids(loading.result(), parsed, SIZE_CHARS)


def nothing(reason: str) -> Tokenised:
    """No ids."""
    return Tokenised(None, How.NONE, reason)


OFF = nothing("off")


def digest_of(parsed: Parsed, salt: str) -> bytes:
    """Of all that a prompt's ids depend on, of whose it is, and of the day, which templates may tell."""
    given = NONE_GIVEN if parsed.usual else list(map(parsed.fields.get, PROMPT_FIELDS))
    return sha256(_encoder.encode([parsed.model, salt, parsed.salt, parsed.text, today(), given])).digest()
