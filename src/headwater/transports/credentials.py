"""What proves that a process is one of its cluster: tokens that nodes share, certificates of one authority, or both.

A token file has one line, or two while a token is being replaced: the first is what we prove ourselves with, either is
accepted. To replace `old`: first every node gets `old` and `new`, then every node `new` and `old`, then `new` alone.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field

from headwater.errors import ConfigError

LEAST_TOKEN = 16
MOST_TOKENS = 2
_FILE_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Credentials:
    """Tokens and TLS contexts; with none of them, only loopback and Unix sockets are served."""

    tokens: tuple[bytes, ...] = field(default=(), repr=False)
    server_tls: ssl.SSLContext | None = field(default=None, repr=False)
    client_tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Credentials({len(self.tokens)} tokens, {'mutual' if self.server_tls else 'no'} TLS)"

    def __bool__(self) -> bool:
        return bool(self.tokens) or self.server_tls is not None


def load_credentials(token_file: str = "", tls_cert: str = "", tls_key: str = "", tls_ca: str = "") -> Credentials:
    """Read what the operator has named; raises ConfigError with the field, its value and the remedy."""
    tokens = read_tokens(token_file) if token_file else ()
    files = {"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca}
    if not any(files.values()):
        return Credentials(tokens)
    for name, path in files.items():
        if not path:
            given = ", ".join(f"{it}={value}" for it, value in files.items() if value)
            raise ConfigError(f"{name}='': {given} needs it, too; set tls_cert, tls_key and tls_ca, or none of them")
    os.close(_open_private("tls_key", tls_key))
    server = _context(ssl.Purpose.CLIENT_AUTH, tls_cert, tls_key, tls_ca)
    client = _context(ssl.Purpose.SERVER_AUTH, tls_cert, tls_key, tls_ca)
    return Credentials(tokens, server, client)


def read_tokens(path: str) -> tuple[bytes, ...]:
    """The tokens of a file that only its owner may read."""
    descriptor = _open_private("token_file", path)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_FILE_BYTES + 1)
    tokens = tuple(line.strip() for line in content.splitlines() if line.strip())
    make = "make one with: openssl rand -hex 32"
    if len(content) > _FILE_BYTES or not 1 <= len(tokens) <= MOST_TOKENS:
        raise ConfigError(f"token_file={path}: it has {len(tokens)} lines, one token or two are needed; {make}")
    if (shortest := min(map(len, tokens))) < LEAST_TOKEN:
        raise ConfigError(f"token_file={path}: a token has only {shortest} bytes, {LEAST_TOKEN} are the least; {make}")
    return tokens


def certified_names(certificate: object) -> set[str]:
    """Whom a verified certificate (as `SSLSocket.getpeercert` gives it) speaks for."""
    pairs = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    return {value.lower() for kind, value in pairs if kind in ("DNS", "IP Address")}


def speaks_for(names: set[str], name: str) -> bool:
    """Whether certified names cover a member's name; `*.domain` covers one more label."""
    name = name.lower()
    _, _, domain = name.partition(".")
    return name in names or (bool(domain) and f"*.{domain}" in names)


def _open_private(field_name: str, path: str) -> int:
    """Open a regular file that no other user can read or has chosen; the caller closes it."""
    where = f"{field_name}={path}"
    try:
        # A link's owner decides where it leads, so the last part may not be one. A fifo must not make us wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if os.path.islink(path):
            raise ConfigError(f"{where}: it is a symbolic link; name the file that it leads to") from None
        raise ConfigError(f"{where}: cannot be read: {error.strerror}; name a file of this user") from None
    found = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(found.st_mode):
        problem = "it is no file; name one"
    elif found.st_uid not in (0, os.geteuid()):
        problem = f"it belongs to user {found.st_uid}; run: chown {os.geteuid()} {path}"
    elif found.st_mode & 0o077:
        problem = f"others may read it (mode {stat.S_IMODE(found.st_mode):04o}); run: chmod 600 {path}"
    if problem:
        os.close(descriptor)
        raise ConfigError(f"{where}: {problem}")
    return descriptor


def _context(purpose: ssl.Purpose, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    """One side of mutual TLS. Names are compared with the member's by us (`speaks_for`), not with an address."""
    try:
        context = ssl.create_default_context(purpose, cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca={authority}: not certificates in PEM: {error}; name the authority's file") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        where = f"tls_cert={certificate}, tls_key={key}"
        raise ConfigError(f"{where}: not a certificate and its key in PEM: {error}; name a pair that fits") from None
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")
