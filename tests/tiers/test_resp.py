"""The connection to Redis against peers that are silent, slow, broken or lying, and over TLS."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import queue
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headwater.errors import ConfigError, UnavailableError
from headwater.places import parse_remote
from headwater.ports import Piece
from headwater.tiers import resp
from headwater.tiers.connections import Connections
from headwater.tiers.endpoint import Endpoint
from headwater.tiers.redis import RedisTier
from headwater.tiers.remote import open_remote
from headwater.tiers.resp import Connection, Received, ServerError
from headwater.types import PAGE_BYTES, Outcome
from tests.conformance.lower_tier import identity, memory_of, soon
from tests.servers import RedisServer, free_port, redis_server, valkey_program
from tests.tiers.conftest import program

HOLD = object()
"""What a liar does after its words: keep the connection open and say no more."""


class Liar:
    """A server that answers the login and then each request with the next of its words, whatever was asked."""

    def __init__(self, *words: bytes | object) -> None:
        self.words = words
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(link)
            threading.Thread(target=self._lie, args=(link,), daemon=True).start()

    def _lie(self, link: socket.socket) -> None:
        try:
            link.recv(1 << 16)
            for word in (b"+PONG\r\n", *self.words):
                if not isinstance(word, bytes):
                    return
                link.sendall(word)
                link.recv(1 << 16)
            link.close()
        except OSError:
            return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for it in self._open:
            it.close()


@contextmanager
def liar(*words: bytes | object) -> Iterator[Liar]:
    it = Liar(*words)
    try:
        yield it
    finally:
        it.close()


def tier_of(port: int) -> RedisTier:
    tier = open_remote(parse_remote(f"redis://127.0.0.1:{port}"))
    assert isinstance(tier, RedisTier)
    return tier


def calls(tier: RedisTier, within_s: float) -> list[Callable[[], object]]:
    piece = Piece(identity(1, 3), memory_of(identity(1, 3), 1))
    return [
        lambda: tier.holds([identity(1, 3)], soon(within_s)),
        lambda: tier.read([piece], soon(within_s)),
        lambda: tier.write([piece], soon(within_s)),
        lambda: tier.delete([identity(1, 3)], soon(within_s)),
        lambda: tier.clear(identity(1).origin, soon(within_s)),
        lambda: tier.usage(soon(within_s)),
    ]


def test_one_that_accepts_and_never_answers_costs_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = tier_of(silent.getsockname()[1])
        for call in calls(tier, 0.1):
            begun_s = time.monotonic()
            with pytest.raises(UnavailableError, match="did not answer in time"):
                call()
            assert 0.09 < time.monotonic() - begun_s < 0.5
        tier.close()


def test_one_that_is_silent_after_the_login_costs_the_deadline() -> None:
    with liar(HOLD) as it:
        tier = tier_of(it.port)
        for call in calls(tier, 0.1):
            with pytest.raises(UnavailableError, match="did not answer in time"):
                call()
        assert it.connections == 6, "a connection on which something was late is not used again"
        tier.close()


NONSENSE = {
    "noise": b"\x00\xff\x13\x37" * 64 + b"\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "line without end": b"+" + b"x" * (300 << 10),
    "endless number": b":" + b"9" * 400 + b"\r\n",
    "no number": b"$abc\r\n",
    "length of 2 GiB": b"$2147483649\r\n",
    "length of 2^63": b"$9223372036854775808\r\n",
    "negative length": b"$-2\r\n",
    "array of 2 GiB": b"*2147483649\r\n",
    "array in arrays": b"*1\r\n" * 3000,
    "a million arrays of a million": b"*1000000\r\n" * 2,
    "empty line": b"\r\n",
    "unknown type": b"(12345\r\n",
    "value without end": b"$4096\r\n" + bytes(4096) + b"XX\r\n",
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_ends_the_connection_and_allocates_nothing(name: str) -> None:
    with liar(NONSENSE[name], HOLD) as it:
        tier = tier_of(it.port)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun_s = time.monotonic()
        for call in calls(tier, 5):
            with pytest.raises(UnavailableError, match=r"does not speak the protocol|gave no"):
                call()
        assert time.monotonic() - begun_s < 2, "it is nonsense at once, and not when time is over"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "in KiB"
        assert it.connections == 6
        tier.close()


@pytest.mark.parametrize("size", [1, 5, 100, PAGE_BYTES - 1, PAGE_BYTES + 6, PAGE_BYTES + 8])
def test_half_a_reply_is_no_reply(size: int) -> None:
    """Whether the peer goes away after it or stays silent."""
    whole = b"$%d\r\n" % PAGE_BYTES + bytes(PAGE_BYTES) + b"\r\n"
    for words in ((whole[:size],), (whole[:size], HOLD)):
        with liar(*words) as it:
            link = Connection(Endpoint("test", "127.0.0.1", it.port), soon())
            target = memoryview(bytearray(PAGE_BYTES))
            link.send([b"*1\r\n$4\r\nNEXT\r\n"], soon())
            if len(words) == 1:
                link.send([b"*1\r\n$4\r\nNEXT\r\n"], soon())
            with pytest.raises(UnavailableError, match=r"in time|closed the connection|reset"):
                link.receive(target, soon(0.2))
            assert link._socket.fileno() == -1


def test_replies_in_the_smallest_pieces_are_understood() -> None:
    """One byte at a time, over several values and kinds."""
    value = np.random.default_rng(1).integers(0, 256, 3000, np.uint8).tobytes()
    replies = b"+PONG\r\n" + (b"$3000\r\n" + value + b"\r\n") * 3
    replies += b"$-1\r\n$2\r\nab\r\n-OOM no room\r\n:7\r\n*2\r\n:1\r\n$0\r\n\r\n"

    def drip(theirs: socket.socket) -> None:
        for byte in replies:
            theirs.send(bytes([byte]))

    with wired() as (link, theirs):
        dripping = threading.Thread(target=drip, args=(theirs,))
        dripping.start()
        target = memoryview(bytearray(3000))
        assert link.reply(soon()) == b"PONG"
        for _ in range(3):
            target[:] = bytes(3000)
            assert link.receive(target, soon()) is Received.VALUE
            assert target == value
        assert link.receive(target, soon()) is Received.NOTHING
        assert link.receive(target, soon()) is Received.OTHER_LENGTH
        assert link.receive(target, soon()) == ServerError("OOM", "no room")
        assert link.integers(1, soon()) == [7]
        assert link.reply(soon()) == [1, b""]
        dripping.join()


@pytest.mark.parametrize(
    ("item", "few", "many"),
    [
        (b"$900\r\n" + bytes(900) + b"\r\n", 60, 100),
        (b"+" + b"x" * 900 + b"\r\n", 60, 100),
        (b"*2\r\n" + (b"$450\r\n" + bytes(450) + b"\r\n") * 2, 50, 100),
        (b"*14\r\n" + b":1\r\n" * 14, 60, 100),
        (b"*-1\r\n", 900, 1000),
    ],
)
def test_a_reply_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch, item: bytes, few: int, many: int) -> None:
    """Whatever it is made of, and each reply anew."""
    monkeypatch.setattr(resp, "MOST_REPLY_BYTES", 64 << 10)
    with wired() as (link, theirs):
        for _ in range(3):
            theirs.sendall(b"*%d\r\n" % few + item * few)
            found = link.reply(soon(), 1000)
            assert isinstance(found, list)
            assert len(found) == few
        sending = threading.Thread(target=_send, args=(theirs, b"*%d\r\n" % many + item * many))
        sending.start()
        with pytest.raises(UnavailableError, match="a reply of more than 65536 bytes"):
            link.reply(soon(), 1000)
        sending.join()


def _send(link: socket.socket, content: bytes) -> None:
    with suppress(OSError):
        link.sendall(content)


@contextmanager
def wired() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection whose bytes come from and go to a socket of the test."""
    ours, theirs = socket.socketpair()
    with ours, theirs, liar(HOLD) as it:
        link = Connection(Endpoint("test", "127.0.0.1", it.port), soon())
        link._socket.close()
        link._socket = ours
        yield link, theirs


