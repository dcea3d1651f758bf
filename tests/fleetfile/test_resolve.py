"""Ports and addresses are filled in without two of the same, in the same way each time; fleets survive a pipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.fleetfile.dump import decode, dump, encode
from headwater.fleetfile.model import FleetFile, InstanceSpec, NodeSpec
from headwater.fleetfile.resolve import fleet_folder, resolve
from tests.fleetfile.files import DIGEST, SECRET, WHOLE, read

FOLDER = Path("/run/hw")


def test_everything_has_an_address(tmp_path: Path) -> None:
    fleet = resolve(read(tmp_path, WHOLE), FOLDER)
    by_name = {it.name: it for it in fleet.instances}
    assert [it.url for it in fleet.instances] == [
        "http://127.0.0.1:8100",
        "http://127.0.0.1:8101",
        "http://127.0.0.1:8102",
        "http://127.0.0.1:9000",
        "http://127.0.0.1:8103",
        "http://10.0.0.5:8000",
    ]
    assert (by_name["chat-0"].events, by_name["chat-0"].replay) == ("tcp://127.0.0.1:15600", "tcp://127.0.0.1:15601")
    assert (by_name["long"].events, by_name["long"].replay) == ("tcp://127.0.0.1:15606", "tcp://127.0.0.1:15608")
    assert (by_name["alone"].events, by_name["theirs"].events) == (None, "tcp://10.0.0.5:5557")
    assert [it.socket for it in fleet.nodes] == ["unix:/run/hw/near.sock", "unix:/run/far.sock"]
    assert fleet.nodes[0].settings["metrics"] == "127.0.0.1:7480"
    assert fleet.directory == "redis+unix:///run/hw/directory.sock"


def test_a_resolved_fleet_is_not_resolved_any_further(tmp_path: Path) -> None:
    fleet = resolve(read(tmp_path, WHOLE), FOLDER)
    assert resolve(fleet, FOLDER) == fleet


def test_the_folder_is_the_clusters(tmp_path: Path) -> None:
    fleet = read(tmp_path, WHOLE)
    assert fleet_folder(fleet).name == "up-blue" and fleet_folder(fleet, "/x/y") == Path("/x/y")


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the kernel takes 107"):
        resolve(read(tmp_path, WHOLE), Path("/" + "x" * 100))


instances = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(8090, 8120)),
        st.integers(1, 4),
        st.booleans(),
        st.one_of(st.none(), st.integers(15_590, 15_640)),
    ),
    max_size=12,
)


@given(drawn=instances, nodes=st.integers(0, 4))
def test_no_port_is_given_twice(drawn: list[tuple[int | None, int, bool, int | None]], nodes: int) -> None:
    named: set[int] = {8000, 8001}
    specs = []
    for at, (port, ranks, silent, events) in enumerate(drawn):
        port = None if port in named else port
        wanted = set(range(events, events + ranks)) if events is not None and not silent else set()
        events = events if wanted and not wanted & named else None
        named |= wanted if events is not None else set()
        named |= {port} if port is not None else set()
        specs.append(
            InstanceSpec(
                f"i-{at}", "m", "m", port=port, ranks=ranks, events_off=silent,
                events=None if events is None else f"tcp://127.0.0.1:{events}",
            )
        )  # fmt: skip
    fleet = resolve(FleetFile("f", tuple(NodeSpec(f"n-{it}") for it in range(nodes)), tuple(specs)), FOLDER)
    ports = [8000, 8001]
    for it, given_it in zip(fleet.instances, specs, strict=True):
        assert it.port is not None and it.url == f"http://127.0.0.1:{it.port}"
        assert given_it.port in (None, it.port) and (it.events is None) == it.events_off
        ports.append(it.port)
        for url in filter(None, (it.events, it.replay)):
            ports += [int(url.rsplit(":", 1)[1]) + rank for rank in range(it.ranks)]
    ports += [int(it.settings["metrics"].rsplit(":", 1)[1]) for it in fleet.nodes]
    assert len(ports) == len(set(ports))


def test_a_dump_has_no_secrets(tmp_path: Path) -> None:
    fleet = replace(resolve(read(tmp_path, WHOLE), FOLDER), directory="redis://u:canary@kv:6379")
    text = json.dumps(dump(fleet))
    assert SECRET not in text and "hf_canary" not in text and DIGEST not in text and "canary" not in text
    assert '"HF_TOKEN": "***"' in text and "redis://***@kv:6379" in text


def test_a_fleet_survives_a_pipe(tmp_path: Path) -> None:
    fleet = resolve(read(tmp_path, WHOLE), FOLDER)
    assert decode(encode(fleet)) == fleet
    with pytest.raises(ConfigError, match="no fleet"):
        decode(b'{"path": "canary"')
