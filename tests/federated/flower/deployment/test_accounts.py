"""Tokens are accepted from registered keys, now, and from nobody else."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="needs fedlens[flower]")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import ACCESS_TOKEN_KEY

from fedlens.federated.flower.deployment.accounts import (
    VALID_S,
    RegisteredUsers,
    accepted,
    public_keys,
    token,
)
from fedlens.federated.flower.deployment.credentials import make_node_key, read_key

KEY, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
KNOWN = [KEY.public_key()]
NOW = 1_790_000_000.0
TOKEN = token(KEY, NOW)


def test_a_token_is_valid_for_its_minute_alone() -> None:
    for later in (0.0, VALID_S, -VALID_S):
        assert accepted(TOKEN, KNOWN, NOW + later)
    for later in (VALID_S + 2, -VALID_S - 2, 1e9):
        assert not accepted(TOKEN, KNOWN, NOW + later)


def test_another_key_is_refused_also_if_it_claims_to_be_a_registered_one() -> None:
    stranger = token(OTHER, NOW)
    assert not accepted(stranger, KNOWN, NOW)
    assert not accepted(TOKEN, [], NOW)
    claimed = ".".join([TOKEN.split(".")[0], *stranger.split(".")[1:]])
    assert not accepted(claimed, KNOWN, NOW)


@given(st.integers(0, len(TOKEN) - 1), st.characters())
@settings(max_examples=100)
def test_a_changed_token_is_refused(position: int, letter: str) -> None:
    changed = TOKEN[:position] + letter + TOKEN[position + 1 :]
    if changed.replace("=", "") != TOKEN.replace("=", "") and letter.isalnum():
        assert not accepted(changed, KNOWN, NOW + 30)


@given(st.text(max_size=50) | st.builds(".".join, st.lists(st.text(max_size=20), max_size=5)))
@settings(max_examples=100)
def test_any_text_is_refused(text: str) -> None:
    assert not accepted(text, KNOWN, NOW)


def test_the_plugin_reads_the_folder_at_every_request(tmp_path: Path) -> None:
    import time

    make_node_key(tmp_path / "owner")
    (tmp_path / "notes.pub").write_text("no key")
    plugin = RegisteredUsers(tmp_path)
    mine = [(ACCESS_TOKEN_KEY, token(read_key(tmp_path / "owner"), time.time()))]
    assert len(public_keys(tmp_path)) == 1
    assert plugin.validate_tokens_in_metadata(mine)[0]
    assert plugin.validate_tokens_in_metadata([]) == (False, None)
    assert plugin.validate_tokens_in_metadata([*mine, *mine]) == (False, None)
    assert plugin.refresh_tokens(mine) == (None, None)
    (tmp_path / "owner.pub").unlink()
    assert plugin.validate_tokens_in_metadata(mine) == (False, None)
