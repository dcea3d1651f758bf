"""Prefill and decode apart, with real vLLM: one computes prompts, the other answers, a node between them; started once
by `headwater up`.

The tests go from the fleet that is well to the one that has lost an instance; each can be run alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest

from headwater.conductor.patience import SPARE_S
from tests.commands import ran
from tests.conductor.running import Answer, asked
from tests.e2e.up_fleet import CHUNK, SETTLE_S, START_S, UpFleet, up_fleet
from tests.node.conftest import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 32
BRIEF = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
GIVEN_UP_S = 90.0
"""Engines are slow while a machine is busy."""
WAIT_FOR_RESTART = bool(os.environ.get("HEADWATER_TEST_UP_RESTART"))
"""Else it is only seen that the engine is started again; with it, the other one is killed, too, in a stream."""


@pytest.fixture(scope="module")
def fleet(model_dir: Path, one_process: None) -> Iterator[UpFleet]:
    instances = {"first": {"role": "prefill"}, "second": {"role": "decode"}}
    with TemporaryDirectory(prefix="hw") as folder, up_fleet(Path(folder), model_dir, instances) as it:
        yield it


def document(name: str, lines: int) -> list[dict[str, Any]]:
    """A chat about something that nobody has seen before; about 16 tokens a line."""
    text = " ".join(f"Gauge {it} of the {name} stands at kilometre {it * 7 % 93}." for it in range(lines))
    return [
        {"role": "system", "content": f"The {name} and its gauges. {text}"},
        {"role": "user", "content": "Where does gauge 5 stand?"},
    ]


def metrics(port: int, *names: str) -> dict[str, float]:
    """Of a server, each summed over its labels; a label may be a part of the name."""
    lines = asked(port, "GET", "/metrics", None, {}).body.decode().splitlines()
    found = dict.fromkeys(names, 0.0)
    for line in lines:
        for name in names:
            if line.startswith(name) and line[len(name)] in "{ ":
                found[name] += float(line.rsplit(" ", 1)[1])
    return found


@dataclass
class Sums:
    """What both engines have done so far."""

    answered: dict[str, float]
    """Tokens generated."""
    fetched: dict[str, float]
    """Tokens that the plug-in brought."""

    def __sub__(self, other: Sums) -> Sums:
        return Sums(
            {name: it - other.answered[name] for name, it in self.answered.items()},
            {name: it - other.fetched[name] for name, it in self.fetched.items()},
        )


def sums(fleet: UpFleet) -> Sums:
    names = "vllm:generation_tokens_total", "vllm:external_prefix_cache_hits_total"
    found = {name: metrics(port, *names) for name, port in fleet.ports.items()}
    return Sums(*({name: it[which] for name, it in found.items()} for which in names))


def usage(answer: Answer) -> tuple[int, int, int]:
    """Tokens of the prompt, those of them that the engine which answered did not compute, and tokens of the answer."""
    found = answer.events[-1]["usage"] if _is_stream(answer) else answer.json["usage"]
    details = found["prompt_tokens_details"] or {}
    return found["prompt_tokens"], int(details.get("cached_tokens") or 0), found["completion_tokens"]


def explained(fleet: UpFleet, answer: Answer) -> dict[str, Any]:
    """What became of a request, once it is over for the Conductor too."""
    path = f"/explain/{answer.headers['x-request-id']}"
    eventually(lambda: "whole_s" in fleet.control(path)["explained"]["took"], SETTLE_S, lambda: fleet.control(path))
    found: dict[str, Any] = fleet.control(path)["explained"]
    return found


def counted(fleet: UpFleet, name: str) -> dict[str, float]:
    """A counter of the Conductor's, by its label."""
    lines = asked(fleet.control_port, "GET", "/metrics", None, {}).body.decode().splitlines()
    start = f"headwater_conductor_{name}"
    rows = [line.rsplit(" ", 1) for line in lines if line.startswith(start)]
    return {head.partition('"')[2].rpartition('"')[0]: float(value) for head, value in rows}


