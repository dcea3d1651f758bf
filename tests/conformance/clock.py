"""What every Clock must do; subclass a suite with your own and let pytest collect the subclass."""

from __future__ import annotations

import subprocess
import sys

from headwater.ports import Clock


class ClockSuite:
    """The contract of `headwater.ports.Clock` within one process."""

    def clock(self) -> Clock:
        """A clock."""
        raise NotImplementedError

    def wait(self, clock: Clock) -> None:
        """Let some time pass."""
        raise NotImplementedError

    def test_time_is_in_seconds_and_never_goes_back(self) -> None:
        clock = self.clock()
        readings = [clock.now() for _ in range(1000)]
        assert all(isinstance(it, float) for it in readings)
        assert readings == sorted(readings)

    def test_time_goes_on(self) -> None:
        clock = self.clock()
        before = clock.now()
        self.wait(clock)
        assert clock.now() > before


class HostClockSuite(ClockSuite):
    """The whole contract, for clocks that are not simulated: all processes of a host read one time."""

    def test_all_processes_of_a_host_read_one_time(self) -> None:
        clock = self.clock()
        before = clock.now()
        script = "import sys, time; sys.stdout.write(repr(time.clock_gettime(time.CLOCK_MONOTONIC)))"
        there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        assert before < float(there) < clock.now()
