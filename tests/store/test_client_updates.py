from pathlib import Path

import pytest
import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.store.client_updates import KeptUpdates, read_round
from fedlens.store.run_folder import kept_rounds


def vector(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(value))}


def add_rounds(kept: KeptUpdates, rounds: range) -> None:
    for number in rounds:
        for client in (4, 2):
            parameters = vector(100 * number + client)
            kept.add(number, client, parameters, examples=10 + client, start=vector(number))


def test_the_last_rounds_are_kept_and_earlier_ones_removed(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path, rounds=2), range(1, 6))
    assert kept_rounds(tmp_path) == [4, 5]
    kept = read_round(tmp_path, 5)
    assert kept.start["w"].tolist() == [5, 5, 5]
    assert {client: values["w"][0].item() for client, values in kept.clients.items()} == {
        2: 502,
        4: 504,
    }
    assert kept.examples == {2: 12, 4: 14}


def test_a_round_repeated_after_a_kill_leaves_the_same_files(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path, rounds=2), range(1, 5))
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    (tmp_path / "round-000004" / ".partial-client-x").write_text("cut short")
    add_rounds(KeptUpdates(tmp_path, rounds=2), range(3, 5))
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before
    assert not list(tmp_path.rglob(".partial*"))


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path / "updates", rounds=0), range(1, 3))
    assert not list(tmp_path.iterdir())
    assert kept_rounds(tmp_path / "updates") == []


def test_parameters_may_change_after_they_were_added(tmp_path: Path) -> None:
    kept, parameters = KeptUpdates(tmp_path, rounds=1), vector(100)
    kept.add(1, 0, parameters, examples=10, start=vector(0))
    digest = params.digest(parameters)
    parameters["w"].zero_()
    assert params.digest(read_round(tmp_path, 1).clients[0]) == digest


def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path, rounds=1), range(1, 2))
    (tmp_path / "round-000001" / "client-000004.safetensors").write_bytes(b"cut")
    with pytest.raises(FedlensError, match="lost or damaged"):
        read_round(tmp_path, 1)
