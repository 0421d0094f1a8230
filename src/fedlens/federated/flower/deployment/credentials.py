"""Development certificates and keys: TLS for the SuperLink, and a key that identifies each node.

A local authority signs the SuperLink's certificate (ca.crt signs server.pem); nodes have EC P-384
keys in OpenSSH's format. In production, put files of your own authority in the same places.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlens.errors import FedlensError, shown
from fedlens.files import replacing

LIFETIME = timedelta(days=365)
RENEWAL_MARGIN = timedelta(days=7)  # a certificate that expires sooner must be renewed
CLOCK_SKEW = timedelta(hours=1)  # the clocks of two hosts may differ
LONGEST_HOST = 253
LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"  # between the dots of a name
HOST = re.compile(rf"(?:\*\.)?(?:{LABEL}\.)*{LABEL}\.?")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # used by the SuperLink's own processes


@dataclass(frozen=True)
class Certificates:
    """The paths of a federation's certificates and of their keys."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate that nodes and users trust; the only file that other hosts need."""
        return self.folder / "ca.crt"

    @property
    def authority_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def server(self) -> Path:
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"


def make_certificates(
    folder: Path, hosts: Sequence[str] = (), *, renew: bool = False
) -> Certificates:
    """A development authority, and a certificate signed by it for `hosts` (names or IP addresses).

    Existing certificates are kept while they are valid. `renew` replaces all of them; nodes on
    other hosts then need the new ca.crt. Anyone who has ca.key can impersonate the SuperLink.
    """
    for host in hosts:
        if not is_host(host):
            raise FedlensError(
                f"'{shown(host)}' is not a host: write a name or an IP address, such as "
                "link.example.org or 192.0.2.1."
            )
    certificates = Certificates(folder)
    if folder.exists() and any(folder.iterdir()):
        fault = _fault(certificates, hosts)
        if fault is None and not renew:
            return certificates
        if not renew:
            raise FedlensError(
                f"The certificates in {folder} {fault}: renew them with `fedlens flower keys "
                "--renew`."
            )
        if certificates.authority.exists() and not certificates.authority_key.exists():
            raise FedlensError(
                f"The certificates in {folder} were signed by an authority whose key is not there: "
                "renew them with that authority."
            )
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    name = _name("fedlens development authority")
    authority = _authority(name, authority_key)
    server = _server(hosts, name, authority_key, server_key)
    with replacing(folder) as temporary:  # all four files or none
        temporary.mkdir()
        new = Certificates(temporary)
        write_private(new.authority_key, _pem(authority_key))
        write_private(new.server_key, _pem(server_key))
        new.authority.write_bytes(authority.public_bytes(Encoding.PEM))
        new.server.write_bytes(server.public_bytes(Encoding.PEM))
    return certificates


def make_node_key(path: Path) -> None:
    """Writes the private key of a node or a user to `path` and its public key to `path`.pub.

    An existing key is kept, because it identifies its owner to the SuperLink.
    """
    if path.exists():
        key = read_key(path)
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        with replacing(path) as temporary:
            write_private(temporary, secret)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    with replacing(path.with_name(f"{path.name}.pub")) as temporary:
        temporary.write_bytes(public + b"\n")


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a node or a user."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedlensError(
            f"{path} is not the key of a node (EC, in OpenSSH's format, without a password): move "
            "it away, and a new key will be made."
        )
    return key


def _fault(certificates: Certificates, hosts: Sequence[str]) -> str | None:
    """Why these certificates cannot be used for `hosts`; None if they can."""
    needed = (certificates.authority, certificates.server, certificates.server_key)
    if missing := [path.name for path in needed if not path.exists()]:
        return f"lack {', '.join(missing)}"
    try:
        authority, server = (
            x509.load_pem_x509_certificate(path.read_bytes())
            for path in (certificates.authority, certificates.server)
        )
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return "cannot be read"
    expiry = min(authority.not_valid_after_utc, server.not_valid_after_utc)
    if expiry < datetime.now(UTC) + RENEWAL_MARGIN:
        return f"are valid only until {expiry:%Y-%m-%d}"
    if uncovered := [host for host in (*LOCAL_HOSTS, *hosts) if _general_name(host) not in names]:
        return f"do not cover {', '.join(uncovered)}"
    return None


def is_host(text: str) -> bool:
    """Whether it is an IP address or a name as DNS has them (RFC 1123, and _ as in containers)."""
    try:
        ip_address(text)
    except ValueError:
        return len(text) <= LONGEST_HOST and HOST.fullmatch(text) is not None
    return True


def _authority(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _certificate(name, name, key, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )


def _server(
    hosts: Sequence[str],
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    names = [_general_name(host) for host in dict.fromkeys((*LOCAL_HOSTS, *hosts))]
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        _certificate(_name("fedlens SuperLink"), issuer, key, issuer_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(purpose, critical=False)
        .sign(issuer_key, hashes.SHA384())
    )


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    """The fields that both certificates share; strict verifiers require the two identifiers."""
    public, issuing = key.public_key(), issuer_key.public_key()
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read, from the first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
