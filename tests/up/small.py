"""Small processes for tests of supervision, and a supervisor of them that can be killed: `python -m tests.up.small`."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.up.plan import Kind, Probe, Process
from headwater.up.supervise import Supervisor, Told

SCRIPT = """
import os, signal, socket, subprocess, sys
path, *wishes = sys.argv[1:]
with open(path + ".pids", "a") as pids:
    print(os.getpid(), file=pids)
if "dies" in wishes:
    print("I cannot", flush=True)
    sys.exit(3)
if "hopeless" in wishes:
    sys.exit(2)
if "dies-once" in wishes and not os.path.exists(path + ".died"):
    open(path + ".died", "w").close()
    sys.exit(3)
if "stubborn" in wishes:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "hangs-up" in wishes:
    signal.signal(signal.SIGHUP, lambda *_: open(path + ".hup", "w").close())
if "has-child" in wishes:
    other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(path + ".pids", "a") as pids:
        print(other.pid, file=pids)
if "shares" in wishes:
    from multiprocessing.shared_memory import SharedMemory
    shared = SharedMemory(create=True, size=4096)
    with open(path + ".shm", "w") as name:
        name.write(shared.name)
    if not os.fork():
        signal.pause()  # it uses the memory as well, and outlives us
if os.path.exists(path):
    os.unlink(path)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
if "mute" not in wishes:
    server.listen()
while True:
    link = server.accept()[0] if "mute" not in wishes else signal.pause()
    link.recv(64)
    link.sendall(b"+PONG")
    link.close()
"""


def small(
    folder: Path, name: str, *wishes: str, kind: Kind = Kind.ENGINE, after: tuple[str, ...] = (), stop_s: float = 10.0,
    ready_s: float = 30.0,
) -> Process:  # fmt: skip
    """A process that answers pings once it is ready, and does what is wished."""
    socket_path = f"{folder}/{name}"
    return Process(
        name=name,
        kind=kind,
        command=(sys.executable, "-S", "-c", SCRIPT, socket_path, *wishes),
        environment={},
        probe=Probe("redis", socket_path),
        ready_s=ready_s,
        stop_s=stop_s,
        after=after,
    )


def pids(folder: Path, name: str) -> list[int]:
    """All processes that were ever started under this name."""
    path = folder / f"{name}.pids"
    return [int(it) for it in path.read_text().split()] if path.exists() else []


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Run:
    """A supervisor in a thread of the test."""

    def __init__(self, folder: Path, *processes: Process) -> None:
        self.told: list[Told] = []
        self.ready = threading.Event()
        self.error: HeadwaterError | None = None
        self.supervisor = Supervisor(processes, folder, self.told.append, draw=lambda: 0.999)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.supervisor:
                self.supervisor.run(self.ready.set)
        except HeadwaterError as error:  # the test looks at it
            self.error = error

    def states(self, name: str) -> list[str]:
        """What became of a process, in order."""
        return [it.state.value for it in self.told if it.name == name]

    def join(self, within_s: float = 20.0) -> None:
        """Wait for its end."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), self.supervisor


def main() -> None:
    """Supervise two processes in the folder of the first argument, until killed; says `ready`."""
    folder = Path(sys.argv[1])
    processes = [small(folder, "a", "has-child", "stubborn"), small(folder, "b")]
    with Supervisor(processes, folder, lambda _: None, draw=lambda: 0.0) as supervisor:
        signal.signal(signal.SIGTERM, lambda *_: supervisor.stop())
        supervisor.run(lambda: print("ready", flush=True))


if __name__ == "__main__":
    main()
