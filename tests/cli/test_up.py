"""`headwater up` and `headwater export` as commands: what a dry run prints, word for word, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headwater.cli import up as command_up
from headwater.up.machine import Machine, Programs
from tests.commands import Command, ran
from tests.conftest import ROOT
from tests.fleetfile.files import CLUSTER_TENANTS, LEAST
from tests.node.conftest import eventually
from tests.servers import free_port
from tests.up.small import lives

EXAMPLE = ROOT / "examples" / "up.yaml"
PLANNED = """\
url          http://127.0.0.1:8000/v1
runtime dir  /run/hw

# node: node, ports 7480
HEADWATER_NODE_CLUSTER=headwater \\
HEADWATER_NODE_HOST_MEMORY=1GiB \\
HEADWATER_NODE_METRICS=127.0.0.1:7480 \\
HEADWATER_NODE_NAME=node \\
python3 -m headwater node --socket unix:/run/hw/node.sock

# chat-0: engine, after node, ports 8100 15600 15601
HF_HUB_OFFLINE=1 \\
VLLM_CPU_KVCACHE_SPACE=1 \\
VLLM_CPU_OMP_THREADS_BIND=0 \\
VLLM_NO_USAGE_STATS=1 \\
vllm serve MODEL --host 127.0.0.1 --port 8100 --served-model-name smol \
--enable-prompt-tokens-details --disable-uvicorn-access-log --dtype float32 \
--kv-transfer-config '{"kv_connector":"HeadwaterConnector","kv_connector_module_path":"headwater.engines.vllm",\
"kv_role":"kv_both","kv_load_failure_policy":"recompute","engine_id":"chat-0",\
"kv_connector_extra_config":{"node":"unix:/run/hw/node.sock"}}' \
--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://[::ffff:127.0.0.1]:15600",\
"buffer_steps":100000,"hwm":100000,"max_queue_size":100000,"replay_endpoint":"tcp://127.0.0.1:15601"}' \
--max-model-len 4096 --enforce-eager

# chat-1: engine, after node, ports 8101 15602 15603
HF_HUB_OFFLINE=1 \\
VLLM_CPU_KVCACHE_SPACE=1 \\
VLLM_CPU_OMP_THREADS_BIND=1 \\
VLLM_NO_USAGE_STATS=1 \\
vllm serve MODEL --host 127.0.0.1 --port 8101 --served-model-name smol \
--enable-prompt-tokens-details --disable-uvicorn-access-log --dtype float32 \
--kv-transfer-config '{"kv_connector":"HeadwaterConnector","kv_connector_module_path":"headwater.engines.vllm",\
"kv_role":"kv_both","kv_load_failure_policy":"recompute","engine_id":"chat-1",\
"kv_connector_extra_config":{"node":"unix:/run/hw/node.sock"}}' \
--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://[::ffff:127.0.0.1]:15602",\
"buffer_steps":100000,"hwm":100000,"max_queue_size":100000,"replay_endpoint":"tcp://127.0.0.1:15603"}' \
--max-model-len 4096 --enforce-eager

# conductor: conductor, after node, chat-0, chat-1, ports 8000 8001
python3 -m headwater conductor FILE --runtime-dir /run/hw
"""


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs commands on a host of two cores."""
    monkeypatch.setattr(command_up, "look", lambda: Machine(cores=(0, 1), memory_bytes=16 << 30))
    monkeypatch.setattr(command_up, "find_programs", lambda: (Programs(), ["vllm", "directory"]))
    return partial(ran, capsys)


def test_a_dry_run_of_the_example(command: Command) -> None:
    ended = command("up", str(EXAMPLE), "--dry-run", "--runtime-dir", "/run/hw")
    model = str(ROOT / ".cache/models/SmolLM2-135M-Instruct")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.replace(model, "MODEL").replace(str(EXAMPLE), "FILE") == PLANNED


def test_a_dry_run_for_programs(command: Command) -> None:
    plan = command("up", str(EXAMPLE), "--dry-run", "--runtime-dir", "/run/hw", "--json").json
    assert (plan["url"], plan["runtime_dir"]) == ("http://127.0.0.1:8000/v1", "/run/hw")
    assert [it["name"] for it in plan["processes"]] == ["node", "chat-0", "chat-1", "conductor"]
    assert plan["processes"][1]["probe"] == "http://127.0.0.1:8100/health"


def test_what_cannot_be_run_is_said_in_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("model: m\ninstances: [{name: a, flgas: x}]\n")
    ended = command("up", str(tmp_path / "fleet.yaml"))
    message = f"{tmp_path}/fleet.yaml: instances.0.flgas: no such setting; did you mean flags?"
    assert (ended.code, ended.out, ended.err) == (2, "", f"headwater up: {message}\n")
    (tmp_path / "fleet.yaml").write_text(LEAST)
    ended = command("up", str(tmp_path / "fleet.yaml"))
    assert ended.code == 2 and "there is no `vllm` here" in ended.err
    (tmp_path / "fleet.yaml").write_text("model: m\ninstances: []\ndirectory: valkey\n")
    ended = command("up", str(tmp_path / "fleet.yaml"))
    assert ended.code == 2 and "there is no valkey-server or redis-server here" in ended.err


