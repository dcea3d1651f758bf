"""Servers that the tests of the lower tiers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import RedisServer, redis_program, redis_server, s3_server, valkey_program

NO_REDIS = "no redis-server: run scripts/get_tools.py"


def program(name: str) -> str:
    """The server program called valkey or redis; skips where there is no Redis."""
    if name == "valkey":
        return valkey_program()
    found = redis_program()
    if found is None:
        pytest.skip(NO_REDIS)
    return found


@pytest.fixture(scope="module", params=["valkey", "redis"])
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server of each kind for all tests of a module; nobody may end or reconfigure it."""
    with redis_server(program(request.param), tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """That server, emptied."""
    shared_server.say("FLUSHALL")
    return shared_server


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server's endpoint."""
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint
