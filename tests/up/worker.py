"""A worker for tests of its parent: listens, says who it is, and does what is wished. `python -m tests.up.worker`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from headwater.conductor.quota_page import Quota, QuotaPage
from headwater.conductor.starting import REPLACED, read_start, say_ready
from headwater.values import split_address

WISH = "WORKER_WISH"


def main() -> None:
    """Serve until told to drain, or until the parent is gone."""
    start = read_start()
    wish = os.environ.get(WISH, "")
    if any(it.name == "refused" for it in start.fleet.tenants):
        sys.exit(2)
    if wish == "dies" or any(it.name == "deadly" for it in start.fleet.tenants):
        sys.exit(3)
    page = QuotaPage.open(start.quotas, start.row)
    has_room = page.enter(f"one-of-{start.row}", Quota(concurrency=1), time.monotonic()) is None
    terminated, told = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: None if wish == "stubborn" else os.write(told, b"\0") and None)
    signal.signal(REPLACED, lambda *_: None if wish in ("stubborn", "lingers") else os.write(told, b"\0") and None)
    host, port = split_address(start.fleet.conductor.listen)
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind((host, int(port)))
    server.listen()
    marks = Path(start.directory)
    (marks / f"up-{start.row}-{os.getpid()}").touch()
    if wish == "slow":
        select.select([start.lifeline], [], [], 1.0)
    if wish != "mute":
        say_ready(start)
    while True:
        readable, _, _ = select.select([server, start.lifeline, terminated], [], [])
        if server in readable:
            answer(server.accept()[0], start.row, [it.name for it in start.fleet.tenants], start.fleet.secret, has_room)
        if start.lifeline in readable or terminated in readable:
            break
    page.close()
    (marks / f"drained-{start.row}-{os.getpid()}").touch()


def answer(link: socket.socket, row: int, tenants: list[str], secret: str, has_room: bool) -> None:
    """Say who this is, and hang up."""
    with link:
        said = {"pid": os.getpid(), "row": row, "tenants": tenants, "secret": secret, "has_room": has_room}
        link.sendall(json.dumps(said).encode())


if __name__ == "__main__":
    main()
