"""The command line: help that teaches, one-line errors, exit codes, JSON, and real nodes in processes of their own."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import headwater
from headwater import doctor
from headwater.cli import COMMANDS, main
from headwater.cli.node import drain_on_signals, plug_in, warn_of_shown_passwords
from headwater.cli.options import flag_of
from headwater.cli.show import exact_size, plain, show_setting, show_share, show_size, show_span
from headwater.config import MIB, SETTINGS, NodeConfig, child_environment, load_config, parse_size, variable
from headwater.core.hashing import chunk_keys
from headwater.doctor import Finding, Verdict
from headwater.errors import RefusedError
from headwater.node.client import Link, Session, fetch_status
from headwater.types import KVGroup, KVLayout, Namespace
from tests.commands import Command, Ended, ran

LAYOUT = KVLayout(32, (KVGroup(16, 32768, (4,)),))
SPACE = Namespace("m" * 32, "float16", "cpu.avx2.nhd", LAYOUT.fingerprint(), tenant="blue")
KEYS = chunk_keys(SPACE.root(), range(320), 32)
ENVIRONMENT = child_environment({"PYTHONPATH": str(Path(headwater.__file__).parents[1]), "COLUMNS": "120"})


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line in this process, with nothing of ours in the environment but `env`."""
    for name in [it for it in os.environ if it.startswith("HEADWATER_")]:
        monkeypatch.delenv(name)

    def command(*arguments: str, env: dict[str, str] | None = None) -> Ended:
        with monkeypatch.context() as here:
            for name, value in (env or {}).items():
                here.setenv(name, value)
            return ran(capsys, *arguments)

    return command


