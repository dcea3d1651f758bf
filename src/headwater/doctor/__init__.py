"""Is this host ready? Each check looks at one thing and says what it found and, if need be, what to do.

`fail` is what keeps a node with these settings, or an engine beside it, from working; `warn` is what costs speed
or surprises later. No check changes anything on the host; a remote tier is asked to take and give back a small value.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import resource
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from headwater import _kernels
from headwater._kernels import codec
from headwater.config import NodeConfig
from headwater.doctor.cluster import check_cluster
from headwater.doctor.findings import Finding, Verdict
from headwater.doctor.tiers import check_tiers
from headwater.errors import HeadwaterError, UnavailableError
from headwater.node.client import fetch_status
from headwater.node.messages import PROTOCOL
from headwater.tiers.host import SPARE_BYTES, available_bytes
from headwater.version import VERSION

__all__ = ["Finding", "Verdict", "examine"]

MADV_POPULATE_WRITE = 23
DESCRIPTORS_SPARE = 128
SHM_LEAST_BYTES = 64 << 20
NODE_S = 1.0
VLLM_OLDEST, VLLM_TESTED, VLLM_TOO_NEW = (0, 23), (0, 29), (0, 33)
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
OVERCOMMIT = "docker run --shm-size=1g, or --ipc=host"


def examine(config: NodeConfig, *, node_expected: bool = False) -> Iterator[Finding]:
    """All checks for a node with these settings; `node_expected` makes its absence a failure."""
    reachable = check_node(config.socket, node_expected)
    yield check_python()
    yield from check_platform()
    yield from check_kernel()
    yield check_memory(config, node_runs=reachable.verdict is Verdict.OK)
    yield check_shm(Path("/dev/shm"))
    if config.lock_memory:
        yield check_memlock(config.host_memory)
    yield check_descriptors(config.max_sessions)
    yield check_copies()
    yield check_codecs()
    yield from check_packages()
    yield from check_vllm()
    yield check_directory(Path(config.socket.removeprefix("unix:")).parent)
    yield from check_tiers(config, node_runs=reachable.verdict is Verdict.OK)
    yield from check_cluster(config)
    yield reachable
    if reachable.verdict is not Verdict.OK and config.metrics_address is not None:
        yield check_port(*config.metrics_address)


def check_python() -> Finding:
    """The interpreter: addresses are 64 bits wide."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.maxsize < 1 << 32:
        return Finding("python", Verdict.FAIL, f"{found}, 32 bits", "use a 64-bit Python")
    return Finding("python", Verdict.OK, found)


def check_platform() -> Iterator[Finding]:
    """System and machine."""
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs"
    if platform.system() != "Linux":
        yield Finding("platform", Verdict.FAIL, found, "headwater shares memory by means that only Linux has")
    elif platform.machine() not in ("x86_64", "aarch64"):
        yield Finding("platform", Verdict.WARN, found, "tested on x86_64 and aarch64 only; run the tests here first")
    else:
        yield Finding("platform", Verdict.OK, found)