def test_big_requests_go_out_whole_to_a_peer_that_reads_slowly() -> None:
    """More than the socket holds, in more parts than one call takes."""
    parts = [np.random.default_rng(at).integers(0, 256, 3000 + at, np.uint8).data for at in range(2500)]
    got = bytearray()

    def sip(theirs: socket.socket) -> None:
        while len(got) < sum(map(len, parts)):
            got.extend(theirs.recv(1 << 16))

    with wired() as (link, theirs):
        sipping = threading.Thread(target=sip, args=(theirs,))
        sipping.start()
        link.send(parts, soon())
        sipping.join()
    assert got == b"".join(parts)


class Grudging:
    """A socket that takes a few bytes in each call, as the kernel may when a signal or a timer comes."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        return self._real.send(b"".join(parts)[:777])

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self._real.setsockopt(level, option, value)


def test_requests_that_go_out_bit_by_bit_are_whole() -> None:
    parts = [np.random.default_rng(at).integers(0, 256, at * 13 % 500, np.uint8).data for at in range(150)]
    with wired() as (link, theirs):
        real, link._socket = link._socket, Grudging(link._socket)  # type: ignore[assignment]
        link.send(parts, soon())
        link._socket = real
        whole = b"".join(parts)
        assert theirs.recv(len(whole) + 1, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == whole


def test_a_request_that_nobody_reads_ends_in_time() -> None:
    with wired() as (link, _):
        begun_s = time.monotonic()
        with pytest.raises(UnavailableError, match="in time"):
            link.send([bytes(8 << 20)], soon(0.2))
        assert time.monotonic() - begun_s < 1.0
        assert link._socket.fileno() == -1


def test_nobody_listens() -> None:
    tier = tier_of(free_port())
    for call in calls(tier, 5):
        begun_s = time.monotonic()
        with pytest.raises(UnavailableError, match="cannot connect"):
            call()
        assert time.monotonic() - begun_s < 1.0
    tier.close()


def test_no_more_connections_than_allowed_and_those_who_wait_wait_in_time() -> None:
    with liar(HOLD) as it:
        pool = Connections(Endpoint("test", "127.0.0.1", it.port), 2)
        with pool.one(soon()), pool.one(soon()):
            begun_s = time.monotonic()
            with pytest.raises(UnavailableError, match="busy"), pool.one(soon(0.1)):
                pass
            assert 0.09 < time.monotonic() - begun_s < 0.5
        with pool.one(soon()), pool.one(soon()):
            pass
        assert it.connections == 2
        pool.close()
        with pytest.raises(UnavailableError, match="closed"), pool.one(soon()):
            pass


def test_a_connection_is_not_used_after_an_error_in_its_block() -> None:
    with liar(HOLD) as it:
        pool = Connections(Endpoint("test", "127.0.0.1", it.port), 1)
        with pytest.raises(KeyError), pool.one(soon()):
            raise KeyError
        with pool.one(soon()):
            pass
        assert it.connections == 2
        pool.close()


def test_what_is_in_use_when_all_is_closed_is_closed_afterwards() -> None:
    with liar(HOLD) as it:
        pool = Connections(Endpoint("test", "127.0.0.1", it.port), 2)
        with pool.one(soon()) as idle:
            pass
        with pool.one(soon()) as one, pool.one(soon()) as other:
            assert idle in (one, other)
            pool.close()
            assert one._socket.fileno() >= 0
        assert [it._socket.fileno() for it in (one, other)] == [-1, -1]
        pool.close()


# ---- TLS -------------------------------------------------------------------------------------------------


def _certificate(folder: Path, name: str, address: str) -> Path:
    """A CA of this name that signed a certificate for an address; the folder with ca.pem, cert.pem and key.pem."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(ca_name).public_key(public)
        return made.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)

    ca = builder(ca_name, ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    ca = ca.add_extension(usage, critical=True)
    leaf = builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")]), key.public_key())
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    leaf = leaf.add_extension(names, critical=False)
    leaf = leaf.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    (folder / "cert.pem").write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@contextmanager
def tls_front(folder: Path, port: int) -> Iterator[int]:
    """The port of something that speaks TLS with the folder's certificate and passes all on to a plain port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while content := await source.read(1 << 18):
                target.write(content)
                await target.drain()
        target.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    async def serve() -> None:
        async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as server:
            ports.put(server.sockets[0].getsockname()[1])
            await asyncio.to_thread(over.wait)
            # A connection that the tier has left ends by itself; waiting for it keeps the loop's end quiet.
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    # One thread does all of it: a TLS socket that one thread reads while another writes loses bytes before Python 3.13.
    ports: queue.Queue[int] = queue.Queue()
    over = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield ports.get(timeout=10)
    finally:
        over.set()
        thread.join()


@contextmanager
def encrypted(kind: str, certificate: Path, folder: Path) -> Iterator[tuple[RedisServer, int]]:
    """A server, and its port for TLS: its own, or for the Valkey of the wheel, which has none, one in front of it."""
    if kind == "valkey":
        with redis_server(valkey_program(), folder) as server, tls_front(certificate, server.port) as port:
            yield server, port
        return
    port = free_port()
    files = {name: f"{certificate}/{file}.pem" for name, file in (("cert", "cert"), ("key", "key"), ("ca-cert", "ca"))}
    options = [word for name, file in files.items() for word in (f"--tls-{name}-file", file)]
    with redis_server(program(kind), folder, *options, "--tls-auth-clients", "no", "--tls-port", str(port)) as server:
        yield server, port


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_tls_with_a_ca_of_ones_own(tmp_path: Path, kind: str) -> None:
    right = _certificate(tmp_path / "right", "right", "127.0.0.1")
    chunks = [identity(number, group) for number in range(4) for group in range(4)]
    with encrypted(kind, right, tmp_path / "server") as (server, port):
        tier = open_remote(parse_remote(f"rediss://127.0.0.1:{port}?ca={right}/ca.pem"))
        pieces = [Piece(it, memory_of(it, 1)) for it in chunks]
        assert tier.write(pieces, soon()) == [Outcome.DONE] * len(chunks)
        assert tier.holds(chunks, soon()) == [True] * len(chunks)
        back = [Piece(it, memory_of(it)) for it in chunks]
        assert tier.read(back, soon()) == [Outcome.DONE] * len(chunks)
        assert all(np.array_equal(a.memory, b.memory) for a, b in zip(pieces, back, strict=True))
        # What the login leaves in the pipe does not make a good connection look dead.
        begun = server.number("stats", "total_connections_received")
        for _ in range(5):
            tier.holds(chunks, soon())
        assert server.number("stats", "total_connections_received") - begun == 1, "only that of the last question"
        server.say("CLIENT", "PAUSE", "400", "ALL")
        begun_s = time.monotonic()
        with pytest.raises(UnavailableError, match="in time"):
            tier.read(back, soon(0.15))
        assert time.monotonic() - begun_s < 0.35
        tier.close()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_certificate_of_somebody_else_is_refused(tmp_path: Path, kind: str) -> None:
    right, wrong = (_certificate(tmp_path / it, it, "127.0.0.1") for it in ("right", "wrong"))
    elsewhere = _certificate(tmp_path / "elsewhere", "elsewhere", "127.0.0.2")
    with encrypted(kind, right, tmp_path / "server") as (_, port):
        for ca in (f"?ca={wrong}/ca.pem", ""):
            tier = open_remote(parse_remote(f"valkeys://127.0.0.1:{port}{ca}"))
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                tier.usage(soon())
            tier.close()
        tier = tier_of(port)
        with pytest.raises(UnavailableError):
            tier.usage(soon(1))
        tier.close()
    with encrypted(kind, elsewhere, tmp_path / "other") as (_, port):
        tier = open_remote(parse_remote(f"rediss://127.0.0.1:{port}?ca={elsewhere}/ca.pem"))
        with pytest.raises(UnavailableError, match="certificate verify failed"):
            tier.usage(soon())
        tier.close()


def test_a_ca_file_that_is_none_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        open_remote(parse_remote(f"rediss://127.0.0.1:1?ca={tmp_path}/absent.pem"))
    (tmp_path / "noise.pem").write_text("noise")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_remote(parse_remote(f"rediss://127.0.0.1:1?ca={tmp_path}/noise.pem"))


def test_valkey_is_there() -> None:
    """The tests with Redis may be skipped; those with Valkey may not."""
    assert Path(valkey_program()).is_file()
