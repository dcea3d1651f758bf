"""The parent of a Conductor with workers that are small: readiness, restarts, rolling, draining, and no orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.conductor.folder import Lock, private_folder
from headwater.conductor.serving import reloaded, with_secret
from headwater.conductor.starting import ROWS_EACH, Start, write_start
from headwater.errors import ConfigError
from headwater.fleetfile.model import ConductorSpec, FleetFile, TenantSpec
from tests.conftest import ROOT
from tests.fleetfile.files import DIGEST, OTHER
from tests.node.conftest import eventually
from tests.servers import free_port
from tests.up.small import lives
from tests.up.worker import WISH

TENANTS = "tenants:\n  - {{name: {0}, keys: [{1}]}}\n"


class Front:
    """A parent that runs."""

    def __init__(
        self, folder: Path, workers: int, wish: str = "", drain_s: float = 5.0, roll_s: float = 3600.0
    ) -> None:
        self.folder, self.port = folder, free_port()
        self.control = free_port()
        self.run = folder / "run"
        self.run.mkdir(mode=0o700)
        self._head = (
            "model: m\ninstances: [{name: far, url: 'http://127.0.0.1:9', events: off}]\nsecret_file: secret\n"
            f"conductor: {{listen: '127.0.0.1:{self.port}', control: '127.0.0.1:{self.control}', workers: {workers},"
            f" times: {{drain_s: {drain_s}, roll_s: {roll_s}}}}}\n"
        )
        secret = folder / "secret"
        secret.write_text("f" * 32)
        secret.chmod(0o600)
        self.write("blue", DIGEST)
        self._err = (folder / "err").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.up.front", str(folder / "fleet.yaml"), str(self.run)],
            cwd=ROOT,
            env={**os.environ, WISH: wish},
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
        )

    def write(self, tenant: str, digest: str) -> None:
        """A file with another tenant."""
        (self.folder / "fleet.yaml").write_text(self._head + TENANTS.format(tenant, digest))

    def serving(self) -> None:
        """Wait until it says so."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n", self.said()

    def said(self) -> str:
        """Its log."""
        return (self.folder / "err").read_text()

    def ask(self) -> dict[str, Any]:
        """What one of the workers says of itself; {} if none answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as link:
                return dict(json.loads(link.makefile().read() or "{}"))
        except OSError:
            return {}

    def marks(self, word: str) -> dict[int, int]:
        """Workers that have left such a mark: rows by pid."""
        found = [it.name.split("-") for it in self.run.glob(f"{word}-*")]
        return {int(pid): int(row) for _, row, pid in found}

    def alive(self) -> dict[int, int]:
        """Rows of workers that run, by pid."""
        return {pid: row for pid, row in self.marks("up").items() if lives(pid)}

    def roll(self, times: int) -> None:
        """SIGHUP, and wait until it was done for so many times in all."""
        self.process.send_signal(signal.SIGHUP)
        eventually(lambda: self.said().count("the file was read again") == times, 15, self.said)

    def end(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def close(self) -> None:
        """Nothing is left."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._err.close()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


Make = Callable[..., Front]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Make]:
    made: list[Front] = []

    def make(workers: int = 2, wish: str = "", **times: float) -> Front:
        made.append(Front(tmp_path, workers, wish, **times))
        return made[-1]

    yield make
    for it in made:
        it.close()


def test_workers_share_a_port_and_drain(front: Make) -> None:
    it = front(2)
    it.serving()
    workers = it.alive()
    assert sorted(workers.values()) == [0, 4]
    assert it.ask()["tenants"] == ["blue"]
    assert it.end() == 0, it.said()
    assert not it.alive() and it.marks("drained").keys() == workers.keys()
    assert "killed" not in it.said()


def test_a_worker_that_dies_is_replaced_and_the_others_go_on(front: Make) -> None:
    it = front(2)
    it.serving()
    before = it.alive()
    victim = next(pid for pid, row in before.items() if row == 0)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: len(it.alive()) == 2 and victim not in it.alive(), 15, it.said)
    assert set(before) - {victim} < set(it.alive()) and sorted(it.alive().values()) == [0, 4]
    newcomer: dict[str, Any] = {}
    eventually(lambda: newcomer.update(it.ask()) or newcomer.get("pid") not in (None, *before), 15)
    # What the dead one had in progress is not counted any more.
    assert (newcomer["row"], newcomer["has_room"]) == (0, True)
    assert f"worker 0 (pid {victim}) ended with code -9; another one starts in 0.5 s" in it.said()
    assert it.end() == 0


def test_new_tenants_come_by_new_workers(front: Make) -> None:
    it = front(2)
    it.serving()
    before, secret = it.alive(), it.ask()["secret"]
    it.write("green", OTHER)
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: "2 workers replaced" in it.said(), 15, it.said)
    eventually(lambda: not set(before) & set(it.alive()), 15, it.said)
    assert it.marks("drained").keys() == before.keys()  # they ended in order
    assert sorted(it.alive().values()) == [1, 5]  # other rows of the page of quotas
    told = it.ask()
    assert (told["tenants"], told["secret"]) == (["green"], secret)
    # and again: the first rows are free by now
    it.write("red", DIGEST)
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: sorted(it.alive().values()) == [0, 4], 15, it.said)
    assert it.end() == 0, it.said()


