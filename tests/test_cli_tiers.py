"""The operator's commands against a real node with a DISK tier and a REMOTE one, served by a thread of the test."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headwater.cli.explain import request_report
from headwater.cli.prompts import Known, prompt_tokens
from headwater.cli.reasons import EVENTS, Found, differences, last_event
from headwater.cli.tiers import report, troubles
from headwater.client import Client
from headwater.conductor.counts import Counts
from headwater.conductor.events.errands import Errands
from headwater.conductor.events.lines import by_socket
from headwater.config import NodeConfig
from headwater.errors import UnavailableError
from headwater.node.client import fetch_status
from headwater.types import ChunkKey, KVGroup, KVLayout, Namespace, Outcome
from tests.commands import Command, ran
from tests.node.conftest import Rig, eventually
from tests.servers import free_port

LAYOUT = KVLayout(32, (KVGroup(16, 4096, (2,)),))
SPACE = Namespace("m" * 32, "float16", "cpu.avx2.nhd", LAYOUT.fingerprint(), tenant="blue")
OTHER = replace(SPACE, kv_dtype="float32", tenant="red")
TOKENS = list(range(320))
IDS = ",".join(map(str, TOKENS))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    config = NodeConfig(
        socket=f"unix:{tmp_path}/node.sock",
        host_memory=16 << 20,
        slab=1 << 20,
        disk=f"{tmp_path}/disk:64MiB?admission=all",
        disk_reserve=0,
        remotes=(f"file://{tmp_path}/remote",),
        metrics="off",
        drain_s=0.2,
    )
    rig = Rig(config)
    yield rig
    rig.close()


@pytest.fixture
def command(rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line in this process, against the rig."""
    for name in [it for it in os.environ if it.startswith("HEADWATER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADWATER_NODE_SOCKET", rig.address)

    return partial(ran, capsys)


def save(rig: Rig, namespace: Namespace = SPACE, tokens: list[int] = TOKENS) -> list[ChunkKey]:
    """A prompt's chunks, written into the node."""
    with Client(rig.address, namespace, LAYOUT) as cache:
        keys = cache.keys(tokens)
        with cache.save(keys) as saving:
            for position in saving.positions:
                saving.part(position)[:] = position
        return keys


def everywhere(command: Command, count: int = 10) -> None:
    """Wait until all has gone down."""

    def done() -> bool:
        tiers = {it["tier"]: it for it in command("tiers", "--json").json["tiers"]}
        return tiers["disk"]["written_chunks"] >= count and tiers["remote"]["written_chunks"] >= count

    eventually(done, 10.0, lambda: command("tiers").out)


def where(command: Command, *arguments: str) -> list[list[str]]:
    """The tiers that have each chunk of the prompt in SPACE."""
    answer = command("explain", "--tokens", IDS, "--tenant", "blue", "--json", *arguments).json
    (space,) = answer["namespaces"]
    return [it["where"] for it in space["chunks"]]


# ---------------------------------------------------------------- tiers


def test_tiers_tells_of_each_tier(rig: Rig, command: Command, tmp_path: Path) -> None:
    save(rig)
    everywhere(command)
    state = command("tiers", "--json").json
    host, disk, remote = state["tiers"]
    assert (host["tier"], disk["tier"], remote["tier"]) == ("host", "disk", "remote")
    assert disk["written_chunks"] == remote["written_chunks"] == 10
    assert disk["write_bytes_s"] > 0
    out = command("tiers").out
    assert re.search(r"^host +well +16 MiB +160 KiB \(1\.0 %\)", out, re.MULTILINE)
    assert re.search(rf"^file://{tmp_path}/remote +well ", out, re.MULTILINE)
    assert re.search(r"^disk +well +\d+ MiB .* ms, .*/s .* 0 \+ 0 B +0 B +160 KiB +0 +none$", out, re.MULTILINE)
    assert "no request has been brought anything" in out
    out = command("status").out
    assert re.search(r"^below +disk 200 KiB well, file://\S+/remote .* well", out, re.MULTILINE)


def test_a_sick_or_full_tier_is_told_with_its_errors() -> None:
    level = {
        "name": "redis://kv:6379",
        "tier": "remote",
        "health": "sick",
        "full": True,
        "capacity_bytes": None,
        "used_bytes": None,
        "lookup_tokens": 1000,
        "hit_tokens": 250,
        "read_latency_s": 0.0004,
        "read_bytes_s": 2 << 30,
        "write_latency_s": None,
        "write_bytes_s": None,
        "queued_chunks": 1234,
        "moving_bytes": 3 << 20,
        "read_bytes": 0,
        "written_bytes": 5 << 30,
        "dropped_chunks": 7,
        "errors": {"corrupt": 2, "failed": 30, "missing": 9, "full": 0},
    }
    fetches = {"begun": 40, "cut": 3, "estimates": 9, "estimate_error": 0.125, "estimate_bias": 0.0}
    page = io.StringIO()
    Console(width=200, file=page).print(report({"tiers": [level], "fetches": fetches}))
    out = page.getvalue()
    row = next(line for line in out.splitlines() if line.startswith("redis"))
    cells = re.split(r" {2,}", row.strip())
    speeds, moved = ["0.4 ms, 2 GiB/s", "-"], ["1,234 + 3 MiB", "0 B", "5 GiB", "7"]
    assert cells == ["redis://kv:6379", "sick, full", "-", "-", "25.0 %", *speeds, *moved, "2 corrupt, 30 failed"]
    assert "waited for lower tiers: 40, 3 cut short; estimates were off by 12 % on average" in out
    assert "\nredis://kv:6379: sick, full\n" in out, "nobody knows why"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"health": "well"}, []),
        ({"health": "well", "last_error": {"reason": "an old one", "seconds_ago": 5.0}}, []),
        (
            {"health": "sick", "last_error": {"reason": "usage: it\x1b is gone", "seconds_ago": 5.0}},
            ["sick (usage: it? is gone, 5 s ago)"],
        ),
        ({"health": "probing", "full": True, "last_error": None}, ["probing", "full"]),
        (
            {"health": "well", "journal_broken": True, "journal_failures": 1200, "journal_forgotten_chunks": 0},
            [
                "its journal is damaged, the next start looks at every slot instead",
                "1,200 writes of its journal failed",
            ],
        ),
        (
            {"health": "well", "journal_broken": False, "journal_failures": 0, "journal_forgotten_chunks": 7},
            ["7 chunks are not in its journal and will not outlive the node"],
        ),
    ],
)
def test_what_is_wrong_with_a_tier_is_said_in_words(state: dict[str, Any], said: list[str]) -> None:
    assert troubles(state) == said


