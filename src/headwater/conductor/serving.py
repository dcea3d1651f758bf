"""The parent of a Conductor: its workers, its control API, its signals. It has no state that a request depends on.

Theory of operation. `serve` starts the control API (so that probes are answered at once), then the workers, and says
when they take requests. Then it waits:

    SIGHUP            the file is read again; what can be used without a restart goes to new workers, which replace the
                      old ones one after the other (`Crew.roll`); these drain, within `roll_s`. A file that cannot be
                      used changes nothing.
    POST /drain       workers take no more requests, and none is started any more
    SIGTERM, SIGINT   all drain, within `drain_s`, those that drain already as well; then this process ends
    a second one      all end at once
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from headwater.conductor.first import first
from headwater.conductor.workers import Crew, Watching
from headwater.errors import ConfigError, ResourceError, UnavailableError
from headwater.fleetfile.model import ConductorSpec, FleetFile

log = logging.getLogger(__name__)

FIXED = ("listen", "control", "control_token_file", "workers")
"""What a running Conductor cannot change."""


class ControlApi(Protocol):
    """What `control.parent.Control` offers here."""

    @property
    def workers(self) -> Watching:
        """Who asks workers."""

    async def start(self) -> None:
        """Listen."""

    async def close(self) -> None:
        """Listen no more."""

    def draining(self) -> None:
        """Say so from now on."""


MakeControl = Callable[[ConductorSpec, Path, Callable[[], None]], ControlApi]
"""The control API for a Conductor, its folder, and what to call when somebody asks it to drain."""
MakeCrew = Callable[[FleetFile, Path, Watching], Crew]


async def serve(
    fleet: FleetFile,
    folder: Path,
    read_again: Callable[[], FleetFile],
    make_control: MakeControl,
    make_crew: MakeCrew,
    ready: Callable[[], None],
) -> None:
    """Until SIGTERM or SIGINT. `fleet` is resolved; `read_again` gives a new one, or raises ConfigError; `ready` is
    called once. Raises ConfigError, ResourceError, UnavailableError if it cannot start."""
    loop = asyncio.get_running_loop()
    fleet = with_secret(fleet, secrets.token_hex(32))
    ending, hung_up = _Ending(), asyncio.Event()
    crew: Crew | None = None

    def drain() -> None:
        if crew is not None:
            crew.stop_restarting()

    async with AsyncExitStack() as stack:
        control = make_control(fleet.conductor, folder, drain)
        stack.push_async_callback(control.close)
        await control.start()
        crew = make_crew(fleet, folder, control.workers)
        stack.push_async_callback(crew.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.asked, crew.kill)
            stack.callback(loop.remove_signal_handler, number)
        loop.add_signal_handler(signal.SIGHUP, hung_up.set)
        stack.callback(loop.remove_signal_handler, signal.SIGHUP)
        if await first(crew.start(), ending.first.wait()):
            ready()
            reloading = asyncio.create_task(_reload(crew, hung_up, read_again))
            await first(ending.first.wait(), reloading, _broken(crew))
        control.draining()
        await crew.stop()


class _Ending:
    """The signals that end it: the first drains, the second kills."""

    def __init__(self) -> None:
        self.first = asyncio.Event()

    def asked(self, kill: Callable[[], None]) -> None:
        if self.first.is_set():
            kill()
        self.first.set()


async def _broken(crew: Crew) -> None:
    """Returns never; raises what broke the crew."""
    await crew.failed()
    await asyncio.Event().wait()


async def _reload(crew: Crew, hung_up: asyncio.Event, read_again: Callable[[], FleetFile]) -> None:
    """Roll whenever the file is to be read again."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        try:
            fleet = reloaded(crew.fleet, read_again())
            await crew.roll(fleet)
        except (ConfigError, ResourceError, UnavailableError) as error:
            log.error("the file is not used: %s", error)
        else:
            log.info("the file was read again: %d tenants, %d workers replaced", len(fleet.tenants), len(crew.running))


def with_secret(fleet: FleetFile, secret: str) -> FleetFile:
    """A fleet that has one: its own, or this one, which is as good for a Conductor that shares its engines with no
    other and may lose their caches at a restart."""
    return fleet if fleet.secret else replace(fleet, secret=secret)


def reloaded(old: FleetFile, new: FleetFile) -> FleetFile:
    """What a running Conductor makes of a file that has changed. Raises ConfigError."""
    if old.tenants and not new.tenants:
        raise ConfigError("tenants: none are left, which would let everybody in; restart the Conductor for that")
    kept: Mapping[str, object] = {name: getattr(old.conductor, name) for name in FIXED}
    if changed := [name for name in FIXED if getattr(new.conductor, name) != kept[name]]:
        log.warning("conductor.%s: changed in the file, and stays as it was until a restart", changed[0])
    return replace(with_secret(new, old.secret), conductor=replace(new.conductor, **kept))  # type: ignore[arg-type]
