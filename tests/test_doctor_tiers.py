"""What `headwater doctor` says of the tiers below DRAM: of real directories, and of a real Valkey."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.config import GIB, MIB, NodeConfig
from headwater.doctor import examine
from headwater.doctor import tiers as checks
from headwater.doctor.findings import Finding, Verdict
from headwater.doctor.tiers import check_direct_io, check_owner, check_room, check_tiers
from tests.servers import RedisServer, free_port, redis_server, valkey_program


def found(name: str, **settings: object) -> Finding:
    """The finding of one name for a node with these settings."""
    findings = {it.name: it for it in check_tiers(NodeConfig(**settings), node_runs=False)}  # type: ignore[arg-type]
    for it in findings.values():
        assert it.found, it
        assert bool(it.remedy) == (it.verdict is not Verdict.OK), it
    return findings[name]


def test_without_tiers_there_is_nothing_to_say() -> None:
    assert list(check_tiers(NodeConfig(), node_runs=False)) == []


# ---------------------------------------------------------------- disk


def test_the_disks_directory_must_be_ours_alone(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    assert check_owner(good).verdict is Verdict.OK
    assert check_owner(tmp_path / "a" / "b").verdict is Verdict.OK
    assert not (tmp_path / "a").exists(), "a check changes nothing"
    for mode in (0o755, 0o710, 0o770, 0o702, 0o1777):
        good.chmod(mode)
        it = check_owner(good)
        assert it.verdict is Verdict.FAIL, oct(mode)
        assert f"as {good}/headwater, or chmod 700 {good}" in it.remedy
    good.chmod(0o700)
    (good / "thesis.tex").write_text("")
    it = check_owner(good)
    assert (it.verdict, "other files are in it" in it.remedy) == (Verdict.FAIL, True)
    (good / "owner").write_text("")
    assert check_owner(good).verdict is Verdict.OK, "a node has been there"
    (tmp_path / "link").symlink_to(good)
    assert check_owner(tmp_path / "link").verdict is Verdict.FAIL
    (tmp_path / "file").write_text("")
    assert check_owner(tmp_path / "file").verdict is Verdict.FAIL
    assert check_owner(tmp_path / "file" / "below").verdict is Verdict.FAIL


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "another user's" in check_owner(tmp_path).remedy


def test_direct_io_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    assert check_direct_io(tmp_path).verdict in (Verdict.OK, Verdict.WARN)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_io_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        def opened(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(checks.os, "open", opened)

    refuse(22)
    assert check_direct_io(tmp_path).verdict is Verdict.WARN
    refuse(95)
    it = check_direct_io(tmp_path)
    assert it.verdict is Verdict.OK
    assert "cannot be told" in it.found


def test_room_counts_what_is_ours_and_leaves_the_reserve(tmp_path: Path) -> None:
    config = NodeConfig(host_memory=64 * MIB, slab=MIB, disk_reserve=0)
    assert check_room(tmp_path, MIB, config, node_runs=False).verdict is Verdict.OK
    it = check_room(tmp_path, 1 << 50, config, node_runs=False)
    assert (it.verdict, it.remedy.endswith("lower node.disk_reserve")) == (Verdict.WARN, True)
    greedy = NodeConfig(host_memory=64 * MIB, slab=MIB, disk_reserve=1 << 50)
    it = check_room(tmp_path, MIB, greedy, node_runs=False)
    assert (it.verdict, "not even one slab of 1048576 bytes" in it.remedy) == (Verdict.FAIL, True)
    (tmp_path / "slabs-1-1048576-0").write_bytes(bytes(MIB))
    assert " bytes free and 1048576 ours already" in check_room(tmp_path, MIB, config, node_runs=False).found
    assert check_room(tmp_path, 1 << 50, config, node_runs=True).verdict is Verdict.OK, "it is the running node's"


def test_a_disk_is_examined_with_the_rest(tmp_path: Path) -> None:
    config = NodeConfig(socket=f"unix:{tmp_path}/n.sock", host_memory=16 * MIB, disk=f"{tmp_path}/kv:{GIB}")
    names = [it.name for it in examine(config)]
    assert [it for it in names if it.startswith("disk")] == ["disk", "disk direct I/O", "disk room"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("codec", "says"),
    [("zstd", "no fixed size"), ("zstandard", "is zstd meant?"), ("aes", "set node.keys to a file of them")],
)
def test_codecs_that_do_not_fit(codec: str, says: str, tmp_path: Path) -> None:
    it = found("disk codec", disk=f"{tmp_path}:{GIB}?codec={codec}")
    assert it.verdict is Verdict.FAIL
    assert says in it.remedy


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    keys.chmod(0o644)
    it = found(f"file://{tmp_path}/kv codec", remotes=[f"file://{tmp_path}/kv?codec=aes"], keys=str(keys))
    assert "chmod 600" in it.remedy
    keys.chmod(0o600)
    assert (
        found(f"file://{tmp_path}/kv", remotes=[f"file://{tmp_path}/kv?codec=aes"], keys=str(keys)).verdict
        is Verdict.OK
    )


# ---------------------------------------------------------------- remotes


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(valkey_program(), tmp_path_factory.mktemp("valkey")) as server:
        yield server


def test_a_server_that_would_fill_its_machine_is_a_warning(valkey: RedisServer) -> None:
    valkey.say("CONFIG", "SET", "maxmemory", "0")
    it = found(f"redis://127.0.0.1:{valkey.port}", remotes=[f"redis://127.0.0.1:{valkey.port}"])
    assert (it.verdict, "no maxmemory" in it.remedy) == (Verdict.WARN, True)


def test_a_server_that_evicts_is_fine(valkey: RedisServer) -> None:
    valkey.say("CONFIG", "SET", "maxmemory", "64mb")
    valkey.say("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    it = found(f"redis://127.0.0.1:{valkey.port}", remotes=[f"redis://127.0.0.1:{valkey.port}"])
    assert it.verdict is Verdict.OK
    assert "bytes used of 67108864" in it.found
    valkey.say("CONFIG", "SET", "maxmemory-policy", "noeviction")
    it = found(f"redis://127.0.0.1:{valkey.port}", remotes=[f"redis://127.0.0.1:{valkey.port}"])
    assert (it.verdict, "noeviction" in it.remedy) == (Verdict.WARN, True)


def test_a_wrong_password_and_an_absent_server_are_failures(valkey: RedisServer) -> None:
    name = f"redis://127.0.0.1:{valkey.port}"
    it = found(name, remotes=[f"redis://nobody:hunter2@127.0.0.1:{valkey.port}"])
    assert it.verdict is Verdict.FAIL
    assert "hunter2" not in it.found + it.remedy
    port = free_port()
    it = found(f"redis://127.0.0.1:{port}", remotes=[f"redis://:hunter2@127.0.0.1:{port}"])
    assert it.verdict is Verdict.FAIL
    assert "Connection refused" in it.found
    assert "hunter2" not in it.found + it.remedy


def test_shared_directories(tmp_path: Path) -> None:
    assert found(f"file://{tmp_path}/new", remotes=[f"file://{tmp_path}/new"]).verdict is Verdict.OK
    assert not (tmp_path / "new").exists(), "a check changes nothing"
    assert found(f"file://{tmp_path}", remotes=[f"file://{tmp_path}"]).verdict is Verdict.OK
    absent = f"file://{tmp_path}/absent/kv"
    assert found(absent, remotes=[absent]).verdict is Verdict.FAIL
    for mode, remedy in ((0o707, "chmod o= "), (0o755, "chmod o= "), (0o750, "?shared=true")):
        tmp_path.chmod(mode)
        it = found(f"file://{tmp_path}", remotes=[f"file://{tmp_path}"])
        assert (it.verdict, remedy in it.remedy) == (Verdict.FAIL, True), oct(mode)
    assert found(f"file://{tmp_path}", remotes=[f"file://{tmp_path}?shared=true"]).verdict is Verdict.OK
    tmp_path.chmod(0o700)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    dangling = f"file://{tmp_path}/nowhere"
    assert found(dangling, remotes=[dangling]).verdict is Verdict.FAIL
