"""Certificates for a server and its clients at 127.0.0.1, made for one test run."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Files(NamedTuple):
    """An authority's certificate, and a certificate with its key."""

    ca: str
    cert: str
    key: str


def make_certificates(folder: Path, *, address: str = "127.0.0.1") -> Files:
    """Return files of a new authority, and of a certificate for this address."""
    folder.mkdir(parents=True, exist_ok=True)
    issuer_key, issuer = ec.generate_private_key(ec.SECP256R1()), _name("authority of a test")
    key = ec.generate_private_key(ec.SECP256R1())
    # Python 3.13 checks the extensions of authorities strictly.
    authority = (
        _certificate(issuer, issuer, issuer_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_sign_only(), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(issuer_key.public_key()), critical=False
        )
        .sign(issuer_key, hashes.SHA256())
    )
    names = [x509.IPAddress(ipaddress.ip_address(address))]
    own = (
        _certificate(_name(address), issuer, key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = Files(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    Path(files.ca).write_bytes(authority.public_bytes(pem))
    Path(files.cert).write_bytes(own.public_bytes(pem))
    Path(files.key).write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _DAY,
        not_valid_after=now + _DAY,
    )


def _sign_only() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