def check_kernel() -> Iterator[Finding]:
    """What the kernel offers for shared memory."""
    try:
        descriptor = os.memfd_create("headwater-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.close(descriptor)
        yield Finding("memfd", Verdict.OK, "with seals")
    except OSError as error:
        remedy = "allow memfd_create (seccomp profile), or set node.backing to a directory on tmpfs"
        yield Finding("memfd", Verdict.FAIL, f"refused: {error.strerror}", remedy)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(MADV_POPULATE_WRITE)
            yield Finding("prefault", Verdict.OK, "MADV_POPULATE_WRITE")
        except OSError:
            remedy = "Linux 5.14 or newer prefaults faster; here pages are touched one by one"
            yield Finding("prefault", Verdict.WARN, "no MADV_POPULATE_WRITE", remedy)
    yield check_huge_pages(HUGE_PAGES)


def check_huge_pages(setting: Path) -> Finding:
    """Whether shared memory may have huge pages."""
    try:
        text = setting.read_text(encoding="ascii")
    except OSError:
        text = ""
    chosen = re.search(r"\[(\w+)\]", text)
    found = chosen.group(1) if chosen else "not offered"
    if found in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", Verdict.OK, found)
    remedy = f"as root: echo advise > {setting} (copies and the node's start get faster)"
    return Finding("huge pages", Verdict.WARN, f"{found} for shared memory", remedy)


def check_memory(config: NodeConfig, *, node_runs: bool) -> Finding:
    """Whether the host, and every cgroup around us, can give the configured memory."""
    wanted = config.host_memory
    if node_runs:
        return Finding("memory", Verdict.OK, f"the running node has its own; {available_bytes()} bytes are left")
    if config.backing != "memfd":
        return _check_backing(Path(config.backing), wanted)
    free = available_bytes()
    found = f"{free} bytes available, node.host_memory is {wanted}"
    if free < wanted + SPARE_BYTES:
        most = max(free - SPARE_BYTES, 0) >> 20
        remedy = f"lower node.host_memory to {most}MiB or less, or raise the memory limit of this host or container"
        return Finding("memory", Verdict.FAIL, found, remedy)
    return Finding("memory", Verdict.OK, found)


def _check_backing(directory: Path, wanted: int) -> Finding:
    name = "memory"
    try:
        room = os.statvfs(directory)
    except OSError as error:
        remedy = "create it on tmpfs or hugetlbfs, or set node.backing to memfd"
        return Finding(name, Verdict.FAIL, f"node.backing = {directory}: {error.strerror}", remedy)
    free = room.f_bavail * room.f_frsize
    found = f"{free} bytes free in {directory}, node.host_memory is {wanted}"
    if free < wanted:
        return Finding(name, Verdict.FAIL, found, "enlarge that file system or lower node.host_memory")
    return Finding(name, Verdict.OK, found)


def check_shm(directory: Path) -> Finding:
    """Room in /dev/shm: not the node's (it uses memfd), but vLLM's ranks talk through it."""
    try:
        room = os.statvfs(directory)
    except OSError as error:
        return Finding(str(directory), Verdict.WARN, f"{error.strerror}", f"vLLM's ranks need it: {OVERCOMMIT}")
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    found = f"{free >> 20} MiB free of {total >> 20} MiB"
    if free < SHM_LEAST_BYTES:
        return Finding(str(directory), Verdict.WARN, found, f"vLLM's ranks need more: {OVERCOMMIT}")
    return Finding(str(directory), Verdict.OK, found)


def check_memlock(wanted: int) -> Finding:
    """Whether that much memory may be locked."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    if limit != resource.RLIM_INFINITY and limit < wanted:
        remedy = f"node.lock_memory needs {wanted}: ulimit -l {wanted // 1024} (or LimitMEMLOCK=, --ulimit memlock=-1)"
        return Finding("memlock", Verdict.FAIL, found, remedy)
    return Finding("memlock", Verdict.OK, found)


def check_descriptors(sessions: int) -> Finding:
    """Whether that many connections fit; the node raises its soft limit itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = 2 * sessions + DESCRIPTORS_SPARE
    found = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} allowed"
    if hard != resource.RLIM_INFINITY and hard < needed:
        remedy = f"node.max_sessions = {sessions} needs {needed}: ulimit -Hn {needed}, or lower it"
        return Finding("file descriptors", Verdict.WARN, found, remedy)
    return Finding("file descriptors", Verdict.OK, f"{found}, {needed} needed")


def check_copies() -> Finding:
    """Whether the C copies were built, and for which instructions."""
    if _kernels.NATIVE:
        return Finding("copies", Verdict.OK, f"native, {_kernels.ISA}")
    remedy = "install a C compiler and then headwater again; until then numpy copies, correctly but slower"
    return Finding("copies", Verdict.WARN, "numpy", remedy)


def check_codecs() -> Finding:
    """Whether the C part of codecs was built."""
    if codec.ISAS:
        return Finding("codecs", Verdict.OK, f"native, {codec.ISAS[0]}")
    remedy = "install a C compiler and then headwater again; until then numpy shuffles and quantises, slower"
    return Finding("codecs", Verdict.WARN, "numpy", remedy)


def check_packages() -> Iterator[Finding]:
    """Versions of what we stand on, and of torch where it is."""
    yield Finding("headwater", Verdict.OK, f"{VERSION}, protocol {PROTOCOL}")
    for name in ("numpy", "msgspec", "xxhash", "prometheus-client", "rich"):
        version = _version(name)
        if version is None:
            yield Finding(name, Verdict.FAIL, "not installed", f"pip install {name}")
        else:
            yield Finding(name, Verdict.OK, version)
    torch = _version("torch")
    yield Finding("torch", Verdict.OK, torch or "not here; only an engine's environment needs it")