def test_a_remote_that_is_away_is_trouble_in_every_answer(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a password, which nobody is told."""
    port = free_port()
    remote = f"redis://someone:s3cret@127.0.0.1:{port}"
    rig = Rig(NodeConfig(socket=f"unix:{tmp_path}/away.sock", host_memory=16 << 20, remotes=(remote,), metrics="off"))
    try:
        monkeypatch.setenv("HEADWATER_NODE_SOCKET", rig.address)
        save(rig)
        eventually(lambda: fetch_status(rig.address)["tiers"][1]["health"] != "well")  # type: ignore[index]
        name = f"redis://127.0.0.1:{port}"
        reason = r"(sick|probing) \(\w+: .*Connection refused.*, [\d.e-]+ s ago\)"
        assert re.search(rf"^trouble +{name} {reason}$", command("status").out, re.MULTILINE)
        assert re.search(rf"^{name}: {reason}$", command("tiers").out, re.MULTILINE)
        assert "s3cret" not in command("tiers").out + command("tiers", "--json").out + command("status", "--json").out
        done = command("explain", "--tokens", "1," * 319 + "1")
        assert re.search(rf"^0-9 .* {name}\? +never stored here.*; {name} did not answer$", done.out, re.MULTILINE)
        (space,) = command("explain", "--tokens", IDS, "--json").json["namespaces"]
        assert {(tuple(it["where"]), tuple(it["remotes"])) for it in space["chunks"]} == {(("host",), (None,))}
        assert {it["why"] for it in space["chunks"]} == {""}
    finally:
        rig.close()


# ---------------------------------------------------------------- evict, clear, prefetch, pin


def test_evicting_leaves_lower_tiers_and_is_idempotent(rig: Rig, command: Command) -> None:
    save(rig)
    save(rig, OTHER)
    everywhere(command, 20)
    done = command("evict", "--tokens", IDS, "--tenant", "blue", "--json")
    assert (done.code, done.json["total"]) == (0, {"keys": 10, "deleted": 10, "kept": 0})
    assert all("host" not in it and "disk" in it for it in where(command))
    again = command("evict", "--tokens", IDS, "--tenant", "blue")
    assert (again.code, again.out) == (0, "evict: 0 deleted (10 keys in 1 namespace)\n")
    with Client(rig.address, OTHER, LAYOUT) as cache:
        assert cache.match(cache.keys(TOKENS)) == 10, "another tenant's"


def test_evicting_below_and_by_key(rig: Rig, command: Command) -> None:
    keys = save(rig)
    everywhere(command)
    assert command("evict", "--key", keys[7].hex(), "--key", keys[7].hex().upper(), "--below").code == 0
    found = where(command)
    assert all("host" in it and "disk" in it for it in found[:7])
    assert all("host" not in it and "disk" not in it for it in found[7:]), "what hung on it is gone too"


def test_clear_takes_all_tiers(rig: Rig, command: Command) -> None:
    save(rig)
    save(rig, OTHER)
    everywhere(command, 20)
    name = next(it["namespace"] for it in fetch_status(rig.address)["namespaces"] if it["tenant"] == "blue")
    assert command("clear", "--namespace", name[:5], "--json").json["total"]["deleted"] >= 10
    assert all(not {"host", "disk"} & set(it) for it in where(command))
    with Client(rig.address, OTHER, LAYOUT) as cache:
        assert cache.match(cache.keys(TOKENS)) == 10
    assert command("clear", "--all").code == 0
    assert re.match(r"clear: 0 deleted \(all in 2 namespaces\)", command("clear", "--all").out)
    assert command("tiers", "--json").json["tiers"][0]["used_bytes"] == 0


def test_clear_ends_pins_and_says_so(rig: Rig, command: Command) -> None:
    save(rig)
    everywhere(command)
    command("pin", "--tokens", IDS, "--ttl", "1h", "--owner", "search")
    assert re.match(r"clear: \d+ deleted, 1 pins ended \(all in 1 namespace\)", command("clear", "--all").out)
    assert command("clear", "--all", "--json").json["total"] == {"keys": 0, "deleted": 0, "kept": 0, "pins": 0}


def test_clear_says_what_is_pending(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    save(rig)
    everywhere(command)

    def broken(*arguments: object) -> int:
        raise UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(type(rig.node.tiering._carriers[1].tier), "clear", broken)
        done = command("clear", "--all", "--wait", "100ms")
        assert done.code == 1
        assert re.search(r"^clear: not yet in file://\S+; the node goes on trying", done.out, re.MULTILINE)
        asked = command("clear", "--all", "--wait", "0", "--json")
        assert (asked.code, asked.json["ok"], len(asked.json["namespaces"][0]["pending"])) == (1, False, 1)
        assert all(not {"host", "disk"} & set(it) for it in where(command))
    assert command("clear", "--all", "--wait", "30s").code == 0
    with Client(rig.address, SPACE, LAYOUT) as cache:
        with cache.load(cache.keys(TOKENS), wait_s=1.0) as held:
            assert held.chunks == 0
        assert cache.clear(wait_s=10.0).pending == ()


def test_prefetch_brings_back_what_was_evicted(rig: Rig, command: Command) -> None:
    save(rig)
    everywhere(command)
    command("evict", "--tokens", IDS)
    done = command("prefetch", "--tokens", IDS, "--json")
    assert (done.code, done.json["total"]["chunks"]) == (0, 10)
    eventually(lambda: all("host" in it for it in where(command)), 10.0)
    again = command("prefetch", "--tokens", IDS).out
    assert again == "prefetch: 0 chunks were not in host memory and are looked for below (10 keys in 1 namespace)\n"


def test_pins_keep_chunks_until_released(rig: Rig, command: Command) -> None:
    save(rig)
    pinned = command("pin", "--tokens", IDS, "--ttl", "1h", "--owner", "search", "--json")
    assert (pinned.code, pinned.json["total"]) == (0, {"keys": 10, "pinned": 10, "released": 0})
    kept = "evict: 0 deleted, 10 kept, since engines or pins use them (10 keys in 1 namespace)\n"
    assert command("evict", "--tokens", IDS).out == kept
    assert all("host" in it for it in where(command))
    (pin,) = command("pin", "--list", "--json").json["pins"]
    assert (pin["pinner"], pin["tenant"], pin["chunks"], pin["bytes"]) == ("search", "blue", 10, 160 << 10)
    row = rf"^search +{pin['namespace'][:12]} +blue +10 +160 KiB +59 min \d+ s$"
    assert re.search(row, command("pin", "--list").out, re.MULTILINE)
    assert command("pin", "--release", "--owner", "others", "--json").json["total"]["released"] == 0
    command("evict", "--tokens", IDS)
    assert all("host" in it for it in where(command))
    assert command("pin", "--release", "--owner", "search", "--json").json["total"]["released"] == 1
    assert command("pin", "--release", "--owner", "search", "--json").json["total"]["released"] == 0
    assert command("pin", "--list").out == "nothing is pinned\n"
    for more in (["--owner", "x"], ["--release"], ["--ttl", "1h"], ["--tokens", IDS]):
        refused = command("pin", "--list", *more)
        assert (refused.code, "leave the other options out" in refused.err) == (2, True)
    command("evict", "--tokens", IDS)
    assert all("host" not in it for it in where(command))


def test_a_node_without_namespaces_has_nothing_to_do(command: Command) -> None:
    done = command("evict", "--tokens", IDS)
    assert (done.code, done.out) == (0, "evict: the node knows no namespace yet, so there is nothing to do\n")
    assert command("clear", "--all", "--json").json == {"ok": True, "namespaces": [], "total": {}}
    assert command("explain", "--tokens", IDS).code == 1


def test_a_conductor_has_chunks_brought_up(rig: Rig, command: Command) -> None:
    keys = save(rig)
    everywhere(command)
    command("evict", "--tokens", IDS)
    assert all("host" not in it for it in where(command))

    async def order() -> Counts:
        counts = Counts()
        errands = Errands(by_socket(rig.address), counts)
        errands.prefetch(SPACE.root(), keys[:4])
        errands.prefetch(bytes(32), keys)  # a namespace that nobody has
        async with asyncio.timeout(10):
            while len([it for it in where(command) if "host" in it]) < 4 or not counts.numbers:
                await asyncio.sleep(0)
        await errands.close()
        return counts

    counts = asyncio.run(order())
    assert [("host" in it) for it in where(command)] == [True] * 4 + [False] * 6
    assert counts.numbers == {("prefetches", "refused"): 1}


# ---------------------------------------------------------------- explain


def test_explain_says_where_each_chunk_is_and_why_not(rig: Rig, command: Command) -> None:
    save(rig, SPACE, TOKENS[:160])
    everywhere(command, 5)
    done = command("explain", IDS)
    assert done.code == 0
    assert "10 chunks of 32 tokens, 5 of them held, 5 from the start without a gap" in done.out
    assert re.search(r"^0-4 +0-159 +[0-9a-f]{12} +host, disk, file://\S+ *$", done.out, re.MULTILINE)
    assert re.search(r"^5-9 +160-319 +[0-9a-f]{12} +- +never stored here", done.out, re.MULTILINE)


def test_explain_remembers_what_became_of_chunks(rig: Rig, command: Command) -> None:
    keys = save(rig, SPACE, TOKENS[:160])
    everywhere(command, 5)
    assert command("evict", "--key", keys[0].hex()).code == 0

    def explained() -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = command("explain", "--tokens", IDS, "--json").json["namespaces"][0]["chunks"]
        return chunks

    # Those that build on it go when no copy to a lower tier reads them any more: that must not come after the note.
    eventually(lambda: all(it["last"] for it in explained()[:5]), 10.0, lambda: command("explain", "--tokens", IDS).out)
    rig.node.tiering.history.note(keys[1], "disk", "corrupt", rig.clock.now())
    chunks = explained()
    assert [it["last"] and (it["last"]["event"], it["last"]["tier"]) for it in chunks[:3]] == [
        ("deleted", "host"),
        ("corrupt", "disk"),
        ("deleted", "host"),
    ]
    assert [it["first_token"] for it in chunks] == list(range(0, 320, 32))
    assert {it["why"] for it in chunks[:5]} == {""}, "it is not gone: lower tiers have it"
    assert {it["why"][:17] for it in chunks[5:]} == {"never stored here"}


def test_explain_says_why_chunks_are_gone(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(NodeConfig(socket=f"unix:{tmp_path}/alone.sock", host_memory=16 << 20, slab=1 << 20, metrics="off"))
    try:
        monkeypatch.setenv("HEADWATER_NODE_SOCKET", rig.address)
        save(rig)
        assert command("clear", "--tokens", IDS).out == "clear: 10 deleted (10 keys in 1 namespace)\n"
        done = command("explain", "--tokens", IDS)
        assert done.code == 0
        assert re.search(r"^0-9 +0-319 +\w{12} +- +deleted from host [\d.e-]+ s ago *$", done.out, re.MULTILINE)
    finally:
        rig.close()


def test_explain_names_the_fields_that_keep_namespaces_apart(rig: Rig, command: Command) -> None:
    save(rig, OTHER)
    save(rig, SPACE, [7] * 64)
    out = command("explain", "--tokens", IDS, "--tenant", "blue").out
    assert (
        "has these tokens and differs in kv_dtype (float16 here, float32 there), tenant (blue here, red there)" in out
    )
    (space,) = command("explain", "--tokens", IDS, "--tenant", "red", "--json").json["namespaces"]
    assert (space["held_prefix_tokens"], space["record"]["kv_dtype"]) == (320, "float32")
    out = command("explain", "--tokens", IDS, "--tenant", "red", "--salt", "s3cret").out
    assert "another part of this namespace has these tokens and differs in salt" in out
    assert "s3cret" not in out
    out = command("explain", "--tokens", IDS, "--tenant", "red", "--adapter", "ab12").out
    assert "differs in adapter (ab12 here, none there)" in out


def test_explain_by_key(rig: Rig, command: Command) -> None:
    keys = save(rig)
    out = command("explain", "--key", f"{keys[3].hex()},{'0' * 32}").out
    assert re.search(rf"^0 +- +{keys[3].hex()[:12]} +host", out, re.MULTILINE)
    assert re.search(r"^1 +- +000000000000 +- +never stored here", out, re.MULTILINE)
    assert "2 chunks of 32 tokens, 1 of them held\n" in out


def test_explain_a_request(rig: Rig, command: Command) -> None:
    keys = save(rig)
    everywhere(command)
    command("evict", "--tokens", IDS)
    session = rig.session("engine", SPACE, LAYOUT)
    until_s = time.monotonic() + 10
    while session.match(keys, request="chatcmpl-77-0", tokens_s=50.0).waiting:
        assert time.monotonic() < until_s
    done = command("explain", "chatcmpl-77")
    assert done.code == 0
    assert re.search(r"^request chatcmpl-77-0 in namespace \w{12}, .* ago$", done.out, re.MULTILINE)
    assert re.search(r"^asked for 10 chunks, 0 of them in host memory$", done.out, re.MULTILINE)
    assert re.search(r"^planned to load 10, brought up 10 from disk, waited .* s", done.out, re.MULTILINE)
    assert re.search(r"^loaded 10$", done.out, re.MULTILINE)
    assert re.search(r"^0-9 +0-319 +\w{12} +host, disk", done.out, re.MULTILINE)
    assert command("explain", "chatcmpl-77-0", "--json").json["request"]["brought"] == {"disk": 10}
    done = command("explain", "chatcmpl-78")
    assert (done.code, done.out) == (1, "")
    assert "request: expected one of the last requests" in done.err


@pytest.mark.parametrize("outcome", [it for it in Outcome if it is not Outcome.DONE])
def test_there_are_words_for_every_way_to_lose_a_chunk(outcome: Outcome) -> None:
    said = last_event({"event": outcome.value, "tier": "disk", "seconds_ago": 5.0, "for_namespace": None}, {})
    assert said == f"{EVENTS[outcome.value]} disk 5 s ago"


def test_a_request_that_was_cut_says_why() -> None:
    record = {
        "request": "r",
        "keys": ["00"] * 40,
        "chunks": 12,
        "host": 2,
        "brought": {"disk": 10, "redis://kv:6379": 0},
        "planned": 20,
        "waited_s": 0.35,
        "estimate_s": 0.3,
        "why": "slower than expected",
        "seconds_ago": 65.0,
    }
    assert request_report(record, "3f9a").splitlines() == [
        "request r in namespace 3f9a, 1 min 5 s ago",
        "asked for 40 chunks, 2 of them in host memory",
        "planned to load 20, brought up 10 from disk, waited 0.35 s, estimated 0.3 s",
        "loaded 12, computed 28: slower than expected",
    ]
    assert "loaded 12, computed 28: held nowhere" in request_report(record | {"why": "", "estimate_s": None}, "3f9a")


def test_events_name_who_needed_the_room() -> None:
    it = Known(SPACE.root(), SPACE, 32)
    last = {"event": "evicted", "tier": "host", "seconds_ago": 12.0, "for_namespace": SPACE.root().hex()}
    spaces = {it.root.hex(): it}
    assert last_event(last, spaces) == f"evicted from host 12 s ago, for namespace {it.name}, tenant blue"
    assert last_event(last | {"for_namespace": None}, spaces) == "evicted from host 12 s ago"
    assert last_event(last | {"event": "corrupt", "tier": "disk"}, {}) == "found corrupt in disk 12 s ago"


def test_salts_are_not_shown() -> None:
    here, there = (Found(Known(b"", it, 32), it, ()) for it in (replace(SPACE, salt="a"), replace(SPACE, salt="b")))
    assert differences(here, there) == "salt"


# ---------------------------------------------------------------- what a command line names


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("evict", "which chunks? name them by --tokens"),
        ("evict --namespace 0", "no namespace starts so; known are"),
        ("evict --namespace=", "more than one namespace starts so"),
        ("evict --tokens 1,2 --tenant green", "no namespace of it here; tenants are 'blue'"),
        ("evict --tokens 1,2", "2 tokens are less than one chunk of 32"),
        ("evict --tokens 1,x", "'x' is not a token id"),
        ("evict --tokens 1,-2", "'-2' is not a token id"),
        ("evict --tokens 4294967296", "is not a token id"),
        ("evict --tokens [] ", "0 token ids"),
        ("evict --tokens @/nowhere/ids", "No such file"),
        ("evict --tokens 1 --text a", "the one or the other"),
        ("evict --tokens 1 --key 00", "not a key; write 32 hex digits"),
        ("evict --text hello", "name the model's folder with --model"),
        ("evict --key 12345", "--key '12345': not a key"),
        ("clear", "what is to be cleared?"),
        ("clear --all --tenant blue", "--all and a choice of less"),
        ("clear --all --tokens 1", "--all and a choice of less"),
        ("prefetch", "which chunks?"),
        ("prefetch --key 00112233445566778899aabbccddeeff", "a key does not tell; name the prompt, by --tokens"),
        ("pin", "which chunks?"),
        ("pin --release --ttl 5m", "--ttl with --release"),
        ("pin --release --tokens 1", "leave the prompt and the keys out"),
        ("pin --tokens 1 --ttl 2d", "not a duration"),
        ("pin --tokens 1 --owner=", "--owner '': write 1 to"),
        ("explain", "what is to be explained?"),
        ("explain req-1 --tokens 1", "leave one of them out"),
    ],
)
def test_bad_command_lines(rig: Rig, command: Command, line: str, says: str) -> None:
    save(rig, SPACE, TOKENS[:32])
    save(rig, OTHER, TOKENS[:32])
    done = command(*line.split())
    assert done.code == 2
    assert says in done.err
    assert done.out == ""
    assert "Traceback" not in done.err


def test_a_prompts_text_is_not_taken_for_a_requests_name(command: Command) -> None:
    done = command("explain", "Once upon a time")
    assert done.code == 2
    assert "needs --model for its tokenizer" in done.err


def test_without_a_node_every_command_says_what_to_do(command: Command, tmp_path: Path) -> None:
    for line in ("tiers", "evict --tokens 1", "clear --all", "prefetch --tokens 1", "pin --tokens 1", "explain r"):
        done = command(*line.split(), "--node", f"unix:{tmp_path}/none.sock")
        assert done.code == 1
        assert "start one with `headwater node`, or name it with --node" in done.err


def test_tokens_come_from_files_of_any_common_form(rig: Rig, command: Command, tmp_path: Path) -> None:
    save(rig)
    for text in (json.dumps(TOKENS), "\n".join(map(str, TOKENS)), f" {IDS} \n", IDS.replace(",", ", ")):
        file = tmp_path / "prompt"
        file.write_text(text)
        assert command("explain", f"@{file}", "--json").json["prompt_tokens"] == 320


def test_names_are_those_of_status(rig: Rig, command: Command) -> None:
    save(rig)
    eventually(lambda: fetch_status(rig.address)["quiet"])
    name = fetch_status(rig.address)["namespaces"][0]["namespace"]
    done = command("explain", "--tokens", IDS, "--namespace", name[:4].upper(), "--json").json
    assert done["namespaces"][0]["namespace"] == name
    root = SPACE.root().hex()
    assert command("explain", "--tokens", IDS, "--namespace", root[:20], "--json").json == done


def test_text_is_read_by_the_models_own_tokenizer(model_dir: Path, command: Command, tmp_path: Path) -> None:
    plain = prompt_tokens(argparse.Namespace(tokens=None, text="Hello world", model=str(model_dir), chat=False))
    chat = prompt_tokens(argparse.Namespace(tokens=None, text="Hello world", model=str(model_dir), chat=True))
    assert plain == [19556, 905]
    assert chat is not None
    assert len(chat) > len(plain)
    assert chat[0] == 1, "the template's own start, once"
    assert any(chat[at : at + 2] == plain for at in range(len(chat)))
    done = command("explain", "Hello", "--model", str(tmp_path))
    assert done.code == 2
    assert "no tokenizer there" in done.err
