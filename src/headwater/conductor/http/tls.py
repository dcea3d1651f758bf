"""TLS for the listener: a context from a certificate and its key, or an error that says what is wrong with them."""

from __future__ import annotations

import ssl
from pathlib import Path

from headwater.errors import ConfigError


def listener_context(certificate: str, key: str) -> ssl.SSLContext:
    """TLS 1.2 and newer, HTTP/1.1 only; raises ConfigError for files that are missing, unreadable or do not match."""
    for field, path in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"conductor.{field}={path}: {error.strerror}; name a readable PEM file") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # The password keeps OpenSSL from asking for one at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            said = "is not the key of the certificate"
        else:
            said = "or the certificate is no unencrypted PEM file"
        raise ConfigError(f"conductor.tls_key={key}: {said} (conductor.tls_certificate={certificate})") from error
    return context
