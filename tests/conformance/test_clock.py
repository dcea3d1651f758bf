"""The clocks that ship keep the contract."""

from __future__ import annotations

from headwater.node.driver import MonotonicClock
from headwater.ports import Clock
from headwater.sim.schedule import VirtualClock
from tests.conformance.clock import ClockSuite, HostClockSuite


class TestMonotonicClock(HostClockSuite):
    def clock(self) -> Clock:
        return MonotonicClock()

    def wait(self, clock: Clock) -> None:
        start = clock.now()
        while clock.now() == start:
            pass


class TestVirtualClock(ClockSuite):
    def clock(self) -> Clock:
        return VirtualClock()

    def wait(self, clock: Clock) -> None:
        assert isinstance(clock, VirtualClock)
        clock.advance(clock.now() + 0.25)
