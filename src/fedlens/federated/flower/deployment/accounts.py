"""Who may use a SuperLink: holders of the keys in `users/` of a federation's folder.

Flower's SuperLink authenticates nodes by their keys, and accounts by a plugin that only its
enterprise edition has; without one, anybody may submit an app, register a node or read logs. This
plugin accepts a request if it is signed by a registered key: its token names the key, and the time,
which it signs (ECDSA on P-384), so that a token is of no use after a minute.

As a program it is Flower's SuperLink with this plugin: `accounts.py USERS [options of Flower's]`.
"""

import sys
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_ssh_public_key,
)
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

from fedlens.federated.flower.deployment.credentials import read_key

USERS = "users"  # in a federation's folder: the public keys of its users
OWNER = "owner"  # there: the private key of whoever works on this host
PURPOSE = "fedlens-control-1"  # signed with the time: a signature for anything else is not valid
VALID_S = 60.0  # before and after the time that was signed, for clocks differ
CHARACTERS = 1024  # the most that a token has


class SignedRequests:
    """Adds a token, signed now, to every request of a client of the Control API."""

    def __init__(self, private_key: Path) -> None:
        self.key = read_key(private_key)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {token(self.key, time.time())}"
        return call_next(context)


def token(key: ec.EllipticCurvePrivateKey, now: float) -> str:
    """KEY.TIME.SIGNATURE, in the alphabet of URLs."""
    moment = str(int(now))
    signature = key.sign(_signed(moment), ec.ECDSA(hashes.SHA384()))
    return ".".join((_encoded(_der(key.public_key())), moment, _encoded(signature)))


def accepted(text: str, keys: Sequence[ec.EllipticCurvePublicKey], now: float) -> bool:
    """Whether one of the keys signed this token within the last minute."""
    try:
        if len(text) > CHARACTERS or not text.isascii():
            return False
        public, moment, signature = text.split(".")
        if not moment.isdigit() or abs(now - int(moment)) > VALID_S:
            return False
        claimed = load_der_public_key(_decoded(public))
        for key in keys:
            if key == claimed:
                key.verify(_decoded(signature), _signed(moment), ec.ECDSA(hashes.SHA384()))
                return True
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, OverflowError):
        return False
    return False


def public_keys(folder: Path) -> list[ec.EllipticCurvePublicKey]:
    """The keys in a folder's *.pub; files that are not EC keys in OpenSSH's format are no keys."""
    keys = []
    for path in sorted(folder.glob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm):
            continue
        if isinstance(key, ec.EllipticCurvePublicKey):
            keys.append(key)
    return keys


class RegisteredUsers(NoOpControlAuthnPlugin):
    """Flower's account plugin: one account, whose requests are signed by a key of the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Reads the folder at every request, so that a key that was removed is refused at once."""
        tokens = [str(value) for name, value in metadata if name == ACCESS_TOKEN_KEY]
        if len(tokens) != 1 or not accepted(tokens[0], public_keys(self.folder), time.time()):
            return False, None
        return super().validate_tokens_in_metadata(metadata)

    def refresh_tokens(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
        """There is nothing to refresh: every request has a token of its own."""
        del metadata
        return None, None


def _signed(moment: str) -> bytes:
    return f"{PURPOSE} {moment}".encode("ascii")


def _der(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).decode("ascii")


def _decoded(text: str) -> bytes:
    return urlsafe_b64decode(text)


def main() -> None:
    flower: Any = import_module("flwr.superlink.cli.flower_superlink")
    program, users, *options = sys.argv
    sys.argv = [program, *options]
    # Flower's open-source edition has no option that names a plugin.
    flower.load_control_authn_plugin = lambda: RegisteredUsers(Path(users))
    flower.flower_superlink()


if __name__ == "__main__":
    main()
