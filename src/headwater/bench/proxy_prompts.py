"""The requests that proxies are measured with: whole HTTP requests as bytes, made before the clock starts.

Prompts share prefixes as those of a fleet do: the first `shared` of each is one of `families` texts, by Zipf's law; the
rest is its own. The same seed makes the same requests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY = 40_000
"""Ids are drawn below it; the model of `make setup` has 49,152."""
POOL = 1 << 17
"""How many ids, or words, there are to take pieces from."""
_PROSE = (
    "the cache of a fleet holds what was computed before so that nobody computes it again and each request goes where "
    "most of its prefix is unless too many wait there already which is why load counts as much as what is held"
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What to ask: prompts as `text` or as token `ids`, in bodies of about `size` bytes."""

    kind: str = "text"
    size: int = 3600
    shared: float = 0.7
    families: int = 32
    seed: int = 0
    stream: bool = False
    max_tokens: int = 16

    def requests(self, count: int) -> list[bytes]:
        """So many requests, each another prompt."""
        return list(itertools.islice(self.endless(), count))

    def endless(self) -> Iterator[bytes]:
        """Requests without end."""
        draw = random.Random(f"{self.kind} {self.seed}")
        pool = _texts(draw) if self.kind == "text" else _ids(draw)
        options = ',"stream":true,"stream_options":{"include_usage":false}' if self.stream else ""
        start = f'{{"model":"model","max_tokens":{self.max_tokens},"temperature":0{options},"prompt":'
        start += '"' if self.kind == "text" else "["
        end = '"}' if self.kind == "text" else "]}"
        room = max(self.size - len(start) - len(end), 64)
        head = round(room * self.shared)
        families = [_cut(pool, draw, head)[1:] for _ in range(self.families)]
        weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(self.families)))
        tail = room - head - 9
        for index in itertools.count():
            (family,) = draw.choices(families, cum_weights=weights)
            own = f" n{index:07d}" if self.kind == "text" else f",{index % 32768},{index // 32768}"
            prompt = f"{family}{own}{_cut(pool, draw, tail)}"[not family :]
            yield http_request("/v1/completions", f"{start}{prompt}{end}".encode())


def http_request(path: str, body: bytes) -> bytes:
    """A POST as OpenAI's clients send it, but for headers that nobody reads."""
    return (
        b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\naccept: application/json\r\n"
        b"user-agent: headwater-bench\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )


def _texts(draw: random.Random) -> str:
    return "".join(f" {it}" for it in draw.choices(_PROSE.split(), k=POOL))


def _ids(draw: random.Random) -> str:
    return "".join(f",{draw.randrange(1000, VOCABULARY)}" for _ in range(POOL))


def _cut(pool: str, draw: random.Random, length: int) -> str:
    """About `length` characters of whole words or ids, each with its separator before it."""
    if length <= 0:
        return ""
    separator = pool[0]
    begin = pool.index(separator, draw.randrange(len(pool) - 2 * length - 32))
    end = pool.index(separator, begin + max(length, 1))
    return pool[begin:end]
