"""Pairs of engines, and engines in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from headwater.transfer import Engine
from tests.node.peers import ForkServer

TRANSPORTS = [("local", "shm", "tcp"), ("shm", "tcp"), ("tcp",)]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines that end with the test."""
    made: list[Engine] = []

    def make(name: str, **settings: object) -> Engine:
        made.append(Engine(name, **settings))
        return made[-1]

    yield make
    for it in made:
        it.close()


@pytest.fixture(scope="session")
def lenders() -> Iterator[ForkServer]:
    """What starts engines in other processes."""
    server = ForkServer("tests.transfer.peers")
    yield server
    server.close()


@pytest.fixture
def others(lenders: ForkServer) -> Iterator[ForkServer]:
    """Other processes, which end with the test."""
    yield lenders
    lenders.forget()
