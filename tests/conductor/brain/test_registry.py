"""Instances come, go, and come again; and where they may be."""

from __future__ import annotations

import pytest

from headwater.conductor.addresses import check_allowed, networks_of, origin_of
from headwater.conductor.http.exchange import Origin
from headwater.conductor.registry import CHANGES_MAX, Change, Roster
from headwater.errors import ConfigError, RefusedError
from headwater.fleetfile.model import FleetFile, InstanceSpec, NodeSpec
from tests.conductor.brain.rig import TIMES, spec


def roster(*specs: InstanceSpec, **more: object) -> Roster:
    networks = more.pop("networks", ())
    assert isinstance(networks, tuple)
    return Roster(FleetFile("f.yaml", (NodeSpec("n0"),), specs), TIMES, networks=networks, instances_max=8)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://127.0.0.1:8000", Origin("127.0.0.1", 8000)),
        ("https://[::1]:8443/", Origin("::1", 8443, True)),
        ("http://engine.local", Origin("engine.local", 80)),
    ],
)
def test_urls(url: str, origin: Origin) -> None:
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1", "http://", "127.0.0.1:80", "http://u:p@127.0.0.1", "http://u@127.0.0.1", "http://127.0.0.1/x",
        "http://127.0.0.1?x", "http://127.0.0.1#x", "http://127.0.0.1:99999", "http://127.0.0.1:0", "http://a b",
        "http://127.0.0.1\\@x", "http://127.0.0.1\r\nx", "http://[fe80::1%25eth0]", "http://[::1", "file:///etc/passwd",
        "http://169.254.169.254", "http://0.0.0.0:80", "http://[::]:80", "http://224.0.0.1", "http://[fe80::1]",
        "http://[::ffff:169.254.169.254]", "http://[fd00:ec2::254]", "http://100.100.100.200", "http://" + "a" * 600,
    ],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(RefusedError) as refused:
        origin_of(url)
    assert len(url) < 10 or url not in str(refused.value), "it may have a password in it"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "10.1.2.3", "::ffff:10.1.2.3"])
def test_where_instances_may_register(host: str) -> None:
    check_allowed(Origin(host, 80), networks_of(["10.0.0.0/8"]))


@pytest.mark.parametrize(
    "host",
    ["11.0.0.1", "engine", "169.254.169.254", "::ffff:169.254.169.254", "fe80::1", "0.0.0.0", "::ffff:11.0.0.1",
     "2002:a9fe:a9fe::1", "100.100.100.200", "0x7f000001", "2130706433", "127.1"],
)  # fmt: skip
def test_where_they_may_not(host: str) -> None:
    with pytest.raises(RefusedError):
        check_allowed(Origin(host, 80), networks_of(["10.0.0.0/8", "169.254.0.0/16", "fe80::/10", "100.0.0.0/8"]))


def test_networks_that_are_none() -> None:
    with pytest.raises(RefusedError):
        networks_of(["10.0.0.1/8"])


def test_the_fleet_file_is_checked() -> None:
    with pytest.raises(ConfigError, match="'x'"):
        roster(spec("x", url="http://169.254.169.254"))
    with pytest.raises(ConfigError):
        roster(InstanceSpec("x", "m", "m"))
    assert roster(InstanceSpec("x", "m", "m", port=81)).origin(0) == Origin("127.0.0.1", 81)


def test_numbers_are_free_only_after_everybody_was_told() -> None:
    them = roster(spec("a"), spec("b", node="n0"), spec("c", node="n1"))
    told: list[tuple[str, int, str]] = []
    them.watch(
        lambda it: told.append(("joined", it, them.name(it))), lambda it: told.append(("left", it, them.name(it)))
    )
    assert [it.node for it in them.instances().values()] == [None, 0, 1]
    assert them.node_name(1) == "n1" and them.node_name(None) == them.node_name(7) == ""
    before = them.instances()[1]
    assert them.unregister("b", 5) == 1 and before.draining and them.leaving(1)
    assert not told and them.register(spec("d"), 6) == 3
    them.release(1)
    assert them.by_name("b") is None and 1 not in them.instances()
    assert them.register(spec("e"), 7) == 1 and them.instances()[1] is not before
    assert told == [("joined", 3, "d"), ("left", 1, "b"), ("joined", 1, "e")]
    assert them.unregister("b", 8) is None
    with pytest.raises(AssertionError):
        them.release(0)


def test_nodes_keep_their_numbers_while_anybody_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.conductor.registry.NODES_MAX", 4)
    them = roster(spec("b", node="n1"))
    names = them.nodes
    assert [them.node(it) for it in ("n1", "n2")] == [1, 2] and them.known_node("n3") is None
    them.node_left("n2")
    them.node_left("n2")
    them.node_left("unheard-of")
    assert them.known_node("n2") is None and names == ["n0", "n1", ""]
    them.node_left("n1")
    assert them.known_node("n1") == 1, "an instance is on it"
    assert [them.node(it) for it in ("n3", "n4")] == [3, 2], "new ones first, then what is free"
    with pytest.raises(RefusedError, match="node"):
        them.node("n5")
    them.unregister("b", 1)
    them.release(0)
    assert them.known_node("n1") is None and them.node("n5") == 1
    assert names == ["n0", "n5", "n4", "n3"] and names is them.nodes
    them.register(spec("c", node="n4", url="http://127.0.0.1:9"), 2)
    them.unregister("c", 3)
    them.release(0)
    assert them.known_node("n4") == 2, "it is listed"
    them.node_left("n4")
    them.node_left("n3")
    assert [them.node(it) for it in ("n6", "n7")] == [2, 3], "what was freed first"


def test_names_and_numbers_of_instances_are_bounded() -> None:
    them = roster(spec("a"))
    with pytest.raises(RefusedError, match="name"):
        them.register(spec("a", served_name="other"), 1)
    for name in ("", "x" * 200, "a\nb"):
        with pytest.raises(RefusedError, match="name"):
            them.register(spec(name), 1)
    with pytest.raises(RefusedError, match="url"):
        them.register(InstanceSpec("x", "m", "m", port=81), 1)
    with pytest.raises(RefusedError, match="networks"):
        them.register(spec("x", url="http://10.0.0.1:80"), 1)
    assert not them.changes(), "what was refused is no change"
    for number in range(7):
        them.register(spec(f"r{number}"), 2 + number)
    with pytest.raises(RefusedError, match="at most 8"):
        them.register(spec("one more"), 99)
    assert them.register(spec("r1"), 100) == 2, "the same again changes nothing"


def test_one_that_is_leaving_may_come_back() -> None:
    them = roster(spec("a"))
    them.unregister("a", 1)
    assert them.register(spec("a"), 2) == 0 and not them.leaving(0) and not them.instances()[0].draining


def test_the_later_change_counts_in_any_order() -> None:
    first, second = Change(10, "x", spec("x")), Change(20, "x", None)
    for order in ((first, second), (second, first), (first, second, first)):
        them = roster(spec("a"))
        for change in order:
            them.heard(change)
        number = them.by_name("x")
        assert number is None or them.leaving(number)
        assert them.newest == 20 and them.changes() == [second]


def test_changes_are_bounded() -> None:
    them = roster(spec("a"))
    them.register(spec("stays"), 1)
    for stamp in range(CHANGES_MAX + 10):
        them.heard(Change(10 + stamp, f"gone{stamp}", None))
    assert len(them.changes()) == CHANGES_MAX
    assert any(it.name == "stays" for it in them.changes())
