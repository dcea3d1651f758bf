"""Watch: what a node tells of its tiers, of who is registered, of its speeds; and what a slow watcher gets."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.errors import HeadwaterError, RefusedError, UnavailableError
from headwater.node import watching
from headwater.node.client import Link
from headwater.node.messages import Registration, Status, StatusReply, Watch, Watched, encode
from headwater.tiers.memory import MemoryTier
from headwater.types import ChunkKey, HitRule, KVGroup, KVLayout, split_keys
from tests.node.conftest import Rig, eventually
from tests.node.peers import LAYOUT, keys, namespace, save
from tests.node.tiered import disk_of, plug, rigged, settle, with_tiers


class Watcher:
    """What a Conductor would know, from the answers alone."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.told = (0, 0)
        self.dumps = 0
        self.held: dict[str, set[ChunkKey]] = defaultdict(set)
        self.instances: dict[str, Registration] = {}
        self.last = Watched(0, 0, "")

    def ask(self) -> Watched:
        """One answer, taken in."""
        it = self.last = self.link.call(Watch(*self.told), Watched)
        if it.number != self.told[0]:
            self.dumps += 1
            self.held.clear()
        self.told = it.number, it.serial
        for move in it.moves:
            self.held[move.tier] |= set(split_keys(move.stored))
            self.held[move.tier] -= set(split_keys(move.removed))
        if it.instances is not None:
            self.instances = {one.instance: one for one in it.instances}
        return it

    def knows(self, **held: set[ChunkKey]) -> bool:
        """Ask once; whether it knows exactly this now."""
        self.ask()
        return {tier: keys for tier, keys in self.held.items() if keys} == {t: k for t, k in held.items() if k}


@pytest.fixture
def watcher(rig: Rig) -> Watcher:
    """One that has seen what there is: nothing."""
    return Watcher(rig.link("conductor"))


def test_what_is_saved_is_told_and_what_is_cleared(rig: Rig, watcher: Watcher) -> None:
    session = rig.session("one", maps=True)
    wanted = keys(5)
    save(session, wanted)
    eventually(lambda: watcher.knows(host=set(wanted)))
    more = keys(3, "more")
    save(session, more)
    eventually(lambda: watcher.knows(host={*wanted, *more}))
    session.clear()
    eventually(lambda: watcher.knows())
    assert watcher.dumps == 1


def test_who_comes_later_is_told_what_there_is(rig: Rig) -> None:
    wanted = keys(40)
    save(rig.session("one", maps=True), wanted)
    watcher = Watcher(rig.link("conductor"))
    eventually(lambda: watcher.knows(host=set(wanted)))


def test_instances_are_told_as_they_come_and_go(rig: Rig, watcher: Watcher) -> None:
    session = rig.session("one", namespace(salt="s"))
    eventually(lambda: watcher.ask() and "one" in watcher.instances)
    size = LAYOUT.slot_bytes(0) // LAYOUT.chunk_tokens
    root = namespace(salt="s").root()
    assert watcher.instances == {"one": Registration("one", root, namespace(), LAYOUT.chunk_tokens, size)}
    session.link.close()
    eventually(lambda: watcher.ask() and not watcher.instances)


def test_figures_are_told_now_and_then(rig: Rig, watcher: Watcher) -> None:
    assert watcher.ask().figures == ()
    assert watcher.ask().figures is None
    rig.clock.moved_s += watching.FIGURES_S
    eventually(lambda: watcher.ask().figures is not None)


def test_an_answer_that_was_lost_is_told_again_from_the_beginning(rig: Rig, watcher: Watcher) -> None:
    wanted = keys(5)
    save(rig.session("one", maps=True), wanted)
    eventually(lambda: watcher.knows(host=set(wanted)))
    number, serial = watcher.told
    watcher.told = number, serial - 1
    eventually(lambda: watcher.knows(host=set(wanted)))
    assert watcher.told[0] == number + 1


