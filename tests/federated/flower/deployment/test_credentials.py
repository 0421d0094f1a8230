"""Certificates and keys, checked by real TLS handshakes and by Flower's own readers."""

import os
import ssl
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedlens[flower]")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
)
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.errors import FedlensError
from fedlens.federated.flower.deployment import credentials
from fedlens.federated.flower.deployment.credentials import (
    Certificates,
    make_certificates,
    make_node_key,
)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def handshake(server: Certificates, trusted: Path, host: str) -> None:
    """A TLS handshake in memory, as strict as Python can be."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server.server, server.server_key)
    client_context = ssl.create_default_context(cafile=trusted)
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client_context.wrap_bio(to_client, to_server, server_hostname=host),
        server_context.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(sides)
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    "host", ["link.example.org", "10.0.0.7", "fd00::7", "localhost", "127.0.0.1", "::1"]
)
def test_the_certificate_covers_its_hosts_and_this_one(tmp_path: Path, host: str) -> None:
    made = make_certificates(tmp_path / "c", ["link.example.org", "10.0.0.7", "fd00::7"])
    handshake(made, made.authority, host)


@pytest.mark.parametrize("host", ["elsewhere.example.org", "10.0.0.8"])
def test_the_certificate_covers_no_other_host(tmp_path: Path, host: str) -> None:
    made = make_certificates(tmp_path / "c", ["link.example.org", "10.0.0.7"])
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(made, made.authority, host)


def test_a_client_that_trusts_another_authority_refuses_the_server(tmp_path: Path) -> None:
    made, other = make_certificates(tmp_path / "c"), make_certificates(tmp_path / "d")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other.authority, "localhost")


def test_private_files_are_readable_by_their_owner_only(tmp_path: Path, no_umask: None) -> None:
    made = make_certificates(tmp_path / "c")
    make_node_key(tmp_path / "node-0")
    for path in (made.authority_key, made.server_key, tmp_path / "node-0"):
        assert mode(path) == 0o600
    assert {path.name for path in made.folder.iterdir()} == {
        *("ca.crt", "ca.key", "server.pem", "server.key")
    }


def test_valid_certificates_are_kept(tmp_path: Path) -> None:
    make_certificates(tmp_path / "c", ["a.org", "b.org"])
    before = contents(tmp_path / "c")
    make_certificates(tmp_path / "c", ["b.org"])
    assert contents(tmp_path / "c") == before


def test_an_uncovered_host_is_named_and_covered_after_renewal(tmp_path: Path) -> None:
    make_certificates(tmp_path / "c", ["a.org"])
    before = contents(tmp_path / "c")
    with pytest.raises(FedlensError, match=r"do not cover b\.org: renew them with .*--renew"):
        make_certificates(tmp_path / "c", ["a.org", "b.org"])
    assert contents(tmp_path / "c") == before
    made = make_certificates(tmp_path / "c", ["a.org", "b.org"], renew=True)
    handshake(made, made.authority, "b.org")
    after = contents(tmp_path / "c")
    assert all(after[name] != before[name] for name in before)


def test_certificates_about_to_expire_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "LIFETIME", timedelta(days=6))
    make_certificates(tmp_path / "c")
    with pytest.raises(FedlensError, match=r"valid only until \d{4}-\d\d-\d\d"):
        make_certificates(tmp_path / "c")
    monkeypatch.undo()
    make_certificates(tmp_path / "c", renew=True)
    make_certificates(tmp_path / "c")


@pytest.mark.parametrize("name", ["ca.crt", "server.pem", "server.key"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_certificates(tmp_path / "c")
    (tmp_path / "c" / name).unlink()
    with pytest.raises(FedlensError, match=f"lack {name}"):
        make_certificates(tmp_path / "c")


def test_a_damaged_certificate_is_an_error(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "c")
    made.server.write_text("nonsense")
    with pytest.raises(FedlensError, match="cannot be read"):
        make_certificates(tmp_path / "c")


def test_certificates_of_another_authority_are_never_replaced(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "c")
    made.authority_key.unlink()  # as if an authority elsewhere had signed them
    before = contents(tmp_path / "c")
    make_certificates(tmp_path / "c")
    with pytest.raises(FedlensError, match="with that authority"):
        make_certificates(tmp_path / "c", renew=True)
    assert contents(tmp_path / "c") == before


def test_an_empty_folder_gets_certificates(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert make_certificates(tmp_path / "c").server.exists()


@settings(max_examples=15, deadline=None)
@given(
    hosts=st.lists(
        st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z]{1,9}\.org", fullmatch=True))
    )
)
def test_certificates_made_for_hosts_cover_them(
    tmp_path_factory: pytest.TempPathFactory, hosts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("hosts") / "c"
    make_certificates(folder, hosts)
    make_certificates(folder, hosts)


def test_flower_reads_the_private_and_the_public_key_of_a_node(tmp_path: Path) -> None:
    make_node_key(tmp_path / "keys" / "node-0")
    private = load_ssh_private_key((tmp_path / "keys" / "node-0").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    public = try_load_public_key(tmp_path / "keys" / "node-0.pub")
    assert public == public_key_to_bytes(private.public_key())


def test_an_existing_key_is_kept_and_a_missing_public_key_restored(tmp_path: Path) -> None:
    make_node_key(tmp_path / "node-0")
    before = contents(tmp_path)
    (tmp_path / "node-0.pub").unlink()
    make_node_key(tmp_path / "node-0")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["another type", "nonsense"])
def test_a_file_that_is_not_a_node_key_is_not_changed(tmp_path: Path, kind: str) -> None:
    other = ed25519.Ed25519PrivateKey.generate()
    wrong = other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "node-0").write_bytes(wrong if kind == "another type" else b"nonsense")
    before = contents(tmp_path)
    with pytest.raises(FedlensError, match="not the key of a node"):
        make_node_key(tmp_path / "node-0")
    assert contents(tmp_path) == before
