"""Fetch Debian's Redis server, its benchmark and fio into `.cache/tools`, for tests and yardsticks; installs nothing.

    .venv/bin/python scripts/get_tools.py

Needs apt-get and dpkg, and no root. The folder appears in one piece; where it is there already nothing is done.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / ".cache" / "tools"
PACKAGES = ("redis-server", "redis-tools", "fio")
LIBRARIES_MAX = 60
"""fio's libraries for storage that nobody here has are many; more than this means that something is wrong."""


def get(target: Path) -> None:
    """Unpack the packages and the libraries that this machine lacks into target. Raises SystemExit with the reason
    when they cannot be had."""
    if (target / "usr/bin/redis-server").exists():
        return
    for name in ("apt-get", "dpkg"):
        if shutil.which(name) is None:
            raise SystemExit(f"no {name}: this is not Debian or Ubuntu; tests with Redis 7 will be skipped")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        done = subprocess.run(
            ["apt-get", "download", "-q", *_with_libraries()], cwd=scratch, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"apt-get could not download them; tests with Redis 7 are skipped:\n{done.stderr[-500:]}")
        unpacked = Path(scratch) / "tools"
        for package in sorted(Path(scratch).glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
        unpacked.rename(target)


def _with_libraries() -> list[str]:
    """The packages, and what `apt-get install` would bring along on this machine."""
    plan = subprocess.run(
        ["apt-get", "install", "--simulate", "--no-install-recommends", "-q", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.split()[1] for line in plan.stdout.splitlines() if line.startswith("Inst ")]
    return found if PACKAGES[0] in found and len(found) <= LIBRARIES_MAX else list(PACKAGES)


if __name__ == "__main__":
    get(TARGET)
    print(f"{TARGET / 'usr/bin'}", file=sys.stderr)
