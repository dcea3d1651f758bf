"""What the report says of the machine, read from a fake /proc and /sys."""

from pathlib import Path

from headwater.bench.machine import Observer


def make_proc(root: Path, ticks: str, load: str) -> Path:
    root.mkdir(exist_ok=True)
    (root / "stat").write_text(f"cpu  {ticks}\ncpu0 1 2 3\n")
    (root / "loadavg").write_text(f"{load} 0.5 0.5 1/100 1\n")
    (root / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast One\nflags\t\t: fpu hypervisor avx2\n")
    (root / "meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\n")
    return root


def make_sys(root: Path) -> Path:
    folder = root / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always [madvise] never\n")
    (folder / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    return root


def test_what_happened_meanwhile_is_a_difference(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "100 0 0 800 100 0 0 0 0 0", "0.25")
    observer = Observer(proc, make_sys(tmp_path / "sys"))
    # 100 ticks later: 50 used, 30 idle, 10 waiting for the disk, 10 stolen; guest time is part of user time.
    make_proc(proc, "140 5 5 830 110 0 0 10 7 7", "1.5")
    machine = observer.describe()
    assert (machine.steal_percent, machine.busy_percent) == (10.0, 60.0)
    assert (machine.load_before, machine.load_after) == (0.25, 1.5)
    assert (machine.cpu, machine.hypervisor, machine.memory_bytes) == ("Fast One", True, 1 << 20)
    assert (machine.huge_pages, machine.shared_huge_pages) == ("madvise", "never")


def test_a_machine_that_tells_nothing_is_described_all_the_same(tmp_path: Path) -> None:
    machine = Observer(tmp_path / "no", tmp_path / "nothing").describe()
    assert machine.cpu
    assert machine.cores >= 1
    assert (machine.huge_pages, machine.steal_percent, machine.memory_bytes) == ("unknown", 0.0, 0)


def test_this_machine() -> None:
    machine = Observer().describe()
    assert machine.memory_bytes > 1 << 28
    assert 0 <= machine.busy_percent <= 100
