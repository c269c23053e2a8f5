"""A certificate authority, and a certificate that it issued."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

NAME = "node.example"


def write_certificates(
    folder: Path, encryption: KeySerializationEncryption | None = None
) -> tuple[Path, Path, Path]:
    """Write files: an authority, its certificate for `NAME` and 127.0.0.1, and its key."""
    ours, theirs = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _builder("kvbaton tests", "kvbaton tests", ours).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    names = [x509.DNSName(NAME), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    leaf = _builder(NAME, "kvbaton tests", theirs).add_extension(
        x509.SubjectAlternativeName(names), critical=False
    )
    ca, certificate, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    ca.write_bytes(authority.sign(ours, hashes.SHA256()).public_bytes(Encoding.PEM))
    certificate.write_bytes(leaf.sign(ours, hashes.SHA256()).public_bytes(Encoding.PEM))
    key.write_bytes(
        theirs.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption() if encryption is None else encryption
        )
    )
    return ca, certificate, key


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    subject, by = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer)
    )
    return x509.CertificateBuilder(
        issuer_name=by,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(days=1),
        not_valid_after=now + datetime.timedelta(days=1),
    )
