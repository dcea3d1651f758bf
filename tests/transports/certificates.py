"""An authority of our own and what it signs, for tests of TLS."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headwater.transports.credentials import Credentials, load_credentials

DAY = datetime.timedelta(days=1)
PEM = serialization.Encoding.PEM


@dataclass
class Authority:
    """Signs certificates into files of a directory."""

    folder: Path
    name: str = "authority"

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.name)])
        certificate = (
            self._builder(self.subject, self.key.public_key(), -1, 30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        self.path = self.folder / f"{self.name}.pem"
        self.path.write_bytes(certificate.public_bytes(PEM))

    def sign(self, *names: str, last_day: int = 30) -> Credentials:
        """Credentials with a new certificate for these names."""
        cert, key = self.files(*names, last_day=last_day)
        return load_credentials("", cert, key, str(self.path))

    def files(self, *names: str, last_day: int = 30) -> tuple[str, str]:
        """A new certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
        certificate = (
            self._builder(subject, key.public_key(), min(last_day - 1, -1), last_day)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(it) for it in names]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        stem = f"{self.name}-{names[0]}-{last_day}"
        cert_path, key_path = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        cert_path.write_bytes(certificate.public_bytes(PEM))
        key_path.touch(mode=0o600)
        private = serialization.PrivateFormat.PKCS8
        key_path.write_bytes(key.private_bytes(PEM, private, serialization.NoEncryption()))
        return str(cert_path), str(key_path)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, first_day: int, last_day: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + first_day * DAY)
            .not_valid_after(now + last_day * DAY)
        )
