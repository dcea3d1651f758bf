"""TLS for clients: what is spoken, and what is wrong with files that cannot be used."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headwater.conductor.http.exchange import Origin
from headwater.conductor.http.tls import listener_context
from headwater.conductor.http.upstream import UpstreamPool
from headwater.errors import ConfigError
from tests.conductor.http.rig import Sink, answer, ask, looped, pooled, request, serving, until


def made(folder: Path, name: str, password: bytes | None = None) -> tuple[str, str]:
    """A certificate for localhost and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
    return str(paths[0]), str(paths[1])


def trusting(certificate: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def test_requests_and_streams_over_tls(tmp_path: Path) -> None:
    certificate, key = made(tmp_path, "a")

    async def run() -> None:
        async with serving(tls=listener_context(certificate, key)) as (server, handler):
            context = trusting(certificate)
            context.set_alpn_protocols(["h2", "http/1.1"])
            reader, writer = await asyncio.open_connection("localhost", server.port, ssl=context)
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            writer.write(request("/hold"))
            await until(lambda: handler.held)
            handler.held[0].start(200, [])
            handler.held[0].send(b"x" * 300_000)
            handler.held[0].end()
            assert (await answer(reader))[2] == b"x" * 300_000
            writer.write(request("/hold"))
            await until(lambda: len(handler.held) == 2)
            writer.transport.abort()
            await until(lambda: handler.watchers[1].told == ["gone"])
            await until(lambda: server.connections == 0)

    looped(run())


def test_old_tls_and_plain_text_are_refused(tmp_path: Path) -> None:
    certificate, key = made(tmp_path, "a")
    context = listener_context(certificate, key)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2

    async def run() -> None:
        async with serving(tls=context) as (server, handler):
            assert b"HTTP" not in await ask(server.port, request("/a"))
            assert not handler.requests

    looped(run())


def test_an_instance_over_tls(tmp_path: Path) -> None:
    certificate, key = made(tmp_path, "a")

    async def run() -> None:
        async with serving(tls=listener_context(certificate, key)) as (server, _), pooled() as plain:
            pool = UpstreamPool(plain.limits, plain.times, plain.counts, trusting(certificate))
            sink, other = Sink(), Sink()
            pool.call(Origin("localhost", server.port, tls=True), "POST", "/a", [], b"hello", sink, first_s=5)
            # Its name is checked.
            pool.call(Origin("127.0.0.1", server.port, tls=True), "POST", "/a", [], b"hello", other, first_s=5)
            await until(lambda: sink.outcome and other.outcome)
            assert (sink.outcome, sink.body) == ("end", b"hello")
            assert (other.outcome, other.sent) == ("connect", False)
            await pool.stop()

    looped(run())


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = made(tmp_path, "a")
    _, other_key = made(tmp_path, "b")
    _, hidden = made(tmp_path, "c", b"password")
    junk = tmp_path / "junk"
    junk.write_text("no PEM")
    for pair, named, said in (
        ((str(tmp_path / "none"), key), "tls_certificate", "No such file"),
        ((certificate, str(tmp_path / "none")), "tls_key", "No such file"),
        ((str(tmp_path), key), "tls_certificate", "Is a directory"),
        ((certificate, other_key), "tls_key", "is not the key of the certificate"),
        ((str(junk), key), "tls_certificate", "no unencrypted PEM"),
        ((certificate, str(junk)), "tls_key", "no unencrypted PEM"),
        ((certificate, hidden), "tls_key", "no unencrypted PEM"),
    ):
        with pytest.raises(ConfigError) as caught:
            listener_context(*pair)
        assert f"conductor.{named}=" in str(caught.value)
        assert said in str(caught.value)
