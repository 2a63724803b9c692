"""What a server is made of: CA, server certificate, roster key; and `init`, which makes them."""

from __future__ import annotations

import ipaddress
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fedward_common.credential import Credential
from fedward_common.enrolment import certificate_sha256
from fedward_common.errors import FedwardError
from fedward_common.files import owner_folder, write_atomic
from fedward_common.signing import generate, key_id, public_text, save_private

from fedward_server.paths import ServerPaths
from fedward_server.publication import ROSTER_NUMBER, authority_key, publish_roster
from fedward_server.settings import Settings, load_settings, write_settings
from fedward_server.store import Scientist, Store, add_audit, next_number, scientists

CA_LIFE = timedelta(days=3652)
SERVER_LIFE = timedelta(days=365)
BACKDATE = timedelta(hours=1)
"""Certificates are valid a little before now, for machines whose clocks are behind."""
FIRST_SCIENTIST = "admin"


class AuthorityError(FedwardError):
    """The state directory cannot be made or used."""


def unfinished_mark(paths: ServerPaths) -> Path:
    """A file that exists while `init` is at work, or after it was cut off."""
    return paths.root / "init.unfinished"


def init(paths: ServerPaths, settings: Settings, authority: Ed25519PublicKey | None = None) -> bool:
    """Make everything that a server needs. False, and nothing changed, if it is there already.

    authority: the key that signs the roster on another machine; without it, a key for that is made here.
    Raises `AuthorityError` on a half-made or foreign directory.
    """
    if unfinished_mark(paths).exists():
        raise _unfinished(paths)
    if paths.settings.exists():
        return False
    if paths.root.exists() and any(paths.root.iterdir()):
        raise AuthorityError(f"{paths.root}: not empty and not a server's. Choose an empty or new directory.")
    owner_folder(paths.root)
    paths.root.chmod(0o700)
    try:
        unfinished_mark(paths).open("x").close()
    except FileExistsError:
        raise _unfinished(paths) from None
    for folder in (paths.authority, paths.server_certificate.parent, paths.runs):
        owner_folder(folder)
    ca_key, ca = make_ca(settings.name)
    write_atomic(paths.ca_key, _private_pem(ca_key))
    write_atomic(paths.ca_certificate, _pem(ca))
    write_atomic(paths.public_ca, _pem(ca))
    write_atomic(paths.server_key, _private_pem(ec.generate_private_key(ec.SECP256R1())))
    write_settings(paths, settings)
    write_server_certificate(paths, settings)
    if authority is None:
        save_private(paths.roster_key, generate())
    else:
        write_atomic(paths.roster_public, f"{public_text(authority)}\n".encode())
    store = Store.create(paths.database)
    with store.transaction() as session:
        key = key_id(authority_key(paths))
        add_audit(session, "server", "init", name=settings.name, sans=list(settings.hosts), authority=key)
    add_scientist(paths, settings, store, FIRST_SCIENTIST, paths.credential)
    store.close()
    unfinished_mark(paths).unlink()
    return True


def _unfinished(paths: ServerPaths) -> AuthorityError:
    return AuthorityError(
        f"{paths.root}: an 'init' was cut off here (or is still at work). Nothing can have been enrolled yet: "
        "delete the directory and run 'fedward server init' again."
    )


def open_server(paths: ServerPaths) -> tuple[Settings, Store]:
    """Settings and store of a finished server. Raises `AuthorityError`, `ConfigError`, `StoreError`."""
    if unfinished_mark(paths).exists():
        raise _unfinished(paths)
    return load_settings(paths), Store(paths.database)


def make_ca(name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A fresh CA (P-384, ten years) that signs server certificates and nothing else."""
    key = ec.generate_private_key(ec.SECP384R1())
    # Two CAs of one name must not look the same; a common name has at most 64 characters.
    common_name = f"Fedward CA {secrets.token_hex(4)} {name}"[:64]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, builder.sign(key, hashes.SHA384())


def write_server_certificate(paths: ServerPaths, settings: Settings) -> datetime:
    """Issue the server certificate (one year) for the server's key and all its hosts; returns its end.

    The key stays, so that one atomic write renews the certificate. The file holds the chain: server, then CA.
    """
    ca = x509.load_pem_x509_certificate(paths.ca_certificate.read_bytes())
    ca_key = serialization.load_pem_private_key(paths.ca_key.read_bytes(), password=None)
    key = serialization.load_pem_private_key(paths.server_key.read_bytes(), password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AuthorityError(f"{paths.root}: the keys of CA and server must be elliptic-curve keys.")
    now = datetime.now(UTC)
    end = min(now + SERVER_LIFE, ca.not_valid_after_utc)
    ca_identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, settings.name[:64])]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(host) for host in settings.hosts]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_identifier), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    write_atomic(paths.server_certificate, _pem(certificate) + _pem(ca))
    return end


def server_certificate_end(paths: ServerPaths) -> datetime:
    """When the server certificate ends (UTC)."""
    return x509.load_pem_x509_certificate(paths.server_certificate.read_bytes()).not_valid_after_utc


def ca_sha256(paths: ServerPaths) -> str:
    """Hex SHA-256 of the CA certificate's DER, as tokens carry it."""
    return certificate_sha256(paths.public_ca.read_bytes())


def add_scientist(paths: ServerPaths, settings: Settings, store: Store, name: str, path: Path) -> None:
    """Enter a data scientist and write the credential to `path` (a new file). Raises `AuthorityError`."""
    if path.exists():
        raise AuthorityError(f"{path}: exists already, and a credential would replace it. Choose another file.")
    key = generate()
    with store.transaction() as session:
        if session.get(Scientist, name) is not None:
            raise AuthorityError(f"a data scientist named {name!r} exists already. Choose another name.")
        session.add(Scientist(name=name, key=public_text(key), key_id=key_id(key), created=time.time()))
        next_number(session, ROSTER_NUMBER)
        add_audit(session, "server", "scientist_added", name=name, key=key_id(key))
        # Written inside: if the file cannot be written, nobody has been entered.
        authority = public_text(authority_key(paths))
        Credential(settings.url, paths.public_ca.read_text(), name, key, authority).save(path)
    publish_roster(paths, settings, store)


def remove_scientist(paths: ServerPaths, settings: Settings, store: Store, name: str) -> None:
    """Take a data scientist off the roster: the credential starts nothing any more, here and on the nodes. Runs that it
    started go on; `run stop` ends them. Raises `AuthorityError`."""
    with store.transaction() as session:
        found = session.get(Scientist, name)
        if found is None:
            known = ", ".join(one.name for one in scientists(session)) or "none"
            raise AuthorityError(f"no data scientist is named {name!r}. There are: {known}.")
        key = found.key_id
        session.delete(found)
        next_number(session, ROSTER_NUMBER)
        add_audit(session, "server", "scientist_removed", name=name, key=key)
    publish_roster(paths, settings, store)


@dataclass(frozen=True)
class Identity:
    """What nodes and data scientists pin: the CA's hash and the roster key."""

    ca_sha256: str
    roster_key: str

    @classmethod
    def of(cls, paths: ServerPaths) -> Identity:
        """Of the server at `paths`."""
        return cls(ca_sha256(paths), public_text(authority_key(paths)))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
