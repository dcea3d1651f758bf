"""How long a tenant waits tells nothing of what another has sent: Mann-Whitney over pairs, through a whole Conductor
that tokenises itself, to instances whose caches make a difference of milliseconds.

HEADWATER_TEST_TIMING says how many pairs (400 by default); with 2,000 and more the limits are narrower.
"""

from __future__ import annotations

import http.client
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
from tests.conductor.faults.hostile import auc
from tests.conductor.running import Fleet, running, until

PAIRS = int(os.environ.get("HEADWATER_TEST_TIMING", "400"))
LOW, HIGH = (0.45, 0.55) if PAIRS >= 2000 else (0.40, 0.60)
KEYS = {"alice": new_key(), "bob": new_key()}
BATCH, WORDS = 16, 300
COMPUTE_S = 25e-6
"""A miss takes 7.5 ms longer than a hit."""
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
        with running(folder, file={"tenants": tenants}, instance=instance, tokens="local") as it:
            for engine in it.engines:
                engine.compute_s = COMPUTE_S
            until(lambda: it.state()["tokens"]["models"]["toy"]["mode"] == "local", it.logs)
            yield it


class Client:
    """One tenant on one connection."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=20)
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[name]}"}

    def ask(self, text: str) -> float:
        """How long an answer took."""
        self.send(text)
        return self.receive()

    def send(self, text: str) -> None:
        body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 1})
        self._begun_s = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, self._headers)

    def receive(self) -> float:
        response = self._connection.getresponse()
        response.read()
        assert response.status == 200
        return time.perf_counter() - self._begun_s

    def close(self) -> None:
        self._connection.close()


def measured(fleet: Fleet, seed: int, first: str, second: str, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds that the second waits for prompts that the first has sent before, and for those that nobody has."""
    rng = Random(seed)
    ones, other = [Client(fleet, first) for _ in range(BATCH)], Client(fleet, second)
    hits: list[float] = []
    misses: list[float] = []
    try:
        while len(hits) < pairs:
            sent, fresh = ([prompt(rng) for _ in range(BATCH)] for _ in range(2))
            for one, text in zip(ones, sent, strict=True):
                one.send(text)
            for one in ones:
                one.receive()
            probes = [(text, hits) for text in sent] + [(text, misses) for text in fresh]
            rng.shuffle(probes)
            for text, times in probes:
                times.append(other.ask(text))
    finally:
        for it in (*ones, other):
            it.close()
    return hits, misses


def prompt(rng: Random) -> str:
    return " ".join(f"r{rng.getrandbits(48):x}" for _ in range(WORDS))


@pytest.mark.alone
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
    hits, misses = measured(fleet, seed + 1, "bob", "bob", 64)
    found = auc(hits, misses)
    print(f"AUC {found:.3f}, medians {median_ms(hits):.2f} and {median_ms(misses):.2f} ms")
    assert found < 0.1, "who has sent it before waits less"


def median_ms(times: list[float]) -> float:
    return sorted(times)[len(times) // 2] * 1e3
