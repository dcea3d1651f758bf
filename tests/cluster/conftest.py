"""Clusters: on loopback addresses, and in network namespaces where that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.demo.namespaces import Lab
from headwater.errors import ResourceError
from tests.cluster.cluster import Cluster, DirectoryServer
from tests.node.peers import ForkServer


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """What starts members."""
    server = ForkServer("tests.cluster.nodes")
    yield server
    server.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectoryServer]:
    """A directory on loopback, empty at the beginning of each module."""
    server = DirectoryServer(tmp_path_factory.mktemp("d"), None)
    yield server
    server.server.kill()


@pytest.fixture
def cluster(forks: ForkServer, directory: DirectoryServer, tmp_path: Path) -> Iterator[Cluster]:
    """Members on loopback that take themselves for hosts of their own."""
    directory.say("FLUSHALL")
    yield Cluster(forks, tmp_path, directory, None)
    forks.forget()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three hosts in namespaces of their own."""
    try:
        opened = Lab(("A", "B", "C"))
    except ResourceError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def lab_directory(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectoryServer]:
    """A directory that all hosts reach."""
    server = DirectoryServer(tmp_path_factory.mktemp("d"), lab)
    yield server
    server.server.kill()


@pytest.fixture
def hosts(forks: ForkServer, lab: Lab, lab_directory: DirectoryServer, tmp_path: Path) -> Iterator[Cluster]:
    """Members on hosts of their own."""
    lab_directory.say("FLUSHALL")
    yield Cluster(forks, tmp_path, lab_directory, lab)
    forks.forget()
