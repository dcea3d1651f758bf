"""The HOST tier's memory: refused with the number when the host cannot give it, never a SIGBUS later."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import ResourceError
from headwater.tiers import host
from headwater.tiers.host import SPARE_BYTES, MappedMemory, available_bytes, create_memory
from headwater.types import PAGE_BYTES, SEGMENT_SHIFT, Extent
from tests.node.conftest import descriptors, eventually, needs_root
from tests.node.peers import ForkServer, as_user, in_cgroup

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test gives back what it opened and mapped."""
    gc.collect()
    before = descriptors(), mappings()
    yield
    gc.collect()
    assert (descriptors(), mappings()) == before


def mappings() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:" in line or "headwater-" in line for line in lines)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def peers(fork_server: ForkServer) -> Iterator[ForkServer]:
    yield fork_server
    fork_server.forget()


@pytest.fixture
def small_tmpfs() -> Iterator[Path]:
    """A tmpfs of 8 MiB, outside of pytest's own folders: those could not be removed if a killed run left it mounted."""
    needs_root()
    place = Path(tempfile.mkdtemp(prefix="headwater-test-tmpfs-"))
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)
    place.rmdir()


def pagewise(memory: MappedMemory) -> None:
    """Write to every page: a SIGBUS here would end the test process."""
    for base, size in zip(memory.bases, memory.sizes, strict=True):
        for offset in range(0, size, PAGE_BYTES):
            ctypes.memset(base + offset, 0x5A, 1)


# ---- what it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["memfd", "directory"])
def test_memory_is_zero_whole_and_nameless(tmp_path: Path, backing: str) -> None:
    memory = create_memory(MIB, "memfd" if backing == "memfd" else str(tmp_path), lock=False)
    assert not list(tmp_path.iterdir()), "nothing has a name that could be left behind"
    assert memory.sizes == [MIB]
    assert os.fstat(memory.descriptors[0]).st_size == MIB
    assert not os.get_inheritable(memory.descriptors[0])
    view = memory.view(0, MIB)
    assert bytes(view) == bytes(MIB)
    del view
    pagewise(memory)
    assert memory.view(PAGE_BYTES, 1)[0] == 0x5A
    memory.close()


def test_a_memfd_is_sealed_against_any_change_of_its_size() -> None:
    memory = create_memory(MIB, "memfd", lock=False)
    seals = fcntl.fcntl(memory.descriptors[0], fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for size in (0, MIB // 2, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptors[0], size)
    memory.close()


def test_two_mappings_show_the_same_bytes() -> None:
    one = create_memory(MIB, "memfd", lock=False)
    two = MappedMemory([os.dup(one.descriptors[0])], [MIB])
    one.view(5000, 3)[:] = b"abc"
    assert bytes(two.view(5000, 3)) == b"abc"
    assert ctypes.string_at(two.address(5000), 3) == b"abc"
    assert one.bases != two.bases
    one.close()
    two.close()


def test_addresses_of_several_segments() -> None:
    parts = [create_memory(MIB, "memfd", lock=False) for _ in range(2)]
    both = MappedMemory([os.dup(it.descriptors[0]) for it in parts], [MIB, MIB])
    place = Extent(1, 4096, 10).address
    assert place >> SEGMENT_SHIFT == 1
    both.view(place, 2)[:] = b"hi"
    assert bytes(parts[1].view(4096, 2)) == b"hi"
    assert bytes(parts[0].view(4096, 2)) == b"\0\0"
    assert both.address(place) == both.bases[1] + 4096
    for it in (*parts, both):
        it.close()


def test_prefaulting_touches_every_page_and_can_be_stopped() -> None:
    memory = create_memory(3 * MIB, "memfd", lock=False)
    memory.view(7, 1)[0] = 9
    assert resident(memory) == 1
    stop = threading.Event()
    stop.set()
    assert memory.prefault(stop) == 0
    stop.clear()
    assert memory.prefault(stop) == 3 * MIB
    assert resident(memory) == 3 * MIB // PAGE_BYTES
    assert memory.view(7, 1)[0] == 9, "and changes none"
    memory.close()


def resident(memory: MappedMemory) -> int:
    return os.fstat(memory.descriptors[0]).st_blocks * 512 // PAGE_BYTES


def test_a_view_outlives_close_and_then_nothing_does() -> None:
    memory = create_memory(MIB, "memfd", lock=False)
    before = mappings()
    view = memory.view(0, 4)
    memory.close()
    view[:] = b"late"
    assert bytes(view) == b"late"
    assert mappings() == before
    del view
    assert mappings() == before - 1


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_the_lifeline_ends_with_the_last_mapping(segments: int) -> None:
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    parts = [create_memory(MIB, "memfd", lock=False) for _ in range(segments)]
    memory = MappedMemory([os.dup(it.descriptors[0]) for it in parts], [MIB] * segments, lifeline=theirs)
    views = [memory.view(index << SEGMENT_SHIFT, 4) for index in range(segments)]
    memory.close()
    memory.close()
    while views:
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)
        views.pop(0 if segments == 2 else -1)
    assert os.read(ours, 1) == b"", "end of file"
    os.close(ours)
    for it in parts:
        it.close()


# ---- what it refuses ---------------------------------------------------------------------------------------


def test_a_segment_smaller_than_announced_is_not_mapped() -> None:
    """Its reader would meet a SIGBUS at the first page that is not there."""
    small = os.memfd_create("small")
    os.ftruncate(small, PAGE_BYTES)
    with pytest.raises(ResourceError, match=f"has {PAGE_BYTES} bytes, {MIB} announced"):
        MappedMemory([small], [MIB])


@pytest.mark.parametrize("sizes", [[-1], [0], [1 << 70], [MIB, MIB], []])
def test_sizes_that_cannot_be(sizes: list[int]) -> None:
    descriptor = os.memfd_create("odd")
    if sizes == [0]:  # would map the whole of an empty file
        os.ftruncate(descriptor, 0)
    with pytest.raises(ResourceError):
        MappedMemory([descriptor], sizes)


def test_no_client_can_map_what_is_not_memory() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(ResourceError):
        MappedMemory([reader], [MIB])


def test_more_than_a_segment_can_address() -> None:
    with pytest.raises(ResourceError, match=f"above the {1 << SEGMENT_SHIFT} bytes of one segment"):
        create_memory(1 << SEGMENT_SHIFT, "memfd", lock=False)


@pytest.mark.parametrize("backing", ["memfd", "/dev/shm"])
def test_more_than_is_available(monkeypatch: pytest.MonkeyPatch, backing: str) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 10 * MIB)
    with pytest.raises(
        ResourceError, match=rf"host_memory needs {10 * MIB} bytes and {SPARE_BYTES} to spare, {10 * MIB}"
    ):
        create_memory(10 * MIB, backing, lock=False)
    monkeypatch.setattr(host, "available_bytes", lambda: 10 * MIB + SPARE_BYTES)
    create_memory(10 * MIB, backing, lock=False).close()