def names(answer: Answer) -> tuple[str | None, str]:
    """Who computed the prompt, and who answered."""
    return answer.headers.get("x-headwater-prefill"), answer.headers["x-headwater-instance"]


def settled(fleet: UpFleet, ids: list[int], prompt: int) -> None:
    """Return when the Conductor knows that the second one has these tokens, and the node the prompt's chunks."""
    on_device, on_host = len(ids) // BLOCK * BLOCK, prompt // CHUNK * CHUNK

    def knows() -> bool:
        found = fleet.holders(ids)["second"]
        return bool(found["GPU"] >= on_device and found["CPU"] >= on_host)

    eventually(knows, SETTLE_S, lambda: (on_device, on_host, fleet.holders(ids)))


# ---- a fleet that is well


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_are_those_of_one_engine_and_the_prompt_is_computed_once(fleet: UpFleet, stream: bool) -> None:
    chat = document("Volga" if stream else "Danube", 40)
    before, handed = sums(fleet), counted(fleet, "handoffs_total")
    answer = fleet.chat(chat, max_tokens=16, ignore_eos=True, **_streamed(stream))
    did = sums(fleet) - before
    prompt, cached, said = usage(answer)
    assert names(answer) == ("first", "second")
    assert (prompt > 2 * CHUNK, said) == (True, 16)
    assert did.answered == {"first": 1, "second": 16}
    assert cached == prompt // CHUNK * CHUNK, "the node has whole chunks, and all of them were found"
    assert did.fetched == {"first": 0, "second": cached}
    now = counted(fleet, "handoffs_total")
    assert now.get("stored", 0) == handed.get("stored", 0) + 1 and now.get("late", 0) == handed.get("late", 0), now

    told = explained(fleet, answer)
    (only,) = told["tries"]
    assert (only["instance"], only["decode"]) == ("first", "second")
    assert told["took"]["cached_tokens"] == 0, "nothing was there before"
    assert 0 < told["took"]["prefilled_s"] < told["took"]["whole_s"]
    for name in fleet.ports:
        assert fleet.straight(name, chat, max_tokens=16, ignore_eos=True).text == answer.text


def test_prompts_of_which_nothing_is_handed_over_are_computed_where_they_are_answered(fleet: UpFleet) -> None:
    for chat, least in ((BRIEF, 1), (document("Aare", 12), BLOCK)):
        before = sums(fleet)
        answer = fleet.chat(chat, max_tokens=6)
        prompt, cached, _ = usage(answer)
        assert (least <= prompt < CHUNK, cached, names(answer)) == (True, 0, (None, "second"))
        assert (sums(fleet) - before).answered["first"] == 0
        assert answer.text == fleet.straight("second", chat, max_tokens=6).text
    assert usage(fleet.chat(BRIEF))[0] < BLOCK


def test_over_the_turns_of_a_chat_each_finds_what_was_there_before(fleet: UpFleet) -> None:
    messages, known, found = document("Rhine", 36), 0, []
    long = " ".join(f"Lock {it} lies at kilometre {it * 5 % 89}." for it in range(40))
    for follow_up in ("And gauge 6?", f"{long} And lock 7?", ""):
        answer = fleet.chat(messages, max_tokens=40, return_token_ids=True)
        prompt, cached, said = usage(answer)
        told = explained(fleet, answer)
        found.append((names(answer)[0], known, prompt, cached, told["took"]["cached_tokens"]))
        assert answer.text == fleet.straight("first", messages, max_tokens=40).text
        known = prompt + said - 1
        settled(fleet, [*answer.json["prompt_token_ids"], *answer.json["choices"][0]["token_ids"][:-1]], prompt)
        messages = [*messages, answer.json["choices"][0]["message"], {"role": "user", "content": follow_up}]
    one, two, three = found
    assert one[0] == three[0] == "first" and two[0] is None, found
    assert two[3] >= two[1] // BLOCK * BLOCK, "the second one's own"
    assert three[3] >= three[2] // CHUNK * CHUNK > three[1], "handed over"
    assert three[4] >= one[2] // BLOCK * BLOCK, "the first one's own, of the first turn"


