"""The transports that need nothing but this process keep the contract."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.transports.credentials import Credentials
from headwater.transports.local import Local
from headwater.transports.server import PeerServer
from headwater.transports.tcp import Tcp
from headwater.types import Member
from tests.conformance.transport import MEMBER, KeptExports, Pair, TransportSuite
from tests.transports.certificates import Authority

ASKER = Member("asker", 3, "")


def served(asker: Credentials, holder: Credentials, *, checksums: bool = True) -> Iterator[Pair]:
    exports = KeptExports()
    server = PeerServer(MEMBER, "test", exports, holder, ("127.0.0.1", 0))
    server.start()
    transport = Tcp(ASKER, "test", asker, checksums=checksums)
    yield Pair(transport, replace(MEMBER, address=server.address), exports)
    transport.close()
    server.close(time.monotonic() + 5)
    assert exports.loans == 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(Path(tmp_path_factory.mktemp("tls")))


class TestLocal(TransportSuite):
    INTERRUPTS = False

    @pytest.fixture
    def pair(self) -> Pair:
        exports = KeptExports()
        return Pair(Local(exports, MEMBER), MEMBER, exports)


class TestTcp(TransportSuite):
    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        token = Credentials((b"a token of this test",))
        yield from served(token, token)


class TestTcpWithoutChecksums(TransportSuite):
    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        yield from served(Credentials(), Credentials(), checksums=False)


class TestTcpOverTls(TransportSuite):
    @pytest.fixture
    def pair(self, authority: Authority) -> Iterator[Pair]:
        yield from served(authority.sign("asker"), authority.sign("holder"))