def apart(*arguments: str) -> Ended:
    """Runs a command line in a process of its own."""
    line = [sys.executable, "-m", "headwater", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    return Ended(done.returncode, done.stdout, done.stderr)


class Node:
    """A `headwater node` in a process of its own."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.address = f"unix:{directory}/node.sock"
        line = [sys.executable, "-m", "headwater", "node", "--socket", self.address, "--host-memory", "16MiB"]
        line += ["--metrics", "127.0.0.1:0", *flags]
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        assert self.greeting, self.end()[2]

    def client(self, namespace: Namespace = SPACE, name: str = "a") -> Session:
        link = Link(self.address, name, maps=False, connect_s=5, call_s=5)
        try:
            return Session(link, namespace, LAYOUT)
        except RefusedError:
            link.close()
            raise

    def end(self, *signals: signal.Signals) -> tuple[int, str, str]:
        for number in signals:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(*flags: str) -> Node:
        nodes.append(Node(tmp_path, *flags))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.end()


# ---------------------------------------------------------------- help and errors


def test_help_is_there_without_anything_that_commands_need() -> None:
    heavy = "torch vllm rich prometheus_client headwater.node.server"
    code = (
        "import sys; from headwater.cli import main\n"
        "assert main(['--help']) == 0\n"
        f"found = [it for it in '{heavy}'.split() if it in sys.modules]\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, it in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(it.summary)}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(COMMANDS[name].module)
    module.configure(argparse.ArgumentParser())
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: headwater {name}" in text
    assert COMMANDS[name].summary[1:] in text
    if name != "node":
        assert "--json" in text


def test_the_node_has_a_flag_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["node", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, it in SETTINGS.items():
        if name.startswith("node."):
            assert f" {flag_of(name)}" in text
            assert it.metadata["help"] in text
            assert "HEADWATER_" + name.upper().replace(".", "_") in text


def test_without_a_known_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err
    assert main(["stauts"]) == 2
    assert capsys.readouterr().err == "headwater: no command 'stauts'; the nearest is 'status'\n"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwater {headwater.__version__}\n"


def test_errors_are_one_line_and_say_where_the_value_came_from(tmp_path: Path, command: Command) -> None:
    done = command("node", "--host-memory", "5X")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("headwater node: node.host_memory = '5X' (flag): not a size; write")
    assert done.err.count("\n") == 1
    done = command("config", env={"HEADWATER_NODE_SLAP": "1"})
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "HEADWATER_NODE_SLAB" in done.err
    done = command("status", "--node", f"unix:{tmp_path}/none.sock")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"no node at unix:{tmp_path}/none.sock" in done.err
    assert "headwater node" in done.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["status", "--node", "/run/x"], "argument --node: '/run/x': not a node's address"),
        (["status", "--watch", "never"], "argument --watch: 'never': not a duration"),
        (["node", "--host-mem", "1GiB"], "unrecognized arguments: --host-mem"),
        (["config", "--jsn"], "unrecognized arguments"),
    ],
)
def test_bad_usage_is_2(line: list[str], says: str, command: Command) -> None:
    done = command(*line)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f"{sys.executable} -m headwater config | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout.startswith("setting")
    assert done.stderr == ""


# ---------------------------------------------------------------- config and version


def test_config_shows_values_and_origins(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[node]\nhost_memory = "32GiB"\n')
    done = command("config", "--config", str(file), env={"HEADWATER_NODE_SLAB": "64MiB"})
    assert done.code == 0
    shown = {line.split()[0]: line for line in done.out.splitlines()[1:] if line.strip()}
    assert set(SETTINGS) <= set(shown)
    assert re.match(rf"node\.host_memory +32GiB +file {file} ", shown["node.host_memory"])
    assert re.match(r"node\.slab +64MiB +env HEADWATER_NODE_SLAB ", shown["node.slab"])
    assert re.match(r"node\.eviction +learned +default ", shown["node.eviction"])
    found = json.loads(command("config", "--json", "--config", str(file)).out)["settings"]
    assert found["node.host_memory"] == {"value": 32 << 30, "origin": f"file {file}"}
    assert found["node.require"] == {"value": {}, "origin": "default"}
    assert set(found) == set(SETTINGS)


def test_config_check(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[node]\nhost_memory = "32GiB"\n')
    done = command("config", "--check", "--config", str(file))
    assert (done.code, done.out) == (0, f"ok: {len(SETTINGS)} settings, 1 of them not the default\n")
    file.write_text("[node]\nhost_memory = -1\n")
    done = command("config", "--check", "--config", str(file))
    assert (done.code, done.out) == (2, "")
    assert f"node.host_memory = -1 (file {file})" in done.err


def test_version(command: Command) -> None:
    found = json.loads(command("version", "--json").out)
    assert found["headwater"] == headwater.__version__
    assert set(found) == {"headwater", "protocol", "python"}
    assert f"headwater {headwater.__version__}, protocol" in command("version").out


# ---------------------------------------------------------------- a node and those who look at it


def test_a_node_says_how_to_plug_in_serves_and_leaves_nothing(start: Callable[..., Node], tmp_path: Path) -> None:
    node = start()
    assert node.greeting.count("\n") == 1
    assert f"serving 16 MiB at {node.address}; metrics at http://127.0.0.1:" in node.greeting
    pasted = re.search(r"--kv-transfer-config '(.*)'$", node.greeting)
    assert pasted is not None
    settings = json.loads(pasted[1])
    assert settings["kv_connector"] == "HeadwaterConnector"
    assert settings["kv_connector_extra_config"] == {"node": node.address}
    assert fetch_status(node.address)["draining"] is False
    code, out, err = node.end(signal.SIGTERM)
    assert (code, out) == (0, "")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_status_tells_what_a_node_holds(start: Callable[..., Node], command: Command) -> None:
    node = start()
    assert "no engine has registered yet" in command("status", "--node", node.address).out
    client = node.client()
    assert client.match(KEYS).chunks == 0
    saved = client.reserve(KEYS)
    assert client.done(saved.ticket)
    assert client.match(KEYS).chunks == 10
    load = client.load(KEYS)
    text = command("status", "--node", node.address).out
    assert re.search(r"^memory +2\.5 MiB of 16 MiB \(15\.6 %\)", text, re.MULTILINE)
    assert re.search(r"^below +no lower tier", text, re.MULTILINE)
    assert re.search(r"^engines +1 alive; 2 connections", text, re.MULTILINE)
    assert re.search(r"^running +1 loads, 0 saves", text, re.MULTILINE)
    assert re.search(r"^trouble +none", text, re.MULTILINE)
    assert re.search(r"m{16} +float16 +blue +host +10 +2\.5 MiB +10 +640 +50\.0 % +2\.5 MiB +0 B", text)
    state = json.loads(command("status", "--json", "--node", node.address).out)
    (space,) = state["namespaces"]
    assert (space["held_bytes"], space["leases"], space["hit_tokens"], space["miss_tokens"]) == (10 << 18, 10, 320, 320)
    assert state["calls"]["Match"]["counts"] and sum(state["calls"]["Match"]["counts"]) == 2
    assert client.release([load.ticket]) == 1
    client.close()


def test_status_finds_the_node_of_the_environment(start: Callable[..., Node], command: Command) -> None:
    node = start()
    done = command("status", "--json", env={"HEADWATER_NODE_SOCKET": node.address})
    assert json.loads(done.out)["node"] == fetch_status(node.address)["node"]


def test_watch_goes_on_until_told_to_stop_and_survives_the_node(start: Callable[..., Node]) -> None:
    node = start()
    line = [sys.executable, "-m", "headwater", "status", "--watch", "50ms", "--json", "--node", node.address]
    watch = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert watch.stdout is not None
    assert json.loads(watch.stdout.readline())["draining"] is False
    assert node.end(signal.SIGTERM)[0] == 0
    while "error" not in (state := json.loads(watch.stdout.readline())):
        assert "namespaces" in state
    assert "no node at" in state["error"]
    watch.send_signal(signal.SIGINT)
    watch.communicate(timeout=30)
    assert watch.returncode == 0


def test_metrics_of_a_real_node(start: Callable[..., Node]) -> None:
    node = start()
    found = re.search(r"metrics at (http://\S+)/metrics", node.greeting)
    assert found is not None
    client = node.client()
    client.match(KEYS)
    with urllib.request.urlopen(f"{found[1]}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    assert re.search(r'^headwater_miss_tokens_total\{namespace="\w{12}",tier="host"\} 320\.0$', text, re.MULTILINE)
    assert "process_resident_memory_bytes" in text
    with urllib.request.urlopen(f"{found[1]}/ready", timeout=10) as reply:
        assert reply.status == 200
    client.close()


def test_a_second_node_on_one_path_is_refused(start: Callable[..., Node]) -> None:
    node = start()
    done = apart("node", "--socket", node.address, "--host-memory", "16MiB", "--metrics", "off")
    assert done.code == 2
    assert f"another node (pid {node.process.pid})" in done.err
    assert fetch_status(node.address)["draining"] is False


def test_a_busy_metrics_port_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = apart("node", "--socket", f"unix:{tmp_path}/n.sock", "--metrics", f"127.0.0.1:{port}")
    assert done.code == 2
    assert f"127.0.0.1:{port}" in done.err
    assert list(tmp_path.iterdir()) == []


def test_too_much_memory_is_refused_with_the_number(tmp_path: Path) -> None:
    done = apart("node", "--socket", f"unix:{tmp_path}/n.sock", "--host-memory", "900GiB", "--metrics", "off")
    assert done.code == 1
    assert str(900 << 30) in done.err
    assert list(tmp_path.iterdir()) == []


def test_required_fields_reach_the_node(start: Callable[..., Node]) -> None:
    node = start("--require", "kv_dtype=float32", "--require", "tenant=blue")
    with pytest.raises(RefusedError, match="kv_dtype: expected float32, given float16"):
        node.client()


def test_a_signal_drains_and_a_second_one_ends_at_once(start: Callable[..., Node], tmp_path: Path) -> None:
    node = start("--drain-s", "60")
    client = node.client()
    assert client.reserve(KEYS).ticket
    node.process.send_signal(signal.SIGINT)
    while not fetch_status(node.address)["draining"]:
        assert node.process.poll() is None
    assert client.reserve(KEYS).ticket == 0, "a draining node reserves nothing"
    before = time.monotonic()
    code, _, err = node.end(signal.SIGTERM)
    assert code == 130
    assert time.monotonic() - before < 20
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    client.close()


def test_draining_ends_with_its_time(start: Callable[..., Node]) -> None:
    node = start("--drain-s", "200ms")
    client = node.client()
    assert client.reserve(KEYS).ticket
    assert node.end(signal.SIGTERM)[0] == 0
    client.close()


def test_a_node_started_by_nohup_stays_when_the_terminal_goes() -> None:
    kept = {it: signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        drain_on_signals(None)  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) != kept[signal.SIGTERM]
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_what_is_pasted_into_a_shell_is_one_word() -> None:
    line = f"printf '%s' {plug_in('unix:/run/a.sock').partition(' ')[2]}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout)["kv_connector_extra_config"] == {"node": "unix:/run/a.sock"}


def test_passwords_are_neither_printed_nor_repeated_in_refusals(command: Command) -> None:
    url = "redis://user:hunter2@kv:6379"
    for flags in ((), ("--json",)):
        done = command("config", *flags, env={"HEADWATER_NODE_REMOTES": url})
        assert done.code == 0
        assert "hunter2" not in done.out
        assert "redis://***@kv:6379" in done.out
    for line in (["node", "--remotes", url], ["node", "--remote", f"{url}x"], ["doctor", "--disk", url]):
        done = command(*line)
        assert done.code == 2
        assert "hunter2" not in done.out + done.err


def test_a_password_in_a_flag_is_warned_of_but_not_one_in_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    url = "redis://user:hunter2@kv:6379"
    warn_of_shown_passwords(load_config(env={variable("node.remotes"): url}))
    warn_of_shown_passwords(load_config(env={}, overrides={"node.remotes": ["redis://kv:6379"]}))
    assert caplog.text == ""
    warn_of_shown_passwords(load_config(env={}, overrides={"node.remotes": [url]}))
    assert "HEADWATER_NODE_REMOTES or a file hides it" in caplog.text
    assert "hunter2" not in caplog.text


# ---------------------------------------------------------------- doctor


def test_doctor_reports_and_fails_when_something_does(tmp_path: Path, command: Command) -> None:
    flags = ["--host-memory", "16MiB", "--json"]
    env = {"HEADWATER_NODE_SOCKET": f"unix:{tmp_path}/n.sock", "HEADWATER_NODE_METRICS": "off"}
    done = command("doctor", *flags, env=env)
    report = json.loads(done.out)
    failed = [it for it in report["checks"] if it["verdict"] == "fail"]
    assert (done.code, report["ok"], failed) == (0, True, [])
    names = {it["name"] for it in report["checks"]}
    assert {"python", "platform", "memfd", "memory", "/dev/shm", "copies", "numpy", "vllm", "socket directory"} <= names
    done = command("doctor", "--host-memory", "900GiB", env=env)
    assert done.code == 1
    assert re.search(r"^FAIL memory ", done.out, re.MULTILINE)
    assert re.search(r"-> lower node\.host_memory to \d+MiB or less", done.out)
    done = command("doctor", *flags, "--node", f"unix:{tmp_path}/none.sock", env=env)
    assert done.code == 1
    assert [it["name"] for it in json.loads(done.out)["checks"] if it["verdict"] == "fail"] == ["node"]


def test_every_finding_that_is_not_ok_has_a_remedy(tmp_path: Path) -> None:
    config = NodeConfig(socket=f"unix:{tmp_path}/n.sock", host_memory=1 << 50, lock_memory=True)
    for it in doctor.examine(config):
        assert it.found, it
        assert bool(it.remedy) == (it.verdict is not Verdict.OK), it


def test_doctor_sees_a_running_node(start: Callable[..., Node]) -> None:
    node = start()
    it = doctor.check_node(node.address, expected=True)
    assert it.verdict is Verdict.OK
    assert headwater.__version__ in it.found
    findings = {it.name: it for it in doctor.examine(NodeConfig(socket=node.address, host_memory=1 << 50))}
    assert findings["memory"].verdict is Verdict.OK, "the memory is the running node's already"
    assert "metrics port" not in findings


def test_doctor_names_versions_that_differ(start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    node = start()
    monkeypatch.setattr(doctor, "VERSION", "9.9.9")
    it = doctor.check_node(node.address, expected=True)
    assert it.verdict is Verdict.WARN
    assert "9.9.9" in it.remedy


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.22.1", Verdict.FAIL),
        ("0.23.0", Verdict.WARN),
        ("0.28.9", Verdict.WARN),
        ("0.29.0", Verdict.OK),
        ("0.32.0+cpu", Verdict.OK),
        ("0.33.0", Verdict.WARN),
        ("1.0", Verdict.WARN),
        ("dev", Verdict.WARN),
    ],
)
def test_vllm_versions(version: str, verdict: Verdict) -> None:
    assert doctor.judge_vllm(version).verdict is verdict


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [("always within_size [advise] never", Verdict.OK), ("always advise [never]", Verdict.WARN), ("", Verdict.WARN)],
)
def test_huge_pages(setting: str, verdict: Verdict, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text(setting)
    assert doctor.check_huge_pages(tmp_path / "enabled").verdict is verdict
    assert doctor.check_huge_pages(tmp_path / "absent").verdict is Verdict.WARN


def test_socket_directories(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    assert doctor.check_directory(good).verdict is Verdict.OK
    assert doctor.check_directory(tmp_path / "a" / "b").verdict is Verdict.OK
    assert not (tmp_path / "a").exists(), "a check changes nothing"
    good.chmod(0o777)
    assert doctor.check_directory(good).verdict is Verdict.FAIL
    good.chmod(0o1777)
    assert doctor.check_directory(good).verdict is Verdict.OK
    file = tmp_path / "file"
    file.write_text("")
    assert doctor.check_directory(file).verdict is Verdict.FAIL
    assert doctor.check_directory(file / "below").verdict is Verdict.FAIL


def test_backing_directories(tmp_path: Path) -> None:
    def check(backing: Path, size: int) -> Finding:
        return doctor.check_memory(NodeConfig(backing=str(backing), host_memory=size), node_runs=False)

    assert check(tmp_path, MIB).verdict is Verdict.OK
    assert check(tmp_path, 1 << 60).verdict is Verdict.FAIL
    assert check(tmp_path / "absent", MIB).verdict is Verdict.FAIL


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    assert doctor.check_memlock(1000).verdict is Verdict.OK
    assert doctor.check_memlock(1001).verdict is Verdict.FAIL
    assert doctor.check_descriptors(436).verdict is Verdict.OK
    assert doctor.check_descriptors(437).verdict is Verdict.WARN
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert doctor.check_memlock(1 << 60).verdict is Verdict.OK
    assert doctor.check_descriptors(1 << 60).verdict is Verdict.OK


def test_shared_memory_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.check_shm(tmp_path).verdict is Verdict.OK
    assert doctor.check_shm(tmp_path / "absent").verdict is Verdict.WARN
    monkeypatch.setattr(doctor, "SHM_LEAST_BYTES", 1 << 62)
    assert doctor.check_shm(tmp_path).verdict is Verdict.WARN


def test_numpy_copies_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor._kernels, "NATIVE", False)
    assert doctor.check_copies().verdict is Verdict.WARN
    monkeypatch.setattr(doctor.codec, "ISAS", ())
    assert doctor.check_codecs().verdict is Verdict.WARN
    monkeypatch.setattr(doctor.codec, "ISAS", ("avx2", "plain"))
    assert doctor.check_codecs().found == "native, avx2"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert doctor.check_port("127.0.0.1", port).verdict is Verdict.FAIL
    assert doctor.check_port("127.0.0.1", port).verdict is Verdict.OK


# ---------------------------------------------------------------- how values look


def test_sizes_for_people() -> None:
    assert [show_size(it) for it in (0, 1023, 1024, 2.5 * MIB, 1 << 60)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "2.5 MiB",
        "1 EiB",
    ]


@pytest.mark.parametrize("size", [0, 1, 4096, 5 * MIB, 5 * 10**9, 32 << 30, 1 << 60])
def test_exact_sizes_read_back(size: int) -> None:
    assert parse_size(exact_size(size)) == size


def test_other_values_for_people() -> None:
    assert [show_span(it) for it in (0.25, 65, 7325, 90000)] == ["0.25 s", "1 min 5 s", "2 h 2 min", "1 d 1 h"]
    assert (show_share(1, 3), show_share(0, 0)) == ("33.3 %", "-")
    assert plain("a\x1b[31mb\n") == "a?[31mb?"
    assert show_setting("engine.min_load_tokens", MIB) == str(MIB)
    assert show_setting("node.slab", MIB) == "1MiB"
    assert show_setting("node.require", {"tenant": "x", "salt": ""}) == "tenant=x,salt="
    assert show_setting("node.remotes", ("redis://u:p@a", "file:///b")) == "redis://***@a file:///b"
    assert show_setting("node.remotes", ()) == show_setting("node.quotas", {}) == "none"
    assert show_setting("node.quotas", {"blue": MIB, "": 5}) == "blue=1MiB,=5"
    assert show_setting("node.disk_reserve", None) == "auto"
    assert os.linesep == "\n"