def test_explain_names_both(fleet: UpFleet, capsys: pytest.CaptureFixture[str]) -> None:
    answer = fleet.chat(document("Elbe", 36))
    assert explained(fleet, answer)["took"]["found_tokens"] == usage(answer)[1] >= 2 * CHUNK
    words = ("conductor", "explain", answer.headers["x-request-id"])
    shown = ran(capsys, *words, "--control", f"http://127.0.0.1:{fleet.control_port}")
    assert shown.code == 0 and "chosen first, to decode at second:" in shown.out
    assert f"{usage(answer)[1]} were found by the one that answered" in shown.out


# ---- a prefill instance that hangs, and is killed


def test_a_prefill_instance_that_stops_is_given_up(fleet: UpFleet) -> None:
    for name in ("Inn", "Enns", "Drau"):  # how fast it is
        assert names(fleet.chat(document(name, 20))) == ("first", "second")
    chat, lost = document("Mur", 20), counted(fleet, "prefill_lost_total")
    fleet.kill("first", signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        answer = fleet.chat(chat, max_tokens=16)
        took_s = time.monotonic() - began_s
        print(f"{took_s:.1f} s")
        assert names(answer) == ("first", "second") and SPARE_S < took_s < GIVEN_UP_S
        assert counted(fleet, "prefill_lost_total").get("late", 0) == lost.get("late", 0) + 1
        assert answer.text == fleet.straight("second", chat, max_tokens=16).text
        assert names(fleet.chat(document("Raab", 20))) == (None, "second")
    finally:
        fleet.kill("first", signal.SIGCONT)
    again = count()
    eventually(
        lambda: names(fleet.chat(document(f"brook {next(again)}", 20))) == ("first", "second"), SETTLE_S, fleet.said
    )


def test_a_prefill_instance_that_is_killed_loses_nothing(fleet: UpFleet) -> None:
    chat = document("Loire", 60)
    answers: list[Answer] = []
    lost = counted(fleet, "prefill_lost_total")
    asking = Thread(target=lambda: answers.append(fleet.chat(chat, max_tokens=16, stream=True)), daemon=True)
    asking.start()
    eventually(lambda: fleet.instance("first")["waiting_requests"], SETTLE_S, fleet.said)
    fleet.kill("first")
    asking.join(120)
    (answer,) = answers
    assert sum(counted(fleet, "prefill_lost_total").values()) == sum(lost.values()) + 1
    assert names(answer) == ("first", "second")
    assert answer.text == fleet.straight("second", chat, max_tokens=16).text

    chat = document("Seine", 30)
    answer = fleet.chat(chat, max_tokens=16)
    assert names(answer) == (None, "second"), "one does both while the other is away"
    assert answer.text == fleet.straight("second", chat, max_tokens=16).text

    eventually(lambda: fleet.states("first")[-2:] == ["down", "starting"], SETTLE_S, fleet.said)
    if WAIT_FOR_RESTART:
        eventually(lambda: fleet.states("first")[-1] == "ready", START_S, fleet.said)
        again = count()
        eventually(
            lambda: names(fleet.chat(document(f"beck {next(again)}", 30))) == ("first", "second"), SETTLE_S, fleet.said
        )
        long, chat = {"max_tokens": 40, "ignore_eos": True}, document("Rhone", 30)
        undisturbed = fleet.straight("first", chat, **long)
        answer = fleet.streamed(chat, 5, fleet.kill, **long)
        assert names(answer) == ("first", "second") and answer.text == undisturbed.text, "it went on at the first"
        tries = explained(fleet, answer)["tries"]
        assert [(it["instance"], it["decode"]) for it in tries] == [("first", "second"), ("first", "first")]


def _streamed(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


def _is_stream(answer: Answer) -> bool:
    return answer.headers["content-type"].startswith("text/event-stream")
