"""A server's URL to a calibrated engine: describe, measure, fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from headwater.calibrate.file import Calibrated
from headwater.calibrate.fit import fit
from headwater.calibrate.probe import Effort, Progress, measure
from headwater.calibrate.server import VOCABULARY, EngineServer
from headwater.calibrate.verify import Verified, verify
from headwater.errors import ConfigError

SECONDS_MIN = 5.0
LEARN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may say; what is None is asked of the server, or found."""

    key: str | None = field(default=None, repr=False)
    """Is sent to the server, and is in no output."""
    model: str | None = None
    timeout_s: float = 300.0
    """For one request."""
    capacity_tokens: int | None = None
    block_tokens: int | None = None
    requests_max: int = 256
    effort: Effort = field(default_factory=Effort)


def open_server(url: str, options: Options) -> EngineServer:
    """The server, not asked yet; raises ConfigError."""
    return EngineServer(url, options.key, timeout_s=options.timeout_s, model=options.model)


def calibrate(url: str, options: Options, progress: Progress) -> Calibrated:
    """Measure the engine behind a URL and fit its step times; `progress` is told the share done, and what is done now.

    Raises ConfigError for what the user said, RefusedError for a server or for measurements that will not do,
    UnavailableError for a server that fails or is late.
    """
    effort = options.effort
    if not SECONDS_MIN <= effort.seconds < math.inf:
        raise ConfigError(f"{effort.seconds:g} s to measure in: at least {SECONDS_MIN:g} are needed")
    if effort.concurrency < 2:
        raise ConfigError("concurrency 1: at least 2, or it cannot be told what a request more costs")
    if effort.step_tokens is not None and effort.step_tokens <= options.requests_max:
        raise ConfigError(f"step_tokens {effort.step_tokens}: must be above requests_max, {options.requests_max}")
    server = open_server(url, options)
    served = server.describe()
    served = replace(
        served,
        block_tokens=options.block_tokens or served.block_tokens,
        capacity_tokens=options.capacity_tokens or served.capacity_tokens,
    )
    seen = measure(server, served, effort, progress)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibrated(server.url, now, served, fit(seen, requests_max=options.requests_max))


def check(url: str, options: Options, calibrated: Calibrated, seconds: float, progress: Progress) -> Verified:
    """Ask the same engine what it was not measured with, and compare with a simulation; raises as `calibrate` does."""
    if not seconds > 0:
        raise ConfigError(f"{seconds:g} s: a time above 0 is needed to verify")
    server = open_server(url, options)
    server.describe()
    server.learn(VOCABULARY[:LEARN_TOKENS])
    return verify(calibrated, server, seconds, options.effort.seed + 1, progress)
