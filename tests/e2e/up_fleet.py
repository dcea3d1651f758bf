"""`headwater up` as a user runs it, over two real vLLM, a node and a Conductor with two tenants; and how to ask it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from headwater.conductor.tenants import key_row, new_key
from tests.conductor.running import Answer, asked
from tests.node.conftest import eventually
from tests.servers import free_port

MODEL = "smol"
"""What the model is called there."""
START_S, STOP_S, SETTLE_S, SILENT_S = 600.0, 60.0, 60.0, 120.0
FLAGS = "--max-model-len 2048 --enforce-eager --block-size 32 --trust-request-chat-template"
CHUNK = 256
"""Tokens of a chunk, in which the node keeps what engines compute."""
EQUALS: dict[str, dict[str, Any]] = {"one": {}, "two": {}}
"""The engines' names, and what the file says of each."""


class UpFleet:
    """A running one. Ports and keys are of this run alone."""

    def __init__(self, folder: Path, model: Path, instances: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder, self.instances = folder, instances
        self.port, self.control_port = free_port(), free_port()
        self.ports = {name: free_port() for name in instances}
        self.keys = {name: new_key() for name in ("blue", "red")}
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text("0123456789abcdef" * 2)
        (folder / "fleet.yaml").write_text(yaml.safe_dump(self._file(model)))
        # A job in a shell's background ignores Ctrl-C, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with (folder / "up.json").open("wb") as output, (folder / "up.err").open("wb") as errors:
                words = ["up", str(folder / "fleet.yaml"), "--json", "--runtime-dir", str(folder / "run")]
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "headwater", *words],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env={**os.environ, "TMPDIR": str(folder)},
                    start_new_session=True,
                )  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, before)

    def _file(self, model: Path) -> dict[str, Any]:
        tcp = "tcp://127.0.0.1:"
        return {
            "model": str(model),
            "served_name": MODEL,
            "flags": FLAGS,
            "environment": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            "node": "node",
            "secret_file": str(self.folder / "secret"),
            "nodes": [{"name": "node", "host_memory": "512MiB", "metrics": "off"}],
            "instances": [
                {"name": name, "port": port, "events": f"{tcp}{free_port()}", "replay": f"{tcp}{free_port()}"}
                | self.instances[name]
                for name, port in self.ports.items()
            ],
            "tenants": [{"name": name, "keys": [key_row(key)]} for name, key in self.keys.items()],
            "conductor": {
                "listen": f"127.0.0.1:{self.port}",
                "control": f"127.0.0.1:{self.control_port}",
                "tokens": "local",
            },
        }

    # ---- what is asked of it

    def chat(self, messages: list[dict[str, Any]], *, tenant: str = "blue", **more: Any) -> Answer:
        """A greedy chat through the Conductor."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}", "content-type": "application/json"}
        answer = asked(self.port, "POST", "/v1/chat/completions", _body(messages, more), headers, SILENT_S)
        assert answer.status == 200, (answer.body, self.said())
        return answer

    def streamed(self, messages: list[dict[str, Any]], after: int, then: Callable[[str], None], **more: Any) -> Answer:
        """A streamed one; `then` is called with the instance's name once so many events with text have come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SILENT_S)
        headers = {"Authorization": f"Bearer {self.keys['blue']}", "content-type": "application/json"}
        try:
            connection.request("POST", "/v1/chat/completions", _body(messages, {"stream": True, **more}), headers)
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            body, events = b"", 0
            while line := response.readline():
                body += line
                events += b'"content"' in line
                if events == after:
                    after = -1
                    then(told["x-headwater-instance"])
            return Answer(response.status, told, body)
        finally:
            connection.close()

    def straight(self, name: str, messages: list[dict[str, Any]], **more: Any) -> Answer:
        """The same chat, asked of an engine itself, kept out of what others share."""
        apart = {"cache_salt": f"straight to {name}", "kv_transfer_params": {"headwater.skip": True}}
        body = _body(messages, {**apart, **more})
        headers = {"content-type": "application/json"}
        answer = asked(self.ports[name], "POST", "/v1/chat/completions", body, headers, SILENT_S)
        assert answer.status == 200, answer.body
        return answer

    def control(self, path: str, body: object = None) -> Any:
        """Ask the control API; with a body it is a POST."""
        data = None if body is None else json.dumps(body).encode()
        return asked(self.control_port, "GET" if body is None else "POST", path, data, {}).json

    def holders(self, ids: list[int], tenant: str = "blue") -> dict[str, dict[str, Any]]:
        """Who holds how many tokens of a prompt, as the Conductor knows."""
        question = {"model": MODEL, "token_ids": ids, "block_size": 32, "tenant_id": tenant}
        found: dict[str, dict[str, Any]] = self.control("/query", question)[tenant]
        return found

    def instance(self, name: str) -> dict[str, Any]:
        """An instance, as `headwater fleet` tells of it."""
        rows: list[dict[str, Any]] = self.control("/fleet")["brain"]["instances"]
        return next(it for it in rows if it["name"] == name)

    def running(self) -> int:
        """How many requests the engines have."""
        lines = [
            line
            for port in self.ports.values()
            for line in asked(port, "GET", "/metrics", None, {}).body.decode().splitlines()
        ]
        wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(round(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(wanted))

    # ---- what it says of itself

    def told(self) -> list[dict[str, str]]:
        """What `up` has printed so far, line by line."""
        whole = (self.folder / "up.json").read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def states(self, name: str) -> list[str]:
        """The states that a process has gone through."""
        return [it["state"] for it in self.told() if it.get("name") == name]

    def is_ready(self) -> bool:
        """Whether all was ready once."""
        assert self.process.poll() is None, self.said()
        return any("url" in it for it in self.told())

    def said(self) -> str:
        """For messages of tests that fail."""
        logs = sorted((self.folder / "run" / "logs").glob("*.log"))
        tails = [f"{it.name}:\n{it.read_text(errors='replace')[-1500:]}" for it in logs]
        told = "\n".join(str(it) for it in self.told())
        return "\n".join([told, (self.folder / "up.err").read_text(), *tails])

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End an engine's first process, as the kernel does with one that takes too much memory; or stop it."""
        wanted = f"\0--port\0{self.ports[name]}\0".encode()
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = (int(it) for it in children if wanted in Path(f"/proc/{it}/cmdline").read_bytes())
        os.kill(pid, how)

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_S)

    def left_behind(self) -> list[str]:
        """Processes whose command line or environment names this run's folder, sockets, and ports that answer.

        vLLM leaves sockets of its own in TMPDIR, however it ends: those do not count.
        """
        found = [str(path) for path in (self.folder / "run").rglob("*") if path.is_socket()]
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid():
                continue
            with suppress(OSError):
                if str(self.folder).encode() in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                    found.append(f"process {process.name}: {(process / 'cmdline').read_bytes()[:120]!r}")
        for port in (self.port, self.control_port, *self.ports.values()):
            with suppress(OSError):
                asked(port, "GET", "/health", None, {})
                found.append(f"port {port}")
        return found


def _body(messages: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **more}).encode()


@contextmanager
def up_fleet(folder: Path, model: Path, instances: Mapping[str, Mapping[str, Any]] = EQUALS) -> Iterator[UpFleet]:
    """A fleet that is ready; gone at the end, if it has not ended before."""
    fleet = UpFleet(folder, model, instances)
    try:
        eventually(fleet.is_ready, START_S, fleet.said)
        yield fleet
    finally:
        if fleet.process.poll() is None:
            fleet.process.send_signal(signal.SIGTERM)
            try:
                fleet.process.wait(STOP_S)
            except subprocess.TimeoutExpired:  # its guard ends what it has started
                fleet.process.kill()
                fleet.process.wait()