def test_manifests_are_written_and_what_is_missing_is_said(command: Command, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(LEAST + CLUSTER_TENANTS)
    ended = command("export", "kubernetes", str(tmp_path / "fleet.yaml"), "-o", str(tmp_path / "k8s"))
    assert ended.code == 0, ended.err
    assert sorted(it.name for it in (tmp_path / "k8s").iterdir()) == ["chat.yaml", "conductor.yaml"]
    assert (
        "kubectl create secret generic headwater-secrets --from-file=control-token=FILE --from-file=secret=FILE"
        in ended.out
    )
    ended = command("export", "compose", str(tmp_path / "fleet.yaml"), "-o", str(tmp_path / "c"), "--cpu")
    assert ended.code == 0, ended.err
    assert sorted(it.name for it in (tmp_path / "c").iterdir()) == ["cache", "compose.yaml", "fleet.yaml", "secrets"]
    assert (tmp_path / "c" / "secrets").stat().st_mode & 0o777 == 0o700
    ended = command("export", "kubernetes", str(tmp_path / "fleet.yaml"), "-o", str(tmp_path / "k8s"), "--json")
    assert ended.json["written"] == [str(tmp_path / "k8s" / it) for it in ("chat.yaml", "conductor.yaml")]
    ended = command("export", "compose", str(tmp_path / "fleet.yaml"), "-o", str(tmp_path / "fleet.yaml"), "--cpu")
    assert ended.code == 2 and "name a folder that can be made" in ended.err


def test_a_conductor_that_cannot_be_is_refused(command: Command, tmp_path: Path) -> None:
    ended = command("conductor", str(tmp_path / "nowhere.yaml"), "--runtime-dir", str(tmp_path / "run"))
    assert ended.code == 2 and "No such file" in ended.err


class _Engine(BaseHTTPRequestHandler):
    """Answers every prompt with one word."""

    protocol_version = "HTTP/1.1"
    ANSWER = json.dumps({"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}).encode()

    def do_GET(self) -> None:
        self._say(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(self.ANSWER)

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def engine_port() -> Iterator[int]:
    """An engine that somebody else runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_fleet_comes_up_once_serves_and_leaves_nothing(tmp_path: Path, engine_port: int) -> None:
    """A real node and a real Conductor with two workers; only the engine is a small one."""
    path, run = tmp_path / "fleet.yaml", tmp_path / "run"
    path.write_text(
        f"model: m\nnodes: [{{name: node, host_memory: 64MiB, prefault: off, metrics: '127.0.0.1:{free_port()}'}}]\n"
        f"instances: [{{name: far, url: 'http://127.0.0.1:{engine_port}', events: off}}]\nconductor: {{workers: 2,"
        f" listen: '127.0.0.1:{free_port()}', control: '127.0.0.1:{free_port()}', tokens: none}}\n"
    )
    command = [sys.executable, "-m", "headwater", "up", str(path), "--json", "--runtime-dir", str(run)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as fleet:
        assert fleet.stdout is not None
        told = [json.loads(fleet.stdout.readline()) for _ in range(5)]
        assert [(it["name"], it["state"]) for it in told[:4]] == [
            ("node", "starting"),
            ("node", "ready"),
            ("conductor", "starting"),
            ("conductor", "ready"),
        ]
        asked = urllib.request.Request(
            told[4]["url"] + "/completions",
            data=json.dumps({"model": "m", "prompt": "hello"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert json.load(answer)["choices"][0]["text"] == "hi"
        again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 2 and f"runs here already (pid {fleet.pid})" in again.stderr
        everybody = _below(fleet.pid)
        assert len(everybody) == 5  # the guard, the node, the Conductor's parent and its two workers
        fleet.send_signal(signal.SIGTERM)
        out, _ = fleet.communicate(timeout=60)
    assert fleet.returncode == 0
    ended = [(it["name"], it["state"], it["text"]) for it in map(json.loads, out.splitlines())]
    assert ended == [(name, state, "") for name in ("conductor", "node") for state in ("ending", "ended")]
    eventually(lambda: not any(map(lives, everybody)))
    assert not list(run.glob("*.sock"))


def _below(pid: int) -> list[int]:
    """Processes that this one, or one below it, has started."""
    children = [it for it in _children(pid) if lives(it)]
    return [*children, *(other for it in children for other in _below(it))]


def _children(pid: int) -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == pid:
                found.append(int(entry.name))
    return found
