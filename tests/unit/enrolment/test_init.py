"""What `init` makes, that it does so once, and that the certificates do their work outside of Python too."""

from __future__ import annotations

import ipaddress
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from fedward_common.credential import Credential
from fedward_common.errors import ConfigError
from fedward_common.signing import load_private, public_text
from fedward_server import authority
from fedward_server.authority import AuthorityError, init, open_server, publish_roster, write_server_certificate
from fedward_server.paths import ServerPaths
from fedward_server.settings import Settings, load_settings, make_settings, write_settings
from fedward_server.store import StoreError


@pytest.fixture
def paths(tmp_path: Path) -> ServerPaths:
    made = ServerPaths(tmp_path / "server")
    init(made, make_settings(name="fl.example.org", sans=["10.1.2.3", "::1", "other.example.org"]))
    return made


def contents(paths: ServerPaths) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in paths.root.rglob("*") if path.is_file()}


def test_a_second_init_changes_nothing(paths: ServerPaths) -> None:
    before = contents(paths)
    assert not init(paths, make_settings(name="something.else"))
    assert contents(paths) == before


@pytest.mark.parametrize("step", ["make_ca", "write_settings", "write_server_certificate", "add_scientist"])
def test_an_init_that_was_cut_off_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    paths = ServerPaths(tmp_path / "server")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(authority, step, crash)
        init(paths, make_settings(name="localhost"))
    for act in (lambda: init(paths, make_settings(name="localhost")), lambda: open_server(paths)):
        with pytest.raises(AuthorityError, match=r"was cut off here.*delete the directory"):
            act()


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(AuthorityError, match="not empty"):
        init(ServerPaths(tmp_path), make_settings(name="localhost"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_no_server_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedward server init"):
        open_server(ServerPaths(tmp_path / "nothing"))


def test_the_certificates(paths: ServerPaths) -> None:
    server, ca = x509.load_pem_x509_certificates(paths.server_certificate.read_bytes())
    assert ca == x509.load_pem_x509_certificate(paths.ca_certificate.read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example.org", "other.example.org", "localhost"}
    addresses = {ipaddress.ip_address(text) for text in ("10.1.2.3", "::1", "127.0.0.1")}
    assert set(names.get_values_for_type(x509.IPAddress)) == addresses
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    now = datetime.now(UTC)
    assert timedelta(days=364) < server.not_valid_after_utc - now < timedelta(days=366)
    assert timedelta(days=3640) < ca.not_valid_after_utc - now < timedelta(days=3660)
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_openssl_agrees(paths: ServerPaths) -> None:
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "other.example.org"]
    files = ["-CAfile", str(paths.public_ca), str(paths.server_certificate)]
    assert subprocess.run([*command, *files], capture_output=True, text=True).stdout.endswith("OK\n")


def test_renewal_keeps_key_and_ca(paths: ServerPaths) -> None:
    before = contents(paths)
    write_server_certificate(paths, load_settings(paths))
    after = contents(paths)
    assert [path for path in after if after[path] != before[path]] == [paths.server_certificate]
    # Certificate and key still belong together.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(paths.server_certificate, paths.server_key)


def test_the_first_credential(paths: ServerPaths) -> None:
    credential = Credential.load(paths.credential)
    assert (credential.server, credential.name) == ("https://fl.example.org:8443", "admin")
    assert credential.ca == paths.ca_certificate.read_text()
    assert credential.authority == public_text(load_private(paths.roster_key))
    assert "PRIVATE" not in repr(credential)


def test_a_second_data_scientist(paths: ServerPaths, tmp_path: Path) -> None:
    settings, store = open_server(paths)
    authority.add_scientist(paths, settings, store, "bob", tmp_path / "bob.json")
    with pytest.raises(AuthorityError, match="exists already"):
        authority.add_scientist(paths, settings, store, "bob", tmp_path / "again.json")
    with pytest.raises(AuthorityError, match="would replace it"):
        authority.add_scientist(paths, settings, store, "eve", tmp_path / "bob.json")
    roster = publish_roster(paths, settings, store)["roster"]
    assert '"version":2' in roster and public_text(Credential.load(tmp_path / "bob.json").key) in roster
    assert "eve" not in roster
    store.close()


def test_a_store_of_another_version(paths: ServerPaths) -> None:
    _, store = open_server(paths)
    with store.transaction() as session:
        session.connection().exec_driver_sql("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(StoreError, match="version 99"):
        open_server(paths)


def test_settings_come_back_as_written(paths: ServerPaths) -> None:
    settings = make_settings(name="a.b", sans=["c", "1.2.3.4"], fleet_port=1, service_port=2, log="json", max_runs=7)
    write_settings(paths, settings)
    assert load_settings(paths) == settings


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "https://a"}, r"name = 'https://a': must be a host name or an IP address"),
        ({"name": "a b"}, "host name"),
        ({"name": "a", "sans": ["*.b"]}, r"sans\.0"),
        ({"name": "a", "fleet_port": 0}, "fleet_port = 0"),
        ({"name": "a", "fleet_port": 8443}, "must differ"),
        ({"name": "a", "max_run": 3}, r"max_run = 3: unknown key; the keys are name, .*max_runs"),
        ({"name": "a", "log": "xml"}, "log = 'xml'"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_settings(**fields)


def test_ipv6_addresses_are_bracketed() -> None:
    assert Settings(name="::1").url == "https://[::1]:8443"


def test_a_data_scientist_is_taken_off_the_roster(paths: ServerPaths, tmp_path: Path) -> None:
    settings, store = open_server(paths)
    authority.add_scientist(paths, settings, store, "bob", tmp_path / "bob.json")
    bob = public_text(Credential.load(tmp_path / "bob.json").key)
    with pytest.raises(AuthorityError, match=r"no data scientist is named 'eve'\. There are: admin, bob\."):
        authority.remove_scientist(paths, settings, store, "eve")
    assert bob in paths.roster.read_text()
    authority.remove_scientist(paths, settings, store, "bob")
    roster = paths.roster.read_text()
    assert bob not in roster and '\\"version\\":3' in roster
    # The name may be given again, with another key.
    authority.add_scientist(paths, settings, store, "bob", tmp_path / "bob-2.json")
    assert bob not in paths.roster.read_text()
    store.close()