@pytest.mark.parametrize(
    ("tenant", "digest", "message"),
    [
        ("blue", "canary", "no digest of a key"),
        ("refused", OTHER, "worker 0 cannot use this file"),
        ("deadly", OTHER, "ended with code 3"),
    ],
    ids=["unreadable", "refused", "deadly"],
)
def test_a_file_that_cannot_be_used_changes_nothing(front: Make, tenant: str, digest: str, message: str) -> None:
    it = front(2)
    it.serving()
    before = it.alive()
    it.write(tenant, digest)
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: "the file is not used" in it.said(), 15, it.said)
    assert message in it.said() and "canary" not in it.said()
    assert it.alive() == before and it.ask()["tenants"] == ["blue"]
    os.kill(next(iter(before)), signal.SIGKILL)
    eventually(lambda: len(it.alive()) == 2, 15, it.said)  # a restart, too, has what was used before
    assert it.end() == 0


def test_those_that_were_replaced_drain_on_until_there_is_no_row_for_another(front: Make) -> None:
    it = front(1, wish="lingers")
    it.serving()
    came: list[int] = []
    for times in range(1, 4):
        came += set(it.alive()) - set(came)
        it.roll(times)
    assert len(it.alive()) == 4 and "has to end now" not in it.said()
    assert sorted(it.alive().values()) == [0, 1, 2, 3] and not it.marks("drained")
    it.roll(4)
    assert came[0] not in it.alive() and set(came[1:]) < set(it.alive())  # whoever has drained longest
    assert it.marks("drained").keys() == {came[0]} and sorted(it.alive().values()) == [0, 1, 2, 3]
    assert it.said().count("has to end now") == 1
    # One that dies meanwhile gives back its row, and is not replaced.
    os.kill(came[1], signal.SIGKILL)
    eventually(lambda: f"(pid {came[1]}) ended with code -9 while it drained" in it.said(), 15, it.said)
    it.roll(5)
    assert it.said().count("has to end now") == 1 and len(it.alive()) == 4
    assert "another one starts" not in it.said()
    left = it.alive()
    assert it.end() == 0, it.said()  # which all of them hear
    assert not it.alive() and it.marks("drained").keys() == {came[0], *left}
    assert "killed" not in it.said()


def test_who_dies_while_a_roll_waits_for_a_row_is_replaced(front: Make) -> None:
    it = front(2, wish="stubborn", drain_s=60.0)
    it.serving()
    first = it.alive()
    for times in range(1, 4):
        before = set(it.alive())
        it.roll(times)
    victim = next(pid for pid, row in it.alive().items() if pid not in before and row < ROWS_EACH)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: f"worker 0 (pid {victim}) ended with code -9; another one" in it.said(), 15, it.said)
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: "has to end now" in it.said(), 15, it.said)
    eventually(lambda: len(it.alive()) == 2 * ROWS_EACH, 15, it.said)
    assert set(first) < set(it.alive())  # who has to end has not ended yet
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: "the file was read again" in it.said().split("has to end now")[-1], 15, it.said)
    assert len(it.alive()) == 2 * ROWS_EACH and "the file is not used" not in it.said()


def test_a_worker_that_dies_is_replaced_while_an_older_one_drains(front: Make) -> None:
    it = front(1, wish="lingers")
    it.serving()
    (old,) = it.alive()
    it.roll(1)
    (new,) = set(it.alive()) - {old}
    os.kill(new, signal.SIGKILL)
    eventually(lambda: len(it.alive()) == 2 and new not in it.alive(), 15, it.said)
    assert old in it.alive()
    assert it.end() == 0, it.said()


def test_a_worker_that_dies_while_its_successor_starts_is_no_trouble(front: Make) -> None:
    it = front(1, wish="slow")
    it.serving()
    (old,) = it.alive()
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(it.alive()) == 2, 15, it.said)
    os.kill(old, signal.SIGKILL)
    eventually(lambda: "the file was read again" in it.said(), 15, it.said)
    (new,) = it.alive()
    os.kill(new, signal.SIGKILL)  # it is looked after as any other
    eventually(lambda: it.alive() and new not in it.alive(), 15, it.said)
    assert it.end() == 0, it.said()


def test_who_drains_for_too_long_is_killed(front: Make) -> None:
    it = front(1, wish="stubborn", drain_s=0.1, roll_s=0.1)
    it.serving()
    (old,) = it.alive()
    it.roll(1)
    eventually(lambda: old not in it.alive(), 15, it.said)
    assert f"worker with pid {old} did not end in time and was killed" in it.said()
    it.process.send_signal(signal.SIGTERM)
    eventually(lambda: socket_is_gone(it.control), 15, it.said)
    it.process.send_signal(signal.SIGTERM)
    assert it.process.wait(3) == 0


