"""A whole Conductor as its users run it: `headwater conductor` in processes of its own, over fake engines of this one.

with running(tmp_path, engines=2) as fleet:
    answer = fleet.post("/v1/chat/completions", {...})
    fleet.engines[0].script(Script(close_at=3))
    fleet.control("GET", "/fleet")
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.conductor.engine import Engine, serving
from tests.node.conftest import eventually
from tests.servers import free_port

START_S, STOP_S, ASK_S = 60.0, 20.0, 20.0


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without [DONE], which it ends with."""
        parts = self.body.split(b"\n\n")
        assert parts[-2:] == [b"data: [DONE]", b""], f"the stream ends with {self.body[-100:]!r}"
        return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]

    @property
    def text(self) -> str:
        """What was said in the first choice, streamed or not."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            choices = [choice for event in self.events for choice in event.get("choices") or ()]
            return "".join(it["delta"].get("content") or "" if "delta" in it else it["text"] for it in choices)
        choice = self.json["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])


@dataclass
class Fleet:
    """A running one."""

    engines: Sequence[Engine]
    port: int
    control_port: int
    process: subprocess.Popen[bytes]
    log: Path
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        """Ask, and read to the end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asked(
            self.port, "POST", path, data, {"content-type": "application/json", **self.headers, **(headers or {})}
        )

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return asked(self.port, "GET", path, None, {**self.headers, **(headers or {})})

    def control(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
        """Ask its control API."""
        data = None if body is None else json.dumps(body).encode()
        return asked(self.control_port, method, path, data, headers or {})

    def state(self) -> Any:
        """What `headwater fleet --json` is made of."""
        return self.control("GET", "/fleet").json

    def workers(self) -> list[int]:
        """The workers' process ids."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(it) for it in children.split()]

    def logs(self) -> str:
        return self.log.read_text(errors="replace")


def asked(
    port: int, method: str, path: str, body: bytes | None, headers: dict[str, str], silent_s: float = ASK_S
) -> Answer:
    """One request on a connection of its own, which may be silent for so long."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=silent_s)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def chat(text: str, **more: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def until(fact: Callable[[], object], what: Callable[[], object], within_s: float = 10.0) -> None:
    """Poll until something is so."""
    eventually(fact, within_s, what)


@contextmanager
def running(
    folder: Path,
    engines: int = 2,
    *,
    file: dict[str, Any] | None = None,
    instance: dict[str, Any] | None = None,
    about: Callable[[int, Engine], dict[str, Any]] | None = None,
    engine: dict[str, Any] | None = None,
    resources: Sequence[tuple[int, int]] = (),
    **conductor: Any,
) -> Iterator[Fleet]:
    """A Conductor that is ready, over so many toy engines; `file` has more of the fleet file, `instance` of each of its
    instances, `about` of one of them, `conductor` of its section. `engine` has options of the engines; `resources` are
    the most that its processes may have (`resource.RLIMIT_...`)."""
    with ExitStack() as stack:
        served = [stack.enter_context(serving(**(engine or {}))) for _ in range(engines)]
        port, control_port = free_port(), free_port()
        section = {"listen": f"127.0.0.1:{port}", "control": f"127.0.0.1:{control_port}", "tokens": "none", **conductor}
        instances = [
            {"name": f"e{number}", "model": "toy", "url": it.url, "events": "off", "block_tokens": 16}
            | (instance or {})
            | (about(number, it) if about is not None else {})
            for number, it in enumerate(served)
        ]
        path = folder / "fleet.yaml"
        path.write_text(yaml.safe_dump({"instances": instances, "conductor": section, **(file or {})}))
        log = folder / "conductor.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_within(resources), sys.executable, "-m", "headwater", "conductor", str(path),
                 "--runtime-dir", str(folder / "run")],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ),
                start_new_session=True,
            )  # fmt: skip
        fleet = Fleet(served, port, control_port, process, log)
        try:
            until(lambda: process.poll() is not None or b"serving" in log.read_bytes(), fleet.logs, START_S)
            assert process.poll() is None, fleet.logs()
            yield fleet
        finally:
            stopped(process)


def _within(resources: Sequence[tuple[int, int]]) -> list[str]:
    """A command that runs another one within these."""
    if not resources:
        return []
    words = "import os, resource, sys\n"
    words += "".join(f"resource.setrlimit({which}, ({most}, {most}))\n" for which, most in resources)
    return [sys.executable, "-c", words + "os.execv(sys.argv[1], sys.argv[1:])"]


def stopped(process: subprocess.Popen[bytes]) -> int:
    """End it as an operator does, or with force after a while; its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
