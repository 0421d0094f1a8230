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
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(server.server, server.server_key)
    ours = ssl.create_default_context(cafile=trusted)
    ours.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        ours.wrap_bio(back, there, server_hostname=host),
        theirs.wrap_bio(there, back, server_side=True),
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
def test_the_certificate_serves_its_hosts_and_this_one(tmp_path: Path, host: str) -> None:
    made = make_certificates(tmp_path / "c", ["link.example.org", "10.0.0.7", "fd00::7"])
    handshake(made, made.authority, host)


@pytest.mark.parametrize("host", ["elsewhere.example.org", "10.0.0.8"])
def test_the_certificate_serves_no_other_host(tmp_path: Path, host: str) -> None:
    made = make_certificates(tmp_path / "c", ["link.example.org", "10.0.0.7"])
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(made, made.authority, host)


def test_who_trusts_another_authority_refuses_the_server(tmp_path: Path) -> None:
    made, other = make_certificates(tmp_path / "c"), make_certificates(tmp_path / "d")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other.authority, "localhost")


def test_private_files_are_for_their_owner_alone(tmp_path: Path, no_umask: None) -> None:
    made = make_certificates(tmp_path / "c")
    make_node_key(tmp_path / "node-0")
    for path in (made.authority_key, made.server_key, tmp_path / "node-0"):
        assert mode(path) == 0o600
    assert {path.name for path in made.folder.iterdir()} == {
        *("ca.crt", "ca.key", "server.pem", "server.key")
    }


def test_certificates_that_serve_are_kept(tmp_path: Path) -> None:
    make_certificates(tmp_path / "c", ["a.org", "b.org"])
    before = contents(tmp_path / "c")
    make_certificates(tmp_path / "c", ["b.org"])
    assert contents(tmp_path / "c") == before


def test_an_uncovered_host_is_named_and_covered_on_request(tmp_path: Path) -> None:
    make_certificates(tmp_path / "c", ["a.org"])
    before = contents(tmp_path / "c")
    with pytest.raises(FedlensError, match=r"do not cover b\.org: renew them by .*--renew"):
        make_certificates(tmp_path / "c", ["a.org", "b.org"])
    assert contents(tmp_path / "c") == before
    made = make_certificates(tmp_path / "c", ["a.org", "b.org"], renew=True)
    handshake(made, made.authority, "b.org")
    after = contents(tmp_path / "c")
    assert all(after[name] != before[name] for name in before)


def test_certificates_about_to_expire_are_refused(
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


def test_a_damaged_certificate_is_told_of(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "c")
    made.server.write_text("nonsense")
    with pytest.raises(FedlensError, match="cannot be read"):
        make_certificates(tmp_path / "c")


def test_certificates_of_another_authority_are_never_replaced(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "c")
    made.authority_key.unlink()  # as where one's own authority signed them
    before = contents(tmp_path / "c")
    make_certificates(tmp_path / "c")
    with pytest.raises(FedlensError, match="with that authority"):
        make_certificates(tmp_path / "c", renew=True)
    assert contents(tmp_path / "c") == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert make_certificates(tmp_path / "c").server.exists()


@settings(max_examples=15, deadline=None)
@given(
    hosts=st.lists(
        st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z]{1,9}\.org", fullmatch=True))
    )
)
def test_what_was_made_for_hosts_covers_them(
    tmp_path_factory: pytest.TempPathFactory, hosts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("hosts") / "c"
    make_certificates(folder, hosts)
    make_certificates(folder, hosts)


def test_flower_reads_both_halves_of_a_node_key(tmp_path: Path) -> None:
    make_node_key(tmp_path / "keys" / "node-0")
    private = load_ssh_private_key((tmp_path / "keys" / "node-0").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    public = try_load_public_key(tmp_path / "keys" / "node-0.pub")
    assert public == public_key_to_bytes(private.public_key())


def test_a_node_keeps_its_key_and_a_lost_public_half_comes_back(tmp_path: Path) -> None:
    make_node_key(tmp_path / "node-0")
    before = contents(tmp_path)
    (tmp_path / "node-0.pub").unlink()
    make_node_key(tmp_path / "node-0")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["another type", "nonsense"])
def test_what_is_no_node_key_is_left_alone(tmp_path: Path, kind: str) -> None:
    other = ed25519.Ed25519PrivateKey.generate()
    wrong = other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "node-0").write_bytes(wrong if kind == "another type" else b"nonsense")
    before = contents(tmp_path)
    with pytest.raises(FedlensError, match="not the key of a node"):
        make_node_key(tmp_path / "node-0")
    assert contents(tmp_path) == before
