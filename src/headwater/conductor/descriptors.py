"""How many files a worker may open, and what of its limits fits into that.

Each connection of a client may need one to an instance as well. Where a process has no descriptor left, nobody can be
told so: connections that come are cut, and those to instances fail as if these were gone. So a worker takes all that it
may have, and where that is too little for its limits, it takes fewer connections, and tells the others to come back.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import replace

from headwater.conductor.http.server import REFUSED_SHARE
from headwater.errors import ResourceError
from headwater.fleetfile.model import Limits

SPARE = 64
"""For everything that is no request: libraries, sockets of events and of the parent, questions to instances."""
LEAST = 8

log = logging.getLogger(__name__)


def take_all() -> int:
    """Raise this process's limit as far as it may; how many descriptors it has then."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def fitting(limits: Limits, descriptors: int) -> Limits:
    """These limits, or as much of them as there are descriptors for. Raises ResourceError if that is next to
    nothing."""
    if limits.connections * (REFUSED_SHARE + 1) // REFUSED_SHARE + limits.requests + SPARE <= descriptors:
        return limits
    most = (descriptors - SPARE) * REFUSED_SHARE // (2 * REFUSED_SHARE + 1)
    if most < LEAST:
        raise ResourceError(f"{descriptors} file descriptors are too few for a worker; raise `ulimit -n` (LimitNOFILE)")
    connections, requests = min(limits.connections, most), min(limits.requests, most)
    log.warning(
        "conductor.limits: %d connections and %d requests, as there are %d file descriptors; raise `ulimit -n`",
        connections, requests, descriptors,
    )  # fmt: skip
    return replace(limits, connections=connections, requests=requests)
