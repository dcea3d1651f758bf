"""`headwater cluster` and `headwater node drain` against real nodes and a real directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.core.directory import SILENT_S
from headwater.directory.open import open_directory
from headwater.types import Member, Standing
from tests.clustered import cluster_of, raising, together, valkey
from tests.node.conftest import Rig, eventually
from tests.node.peers import keys, save
from tests.servers import RedisServer

__all__ = ["valkey"]
CHUNKS = 6


@pytest.fixture
def two(valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rig, Rig]]:
    """Two nodes of one cluster, which know each other."""
    with raising(valkey, tmp_path, monkeypatch) as start:
        a, b = (start(name, labels={"zone": name}) for name in "ab")
        together(a, b)
        yield a, b


def flags(rig: Rig) -> list[str]:
    """Which cluster a command is about."""
    return ["--directory", rig.node.config.directory, "--cluster", rig.node.config.cluster]


def test_who_is_there_and_how_fast(two: tuple[Rig, Rig], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    engine = b.session("eb", maps=True)
    eventually(lambda: not engine.match(keys(CHUNKS, "p"), request="r", tokens_s=10).waiting)
    eventually(lambda: read(a, capsys)["members"][1]["report"].get("peers"))
    state = read(a, capsys)
    assert [(it["name"], it["standing"], it["labels"]) for it in state["members"]] == [
        ("a", "serving", {"zone": "a"}),
        ("b", "serving", {"zone": "b"}),
    ]
    link = state["members"][1]["report"]["peers"][0]
    assert (link["name"], link["transport"], link["health"]) == ("a", "tcp", "well")
    assert link["read_bytes"] > 0
    assert main(["cluster", *flags(a)]) == 0
    table = capsys.readouterr().out
    for word in ("2 of 2 nodes serve", "zone=a", "tcp", "well"):
        assert word in table


def read(rig: Rig, capsys: pytest.CaptureFixture[str]) -> dict:
    """What the command says to programs."""
    main(["cluster", *flags(rig), "--json"])
    state = json.loads(capsys.readouterr().out)
    assert isinstance(state, dict)
    return state


def test_a_silent_member_is_shown_and_is_exit_code_1(two: tuple[Rig, Rig], capsys: pytest.CaptureFixture[str]) -> None:
    directory = open_directory(two[0].node.config.directory, two[0].node.config.cluster)
    number = directory.join(Member("gone\x1b[31m", 1, "127.0.0.1:1"), time.monotonic() + 1)
    directory.beat(number, Standing.SERVING, b'{"used_bytes": "nonsense"}', time.monotonic() + 1)
    directory.close()
    eventually(lambda: main(["cluster", *flags(two[0])]) == 1, SILENT_S + 5)
    shown = capsys.readouterr().out
    assert "silent" in shown
    assert "\x1b[31m" not in shown


def test_what_is_lacking_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == 2
    assert "--directory" in capsys.readouterr().err
    assert main(["cluster", "--directory", "redis://user:secret@127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "cannot connect" in said
    assert "secret" not in said
    assert main(["cluster", "top", "--json", "--directory", "redis://127.0.0.1:1"]) == 2


def test_a_node_is_drained(two: tuple[Rig, Rig], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two
    save(a.session("ea", maps=True), keys(CHUNKS, "p"))
    together(a, b)
    assert main(["node", "drain", "--node", a.address, "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["done"], state["left_bytes"]) == (True, 0)
    assert cluster_of(a)["standing"] == "draining"
    # Now nobody is left who takes anything.
    save(b.session("eb", maps=True), keys(CHUNKS, "q"))
    assert main(["node", "drain", "--node", b.address]) == 1
    assert "no other node takes anything" in capsys.readouterr().err