def test_a_small_tmpfs_is_refused_with_the_number_it_would_need(small_tmpfs: Path) -> None:
    with pytest.raises(ResourceError, match=rf"has {8 * MIB} bytes free, {9 * MIB} are needed; enlarge"):
        create_memory(9 * MIB, str(small_tmpfs), lock=False)
    assert not list(small_tmpfs.iterdir())
    memory = create_memory(8 * MIB, str(small_tmpfs), lock=False)
    pagewise(memory)
    memory.close()


def test_a_tmpfs_that_fills_up_later_costs_no_sigbus(small_tmpfs: Path) -> None:
    """The pages were reserved before anybody wrote to them."""
    memory = create_memory(6 * MIB, str(small_tmpfs), lock=False)
    with pytest.raises(OSError, match="No space left"):
        (small_tmpfs / "foreign").write_bytes(bytes(8 * MIB))
    pagewise(memory)
    memory.close()


def test_a_tmpfs_that_fills_up_during_the_start_is_refused(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink

    def fill(path: str) -> None:
        real(path)
        (small_tmpfs / "foreign").write_bytes(bytes(4 * MIB))

    monkeypatch.setattr(os, "unlink", fill)
    with pytest.raises(ResourceError, match=f"cannot reserve {6 * MIB} bytes: .*No space left"):
        create_memory(6 * MIB, str(small_tmpfs), lock=False)
    assert [it.name for it in small_tmpfs.iterdir()] == ["foreign"]


@pytest.mark.parametrize("backing", ["/proc/nowhere", "/dev/null", "/proc"])
def test_a_backing_that_is_no_directory_to_write_in(backing: str) -> None:
    with pytest.raises(ResourceError, match=f"node.backing={backing}"):
        create_memory(MIB, backing, lock=False)


def test_a_memfd_that_cannot_have_its_size() -> None:
    """RLIMIT_FSIZE stands for whatever the kernel may have against it."""
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(ResourceError, match=f"memfd of {2 * MIB} bytes"):
            create_memory(2 * MIB, "memfd", lock=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)


def test_locking_beyond_the_limit_is_refused_with_the_number(peers: ForkServer) -> None:
    needs_root()  # to become a user whom the limit binds
    user = peers.start(as_user, user=65534, action="lock", size_bytes=4 * MIB, limit_bytes=MIB)
    kind, text = user.hear()
    assert kind == "ResourceError"
    assert f"RLIMIT_MEMLOCK of {4 * MIB} bytes, the limit is {MIB}" in text
    assert "ulimit -l 4096" in text
    user = peers.start(as_user, user=65534, action="lock", size_bytes=MIB, limit_bytes=MIB)
    assert user.hear()[0] == "none"


def test_memory_that_cannot_be_locked_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MappedMemory) -> None:
        raise ResourceError("no")

    monkeypatch.setattr(MappedMemory, "lock", fail)
    with pytest.raises(ResourceError):
        create_memory(MIB, "memfd", lock=True)


