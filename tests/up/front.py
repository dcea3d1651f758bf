"""A Conductor's parent with workers of the tests: `python -m tests.up.front FLEET.yaml FOLDER`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from headwater.conductor.control.parent import Control
from headwater.conductor.serving import serve
from headwater.conductor.workers import Crew
from headwater.errors import HeadwaterError
from headwater.fleetfile.read import read_fleet
from headwater.fleetfile.resolve import resolve
from tests.up.worker import WISH

COMMAND = (sys.executable, "-m", "tests.up.worker")


def main() -> None:
    """Serve; prints `serving` once workers are ready."""
    path, folder = sys.argv[1], Path(sys.argv[2])
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    environment = {WISH: os.environ.get(WISH, "")}
    try:
        asyncio.run(
            serve(
                resolve(read_fleet(path), folder),
                folder,
                lambda: resolve(read_fleet(path), folder),
                lambda spec, where, drain: Control(spec, where, lambda counts, about: b"", drain),
                lambda fleet, where, watching: Crew(
                    fleet, where, watching, draw=lambda: 0.999, command=COMMAND, environment=environment, ready_s=10.0
                ),
                lambda: print("serving", flush=True),
            )
        )
    except HeadwaterError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
