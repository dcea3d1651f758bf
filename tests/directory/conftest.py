"""Servers that the tests of the directory share, and time that passes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.directory.open import open_directory
from headwater.directory.redis import RedisDirectory
from tests.servers import RedisServer, redis_server, valkey_program
from tests.tiers.conftest import program

CLUSTER = "prod"
PREFIX = "headwater:{prod}:dir:"
_AGE = """
for _, set in ipairs({'awake', 'silent'}) do
  local beats = KEYS[1]..set
  for _, it in ipairs(redis.call('ZRANGE', beats, 0, -1)) do redis.call('ZINCRBY', beats, -ARGV[1], it) end
end
return 1
"""


def age(server: RedisServer, seconds: float) -> None:
    """Put all beats back by so many seconds, as if that time had passed."""
    assert server.say("EVAL", _AGE, "1", PREFIX, str(round(seconds * 1000))) == b":1\r\n"


def opened(server: RedisServer, options: str = "", cluster: str = CLUSTER, connections: int = 4) -> RedisDirectory:
    """A directory on a server."""
    directory = open_directory(server.url(options), cluster, connections)
    assert isinstance(directory, RedisDirectory)
    return directory


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


@pytest.fixture(params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """One that the test may end and reconfigure."""
    with redis_server(program(request.param), tmp_path / "server") as server:
        yield server


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[RedisServer]:
    """The same where the kind does not matter."""
    with redis_server(valkey_program(), tmp_path / "server") as server:
        yield server


@pytest.fixture
def directory(server: RedisServer) -> Iterator[RedisDirectory]:
    """A directory on the shared server."""
    directory = opened(server)
    yield directory
    directory.close()


@pytest.fixture
def elapse(server: RedisServer) -> Callable[[float], None]:
    """Lets time pass for the members."""
    return lambda seconds: age(server, seconds)