def test_a_slow_watcher_starts_again_and_holds_nobody_up(
    rig: Rig, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.node.watching.QUEUE_LIMIT", 8)
    slow = Watcher(rig.link("slow"))
    slow.ask()
    session = rig.session("one", maps=True)
    wanted = [key for name in range(6) for key in keys(4, f"{name}")]
    for name in range(6):
        save(session, keys(4, f"{name}"))
    (it,) = [one for one in rig.node.watching._watchers.values() if one.announcing.overflows]
    assert len(it.announcing) == 0
    eventually(lambda: slow.knows(host=set(wanted)))
    assert slow.dumps == 2
    eventually(lambda: watcher.knows(host=set(wanted)))
    assert watcher.dumps == 1


def test_an_answer_waits_for_news_and_comes_without_it(rig: Rig, watcher: Watcher) -> None:
    watcher.ask()
    watcher.link._socket.sendall(encode(Watch(*watcher.told)))
    eventually(lambda: any(it.waits for it in rig.node.watching._watchers.values()))
    rig.clock.moved_s += watching.HOLD_S
    eventually(lambda: not any(it.waits for it in rig.node.watching._watchers.values()))


def test_nothing_else_may_be_asked_meanwhile(rig: Rig, watcher: Watcher) -> None:
    watcher.ask()
    for message in (Watch(*watcher.told), Status()):
        link = rig.link("rude")
        it = link.call(Watch(), Watched)
        link._socket.sendall(encode(Watch(it.number, it.serial)) + encode(message))
        with pytest.raises(HeadwaterError):
            for _ in range(3):
                link.call(Status(), StatusReply)
    assert watcher.ask()
    eventually(lambda: len(rig.node.watching) == 1)


def test_watchers_are_few(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WATCHERS_MAX", 2)
    links = [rig.link(f"conductor-{number}") for number in range(3)]
    for link in links[:2]:
        link.call(Watch(), Watched)
    with pytest.raises(RefusedError, match="watchers"):
        links[2].call(Watch(), Watched)
    links[0].close()
    eventually(lambda: len(rig.node.watching) == 1)
    links[2].call(Watch(), Watched)


def test_the_list_of_instances_fits_into_an_answer(rig: Rig, watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "INSTANCES_BYTES_MAX", 1000)
    for number in range(20):
        rig.session(f"{number}")
    eventually(lambda: watcher.ask() and 0 < len(watcher.instances) < 10)


def test_only_the_nodes_own_user_may_watch(rig: Rig, watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.node.server.peer_user", lambda _: 4242)
    with pytest.raises(RefusedError, match="user"):
        watcher.ask()
    assert len(rig.node.watching) == 0


def test_a_node_that_ends_ends_the_watch(config: NodeConfig) -> None:
    with rigged(config) as rig:
        watcher = Watcher(rig.link("conductor"))
        watcher.ask()
    with pytest.raises(UnavailableError):
        for _ in range(3):
            watcher.ask()


def test_only_the_group_that_needs_every_chunk_counts(rig: Rig, watcher: Watcher) -> None:
    groups = (KVGroup(16, 4096, (2,), HitRule.WINDOW, 16), KVGroup(16, 4096, (2,)))
    layout = KVLayout(16, groups)
    session = rig.session("one", namespace(layout), layout, maps=True)
    wanted = keys(4)
    got = session.reserve(wanted, lacking=[(0, 0), (0, 1)])
    session.done(got.ticket)
    eventually(lambda: watcher.knows(host=set(wanted)))
    late = Watcher(rig.link("late"))
    eventually(lambda: late.knows(host=set(wanted)))


def test_objects_are_nobodys_prefix(rig: Rig, watcher: Watcher) -> None:
    from headwater.node.object_format import object_layout, object_namespace

    layout = object_layout(4096)
    session = rig.session("store", object_namespace("", 4096), layout, maps=True)
    got = session.reserve(keys(2))
    session.done(got.ticket)
    save(rig.session("one", maps=True), keys(1, "chunk"))
    eventually(lambda: watcher.knows(host=set(keys(1, "chunk"))))
    late = Watcher(rig.link("late"))
    eventually(lambda: late.knows(host=set(keys(1, "chunk"))))


def test_disk_and_remote_are_told_by_tier(config: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (url,) = plug(monkeypatch, {"far": MemoryTier()})
    config = with_tiers(config, disk=disk_of(tmp_path), remotes=(url,))
    wanted = set(keys(4))
    with rigged(config) as rig:
        watcher = Watcher(rig.link("conductor"))
        save(rig.session("one", maps=True), keys(4))
        eventually(lambda: watcher.knows(host=wanted, disk=wanted, remote=wanted))
        late = Watcher(rig.link("late"))
        eventually(lambda: late.knows(host=wanted, disk=wanted, remote=wanted))
        settle(config.socket)
        rig.clock.moved_s += watching.FIGURES_S
        eventually(lambda: {it.tier for it in watcher.ask().figures or ()} == {"disk", "remote"})
    with rigged(replace(config, remotes=())) as rig:  # its disk is still there
        again = Watcher(rig.link("conductor"))
        eventually(lambda: again.knows(disk=wanted))


def test_what_is_cleared_is_gone_from_every_tier(
    config: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (url,) = plug(monkeypatch, {"far": MemoryTier()})
    wanted = set(keys(4))
    with rigged(with_tiers(config, disk=disk_of(tmp_path), remotes=(url,))) as rig:
        watcher = Watcher(rig.link("conductor"))
        session = rig.session("one", maps=True)
        save(session, keys(4))
        eventually(lambda: watcher.knows(host=wanted, disk=wanted, remote=wanted))
        session.clear()
        eventually(lambda: watcher.knows())
        assert watcher.dumps == 1