def check_vllm() -> Iterator[Finding]:
    """Which vLLM is here, whether it was tested with this headwater, and whether it finds the plug-in."""
    if importlib.util.find_spec("vllm") is None:
        yield Finding("vllm", Verdict.OK, "not here; run doctor again in the engine's environment")
        return
    yield judge_vllm(_version("vllm") or _version_of_module("vllm") or "unknown")
    plug_ins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(it.value.startswith("headwater.") for it in plug_ins):
        yield Finding("vllm plug-in", Verdict.OK, "registered as HeadwaterConnector")
    else:
        remedy = 'pip install headwater here, or give "kv_connector_module_path": "headwater.engines.vllm"'
        yield Finding("vllm plug-in", Verdict.WARN, "not registered", remedy)


def judge_vllm(version: str) -> Finding:
    """Whether a version of vLLM is one that the plug-in was made for."""
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else None
    if number is None:
        return Finding("vllm", Verdict.WARN, version, "the version cannot be read; 0.29 to 0.32 were tested")
    if number < VLLM_OLDEST:
        return Finding("vllm", Verdict.FAIL, version, "the plug-in needs vLLM 0.23 or newer; 0.29 to 0.32 were tested")
    if number < VLLM_TESTED:
        return Finding("vllm", Verdict.WARN, version, "it loads, but was not run with this one; use 0.29 to 0.32")
    if number >= VLLM_TOO_NEW:
        return Finding(
            "vllm", Verdict.WARN, version, "newer than what was tested (0.29 to 0.32); try it before relying on it"
        )
    return Finding("vllm", Verdict.OK, version)


def check_directory(directory: Path) -> Finding:
    """Whether a node can have its socket here, and nobody else can take its place."""
    name = "socket directory"
    try:
        found = directory.stat()
    except FileNotFoundError:
        parent = next(it for it in directory.parents if it.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding(name, Verdict.OK, f"{directory} will be created")
        remedy = f"create it with mode 0700 for this user, or choose another node.socket; {parent} is not writable"
        return Finding(name, Verdict.FAIL, f"{directory} is missing", remedy)
    except OSError as error:
        return Finding(name, Verdict.FAIL, f"{directory}: {error.strerror}", "choose another node.socket")
    mode = f"{directory}, mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode):
        return Finding(name, Verdict.FAIL, mode, "not a directory; remove it or choose another node.socket")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        return Finding(name, Verdict.FAIL, mode, f"others can write there: chmod 700 {directory}")
    if found.st_uid not in (os.getuid(), 0):
        return Finding(name, Verdict.FAIL, mode, "it is another user's; choose another node.socket")
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(name, Verdict.FAIL, mode, "this user cannot write there; choose another node.socket")
    return Finding(name, Verdict.OK, mode)


def check_node(address: str, expected: bool) -> Finding:
    """Whether a node answers there, and speaks our protocol."""
    try:
        state = fetch_status(address, NODE_S)
    except UnavailableError as error:
        verdict = Verdict.FAIL if expected else Verdict.WARN
        return Finding("node", verdict, str(error), "start one with `headwater node`, or name it with --node")
    except HeadwaterError as error:
        return Finding("node", Verdict.FAIL, str(error), "use the same headwater for the node and for this command")
    found = f"headwater {state['version']}, protocol {state['protocol']} at {address}"
    if state["version"] != VERSION:
        remedy = f"this is headwater {VERSION}; restart the node with it when convenient"
        return Finding("node", Verdict.WARN, found, remedy)
    return Finding("node", Verdict.OK, found)


def check_port(host: str, port: int) -> Finding:
    """Whether the metrics port is free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        remedy = "stop what listens there, or set node.metrics to another port or off"
        return Finding("metrics port", Verdict.FAIL, f"{host}:{port}: {os.strerror(error.errno or 0)}", remedy)
    return Finding("metrics port", Verdict.OK, f"{host}:{port} is free")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_of_module(module: str) -> str | None:
    """The version of whatever distribution brought a module: vLLM is published under several names."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return _version(names[0]) if names else None
