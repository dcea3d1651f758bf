"""How long a tenant waits tells nothing of what another has sent: Mann-Whitney over pairs, through a whole Conductor
that tokenises itself, to instances whose caches make a difference of milliseconds.

HEADWATER_TEST_TIMING says how many pairs (400 by default); with 2,000 and more the limits are narrower.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import tokenizers

from headwater.conductor.tenants import key_row, new_key
from tests.conductor.faults.hostile import auc, message, told
from tests.conductor.http.rig import looped
from tests.conductor.running import Fleet, running, until

PAIRS = int(os.environ.get("HEADWATER_TEST_TIMING", "400"))
LIMIT_S = 120 + PAIRS // 5
LOW, HIGH = (0.45, 0.55) if PAIRS >= 2000 else (0.40, 0.60)
KEYS = {"alice": new_key(), "bob": new_key()}
BATCH, PROBES, WORDS = 16, 4, 300
"""Prompts that the one sends before the other asks; how many the other asks for at a time; words of each."""
COMPUTE_S = 100e-6
"""A miss takes 30 ms longer than a hit."""
TRIES = 3
TEMPLATE = "{% for it in messages %}{{ it.role }}: {{ it.content }}\n{% endfor %}"


def tiny_model(folder: Path) -> Path:
    """A folder with a tokenizer of words and a template."""
    folder.mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "river": 1, "user": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "chat_template": TEMPLATE})
    )
    return folder


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    tenants = [{"name": name, "keys": [key_row(key)]} for name, key in KEYS.items()]
    with TemporaryDirectory(prefix="hw") as name:
        folder = Path(name)
        model = str(tiny_model(folder / "model"))
        instance = {"model": model, "served_name": "toy"}
        with running(folder, 1, file={"tenants": tenants}, instance=instance, tokens="local") as it:
            for engine in it.engines:
                engine.compute_s = COMPUTE_S
            until(lambda: it.state()["tokens"]["models"]["toy"]["mode"] == "local", it.logs)
            yield it


class Client:
    """One tenant on so many connections, each of which serves whoever comes first."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._port, self._authorization = fleet.port, f"Authorization: Bearer {KEYS[name]}\r\n"
        self._links: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def connect(self, links: int) -> None:
        for _ in range(links):
            self._links.put_nowait(await asyncio.open_connection("127.0.0.1", self._port))

    async def ask(self, text: str) -> float:
        """How long an answer takes."""
        body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 1})
        reader, writer = link = await self._links.get()
        begun_s = time.perf_counter()
        writer.write(message(body.encode(), more=self._authorization))
        answer = await told(reader)
        took_s = time.perf_counter() - begun_s
        assert answer.status == 200
        self._links.put_nowait(link)
        return took_s

    def close(self) -> None:
        while not self._links.empty():
            self._links.get_nowait()[1].close()


def measured(fleet: Fleet, seed: int, first: str, second: str, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds that the second waits for prompts that the first has sent before, and for those that nobody has."""
    hits: list[float] = []
    misses: list[float] = []

    async def run() -> None:
        rng = Random(seed)
        one, other = Client(fleet, first), Client(fleet, second)
        await one.connect(BATCH)
        await other.connect(PROBES)
        while len(hits) < pairs:
            sent, fresh = ([prompt(rng) for _ in range(BATCH)] for _ in range(2))
            await asyncio.gather(*map(one.ask, sent))
            probes = [(text, hits) for text in sent] + [(text, misses) for text in fresh]
            rng.shuffle(probes)
            took = await asyncio.gather(*(other.ask(text) for text, _ in probes))
            for (_, times), took_s in zip(probes, took, strict=True):
                times.append(took_s)
        one.close()
        other.close()

    looped(run(), within_s=LIMIT_S)
    return hits, misses


def prompt(rng: Random) -> str:
    return " ".join(f"r{rng.getrandbits(48):x}" for _ in range(WORDS))


@pytest.mark.alone
@pytest.mark.timeout(LIMIT_S)
def test_waiting_tells_nothing_of_others(fleet: Fleet, seed: int) -> None:
    hits, misses = measured(fleet, seed, "alice", "bob", PAIRS)
    found = auc(hits, misses)
    print(
        f"seed {seed}: {len(hits)} pairs, AUC {found:.3f}, medians {median_ms(hits):.2f} and {median_ms(misses):.2f} ms"
    )
    assert LOW <= found <= HIGH


@pytest.mark.alone
def test_the_measurement_would_tell(fleet: Fleet, seed: int) -> None:
    """With the same salt, as if both were one tenant, it is seen at once."""
    found = []
    for number in range(TRIES):
        hits, misses = measured(fleet, seed + 1 + number, "bob", "bob", 64)
        found.append(auc(hits, misses))
        print(f"AUC {found[-1]:.3f}, medians {median_ms(hits):.2f} and {median_ms(misses):.2f} ms")
        if found[-1] < 0.1:
            break
    assert min(found) < 0.1, "who has sent it before waits less"


def median_ms(times: list[float]) -> float:
    return sorted(times)[len(times) // 2] * 1e3
