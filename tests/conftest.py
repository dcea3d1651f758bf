"""What all tests share: one printed seed, short names for temporary folders, the model folder, and the order fast
before slow."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
DEFAULT_SEED = 20251129
FAILED = pytest.StashKey[bool]()
TEMPORARY = pytest.StashKey[Path]()
ENGINES = "engine and not alone"
BY_THEMSELVES = ("alone", ENGINES)
"""What `make test` asks for in its second and third run."""
MARKED = re.compile(r"\bmark\.(alone|engine)\b")
"""How a module says that it has one."""
SHARED = ("__init__.py", "conftest.py")

# A loaded machine is no reason to fail, so no deadline; a failure prints what reproduces it.
hypothesis.settings.register_profile("headwater", deadline=None, print_blob=True)
hypothesis.settings.load_profile("headwater")


def seed_of(config: pytest.Config) -> int:
    """The seed of this run: --hypothesis-seed, else HEADWATER_TEST_SEED, else always the same."""
    return int(config.getoption("--hypothesis-seed"))


def own_cores(cores: list[int], number: int, count: int) -> list[int]:
    """Which of the cores one of `count` workers gets; some get the same where there are fewer."""
    begin, end = number * len(cores) // count, (number + 1) * len(cores) // count
    return cores[begin:end] or [cores[number % len(cores)]]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = int(os.environ.get("HEADWATER_TEST_SEED", DEFAULT_SEED))
    # A worker that runs real engines keeps to cores of its own, with all that it starts: so those of one do not slow
    # down those of another, and none has more threads that wait by spinning than it has cores.
    if config.option.markexpr == ENGINES and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, own_cores(sorted(os.sched_getaffinity(0)), int(worker.removeprefix("gw")), count))
    # A socket's path has 107 bytes at most, and pytest's own names are long, the longer where several tests run at a
    # time. Who runs as one of several was given a folder in this one.
    if config.option.basetemp is None:
        config.stash[TEMPORARY] = Path(tempfile.mkdtemp(prefix="hw"))
        config.option.basetemp = str(config.stash[TEMPORARY])


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(TEMPORARY, None)
    if folder is not None and not config.stash.get(FAILED, False):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {seed_of(config)} (another one: HEADWATER_TEST_SEED=N)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        config.stash[FAILED] = True
        terminalreporter.write_line(f"to reproduce: HEADWATER_TEST_SEED={seed_of(config)}")
        terminalreporter.write_line(f"what the failed tests left in their folders: {config.option.basetemp}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the runs of the few that run by themselves, do not import the hundreds of modules that have none of them."""
    if config.option.markexpr not in BY_THEMSELVES or collection_path.suffix != ".py" or collection_path.name in SHARED:
        return None
    return None if MARKED.search(collection_path.read_text(encoding="utf-8")) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
    by_themselves = {item.path for item in items if any(map(item.get_closest_marker, ("alone", "engine")))}
    for path in by_themselves:
        if not MARKED.search(path.read_text(encoding="utf-8")):
            raise pytest.UsageError(f"{path}: write the mark there, or the run for it would not look into this file")
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """For tests that draw random numbers of their own."""
    return seed_of(request.config)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The real model, for tests with a real engine."""
    assert (MODEL / "headwater.json").is_file(), f"no model in {MODEL}: run `make setup`"
    return MODEL
