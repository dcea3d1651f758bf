"""Install the systems that `headwater bench` compares with, each into an environment of its own in `.cache/peers`.

    .venv/bin/python benchmarks/install_peers.py [lmcache] [mooncake] [nixl] [dynamo] [vllm-router]

Without names all of them. LMCache and NIXL ask for CUDA packages that their parts for CPUs do not need, so each and the
few packages that it does need are installed without their dependencies; torch, numpy and the rest are those of `.venv`,
seen through a .pth file. Libraries of the system that Mooncake needs, and that this machine lacks, come from Debian's
packages, without root. `.venv` itself is not changed. Each folder appears in one piece; where one is there and works,
nothing is done.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
PEERS = ROOT / ".cache" / "peers"


@dataclass(frozen=True)
class Peer:
    """One system: its packages, and a check that imports what we use and prints the version."""

    title: str
    name: str
    version: str
    packages: tuple[str, ...]
    check: str
    debian: tuple[str, ...] = ()
    """Packages whose libraries it needs; they go where its own extension modules look for libraries first."""
    libraries: str = ""


LMCACHE = Peer(
    "LMCache",
    "lmcache",
    "0.5.6",
    ("lmcache==0.5.6", "aiofile==3.12.3", "aiofiles==25.1.0", "caio==0.12.10", "hiredis==3.5.0", "redis==8.1.0"),
    """
from importlib.metadata import version
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector
import lmcache.lmcache_fs, lmcache.lmcache_redis
print(version("lmcache"))
""",
)
MOONCAKE = Peer(
    "Mooncake",
    "mooncake",
    "0.3.13.post1",
    ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
    """
from importlib.metadata import version
import numpy, mooncake.engine, mooncake.store
print(version("mooncake-transfer-engine-non-cuda"))
""",
    ("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    "mooncake_transfer_engine_non_cuda.libs",
)
NIXL = Peer(
    "NIXL",
    "nixl",
    "1.5.1",
    ("nixl-cu12==1.5.1",),
    """
from importlib.metadata import version
import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config
print(version("nixl-cu12"))
""",
)
DYNAMO = Peer(
    "Dynamo",
    "dynamo",
    "1.6.1",
    ("ai-dynamo-runtime==1.6.1",),
    """
from importlib.metadata import version
from dynamo._core import RadixTree, run_mocker_trace_replay
print(version("ai-dynamo-runtime"))
""",
)
ROUTER = Peer(
    "vllm-router",
    "vllm_router",
    "0.1.17",
    ("vllm-router==0.1.17", "setproctitle==1.3.7", "orjson==3.11.4"),
    """
from importlib.metadata import version
from vllm_router.router import Router
import vllm_router.launch_router
print(version("vllm-router"))
""",
)
ALL = {it.name.replace("_", "-"): it for it in (LMCACHE, MOONCAKE, NIXL, DYNAMO, ROUTER)}


def run(command: list[str], hint: str) -> str:
    """Run to the end; what it printed. Raises SystemExit with its last words and a hint when it fails."""
    # A PYTHONPATH of the caller's would decide what pip and the check see as installed.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = {**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0"}
    done = subprocess.run(
        [*command],
        env={**environment, "LMCACHE_TRACK_USAGE": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{(done.stderr or done.stdout).strip()[-1500:]}\n\ninstall_peers: {hint}")
    return done.stdout


def works(peer: Peer, folder: Path) -> bool:
    """Whether what we compare with can be imported from an installation."""
    python = folder / "bin" / "python"
    if not python.exists():
        return False
    try:
        return run([str(python), "-c", peer.check], "").split()[-1] == peer.version
    except SystemExit:
        return False


def install(peer: Peer) -> None:
    """Make the environment beside its place, check it, and put it there."""
    target = PEERS / peer.name
    PEERS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PEERS) as scratch:
        fresh = Path(scratch) / peer.name
        python = str(fresh / "bin" / "python")
        run([str(PYTHON), "-m", "venv", "--without-pip", str(fresh)], "Python cannot make a virtual environment")
        # Our pip works for the other Python. It sees nothing of .venv yet, so it can neither use nor change it.
        command = [str(PYTHON), "-m", "pip", "--python", python, "install", "--no-deps", "--only-binary", ":all:"]
        wheels = f"{peer.title} has wheels for Linux on x86-64 only"
        run([*command, *peer.packages], f"pip could not install {', '.join(peer.packages)}. {wheels}")
        packages = subprocess.check_output(
            [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
        own = next((fresh / "lib").glob("python3*/site-packages"))
        (own / "shared.pth").write_text(f"{packages}\n")
        if peer.debian and not works(peer, fresh):
            unpack(peer, own / peer.libraries, Path(scratch))
        run([python, "-c", peer.check], f"{peer.title} is installed but cannot be imported, with the packages of .venv")
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)


def unpack(peer: Peer, place: Path, scratch: Path) -> None:
    """Put the libraries of the Debian packages that the peer needs into `place`."""
    run(
        ["sh", "-c", 'cd "$1" && shift && apt-get download -q "$@"', "sh", str(scratch), *peer.debian],
        f"apt-get could not download {', '.join(peer.debian)}, which {peer.title} needs; run `apt-get update`, or "
        "install them",
    )
    for package in sorted(scratch.glob("*.deb")):
        run(["dpkg", "-x", str(package), str(scratch / "unpacked")], f"{package.name} cannot be unpacked")
    for library in sorted((scratch / "unpacked").rglob("lib*.so.*")):
        library.rename(place / library.name)


def main() -> None:
    """The command line."""
    if not PYTHON.exists():
        raise SystemExit("install_peers: there is no .venv, whose packages the peers use; run `make setup` first")
    unknown = [it for it in sys.argv[1:] if it not in ALL]
    if unknown:
        raise SystemExit(f"install_peers: no {', '.join(unknown)}; there are {', '.join(ALL)}")
    for peer in [ALL[it] for it in sys.argv[1:]] or ALL.values():
        there = works(peer, PEERS / peer.name)
        if not there:
            install(peer)
        words = "is there:" if there else "->"
        sys.stderr.write(f"{peer.title} {peer.version} {words} {PEERS / peer.name}\n")


if __name__ == "__main__":
    main()