def test_told_to_end_during_a_roll(front: Make) -> None:
    it = front(2, wish="lingers")
    it.serving()
    it.roll(1)
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(it.alive()) == 5, 15, it.said)  # it is under way
    assert it.end() == 0, it.said()
    assert not it.alive()


def test_told_to_drain_during_a_roll(front: Make) -> None:
    it = front(2, wish="slow")
    it.serving()
    before = it.alive()
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(it.alive()) == 3, 15, it.said)
    ask_to_drain(it)
    eventually(lambda: "none is started any more" in it.said(), 15, it.said)
    eventually(lambda: it.alive() == before, 15, it.said)
    assert it.end() == 0


def ask_to_drain(it: Front) -> None:
    asked = b"POST /drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", it.control), 5) as link:
        link.sendall(asked)
        assert b" 202 " in link.makefile("rb").readline()


def test_who_was_told_to_drain_is_not_replaced(front: Make) -> None:
    it = front(1)
    it.serving()
    worker = next(iter(it.alive()))
    ask_to_drain(it)
    it.process.send_signal(signal.SIGHUP)
    eventually(lambda: "none is started any more" in it.said(), 15, it.said)
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: not it.alive(), 15)
    assert it.end() == 0 and "another one starts" not in it.said()


def test_who_does_not_drain_is_killed(front: Make) -> None:
    it = front(1, wish="stubborn", drain_s=0.1)
    it.serving()
    worker = next(iter(it.alive()))
    it.process.send_signal(signal.SIGTERM)
    eventually(lambda: socket_is_gone(it.control) or not lives(worker), 15)
    it.process.send_signal(signal.SIGTERM)  # the second one does not wait
    assert it.process.wait(3) == 0
    assert not it.alive()


def socket_is_gone(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as link:
            link.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b"draining" in link.makefile("rb").read()
    except OSError:
        return True


def test_a_parent_that_is_killed_leaves_nobody(front: Make) -> None:
    it = front(2)
    it.serving()
    workers = it.alive()
    it.process.kill()
    it.process.wait()
    eventually(lambda: not it.alive(), 10)
    assert it.marks("drained").keys() == workers.keys()


def test_workers_that_cannot_start_are_an_error(front: Make) -> None:
    it = front(2, wish="dies")
    assert it.process.wait(20) == 1
    assert it.said().endswith("UnavailableError: no worker could be started; what they say is above\n")


def test_probes_are_answered_while_workers_start(front: Make) -> None:
    it = front(1, wish="mute")
    eventually(lambda: it.alive(), 15, it.said)
    with socket.create_connection(("127.0.0.1", it.control), 5) as link:
        link.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = link.makefile("rb").read()
    assert b"503" in said and b"no worker is ready" in said
    assert it.end() == 0  # also while they start
    assert not it.alive()


def test_nothing_of_a_start_is_shown() -> None:
    fleet = FleetFile("f", (), (), tenants=(TenantSpec("a", (DIGEST,)),), secret="canary" * 8)
    start = Start(3, "/run/x", 5, 6, 7, fleet)
    assert repr(start) == "Start(row 3 in /run/x)"
    descriptor = write_start(start)
    try:
        assert b"canary" in os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


def test_what_a_reload_keeps() -> None:
    blue = (TenantSpec("blue", (DIGEST,)),)
    old = FleetFile("f", (), (), ConductorSpec(listen="127.0.0.1:1", workers=2), tenants=blue, secret="s" * 32)
    new = replace(old, conductor=ConductorSpec(listen="127.0.0.1:2", workers=3, retries=7), secret="")
    found = reloaded(old, new)
    assert (found.conductor.listen, found.conductor.workers, found.conductor.retries) == ("127.0.0.1:1", 2, 7)
    assert found.secret == old.secret and with_secret(new, "x").secret == "x"
    with pytest.raises(ConfigError, match="let everybody in"):
        reloaded(old, replace(new, tenants=()))


def test_a_folder_is_private_and_locked(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "up", "--runtime-dir")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder, "--runtime-dir") == folder
    lock = Lock(folder / "lock", "`headwater up`")
    with pytest.raises(ConfigError, match=rf"`headwater up` runs here already \(pid {os.getpid()}\)"):
        Lock(folder / "lock", "`headwater up`")
    lock.close()
    Lock(folder / "lock", "`headwater up`").close()
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="its mode is 0750, open to others"):
        private_folder(folder, "--runtime-dir")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ConfigError, match="others may replace what is in"):
        private_folder(tmp_path / "shared" / "up", "--runtime-dir")
    (tmp_path / "shared").chmod(0o1777)
    private_folder(tmp_path / "shared" / "up", "--runtime-dir")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="no link to one"):
        private_folder(tmp_path / "link", "--runtime-dir")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--runtime-dir"):
        private_folder(tmp_path / "file", "--runtime-dir")