# ---- how much there is -------------------------------------------------------------------------------------


def test_what_is_available_is_less_than_the_host_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() <= total


def test_meminfo(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24576 kB\nMemFree:  1 kB\nMemAvailable:    2048 kB\n")
    assert host._meminfo_available(file) == 2 * MIB
    file.write_text("MemTotal:       24576 kB\n")
    with pytest.raises(ResourceError, match="MemAvailable"):
        host._meminfo_available(file)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/a/b\n"
V1 = "5:cpu,cpuacct:/\n4:memory:/a/b\n1:name=systemd:/x\n0::/\n"
CGROUPS = [
    ("v2: none", V2, {"cgroup.procs": ""}, []),
    ("v2: no limit", V2, {"a/b/memory.max": "max\n", "a/b/memory.current": "100\n"}, []),
    ("v2: a limit", V2, {"a/b/memory.max": "1000\n", "a/b/memory.current": "300\n"}, [700]),
    (
        "v2: the parent's limit counts too",
        V2,
        {"a/b/memory.max": "max\n", "a/b/memory.current": "3", "a/memory.max": "1000", "a/memory.current": "900"},
        [100],
    ),
    (
        "v2: page cache gives way",
        V2,
        {
            "a/b/memory.max": "1000",
            "a/b/memory.current": "900",
            "a/b/memory.stat": "anon 1\ninactive_file 250\nactive_file 7\n",
        },
        [350],
    ),
    ("v2: used up", V2, {"a/b/memory.max": "1000", "a/b/memory.current": "2000"}, [0]),
    ("v2: inside a namespace", "0::/\n", {"memory.max": "500", "memory.current": "100"}, [400]),
    (
        "v1: a limit, and hierarchical page cache",
        V1,
        {
            "memory/a/b/memory.limit_in_bytes": "1000",
            "memory/a/b/memory.usage_in_bytes": "900",
            "memory/a/b/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "0",
        },
        [150, 9223372036854771712],
    ),
    (
        "v1: another namespace's path",
        V1,
        {"memory/memory.limit_in_bytes": "7", "memory/memory.usage_in_bytes": "2"},
        [5],
    ),
    (
        "v1: memory with others",
        "3:hugetlb,memory:/\n",
        {"memory/memory.limit_in_bytes": "9", "memory/memory.usage_in_bytes": "1"},
        [8],
    ),
    ("not memory", "3:memoryless:/\n", {"memory/memory.limit_in_bytes": "9", "memory/memory.usage_in_bytes": "1"}, []),
]


@pytest.mark.parametrize(("memberships", "files", "left"), [it[1:] for it in CGROUPS], ids=[it[0] for it in CGROUPS])
def test_cgroups(tmp_path: Path, memberships: str, files: dict[str, str], left: list[int]) -> None:
    root = tree(tmp_path / "cgroup", files)
    (tmp_path / "self").write_text(memberships)
    assert host._cgroup_available(tmp_path / "self", root) == left


def test_a_kernel_without_cgroups(tmp_path: Path) -> None:
    assert host._cgroup_available(tmp_path / "nothing", tmp_path) == []


def test_a_cgroups_limit_is_heeded(peers: ForkServer) -> None:
    """A real one, where the host lets us make one: otherwise the node would be killed, perhaps hours later."""
    needs_root()
    version2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup" if version2 else "/sys/fs/cgroup/memory")
    group = root / f"headwater-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if version2 else "memory.limit_in_bytes")).write_text(str(SPARE_BYTES + 96 * MIB))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"cannot make a memory cgroup: {error}")
    try:
        small = peers.start(in_cgroup, cgroup=str(group), size_bytes=16 * MIB)
        assert small.hear() == ["none", ""]
        assert small.ended() == []
        large = peers.start(in_cgroup, cgroup=str(group), size_bytes=128 * MIB)
        kind, text = large.hear()
        assert kind == "ResourceError"
        assert f"needs {128 * MIB} bytes" in text
        assert large.ended() == []
    finally:
        eventually(lambda: removed(group))  # its last process may be just leaving


def removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True
