"""Run pytest; if a few tests failed, run those once more, by themselves, in a new process.

    python -m tests.steady [pytest's arguments]

Many tests start processes and wait for each other's sockets, beside others on a machine that may be slow. One that
fails beside others and passes alone is *unsteady*: that is a defect of the test or of what it tests, and is said in so
many words at the end, with its first failure above; but it does not keep back everything else. One that fails twice has
failed, and so have all if more than MOST do: one test that leaves a thread behind can have a dozen after it fail.
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest

MOST = 30
FAILED = 1


class Failed:
    """The tests that failed, by pytest's names for them."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names[report.nodeid] = None


def main(arguments: Sequence[str]) -> int:
    failed = Failed()
    code = int(pytest.main(list(arguments), plugins=[failed]))
    if code != FAILED or not 0 < len(failed.names) <= MOST:
        return code
    print(f"\n== {len(failed.names)} failed; once more, alone:", *failed.names, sep="\n   ", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:xdist", *failed.names], check=False).returncode
    verdict = "UNSTEADY: failed beside others, passed alone" if again == 0 else "FAILED twice"
    print(f"== {verdict}:", *failed.names, sep="\n   ", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
