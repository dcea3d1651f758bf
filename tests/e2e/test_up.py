"""A whole fleet as its users run it: two real vLLM, a node and the Conductor, started once by `headwater up`.

The tests go from the fleet that is well to the one that has lost an instance, and to the end; each can be run alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import pytest

from tests.commands import Ended, ran
from tests.conductor.openai_suite import SUITE, Rig
from tests.conductor.running import Answer
from tests.conductor.tokens.at_engine import FACTS, AtEngine
from tests.e2e.orphans import orphans
from tests.e2e.up_fleet import CHUNK, MODEL, SETTLE_S, START_S, UpFleet, up_fleet
from tests.node.conftest import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 32
WAIT_FOR_RESTART = bool(os.environ.get("HEADWATER_TEST_UP_RESTART"))
"""Else it is only seen that the engine is started again: it takes as long as all of the other tests here."""


@pytest.fixture(scope="module")
def left_before() -> set[str]:
    """What nobody used in /dev/shm before."""
    return orphans()


@pytest.fixture(scope="module")
def fleet(model_dir: Path, left_before: set[str], one_process: None) -> Iterator[UpFleet]:
    with TemporaryDirectory(prefix="hw") as folder, up_fleet(Path(folder), model_dir) as it:
        yield it


@pytest.fixture(scope="module")
def rig(fleet: UpFleet) -> Iterator[Rig]:
    url = f"http://127.0.0.1:{fleet.port}/v1"
    with openai.OpenAI(base_url=url, api_key=fleet.keys["blue"], max_retries=0, timeout=120) as client:
        yield Rig(client, MODEL, False, fleet.running, lambda fact: eventually(fact, SETTLE_S, fleet.said))


@pytest.fixture(scope="module")
def at_engine(fleet: UpFleet, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AtEngine:
    return AtEngine(fleet.ports["two"], MODEL, model_dir, tmp_path_factory.mktemp("tokens"))


def document(name: str, lines: int = 24) -> list[dict[str, Any]]:
    """A chat about something that nobody has seen before; about 12 tokens a line."""
    text = " ".join(f"Gauge {it} of the {name} stands at kilometre {it * 7 % 93}." for it in range(lines))
    return [
        {"role": "system", "content": f"The {name} and its gauges. {text}"},
        {"role": "user", "content": "Where does gauge 5 stand?"},
    ]


def cached(answer: Answer) -> int:
    """What the engine says that it did not compute."""
    return int((answer.json["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def foreseen(answer: Answer) -> dict[str, int]:
    """What the Conductor says that it would not compute, by tier."""
    parts = (it.split("=") for it in answer.headers["x-headwater-reuse"].split(", "))
    return {tier: int(tokens) for tier, tokens in parts}


def instance(answer: Answer) -> str:
    return answer.headers["x-headwater-instance"]


def explained(fleet: UpFleet, answer: Answer) -> dict[str, Any]:
    """What became of a request, once it is over for the Conductor too."""
    path = f"/explain/{answer.headers['x-request-id']}"
    eventually(lambda: "whole_s" in fleet.control(path)["explained"]["took"], SETTLE_S, lambda: fleet.control(path))
    found: dict[str, Any] = fleet.control(path)["explained"]
    return found


def settled(fleet: UpFleet, answer: Answer) -> None:
    """Return when the Conductor knows of everything that this chat has left with its instance, and of the prompt's
    chunks in the node."""
    prompt, said = answer.json["prompt_token_ids"], answer.json["choices"][0]["token_ids"][:-1]
    on_device, on_host = (len(prompt) + len(said)) // BLOCK * BLOCK, len(prompt) // CHUNK * CHUNK

    def knows() -> bool:
        found = fleet.holders([*prompt, *said])[instance(answer)]
        return bool(found["GPU"] >= on_device and found["CPU"] >= on_host)

    eventually(knows, SETTLE_S, lambda: (on_device, on_host, fleet.holders([*prompt, *said]), fleet.said()))


# ---- a fleet that is well


@pytest.mark.parametrize("name", SUITE)
def test_the_official_client(rig: Rig, name: str) -> None:
    SUITE[name](rig)


@pytest.mark.parametrize("name", FACTS)
def test_engines_count_tokens_as_we_do(at_engine: AtEngine, name: str) -> None:
    FACTS[name](at_engine)


def test_reuse_is_as_foreseen_over_the_turns_of_a_chat(fleet: UpFleet) -> None:
    messages = document("Rhine")
    found = []
    for follow_up in ("And gauge 6? <|im_end|>", "日本の川は?", ""):
        answer = fleet.chat(messages, max_tokens=40, return_token_ids=True)
        found.append(cached(answer))
        assert foreseen(answer) == {"device": found[-1]}, found
        told = explained(fleet, answer)
        assert told["counted"] in ("local", "known")
        assert (told["tries"][-1]["cached_tokens"], told["took"]["cached_tokens"]) == (found[-1], found[-1])
        settled(fleet, answer)
        messages = [*messages, answer.json["choices"][0]["message"], {"role": "user", "content": follow_up}]
    assert found[0] == 0 and found[1] > 8 * BLOCK and found[2] > found[1]


def test_answers_are_those_of_an_engine_itself(fleet: UpFleet) -> None:
    for name in ("Danube", "Oder"):
        chat = document(name)
        through = [fleet.chat(chat, max_tokens=16) for _ in range(2)]
        straight = [fleet.straight(it, chat, max_tokens=16) for it in fleet.ports]
        assert len({it.text for it in [*through, *straight]}) == 1, name
        assert through[0].json["usage"]["prompt_tokens"] == straight[0].json["usage"]["prompt_tokens"]
        assert cached(through[1]) > 8 * BLOCK


def test_tenants_share_nothing(fleet: UpFleet) -> None:
    chat = document("Elbe")
    blue, again = fleet.chat(chat), fleet.chat(chat)
    red = fleet.chat(chat, tenant="red")
    assert cached(again) > 8 * BLOCK
    assert (cached(red), foreseen(red)) == (0, {"device": 0})
    assert red.text == blue.text
    assert cached(fleet.chat(chat, tenant="red")) == cached(again)


def command(fleet: UpFleet, capsys: pytest.CaptureFixture[str], *words: str) -> Ended:
    return ran(capsys, *words, "--control", f"http://127.0.0.1:{fleet.control_port}")


def test_commands_tell_of_the_fleet_and_of_a_request(fleet: UpFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.chat(document("Neckar"))
    answer = fleet.chat(document("Neckar"))
    explained(fleet, answer)
    shown = command(fleet, capsys, "fleet")
    assert shown.code == 0
    rows = [line.split() for line in shown.out.splitlines()]
    for name in fleet.ports:
        assert any(row[:5] == [name, "both", "node", MODEL, "serving"] for row in rows), shown.out
    assert any(row[:1] == ["blue"] for row in rows) and "2 of 2 instances" in shown.out
    assert "behind" not in shown.out, "all sources of events are heard"

    shown = command(fleet, capsys, "conductor", "explain", answer.headers["x-request-id"])
    assert shown.code == 0
    assert f"chosen {instance(answer)}:" in shown.out and f"{cached(answer)} were reused" in shown.out
    assert all(any(line.split()[:1] in ([name], [">"]) for line in shown.out.splitlines()) for name in fleet.ports)


# ---- a fleet that has lost an instance


def test_a_killed_engine_takes_no_answer_with_it_and_comes_back(fleet: UpFleet) -> None:
    # Of three chats, two are at the same instance: one is being answered when it dies, the other goes on elsewhere.
    chats = {name: document(name, 45) for name in ("Loire", "Seine", "Rhone")}
    first = {name: fleet.chat(chat, max_tokens=24, return_token_ids=True) for name, chat in chats.items()}
    mid_stream, later = next(
        pair for pair in combinations(chats, 2) if instance(first[pair[0]]) == instance(first[pair[1]])
    )
    doomed = instance(first[later])
    (other,) = fleet.ports.keys() - {doomed}
    for name in (mid_stream, later):
        settled(fleet, first[name])
        chats[name] += [first[name].json["choices"][0]["message"], {"role": "user", "content": "Tell me more."}]

    long = {"max_tokens": 40, "ignore_eos": True}
    undisturbed = fleet.straight(other, chats[mid_stream], **long)
    killed: list[str] = []

    def kill(name: str) -> None:
        killed.append(name)
        fleet.kill(name)

    answer = fleet.streamed(chats[mid_stream], 5, kill, **long)
    assert killed == [doomed], "it went to where its chat was"
    assert answer.text == undisturbed.text
    assert [it["choices"][0]["finish_reason"] for it in answer.events if it["choices"]][-1] == "length"
    tries = explained(fleet, answer)["tries"]
    assert [it["instance"] for it in tries] == [doomed, other] and tries[0]["lost"]

    follow_up = fleet.chat(chats[later], max_tokens=16)
    assert instance(follow_up) == other
    told = foreseen(follow_up)
    assert told["host"] >= 2 * CHUNK, "the node has what the dead one had computed"
    assert sum(told.values()) == cached(follow_up)
    assert follow_up.text == fleet.straight(other, chats[later], max_tokens=16).text

    eventually(lambda: fleet.states(doomed)[-2:] == ["down", "starting"], SETTLE_S, fleet.said)
    assert not fleet.instance(doomed)["alive"] and fleet.instance(other)["alive"]
    if WAIT_FOR_RESTART:
        eventually(lambda: fleet.states(doomed)[-1] == "ready", START_S, fleet.said)
        eventually(lambda: fleet.instance(doomed)["alive"], SETTLE_S, fleet.said)
        answers = [fleet.chat(document(f"river {it}")) for it in range(12)]
        assert {instance(it) for it in answers} == {doomed, other}


# ---- the end


def test_ctrl_c_ends_everything(fleet: UpFleet, left_before: set[str]) -> None:
    assert fleet.interrupt() == 0, fleet.said()
    for name in ("conductor", "one", "two", "node"):
        assert fleet.states(name)[-1] == "ended", name
    assert not fleet.left_behind()
    eventually(lambda: orphans() <= left_before, SETTLE_S, orphans)
